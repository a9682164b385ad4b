"""Test the conformance suite: errors for invalid requests, and the check of plans before ranks run them."""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random
from typing import ClassVar

import pytest

from burst_portable.backends.selection import load
from burst_portable.conformance import Case, check_backend
from burst_portable.conformance.base import BackendUnderTest
from burst_portable.conformance.cases import STRATEGIES
from burst_portable.conformance.checks.comparison import run_and_compare
from burst_portable.conformance.checks.plans import find_impurity
from burst_portable.errors import BackendUnavailableError
from burst_portable.planning.routes import DirectRoute, RingRoute
from burst_portable.strategies.base import ring_plan
from burst_portable.strategies.registry import make_strategy
from burst_portable.strategies.ring import RingStrategy
from tests.support.planted_bugs import Planted


def test_check_backend_rejects_unavailable_backend():
    with pytest.raises(BackendUnavailableError, match="cannot run here"):
        check_backend("cuda")


class OnOneDevice(Planted):
    """A backend whose capabilities have a device with its index."""

    @property
    def capabilities(self):
        return replace(self.real.capabilities, device_type="cpu:0")


def test_check_backend_rejects_device_type_with_index():
    says = "states a device, not a device type; got 'cpu:0'; allowed: 'cpu'; change its capabilities"
    with pytest.raises(BackendUnavailableError, match=says):
        check_backend(OnOneDevice(), coverage="quick")


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
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
