"""Drop attention weights by global position on one device: the reference of `burst-portable run --dropout`.

A call of a parallelized model takes one number from torch's generator, from which each layer derives its seed. The
reference takes the same numbers. It computes attention by its definition, with the same weights dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.layers.dropout_streams import DropoutStreams
from burst_portable.integrations.transformers.models.model_parts import text_model_of
from burst_portable.kernels.dropout import weight_factors
from burst_portable.planning.call import Dropout

NAME = "burst_portable_run_reference"
"""Name under which transformers finds the attention of the reference."""
_ATTRIBUTE = "_burst_run_reference"


def set_dropout(config: Any, probability: float) -> None:
    """Set the probability of attention dropout in a config.

    Raises:
        InputError: If the config has no such setting.
    """
    if not hasattr(config, "attention_dropout"):
        got = f"a config of {config.model_type}"
        raise InputError("--dropout needs a model with attention_dropout in its config", got=got)
    config.attention_dropout = probability


def check_dropout_is_used(model: nn.Module, probability: float) -> None:
    """Raise `UnsupportedError` if no layer of a model has the dropout of its config: nothing would be dropped."""
    if not any(getattr(module, "attention_dropout", None) == probability for module in model.modules()):
        got = type(model).__name__
        raise UnsupportedError("the layers of the model do not read attention_dropout", got=got)


class ReferenceDropout:
    """Attention of one model on one device, with the weights dropped that the ranks drop.

    Args:
        model: The model. Its attention is replaced.
    """

    def __init__(self, model: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        text = text_model_of(model)
        self._streams = DropoutStreams(text, 0)
        self._seed: int | None = None
        for module in text.modules():
            setattr(module, _ATTRIBUTE, self)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, eager_mask)
        model.set_attn_implementation(NAME)

    def seed_of(self, layer: nn.Module) -> int | None:
        """Return the seed of a layer in the running call, also while it is recomputed; None if nothing is dropped."""
        return self._streams.seed_of(self._seed, layer)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._seed = self._streams.begin()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._streams.end()


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention of [B, H, S, D] as [B, S, H, D]. The sharded model has refused what `others` may change."""
    reference: ReferenceDropout = getattr(module, _ATTRIBUTE)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = checkpoint(  # scores are recomputed, not stored for each layer
            _plain, query, key, value, attention_mask, s_aux, scale, softcap, dropout, reference.seed_of(module),
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
    probability: float,
    seed: int | None,
) -> Tensor:
    """Compute softmax(Q K^T + mask) V in at least float32, with weights dropped by position."""
    dtype, groups = query.dtype, query.shape[1] // key.shape[1]
    wide = torch.promote_types(dtype, torch.float32)
    query, key, value = (x.to(wide) for x in (query, key, value))
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask[..., : key.shape[2]]
    if sinks is not None:
        column = sinks.to(wide).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    if probability and seed is not None:
        batch, heads, rows, _ = query.shape
        positions = torch.arange(rows, device=query.device)
        factors = weight_factors(Dropout(probability, seed=seed), positions, positions, batch, heads)
        weights = weights * factors.to(wide)
    return (weights @ value).to(dtype)
