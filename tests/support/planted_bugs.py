"""Define wrong backends: a real one with one bug each, in its kernels or transport.

`--backend` of pytest selects the real one.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.base import Backend, Capabilities, Probe
from burst_portable.backends.selection import load
from burst_portable.comm.base import Transport
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import Kernel, LazyKernel, Support
from burst_portable.layout import Segment
from burst_portable.numerics import Compensated, State, accumulation_dtype, merge_rows, per_row
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.tiles import Positions, Tile, Tiles, make_tile
from tests.support.planted_transports import TransportWrapper


class KernelWrapper(Kernel):
    """A kernel that forwards to the real one. A bug overrides a method. It has no traits."""

    name = ""

    def __init__(self, kernel: Kernel | LazyKernel) -> None:
        self.kernel, self.name = kernel, kernel.name

    def supports(self, call: Any) -> Any:
        return self.kernel.supports(call)

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return self.kernel.load().attend(q, k, v, tiles, call, state=state)

    def attend_backward(self, x, tiles, call, *, into):
        self.kernel.load().attend_backward(x, tiles, call, into=into)


def changed_state(state: State, *, out: Tensor | None = None, lse: Tensor | None = None) -> State:
    """Return a running state of the same type with other numbers."""
    new = state[0] if out is None else out, state[1] if lse is None else lse
    return Compensated(*new, state.lost) if isinstance(state, Compensated) else new


class WrongScale(KernelWrapper):
    """Use 1/D instead of 1/sqrt(D)."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return super().attend(q, k, v, tiles, replace(call, scale=call.scale**2), state=state)


class OwnScale(KernelWrapper):
    """Use 1/sqrt(D) in both passes, whatever scale is given."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return super().attend(q, k, v, tiles, replace(call, scale=q.shape[-1] ** -0.5), state=state)

    def attend_backward(self, x, tiles, call, *, into):
        super().attend_backward(x, tiles, replace(call, scale=x.q.shape[-1] ** -0.5), into=into)


class DefaultScaleForZero(KernelWrapper):
    """Use 1/sqrt(D) in both passes if the scale is 0, as if none were given."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        scale = call.scale or q.shape[-1] ** -0.5
        return super().attend(q, k, v, tiles, replace(call, scale=scale), state=state)

    def attend_backward(self, x, tiles, call, *, into):
        scale = call.scale or x.q.shape[-1] ** -0.5
        super().attend_backward(x, tiles, replace(call, scale=scale), into=into)


class LocalColumns(KernelWrapper):
    """Drop weights by the index of a key in its block, not by its position in the sequence."""

    traits = KernelTraits(supports_dropout=True)

    def _local(self, tiles: Tiles, columns: int) -> Tiles:
        return Tiles(tiles, tiles.positions and (tiles.positions[0], Positions([Segment(0, columns)])))

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return super().attend(q, k, v, self._local(tiles, k.shape[1]), call, state=state)

    def attend_backward(self, x, tiles, call, *, into):
        super().attend_backward(x, self._local(tiles, x.k.shape[1]), call, into=into)


class OtherTiles(KernelWrapper):
    """Compute other pairs than requested, equally in forward and backward."""

    def changed(self, tile: Tile) -> Tile | None:
        raise NotImplementedError

    def _changed(self, tiles: Tiles) -> Tiles:
        return Tiles(t for t in map(self.changed, tiles) if t is not None)

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return super().attend(q, k, v, self._changed(tiles), call, state=state)

    def attend_backward(self, x, tiles, call, *, into):
        super().attend_backward(x, self._changed(tiles), call, into=into)


class BandOffByOne(OtherTiles):
    """End a window one token too early."""

    def changed(self, tile):
        bounded = tile.hi < tile.q_stop - 1 - tile.k_start
        hi = tile.hi - 1 if bounded else tile.hi
        return make_tile(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop, tile.lo, hi)


class FewBlocks(OtherTiles):
    """Ignore keys past the first 512 of a tile, which are two blocks of 256."""

    def changed(self, tile):
        stop = min(tile.k_stop, tile.k_start + 512)
        return make_tile(tile.q_start, tile.q_stop, tile.k_start, stop, tile.lo, tile.hi)


class Repeats(KernelWrapper):
    """Correct kernel with all methods that `repeated-calls` runs."""

    def __init__(self, kernel: Kernel | LazyKernel) -> None:
        super().__init__(kernel)
        self._kept = threading.local()
        self.traits = KernelTraits(supports_dropout=kernel.load().traits.supports_dropout)

    def _in_kept(self, name: str, *results: Tensor) -> tuple[Tensor, ...]:
        """Copy results into buffers that the thread keeps for each shape."""
        shapes = (name, *(x.shape for x in results), results[0].dtype)
        kept = self._kept.__dict__.setdefault(shapes, tuple(map(torch.empty_like, results)))
        for buffer, result in zip(kept, results, strict=True):
            buffer.copy_(result)
        return kept


class KeepsOut(Repeats):
    """Return the output of a single call in a buffer that the next call uses again."""

    def forward_single_call(self, q, k, v, tiles, call, *, yields_to_comm=False):
        out, lse = self.attend(q, k, v, tiles, call)
        return self._in_kept("out", out)[0], lse


class KeepsGradients(Repeats):
    """Return the gradients of a single call in buffers that the next call uses again."""

    def backward_single_call(self, x, tiles, call):
        return self._in_kept("gradients", *super().backward_single_call(x, tiles, call))


class KeepsSettings(Repeats):
    """Compile a setting into the kernel of the first call that has it."""

    def _with_first(self, call):
        raise NotImplementedError

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return super().attend(q, k, v, tiles, self._with_first(call), state=state)

    def attend_backward(self, x, tiles, call, *, into):
        super().attend_backward(x, tiles, self._with_first(call), into=into)


class KeepsSoftcap(KeepsSettings):
    def _with_first(self, call):
        if call.softcap is None:
            return call
        return replace(call, softcap=self._kept.__dict__.setdefault("softcap", call.softcap))


class LeavesOutLargeSoftcap(KeepsSettings):
    """Use no softcap above 30, where it changes scores of usual size by less than 0.1 %."""

    def _with_first(self, call):
        return replace(call, softcap=None) if (call.softcap or 0.0) > 30 else call


class KeepsSeed(KeepsSettings):
    def _with_first(self, call):
        if call.dropout is None:
            return call
        seed = self._kept.__dict__.setdefault("seed", call.dropout.seed)
        return replace(call, dropout=call.dropout._replace(seed=seed))


class WrongIfYielding(Repeats):
    """Leave out the last key if communication kernels may be waiting."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        if yields_to_comm and k.shape[1] > 1:
            tiles = Tiles([t for tile in tiles if (t := tile.clipped(0, 1 << 40, 0, k.shape[1] - 1))], tiles.positions)
        return super().attend(q, k, v, tiles, call, state=state)


class WrongDelta(Repeats):
    """Sum rowsum(dO * O) in bfloat16."""

    def row_delta(self, dout, out):
        return super().row_delta(dout, out).bfloat16().to(accumulation_dtype(dout.dtype))


class FewHeads(KernelWrapper):
    """Return 0 for heads past the first 32."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, out=torch.cat([state[0][:, :, :32], torch.zeros_like(state[0][:, :, 32:])], 2))


class FewPrograms(KernelWrapper):
    """Return 0 for heads past the first 64 of all sequences together."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        out, lse = super().attend(q, k, v, tiles, call, state=state)
        pairs = torch.arange(q.shape[0] * q.shape[2], device=q.device).view(q.shape[0], 1, q.shape[2], 1)
        return changed_state((out, lse), out=torch.where(pairs < 64, out, torch.zeros_like(out)))


class NarrowValues(KernelWrapper):
    """Return 0 past the size of a key if values are wider."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state, size = super().attend(q, k, v, tiles, call, state=state), q.shape[3]
        columns = torch.arange(v.shape[3], device=q.device)
        return changed_state(state, out=torch.where(columns < size, state[0], torch.zeros_like(state[0])))


class FewTokens(KernelWrapper):
    """Add to the LSE of 16-bit calls if a block has one token."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, lse=state[1] + 0.1) if q.itemsize == 2 and q.shape[1] == 1 else state


class ManyGrouped(KernelWrapper):
    """Double the output if more than 16 query heads read one K/V head."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, out=2 * state[0]) if q.shape[2] > 16 * k.shape[2] else state


class FlatBuffers(KernelWrapper):
    """Add gradients to contiguous copies of the buffers, as `into[0].reshape(-1)` makes them."""

    def attend_backward(self, x, tiles, call, *, into):
        super().attend_backward(x, tiles, call, into=tuple(total.contiguous() for total in into))


class FewSequences(FewHeads):
    """Return 0 for sequences of a batch past the first 8."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = KernelWrapper.attend(self, q, k, v, tiles, call, state=state)
        return changed_state(state, out=torch.cat([state[0][:8], torch.zeros_like(state[0][8:])]))


class BottomRight(OtherTiles):
    """Align causal tiles that are not square at their last row and column."""

    def changed(self, tile):
        if tile.full or tile.rows == tile.columns:
            return tile
        shift = (tile.q_stop - tile.k_stop) - (tile.q_start - tile.k_start)
        return make_tile(tile.q_start, tile.q_stop, tile.k_start, tile.k_stop, tile.lo + shift, tile.hi)


class StaleKeys(KernelWrapper):
    """Use in backward the first K and V of each shape that the thread has seen."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._kept = threading.local()

    def attend_backward(self, x, tiles, call, *, into):
        shapes = (*x.k.shape, *x.v.shape, x.k.dtype)
        k, v = self._kept.__dict__.setdefault(shapes, (x.k.clone(), x.v.clone()))
        super().attend_backward(x._replace(k=k, v=v), tiles, call, into=into)


class Base2(KernelWrapper):
    """Return LSE as a logarithm to base 2. The kernel accepts its own states."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = None if state is None else changed_state(state, lse=state[1] * math.log(2))
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, lse=state[1] / math.log(2))


class MergedBase2(KernelWrapper):
    """Merge results whose LSE is in base 2 as if it were natural."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        out, lse = super().attend(q, k, v, tiles, call)
        part = out.double(), lse.double() / math.log(2)
        if state is None:
            return part
        merge_rows(state, slice(None), *part)
        return state


class ShiftedLse(KernelWrapper):
    """Add a constant to the LSE. The kernel accepts its own states."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = None if state is None else changed_state(state, lse=state[1] - 1e-3)
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, lse=state[1] + 1e-3)


class CountsThrice(KernelWrapper):
    """Return the LSE of a state into which the same keys were merged three times, as a stale state does."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, lse=state[1] + math.log(3))


class ReturnsNothing(KernelWrapper):
    """Merge into the state, and return None."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        super().attend(q, k, v, tiles, call, state=state)


class TransposedLse(KernelWrapper):
    """Return LSE as [B, S, H]."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, lse=state[1].mT)


class EmptyRows(KernelWrapper):
    """Give rows without keys a wrong LSE."""

    value = 0.0

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, lse=torch.where(state[1] == -math.inf, self.value, state[1]))


class EmptyRowsInfinite(EmptyRows):
    """Give rows without keys an infinite LSE, as aten's flash attention on CUDA does."""

    value = math.inf


class SixteenBits(KernelWrapper):
    """Keep sums in bfloat16: the running out, and the gradients."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, out=state[0].bfloat16().to(state[0].dtype))

    def attend_backward(self, x, tiles, call, *, into):
        super().attend_backward(x, tiles, call, into=into)
        for total in into:
            total.copy_(total.bfloat16())


class SixteenBitsOf16(SixteenBits):
    """Keep sums in bfloat16 only for 16-bit inputs. A single rounding is within the tolerance, and thirty are not."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        way = SixteenBits if q.dtype.itemsize == 2 else KernelWrapper
        return way.attend(self, q, k, v, tiles, call, state=state)

    def attend_backward(self, x, tiles, call, *, into):
        way = SixteenBits if x.q.dtype.itemsize == 2 else KernelWrapper
        way.attend_backward(self, x, tiles, call, into=into)


class SixteenBitBlocks(KernelWrapper):
    """Keep sums over blocks of 16-bit inputs in bfloat16, within one call."""

    block = 64

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        if q.dtype.itemsize != 2:
            return super().attend(q, k, v, tiles, call, state=state)
        state = Compensated.empty(q, v.shape[-1]) if state is None else state
        (tile,) = tiles
        total, top = torch.zeros((), dtype=q.dtype), torch.full((), -math.inf)
        parts = []
        for start in range(tile.k_start, tile.k_stop, self.block):
            stop = min(start + self.block, tile.k_stop)
            part = Tiles((make_tile(tile.q_start, tile.q_stop, start, stop, tile.lo, tile.hi),))
            out, lse = super().attend(q, k, v, part, call)
            top, before = torch.maximum(top, lse), top
            fade, weight = (per_row(torch.exp(x - top)).float() for x in (before, lse))
            total = (total * fade + out.float() * weight).to(torch.bfloat16)
            parts.append(lse)
        lse = torch.logsumexp(torch.stack(parts), 0)
        merge_rows(state, slice(None), total.float() / per_row(torch.exp(lse - top)), lse.float())
        return state


class SixteenBitGradientBlocks(KernelWrapper):
    """Keep sums of gradients over blocks of 16-bit inputs in bfloat16, within one call."""

    block = 64

    def attend_backward(self, x, tiles, call, *, into):
        if x.q.dtype.itemsize != 2:
            super().attend_backward(x, tiles, call, into=into)
            return
        (tile,), sums = tiles, tuple(torch.zeros_like(total) for total in into)
        for start in range(tile.q_start, tile.q_stop, self.block):
            stop = min(start + self.block, tile.q_stop)
            part = Tiles((make_tile(start, stop, tile.k_start, tile.k_stop, tile.lo, tile.hi),))
            super().attend_backward(x, part, call, into=sums)
            for total in sums[1:]:
                total.copy_(total.bfloat16())
        for total, part in zip(into, sums, strict=True):
            total += part


class DropsRaggedBlock(OtherTiles):
    """Ignore a last block of fewer than 64 keys, unless it is the first. Supports 16 bits only, as most kernels."""

    def supports(self, call):
        return super().supports(call) if call.itemsize == 2 else Support(False, "it supports 16 bits only")

    def changed(self, tile):
        columns = tile.k_stop - tile.k_start
        stop = tile.k_stop if columns < 64 else tile.k_stop - columns % 64
        return make_tile(tile.q_start, tile.q_stop, tile.k_start, stop, tile.lo, tile.hi)


class RoundsFloat64(KernelWrapper):
    """Round inputs in float64 to float32."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        q, k, v = (x.float().to(x.dtype) if x.dtype is torch.float64 else x for x in (q, k, v))
        return super().attend(q, k, v, tiles, call, state=state)


class Coarse(KernelWrapper):
    """Multiply numbers with `bits` bits of mantissa and state a rounding of 10 bits."""

    bits, traits = 10, KernelTraits(rounding=2**-10)

    def _rounded(self, *tensors):
        low = 23 - self.bits
        return (
            ((x.view(torch.int32) + (1 << (low - 1))) >> low << low).view(x.dtype) if x.dtype is torch.float32 else x
            for x in tensors
        )

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return super().attend(*self._rounded(q, k, v), tiles, call, state=state)

    def attend_backward(self, x, tiles, call, *, into):
        dout, q, k, v = self._rounded(x.dout, x.q, x.k, x.v)
        x = x._replace(dout=dout, q=q, k=k, v=v)
        super().attend_backward(x, tiles, call, into=into)


class CoarserThanItSays(Coarse):
    bits = 7


class ExcusesItself(WrongScale):
    """State a rounding that allows any error."""

    traits = KernelTraits(rounding=1.0)


class WritesNowhere(KernelWrapper):
    """State that it writes into given outputs, without the method."""

    traits = KernelTraits(writes_into=True)


class UntypedTraits(KernelWrapper):
    traits: Any = None


class SaysNothingOfIt(Coarse):
    traits = KernelTraits()


class HeadsByRemainder(KernelWrapper):
    """Let query head h read K/V head h % Hkv in the forward pass, as if K and V were tiled over heads."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        order = torch.arange(q.shape[2], device=q.device).view(-1, k.shape[2]).T.flatten()
        places = order.argsort()
        if state is not None:
            state = changed_state(state, out=state[0][:, :, order].contiguous(), lse=state[1][:, order].contiguous())
        found = super().attend(q[:, :, order].contiguous(), k, v, tiles, call, state=state)
        return changed_state(found, out=found[0][:, :, places], lse=found[1][:, places])


class SwappedGradients(KernelWrapper):
    """Swap dK and dV if their shapes are equal."""

    def attend_backward(self, x, tiles, call, *, into):
        dq, dk, dv = into
        into = (dq, dv, dk) if dk.shape == dv.shape else into
        super().attend_backward(x, tiles, call, into=into)


class SwappedAsAWhole(KernelWrapper):
    """Swap dK and dV in single-call gradients."""

    def backward_single_call(self, x, tiles, call):
        dq, dk, dv = self.kernel.load().backward_single_call(x, tiles, call)
        return dq, dv, dk


class WritesIntoOutputs(KernelWrapper):
    """Correct kernel that writes into the given outputs."""

    traits = KernelTraits(writes_into=True)

    def attend_into(self, q, k, v, tiles, call, out, lse, *, yields_to_comm=False):
        for told, made in zip((out, lse), self.attend(q, k, v, tiles, call), strict=True):
            told.copy_(made)


class WritesItsLseElsewhere(WritesIntoOutputs):
    """Write the LSE of a part of the rows into the first rows."""

    def attend_into(self, q, k, v, tiles, call, out, lse, *, yields_to_comm=False):
        start = lse.as_strided(lse.shape, lse.stride(), 0)
        super().attend_into(q, k, v, tiles, call, out, start)


class Overwrites(KernelWrapper):
    """Overwrite gradients instead of accumulating them."""

    def attend_backward(self, x, tiles, call, *, into):
        for total in into:
            total.zero_()
        super().attend_backward(x, tiles, call, into=into)


class ForgetsKeyGradients(KernelWrapper):
    """Leave the gradients of keys as they are."""

    def attend_backward(self, x, tiles, call, *, into):
        dq, dk, dv = into
        super().attend_backward(x, tiles, call, into=(dq, dk.clone(), dv))


class ForgetsRows(KernelWrapper):
    """Leave rows outside all tiles as uninitialized memory."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        blind = (state[1] == -math.inf).transpose(1, 2).unsqueeze(-1)
        return changed_state(state, out=torch.where(blind, torch.empty_like(state[0]), state[0]))


class SinksEveryHop(KernelWrapper):
    """Count the calls of a pass, so that a test can make `add_sinks` merge the sinks once per call."""

    calls = threading.local()

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        self.calls.count = 1 if state is None else self.calls.count + 1
        return super().attend(q, k, v, tiles, call, state=state)


class ClaimsTooMuch(KernelWrapper):
    """Support every call. `changed`: whether the kernel declined a call, so that this is a bug."""

    changed = False

    def supports(self, call):
        support = self.kernel.supports(call)
        type(self).changed |= not support.ok
        return type(support)(True)


class NoReasons(KernelWrapper):
    """Decline without a reason. `changed` is as above."""

    changed = False

    def supports(self, call):
        support = self.kernel.supports(call)
        type(self).changed |= not support.ok
        return type(support)(support.ok)


class RaisesInSupports(KernelWrapper):
    """Raise in `supports`."""

    def supports(self, call):
        raise KeyError(call.head_dim)


class SaysTrue(KernelWrapper):
    """Return a bool instead of a `Support`."""

    def supports(self, call):
        return True


class FewSizes(KernelWrapper):
    """Correct kernel that supports only what kernels for tensor cores often support."""

    def supports(self, call):
        support = self.kernel.supports(call)
        if call.itemsize == 2 and call.head_dim == 64 and not call.deterministic:
            return support
        return type(support)(False, "16 bits, head size 64, sums in any order")

    def attend_backward(self, x, tiles, call, *, into):
        if call.deterministic:
            raise UnsupportedError("sums come in any order")
        super().attend_backward(x, tiles, call, into=into)


class Unsteady(KernelWrapper):
    """Return slightly different numbers in each call."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        state = super().attend(q, k, v, tiles, call, state=state)
        return changed_state(state, out=state[0] * (1 + float(torch.rand(())) * 4e-7))


class SideStream(KernelWrapper):
    """Run on a separate stream that is not synchronized with the current one. For devices with streams."""

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        with torch.Stream(q.device):
            return super().attend(q, k, v, tiles, call, state=state)

    def attend_backward(self, x, tiles, call, *, into):
        with torch.Stream(x.q.device):
            super().attend_backward(x, tiles, call, into=into)


@dataclass(frozen=True)
class Planted(Backend):
    """A backend with a bug in each of its kernels, or in its own transport between processes."""

    bug: Callable[[Kernel | LazyKernel], Kernel] = KernelWrapper
    wire: Callable[[Transport], Transport] = TransportWrapper
    real: Any = field(default_factory=lambda: load("cpu"))
    name: str = "planted"
    direct_transport: str = ""  # named, but missing

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by name: kernels may keep tensors of a device, which other processes cannot use."""
        return recreate_planted, (self.bug, self.wire, self.real.name, self.name, self.direct_transport)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.real.capabilities, direct_transport=self.direct_transport)

    def probe(self) -> Probe:
        return self.real.probe()

    def kernels(self) -> tuple[Kernel, ...]:
        return tuple(self.bug(kernel) for kernel in self.real.kernels())

    def transport(self, group: Any, timeout: float) -> Transport:
        return self.wire(self.real.transport(group, timeout))


def recreate_planted(bug: Any, wire: Any, real: str, name: str, direct_transport: str) -> Planted:
    """Create a `Planted` in another process."""
    return Planted(bug, wire, load(real), name, direct_transport)
