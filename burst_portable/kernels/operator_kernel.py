"""Implement `Kernel` with an external operator that supports only full boxes and, optionally, causal squares.

`OperatorKernel` splits every tile into operator calls and merges their results. `causal_squares` splits tiles so that
operators cannot differ silently. A causal call is square, so that aligning it top-left or bottom-right is the same. No
row of a call is empty, so that its LSE has no special value. No call has a window, because some builds of an operator
accept one and ignore it (`causal_window` is for operators that are known to compute it)::

    causal        ■◣          a box of the columns that are visible to all rows, and a causal square
                  ■■          a box of the rows below the square
    its mirror    ◥■          causal as well, with the order of rows and columns reversed
    window        ◥◣          strips of rows as high as the window is wide, each of one of these two forms
                   ◥◣
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import islice
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, align_rows
from burst_portable.numerics import State, accumulation_dtype, empty_state, merge_into, surrogate_out, widened
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.utils.cache import Cache

_CACHED = 512  # sets of tiles whose operator calls are kept
_MOST = 1024  # operator calls of a set that is kept


class OperatorCall(Protocol):
    """The part of a tile that one call of an operator computes. A kernel may add attributes for its operator."""

    @property
    def rows(self) -> slice: ...

    @property
    def columns(self) -> slice: ...


C = TypeVar("C", bound=OperatorCall)


def single_operator_call(parts: Sequence[C], rows: int, columns: int) -> C | None:
    """Return the operator call if a single one covers all `rows` and `columns`, else None."""
    if len(parts) == 1 and (parts[0].rows, parts[0].columns) == (slice(0, rows), slice(0, columns)):
        return parts[0]
    return None


def causal_window(tiles: Iterable[Tile], rows: int, columns: int) -> int | None:
    """Return the number of visible keys before a row's diagonal, if the tiles are one causal window over a square.

    Return None for all other tiles, and for a window that hides no more than a causal mask.
    """
    first = list(islice(tiles, 2))
    if len(first) != 1 or rows != columns:
        return None
    tile = first[0]
    whole = (tile.q_start, tile.q_stop, tile.k_start, tile.k_stop) == (0, rows, 0, rows)
    return tile.hi if whole and tile.lo == 0 and 0 <= tile.hi < rows - 1 else None


class OperatorKernel(Kernel, Generic[C]):
    """Implement `attend` and `attend_backward` with an operator that computes one `OperatorCall` at a time.

    The operator gets the rows and columns of one call, [B, S, H, D] after `prepare_operands`. K and V keep their Hkv
    heads.
    """

    traits = KernelTraits(splits_tiles=True)

    @abstractmethod
    def split_tile(self, tile: Tile) -> Iterator[C]:
        """Yield the operator calls of a tile. Every pair is in one of them, and none has an empty row."""

    @abstractmethod
    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, part: C, call: AttentionCall) -> State:
        """Return (out, natural LSE [B, H, S]) of one operator call, a part of `call`."""

    @abstractmethod
    def run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: C, call: AttentionCall
    ) -> Gradients:
        """Return (dq, dk, dv) of one operator call, a part of `call`; `out` and `lse` are global."""

    def prepare_operands(self, dtype: torch.dtype, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors of a pass in `dtype`, that of q, as the operator takes them. Called once per pass."""
        return [x if x.dtype is dtype else x.to(dtype) for x in tensors]

    def merge(self, state: State, out: Tensor, lse: Tensor) -> None:
        """Merge a result into a state, in place. Override it if a device can merge in fewer passes over memory."""
        merge_into(state, out, lse)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        *,
        state: State | None = None,
        yields_to_comm: bool = False,
    ) -> State:
        length = q.shape[1]
        queries, keys, values = self.prepare_operands(q.dtype, q, k, v)
        for part in self._cached_calls.get(tiles) or self.operator_calls(tiles):
            rows, columns = part.rows, part.columns
            out, lse = self.run_forward(queries[:, rows], keys[:, columns], values[:, columns], part, call)
            if state is None and rows.start == 0 and rows.stop == length:
                state = (out, lse.contiguous())  # it may be the only result, so it is not widened
                continue
            state = empty_state(q, v.shape[-1]) if state is None else widened(state, q.dtype)
            self.merge((state[0][:, rows], state[1][:, :, rows]), out, lse)
        return empty_state(q, v.shape[-1]) if state is None else state

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return the operator's result without merging if one operator call covers everything."""
        parts = self._cached_calls.get(tiles) or self.operator_calls(tiles)
        part = single_operator_call(parts, q.shape[1], k.shape[1])
        if part is None:
            return self.attend(q, k, v, tiles, call)
        queries, keys, values = self.prepare_operands(q.dtype, q, k, v)
        out, lse = self.run_forward(queries, keys, values, part, call)
        return out, lse.contiguous()

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        dout, q, k, v, lse, out, delta = x
        dtype = q.dtype
        if out is None:  # operators compute delta from `out`, so any `out` with the correct row sums serves
            assert delta is not None, "exactly one of delta and out"
            dout, q, k, v = self.prepare_operands(dtype, dout, q, k, v)
            (out,) = self.prepare_operands(dtype, surrogate_out(dout, delta))
        else:
            dout, q, k, v, out = self.prepare_operands(dtype, dout, q, k, v, out)
        dq, dk, dv = into
        for part in self._cached_calls.get(tiles) or self.operator_calls(tiles):
            rows, columns = part.rows, part.columns
            q_part, k_part, v_part = self.run_backward(
                dout[:, rows], q[:, rows], k[:, columns], v[:, columns], out[:, rows], lse[:, :, rows], part, call
            )
            dq[:, rows] += q_part
            dk[:, columns] += k_part
            dv[:, columns] += v_part

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return the operator's gradients without summing if one operator call covers everything."""
        parts = self._cached_calls.get(tiles) or self.operator_calls(tiles)
        part = single_operator_call(parts, x.q.shape[1], x.k.shape[1])
        if part is None:
            return super().backward_single_call(x, tiles, call)
        assert x.out is not None, "a backward pass in a single call has out"
        dout, q, k, v, out = self.prepare_operands(x.q.dtype, x.dout, x.q, x.k, x.v, x.out)
        return self.run_backward(dout, q, k, v, out, x.lse, part, call)

    def operator_calls(self, tiles: Tiles) -> Sequence[C]:
        """Return the operator calls of all tiles. The calls of up to `_CACHED` sets of tiles are kept."""
        parts = tuple(part for tile in tiles for part in self.split_tile(tile))
        return self._cached_calls.keep(tiles, parts) if len(parts) <= _MOST else parts

    @cached_property
    def _cached_calls(self) -> Cache[Tiles, tuple[C, ...]]:
        return Cache(_CACHED)


class CausalSquare(NamedTuple):
    """A full box or a causal square of a tile."""

    rows: slice  # of the block of queries
    columns: slice  # of the block of keys
    causal: bool = False
    reversed: bool = False  # whether it is causal if rows and columns are counted from the end


def causal_squares(tile: Tile) -> Iterator[CausalSquare]:
    """Split a tile into boxes and causal squares. Every pair is in one of them, and none has an empty row.

    A band with one edge takes up to three. A band with two edges takes a few for every ``hi - lo + 1`` rows.
    """
    above = tile.lo > tile.q_start - tile.k_stop + 1
    below = tile.hi < tile.q_stop - 1 - tile.k_start
    if above and below:
        yield from _strips(tile)
    elif above:
        yield from _causal(tile)
    elif below:
        yield from (_mirror_image(part, tile) for part in _causal(_mirrored(tile)))
    else:
        yield CausalSquare(slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop))


def _causal(tile: Tile) -> Iterator[CausalSquare]:
    """Split a tile whose band has only a lower bound within the box."""
    every, corner = slice(tile.q_start, tile.q_stop), tile.q_start - tile.lo  # the last visible column of the first row
    if corner > tile.k_start:
        yield CausalSquare(every, slice(tile.k_start, corner))
    end = tile.q_start + tile.k_stop - corner
    assert end <= tile.q_stop, "a tile has no empty columns"
    yield CausalSquare(slice(tile.q_start, end), slice(corner, tile.k_stop), causal=True)
    if end < tile.q_stop:
        yield CausalSquare(slice(end, tile.q_stop), slice(corner, tile.k_stop))


def _strips(tile: Tile) -> Iterator[CausalSquare]:
    """Split a tile with both bounds. In a strip as high as the band is wide, a column has only one bound."""
    height = tile.hi - tile.lo + 1
    for start in range(tile.q_start, tile.q_stop, height):
        middle = start - tile.lo + 1
        for columns in ((tile.k_start, middle), (middle, tile.k_stop)):
            part = tile.clipped(start, min(start + height, tile.q_stop), *columns)
            if part is not None:
                yield from causal_squares(part)


def _mirrored(tile: Tile) -> Tile:
    """Return the tile with rows and columns counted from the other end of its box."""
    ends = tile.q_start + tile.q_stop - tile.k_start - tile.k_stop
    return Tile(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop, ends - tile.hi, ends - tile.lo)


def _mirror_image(part: CausalSquare, tile: Tile) -> CausalSquare:
    """Return the part of the tile that is this part of the mirrored tile."""
    rows = slice(*(tile.q_start + tile.q_stop - at for at in (part.rows.stop, part.rows.start)))
    columns = slice(*(tile.k_start + tile.k_stop - at for at in (part.columns.stop, part.columns.start)))
    return CausalSquare(rows, columns, part.causal, reversed=part.causal)


class CausalOperatorKernel(OperatorKernel[CausalSquare]):
    """An `OperatorKernel` whose operator computes only full boxes and causal squares."""

    @abstractmethod
    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        """Return (out, natural LSE [B, H, S]) of the operator. With `causal` there are as many rows as columns."""

    @abstractmethod
    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        """Return the operator's (dq, dk, dv) from the given LSE and out."""

    def options(self, call: AttentionCall) -> Mapping[str, Any]:
        """Return arguments that `operate` and `operate_backward` of a subclass take as well. Default: none."""
        return {}

    def split_tile(self, tile: Tile) -> Iterator[CausalSquare]:
        return causal_squares(tile)

    def prepare_operands(self, dtype: torch.dtype, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors with a last stride of 1: the gradient of a sum has stride 0."""
        return [x if x.stride(-1) == 1 else x.contiguous() for x in super().prepare_operands(dtype, *tensors)]

    def run_forward(self, q: Tensor, k: Tensor, v: Tensor, part: CausalSquare, call: AttentionCall) -> State:
        scale, options = call.scale, self.options(call)
        if not part.reversed:
            return self.operate(q, k, v, part.causal, scale, **options)
        out, lse = self.operate(q.flip(1), k.flip(1), v.flip(1), part.causal, scale, **options)
        return out.flip(1), lse.flip(2)

    def run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        part: CausalSquare,
        call: AttentionCall,
    ) -> Gradients:
        lse, scale, options = lse.to(accumulation_dtype(q.dtype)), call.scale, self.options(call)
        if not part.reversed:
            return self.operate_backward(dout, q, k, v, out, lse.contiguous(), part.causal, scale, **options)
        dout, q, k, v, out = (x.flip(1) for x in (dout, q, k, v, out))
        dq, dk, dv = self.operate_backward(dout, q, k, v, out, lse.flip(2), part.causal, scale, **options)
        return dq.flip(1), dk.flip(1), dv.flip(1)


class AcceleratorKernel(CausalOperatorKernel):
    """A `CausalOperatorKernel` for an accelerator. Without Triton, torch's operators merge."""

    @cached_property
    def traits(self) -> KernelTraits:  # type: ignore[override]  # computed when read, since it looks for devices
        return KernelTraits(splits_tiles=True, single_pass_merge=self._merge is not merge_into)

    def prepare_operands(self, dtype: torch.dtype, *tensors: Tensor) -> Sequence[Tensor]:
        """Return the tensors with aligned rows, since the operators load 16 bytes with one access."""
        return [align_rows(x if x.dtype is dtype else x.to(dtype)) for x in tensors]

    def merge(self, state: State, out: Tensor, lse: Tensor) -> None:
        self._merge(state, out, lse)

    @cached_property
    def _merge(self) -> Callable[[State, Tensor, Tensor], None]:
        if find_spec("triton") is None or not torch.accelerator.is_available():
            return merge_into
        from burst_portable.kernels.triton.merging import OnePass

        return OnePass()


def declined_by_flash(
    call: AttentionCall, largest_head: int, *, unequal: Container[tuple[int, int]] = (), softcap: bool = False
) -> str:
    """Return why no flash attention of torch or a vendor can serve a call; "" if there is no general reason.

    Args:
        call: The call, with the heads of one rank.
        largest_head: Largest head size of the library.
        unequal: Pairs of different sizes of heads and values that the library supports too.
        softcap: Whether the library supports a softcap.
    """
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    sizes = call.head_dim, call.v_head_dim
    if sizes not in unequal and call.v_head_dim != call.head_dim:
        return f"values of size {call.v_head_dim} differ from heads of size {call.head_dim}"
    if sizes not in unequal and (call.head_dim % 8 or call.head_dim > largest_head):
        return f"it takes head sizes that are multiples of 8 up to {largest_head}, not {call.head_dim}"
    if call.heads % call.kv_heads:
        return f"{call.heads} heads are not a multiple of {call.kv_heads} K/V heads"
    if call.softcap is not None and not softcap:
        return "it has no softcap"
    if not call.positive_scale:
        return "it serves only positive scales"
    return ""


class AtenFlashKernel(AcceleratorKernel):
    """Call torch's flash attention operator, which NVIDIA and AMD share. Each vendor's subclass defines `supports`."""

    name = "flash"

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        operator = torch.ops.aten._flash_attention_forward
        # No cu_seqlens, no dropout, no probabilities.
        out, lse, *_ = operator(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False, scale=scale)
        return out, lse

    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        operator = torch.ops.aten._flash_attention_backward
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
        dq, dk, dv = operator(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], 0.0, causal, seed, seed, scale=scale
        )
        return dq, dk, dv
