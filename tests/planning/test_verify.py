"""Verify plans of every strategy without running them, and the verifier itself with planted mistakes."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from burst_portable.conformance.cases import LENGTH, MASKS, STRATEGIES
from burst_portable.errors import LayoutError
from burst_portable.layout import NAMES, OF_DOCUMENTS
from burst_portable.mask import Mask
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
