"""Test a rank that is killed, stopped, late, out of memory or raises: the other ranks report it, destroy their group
and end.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.support.faulty_ranks import FAULTS, GAVE_UP, OTHER_GROUP, RANKS, Scenario

ROOT = Path(__file__).parents[2]
GRACE = 10.0
SOAK = 200
STEPS = ("forward step", "backward step", "to heads", "to sequence", "that ranks agree")


@pytest.fixture(scope="module")
def play(forked_python):
    """Return a function that runs scenarios concurrently in a separate server."""
    server = subprocess.Popen(
        [forked_python, "-m", "tests.support.faulty_ranks"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def some(*scenarios: Scenario) -> list[dict]:
        for scenario in scenarios:
            Path(scenario.folder).mkdir(exist_ok=True)
        before = set(os.listdir("/dev/shm"))
        server.stdin.write(json.dumps([asdict(scenario) for scenario in scenarios]) + "\n")
        server.stdin.flush()
        outcomes = json.loads(server.stdout.readline())
        assert not {name for name in os.listdir("/dev/shm") if name not in before and "torch" in name}
        return outcomes

    yield some
    server.stdin.close()
    server.stdout.close()
    assert server.wait(60) == 0


CASES = (
    ("killed", 9, "ring"),  # in a forward pass
    ("stopped", 1, "burst"),  # before the first message
    ("late", 12, "burst"),  # in a backward pass
    ("out_of_memory", 26, "ring"),
    ("raises", 14, "burst"),
    (OTHER_GROUP, 1, "ring"),
)


@pytest.fixture(scope="module")
def played(play, tmp_path_factory):
    """Return the scenario and the outcome of each case, by fault."""
    scenarios = [Scenario(str(tmp_path_factory.mktemp(fault)), fault, *how) for fault, *how in CASES]
    return {one.fault: (one, found) for one, found in zip(scenarios, play(*scenarios), strict=True)}


def check(scenario: Scenario, outcome: dict) -> None:
    """Check that all other ranks raised in time, each with rank, step and peer in the error, and ended."""
    assert outcome["struck"] > 0, (scenario, outcome)
    for rank in (0, 2):
        assert outcome["codes"][rank] == GAVE_UP, (scenario, outcome)
        told = outcome["said"][f"rank{rank}"]
        assert told["at"] - outcome["struck"] <= scenario.timeout + GRACE, (scenario, told)
        assert told["torn_down"] - told["at"] < 2, (scenario, told)
        assert told["error"] in ("PeerLostError", "CommunicationTimeoutError")
        message = told["message"]
        assert message.startswith(f"rank {rank}, "), (scenario, message)
        assert any(step in message for step in STEPS), (scenario, message)
        assert "rank 1" in message, (scenario, message)  # named directly, or by a rank that gave up earlier


@pytest.mark.parametrize("fault", FAULTS)
def test_injected_fault_is_reported(played, fault):
    scenario, outcome = played[fault]
    check(scenario, outcome)
    if fault in ("out_of_memory", "raises"):
        assert outcome["codes"][1] == 1
        assert "planted" in outcome["logs"]["rank1"]


def test_groups_in_another_order_name_both_sides(played):
    """No rank fails, but rank 1 waits in another group than the remaining ranks."""
    _, outcome = played[OTHER_GROUP]
    assert outcome["codes"] == [GAVE_UP] * RANKS, outcome
    for rank in range(RANKS):
        told = outcome["said"][f"rank{rank}"]
        assert told["error"] == "CommunicationTimeoutError"
        assert told["message"].startswith(f"rank {rank}, checking that ranks agree on pass 1 (forward, full)")
        for other in set(range(RANKS)) - {rank}:
            assert f"rank {other}, checking" in told["message"], told["message"]
        # the group in which the other ranks wait, or which rank 1 has not entered
        assert "[group 0: ranks 0, 1, 2]" in told["message"]


@pytest.mark.full
@pytest.mark.timeout(0)
def test_random_faults_are_reported(play, tmp_path):
    """The test is bounded in time and prints how often each fault occurred."""
    random_ = random.Random(0)
    started = time.monotonic()
    seen, slowest = Counter(), 0.0
    for index in range(SOAK):
        fault, strategy = random_.choice(list(FAULTS)), random_.choice(["ring", "burst", "double_ring", "ulysses"])
        scenario = Scenario(str(tmp_path / str(index)), fault, random_.randint(1, 150), strategy)
        (outcome,) = play(scenario)
        check(scenario, outcome)
        seen[fault] += 1
        slowest = max(slowest, *(told["at"] - outcome["struck"] for told in outcome["said"].values()))
        assert time.monotonic() - started < SOAK * GRACE
    print(f"{SOAK} faults in {time.monotonic() - started:.0f} s, {dict(seen)}; the last word after {slowest:.1f} s")
