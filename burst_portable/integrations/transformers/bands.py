"""Convert the mask functions of Transformers to `Mask`.

Transformers describes a mask as a function of (batch, head, q, k), composed of a few functions. They are recognized by
their code and converted; other functions raise an error, so that no part of a mask is ignored.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from operator import and_
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers.call_sequence import CallSequence
from burst_portable.mask import UNBOUNDED, Mask, Region

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

    def __str__(self) -> str:
        """Describe the mask in a few words, for errors."""
        if self.lo >= 0:
            text = "a causal mask" if self.hi >= UNBOUNDED else f"a causal window of {self.hi + 1} tokens"
        elif self.hi >= UNBOUNDED and self.lo <= -UNBOUNDED:
            text = "a mask in which every token attends to all tokens"
        else:
            text = f"a window of {self.hi} tokens before and {-self.lo} after each token"
        if self.chunk is not None:
            text += f" within chunks of {self.chunk} tokens"
        return text if self.blocks is None else f"{text}, and groups whose tokens attend to each other"

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
        got = " or ".join([*map(str, bands), *["groups of tokens"] * len(groups)])
        raise UnsupportedError("an unknown union of masks", got=got, allowed="a causal mask and one of groups")
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
            raise UnsupportedError("packed documents with this mask are not supported", got=band)
        return Mask.documents(cu_seqlens, causal=causal, window=None if open_left else hi)
    if causal:
        return Mask.causal() if open_left else Mask.window(hi)
    return Mask.full() if open_left and lo <= -UNBOUNDED else Mask.window(hi, -lo)
