"""A rank that is killed, stopped, late, out of memory or raises: the others say so, and end, in time."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.spmd.faulty_rank import FAULTS

ROOT = Path(__file__).parents[2]
RANKS, DEADLINE, GRACE = 3, 2.0, 10.0


def strike(folder: Path, fault: str, post: int, strategy: str) -> dict[int, dict]:
    """What the ranks other than 1 said; nobody is left behind."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.spmd.faulty_rank"]
    told = [str(RANKS), str(folder), fault, str(post), str(DEADLINE), strategy]
    ranks = [
        subprocess.Popen([*command, str(rank), *told], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank in range(RANKS)
    ]
    try:
        for rank in (0, 2):
            code = ranks[rank].wait(timeout=60)
            assert code == 3, f"rank {rank} ended with {code}: {ranks[rank].communicate()[1].decode()[-2000:]}"
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
            rank.kill()
            rank.communicate()
    return {rank: json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 2)}


def check(said: dict[int, dict]) -> None:
    for rank, told in said.items():
        assert told["seconds"] <= DEADLINE + GRACE, told
        assert f"rank {rank}, " in told["message"]
        assert any(word in told["message"] for word in ("step", "whether ranks agree"))
        assert told["error"] in ("PeerLostError", "DeadlineError")
    # Directly or through the neighbour that gave up first, the ranks wait for rank 1.
    assert any("rank 1" in told["message"] or "all ranks" in told["message"] for told in said.values())


@pytest.mark.parametrize(
    ("fault", "post", "strategy"),
    [
        ("killed", 2, "ring"),
        ("stopped", 1, "burst"),
        ("late", 5, "burst"),
        ("out_of_memory", 3, "ring"),
        ("raises", 6, "burst"),
    ],
)
def test_a_fault(tmp_path, fault, post, strategy):
    check(strike(tmp_path, fault, post, strategy))


@pytest.mark.full
@pytest.mark.timeout(0)
def test_a_soak_of_random_faults(tmp_path):
    """200 of them, bounded in time."""
    random_ = random.Random(0)
    started = time.monotonic()
    for index in range(200):
        fault, strategy = random_.choice(list(FAULTS)), random_.choice(["ring", "burst", "double_ring"])
        check(strike(tmp_path / str(index), fault, random_.randint(1, 40), strategy))
        assert time.monotonic() - started < 200 * (DEADLINE + GRACE)
