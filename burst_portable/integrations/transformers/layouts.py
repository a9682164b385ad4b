"""Choose the layout of a model's sequences: a named one, or the one with the shortest predicted time."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypedDict

import torch
from transformers import PreTrainedModel

from burst_portable.errors import InputError, UnsupportedError, unknown_name
from burst_portable.layout import NAMES, OF_MASKS, Layout, make_layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh
from burst_portable.runtime.mesh_plans import strategy_and_call
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import plan
from burst_portable.utils.cache import Cache

_SIZES = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size"})


class Layouts:
    """The layouts of sequences, by length and documents; equal on all ranks.

    The machine is queried once, in the constructor. A data loader's worker, which must not use a device, then computes
    the same layouts. "auto" optimizes the mask with the most visible pairs among the model's layers.
    """

    def __init__(self, name: str, model: PreTrainedModel, mesh: Mesh, strategy: Strategy | str, kernel: str) -> None:
        if name not in ("auto", *NAMES):
            raise unknown_name("layout", name, ("auto", *NAMES))
        self.name, self._ranks, self._config = name, mesh.size, model.config
        self._cache: Cache[tuple[int, tuple[int, ...] | None], Layout] = Cache(64)
        if name == "auto" and mesh.size > 1:
            like = next(model.parameters())
            if like.is_meta:
                next_step = "parallelize it when its weights are on a device, or name a layout"
                raise InputError('layout="auto" needs the model\'s device', got="a model on meta", next_step=next_step)
            dtype = torch.get_autocast_dtype(like.device.type) if like.dtype is torch.float32 else like.dtype
            sizes = sizes_of(model.config)
            self._strategy, _ = strategy_and_call(mesh, strategy, like.device.type, **sizes, dtype=dtype, kernel=kernel)

    def of(self, length: int, cu_seqlens: tuple[int, ...] | None) -> Layout:
        """Return the layout of `length` tokens with documents at `cu_seqlens`."""
        if self.name != "auto" or self._ranks == 1:
            return _named_layout("zigzag" if self.name == "auto" else self.name, length, self._ranks, cu_seqlens)
        found = self._cache.get((length, cu_seqlens))
        return found or self._cache.keep((length, cu_seqlens), self._fastest(length, cu_seqlens))

    def _fastest(self, length: int, cu_seqlens: tuple[int, ...] | None) -> Layout:
        masks = masks_of_layers(self._config) if cu_seqlens is None else [_packed(length, cu_seqlens)]
        most = max(masks, key=lambda mask: mask.num_pairs(length))
        sizes, ranks = sizes_of(self._config), self._ranks
        return plan(seq_len=length, ranks=ranks, **sizes, mask=most, strategy=self._strategy, layout="auto").layout


class Sizes(TypedDict):
    """Query heads, K/V heads and head sizes of an attention."""

    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int


def sizes_of(config: Any) -> Sizes:
    """Return the sizes of a decoder's attention. Raise the errors of `check_one_size`."""
    check_one_size(config)
    heads = config.num_attention_heads
    if (nope := getattr(config, "qk_nope_head_dim", None)) is not None:  # MLA expands K and V to all heads
        head_dim = nope + config.qk_rope_head_dim
        return {"heads": heads, "kv_heads": heads, "head_dim": head_dim, "v_head_dim": config.v_head_dim}
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}


def check_one_size(config: Any) -> None:
    """Raise `UnsupportedError` if layers have different sizes, or a config describes several models."""
    differ = _SIZES.intersection(getattr(config, "per_layer_attributes", None) or ())
    if differ or config.get_text_config() is not config:
        got = f"layers that differ in {' and '.join(sorted(differ))}" if differ else "several models"
        next_step = "pass the name of a layout to parallelize(model, mesh, layout=...)"
        what = f"the config of {config.model_type} has no single attention size"
        raise UnsupportedError(what, got=got, next_step=next_step)


def masks_of_layers(config: Any) -> list[Mask]:
    """Return the mask of every layer of a decoder's config."""
    window = getattr(config, "sliding_window", None)
    kind = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [kind] * config.num_hidden_layers
    masks = {"sliding_attention": Mask.window(window - 1)} if window else {}
    return [masks.get(kind) or Mask.causal() for kind in kinds]


def _packed(length: int, cu_seqlens: tuple[int, ...]) -> Mask:
    mask = Mask.documents(cu_seqlens)
    mask.check_lengths(length, length)
    if cu_seqlens[-1] != length:
        raise InputError("cu_seqlens end before the sequence", got=cu_seqlens[-1], allowed=length)
    return mask


@lru_cache(maxsize=256)
def _named_layout(name: str, length: int, ranks: int, cu_seqlens: tuple[int, ...] | None) -> Layout:
    # A sequence without documents is one document.
    mask = _packed(length, (0, length) if cu_seqlens is None else cu_seqlens)
    return make_layout(name, length, ranks, mask if name in OF_MASKS else None)
