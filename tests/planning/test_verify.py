"""Verify plans of every strategy without running them, and the verifier itself with planted mistakes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from burst_portable.conformance.cases import LENGTH, MASKS, STRATEGIES
from burst_portable.errors import InputError, LayoutError
from burst_portable.layout import NAMES, OF_DOCUMENTS, make_layout
from burst_portable.mask import Mask
from burst_portable.planning.plans import PassPlan, Plan, make_pass_plan
from burst_portable.planning.routes import DirectRoute, RingRoute
from burst_portable.planning.schedule import Step
from burst_portable.planning.verify import verify
from tests.support.plans import make_plan

RANKS = (1, 3, 8)


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in turn", "every"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", NAMES)
def test_verify_accepts_all_strategies(strategy, layout, every):
    """Verify each mask on every number of ranks, or on one of them in turn: each of them meets each other value."""
    turn = list(STRATEGIES).index(strategy) + NAMES.index(layout)
    for (number, mask), ranks in itertools.product(enumerate(MASKS.values(), turn), RANKS):
        if not every and ranks != RANKS[number % 3]:
            continue
        try:
            plan = make_plan(mask, layout, STRATEGIES[strategy], ranks, LENGTH, 48, 48)
        except LayoutError:
            assert layout in OF_DOCUMENTS
            continue
        except InputError:
            assert (strategy, ranks % 2) == ("usp(ranks_per_node=2, inner_ring_size=2)", 1), "its nodes have two ranks"
            continue
        assert verify(plan) == [], (str(mask), ranks)
        assert verify(plan, ranks=sorted({0, ranks // 2})) == [], (str(mask), ranks)


def other_pass(name, side="kv", layout=None, gradient=True, stride=1, route=None, **others):
    """Return a ring plan of 4 ranks whose pass of this name is another one."""
    plan = make_plan(Mask.causal(), ranks=4)
    call = plan.call if layout is None else dataclasses.replace(plan.call, layout=make_layout(layout, 64, 4))
    route = route or RingRoute(4)
    made = make_pass_plan(call, side, route, route if gradient else None, stride)
    return dataclasses.replace(plan, **{name: made}, **others)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("backward", {"layout": "contiguous"}, "backward: ranks compute with other rows, contiguous"),
        ("forward", {"layout": "striped", "gradient": False}, "forward: ranks compute with other rows, striped"),
        ("backward", {"stride": 2}, "backward: its ring skips ranks, stride 2"),
        ("backward", {"gradient": False}, "backward: it has no `gradient_route`"),
        ("forward", {}, "forward: it has a `gradient_route`"),
        ("forward", {"side": "q", "gradient": False}, "forward: it sends queries"),
        ("backward", {"score_rows": True, "side": "q"}, "backward: rows of scores need complete blocks"),
        ("backward", {"route": DirectRoute(8, 1, 1, 1.0)}, "backward: the steps of rank 0 cannot be made: IndexError"),
    ],
)
def test_verify_rejects_passes_that_cannot_run(name, change, says):
    wrong = verify(other_pass(name, **change))
    assert any(says in text for text in wrong), wrong


class TestPlantedMistakes:
    """Test that `verify` detects each planted mistake of a plan."""

    def broken(self, change, rank=1, side="kv", ranks=None):
        plan = make_plan(Mask.full(), strategy="ring" if side == "kv" else "burst")
        own = {name: dataclasses.replace(part) for name, part in plan.passes()}  # plans share passes
        plan = dataclasses.replace(plan, **own)
        for part in own.values():
            steps = list(part.steps_of(rank))
            part._steps[rank] = tuple(change(steps))  # stored; with so few ranks it is never evicted
        return verify(plan, ranks=ranks)

    def test_verify_accepts_correct_plan(self):
        done: list[int] = []
        assert verify(make_plan(), progress=done.append) == []
        assert done == [1, 2, 3, 4, 5, 6, 7, 8]

    def test_verify_detects_missing_last_step(self):
        wrong = self.broken(lambda steps: steps[:-1])
        assert any("pairs computed, but the mask has" in w for w in wrong)

    def test_verify_of_sampled_ranks_finds_their_mistakes(self):
        def deaf(steps: list[Step]):
            return [dataclasses.replace(s, receives=()) for s in steps]

        for change, told in (
            (lambda steps: steps[:-1], "pairs computed, but the mask has"),
            (deaf, "only one of their two ranks"),
        ):
            assert any(told in w for w in self.broken(change, ranks=[0, 1]))
            assert self.broken(change, ranks=[2]) == []

    def test_verify_detects_repeated_step(self):
        def twice(steps: list[Step]):
            return [
                *steps,
                dataclasses.replace(steps[0], sends=(), receives=(), result_sends=(), result_receives=()),
            ]

        assert any("more than once" in w for w in self.broken(twice))

    def test_verify_detects_send_without_receive(self):
        def deaf(steps: list[Step]):
            return [dataclasses.replace(s, receives=()) for s in steps]

        assert any("only one of their two ranks" in w for w in self.broken(deaf))

    def test_verify_detects_send_at_another_step(self):
        def late(steps: list[Step]):
            moved = tuple(m._replace(post_step=m.post_step + 1) for m in steps[0].sends)
            return [dataclasses.replace(steps[0], sends=moved), *steps[1:]]

        assert any("only one of their two ranks" in w for w in self.broken(late))

    def test_verify_detects_use_of_block_before_arrival(self):
        def early(steps: list[Step]):
            return [dataclasses.replace(steps[0], compute=steps[1].compute),
                    dataclasses.replace(steps[1], compute=steps[0].compute), *steps[2:]]  # fmt: skip

        assert any("without holding it" in w for w in self.broken(early))

    def test_verify_detects_block_never_released(self):
        def hoard(steps: list[Step]):
            return [dataclasses.replace(s, released=()) for s in steps]

        assert any("still holds" in w for w in self.broken(hoard))

    @pytest.mark.parametrize("side", ["kv", "q"])
    def test_verify_detects_gradient_without_owner(self, side):
        def keep(steps: list[Step]):
            return [dataclasses.replace(s, result_sends=()) for s in steps]

        assert any("is not sent on by" in w for w in self.broken(keep, side=side))


class TestPlantedRoutes:
    """Test that `verify` names the wrong method of a custom route."""

    def wrong(self, base, mask, **methods):
        planted = dataclasses.dataclass(frozen=True)(type("Planted", (base,), methods))
        route = planted(4) if base is RingRoute else planted(4, 1, 1, 1.0)
        plan = make_plan(mask, ranks=4)
        part = make_pass_plan(plan.call, "kv", route)
        return verify(
            dataclasses.replace(
                plan, forward=part, backward=make_pass_plan(plan.call, "kv", route, gradient_route=route)
            )
        )

    @pytest.mark.parametrize("base", [RingRoute, DirectRoute])
    def test_verify_accepts_custom_route(self, base):
        assert self.wrong(base, Mask.causal()) == []

    def test_verify_detects_late_arrival_of_route(self):
        def block_source(self, dependencies, owner, rank):
            return (owner, self.step(owner, rank)) if dependencies.needs(owner, rank) else None

        wrong = self.wrong(DirectRoute, Mask.full(), block_source=block_source)
        assert "rank 0 waits for kv3 at step 1, but posts its receive only at step 1" in wrong[0]
        assert "`block_source` must return an earlier step" in wrong[0]

    def test_verify_detects_missing_gradient_delay(self):
        wrong = self.wrong(DirectRoute, Mask.full(), result_delay_steps=lambda self, source, target: 0)
        assert any("`result_delay_steps` must be at least 1" in w for w in wrong)

    @pytest.mark.parametrize("steps", [2, 3])
    def test_verify_detects_gradients_after_departure(self, steps):
        wrong = self.wrong(RingRoute, Mask.full(), result_delay_steps=lambda self, source, target: steps)
        assert any("has no gradient of block" in w and "see `result_target`, `result_delay_steps`" in w for w in wrong)

    def test_verify_detects_gradients_sent_to_unused_rank(self):
        def result_target(self, dependencies, owner, rank):
            return (rank + 1) % 4

        wrong = self.wrong(RingRoute, Mask.window(2), result_target=result_target)
        assert any("has no gradient of block" in w for w in wrong)

    @pytest.mark.parametrize("base", [RingRoute, DirectRoute])
    def test_verify_detects_unused_block(self, base):
        together = {"step": lambda self, owner, rank: int(owner != rank)}
        wrong = self.wrong(
            base, Mask.window(2), block_source=lambda self, dependencies, owner, rank: (owner, 0), **together
        )
        assert any("neither computes with it nor forwards it; see `block_source`" in w for w in wrong)

    def test_verify_detects_contradicting_block_targets(self):
        wrong = self.wrong(DirectRoute, Mask.full(), targets=lambda self, owner, rank: iter(()))
        assert any("`block_source` and `targets` of the route disagree" in w for w in wrong)

    def test_verify_detects_contradicting_gradient_targets(self):
        wrong = self.wrong(RingRoute, Mask.full(), result_source=lambda self, owner, rank: None)
        assert any("`result_target` and `result_source` of the route disagree" in w for w in wrong)

    def test_verify_detects_rank_among_its_own_targets(self):
        def block_source(self, dependencies, owner, rank):
            return owner, self.step(owner, rank) - 1

        wrong = self.wrong(
            DirectRoute, Mask.full(), block_source=block_source, targets=lambda self, owner, rank: iter(range(4))
        )
        assert any("releases its local block" in w for w in wrong)
        assert not any("[]" in w for w in wrong)


class HalfRows(PassPlan):
    """Send half of the rows that a rank needs."""

    def _rows(self, side, owner, member):
        (start, stop), *_ = super()._rows(side, owner, member)
        return ((start, (start + stop + 1) // 2),)


class MoreRows(PassPlan):
    """Send the whole block to a rank that needs some rows of it."""

    def _rows(self, side, owner, member):
        return ((0, self.call.layout.count(owner)),)


class WrongPlace(PassPlan):
    """Compute with the last rows of a message as if they were the first of the block."""

    def _compute(self, side, owners, member):
        compute = super()._compute(side, owners, member)
        return dataclasses.replace(compute, blocks=tuple(block._replace(column=0) for block in compute.blocks))


class HalfGradients(PassPlan):
    """Return half of the gradients of a block."""

    def _result(self, side, route, owner, source):
        move = super()._result(side, route, owner, source)
        (start, stop), *_ = move.rows if move else ((0, 1),)
        return move and move._replace(rows=((start, (start + stop) // 2),))


class TestPlantedRows:
    """Test that `verify` names messages with other rows than their receivers need."""

    def wrong(self, kind, mask, route=None, side="kv", layout="contiguous"):
        call = make_plan(mask, layout, ranks=4, length=400).call
        route = route or DirectRoute(4, 1, 2, 1.0)
        forward, backward = kind(call, "kv", route), kind(call, side, route, route)
        return verify(Plan(call, "planted", forward, backward))

    def test_verify_names_too_few_rows(self):
        wrong = self.wrong(HalfRows, Mask.full())
        assert (
            "forward: rank 0 sends kv0 to rank 1 at step 0 with 50 rows [0, 50), but the tiles of rank 1 need "
            "100 rows [0, 100); see `trims` of the route"
        ) in wrong
        assert any("rows [50, 150) for block 3, but block 3 is at rows [50, 100) of the launch" in w for w in wrong)

    @pytest.mark.parametrize("side", ["kv", "q"])
    def test_verify_names_too_many_rows(self, side):
        wrong = self.wrong(MoreRows, Mask.window(30), side=side)
        assert any("rank 0 sends kv0 to rank 1 at step 0 with 100 rows [0, 100)" in w for w in wrong)
        assert any("the tiles of rank 1 need 30 rows [70, 100)" in w for w in wrong)
        assert any(w.startswith("backward: rank 1 sends") for w in wrong)

    def test_verify_names_tiles_of_too_many_blocks(self):
        class MoreBlocks(PassPlan):
            def _compute(self, side, owners, member):
                compute = super()._compute(side, owners, member)
                return dataclasses.replace(compute, blocks=(*compute.blocks, compute.blocks[0]))

        wrong = self.wrong(MoreBlocks, Mask.full())
        told = "forward: rank 1 computes q1 x kv1 at step 0 with tiles of 2 pairs of blocks instead of 1"
        assert told in wrong

    def test_verify_names_misplaced_rows(self):
        wrong = self.wrong(WrongPlace, Mask.window(30))
        assert any("rank 1 computes q1 x kv0 at step 1 with rows [70, 100) for block 0" in w for w in wrong)

    def test_verify_names_lost_gradient_rows(self):
        wrong = self.wrong(HalfGradients, Mask.full())
        assert any(
            "rank 1 sends dkv0 to rank 0 at step 1 with 50 rows [0, 50), but computed with 100 rows [0, 100)" in w
            for w in wrong
        )

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_verify_refuses_ring_that_trims(self, layout):
        """Under the contiguous layout every message is a whole block, but `Plan.direct` would be wrong."""
        wrong = self.wrong(PassPlan, Mask.causal(), route=RingRoute(4, trims=True), layout=layout)
        assert any("a route that forwards blocks must not have `trims`" in w for w in wrong)
        assert self.wrong(PassPlan, Mask.causal(), route=RingRoute(4), layout=layout) == []

    @pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(30), Mask.full()], ids=str)
    def test_verify_accepts_rows_that_ranks_need(self, mask):
        assert self.wrong(PassPlan, mask) == []
        assert self.wrong(PassPlan, mask, layout="zigzag", side="q") == []
