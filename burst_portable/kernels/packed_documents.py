"""Find documents in tiles, and pack their tokens for operators that take cumulative lengths (`cu_seqlens`)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as functional
from torch import Tensor

from burst_portable.kernels.operator_kernel import causal_squares, causal_window, single_operator_call
from burst_portable.planning.tiles import Tiles


class Documents(NamedTuple):
    """Consecutive documents of a sequence. No token sees another document.

    Attributes:
        bounds: First token of each document, and the end of the last. Tokens before and after them are in no document.
        causal: Whether all documents are causal; else all are full.
    """

    bounds: tuple[int, ...]
    causal: bool


@lru_cache(maxsize=512)
def find_documents(tiles: Tiles, rows: int, columns: int) -> Documents | None:
    """Return the documents if the tiles of a whole call are consecutive documents of one kind, else None.

    Return None too if the whole call is one box, one causal square or one causal window.
    """
    if rows != columns or causal_window(tiles, rows, columns) is not None:
        return None
    squares = []
    for part in (part for tile in tiles for part in causal_squares(tile)):
        if part.rows != part.columns or part.reversed:
            return None
        squares.append(part)
    squares.sort(key=lambda part: part.rows.start)
    consecutive = all(one.rows.stop == following.rows.start for one, following in pairwise(squares))
    if not squares or not consecutive or single_operator_call(squares, rows, columns):
        return None
    # A document of one token is both causal and full.
    kinds = {part.causal for part in squares if part.rows.stop - part.rows.start > 1}
    if len(kinds) > 1:
        return None
    return Documents((squares[0].rows.start, *(part.rows.stop for part in squares)), kinds != {False})


@dataclass(frozen=True, slots=True)
class PackedDocuments:
    """The documents of all batch rows, one after the other, without the tokens that are in no document.

    Attributes:
        batch: Number of batch rows B.
        length: Number of tokens S of a batch row.
        tokens: The tokens of a batch row that are in documents. There are T of them.
        cu_seqlens: First packed token of each document, and the end of the last: int32, on the device.
        longest: Number of tokens of the longest document.
        causal: See `Documents`.
    """

    batch: int
    length: int
    tokens: slice
    cu_seqlens: Tensor
    longest: int
    causal: bool

    def pack(self, x: Tensor) -> Tensor:
        """Return [B, S, H, D] as [B * T, H, D], as a view if the strides allow one."""
        return x[:, self.tokens].flatten(0, 1)

    def unpack(self, x: Tensor) -> Tensor:
        """Return [B * T, H, D] as [B, S, H, D], with zeros for tokens that are in no document."""
        x = x.unflatten(0, (self.batch, -1))
        return functional.pad(x, (0, 0, 0, 0, *self._outside)) if any(self._outside) else x

    def pack_lse(self, lse: Tensor) -> Tensor:
        """Return [B, H, S] as contiguous [H, B * T]."""
        return lse[:, :, self.tokens].transpose(0, 1).flatten(1).contiguous()

    def unpack_lse(self, lse: Tensor) -> Tensor:
        """Return [H, B * T] as contiguous [B, H, S], with -inf for tokens that are in no document."""
        lse = lse.unflatten(1, (self.batch, -1)).transpose(0, 1)
        return functional.pad(lse, self._outside, value=-math.inf) if any(self._outside) else lse.contiguous()

    @property
    def _outside(self) -> tuple[int, int]:
        """Number of tokens before the first and after the last document."""
        return self.tokens.start, self.length - self.tokens.stop


def pack_documents(tiles: Tiles, batch: int, rows: int, columns: int, device: torch.device) -> PackedDocuments | None:
    """Return the packed documents of a whole call if `find_documents` finds some, else None."""
    found = find_documents(tiles, rows, columns) if batch else None
    if found is None:
        return None
    first, last = found.bounds[0], found.bounds[-1]
    every = [row * (last - first) + bound - first for row in range(batch) for bound in found.bounds[:-1]]
    cu_seqlens = torch.tensor([*every, batch * (last - first)], dtype=torch.int32).to(device)
    longest = max(stop - start for start, stop in pairwise(found.bounds))
    return PackedDocuments(batch, rows, slice(first, last), cu_seqlens, longest, found.causal)
