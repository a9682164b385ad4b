"""Verify plans of every strategy without running them, and the verifier itself with planted mistakes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from burst_portable.conformance.cases import LENGTH, MASKS, STRATEGIES
from burst_portable.errors import LayoutError
from burst_portable.layout import NAMES, OF_DOCUMENTS
from burst_portable.mask import Mask
from burst_portable.planning.plans import make_pass_plan
from burst_portable.planning.routes import Fetch, Ring
from burst_portable.planning.schedule import Step
from burst_portable.planning.verify import verify
from tests.support.plans import make_plan


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layout", NAMES)
def test_every_plan_is_complete(strategy, layout):
    for mask, ranks in itertools.product(MASKS.values(), (1, 3, 8)):
        try:
            plan = make_plan(mask, layout, STRATEGIES[strategy], ranks, LENGTH, 48, 48)
        except LayoutError:
            assert layout in OF_DOCUMENTS
            continue
        assert verify(plan) == [], (str(mask), ranks)
        assert verify(plan, ranks=sorted({0, ranks // 2})) == [], (str(mask), ranks)


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


class TestPlantedRoutes:
    """A route of somebody's own with one method wrong: each was once passed, or told without saying where to look."""

    def wrong(self, base, mask, **methods):
        planted = dataclasses.dataclass(frozen=True)(type("Planted", (base,), methods))
        route = planted(4) if base is Ring else planted(4, 1, 1, 1.0)
        plan = make_plan(mask, ranks=4)
        part = make_pass_plan(plan.call, "kv", route)
        return verify(
            dataclasses.replace(plan, forward=part, backward=make_pass_plan(plan.call, "kv", route, results=route))
        )

    @pytest.mark.parametrize("base", [Ring, Fetch])
    def test_none(self, base):
        assert self.wrong(base, Mask.causal()) == []

    def test_a_block_that_is_asked_for_at_the_step_that_needs_it(self):
        def arrival(self, needs, owner, rank):
            return (owner, self.step(owner, rank)) if needs(owner, rank) else None

        wrong = self.wrong(Fetch, Mask.full(), arrival=arrival)
        assert "rank 0 waits for kv3 at step 1, but has not posted its receive by then" in wrong[0]
        assert "`arrival` must say a step before `step`" in wrong[0]

    def test_gradients_without_patience(self):
        wrong = self.wrong(Fetch, Mask.full(), patience=lambda self, source, target: 0)
        assert any("`patience` must be at least 1" in w for w in wrong)

    @pytest.mark.parametrize("patience", [2, 3])
    def test_gradients_that_come_after_what_they_add_to_has_left(self, patience):
        wrong = self.wrong(Ring, Mask.full(), patience=lambda self, source, target: patience)
        assert any("has no gradient of block" in w and "see `departure`, `patience`" in w for w in wrong)

    def test_gradients_that_go_to_a_rank_that_makes_none(self):
        def departure(self, needs, owner, rank):
            return (rank + 1) % 4

        wrong = self.wrong(Ring, Mask.window(2), departure=departure)
        assert any("has no gradient of block" in w for w in wrong)

    @pytest.mark.parametrize("base", [Ring, Fetch])
    def test_a_block_that_nobody_uses(self, base):
        together = {"step": lambda self, owner, rank: int(owner != rank)}
        wrong = self.wrong(base, Mask.window(2), arrival=lambda self, needs, owner, rank: (owner, 0), **together)
        assert any("neither computes with it nor hands it on; see `arrival`" in w for w in wrong)

    def test_arrival_and_targets_disagree(self):
        wrong = self.wrong(Fetch, Mask.full(), targets=lambda self, owner, rank: iter(()))
        assert any("`arrival` and `targets` of the route disagree" in w for w in wrong)

    def test_departure_and_feeder_disagree(self):
        wrong = self.wrong(Ring, Mask.full(), feeder=lambda self, owner, rank: None)
        assert any("`departure` and `feeder` of the route disagree" in w for w in wrong)

    def test_a_rank_among_its_own_targets(self):
        def arrival(self, needs, owner, rank):
            return owner, self.step(owner, rank) - 1

        wrong = self.wrong(Fetch, Mask.full(), arrival=arrival, targets=lambda self, owner, rank: iter(range(4)))
        assert any("lets go of its own block" in w for w in wrong)
        assert not any("[]" in w for w in wrong)
