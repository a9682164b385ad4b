"""Convert the masks of Transformers to `Mask`, or raise an error. No part of a mask is ignored.

Transformers describes a mask as a function of (batch, head, q, k), composed of a few functions. This module
recognizes them by their code and reads their parameters. A `DeferredMask` replaces the attention mask in the model, so
there is never a tensor of queries x keys.
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
    """lo <= q - k <= hi, within chunks of `chunk` tokens: the general form of the supported masks of Transformers."""

    lo: int = -UNBOUNDED
    hi: int = UNBOUNDED
    chunk: int | None = None

    def __and__(self, other: Band) -> Band:
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
        self.sequence: Any = None

    def __repr__(self) -> str:
        return f"DeferredMask({self.band})"

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


@never_compiled("plans, transports and hooks are not graphs")
def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> DeferredMask:
    """Return the placeholder for a mask. Transformers' `AttentionMaskInterface` calls this function.

    Raises:
        UnsupportedError: For padding, caches, cross attention, and mask functions that `Mask` does not express.
    """
    if attention_mask is not None and not bool(attention_mask.all()):  # some models pass a mask of ones
        raise UnsupportedError(
            "a padding mask reached a sharded attention",
            next_step="pass the mask to handle.shard, or pack documents (see ShardedModel.shard)",
        )
    # A static cache passes its offset as a tensor.
    if q_length != kv_length or bool(q_offset != 0) or bool(kv_offset != 0):
        raise UnsupportedError(
            "queries and keys are different tokens, as with a cache or cross attention",
            got=f"{q_length} queries from {q_offset}, {kv_length} keys from {kv_offset}",
            next_step="pass the full sequence, and use_cache=False",
        )
    return DeferredMask(read_mask(mask_function))


def read_mask(function: Callable[..., Any]) -> Band:
    """Return the band of a mask function that Transformers composed.

    Raises:
        UnsupportedError: If a part of it is not a mask function of Transformers; the message names it.
    """
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
        (m.and_masks(causal), lambda v: _all_of(v["mask_functions"])),
        (m.sliding_window_overlay(1), lambda v: Band(hi=int(v["sliding_window"]) - 1)),
        (m.chunked_overlay(1, _PLACEHOLDER), lambda v: Band(chunk=int(v["chunk_size"]))),
        # Tokens of a shard look packed wherever positions jump. Real packing was checked before the model ran:
        # `checked_positions` accepts only the position ids of the shard and its documents.
        (m.packed_sequence_mask_function(_PLACEHOLDER), lambda v: Band()),
    ]
    # Newer than the oldest supported release.
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
    """Return the mask of a band over a sequence. Equal arguments return the same object, by which plans are cached.

    Raises:
        UnsupportedError: If packed documents and the band cannot be combined.
    """
    lo, hi = band.lo, band.hi
    causal, open_left = lo == 0, hi >= UNBOUNDED
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
    """Return whether rows of an unsharded batch end with padding, which the labels exclude.

    Args:
        attention_mask: Shape ``[B, N]``, nonzero for tokens. None: no padding.
        input_ids: Shape ``[B, N]``.
        labels: Shape ``[B, N]``, -100 for tokens without a label. None: `input_ids`.

    Raises:
        ShapeError: If the mask has another shape.
        UnsupportedError: If padding is not at the end of its row.
        InputError: If padding has labels.
    """
    if attention_mask is None:
        return False
    if attention_mask.shape != input_ids.shape:
        raise ShapeError(
            "attention_mask and input_ids have different shapes",
            got=tuple(attention_mask.shape),
            allowed=tuple(input_ids.shape),
        )
    token = attention_mask != 0
    if bool(token.all()):
        return False
    if bool((token[:, 1:] & ~token[:, :-1]).any()):
        raise UnsupportedError(
            "padding before a token, which would attend to it",
            next_step="pad at the end of rows (padding_side='right'), or pack documents (see ShardedModel.shard)",
        )
    if bool(((input_ids if labels is None else labels) != -100)[~token].any()):
        raise InputError("labels on padding", allowed="-100", next_step="labels.masked_fill(attention_mask == 0, -100)")
    return True


def check_padded_model(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for a router loss, which would count padding."""
    requested = kwargs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if requested is None else requested:
        raise UnsupportedError(
            "padding with a router loss, which would count it", next_step="pass output_router_logits=False"
        )
