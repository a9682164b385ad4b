"""Define the attention and mask functions that Transformers calls in a parallelized model.

Transformers describes a mask as a function of (batch, head, q, k), composed of a few functions. They are recognized by
their code and converted to `Mask`; other functions raise an error, so that no part of a mask is ignored. A
`DeferredMask` replaces the attention mask in the model, so there is never a tensor of queries x keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from operator import and_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import masking_utils

from burst_portable.api import attention
from burst_portable.errors import InputError, ShapeError, UnsupportedError
from burst_portable.layout import Layout
from burst_portable.mask import UNBOUNDED, Mask, Region
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import broadcast_error
from burst_portable.sharding import local_position_ids
from burst_portable.utils.torch_modes import never_compiled

NAME = "burst_portable"
"""Name of our attention and mask functions in Transformers' interfaces."""

ATTRIBUTE = "_burst_portable"
"""Attribute of each module of a parallelized model with its `ModelState`: models on two meshes have one each."""

SCALES_BY_ROW = "_burst_scales_by_row"
"""Attribute of each attention module whose queries `attend` scales (see `global_positions`)."""

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


class CallSequence(NamedTuple):
    """The sequence of one call."""

    seq_len: int  # of the unsharded sequence
    layout: Layout
    cu_seqlens: tuple[int, ...] | None = None  # of packed documents
    padded: bool = False  # whether rows end with padding
    lengths: tuple[int, ...] | None = None  # tokens of each row without its padding, if images attend to later tokens
    dropout_seed: int | None = None  # see `dropout_streams`


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
        _check_causal(module, attention_mask.band, others.get("is_causal"))
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
    return mask.sequence


def _check(sequence: CallSequence, band: Band, query: Tensor, key: Tensor, others: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for arguments that would make the result differ from one device's."""
    if sequence.padded and band.lo < 0:
        next_step = "pass sequences without padding, or packed documents (see ShardedModel.shard)"
        raise UnsupportedError("padding with a mask that sees later tokens", got=band, next_step=next_step)
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


def _check_causal(module: nn.Module, band: Band, argument: bool | None) -> None:
    """Raise `UnsupportedError` if a layer with a causal mask was told that it is not causal.

    On one device, Transformers then leaves such a mask out, if it creates none for rows without padding.
    """
    is_causal = getattr(module, "is_causal", True) if argument is None else argument
    if band.lo >= 0 and is_causal is False:
        what, got = "is_causal=False of a layer whose mask is causal", type(module).__name__
        next_step = "set config.is_causal = False before the model is called, which the mask follows too"
        raise UnsupportedError(what, got=got, next_step=next_step)


def _check_heads(model: Any, query: Tensor) -> None:
    """Raise `UnsupportedError` for dropout if tensor parallelism divides heads: each part would drop the same ones."""
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)  # not all models have it
    if isinstance(heads, int) and query.shape[1] < heads:
        what, got = "attention dropout with tensor parallelism", f"{query.shape[1]} of {heads} heads"
        raise UnsupportedError(what, got=got, next_step="set attention_dropout=0")


_PLACEHOLDER = torch.zeros(1, 1, dtype=torch.int64)


Run = tuple[int, int, int]
"""Tokens [start, stop) of a row that belong to a group, for example to one image."""


@dataclass(frozen=True)
class Band:
    """lo <= q - k <= hi, within chunks of `chunk` tokens: the general form of the supported masks of Transformers.

    `blocks`: For each row of the batch, the runs of groups whose tokens also see each other if q - k <= `blocks_hi`.
    """

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    chunk: int | None = None
    blocks: tuple[tuple[Run, ...], ...] | None = None
    blocks_hi: int = UNBOUNDED

    def __and__(self, other: Band) -> Band:
        if self.blocks is None and other.blocks is not None:
            return other & self
        if self.blocks is not None:
            if other.blocks is not None or other.lo > -UNBOUNDED or other.chunk is not None:
                raise UnsupportedError("tokens that see each other, within a second mask", got=other)
            return replace(self, hi=min(self.hi, other.hi), blocks_hi=min(self.blocks_hi, other.hi))
        chunks = {c for c in (self.chunk, other.chunk) if c is not None}
        if len(chunks) > 1:
            raise UnsupportedError("a mask with two chunk sizes", got=sorted(chunks))
        return Band(max(self.lo, other.lo), min(self.hi, other.hi), chunks.pop() if chunks else None)


class DeferredMask:
    """Placeholder that replaces the attention mask between the model and our attention function.

    The attention of the first layer binds it to the sequence of its call. A recomputation (gradient checkpointing)
    gets the same object as an argument, and so the same sequence, whatever calls the model had since.
    """

    def __init__(self, band: Band) -> None:
        self.band = band
        self.sequence: CallSequence | None = None

    def __repr__(self) -> str:
        return f"DeferredMask({self.band})"

    def prepared(self, tokens: int) -> PreparedMask:
        """Return this mask as an argument of the text model, if the model around it creates masks."""
        return PreparedMask(self.band, tokens)

    def __getitem__(self, index: Any) -> DeferredMask:
        """Return this object for all rows and columns (Gemma 4 slices its mask). Raise `UnsupportedError` for less."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(part not in (slice(None), slice(0, None), ...) for part in parts):
            raise UnsupportedError("the model uses a part of its mask, whose rows would be those of a shard", got=index)
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise `UnsupportedError`: the model uses its mask as a tensor."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError("the model computes with its mask, which is not a tensor here", got=f"mask.{name}")


class PreparedMask(DeferredMask):
    """Mask that a text model gets as an argument and passes to Transformers' mask functions, which return it.

    They read the shape of a mask of padding, so it has one, ``[1, S]``.
    """

    ndim = 2

    def __init__(self, band: Band, tokens: int) -> None:
        super().__init__(band)
        self.shape = (1, tokens)

    def to(self, *_: Any, **__: Any) -> PreparedMask:
        """Return this object."""
        return self


@never_compiled("plans, transports and hooks are not graphs")
def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | DeferredMask | None = None,
    **_: Any,
) -> DeferredMask:
    """Return the placeholder for a mask. Transformers' `AttentionMaskInterface` calls this function."""
    if isinstance(attention_mask, DeferredMask):
        return attention_mask
    if attention_mask is not None and not bool(attention_mask.all()):  # some models pass a mask of ones
        next_step = "pass the mask to handle.shard, or pack documents (see ShardedModel.shard)"
        raise UnsupportedError("a padding mask reached a sharded attention", next_step=next_step)
    # A static cache passes its offset as a tensor.
    if q_length != kv_length or bool(q_offset != 0) or bool(kv_offset != 0):
        what = "queries and keys are different tokens, as with a cache or cross attention"
        got = f"{q_length} queries from {q_offset}, {kv_length} keys from {kv_offset}"
        raise UnsupportedError(what, got=got, next_step="pass the full sequence, and use_cache=False")
    return DeferredMask(read_mask(mask_function))


def read_mask(function: Callable[..., Any]) -> Band:
    """Return the band of a mask function that Transformers composed. Raise `UnsupportedError` for unknown parts."""
    if function is masking_utils.causal_mask_function:
        return Band(lo=0)
    if function is masking_utils.bidirectional_mask_function:
        return Band()
    maker = _makers().get(getattr(function, "__code__", None))
    if maker is None:
        raise UnsupportedError(
            "the model has an unknown mask function",
            got=getattr(function, "__qualname__", repr(function)),
            allowed="causal, bidirectional, sliding and chunked masks of transformers, and packed documents",
        )
    return maker(inspect.getclosurevars(function).nonlocals)


@lru_cache(maxsize=1)
def _makers() -> dict[Any, Callable[[Mapping[str, Any]], Band]]:
    """Return, by the code of each known mask function, how to read its parameters."""
    m = masking_utils
    causal = m.causal_mask_function
    samples: list[tuple[Callable[..., Any], Callable[[Mapping[str, Any]], Band]]] = [
        (m.and_masks(causal), lambda v: reduce(and_, map(read_mask, v["mask_functions"]), Band())),
        (m.sliding_window_overlay(1), lambda v: Band(hi=int(v["sliding_window"]) - 1)),
        (m.chunked_overlay(1, _PLACEHOLDER), lambda v: Band(chunk=int(v["chunk_size"]))),
        # Tokens of a shard look packed wherever positions jump. Real packing was checked before the model ran:
        # `checked_positions` accepts only the position ids of the shard and its documents.
        (m.packed_sequence_mask_function(_PLACEHOLDER), lambda v: Band()),
    ]
    # Newer than the oldest supported release.
    if hasattr(m, "blockwise_overlay"):
        blockwise = m.blockwise_overlay(_PLACEHOLDER).__code__
        samples.append((m.or_masks(causal), lambda v: _with_blocks(v["mask_functions"], blockwise)))
    if hasattr(m, "sliding_window_bidirectional_overlay"):
        both_ways = m.sliding_window_bidirectional_overlay(1)
        samples.append((both_ways, lambda v: Band(-int(v["sliding_window"]), int(v["sliding_window"]))))
    if hasattr(m, "remap_positions_for_packed_sequence"):
        remapped = m.remap_positions_for_packed_sequence(causal, _PLACEHOLDER)
        samples.append((remapped, lambda v: read_mask(v["mask_function"])))
    return {sample.__code__: read for sample, read in samples}


def _with_blocks(functions: Sequence[Callable[..., Any]], blockwise: Any) -> Band:
    """Return the band of a causal mask or a mask of groups, whose code is `blockwise`: images that see themselves."""
    groups = [x for x in functions if getattr(x, "__code__", None) is blockwise]
    bands = [read_mask(x) for x in functions if getattr(x, "__code__", None) is not blockwise]
    if len(groups) != 1 or len(bands) != 1 or bands[0].lo != 0 or bands[0].chunk is not None or bands[0].blocks:
        raise UnsupportedError("an unknown union of masks", got=bands, allowed="a causal mask and one of groups")
    ids = inspect.getclosurevars(groups[0]).nonlocals["block_sequence_ids"]
    return replace(bands[0], blocks=tuple(_runs(row) for row in ids))


def _runs(groups: Tensor) -> tuple[Run, ...]:
    """Return the runs of equal numbers of at least 0 in group numbers ``[N]``."""
    values, counts = torch.unique_consecutive(groups, return_counts=True)
    ends = counts.cumsum(0)
    listed = torch.stack([ends - counts, ends, values]).T.tolist()
    return tuple((start, stop, group) for start, stop, group in listed if group >= 0)


def masks_of(band: Band, sequence: CallSequence, batch: int) -> list[Mask]:
    """Return the mask of all rows of a batch, or one mask for each row if they differ."""
    if band.blocks is None:
        return [_mask_of(band, sequence.seq_len, sequence.cu_seqlens)]
    lengths = sequence.lengths or (sequence.seq_len,)
    rows = [
        tuple((start, min(stop, length), group) for start, stop, group in runs if start < length)
        for runs, length in zip(_repeated(band.blocks, batch), _repeated(lengths, batch), strict=True)
    ]
    bands = [replace(band, blocks=(runs,)) for runs in (rows if len(set(rows)) > 1 else rows[:1])]
    return [_mask_of(row, sequence.seq_len, sequence.cu_seqlens) for row in bands]


def _repeated(rows: tuple[Any, ...], batch: int) -> tuple[Any, ...]:
    return rows * batch if len(rows) == 1 else rows


def _block_regions(band: Band) -> list[Region]:
    """Return the pairs of tokens of one group that the causal band of a row does not have."""
    regions = []
    for runs in band.blocks or ():
        for (q_start, q_stop, q_group), (k_start, k_stop, k_group) in product(runs, runs):
            if q_group != k_group:
                continue
            box = (q_start, q_stop, k_start, k_stop)
            if k_start > q_start or (k_start == q_start and q_stop - q_start > 1):
                regions.append(Region(*box, hi=-1))
            if q_start >= k_start and q_stop - 1 - k_start > band.hi < band.blocks_hi:
                regions.append(Region(*box, lo=band.hi + 1, hi=band.blocks_hi))
    return regions


@lru_cache(maxsize=256)
def _mask_of(band: Band, seq_len: int, cu_seqlens: tuple[int, ...] | None) -> Mask:
    """Return the mask of a band over a sequence. Equal arguments return the same object, by which plans are cached."""
    lo, hi = band.lo, band.hi
    causal, open_left = lo == 0, hi >= UNBOUNDED
    if regions := _block_regions(band):
        if cu_seqlens is not None:
            raise UnsupportedError("packed documents with images that see themselves are not supported")
        return Mask((Region(0, UNBOUNDED, 0, UNBOUNDED, lo=lo, hi=hi), *regions), f"causal with {len(regions)} blocks")
    if band.chunk is not None:
        if cu_seqlens is not None:
            raise UnsupportedError(
                "packed documents with a chunked mask: its meaning differs between releases of transformers"
            )
        cu_seqlens = (*range(0, seq_len, band.chunk), seq_len)
    if cu_seqlens is not None:
        if not causal and lo != -hi:
            raise UnsupportedError("packed documents with this mask are not supported", got=f"{lo} <= q - k <= {hi}")
        return Mask.documents(cu_seqlens, causal=causal, window=None if open_left else hi)
    if causal:
        return Mask.causal() if open_left else Mask.window(hi)
    return Mask.full() if open_left and lo <= -UNBOUNDED else Mask.window(hi, -lo)


def has_padding(attention_mask: Tensor | None, input_ids: Tensor, labels: Tensor | None) -> bool:
    """Return whether rows ``[B, N]`` of an unsharded batch end with padding. Raise for other padding, or with labels.

    The mask is nonzero for tokens. Labels are those of `shard`, by default the ids.
    """
    if attention_mask is None:
        return False
    if attention_mask.shape != input_ids.shape:
        got, allowed = tuple(attention_mask.shape), tuple(input_ids.shape)
        raise ShapeError("attention_mask and input_ids have different shapes", got=got, allowed=allowed)
    token = attention_mask != 0
    if bool(token.all()):
        return False
    if bool((token[:, 1:] & ~token[:, :-1]).any()):
        next_step = "pad at the end of rows (padding_side='right'), or pack documents (see ShardedModel.shard)"
        raise UnsupportedError("padding before a token, which would attend to it", next_step=next_step)
    if bool(((input_ids if labels is None else labels) != -100)[~token].any()):
        raise InputError("labels on padding", allowed="-100", next_step="labels.masked_fill(attention_mask == 0, -100)")
    return True
