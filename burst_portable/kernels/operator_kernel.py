"""Attention over tiles by an operator of a vendor or of torch that knows full boxes, and perhaps causal ones.

`PiecewiseKernel` cuts every tile into pieces, calls the operator on each and merges. `triangles` cuts tiles so that
nothing comes up on which operators silently differ: a causal piece is square, so that aligning it top-left or
bottom-right is the same; no row of a piece is empty, so that its LSE has no special value; and no window is asked
for, which some builds of an operator accept and ignore (`causal_window` is for operators that are known to obey)::

    causal        ■◣          a box of the columns that all rows see, and a causal square
                  ■■          a box of the rows past the square
    its mirror    ◥■          causal as well, with the order of rows and columns reversed
    window        ◥◣          strips of rows as high as the window is wide, each of them one of these two
                   ◥◣
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from burst_portable.kernels.base import Gradients, KernelProblem, Options, Support, added_up
from burst_portable.numerics import State, accumulation_dtype, empty_state, merge_into, surrogate_out, widened
from burst_portable.planning.tiles import Tile, Tiles


class Piece(Protocol):
    """Where a piece of a tile lies in its block. Anything else in it is between a kernel and its operator."""

    @property
    def rows(self) -> slice: ...

    @property
    def columns(self) -> slice: ...


P = TypeVar("P", bound=Piece)


def only_piece(pieces: Iterable[P], rows: int, columns: int) -> P | None:
    """The only piece, if there is just one and it covers all `rows` and `columns`; else None."""
    first = list(islice(pieces, 2))
    if len(first) == 1 and (first[0].rows, first[0].columns) == (slice(0, rows), slice(0, columns)):
        return first[0]
    return None


def causal_window(tiles: Iterable[Tile], rows: int, columns: int) -> int | None:
    """How many keys before its own a row sees, if the tiles are one causal window over a whole square; else None.

    Also None for a window so wide that it hides no more than a causal mask.
    """
    first = list(islice(tiles, 2))
    if len(first) != 1 or rows != columns:
        return None
    tile = first[0]
    whole = (tile.q_start, tile.q_stop, tile.k_start, tile.k_stop) == (0, rows, 0, rows)
    return tile.hi if whole and tile.lo == 0 and 0 <= tile.hi < rows - 1 else None


class PiecewiseKernel(ABC, Generic[P]):
    """`attend` and `attend_backward` of `kernels.base.Kernel`, from an operator that computes pieces.

    The operator gets the rows and columns of one piece, ``[B, S, H, D]`` after `ready`; K and V keep their Hkv heads.
    """

    name: str
    in_pieces = True

    @abstractmethod
    def supports(self, problem: KernelProblem) -> Support:
        """See `kernels.base.Kernel`."""

    @abstractmethod
    def lower(self, tile: Tile) -> Iterator[P]:
        """The pieces of a tile, one for each call: every pair is in one of them, and no piece has an empty row."""

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: P, scale: float) -> State:
        """(out, natural LSE ``[B, H, S]``) of one piece."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: P, scale: float
    ) -> Gradients:
        """(dq, dk, dv) of one piece; `out` and `lse` are global."""

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """A whole tensor as the operator wants it; called once per call, not once per piece. `dtype`: of q."""
        return x.to(dtype)

    def merge(self, state: State, out: Tensor, lse: Tensor) -> None:
        """`numerics.merge_into`, in place. Override it where a device can merge in fewer passes over memory."""
        merge_into(state, out, lse)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options, *, state: State | None = None
    ) -> State:
        everything = slice(0, q.shape[1])
        queries, keys, values = (self.ready(x, q.dtype) for x in (q, k, v))
        for piece in (piece for tile in tiles for piece in self.lower(tile)):
            rows, columns = piece.rows, piece.columns
            out, lse = self.forward(queries[:, rows], keys[:, columns], values[:, columns], piece, options.scale)
            if state is None and rows == everything:
                state = (out, lse.contiguous())  # it may be the only piece, so it is kept as it is
                continue
            state = empty_state(q, v.shape[-1]) if state is None else widened(state, q.dtype)
            self.merge((state[0][:, rows], state[1][:, :, rows]), out, lse)
        return empty_state(q, v.shape[-1]) if state is None else state

    def attend_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
        *,
        delta: Tensor | None = None,
        out: Tensor | None = None,
        into: Gradients,
    ) -> None:
        assert (delta is None) != (out is None), "exactly one of delta and out"
        dout = self.ready(dout, q.dtype)
        if out is None:  # operators compute delta from `out`; any out with the right row sums will do
            assert delta is not None
            out = surrogate_out(dout, delta)
        q, k, v, out = (self.ready(x, q.dtype) for x in (q, k, v, out))
        for piece in (piece for tile in tiles for piece in self.lower(tile)):
            rows, columns = piece.rows, piece.columns
            parts = self.backward(
                dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows],
                piece, options.scale,
            )  # fmt: skip
            for total, part, where in zip(into, parts, (rows, columns, columns), strict=True):
                total[:, where] += part

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
    ) -> Gradients:
        """See `kernels.base`: the operator's own gradients, if one piece covers everything."""
        piece = only_piece((piece for tile in tiles for piece in self.lower(tile)), q.shape[1], k.shape[1])
        if piece is None:
            return added_up(self, dout, q, k, v, out, lse, tiles, options)
        dout, q, k, v, out = (self.ready(x, q.dtype) for x in (dout, q, k, v, out))
        return self.backward(dout, q, k, v, out, lse, piece, options.scale)


class Triangle(NamedTuple):
    """A full box, or a causal square; `reversed`: causal if rows and columns are counted from the end."""

    rows: slice
    columns: slice
    causal: bool = False
    reversed: bool = False


def triangles(tile: Tile) -> Iterator[Triangle]:
    """A tile as boxes and causal squares: every pair once, no empty row.

    Up to three for a band with one edge; a band with two edges takes a few for every ``hi - lo + 1`` rows.
    """
    above = tile.lo > tile.q_start - tile.k_stop + 1
    below = tile.hi < tile.q_stop - 1 - tile.k_start
    if above and below:
        yield from _strips(tile)
    elif above:
        yield from _causal(tile)
    elif below:
        yield from (_mirror_image(piece, tile) for piece in _causal(_mirrored(tile)))
    else:
        yield Triangle(slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop))


def _causal(tile: Tile) -> Iterator[Triangle]:
    """The pieces of a tile whose band has only a lower bound within the box."""
    every, corner = slice(tile.q_start, tile.q_stop), tile.q_start - tile.lo  # the last column that the first row sees
    if corner > tile.k_start:
        yield Triangle(every, slice(tile.k_start, corner))
    end = tile.q_start + tile.k_stop - corner
    assert end <= tile.q_stop, "a tile has no empty columns"
    yield Triangle(slice(tile.q_start, end), slice(corner, tile.k_stop), causal=True)
    if end < tile.q_stop:
        yield Triangle(slice(end, tile.q_stop), slice(corner, tile.k_stop))


def _strips(tile: Tile) -> Iterator[Triangle]:
    """The pieces of a tile with both bounds: in a strip as high as the band is wide, a column meets only one."""
    height = tile.hi - tile.lo + 1
    for start in range(tile.q_start, tile.q_stop, height):
        middle = start - tile.lo + 1
        for columns in ((tile.k_start, middle), (middle, tile.k_stop)):
            part = tile.clipped(start, min(start + height, tile.q_stop), *columns)
            if part is not None:
                yield from triangles(part)


def _mirrored(tile: Tile) -> Tile:
    """Rows and columns counted from the other end of the box."""
    ends = tile.q_start + tile.q_stop - tile.k_start - tile.k_stop
    return Tile(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop, ends - tile.hi, ends - tile.lo)


def _mirror_image(piece: Triangle, tile: Tile) -> Triangle:
    """A piece of the mirrored tile, as a piece of the tile itself."""
    rows = slice(*(tile.q_start + tile.q_stop - at for at in (piece.rows.stop, piece.rows.start)))
    columns = slice(*(tile.k_start + tile.k_stop - at for at in (piece.columns.stop, piece.columns.start)))
    return Triangle(rows, columns, piece.causal, reversed=piece.causal)


class TriangleKernel(PiecewiseKernel[Triangle]):
    """A `PiecewiseKernel` whose operator computes boxes and causal squares, and nothing else."""

    @abstractmethod
    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        """The operator forward: (out, natural LSE ``[B, H, S]``). With `causal` there are as many rows as columns."""

    @abstractmethod
    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """The operator backward: (dq, dk, dv), from the LSE and the out that it is given."""

    def lower(self, tile: Tile) -> Iterator[Triangle]:
        return triangles(tile)

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        x = x.to(dtype)
        return x if x.stride(-1) == 1 else x.contiguous()  # the gradient of a sum has stride 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, piece: Triangle, scale: float) -> State:
        if not piece.reversed:
            return self.operate(q, k, v, piece.causal, scale)
        out, lse = self.operate(q.flip(1), k.flip(1), v.flip(1), piece.causal, scale)
        return out.flip(1), lse.flip(2)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, piece: Triangle, scale: float
    ) -> Gradients:
        lse = lse.to(accumulation_dtype(q.dtype))
        if not piece.reversed:
            return self.operate_backward(dout, q, k, v, out, lse.contiguous(), piece.causal, scale)
        dout, q, k, v, out = (x.flip(1) for x in (dout, q, k, v, out))
        dq, dk, dv = self.operate_backward(dout, q, k, v, out, lse.flip(2), piece.causal, scale)
        return dq.flip(1), dk.flip(1), dv.flip(1)


_BYTES = 16


def in_steps(x: Tensor) -> Tensor:
    """``[B, S, H, D]``, D a multiple of 16 bytes: `x` itself if all rows begin at such multiples, else a copy."""
    if x.data_ptr() % _BYTES == 0 and _even(x.stride(), _BYTES // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _even(strides: tuple[int, ...], each: int) -> bool:
    """Whether every stride is a positive multiple of `each` elements, the last one 1."""
    *steps, last = strides
    return last == 1 and all(step > 0 and step % each == 0 for step in steps)


class MergedOnceKernel(TriangleKernel):
    """A `TriangleKernel` for an accelerator. Without Triton, torch's operators merge."""

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Its operators load 16 bytes at once, whatever the strides."""
        return in_steps(super().ready(x, dtype))

    @property
    def merged_once(self) -> bool:
        """See `kernels.base.Kernel`."""
        return self._merge is not merge_into

    def merge(self, state: State, out: Tensor, lse: Tensor) -> None:
        self._merge(state, out, lse)

    @cached_property
    def _merge(self) -> Callable[[State, Tensor, Tensor], None]:
        if find_spec("triton") is None or not torch.accelerator.is_available():
            return merge_into
        from burst_portable.kernels.triton.merging import OnePass

        return OnePass()
