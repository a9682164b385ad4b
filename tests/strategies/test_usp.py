"""Test plans with heads sharded within nodes: verification with planted mistakes, predicted times, and node sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import burst_portable as bp
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.layout import Layout, Segment
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.head_division import HeadSplit
from burst_portable.planning.messages import inboxes
from burst_portable.planning.plans import Plan
from burst_portable.planning.rank_order import with_rank_order
from burst_portable.planning.schedule import Step
from burst_portable.planning.verify import verify
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.registry import make_strategy


def make(
    ranks=12, ranks_per_node=3, length=96, heads=12, kv_heads=6, mask="causal", layout="zigzag", **options
) -> Plan:
    return bp.plan(
        seq_len=length, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=64, mask=mask, layout=layout,
        strategy=make_strategy("usp", ranks_per_node=ranks_per_node, **options),
    )  # fmt: skip


MASKS, LAYOUTS = ("causal", "full", "window:9", "documents:0,7,30,96"), ("zigzag", "striped", "contiguous")
# Each mask has one layout by default, and every layout is in use.
pairs = pytest.mark.parametrize(
    "pairs",
    [
        [*zip(MASKS, (*LAYOUTS, "striped"), strict=True)],
        pytest.param([*itertools.product(MASKS, LAYOUTS)], marks=pytest.mark.full),
    ],
    ids=["usual", "every"],
)


@pairs
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("options", [{}, {"backward_circulates": "q"}, {"transfer": "direct"}], ids=str)
def test_usp_plans_are_valid_for_all_node_sizes(ranks_per_node, options, pairs):
    for mask, layout in pairs:
        plan = make(ranks_per_node=ranks_per_node, mask=mask, layout=layout, kv_heads=12, **options)
        assert verify(plan) == []
        assert verify(with_rank_order(plan, KernelTraits())) == []
        assert (plan.head_parallel_size, plan.ring_size) == (ranks_per_node, 12 // ranks_per_node)


@pairs
@pytest.mark.parametrize("ranks_per_node", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("options", [{"backward_circulates": "q"}, {"transfer": "direct"}], ids=str)
def test_usp_plans_across_nodes_are_valid(ranks_per_node, options, pairs):
    """Rings inside nodes: ranks 0, 1, 2 are a ring, and ranks 0, 3, 6, 9 divide heads."""
    for mask, layout in pairs:
        plan = make(
            ranks_per_node=ranks_per_node, mask=mask, layout=layout, kv_heads=12, placement="context_first", **options
        )
        assert verify(plan) == []
        assert verify(with_rank_order(plan, KernelTraits())) == []
        assert (plan.head_parallel_size, plan.ring_size) == (12 // ranks_per_node, ranks_per_node)
    if 1 < ranks_per_node < 12:
        assert plan.heads == HeadSplit(12 // ranks_per_node, spacing=ranks_per_node)
        assert list(plan.heads.peers(ranks_per_node + 1)) == list(range(1, 12, ranks_per_node))
        for rank in range(12):
            moves = [m for step in plan.forward.steps_of(rank) for m in (*step.sends, *step.receives)]
            assert {m.source // ranks_per_node for m in moves} <= {rank // ranks_per_node}


def test_usp_across_nodes_sends_closed_form_bytes():
    """Between nodes, (n - 1) / n of q, k, v and out; inside a node, all K and V of the heads of a rank."""
    s, heads, kv_heads, n, d, members = 8, 12, 12, 4, 64, 3
    plan = make(ranks=12, ranks_per_node=3, kv_heads=kv_heads, mask="full", placement="context_first")
    between = s * (2 * heads + 2 * kv_heads) * d * 2 * (n - 1) // n
    block = n * s * 2 * (kv_heads // n) * d * 2
    forward, backward = (rank_cost(plan, name, 5, HardwareSpec(1, 1)) for name in ("forward", "backward"))
    assert forward.sent == between + (members - 1) * block
    assert backward.sent == between + (members - 1) * block + members * block * 2 - block * 2


def test_usp_across_nodes_predicted_time():
    """The exchange uses the links between nodes, and the ring those inside them."""
    plan = make(
        ranks=4, ranks_per_node=2, length=64, heads=8, kv_heads=8, mask="full", layout="contiguous",
        placement="context_first",
    )  # fmt: skip
    there, back, block = 16 * 3 * 4 * 64 * 2, 16 * 4 * 64 * 2, 32 * 2 * 4 * 64 * 2
    step = 4 * 32 * 32 * 4 * 64 / 1e12
    hardware = HardwareSpec(step, block / 5e9, 0.0, 0.0, ranks_per_node=2, inter_node_bandwidth=there / 3e9)
    forward = rank_cost(plan, "forward", 1, hardware)
    assert forward.seconds == pytest.approx(3 + 5 + 1 + 1)
    assert (forward.sent, forward.messages) == (there + back + block, 3)


def test_verify_detects_crossed_rings_and_head_groups():
    """Ranks that divide heads must have the same rows after the exchange."""
    plan = make(ranks=12, ranks_per_node=3, kv_heads=12, placement="context_first")
    other = make(ranks=12, ranks_per_node=4, kv_heads=12)
    assert (plan.heads, other.heads) == (HeadSplit(4, spacing=3), HeadSplit(4))
    wrong = verify(replace(plan, heads=other.heads))
    assert any("not the same member of their rings" in one for one in wrong)
    assert any("other rows than those of their ranks" in one for one in wrong)


def test_usp_across_nodes_rejects_heads_that_do_not_divide():
    told = "usp cannot divide these heads among the nodes; got 8 query and 8 K/V heads, ranks_per_node=4; "
    with pytest.raises(UnsupportedError, match=told + "allowed: ranks_per_node of 3, 6, 12 on 12 ranks"):
        make(heads=8, kv_heads=8, ranks_per_node=4, placement="context_first")
    plan = make(ranks=6, heads=1, kv_heads=1, ranks_per_node=None, placement="context_first")
    assert (plan.ring_size, plan.heads) == (6, None)
    assert plan.reason == "ranks_per_node=6 by default; these heads cannot be divided among 2"


def test_auto_chooses_heads_across_many_nodes():
    """Each rank would get K and V of seven other nodes; rows of all heads are fewer."""
    hardware = HardwareSpec(600.0, 300.0, inter_node_bandwidth=25.0)
    usual = {"seq_len": 65536, "heads": 32, "kv_heads": 32}
    planner = AutoStrategy(ranks_per_node=8, hardware=hardware)
    many = bp.plan(**usual, ranks=64, strategy=planner)
    strategy = make_strategy(many.label)
    assert (strategy.name, strategy.ranks_per_node, strategy.placement) == ("usp", 8, "context_first"), many.reason
    assert "placement" not in bp.plan(**usual, ranks=16, strategy=planner).label


@pairs
@pytest.mark.parametrize("side", ["kv", "q"])
@pytest.mark.parametrize(("ranks_per_node", "window"), [(1, 3), (2, 2), (2, 3), (3, 2), (2, 6), (3, 4)])
def test_usp_plans_with_inner_rings_are_valid(ranks_per_node, window, side, pairs):
    for mask, layout in pairs:
        plan = make(
            ranks_per_node=ranks_per_node, mask=mask, layout=layout, kv_heads=12, inner_ring_size=window,
            backward_circulates=side,
        )  # fmt: skip
        assert verify(plan) == []
        assert verify(with_rank_order(plan, KernelTraits())) == []


def test_usp_inner_rings_send_between_nodes_one_round_ahead():
    """Two nodes of four ranks, of which pairs divide heads: a ring has two members in each node.

    Without inner rings, a message crosses nodes in every step. With them, rank 0 sends to node 1 at step 0 what that
    node needs at step 2.
    """

    def crossing(window: int) -> list[tuple[int, int, int]]:
        plan = make(ranks=8, ranks_per_node=2, mask="full", length=64, inner_ring_size=window)
        moves = [m for rank in (0, 2) for step in plan.steps("forward", rank) for m in step.sends]
        return sorted((m.owner, m.post_step, m.wait_step) for m in moves if m.target >= 4)

    assert crossing(1) == [(0, 1, 2), (2, 0, 1), (6, 2, 3)]
    assert crossing(2) == [(0, 0, 2), (2, 0, 2)]


@pytest.mark.parametrize("side", ["kv", "q"])
def test_usp_inner_rings_hide_messages_between_nodes(side):
    """28 heads, which eight ranks cannot divide, over eight nodes: the prediction is closer to computation alone."""
    hardware = HardwareSpec(600.0, 300.0, inter_node_bandwidth=50.0, ranks_per_node=8)
    size = {"ranks": 64, "ranks_per_node": 4, "length": 131072, "heads": 28, "kv_heads": 4}
    plain, windowed = (make(**size, backward_circulates=side, inner_ring_size=window) for window in (1, 2))
    costs = [[rank_cost(plan, name, 0, hardware) for name, _ in plan.passes()] for plan in (plain, windowed)]
    assert [c.flops for c in costs[0]] == [c.flops for c in costs[1]]
    slower, faster = (sum(c.seconds for c in cost) for cost in costs)
    assert faster < slower


def test_usp_window_that_does_not_fit_raises():
    with pytest.raises(
        InputError, match="inner_ring_size does not divide the ring; got 4; allowed: a divisor of the 6 mem"
    ):
        make(ranks_per_node=2, inner_ring_size=4)
    with pytest.raises(InputError, match="a divisor of the 1 members"):
        make(ranks=6, ranks_per_node=6, inner_ring_size=2)
    with pytest.raises(InputError, match="have no inner ring; got inner_ring_size=2"):
        make_strategy("usp", inner_ring_size=2, transfer="direct")


def test_usp_plan_of_two_nodes_of_three():
    """Rank 4 of 6 is rank 1 of node 1; it gets the zigzag rows of ranks 3, 4 and 5, sorted."""
    plan = make(ranks=6, length=60, mask="full")
    assert [(s.start, s.count) for s in plan.forward.call.layout.shards[1]] == [(15, 30)]
    assert [(s.start, s.count) for s in plan.forward.call.layout.shards[0]] == [(0, 15), (45, 15)]
    assert (plan.forward.call.heads, plan.forward.call.kv_heads) == (4, 2)
    first, second, *_ = plan.forward.steps_of(4)
    assert [(s.compute.label, [m.target for m in s.sends]) for s in (first, second)] == [
        ("q4 x kv4", [1]), ("q4 x kv1", []),
    ]  # fmt: skip
    assert [(m.label, m.source, m.target) for m in second.arrivals] == [("kv1", 1, 4)]


@pytest.mark.parametrize("moves", ["ring", "direct"])
@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "as_in"), [(2, 2, "ulysses"), (6, 6, "ulysses"), (6, 1, "ring"), (1, 1, "ring")]
)
def test_usp_with_one_node_or_one_rank_per_node(ranks, ranks_per_node, as_in, moves):
    """One node equals Ulysses, and one rank per node equals a ring."""
    ours = make(ranks=ranks, ranks_per_node=ranks_per_node, transfer=moves)
    strategy = make_strategy("ring", transfer=moves) if as_in == "ring" else as_in
    other = bp.plan(seq_len=96, ranks=ranks, heads=12, kv_heads=6, head_dim=64, strategy=strategy)
    assert replace(ours, strategy=as_in, label=other.label) == other


class TestPlantedMistakes:
    """Test that `verify` detects each planted mistake of a plan."""

    def broken(self, change, rank=4):
        plan = make(ranks=6, mask="full")
        own = {name: replace(part) for name, part in plan.passes()}  # plans share passes
        for part in own.values():
            part._steps[rank] = tuple(change(list(part.steps_of(rank))))
        return verify(replace(plan, **own))

    def test_verify_detects_missing_last_step(self):
        assert any("pairs computed, but the mask has" in w for w in self.broken(lambda steps: steps[:-1]))

    def test_verify_detects_block_sent_to_wrong_rank_of_node(self):
        """Rank 0 has other heads of these rows."""

        def astray(steps: list[Step]):
            return [replace(s, sends=tuple(m._replace(target=0) for m in s.sends)) for s in steps]

        assert any("only one of their two ranks" in w for w in self.broken(astray))

    def test_verify_detects_block_of_wrong_heads(self):
        def strange(steps: list[Step]):
            changed = replace(steps[1].compute, k_owners=(0,))
            return [steps[0], replace(steps[1], compute=changed), *steps[2:]]

        assert any("without holding it" in w for w in self.broken(strange))

    def test_verify_detects_missing_gradient_send(self):
        def keep(steps: list[Step]):
            return [replace(s, result_sends=()) for s in steps]

        assert any("is not sent on by" in w for w in self.broken(keep))

    @pytest.mark.parametrize("name", ["forward", "backward"])
    def test_verify_detects_exchanged_rows_of_nodes(self, name):
        """The ring is valid by itself; only the layout of the ranks shows the fault."""
        plan = make(ranks=6)
        layout = plan.forward.call.layout
        turned = Layout("turned", layout.length, layout.shards[::-1])
        for side in ("layout", "kv_layout"):
            part = plan.pass_plan(name)
            wrong = replace(plan, **{name: replace(part, call=replace(part.call, **{side: turned}))})
            assert any(w == f"{name}: nodes compute with other rows than those of their ranks" for w in verify(wrong))

    @pytest.mark.parametrize(("sizes", "told"), [
        ({"heads": 2}, "3 ranks with 2 query heads each are not 12 heads"),
        ({"kv_heads": 1}, "read K/V heads (0, 2), not 1"),
    ])  # fmt: skip
    def test_verify_detects_wrong_heads(self, sizes, told):
        for plan in (make(ranks=6), make(ranks=3)):
            part = replace(plan.forward, call=replace(plan.forward.call, **sizes))
            assert any(told in w for w in verify(replace(plan, forward=part)))

    def test_verify_detects_node_with_fewer_ranks(self):
        """The node still has all of its rows."""
        plan = make(ranks=6)
        layout = plan.call.layout
        four, last = layout.shards[:4], layout.shards[4] + layout.shards[5]
        five = Layout("five", layout.length, (*four, last))
        wrong = verify(replace(plan, call=replace(plan.call, layout=five, kv_layout=five)))
        assert wrong == ["2 nodes of 3 ranks are not 5 ranks"]

    @pytest.mark.parametrize("split", [HeadSplit(3, 0), HeadSplit(0)])
    def test_verify_detects_head_split_without_ranks(self, split):
        wrong = verify(replace(make(ranks=6), heads=split))
        assert wrong == [f"{split} has no ranks that divide heads"]

    def test_verify_detects_different_nodes_per_pass(self):
        plan, other = make(ranks=12, ranks_per_node=3), make(ranks=12, ranks_per_node=6)
        assert any("6 ranks with 2 query heads" in w for w in verify(replace(plan, backward=other.backward)))


def test_usp_predicted_time():
    """Two nodes of two, full mask: rows 3 s in and 1 s out, 1 s per step, 5 s per block."""
    plan = make(ranks=4, ranks_per_node=2, length=64, heads=8, kv_heads=8, mask="full", layout="contiguous")
    there, back, block = 16 * 3 * 4 * 64 * 2, 16 * 4 * 64 * 2, 32 * 2 * 4 * 64 * 2
    step = 4 * 32 * 32 * 4 * 64 / 1e12
    hardware = HardwareSpec(step, there / 3e9, 0.0, 0.0, ranks_per_node=2, inter_node_bandwidth=block / 5e9)
    forward = rank_cost(plan, "forward", 1, hardware)
    assert forward.seconds == pytest.approx(3 + 5 + 1 + 1)
    assert (forward.sent, forward.received, forward.messages) == (there + back + block, there + back + block, 3)
    assert forward.link_seconds == pytest.approx(3 + 5 + 1)
    assert (forward.launches, forward.compute_seconds) == (2, pytest.approx(2.0))
    # Backward: dO arrives in one second. The block takes 5 seconds, longer than a step of 2.5. Its float32 gradients
    # take 10.
    backward = rank_cost(plan, "backward", 1, hardware)
    assert backward.seconds == pytest.approx(1 + 5 + 2.5 + 10 + 3)
    one_node = replace(hardware, ranks_per_node=0)  # the block uses the same link as the resharded rows and takes 4 s
    assert rank_cost(plan, "forward", 1, one_node).seconds == pytest.approx(3 + 4 + 1 + 1)
    crossing = replace(hardware, ranks_per_node=1)  # now the exchange also crosses nodes
    assert rank_cost(plan, "forward", 1, crossing).seconds == pytest.approx((there + back + block) / block * 5 + 1)


def test_usp_copies_shared_kv_heads_in_node():
    """Each rank of a node has a copy of the K/V head; its gradients return in float32."""
    plan = make(ranks=4, ranks_per_node=2, length=64, heads=8, kv_heads=1, mask="full", layout="contiguous")
    forward, backward = (rank_cost(plan, name, 0, HardwareSpec(1, 1)) for name in ("forward", "backward"))
    row = 64 * 2
    assert forward.sent == 16 * (4 + 2 + 4) * row + 32 * 2 * row
    assert backward.sent == 16 * 4 * row + 32 * 2 * row + 32 * 2 * 2 * row + 16 * (4 + 2 * 2) * row


def test_usp_has_fewer_launches_than_double_ring():
    """With few rows per rank, the time of a ring is launch latency."""
    hardware, size = (
        HardwareSpec(600.0, 300.0, ranks_per_node=8),
        {"ranks": 256, "length": 256 * 1024, "heads": 32, "kv_heads": 8},
    )
    ours = rank_cost(make(ranks_per_node=8, **size), "forward", 0, hardware)
    double = bp.plan(
        seq_len=size["length"], ranks=256, heads=32, kv_heads=8, head_dim=64,
        strategy=make_strategy("double_ring", ranks_per_node=8, backward_circulates="kv"),
    )  # fmt: skip
    theirs = rank_cost(double, "forward", 0, hardware)
    assert (ours.launches, theirs.launches) == (32, 256)
    assert ours.seconds < 0.6 * theirs.seconds
    assert ours.flops == theirs.flops


@pytest.mark.parametrize("kv_heads", [6, 1])  # gradients of a shared head are float32, so backward needs a larger inbox
def test_usp_inbox_offsets_do_not_overlap(kv_heads):
    """Resharded rows come first, then the messages."""
    plan = make(ranks=6, transfer="direct", mask="full", kv_heads=kv_heads)
    assert plan.direct
    assert not make(ranks=6).direct
    found = [inboxes(plan, rank) for rank in range(6)]
    assert len({(one.forward, one.backward) for one in found}) == 1
    lone = inboxes(make(ranks=3, length=48, mask="full", kv_heads=kv_heads), 0)
    for (rank, one), (name, messages) in itertools.product(enumerate(found), (("forward", 1), ("backward", 2))):
        (offsets,) = one.offsets[name]
        assert all(rank in (move.source, move.target) for move in offsets)
        mine = [place for move, place in offsets.items() if move.target == rank]
        assert len(mine) == len(set(mine)) == messages  # K and V, and in the backward pass dK and dV
        assert min(mine) >= 3 * max(lone.forward, lone.backward)
        assert max(mine) < 6 * getattr(one, name)
        for other in found:
            assert all(other.offsets[name][0].get(move, place) == place for move, place in offsets.items())


def test_inbox_size_of_resharded_rows():
    """Rows 40, 4 and 4; two of six heads of 64 per rank: Q, K and V of all rows, out and LSE."""
    layout = Layout("uneven", 48, tuple((Segment(start, count),) for start, count in ((0, 40), (40, 4), (44, 4))))
    plan = bp.plan(seq_len=48, ranks=3, heads=6, head_dim=64, mask="full", layout=layout, strategy="ulysses")
    row = 2 * 64 * 2
    lse = 1024  # 960 bytes in float32, padded
    assert inboxes(plan, 1).forward == -(-(48 * 3 * row + 3 * 40 * row + lse) // 3)


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads", "ranks_per_node", "note"),
    [
        (64, 32, 8, 8, "ranks_per_node=8 by default"),
        (64, 28, 4, 4, "ranks_per_node=4 by default; these heads cannot be divided among 8"),
        (12, 32, 8, 4, "ranks_per_node=4 by default; these heads cannot be divided among 6"),
        (8, 7, 7, 1, "ranks_per_node=1 by default; these heads cannot be divided among 4"),
        (7, 7, 7, 1, "ranks_per_node=1 by default"),
    ],
)
def test_usp_default_node_size(ranks, heads, kv_heads, ranks_per_node, note):
    plan = make(ranks=ranks, ranks_per_node=None, length=1024, heads=heads, kv_heads=kv_heads)
    assert (plan.head_parallel_size, plan.reason) == (ranks_per_node, note)
    assert verify(plan, ranks=range(0, ranks, ranks_per_node)) == []


def test_usp_rejects_invalid_node_sizes():
    with pytest.raises(
        InputError,
        match="ranks_per_node does not divide the number of ranks; got ranks_per_node=5, 12 ranks; allowed: 1",
    ):
        make(ranks_per_node=5)
    told = (
        r"usp cannot divide these heads among the ranks of a node; got 12 query and 3 K/V heads, ranks_per_node=2; "
        "allowed: ranks_per_node of 1, 3, "
        r"6, 12 on 12 ranks: query heads a multiple of it, K/V heads a multiple or a divisor; use one of these, or"
    )
    with pytest.raises(UnsupportedError, match=told):
        make(ranks_per_node=2, kv_heads=3)
    with pytest.raises(InputError, match="ranks_per_node is not a size"):
        make(ranks_per_node=2.0)


def test_auto_chooses_usp_for_many_ranks():
    hardware = HardwareSpec(600.0, 300.0)
    usual = {"seq_len": 65536, "ranks": 64, "heads": 32, "kv_heads": 8}
    made = bp.plan(**usual, strategy=AutoStrategy(ranks_per_node=8, hardware=hardware))
    assert made.reason.startswith("chose usp"), made.reason
    assert (make_strategy(made.label).ranks_per_node, made.head_parallel_size) == (8, 8)
    assert "usp(" not in bp.plan(**usual, strategy=AutoStrategy(hardware=hardware)).reason.partition("; ")[0]
    parts = bp.plan(**usual | {"heads": 28, "kv_heads": 4}, strategy=AutoStrategy(ranks_per_node=8, hardware=hardware))
    assert "usp(ranks_per_node=4) " in parts.reason
    odd = bp.plan(**usual | {"heads": 7, "kv_heads": 7}, strategy=AutoStrategy(ranks_per_node=8, hardware=hardware))
    assert (
        "usp cannot divide these heads among the ranks of a node; got 7 query and 7 K/V heads, ranks_per_node=8"
        in odd.reason
    )
