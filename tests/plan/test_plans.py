"""Plans of every strategy, verified without running them; the verifier itself against planted mistakes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from burst_portable.conformance.cases import LENGTH, MASKS, STRATEGIES
from burst_portable.errors import LayoutError
from burst_portable.layout import NAMES, OF_DOCUMENTS, make_layout
from burst_portable.mask import Mask, Region
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import pass_flops, plan_cost, rank_cost
from burst_portable.planning.messages import ALIGNMENT, inboxes, message_size
from burst_portable.planning.plans import Plan, make_pass_plan
from burst_portable.planning.rates import Rates
from burst_portable.planning.routes import Ring
from burst_portable.planning.schedule import Step
from burst_portable.planning.verify import verify
from burst_portable.strategies.base import make_strategy


def make_plan(mask=None, layout="zigzag", strategy="ring", ranks=4, length=64, heads=8, kv_heads=8, **options) -> Plan:
    mask = Mask.causal() if mask is None else mask
    where = make_layout(layout, length, ranks, mask)
    problem = AttentionCall(mask, where, heads, kv_heads, 64, 64)
    return make_strategy(strategy, **options).plan(problem)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", NAMES)
def test_every_plan_is_complete(strategy, layout):
    name, _, _ = strategy.partition("+")
    for mask, ranks in itertools.product(MASKS.values(), (1, 3, 8)):
        try:
            plan = make_plan(mask, layout, name, ranks, LENGTH, 48, 48, **STRATEGIES[strategy])
        except LayoutError:
            assert layout in OF_DOCUMENTS
            continue
        assert verify(plan) == [], (str(mask), ranks)
        assert verify(plan, ranks=sorted({0, ranks // 2})) == [], (str(mask), ranks)


@pytest.mark.parametrize("inner", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("travels", ["kv", "q"])
def test_double_rings_of_every_shape(inner, travels):
    for mask in (Mask.causal(), Mask.full(), Mask.window(9), Mask.documents((0, 7, 30, 96))):
        plan = make_plan(mask, ranks=12, length=96, strategy="double_ring", inner=inner, travels=travels)
        assert verify(plan) == []


class TestPlantedMistakes:
    """What `verify` is for: each of these must be found."""

    def broken(self, change, rank=1, side="kv", ranks=None):
        plan = make_plan(Mask.full(), strategy="ring" if side == "kv" else "burst")
        own = {name: dataclasses.replace(part) for name, part in plan.passes()}  # passes are shared by plans
        plan = dataclasses.replace(plan, **own)
        for part in own.values():
            steps = list(part.steps_of(rank))
            part._ranks[rank] = tuple(change(steps))  # kept: so few ranks never push it out
        return verify(plan, ranks=ranks)

    def test_none(self):
        done: list[int] = []
        assert verify(make_plan(), progress=done.append) == []
        assert done == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_a_dropped_last_hop(self):
        wrong = self.broken(lambda steps: steps[:-1])
        assert any("pairs computed, but the mask has" in w for w in wrong)

    def test_a_sample_shows_mistakes_of_its_ranks(self):
        def deaf(steps: list[Step]):
            return [dataclasses.replace(s, receives=()) for s in steps]

        for change, told in ((lambda steps: steps[:-1], "pairs computed, but the mask has"), (deaf, "one end alone")):
            assert any(told in w for w in self.broken(change, ranks=[0, 1]))
            assert self.broken(change, ranks=[2]) == []

    def test_a_step_done_twice(self):
        def twice(steps: list[Step]):
            return [*steps, dataclasses.replace(steps[0], sends=(), receives=(), result_sends=(), result_receives=())]

        assert any("more than once" in w for w in self.broken(twice))

    def test_a_send_that_nobody_receives(self):
        def deaf(steps: list[Step]):
            return [dataclasses.replace(s, receives=()) for s in steps]

        assert any("one end alone" in w for w in self.broken(deaf))

    def test_a_send_at_another_step(self):
        def late(steps: list[Step]):
            moved = tuple(m._replace(issue=m.issue + 1) for m in steps[0].sends)
            return [dataclasses.replace(steps[0], sends=moved), *steps[1:]]

        assert any("one end alone" in w for w in self.broken(late))

    def test_computing_with_a_block_that_is_not_there(self):
        def early(steps: list[Step]):
            return [dataclasses.replace(steps[0], compute=steps[1].compute),
                    dataclasses.replace(steps[1], compute=steps[0].compute), *steps[2:]]  # fmt: skip

        assert any("without holding it" in w for w in self.broken(early))

    def test_a_block_that_is_never_let_go(self):
        def hoard(steps: list[Step]):
            return [dataclasses.replace(s, released=()) for s in steps]

        assert any("still holds" in w for w in self.broken(hoard))

    @pytest.mark.parametrize("side", ["kv", "q"])
    def test_a_gradient_that_does_not_get_home(self, side):
        def keep(steps: list[Step]):
            return [dataclasses.replace(s, result_sends=()) for s in steps]

        assert any("gets no further" in w for w in self.broken(keep, side=side))


def test_a_ring_by_hand():
    """Rank 1 of 3, full mask: its own block, then rank 0's, then rank 2's; K and V leave to rank 2."""
    steps = make_plan(Mask.full(), "contiguous", ranks=3, length=9).forward.steps_of(1)
    assert [s.compute.k_owners for s in steps] == [(1,), (0,), (2,)]
    assert [(m.owner, m.target, m.issue, m.needed) for s in steps for m in s.sends] == [(1, 2, 0, 1), (0, 2, 1, 2)]
    assert [(m.owner, m.source) for s in steps for m in s.receives] == [(0, 0), (2, 0)]
    backward = make_plan(Mask.full(), "contiguous", ranks=3, length=9, strategy="burst").backward.steps_of(1)
    assert [s.compute.q_owners for s in backward if s.compute] == [(1,), (0,), (2,)]
    # dQ of rank 0 is made at step 1 and goes on to rank 2; dQ of rank 2 is complete at step 2 and goes home.
    assert [(m.owner, m.target) for s in backward for m in s.result_sends] == [(0, 2), (2, 2)]


def test_a_double_ring_sends_the_next_node_s_block_first():
    plan = make_plan(Mask.full(), "contiguous", "double_ring", ranks=8, inner=4)
    steps = plan.forward.steps_of(0)
    outer = [m for s in steps for m in s.sends if m.target == 4]
    assert [(m.owner, m.issue, m.needed) for m in outer] == [(0, 0, 4)]


def test_the_own_node_s_round_is_divided_by_hand():
    """Rank 0 of two nodes of 4, full mask, backward, K and V travel: dK and dV have twice the bytes of K and V."""
    plan = make_plan(Mask.full(), "contiguous", "double_ring", ranks=8, inner=4, travels="kv")
    steps = plan.backward.steps_of(0)
    assert [s.compute.k_owners[0] for s in steps if s.compute] == [0, 4, 7, 6, 5, 3, 2, 1]
    assert [[(m.owner, m.source) for m in s.receives] for s in steps][:8] == [
        [(4, 4)], [(7, 3)], [(6, 3)], [(5, 3)], [(3, 3)], [(2, 3)], [(1, 3)], [],
    ]  # fmt: skip
    assert [[(m.owner, m.target) for m in s.result_sends] for s in steps][:8] == [
        [], [(4, 1)], [(7, 1)], [(6, 1)], [(5, 5)], [(3, 1)], [(2, 1)], [(1, 1)],
    ]  # fmt: skip
    # A step computes for a second, a block takes one to come, and its gradients two to go home.
    size = rank_cost(plan, "forward", 0, Rates(1, 1)).received / 7
    rates = Rates(10 * 8 * 8 * 8 * 64 / 1e12, 1e6, 0.0, 0.0, node=4, outer_gbps=size / 1e9)
    assert rank_cost(plan, "backward", 0, rates).seconds == pytest.approx(8.0, rel=1e-6)


@pytest.mark.parametrize(
    ("inner", "travels", "first"), [(16, "kv", 16), (8, "kv", 3), (8, "q", 4), (2, "kv", 1), (1, "q", 1)]
)
def test_steps_before_other_nodes_by_bytes(inner, travels, first):
    """K and V are a third of the bytes that cross backward; Q, dO, LSE and delta a little over half."""
    plan = make_plan(Mask.causal(), ranks=16, strategy="double_ring", inner=inner, travels=travels)
    assert (plan.forward.route.first, plan.backward.route.first) == (inner, first)
    whole = dataclasses.replace(plan.backward.route, first=inner)
    undivided = dataclasses.replace(plan, backward=make_pass_plan(plan.call, travels, whole, whole))
    assert verify(undivided) == []
    most = [max(rank_cost(p, "backward", r, Rates(1, 1)).blocks_held for r in range(16)) for p in (plan, undivided)]
    assert most[0] <= most[1]


def test_only_ranks_that_need_a_block_get_it():
    """A window no wider than a shard: each rank hears from one neighbour, whatever the strategy."""
    for strategy in ("ring", "burst", "double_ring"):
        plan = make_plan(Mask.window(8), "contiguous", strategy, ranks=8, length=64)
        received = [len([m for s in plan.forward.steps_of(r) for m in s.receives]) for r in range(8)]
        assert sum(received) == 7 if strategy != "double_ring" else sum(received) < 56
    causal = make_plan(Mask.causal(), "contiguous", "ring", ranks=8, length=64)
    assert sum(len(s.receives) for r in range(8) for s in causal.forward.steps_of(r)) == 28


def test_fetching_takes_only_the_rows_that_are_seen():
    plan = make_plan(Mask.window(3), "contiguous", "ring", ranks=4, length=64, moves="fetch")
    (move,) = [m for s in plan.forward.steps_of(2) for m in s.receives]
    assert move.rows == (13, 16)
    whole = make_plan(Mask.window(3), "contiguous", "ring", ranks=4, length=64)
    (move,) = [m for s in whole.forward.steps_of(2) for m in s.receives]
    assert move.rows == (0, 16)


# ----------------------------------------------------------------------------------------------------- costs


def test_bytes_by_hand():
    """8 heads of 64 in 16 bits, 16 rows a rank: K and V are 32 KiB, float32 dK and dV twice that, dQ 32 KiB."""
    plan = make_plan(Mask.full(), strategy="burst")
    kv = 16 * 8 * (64 + 64) * 2
    forward = rank_cost(plan, "forward", 1, Rates(1, 1))
    assert (forward.sent, forward.received, forward.hops) == (3 * kv, 3 * kv, 3)
    q = 16 * 8 * (64 + 64) * 2 + 2 * 16 * 8 * 4
    dq = 16 * 8 * 64 * 4
    backward = rank_cost(plan, "backward", 1, Rates(1, 1))
    assert (backward.sent, backward.hops) == (3 * (q + dq), 6)
    ring = rank_cost(make_plan(Mask.full(), strategy="ring"), "backward", 1, Rates(1, 1))
    assert ring.sent == 3 * (kv + 2 * kv)
    narrow = [make_plan(Mask.full(), strategy=name, gradients="narrow") for name in ("ring", "burst")]
    sent = [rank_cost(made, "backward", 1, Rates(1, 1)).sent for made in narrow]
    assert sent == [3 * (kv + kv), 3 * (q + dq // 2)]


def test_bytes_of_uneven_heads_by_hand():
    """Rows 18, 18 and 17, two of six heads of 64 a rank: Q, K and V go there, out comes back, in 16 bits."""
    costs = [
        rank_cost(make_plan(None, "contiguous", "ulysses", 3, 53, 6, 6), "forward", r, Rates(1, 1)) for r in range(3)
    ]
    row = 2 * 64 * 2  # bytes of one tensor
    assert [cost.sent for cost in costs] == [row * (3 * 2 * rows + 53 - rows) for rows in (18, 18, 17)]
    assert [cost.received for cost in costs] == [row * (3 * (53 - rows) + 2 * rows) for rows in (18, 18, 17)]
    assert sum(cost.sent for cost in costs) == sum(cost.received for cost in costs)
    both = plan_cost(make_plan(None, "contiguous", "ulysses", 3, 53, 6, 6), Rates(1, 1), [0, 2])
    assert (both.ranks, len(both.per_rank["forward"])) == ((0, 2), 2)
    assert both.sent == row * (3 * 2 * 18 + 53 - 18) + row * (2 * 18 + 3 * (53 - 18))  # rank 0 sends most


@pytest.mark.parametrize(("kv_heads", "itemsize"), [(3, 2), (1, 4)])  # one that is shared is added up where it belongs
def test_bytes_of_gradients_of_few_heads_by_hand(kv_heads, itemsize):
    """Rows 18, 18 and 17: two of six query heads of dO go there, dQ, dK and dV of one K/V head come back."""
    plan = make_plan(None, "contiguous", "ulysses", 3, 53, 6, kv_heads)
    for rank, rows in enumerate((18, 18, 17)):
        there, back = 2 * rows * 2 * 64 * 2, (53 - rows) * 64 * (2 * 2 + 2 * itemsize)
        assert rank_cost(plan, "backward", rank, Rates(1, 1)).sent == there + back


def test_fields_of_a_message_are_aligned():
    """LSE and delta of three heads are 12 bytes a row, and take 16."""
    plan = make_plan(Mask.full(), "contiguous", "burst", length=53, heads=3, kv_heads=3)
    (move, *_) = plan.backward.steps_of(0)[0].sends
    assert message_size(plan.call, move, narrow=False) == 14 * (2 * 3 * 64 * 2 + 2 * ALIGNMENT)


def test_blocks_together_are_one_launch_and_one_piece_of_the_inbox():
    """Five ranks, two blocks a launch: rank 3's own, then those of 1 and 2, then those of 0 and 4."""
    plan = make_plan(Mask.full(), "contiguous", ranks=5, length=60, moves="fetch", together=2)
    steps = plan.forward.steps_of(3)
    assert [s.compute.k_owners for s in steps] == [(3,), (1, 2), (0, 4)]
    assert [s.compute.tiles.area for s in steps] == [144, 288, 288]
    places = inboxes(plan, 3).places
    row = 2 * 8 * 64 * 2
    of = {m.owner: places[m] for s in steps for m in s.receives}
    assert (of[2] - of[1], of[4] - of[0]) == (12 * row, 12 * row)
    for rank in range(5):  # both ends name the same place
        theirs = inboxes(plan, rank).places
        assert all(theirs[m] == places[m] for m in theirs.keys() & places.keys())
    causal = make_plan(Mask.causal(), "zigzag", "burst", ranks=8, length=160, moves="fetch", ahead=8, together=8)
    assert [s.compute.label for s in causal.forward.steps_of(2)] == ["q2 x kv2", "q2 x kv0+1+3+4+5+6+7"]
    assert verify(causal) == []


def test_the_own_block_last_by_hand():
    """Rank 0 of 4, full mask, backward: gradients of the last foreign block leave while the own one is computed."""
    options = {"mask": Mask.full(), "layout": "contiguous", "moves": "fetch", "ahead": 3}
    first, last = (make_plan(own=own, **options) for own in ("first", "last"))
    assert first.forward == last.forward
    steps = last.backward.steps_of(0)
    assert [s.compute.k_owners if s.compute else None for s in steps] == [None, (3,), (2,), (1,), (0,)]
    assert [[m.owner for m in s.result_sends] for s in steps] == [[], [3], [2], [1], []]
    assert [[m.source for m in s.result_arrivals] for s in steps] == [[], [], [1], [2], [3]]
    together = make_plan(own="last", together=3, **options).backward.steps_of(0)
    assert [s.compute.k_owners if s.compute else None for s in together] == [None, (1, 2, 3), (0,)]
    # A step computes for a second, K and V take half of one to come, dK and dV a whole one to leave.
    size = rank_cost(first, "forward", 0, Rates(1, 1)).received / 3
    rates = Rates(10 * 16 * 16 * 8 * 64 / 1e12, 2 * size / 1e9, 0.0, 0.0)
    assert rank_cost(first, "backward", 0, rates).seconds == pytest.approx(5.0, rel=1e-6)
    assert rank_cost(last, "backward", 0, rates).seconds == pytest.approx(4.5, rel=1e-6)


def test_the_own_block_divided_by_hand():
    """Rank 0 of 4, full mask, backward: a third of the own block while others come, two while gradients leave."""
    options = {"mask": Mask.full(), "layout": "contiguous", "length": 4 * 1536, "moves": "fetch"}
    plan = make_plan(own="divided", ahead=3, together=3, **options)
    assert verify(plan) == []
    steps = plan.backward.steps_of(0)
    assert [s.compute.k_owners for s in steps] == [(0,), (1, 2, 3), (0,)]
    assert [s.compute.tiles.box for s in steps[::2]] == [(0, 512, 0, 1536), (512, 1536, 0, 1536)]
    assert [len(s.receives) for s in steps] == [3, 0, 0]
    assert [len(s.result_sends) for s in steps] == [0, 3, 0]
    assert [len(s.result_arrivals) for s in steps] == [0, 0, 3]
    # A step with a whole block takes a second, K and V of a block a tenth to come, dK and dV a fifth to leave.
    size = rank_cost(plan, "forward", 0, Rates(1, 1)).received / 3
    rates = Rates(10 * 1536 * 1536 * 8 * 64 / 1e12, 10 * size / 1e9, 0.0, 0.0)
    first, last = (make_plan(own=own, ahead=3, together=3, **options) for own in ("first", "last"))
    took = [rank_cost(one, "backward", 0, rates).seconds for one in (first, last, plan)]
    assert took == pytest.approx([4.6, 4.3, 4.0], rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "layout", "cuts"),
    [
        (Mask.causal(), "zigzag", [0.34, 0.34, 0.34]),
        (Mask.documents((0, 1000, 2200, 4608)), "contiguous", [0.367, 0.34]),  # where a document begins, if one does
        (Mask.causal(), "contiguous", [0.34, 0.34]),  # rank 0 needs no block of others
        (Mask.window(200), "contiguous", [0.376, 0.376]),
        (Mask.full(), "striped", [0.33, 0.33, 0.33]),
    ],
)
def test_where_the_own_block_is_divided(mask, layout, cuts):
    plan = make_plan(mask, layout, ranks=3, length=3 * 1536, moves="fetch", own="divided")
    assert verify(plan) == []
    found = []
    for rank in range(3):
        parts = [s.compute.area for s in plan.backward.steps_of(rank) if s.compute and s.compute.k_owners == (rank,)]
        if len(parts) > 1:
            found.append(parts[0] / sum(parts))
    assert found == pytest.approx(cuts, abs=0.01)


def test_rows_that_two_parts_have_in_common_are_found():
    plan = make_plan(Mask.full(), "contiguous", length=4 * 1536, moves="fetch", own="divided")
    steps = plan.backward.steps_of(1)
    upper = steps[0].compute
    wrong = dataclasses.replace(steps[-1], compute=upper)  # the same rows again, and as many never
    plan.backward._ranks[1] = (*steps[:-1], wrong)
    assert any("computed more than once: [(1, 1)]" in one for one in verify(plan))


def test_blocks_of_few_rows_are_not_divided():
    plan = make_plan(Mask.causal(), "zigzag", ranks=4, length=64, moves="fetch", own="divided")
    last = make_plan(Mask.full(), "contiguous", ranks=4, length=4 * 128, moves="fetch", own="divided")
    assert verify(plan) == verify(last) == []
    assert [s.compute.k_owners for s in last.backward.steps_of(0) if s.compute][-1] == (0,)
    assert sum(s.compute.k_owners == (0,) for s in last.backward.steps_of(0) if s.compute) == 1


def test_flops_are_the_field_s():
    """Forward 4·area·H·D, backward two and a half times that."""
    problem = make_plan().call
    area = 64 * 65 // 2
    assert problem.area == area
    assert pass_flops(problem, "forward", area) == 4 * area * 8 * 64
    assert pass_flops(problem, "backward", area) == 10 * area * 8 * 64
    assert pass_flops(dataclasses.replace(problem, batch=3), "forward", area) == 3 * 4 * area * 8 * 64
    cost = plan_cost(make_plan(), Rates(1, 1))
    assert sum(c.flops for c in cost.per_rank["forward"]) == 4 * area * 8 * 64


def test_imbalance_by_hand():
    """Causal on two ranks: the upper half has 32·33/2 pairs, the lower half 32·32 more; where nobody computes, none."""
    cost = plan_cost(make_plan(layout="contiguous", ranks=2), Rates(1, 1))
    assert cost.imbalance() == cost.imbalance("backward") == pytest.approx((528 + 1024) * 2 / (2 * 528 + 1024))
    early = Mask((Region(0, 8, 0, 8),), "early")
    assert plan_cost(make_plan(early, "contiguous", ranks=2), Rates(1, 1), [1]).imbalance() == 1.0


def test_predicted_time_by_hand():
    """Full mask on 2 ranks: compute hides the one hop, or waits for it."""
    plan = make_plan(Mask.full(), "contiguous", ranks=2)
    flops, size = 4 * 32 * 32 * 8 * 64, 32 * 8 * 128 * 2
    fast = rank_cost(plan, "forward", 0, Rates(flops / 1e12, 1e9, 0.0, 0.0))  # a step takes one second
    assert fast.seconds == pytest.approx(2.0, rel=1e-6)
    slow = rank_cost(plan, "forward", 0, Rates(flops / 1e12, size / 5e9, 0.0, 0.0))  # a hop takes five
    assert slow.seconds == pytest.approx(6.0, rel=1e-6)


def test_blocks_held_are_those_in_flight():
    for ranks in (1, 2, 4, 8):
        cost = rank_cost(make_plan(Mask.full(), ranks=ranks), "forward", 0, Rates(1, 1))
        block = 64 // ranks * 8 * 128 * 2
        assert cost.blocks_held == min(2, ranks - 1) * block


def test_plans_are_hashable_data():
    assert hash(make_plan()) == hash(make_plan())
    assert make_plan() == make_plan()
    assert make_plan() != make_plan(strategy="burst")
    assert Ring(4) == Ring(4)
