"""Test the conformance suite: names of its tests, the smallest failing case, errors for invalid requests."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from typing import ClassVar

import pytest
import torch

from burst_portable.backends.selection import load
from burst_portable.conformance import Case, check_backend
from burst_portable.conformance.base import BackendUnderTest, Outcome, TestCase
from burst_portable.conformance.cases import HEADS, STRATEGIES, product
from burst_portable.conformance.checks import CHECKS
from burst_portable.conformance.checks.attention import axes, run_and_compare
from burst_portable.conformance.checks.plans import find_impurity
from burst_portable.conformance.suite import Runner, candidates, find_test, list_tests, select_tests, smallest
from burst_portable.errors import BackendUnavailableError
from burst_portable.planning.routes import DirectRoute, RingRoute
from burst_portable.strategies.base import ring_plan
from burst_portable.strategies.registry import make_strategy
from burst_portable.strategies.ring import RingStrategy
from tests.support import planted_bugs
from tests.support.planted_bugs import Planted


def test_smallest_finds_minimal_case():
    """The planted failure needs three ranks and a window."""
    start = next(c for c in product({**axes(8), "mask": ("window",), "ranks": (8,)}) if c.softcap and c.sinks)
    found = smallest(start, lambda case: case.ranks >= 3 and case.mask == "window")
    assert found == Case(
        mask="window", layout="contiguous", ranks=3, heads="1x1x8x8", length=3, batch=1, dtype=torch.float32
    )


def test_candidates_are_smaller_and_possible():
    case = Case(ranks=6, heads="wide_values", values="large", memory="padded", sinks=True)
    for simpler in candidates(case):
        assert simpler.possible()
        assert simpler != case
        assert simpler.sizes[0] <= max(HEADS[case.heads][0], 12)


def test_failure_has_smallest_case_and_command(failed):
    first = failed.failures[0]
    case = Case.parse(first.smallest.removeprefix("attention:"))
    assert case.ranks == 1
    assert case.mask in ("window", "window_both")
    assert case.length < 10
    assert first.command == f"burst-portable conform --backend planted --case {first.smallest}"
    again = check_backend(Planted(planted_bugs.BandOffByOne), cases=[first.smallest], coverage="quick", fail_fast=True)
    assert not again.ok
    assert check_backend("cpu", cases=[first.smallest]).ok


def test_each_failure_is_reduced(failed):
    assert len(failed.failures) > 3
    for result in failed.failures:
        tried, least = Case.parse(result.name), Case.parse(result.smallest.partition(":")[2])
        assert (least.ranks, least.length) < (tried.ranks, tried.length)


# ------------------------------------------------------------------------------------------- the suite, the command


def test_trial_texts_are_unique_and_parse():
    target = BackendUnderTest(Planted(planted_bugs.KernelWrapper), 4, "quick")
    texts = [test.text for test in list_tests(target)]
    assert len(set(texts)) == len(texts)
    assert {text.partition(":")[0] for text in texts} == set(CHECKS)
    for text in texts[:: len(texts) // 12]:
        assert find_test(target, text).text == text


def test_check_backend_rejects_unavailable_backend():
    with pytest.raises(BackendUnavailableError, match="cannot run here"):
        check_backend("cuda")


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
class OnOneDevice(Planted):
    """A backend whose capabilities have a device with its index."""

    @property
    def capabilities(self):
        return replace(self.real.capabilities, device_type="cpu:0")


def test_check_backend_rejects_device_type_with_index():
    says = "states a device, not a device type; got 'cpu:0'; allowed: 'cpu'; change its capabilities"
    with pytest.raises(BackendUnavailableError, match=says):
        check_backend(OnOneDevice(), coverage="quick")


def test_process_messages_pass():
    assert check_backend("cpu", cases=["group:messages-2ranks"]).ok


@pytest.mark.full
def test_process_attention_passes():
    report = check_backend("cpu", ranks=4, only=["group"])
    assert report.ok, report.markdown()


@pytest.mark.full
@pytest.mark.timeout(0)
def test_cpu_backend_conforms():
    report = check_backend("cpu")
    assert report.ok, report.markdown()


@pytest.mark.parametrize(("seconds", "runs"), [(30.0, True), (0.0, False)])
def test_runner_does_not_repeat_tests_longer_than_the_search(seconds, runs):
    """A timeout of 60 s was repeated once, for a smaller case."""
    ran = []
    test = TestCase("kernels", "slow", lambda case: ran.append(case) or Outcome(wrong="wrong"), Case(ranks=3))
    result = Runner(BackendUnderTest(load("cpu")), search_seconds=seconds).run(test)
    assert not result.ok
    assert (len(ran) > 1) is runs


class WrongRoute(RingRoute):
    """A route that takes blocks from the next rank, although ranks also send to the next one."""

    def block_source(self, dependencies, owner, rank):
        found = super().block_source(dependencies, owner, rank)
        return found and ((rank + 1) % self.ranks, found[1])


class WrongRing(RingStrategy):
    def plan(self, call):
        return ring_plan(call, self.name, side="kv", route=WrongRoute(call.ranks), backward_route=RingRoute(call.ranks))


class WrongCase(Case):
    def make_strategy(self):
        return WrongRing()


def test_wrong_plan_of_a_strategy_is_named_before_ranks_wait():
    """The ranks once waited until the timeout, and the error named no method of the route."""
    started = time.monotonic()
    found = run_and_compare(BackendUnderTest(load("cpu"), strategy="ring"), WrongCase(ranks=3))
    assert found.wrong.startswith("its plan is wrong (`burst-portable plan` shows it): ")
    assert "block_source" in found.wrong
    assert time.monotonic() - started < 30


class Counting(RingStrategy):
    """Change the local block's order from one plan to the next."""

    made: ClassVar[list[int]] = []

    def plan(self, call):
        self.made.append(call.ranks)
        route = DirectRoute(call.ranks, 1, 1 + len(self.made) % 2, 1.0)
        return ring_plan(call, self.name, side="kv", route=route)


class Remembering(RingStrategy):
    """Take a setting from the call before this one."""

    batches: ClassVar[list[int]] = [2]

    def plan(self, call):
        self.batches.append(call.batch)
        return ring_plan(call, self.name, side="kv", route=DirectRoute(call.ranks, self.batches[-2], 1, 1.0))


class IdentityRoute(RingRoute):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


class NoEquality(RingStrategy):
    """Make routes that are equal only to themselves."""

    def plan(self, call):
        return ring_plan(call, self.name, side="kv", route=IdentityRoute(call.ranks))


class RandomRoute(DirectRoute):
    """Send blocks at random steps."""

    random: ClassVar[Random] = Random(0)

    def block_source(self, dependencies, owner, rank):
        found = super().block_source(dependencies, owner, rank)
        return found and (found[0], self.random.randint(0, found[1]))


@pytest.mark.parametrize(
    ("strategy", "says"),
    [
        (Counting(), "its `plan` is not pure: plans of equal calls differ in forward.route"),
        (Remembering(), "its `plan` is not pure: plans of equal calls differ in forward.route"),
        (NoEquality(), "its `plan` is not pure: plans of equal calls differ in forward.route"),
    ],
)
def test_plan_that_is_not_pure_is_named(strategy, says):
    class Impure(Case):
        def make_strategy(self):
            return strategy

    found = run_and_compare(BackendUnderTest(load("cpu"), strategy="ring"), Impure(ranks=5))
    assert found.wrong.startswith(says), found.wrong


def test_route_that_is_not_pure_is_named():
    class RandomRing(RingStrategy):
        def plan(self, call):
            return ring_plan(call, self.name, side="kv", route=RandomRoute(call.ranks, 1, 1, 1.0))

    found = find_impurity(RandomRing(), Case(ranks=5).make_call())
    assert found.startswith("its plan is not pure: an equal forward pass has other steps on rank ")


def test_plans_of_all_strategies_are_pure():
    for label in STRATEGIES:
        call = Case(strategy=label, ranks=4, heads="8x8x8x8").make_call()
        assert find_impurity(make_strategy(label), call) == "", label


def test_strategies_are_tested_on_every_number_of_ranks():
    for coverage in ("quick", "usual"):
        target = BackendUnderTest(load("cpu"), coverage=coverage, strategy="ring")
        ranks = {test.case.ranks for test in select_tests(target) if test.case}
        assert {1, 2, 3, 4, 5, 7} <= ranks, coverage
        assert (coverage == "quick") or ranks == set(range(1, 9))
