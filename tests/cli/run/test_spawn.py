"""Test which rank is reported when ranks end: processes of `run` that end before large imports."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from burst_portable.cli.run import spawn
from burst_portable.errors import InputError, PeerLostError

# Actions of a rank, which replace its work.
DEEDS = """
import json, os, signal, sys, time

def says(**event):
    print(json.dumps(event), flush=True)

def loses_its_peer():
    says(event="error", kind="communication", message=f"rank {RANK}: lost the other")
    os._exit(1)

def is_wrong():
    says(event="error", kind="input", message="nobody can do this")
    os._exit(1)

def is_killed():
    print("out of luck", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def gives_up():
    print("out of luck", file=sys.stderr, flush=True)
    os._exit(9)

def is_done():
    says(event="step", loss=1.5, seconds=0.1)
    says(event="done", outcome=RANK)
    os._exit(0)

def goes_on():
    time.sleep(60)

RANK = int(sys.argv[-1])
globals()[DOES[RANK]]()
"""


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that runs one rank per action, and asserts that no process of the job remains."""

    def run(*deeds: str, **options: float):
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[3]}")
        (tmp_path / "sitecustomize.py").write_text(f"DOES = {deeds!r}\n{DEEDS}", encoding="utf-8")
        folder = tmp_path / "job"
        folder.mkdir()
        job = SimpleNamespace(ranks=len(deeds), save=lambda path: path.write_text("{}"))
        steps: list[dict[str, object]] = []
        try:
            return spawn.run_processes(job, folder, steps.append, **options), steps
        finally:
            assert not [p for p in Path("/proc").glob("[0-9]*") if str(folder).encode() in command(p)]

    return run


def command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:  # the process has ended
        return b""


def test_launched_returns_results_in_rank_order(launched):
    done, steps = launched("is_done", "is_done", "is_done")
    assert [one["outcome"] for one in done] == [0, 1, 2]
    assert json.dumps(steps) == '[{"event": "step", "loss": 1.5, "seconds": 0.1}]', "those of rank 0"


@pytest.mark.parametrize(
    ("deeds", "kind", "told", "before"),
    [
        (
            ("loses_its_peer", "is_killed"),
            PeerLostError,
            "rank 1 was ended by SIGKILL; got out of luck;",
            "rank 0: lost the other\nrank 1: out of luck\n",
        ),
        (
            ("gives_up", "loses_its_peer"),
            PeerLostError,
            "rank 0 ended with code 9; got out of luck",
            "rank 1: lost the other\nrank 0: out of luck\n",
        ),
        (("gives_up", "is_killed"), PeerLostError, "rank 1 was ended by SIGKILL", "rank 1: out of luck\n"),
        (("is_killed", "is_wrong"), InputError, "nobody can do this", ""),
    ],
    ids=["killed", "code", "killed_before_code", "mistake_before_killed"],
)
def test_launched_names_rank_that_failed_first(launched, capfd, deeds, kind, told, before):
    """Ranks that only lost their peer are reported before it, whichever error arrives first."""
    with pytest.raises(kind) as error:
        launched(*deeds)
    assert str(error.value).startswith(told)
    assert ("when memory runs out" in str(error.value)) == ("SIGKILL" in told)
    assert capfd.readouterr().err == before


def test_launched_ends_remaining_ranks(launched):
    """Ranks get some time to report errors. The fixture checks that no rank remains."""
    with pytest.raises(PeerLostError, match="rank 1 ended with code 9"):
        launched("goes_on", "gives_up", grace=0.5)
