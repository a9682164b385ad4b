"""What is done to blocks besides attention: packing, merging, adding up. Counted in bytes of a device's memory.

These are passes over memory between a plan's kernels, in which no multiplication is done and the next kernel waits.
Each number below is what the code named beside it reads and writes.
"""

from __future__ import annotations

from collections.abc import Iterable

from burst_portable.moves import Move
from burst_portable.packets import message_size
from burst_portable.plans import Compute, PassName, Problem

_PACKED = 2  # a message is read and written once: `executor._Exchange._outgoing`
_ADDED = 3  # a message of gradients that came is read and added to as many bytes: `executor._Results._add`
_MADE = 3  # room for gradients is zeroed, then read and written by the kernel: `executor._Results.accumulators`
_THERE, _BACK = 4, 6  # a tensor is packed and put in order; coming back, once more: `reshard`
# Bytes a number of 16 bits in float32: a kernel that merges in its epilogue reads and writes its running out, one that
# is called on pieces takes `numerics.merge_into` and, backward, `numerics.surrogate_out` and a sum of each gradient.
_RUNNING = 8
_PIECE_MERGED, _PIECE_STARTED, _PIECE_ADDED = 26, 52, 10


def packed(problem: Problem, sends: Iterable[Move], rank: int, done: set[tuple[int, int]]) -> int:
    """For the blocks of its own that a rank sends at a step; `done` are the rows that it has packed."""
    fresh = {m.rows: m for m in sends if m.owner == rank and m.rows not in done}
    done.update(fresh)
    return sum(_PACKED * message_size(problem, m) for m in fresh.values())


def added(problem: Problem, arrivals: Iterable[Move]) -> int:
    """For gradients that have come."""
    return sum(_ADDED * message_size(problem, m) for m in arrivals)


def made(problem: Problem, result_sends: Iterable[Move]) -> int:
    """For gradients of foreign blocks, besides what the kernel does for its own."""
    return sum(_MADE * message_size(problem, m) for m in result_sends)


def merged(problem: Problem, pass_name: PassName, compute: Compute, *, first: bool, in_pieces: bool) -> int:
    """For putting what a launch makes to what launches before it have made; `first`: there was none."""
    rows = [tile.rows for tile in compute.tiles]
    d, dv, batch = problem.head_dim, problem.value_dim, problem.batch
    if pass_name == "forward":
        if in_pieces:  # each piece is merged; the first, where it has all rows, is kept as it is
            return _PIECE_MERGED * (sum(rows) - first * max(rows, default=0)) * problem.heads * dv * batch
        return 0 if first else _RUNNING * max(rows, default=0) * problem.heads * dv * batch
    if not in_pieces:
        return 0
    columns = sum(tile.columns for tile in compute.tiles)
    queries = _PIECE_STARTED * max(rows, default=0) * dv + _PIECE_ADDED * sum(rows) * d
    return batch * (queries * problem.heads + _PIECE_ADDED * columns * problem.kv_heads * (d + dv))


def resharded(problem: Problem, pass_name: PassName, rank: int) -> int:
    """For taking a rank's tensors to head shards and back."""
    rows = problem.q_layout.count(rank) * problem.batch * problem.itemsize
    q, out = problem.heads * problem.head_dim, problem.heads * problem.value_dim
    kv = max(problem.kv_heads, problem.ranks) * (problem.head_dim + problem.value_dim)
    there, back = (q + kv, out) if pass_name == "forward" else (out, q + kv)
    return rows * (_THERE * there + _BACK * back)
