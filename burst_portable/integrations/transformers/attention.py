"""Define the attention function that Transformers calls in a parallelized model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn

from burst_portable.api import attention
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.masks import Band, DeferredMask, mask_of
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.utils.torch_modes import never_compiled

ATTRIBUTE = "_burst_portable"
"""Attribute of each module of a parallelized model with its `ModelState`: models on two meshes have one each."""

# Arguments that do not change the attention: the mask already contains them (windows, positions), or they are for other
# layers (the loss, the router). Any other argument is an error.
_IGNORED = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "layer_idx"),
        *("sliding_window", "is_causal", "window_size"),
        *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep"),
        *("output_hidden_states", "output_router_logits", "return_dict"),
    }
)


@dataclass(frozen=True)
class CallSequence:
    """The sequence of one call.

    Attributes:
        seq_len: Number of tokens of the unsharded sequence.
        layout: The layout of its tokens over ranks.
        cu_seqlens: Cumulative lengths of packed documents, or None.
        padded: Whether rows end with padding.
    """

    seq_len: int
    layout: Layout
    cu_seqlens: tuple[int, ...] | None = None
    padded: bool = False


class ModelState(Protocol):
    """State of a parallelized model that its attention needs. Every module of the model has a reference to it."""

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
    """Compute the attention of this rank's queries over the unsharded sequence.

    Args:
        module: The attention layer of the model.
        query: Queries of shape ``[B, Hq, S, D]``.
        key: Keys of shape ``[B, Hkv, S, D]``, not repeated for grouped heads.
        value: Values of shape ``[B, Hkv, S, Dv]``.
        attention_mask: The `DeferredMask` that `create_mask` returned.
        dropout: Must be 0.
        scaling: Factor of the scores. Default: 1 / sqrt(D).
        softcap: Scores become ``softcap * tanh(score / softcap)``.
        s_aux: Attention sinks, one logit per query head.
        others: Further arguments of Transformers. Only those in `_IGNORED` may be set.

    Returns:
        Output of shape ``[B, S, Hq, Dv]``, and None instead of weights.

    Raises:
        InputError: Before any communication, if the layer runs outside of a parallelized model.
        UnsupportedError: Before any communication, if the mask or an argument is not supported.
    """
    state: ModelState | None = getattr(module, ATTRIBUTE, None)
    if state is None:
        raise InputError(
            f"{type(module).__name__} is not part of a parallelized model, but shares its config; give each model its "
            'own copy of the config, or call set_attn_implementation("sdpa") on this model'
        )
    state.attending = True
    try:
        sequence = _sequence(state, attention_mask)
        _check(sequence, attention_mask.band, dropout, query, key, others)
        mask = mask_of(attention_mask.band, sequence.seq_len, sequence.cu_seqlens)
    except Exception as error:
        broadcast_error(state.mesh, error, query)
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


def _sequence(state: ModelState, mask: Any) -> CallSequence:
    """Return the sequence of a mask. The first use, in the forward pass that created it, binds it to the call."""
    if not isinstance(mask, DeferredMask):
        raise UnsupportedError(
            "the mask did not come from transformers' mask functions",
            got="None" if mask is None else type(mask).__name__,
            next_step="if a hook removed it (accelerate adds one for cp_size), use no other context parallelism"
            if mask is None
            else "pass no attention_mask; pass cu_seqlens of packed documents to handle.shard",
        )
    if mask.sequence is None:
        if state.call is None:
            raise InputError("a layer ran outside its model's forward: call the model that was parallelized")
        mask.sequence = state.call
    sequence: CallSequence = mask.sequence
    return sequence


def _check(
    sequence: CallSequence, band: Band, dropout: float, query: Tensor, key: Tensor, others: dict[str, Any]
) -> None:
    """Raise `UnsupportedError` for arguments that would make the result differ from one device's."""
    if sequence.padded and band.lo < 0:
        raise UnsupportedError(
            "padding with a mask that sees later tokens",
            got=band,
            next_step="pass sequences without padding, or packed documents (see ShardedModel.shard)",
        )
    if dropout:
        raise UnsupportedError(
            "attention dropout is not supported", got=dropout, allowed=0, next_step="set attention_dropout=0"
        )
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(
            "queries and keys have different lengths, as with a cache or cross attention",
            got=f"{query.shape[2]} and {key.shape[2]}",
        )
    unknown = [name for name, x in others.items() if name not in _IGNORED and x is not None and x is not False]
    if unknown:
        raise UnsupportedError(
            "unknown arguments of the attention, which may change its result",
            got=", ".join(sorted(unknown)),
        )
