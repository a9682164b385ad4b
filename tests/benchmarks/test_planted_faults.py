"""Test which fault counts as named, and when the benchmark of planted faults says that a link was not slow."""

from __future__ import annotations

import pytest

from benchmarks.planted_faults import FAULTS, WEAK, is_named, slowed

SLOW_LINK = next(fault for fault in FAULTS if fault.name == "slow link")


def links(**speeds):
    """Return links as of a profile: `r0to1` is the speed of the link from rank 0 to rank 1."""
    pairs = {name: name[1:].split("to") for name in speeds}
    return [
        {"source": int(pairs[name][0]), "target": int(pairs[name][1]), "bytes_per_second": speed}
        for name, speed in speeds.items()
    ]


@pytest.mark.parametrize(
    ("found", "times", "weak"),
    [
        (links(r0to1=202e9, r1to0=212e9), 212 / 202, True),  # as measured on two H200, 2026-11-29
        (links(r0to1=70e9, r1to0=350e9), 5.0, False),
        (links(r0to1=70e9, r1to2=300e9, r2to0=340e9, r1to0=None), 320 / 70, False),
    ],
)
def test_slowed_compares_planted_link_with_other_links(found, times, weak):
    assert slowed(found, SLOW_LINK) == pytest.approx(times)
    assert (slowed(found, SLOW_LINK) < WEAK) is weak


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name != "slow link"], ids=lambda one: one.name)
def test_slowed_is_none_without_planted_link(fault):
    assert slowed(links(r0to1=202e9, r1to0=212e9), fault) is None


def test_slowed_is_none_if_speed_is_unknown():
    assert slowed(links(r0to1=None, r1to0=212e9), SLOW_LINK) is None
    assert slowed(links(r0to1=202e9), SLOW_LINK) is None


@pytest.mark.parametrize(
    ("named", "ranks", "right"),
    [
        (("slow link", 0, 1), 4, True),
        (("slow link", 1, 0), 4, False),
        (("slow link", 0, 2), 4, False),
        (("communication", -1, -1), 4, False),
        (("communication", -1, -1), 2, True),  # the only link is slow in both directions
        (("none", -1, -1), 2, False),
        (("slow link", 0, 1), 2, False),
    ],
)
def test_only_link_is_named_as_exposed_communication(named, ranks, right):
    assert is_named(SLOW_LINK, *named, ranks) is right


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name != "slow link"], ids=lambda one: one.name)
def test_other_faults_need_their_kind_and_rank(fault):
    assert is_named(fault, fault.kind, fault.rank, -1, 2)
    assert not is_named(fault, "communication", fault.rank, -1, 2)
    if fault.rank >= 0:
        assert not is_named(fault, fault.kind, 1 - fault.rank, -1, 2)
