"""What transformers means by a mask, as one of ours, or a refusal. Nothing is dropped.

transformers describes a mask as a function of (batch, head, q, k), put together from a handful of its own parts. We
know those parts by the functions that make them, and read their numbers; a part that we do not know is somebody's
own mask, and refused. A mask that reaches our attention is a `Wanted`, never a tensor of rows x columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

from burst_portable.errors import InputError, ShapeError, UnsupportedError
from burst_portable.mask import UNBOUNDED, Mask
from burst_portable.utils.torch_modes import never_compiled

_PLACEHOLDER = torch.zeros(1, 1, dtype=torch.int64)


@dataclass(frozen=True)
class Band:
    """lo <= q - k <= hi, and no token sees another chunk: what every mask of transformers that we take comes to."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    chunk: int | None = None

    def __and__(self, other: Band) -> Band:
        chunks = {c for c in (self.chunk, other.chunk) if c is not None}
        if len(chunks) > 1:
            raise UnsupportedError("a mask with two sizes of chunks", got=sorted(chunks))
        return Band(max(self.lo, other.lo), min(self.hi, other.hi), chunks.pop() if chunks else None)


class Wanted:
    """The mask that a model asked for. It travels through the layers in the place of the attention mask.

    The first layer's attention binds it to the sequence of its call. A recomputation (gradient checkpointing) gets
    the same object as an argument, and so the same sequence, whatever call the model has seen since.
    """

    def __init__(self, band: Band) -> None:
        self.band = band
        self.sequence: Any = None

    def __repr__(self) -> str:
        return f"Wanted({self.band})"

    def __getattr__(self, name: str) -> Any:
        """A model that computes with its mask, as with a tensor."""
        if name.startswith("_"):
            raise AttributeError(name)
        raise UnsupportedError("the model changes its mask, which is not a tensor here", got=f"mask.{name}")


@never_compiled("plans, transports and hooks are not graphs")
def wanted_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> Wanted:
    """The function that `AttentionMaskInterface` calls for a parallelized model.

    Raises `UnsupportedError` for padding, caches, cross attention and mask functions that our masks do not express.
    """
    if attention_mask is not None and not bool(attention_mask.all()):  # some models make one of ones
        raise UnsupportedError(
            "a padding mask reached a sharded attention",
            next_step="give the mask to handle.shard, or pack documents (see ShardedModel.shard)",
        )
    # A static cache hands over its offset as a tensor; comparing it is enough to refuse it.
    if q_length != kv_length or bool(q_offset != 0) or bool(kv_offset != 0):
        raise UnsupportedError(
            "queries and keys are different tokens: a cache or cross attention",
            got=f"{q_length} queries from {q_offset}, {kv_length} keys from {kv_offset}",
            next_step="sharded models take whole sequences; pass use_cache=False",
        )
    return Wanted(read_mask(mask_function))


def read_mask(function: Callable[..., Any]) -> Band:
    """The band of a mask function that transformers put together.

    Raises `UnsupportedError`, naming the part, for one that it did not.
    """
    if function is masking_utils.causal_mask_function:
        return Band(lo=0)
    if function is masking_utils.bidirectional_mask_function:
        return Band()
    maker = _makers().get(getattr(function, "__code__", None))
    if maker is None:
        raise UnsupportedError(
            "the model has a mask function that regions cannot be read from",
            got=getattr(function, "__qualname__", repr(function)),
            allowed="causal, bidirectional, sliding and chunked masks of transformers, and packed documents",
        )
    return maker(inspect.getclosurevars(function).nonlocals)


@lru_cache(maxsize=1)
def _makers() -> dict[Any, Callable[[Mapping[str, Any]], Band]]:
    """The code of each part, taken from a sample of it, and how its numbers are read."""
    m = masking_utils
    causal = m.causal_mask_function
    samples: list[tuple[Callable[..., Any], Callable[[Mapping[str, Any]], Band]]] = [
        (m.and_masks(causal), lambda v: _all_of(v["mask_functions"])),
        (m.sliding_window_overlay(1), lambda v: Band(hi=int(v["sliding_window"]) - 1)),
        (m.chunked_overlay(1, _PLACEHOLDER), lambda v: Band(chunk=int(v["chunk_size"]))),
        # Rows of a shard look packed wherever its positions jump. Real packing has been checked by then: position
        # ids that are not those of the shard, or of the documents that were named, are refused before the model runs.
        (m.packed_sequence_mask_function(_PLACEHOLDER), lambda v: Band()),
    ]
    # Newer than the oldest release that we take.
    if hasattr(m, "sliding_window_bidirectional_overlay"):
        both_ways = m.sliding_window_bidirectional_overlay(1)
        samples.append((both_ways, lambda v: Band(-int(v["sliding_window"]), int(v["sliding_window"]))))
    if hasattr(m, "remap_positions_for_packed_sequence"):
        remapped = m.remap_positions_for_packed_sequence(causal, _PLACEHOLDER)
        samples.append((remapped, lambda v: read_mask(v["mask_function"])))
    return {sample.__code__: read for sample, read in samples}


def _all_of(parts: tuple[Callable[..., Any], ...]) -> Band:
    band = Band()
    for part in parts:
        band = band & read_mask(part)
    return band


@lru_cache(maxsize=256)
def mask_of(band: Band, seq_len: int, cu_seqlens: tuple[int, ...] | None) -> Mask:
    """The mask of a band over a sequence, the same object each time (plans are looked up by it).

    Raises `UnsupportedError` where documents and the band do not go together.
    """
    lo, hi = band.lo, band.hi
    causal, open_left = lo == 0, hi >= UNBOUNDED
    if band.chunk is not None:
        if cu_seqlens is not None:
            raise UnsupportedError("packed documents and a chunked mask: releases of transformers differ on what it is")
        cu_seqlens = (*range(0, seq_len, band.chunk), seq_len)
    if cu_seqlens is not None:
        if not causal and lo != -hi:
            raise UnsupportedError("documents with this band", got=f"{lo} <= q - k <= {hi}")
        return Mask.documents(cu_seqlens, causal=causal, window=None if open_left else hi)
    if causal:
        return Mask.causal() if open_left else Mask.window(hi)
    return Mask.full() if open_left and lo <= -UNBOUNDED else Mask.window(hi, -lo)


def has_padding(attention_mask: Tensor | None, input_ids: Tensor, labels: Tensor | None) -> bool:
    """Whether rows of a whole batch end with padding, which the labels leave out.

    Args:
        attention_mask: ``[B, N]``, not 0 where a token is; None: everywhere.
        input_ids: ``[B, N]``; labels: ``[B, N]``, -100 where there is none, or None, which stands for `input_ids`.

    Raises:
        ShapeError: a mask of another shape.
        UnsupportedError: padding that is not at the end of its row.
        InputError: labels on padding.
    """
    if attention_mask is None:
        return False
    if attention_mask.shape != input_ids.shape:
        raise ShapeError(
            "attention_mask and input_ids", got=tuple(attention_mask.shape), allowed=tuple(input_ids.shape)
        )
    token = attention_mask != 0
    if bool(token.all()):
        return False
    if bool((token[:, 1:] & ~token[:, :-1]).any()):
        raise UnsupportedError(
            "padding before a token, which would see it",
            next_step="pad at the end of rows (padding_side='right'), or pack documents (see ShardedModel.shard)",
        )
    if bool(((input_ids if labels is None else labels) != -100)[~token].any()):
        raise InputError("labels on padding", allowed="-100", next_step="labels.masked_fill(attention_mask == 0, -100)")
    return True


def check_padded_model(config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a loss that reads padding: a router's, which balances the choices of all rows."""
    wanted = kwargs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if wanted is None else wanted:
        raise UnsupportedError(
            "padding and a router loss, which counts tokens", next_step="pass output_router_logits=False"
        )
