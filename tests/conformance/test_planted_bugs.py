"""The suite is worth what it catches: bugs around the real kernels and transport, each of which it must find."""

from __future__ import annotations

import pytest

from burst_portable import numerics
from burst_portable.conformance import check_backend
from burst_portable.conformance.report import Report
from tests.conformance import planted
from tests.conformance.planted import Planted

# Bug: the groups that each find it, by themselves, in a quick look.
KERNELS = {
    planted.WrongScale: ("kernels", "attention", "claims"),
    planted.BandOffByOne: ("kernels", "attention"),
    planted.BottomRight: ("kernels", "attention"),
    planted.StaleKeys: ("kernels", "attention"),
    planted.Base2: ("kernels", "attention"),
    planted.EmptyRows: ("kernels", "blind"),
    planted.EmptyRowsInfinite: ("kernels", "blind"),
    planted.SixteenBits: ("kernels", "attention"),
    planted.SixteenBitsOf16: ("kernels", "steady"),
    planted.SwappedGradients: ("kernels", "attention"),
    planted.Overwrites: ("kernels", "attention"),
    planted.ForgetsRows: ("kernels", "blind"),
    planted.ClaimsTooMuch: ("claims",),
    planted.NoReasons: ("claims",),
    planted.Unsteady: ("kernels", "steady"),
}
TRANSPORTS = {
    planted.DropsLastHop: ("transport", "attention"),
    planted.ReusesBuffers: ("transport", "attention"),
    planted.DoesNotWait: ("transport", "memory"),
}


def examine(backend: Planted, group: str, **options: object) -> Report:
    return check_backend(backend, ranks=4, only=[group], effort="quick", fail_fast=True, deadline=3.0, **options)


def pairs(bugs):
    return [pytest.param(bug, group, id=f"{bug.__name__}-{group}") for bug, groups in bugs.items() for group in groups]


@pytest.mark.parametrize(("bug", "group"), pairs(KERNELS))
def test_a_bug_in_a_kernel_is_caught(bug, group):
    report = examine(Planted(bug), group)
    assert not report.ok
    assert report.failures[0].message
    assert report.failures[0].command.startswith("burst-portable conform --backend planted --case ")


@pytest.mark.parametrize(("bug", "group"), pairs(TRANSPORTS))
def test_a_bug_in_a_transport_is_caught(bug, group):
    report = examine(Planted(), group, wrap=bug)
    assert not report.ok
    assert report.failures[0].message


def test_sinks_that_count_once_a_hop_are_caught(monkeypatch):
    once = numerics.add_sinks

    def every_hop(state, sinks):
        for _ in range(planted.SinksEveryHop.calls.count):
            once(state, sinks)

    monkeypatch.setattr(numerics, "add_sinks", every_hop)
    report = examine(Planted(planted.SinksEveryHop), "attention")
    assert not report.ok
    assert "dsinks" in report.failures[0].errors


@pytest.mark.parametrize(
    "group", ["claims", "kernels", "transport", "attention", "blind", "memory", "steady", "extremes", "sizes"]
)
def test_the_same_wrapping_without_a_bug_passes(group):
    report = check_backend(Planted(), ranks=4, only=[group], effort="quick", wrap=planted.Through)
    assert report.ok, report.markdown()
