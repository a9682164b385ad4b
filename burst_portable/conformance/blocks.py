"""Runs one kernel by its contract alone: blocks of queries against blocks of keys, with no ranks and no transport.

for each block of queries:   for each block of keys:   attend with a list of tiles, merging into the running state
                             for each block of keys:   add gradients into buffers that lie between guards
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.conformance.cases import Case
from burst_portable.conformance.inputs import Inputs, in_memory
from burst_portable.conformance.oracle import Answer
from burst_portable.conformance.running import Shard, options_of, together
from burst_portable.kernels import whole
from burst_portable.kernels.contract import Kernel, Options
from burst_portable.numerics import State
from burst_portable.tiles import Tiles, find_tiles

_GUARD = 64  # elements before and after a buffer
_MARK = 12345.0


class Trespass(Exception):
    """A kernel wrote where it must not."""


class Guarded:
    """A buffer of zeros with marks on both sides."""

    def __init__(self, like: Tensor) -> None:
        dtype = numerics.accumulation_dtype(like.dtype)
        self._all = torch.full((like.numel() + 2 * _GUARD,), _MARK, dtype=dtype, device=like.device)
        self.view = self._all[_GUARD : _GUARD + like.numel()].view(like.shape)
        self.view.zero_()

    def check(self, what: str) -> None:
        """Raise `Trespass` if a mark is gone."""
        edges = torch.cat((self._all[:_GUARD], self._all[-_GUARD:]))
        if bool((edges != _MARK).any()):
            raise Trespass(f"the kernel wrote beside {what}")


def run_kernel(
    kernel: Kernel, case: Case, x: Inputs, device: torch.device, *, by_out: bool = False, times: int = 1
) -> Answer:
    """A case on one kernel, with `case.ranks` blocks.

    Args:
        by_out: hand the backward pass `out` and not delta.
        times: add all gradients so often, and divide by it at the end: a kernel that overwrites shows.
    """
    layout, mask, options = case.make_layout(), case.make_mask(), options_of(case)
    rows = [torch.tensor(layout.positions(block)) for block in range(case.ranks)]
    inputs = [tuple(in_memory(t[:, r], case.memory, device) for t in (x.q, x.k, x.v, x.dout)) for r in rows]
    before = [tuple(t.clone() for t in block) for block in inputs]
    pairs = [[find_tiles(mask, q, k) for k in layout.shards] for q in layout.shards]
    gradients = [tuple(Guarded(t) for t in block[:3]) for block in inputs]
    answers = []
    for mine, (q, _, _, dout) in enumerate(inputs):
        state = None
        for owner in _order(mine, case.ranks):
            if pairs[mine][owner]:
                _, k, v, _ = inputs[owner]
                state = kernel.attend(q, k, v, pairs[mine][owner], options, state=state)
        empty = numerics.empty_state(q, x.v.shape[-1])
        out, lse = numerics.finished(empty if state is None else state, case.dtype)
        delta = numerics.row_delta(dout, out)
        answers.append((out.to(case.dtype), lse))
        for owner in _order(mine, case.ranks) * times:
            if pairs[mine][owner]:
                _, k, v, _ = inputs[owner]
                into = gradients[mine][0].view, gradients[owner][1].view, gradients[owner][2].view
                given = {"out": out} if by_out else {"delta": delta}
                kernel.attend_backward(dout, q, k, v, lse, pairs[mine][owner], options, **given, into=into)
    _check_untouched(inputs, before, gradients)
    shards = []
    for (out, lse), block in zip(answers, gradients, strict=True):
        dq, dk, dv = ((g.view / times).to(case.dtype).cpu() for g in block)
        shards.append(Shard(out.cpu(), lse.cpu(), dq, dk, dv, None))
    return together(shards, layout)


def run_whole(kernel: Kernel, case: Case, x: Inputs, device: torch.device, *, parts: bool = False) -> Answer:
    """A case of one block as `kernels.whole` asks for it: no state, no buffers to add to.

    parts: as the first of several computations, which writes out where it is told, some rows of it wide.
    """
    layout, options = case.make_layout(), options_of(case)
    q, k, v, dout = (in_memory(t[:, layout.positions(0)], case.memory, device) for t in (x.q, x.k, x.v, x.dout))
    before = [tuple(t.clone() for t in (q, k, v, dout))]
    tiles = find_tiles(case.make_mask(), layout.shards[0], layout.shards[0])
    attend = _in_parts if parts else whole.attend_whole
    out, lse = numerics.finished(attend(kernel, q, k, v, tiles, options), case.dtype)
    dq, dk, dv = whole.gradients(kernel, dout, q, k, v, out.to(case.dtype), lse, tiles, options)
    _check_untouched([(q, k, v, dout)], before, [])
    out, lse, dq, dk, dv = (t.to(case.dtype).cpu() for t in (out, lse, dq, dk, dv))
    return together([Shard(out, lse, dq, dk, dv, None)], layout)


def _in_parts(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
    """As if later computations merged into the second third of all rows."""
    rows = slice(q.shape[1] // 3, 2 * q.shape[1] // 3)
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, dtype=q.dtype, device=q.device)
    wide, lse = whole.attend_first(kernel, q, k, v, tiles, options, (rows.start, rows.stop), out)
    if not out[:, rows].isnan().all():
        raise Trespass("the kernel wrote rows that are still to be merged")
    return torch.cat([out[:, : rows.start], wide[:, rows], out[:, rows.stop :]], 1), lse


def _order(mine: int, blocks: int) -> list[int]:
    """As a ring would bring them."""
    return [(mine - distance) % blocks for distance in range(blocks)]


def _check_untouched(
    inputs: list[tuple[Tensor, ...]], before: list[tuple[Tensor, ...]], gradients: list[tuple[Guarded, ...]]
) -> None:
    for block, copies in zip(inputs, before, strict=True):
        for name, now, then in zip("qkvd", block, copies, strict=True):
            if not torch.equal(now, then):
                raise Trespass(f"the kernel changed its input {'dO' if name == 'd' else name}")
    for guarded in gradients:
        for name, buffer in zip(("dq", "dk", "dv"), guarded, strict=True):
            buffer.check(name)
