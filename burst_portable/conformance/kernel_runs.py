"""Run one case on one kernel, block by block as in a ring or in a single call, and check what it writes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.conformance.base import record_kernel
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import Answer, Inputs, in_memory
from burst_portable.conformance.running import gather_shards
from burst_portable.kernels.base import BackwardInputs, Kernel
from burst_portable.kernels.checked_kernel import CheckedKernel
from burst_portable.mask import UNBOUNDED
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles, find_tiles, make_tile
from burst_portable.runtime.local_result import attend_first

_GUARD = 64  # elements before and after a buffer
_MARK = 12345.0


class OutOfBoundsWriteError(Exception):
    """A kernel wrote outside of its buffers."""


class Guarded:
    """A buffer of zeros, with known values before and after the rows of each sequence.

    As in a ring, whose messages hold the sums of dK and dV of a sequence one after the other, the buffer of several
    sequences is not contiguous.
    """

    def __init__(self, like: Tensor) -> None:
        dtype = numerics.accumulation_dtype(like.dtype)
        batch, sequence = like.shape[0], like[0].numel()
        self._all = torch.full((batch, sequence + 2 * _GUARD), _MARK, dtype=dtype, device=like.device)
        self.view = self._all[:, _GUARD : _GUARD + sequence].view(like.shape)
        self.view.zero_()

    def check(self, name: str) -> None:
        """Raise `OutOfBoundsWriteError` if a value before or after the buffer changed. `name` is for the message."""
        edges = torch.cat((self._all[:, :_GUARD], self._all[:, -_GUARD:]))
        if bool((edges != _MARK).any()):
            raise OutOfBoundsWriteError(f"the kernel wrote outside of {name}")


def run_kernel(
    kernel: Kernel, case: Case, x: Inputs, device: torch.device, *, by_out: bool = False, times: int = 1
) -> Answer:
    """Run a case on one kernel, with `case.ranks` blocks. If `by_out`, the backward pass gets `out` instead of delta.

    All gradients are added `times` times, and the sums divided by it: a kernel that overwrites fails.
    """
    record_kernel(kernel.name)
    kernel = CheckedKernel(kernel)
    layout, mask, call = case.make_layout(), case.make_mask(), case.make_call(device.type)
    rows = [torch.tensor(layout.positions(block)) for block in range(case.ranks)]
    inputs = [tuple(in_memory(t[:, r], case.memory, device) for t in (x.q, x.k, x.v, x.dout)) for r in rows]
    before = [tuple(t.clone() for t in block) for block in inputs]
    gradients = [tuple(Guarded(t) for t in block[:3]) for block in inputs]
    answers = []
    for rank, (q, _, _, dout) in enumerate(inputs):
        # K/V blocks in the order in which they arrive in a ring
        owners = [(rank - distance) % case.ranks for distance in range(case.ranks)]
        pairs = ((owner, find_tiles(mask, layout.shards[rank], layout.shards[owner])) for owner in owners)
        steps = [(owner, inputs[owner][1], inputs[owner][2], tiles) for owner, tiles in pairs if tiles]
        state = None
        for _, k, v, tiles in steps:
            state = kernel.attend(q, k, v, tiles, call, state=state)
        empty = numerics.empty_state(q, x.v.shape[-1])
        out, lse = numerics.finished(empty if state is None else state, case.dtype)
        delta = numerics.row_delta(dout, out)
        answers.append((out.to(case.dtype), lse))
        for owner, k, v, tiles in steps * times:
            into = gradients[rank][0].view, gradients[owner][1].view, gradients[owner][2].view
            backward = BackwardInputs(dout, q, k, v, lse, *((out, None) if by_out else (None, delta)))
            kernel.attend_backward(backward, tiles, call, into=into)
    _check_untouched(inputs, before, gradients)
    shards = []
    for (out, lse), block in zip(answers, gradients, strict=True):
        dq, dk, dv = ((g.view / times).to(case.dtype).cpu() for g in block)
        shards.append(Answer(out.cpu(), lse.cpu(), dq, dk, dv))
    return gather_shards(shards, layout)


def run_single_call(kernel: Kernel, case: Case, x: Inputs, device: torch.device, *, parts: bool = False) -> Answer:
    """Run a case of one block as a single kernel call, without a state or buffers to add to.

    If `parts`, run it as the first of several launches. It writes most rows of `out` directly, and some in float32.
    """
    record_kernel(kernel.name)
    kernel = CheckedKernel(kernel)
    layout, call = case.make_layout(), case.make_call(device.type)
    q, k, v, dout = (in_memory(t[:, layout.positions(0)], case.memory, device) for t in (x.q, x.k, x.v, x.dout))
    before = tuple(t.clone() for t in (q, k, v, dout))
    tiles = find_tiles(case.make_mask(), layout.shards[0], layout.shards[0])
    state = _in_parts(kernel, q, k, v, tiles, call) if parts else kernel.forward_single_call(q, k, v, tiles, call)
    out, lse = numerics.finished(state, case.dtype)
    inputs = BackwardInputs(dout, q, k, v, lse, out.to(case.dtype))
    dq, dk, dv = kernel.backward_single_call(inputs, tiles, call)
    _check_untouched([(q, k, v, dout)], [before], [])
    return gather_shards([Answer(*(t.to(case.dtype).cpu() for t in (out, lse, dq, dk, dv)))], layout)


def run_block(kernel: Kernel, call: AttentionCall, x: Inputs, device: torch.device) -> Iterator[tuple[str, Answer]]:
    """Run a kernel on one block in which every query sees every key, and yield each way to run it and its answer.

    The numbers of queries and keys may differ.
    """
    record_kernel(kernel.name)
    kernel = CheckedKernel(kernel)
    q, k, v, dout = (t.to(device) for t in (x.q, x.k, x.v, x.dout))
    tile = make_tile(0, q.shape[1], 0, k.shape[1], -UNBOUNDED, UNBOUNDED)
    assert tile is not None, "every pair is visible"
    tiles = Tiles((tile,))
    for how in ("", " as a single call"):
        state = kernel.forward_single_call(q, k, v, tiles, call) if how else kernel.attend(q, k, v, tiles, call)
        out, lse = numerics.finished(state, q.dtype)
        inputs = BackwardInputs(dout, q, k, v, lse, out.to(q.dtype))
        if how:
            gradients = kernel.backward_single_call(inputs, tiles, call)
        else:
            dq, dk, dv = (torch.zeros(t.shape, dtype=out.dtype, device=device) for t in (q, k, v))
            kernel.attend_backward(inputs, tiles, call, into=(dq, dk, dv))
            gradients = dq, dk, dv
        yield how, Answer(out.cpu(), lse.cpu(), *(t.cpu() for t in gradients))


def _in_parts(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall) -> State:
    """Run the forward pass as if later launches merged into the second third of all rows."""
    rows = slice(q.shape[1] // 3, 2 * q.shape[1] // 3)
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, dtype=q.dtype, device=q.device)
    wide, lse = attend_first(kernel, q, k, v, tiles, call, (rows.start, rows.stop), out)
    if not out[:, rows].isnan().all():
        raise OutOfBoundsWriteError("the kernel wrote rows of out that later launches merge")
    return torch.cat([out[:, : rows.start], wide[:, rows], out[:, rows.stop :]], 1), lse


def _check_untouched(
    inputs: list[tuple[Tensor, ...]], before: list[tuple[Tensor, ...]], gradients: list[tuple[Guarded, ...]]
) -> None:
    for block, copies in zip(inputs, before, strict=True):
        for name, now, then in zip("qkvd", block, copies, strict=True):
            if not torch.equal(now, then):
                raise OutOfBoundsWriteError(f"the kernel changed its input {'dO' if name == 'd' else name}")
    for guarded in gradients:
        for name, buffer in zip(("dq", "dk", "dv"), guarded, strict=True):
            buffer.check(name)
