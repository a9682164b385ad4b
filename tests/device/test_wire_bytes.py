"""Compare the link counters of several devices with the plans, to 1 % and a few KiB per message.

python -m pytest -m device tests/device/test_wire_bytes.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.wire_report import Measured, Planned
from burst_portable.backends.selection import for_device, open_or_reason
from tests.support.device_wire_bytes import ROWS, STRATEGIES

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators or more"),
]
ROOT = Path(__file__).parents[2]


def read(one: dict) -> Measured:
    """Convert the JSON of a rank to `Measured`."""
    return Measured(**{**one, "plan": [Planned(**plan) for plan in one["plan"]]})


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Run one rank per device and return the facts on which all ranks agree."""
    kind = torch.accelerator.current_accelerator()
    counters = open_or_reason(for_device(kind.type).link_counters, 0)
    if isinstance(counters, str):
        pytest.skip(counters)
    counters.close()
    ranks, folder = torch.accelerator.device_count(), tmp_path_factory.mktemp("wire")
    command = [sys.executable, "-m", "tests.support.device_wire_bytes", str(ranks), str(folder)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(ranks)]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    every = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    if absent := [one["absent"] for one in every if "absent" in one]:
        pytest.skip(absent[0])
    assert all(one == every[0] for one in every)
    found = {(one.row, one.strategy, one.which): one for one in map(read, every[0]["cases"])}
    return {"idle": every[0]["idle"], "cases": found, "twice": [read(one) for one in every[0]["twice"]]}


def test_idle_links_carry_no_bytes(facts):
    """Other traffic would invalidate the tests below."""
    assert max(bytes_ for ways in facts["idle"] for bytes_ in ways) < 64 << 10, facts["idle"]


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("row", ROWS)
def test_wire_bytes_equal_plan(facts, row, strategy, which):
    one = facts["cases"][row, strategy, which]
    assert max(plan.sent for plan in one.plan) > 4 << 20, "flags are nothing beside the messages"
    assert one.unexplained() == {}, (one.counted, one.plan)


def test_skipped_messages_are_not_on_the_wire(facts):
    """Under a window, rank 0 receives no block and the last rank sends none."""
    window = facts["cases"]["window", "ring(transfer=direct)", "forward"]
    assert window.plan[0].received == window.plan[-1].sent == 0
    full = facts["cases"]["full", "ring(transfer=direct)", "forward"]
    assert all(one.sent > 2 * less.sent for one, less in zip(full.plan, window.plan, strict=True))


@pytest.mark.parametrize("which", [0, 1])
def test_wire_bytes_detect_messages_sent_twice(facts, which):
    """The counters of every rank show the planted bug in both directions."""
    one = facts["twice"][which]
    assert one.unexplained().keys() == {
        f"rank {r}, {way}" for r in range(len(one.plan)) for way in ("sent", "received")
    }
    for (sent, received), plan in zip(one.counted, one.plan, strict=True):
        assert sent == pytest.approx(2 * one.calls * plan.sent, rel=0.01)
        assert received == pytest.approx(2 * one.calls * plan.received, rel=0.01)


@pytest.mark.parametrize(("row", "other"), [("full", "window"), ("window", "documents"), ("documents", "full")])
def test_wire_bytes_detect_plan_of_another_mask(facts, row, other):
    one, wrong = (facts["cases"][name, "ring(transfer=direct)", "forward"] for name in (row, other))
    assert Measured(**{**vars(one), "plan": wrong.plan}).unexplained() != {}
