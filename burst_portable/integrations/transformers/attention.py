"""Define the attention function that Transformers calls in a parallelized model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.api import attention
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.bands import Band, masks_of
from burst_portable.integrations.transformers.call_sequence import CallSequence
from burst_portable.integrations.transformers.deferred_mask import DeferredMask
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.sharding import local_position_ids
from burst_portable.utils.torch_modes import never_compiled

NAME = "burst_portable"
"""Name of our attention and mask functions in Transformers' interfaces."""

ATTRIBUTE = "_burst_portable"
"""Attribute of each module of a parallelized model with its `ShardedModel`: models on two meshes have one each."""

SCALES_BY_ROW = "_burst_scales_by_row"
"""Attribute of each attention module whose queries `attend` scales (see `global_positions`)."""

DOCUMENTS = "recurrent_documents"
"""Argument of a call that models pass on to their layers: documents of this rank, for `recurrent_states`."""

# Arguments that do not change the attention: the mask already contains them (windows, positions), or they are for other
# layers (the loss, the router). Any other argument is an error.
_IGNORED = frozenset(
    {
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "layer_idx"),
        *("sliding_window", "is_causal", "window_size"),
        *("labels", "shift_labels", "num_items_in_batch", "logits_to_keep"),
        DOCUMENTS,
        *("output_hidden_states", "output_router_logits", "return_dict"),
    }
)


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
    """Compute attention over the unsharded sequence. Return the output ``[B, S, Hq, Dv]``, and None for its weights.

    `query` is ``[B, Hq, S, D]``, `key` and `value` have their own number of heads, `attention_mask` is the result of
    `create_mask`, and `s_aux` are attention sinks. Unsupported arguments raise an error before any communication.
    """
    state: Any = getattr(module, ATTRIBUTE, None)  # of a `ShardedModel`, whose module imports this one
    if state is None:
        raise InputError(
            f"{type(module).__name__} is not part of a parallelized model, but shares its config; give each model its "
            'own copy of the config, or call set_attn_implementation("sdpa") on this model'
        )
    state.attending = True
    try:
        sequence = _sequence(state, attention_mask)
        _check(sequence, attention_mask.band, query, key, others)
        _check_causal(module, attention_mask.band, others.get("is_causal"), reads_flag=state.plain_attention != "eager")
        if dropout:
            _check_heads(state.model, query)
        masks = masks_of(attention_mask.band, sequence, query.shape[0])
    except Exception as error:
        broadcast_error(state.mesh, error, query)
        raise
    if hasattr(module, SCALES_BY_ROW) and not module.use_rope:
        query = _scaled_by_row(module, query, state.mesh, sequence)
    parts = [x.transpose(1, 2).chunk(len(masks)) for x in (query, key, value)]
    options = {
        "mesh": state.mesh,
        "strategy": state.strategy,
        "layout": sequence.layout,
        "seq_len": sequence.seq_len,
        "scale": scaling,
        "softcap": softcap,
        "sinks": s_aux,
        "kernel": state.kernel,
        "dropout_p": dropout,
    }
    rows = []
    for i, (*part, mask) in enumerate(zip(*parts, masks, strict=True)):
        seed = state.dropout.seed_of(sequence.dropout_seed, module, i) if dropout else None
        rows.append(attention(*part, mask=mask, dropout_seed=seed, **options))
    out = rows[0] if len(rows) == 1 else torch.cat(rows)
    state.attended, state.attending = state.attended + 1, False
    state.attention_modules.add(id(module))
    return out, None


def _scaled_by_row(module: Any, query: Tensor, mesh: Mesh, sequence: CallSequence) -> Tensor:
    """Return queries ``[B, Hq, S, D]`` scaled by their row in the unsharded sequence, as Llama 4 does it by its own."""
    rows = local_position_ids(mesh, seq_len=sequence.seq_len, layout=sequence.layout, device=query.device)
    steps = torch.floor((rows.float() + 1.0) / float(module.floor_scale))
    scale = torch.log1p(steps) * float(module.attn_scale) + 1.0
    return (query * scale.view(-1, 1)).to(query.dtype)


def _sequence(state: Any, mask: Any) -> CallSequence:
    """Return the sequence of a mask. The first use, in the forward pass that created it, binds it to the call."""
    if not isinstance(mask, DeferredMask):
        raise _unknown_mask(mask)
    if mask.sequence is None:
        if state.call is None:
            raise InputError("a layer ran outside its model's forward: call the model that was parallelized")
        mask.sequence = state.call
    return mask.sequence


def _unknown_mask(mask: Any) -> UnsupportedError:
    if mask is None:
        what = "the mask did not come from transformers' mask functions"
        next_step = "if a hook removed it (accelerate adds one for cp_size), use no other context parallelism"
        return UnsupportedError(what, got="None", next_step=next_step)
    return UnsupportedError(
        "the model makes its attention mask itself, without transformers' mask functions, as LayoutLM does",
        got=type(mask).__name__,
        allowed="models that call create_causal_mask, create_bidirectional_mask and the like",
        next_step="docs/tried_models.md lists models that are supported",
    )


def _check(sequence: CallSequence, band: Band, query: Tensor, key: Tensor, others: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for arguments that would make the result differ from one device's."""
    if sequence.padded and band.lo < 0:
        what = "padding in a layer whose tokens attend to later ones, and that has no is_causal=False"
        next_step = "leave out attention_mask, and pass cu_seqlens in which the padding of each row is a document"
        raise UnsupportedError(what, got=band, next_step=next_step)
    if query.shape[2] != key.shape[2]:
        what = "queries and keys have different lengths, as with a cache or cross attention"
        raise UnsupportedError(what, got=f"{query.shape[2]} and {key.shape[2]}")
    unknown = [name for name, x in others.items() if name not in _IGNORED and x is not None and x is not False]
    if unknown:
        what = "the model passed unknown arguments to its attention, whose result may depend on them"
        next_step = "leave them out of the call of the model, which passes on what it does not know"
        if "label_smoothing" in unknown:
            next_step = "Transformers' losses ignore it: pass label_smoothing_factor to TrainingArguments, or compute "
            next_step += "the loss from the logits"
        raise UnsupportedError(what, got=", ".join(sorted(unknown)), next_step=next_step)


def _check_causal(module: nn.Module, band: Band, argument: bool | None, *, reads_flag: bool) -> None:
    """Raise `UnsupportedError` for a layer whose is_causal contradicts its mask.

    On one device, Transformers then leaves out a causal mask, if it creates none for rows without padding. It always
    creates one if tokens of a group attend to each other (PaliGemma). In place of a mask in which each token attends to
    all, it attends causally, unless its attention does not read the flag.

    Args:
        module: The layer.
        band: Its mask.
        argument: The flag that the model passes to its attention. None: that of the layer.
        reads_flag: Whether the attention of one device reads the flag, as all but "eager" do.
    """
    is_causal = getattr(module, "is_causal", True) if argument is None else argument
    if reads_flag and band == Band() and is_causal is not False:
        what, got = "is_causal of a layer whose tokens attend to all tokens is not False", type(module).__name__
        next_step = "set is_causal = False on each attention layer, or config.is_causal = False"
        raise UnsupportedError(what, got=got, next_step=next_step)
    if band.lo >= 0 and band.blocks is None and is_causal is False:
        what, got = "is_causal=False of a layer whose mask is causal", type(module).__name__
        next_step = "set config.is_causal = False before the model is called, which the mask follows too"
        raise UnsupportedError(what, got=got, next_step=next_step)


def _check_heads(model: Any, query: Tensor) -> None:
    """Raise `UnsupportedError` for dropout if tensor parallelism divides heads: each part would drop the same ones."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)  # not all models have it
    if isinstance(heads, int) and query.shape[1] < heads:
        what, got = "attention dropout with tensor parallelism", f"{query.shape[1]} of {heads} heads"
        raise UnsupportedError(what, got=got, next_step="set attention_dropout=0")
