"""Test the layout of messages and inboxes."""

from __future__ import annotations

from burst_portable.mask import Mask
from burst_portable.planning.messages import ALIGNMENT, inboxes, message_sizes
from burst_portable.planning.verify import verify
from tests.support.plans import make_plan


def test_message_sizes_aligns_fields():
    """LSE and delta of three heads are 12 bytes per row and take 16."""
    plan = make_plan(Mask.full(), "contiguous", "burst", length=53, heads=3, kv_heads=3)
    (move, *_) = plan.backward.steps_of(0)[0].sends
    assert message_sizes(plan.backward)(move) == 14 * (2 * 3 * 64 * 2 + 2 * ALIGNMENT)


def test_blocks_per_launch_share_launch_and_inbox_piece():
    """Five ranks, two blocks per launch: rank 3 computes its own, then 1 and 2, then 0 and 4."""
    plan = make_plan(Mask.full(), "contiguous", ranks=5, length=60, transfer="direct", blocks_per_launch=2)
    steps = plan.forward.steps_of(3)
    assert [s.compute.k_owners for s in steps] == [(3,), (1, 2), (0, 4)]
    assert [s.compute.tiles.num_pairs for s in steps] == [144, 288, 288]
    (places,) = inboxes(plan, 3).offsets["forward"]
    row = 2 * 8 * 64 * 2
    of = {m.owner: places[m] for s in steps for m in s.receives}
    assert (of[2] - of[1], of[4] - of[0]) == (12 * row, 12 * row)
    for rank in range(5):  # both ends use the same offset
        (theirs,) = inboxes(plan, rank).offsets["forward"]
        assert all(theirs[m] == places[m] for m in theirs.keys() & places.keys())
    causal = make_plan(
        Mask.causal(), "zigzag", "burst", ranks=8, length=160, transfer="direct", prefetch_steps=8, blocks_per_launch=8
    )
    assert [s.compute.label for s in causal.forward.steps_of(2)] == ["q2 x kv2", "q2 x kv0+1+3+4+5+6+7"]
    assert verify(causal) == []
