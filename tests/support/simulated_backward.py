"""Simulate when programs of a backward launch run on a device, and how long they wait for additions of others."""

from __future__ import annotations

import heapq
import itertools

from burst_portable.backends.cuda.hopper.block_tables import LaunchTable
from burst_portable.backends.cuda.hopper.cuts import BackwardCut, PassSizes
from burst_portable.backends.cuda.hopper.head_order import side_by_side
from tests.support.launch_tables import walked

# Microseconds of heads of 64 on one H200: with them, 4,096 causal tokens take 192 us, and 243 us in the order of
# 2026-11-28. Measured were 191 and 243 us.
BLOCK = 2.15  # computation of an inner block
START, END = 3.0, 1.0  # of a program
READ = 0.6  # after an addition to dQ has begun, until the worker may write the next one
SEEN = 1.8  # after it has begun, until the next program sees it

_ADDERS = 2  # each begins an addition when its previous one is seen

Visits = list[tuple[int, int, int]]
"""Number of the inner block, turn of the visit, and turn of the next visit. Turns of a table without order are 0."""


def visits_of(table: LaunchTable, *, ordered: bool) -> list[Visits]:
    """Return the visits of each work row."""
    numbers, rows = table.numbers, []
    for n in range(table.blocks):
        row = numbers[16 * n : 16 * n + 8]
        visits: Visits = []
        for r in range(row[2]):
            count = numbers[row[1] + 2 * r + 1]
            first, turn, following, _ = numbers[row[7] + 4 * r : row[7] + 4 * r + 4] if ordered else (0, 0, 0, 0)
            visits += [(first + i, turn, following) for i in walked(count)]
        rows.append(visits)
    return rows


def end_of(cut: BackwardCut, table: LaunchTable, sizes: PassSizes) -> float:
    """Return the microseconds until the last program of a launch ends.

    Programs start in the order of the grid, each on the multiprocessor that is idle first. They wait only for programs
    that start before them, so one pass over all of them is enough.
    """
    span, rows = cut.span, visits_of(table, ordered=cut.ordered)
    heads, all_heads, group = sizes.heads // span, sizes.all_heads // span, sizes.group // span
    read = sizes.rows * sizes.dim * 4 * sizes.group
    side = side_by_side(table, span, heads, group, all_heads, read, sizes.processors)
    idle = [0.0] * sizes.processors
    seen: dict[tuple[int, int, int], float] = {}  # when the visit before the one of this head, block and turn is seen
    for first, row, head in itertools.product(range(0, all_heads, side), rows, range(side)):
        now = idle[0] + START
        may_write, adders = 0.0, [0.0] * _ADDERS
        every = itertools.product(range(span), row)
        for number, (member, (block, turn, following)) in enumerate(every):
            now = begins = max(now, may_write) + BLOCK
            if cut.ordered:
                query_head = (first + head) * span + member
                begins = max(now, seen.get((query_head, block, turn), 0.0), adders[number % _ADDERS])
                adders[number % _ADDERS] = seen[query_head, block, following] = begins + SEEN
            may_write = begins + READ
        heapq.heapreplace(idle, max(now, may_write) + END)
    return max(idle)
