"""Choose how many heads a launch computes at the same time.

The programs of one head read the same rows. If few heads run at the same time, the L2 holds these rows. But long work
rows come first within these heads only. Those of the last heads start late, and most multiprocessors may be idle until
they end. So more heads run at the same time where the launch would end clearly earlier.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapreplace

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable

_L2_SHARE = 8 << 20  # bytes in the L2 of K and V (backward: Q and dO) of heads that run at the same time
_L2_LIMIT = 64 << 20  # maximum of these bytes if more heads end earlier
_EARLIER = 1.02  # by which a launch must end earlier if more heads are to run at the same time
_START = 2  # inner blocks in whose time a program starts and ends
_SHORT = 50  # a last program that takes less than 1/_SHORT of the launch is not worth another order
_PROGRAMS = 8192  # of a launch, up to which its end is predicted; this takes about 5 ms of the host
_WAITING = 4  # maximum number of programs of a head that run at the same time and begin with the same block of dQ


def side_by_side(
    table: LaunchTable, span: int, heads: int, group: int, all_heads: int, bytes_per_kv_head: int, processors: int
) -> int:
    """Return the number of heads whose programs run at the same time, a divisor of `heads`.

    Args:
        table: Work rows of each head.
        span: Query heads that one program computes. In the following, a head is `span` query heads.
        heads: Heads of a batch row.
        group: Heads that share a K/V head.
        all_heads: Heads of all batch rows.
        bytes_per_kv_head: Bytes that the programs of one K/V head read from the same rows.
        processors: Multiprocessors of the device.
    """
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]

    def most(share: int) -> int:
        fitting = max(1, share // max(1, bytes_per_kv_head)) * group
        return max(d for d in divisors if d == 1 or d <= fitting)

    waiting = 1.0 if table.follows else table.together
    least = math.ceil(processors * waiting / _WAITING)
    few = max(most(_L2_SHARE), next((d for d in divisors if d >= least), heads))
    is_short = table.longest * processors * _SHORT <= table.total * all_heads
    if is_short or table.blocks * all_heads > _PROGRAMS:
        return few
    choices = [d for d in divisors if d == few or few < d <= most(_L2_LIMIT)]
    lengths = [span * length for length in table.lengths]
    # No launch ends before `least_end`. Masks of packed documents differ in each batch, so few ends are predicted.
    least_end = max(max(lengths) + _START, sum(length + _START for length in lengths) * all_heads / processors)
    ends: list[int] = []
    for side in choices:
        ends.append(predict_end(lengths, all_heads, side, processors))
        if ends[-1] <= _EARLIER * least_end:
            break
    return next(d for d, end in zip(choices, ends, strict=False) if end <= _EARLIER * min(ends))


def predict_end(lengths: Sequence[int], all_heads: int, side: int, processors: int) -> int:
    """Return when the last program ends, in the time of inner blocks, if `side` heads run at the same time.

    A multiprocessor that becomes idle takes the next program: the work rows of `side` heads in turn, then of the next.
    """
    busy = [0] * processors
    for _ in range(all_heads // side):
        for length in lengths:
            for _ in range(side):
                heapreplace(busy, busy[0] + length + _START)
    return max(busy)
