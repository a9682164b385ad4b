"""The attention function that transformers calls in a parallelized model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from burst_portable.api import attention
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.masks import Band, Wanted, mask_of
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.utils.torch_modes import never_compiled

ATTRIBUTE = "_burst_portable"
"""Where a module of a parallelized model keeps its `ModelState`: so two models with two meshes live in one process."""

# What reaches an attention function and changes nothing about the attention itself: the mask already says it
# (windows, positions), or it is meant for other layers (the loss, the router). Anything else is refused.
_HARMLESS = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "layer_idx"),
        *("sliding_window", "is_causal", "window_size"),
        *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep"),
        *("output_hidden_states", "output_router_logits", "return_dict"),
    }
)


@dataclass(frozen=True)
class CallSequence:
    """One call's sequence: how long, cut how, where its packed documents end, whether its rows do with padding."""

    seq_len: int
    layout: Layout
    cu_seqlens: tuple[int, ...] | None = None
    padded: bool = False


class ModelState(Protocol):
    """What the attention of a model needs to know; kept by every module of the model."""

    mesh: Mesh
    strategy: Any
    kernel: str
    call: CallSequence | None
    attended: int
    attending: bool


@never_compiled("plans, transports and hooks are not graphs")
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention over the whole sequence, from the rows of this rank.

    Args:
        query: ``[B, Hq, S, D]``; key, value: ``[B, Hkv, S, D]``, never repeated.
        attention_mask: the `Wanted` that our mask function made.

    Returns:
        ``[B, S, Hq, Dv]``, and no weights.

    Raises:
        InputError, UnsupportedError: before anything is sent; the other ranks are told.
    """
    state: ModelState | None = getattr(module, ATTRIBUTE, None)
    if state is None:
        raise InputError(
            f"{type(module).__name__} belongs to no parallelized model, but its config asks for this attention: it is "
            "that of a parallelized model, or a copy; give each model its own copy before, or call "
            'set_attn_implementation("sdpa") on this one'
        )
    state.attending = True
    try:
        sequence = _sequence(state, attention_mask)
        _refuse(sequence, attention_mask.band, dropout, query, key, others)
        mask = mask_of(attention_mask.band, sequence.seq_len, sequence.cu_seqlens)
    except Exception as refusal:
        broadcast_error(state.mesh, refusal, query)
        raise
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask=mask,
        mesh=state.mesh,
        strategy=state.strategy,
        layout=sequence.layout,
        seq_len=sequence.seq_len,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        kernel=state.kernel,
    )
    state.attended, state.attending = state.attended + 1, False
    return out, None


def _sequence(state: ModelState, wanted: Any) -> CallSequence:
    """The sequence that a mask belongs to: bound at its first use, in the forward pass that made it."""
    if not isinstance(wanted, Wanted):
        raise UnsupportedError(
            "the mask did not come from transformers' mask functions",
            got="none" if wanted is None else type(wanted).__name__,
            next_step="pass no attention_mask; packed documents are named when sharding",
        )
    if wanted.sequence is None:
        if state.call is None:
            raise InputError("a layer ran outside its model's forward: call the model that was parallelized")
        wanted.sequence = state.call
    sequence: CallSequence = wanted.sequence
    return sequence


def _refuse(
    sequence: CallSequence, band: Band, dropout: float, query: Tensor, key: Tensor, others: dict[str, Any]
) -> None:
    if sequence.padded and band.lo < 0:
        raise UnsupportedError(
            "padding under a mask that sees later tokens",
            got=band,
            next_step="pass sequences without padding, or packed documents (see ShardedModel.shard)",
        )
    if dropout:
        raise UnsupportedError(
            "attention dropout over ranks", got=dropout, allowed=0, next_step="set attention_dropout=0"
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "queries and keys of different lengths: a cache or cross attention",
            got=f"{query.shape[2]} and {key.shape[2]}",
        )
    unknown = [name for name, x in others.items() if name not in _HARMLESS and x is not None and x is not False]
    if unknown:
        raise UnsupportedError(
            "the attention got arguments that may change its result, and that we do not know",
            got=", ".join(sorted(unknown)),
        )
