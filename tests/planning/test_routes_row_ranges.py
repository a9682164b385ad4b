"""Test messages that contain several ranges of rows of a block."""

from __future__ import annotations

from collections import Counter

import pytest

from burst_portable.conformance import oracle
from burst_portable.layout import make_layout
from burst_portable.mask import Mask, Region
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PASSES
from burst_portable.planning.routes import count_rows, find_containing
from burst_portable.planning.verify import verify
from burst_portable.strategies.registry import make_strategy
from tests.support.row_ranges import LENGTH, MASKS, scattered


@pytest.mark.parametrize(
    ("rows", "packed", "before"),
    [
        (((3, 5),), ((0, 9),), 3),
        (((3, 9),), ((0, 9),), 3),
        (((3, 10),), ((0, 9),), None),
        (((3, 5),), ((0, 4), (6, 9)), None),
        (((7, 8),), ((0, 4), (6, 9)), 5),
        (((2, 4), (6, 8)), ((0, 4), (6, 9)), 2),
        (((2, 3), (6, 8)), ((0, 4), (6, 9)), None),  # packed row 3 lies between them
        (((2, 4), (7, 8)), ((0, 4), (6, 9)), None),
        (((1, 4), (6, 9), (12, 13)), ((0, 4), (6, 9), (12, 15)), 1),
        (((1, 4), (6, 8), (12, 13)), ((0, 4), (6, 9), (12, 15)), None),
        (((6, 9), (12, 13), (20, 21)), ((0, 4), (6, 9), (12, 15)), None),
        (((9, 12),), ((0, 9),), None),
    ],
)
def test_rows_that_are_one_piece_of_a_message_are_found(rows, packed, before):
    assert find_containing(rows, [packed]) == (None if before is None else (packed, before))


def positions(shard: list[int], rows) -> list[int]:
    """Return the positions of the rows of a message."""
    return [shard[row] for start, stop in rows for row in range(start, stop)]


def ranges(rows: list[int], least_gap: int):
    """Yield the ranges of these rows, with gaps of less than `least_gap`."""
    start = rows[0]
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        if following is None or following - row - 1 >= least_gap:
            yield start, row + 1
            start = following


def computed_pairs(plan, name: str, rank: int) -> Counter:
    """Return the global (query, key) pairs that a rank computes, read from the rows of its messages."""
    layout, pairs = plan.layout, Counter()
    local = layout.positions(rank)
    for step in plan.steps(name, rank):
        if step.compute is None:
            continue
        arrived = {m.owner: positions(layout.positions(m.owner), m.rows) for m in step.arrivals}
        side = step.side or "kv"
        owners = step.compute.k_owners if side == "kv" else step.compute.q_owners
        sent = [position for owner in owners for position in (arrived[owner] if owner != rank else local)]
        queries, keys = (local, sent) if side == "kv" else (sent, local)
        for tile in step.compute.tiles:
            for row in range(tile.q_start, tile.q_stop):
                columns = range(max(tile.k_start, row - tile.hi), min(tile.k_stop, row - tile.lo + 1))
                pairs.update((queries[row], keys[column]) for column in columns)
    return pairs


STRATEGIES = {
    "ring": {"transfer": "direct"},
    "ring, together": {"transfer": "direct", "blocks_per_launch": 4},
    "burst": {"transfer": "direct"},
    "all_gather": {},
    "distflash": {},
}


@pytest.mark.parametrize("label", STRATEGIES)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_messages_contain_exactly_the_needed_rows(label, mask):
    """Each visible pair is computed once, at the positions of the rows that were sent. Only short gaps are sent too."""
    call = AttentionCall(mask, scattered(4), 8, 4, 64, 64)
    plan = make_strategy(label.split(",")[0], **STRATEGIES[label]).plan(call)
    assert verify(plan) == []
    visible = {tuple(pair) for pair in oracle.dense_mask(mask, LENGTH).nonzero().tolist()}
    for name in PASSES:
        every = sum((computed_pairs(plan, name, rank) for rank in range(4)), Counter())
        assert set(every) == visible
        assert set(every.values()) == {1}
    moves = [m for rank in range(4) for step in plan.steps("forward", rank) for m in step.receives]
    assert max(len(m.rows) for m in moves) > 1
    for move in moves:
        owned, local = (plan.layout.positions(rank) for rank in (move.owner, move.target))
        sent, stays = (0, 1) if move.side == "q" else (1, 0)
        seen = {pair[sent] for pair in visible if pair[stays] in local}
        needed = [row for row, position in enumerate(owned) if position in seen]
        least = max(1, len(owned) // 8)
        assert move.rows == tuple(ranges(needed, least))


@pytest.mark.parametrize(("gap", "rows"), [(7, ((0, 23),)), (8, ((0, 8), (16, 24)))])
def test_gaps_of_less_than_an_eighth_of_a_block_are_sent(gap, rows):
    layout = make_layout("contiguous", 128, 2)
    seen = (Region(64, 128, start, start + 8) for start in (0, 8 + gap))
    mask = Mask((*Mask.documents((0, 64, 128)).regions, *seen), "gap")
    plan = make_strategy("ring", transfer="direct").plan(AttentionCall(mask, layout, 4, 4, 64, 64))
    (move,) = [m for step in plan.steps("forward", 1) for m in step.receives]
    assert (move.rows, move.num_rows) == (rows, count_rows(rows))
