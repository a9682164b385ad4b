"""Test `burst-portable run` when a rank fails or a signal arrives: exit code, last lines, no remains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from tests.support.models import SIZES

ROOT = Path(__file__).parents[3]
OWN = (sys.executable, "-m")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
MARK = "TEST_OF_FAULTS"
PLANT = """
import os, signal, sys, time

def strike():
    import torch
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "late":
        time.sleep(60)
    raise torch.OutOfMemoryError("planted: out of memory")

def odd():  # RANK of torchrun, or the last argument of a worker
    return os.environ.get("RANK", sys.argv[-1]) == "1"

if FAULT:
    from burst_portable.comm import torch_dist
    right, left = torch_dist.TorchDistTransport.post, [AT]
    def post(self, *arguments):
        left[0] -= 1
        if left[0] == 0 and odd():
            strike()
        return right(self, *arguments)
    torch_dist.TorchDistTransport.post = post
"""


@dataclass
class Run:
    """A run as a process, with a separate folder for temporary files and marked processes."""

    folder: Path
    program: tuple[str, ...] = OWN
    fault: str = ""
    at: int = 1

    def start(self, *, steps: int = 100_000) -> subprocess.Popen:
        self.mark, self.temporary = uuid.uuid4().hex, self.folder / "temporary"
        self.temporary.mkdir()
        (self.folder / "sitecustomize.py").write_text(f"FAULT, AT = {self.fault!r}, {self.at}\n{PLANT}")
        config = self.folder / "config.json"
        config.write_text(json.dumps({"model_type": "llama", **SIZES, "vocab_size": 256}))
        self.shared = set(os.listdir("/dev/shm"))
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(self.folder), str(ROOT))),
            "TMPDIR": str(self.temporary),
            "BURST_TIMEOUT": "3",
            MARK: self.mark,
        }
        arguments = ("burst_portable", "run", "--seq-len", "64", "--steps", str(steps), "--model", str(config))
        self.process = subprocess.Popen(
            (*self.program, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=self.folder,
        )
        return self.process

    def processes(self) -> list[int]:
        """Return all processes that the run started, directly or indirectly."""
        every = psutil.process_iter(["environ", "cwd"])  # None for ended processes and those of other users
        return [one.pid for one in every if self._is_own(one.info["environ"] or {}, one.info["cwd"])]

    def _is_own(self, environment: dict[str, str], folder: str | None) -> bool:
        """Return whether a process is one of the run. Forked processes have the folder, and no new environment."""
        return environment.get(MARK) == self.mark or folder == str(self.folder)

    def wait_for_ranks(self) -> list[int]:
        """Return the rank processes after they have connected to each other."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            ranks = [pid for pid in self.processes() if connections(pid)[1]]
            if len(ranks) >= 2:
                return ranks
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError("the ranks did not meet")

    def end(self) -> None:
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def check_nothing_is_left(self, seconds: float = 5.0) -> None:
        until = time.monotonic() + seconds
        while (left := self.processes() or self.files()) and time.monotonic() < until:
            time.sleep(0.05)
        assert not left
        assert not {name for name in os.listdir("/dev/shm") if name not in self.shared and "torch" in name}

    def files(self) -> list[str]:
        """Return temporary files, without the folders of torchrun."""
        return [name for name in os.listdir(self.temporary) if not name.startswith("torchelastic")]


@pytest.fixture
def run(tmp_path):
    one = Run(tmp_path)
    yield one
    one.end()


def connections(pid: int) -> tuple[list[str], list[str]]:
    """Return the addresses that a process listens on, and those that it is connected to."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return [], []
    listening = [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]
    return listening, [one.raddr.ip for one in found if one.raddr]


def is_loopback(address: str) -> bool:
    return ip_address(address.removeprefix("::ffff:")).is_loopback


ENDS = [
    pytest.param(OWN, "killed", 5, ["rank 1 was ended by SIGKILL"], marks=pytest.mark.full),
    pytest.param(OWN, "stopped", 9, ["rank 0", "rank 1 took too long"], marks=pytest.mark.full),
    pytest.param(OWN, "late", 7, ["rank 0", "rank 1 took too long"], marks=pytest.mark.full),
    pytest.param(OWN, "out_of_memory", 12, ["rank 1 ended with code 1", "planted: out"], marks=pytest.mark.full),
    pytest.param(TORCHRUN, "killed", 5, ["rank      : 1", "Signal 9 (SIGKILL)"], marks=pytest.mark.full),
    pytest.param(TORCHRUN, "stopped", 9, ["rank 0,", "rank 1 took too long"], marks=pytest.mark.full),
    pytest.param(TORCHRUN, "late", 7, ["rank 0,", "rank 1 took too long"], marks=pytest.mark.full),
    pytest.param(TORCHRUN, "out_of_memory", 12, ["rank      : 1", "planted: out of memory"],
                 marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("program", "fault", "at", "told"), ENDS)
def test_failed_rank_ends_run(run, program, fault, at, told):
    run.program, run.fault, run.at = program, fault, at
    _, err = run.start().communicate(timeout=100)
    assert run.process.returncode == 1, err
    assert all(words in err for words in told), err
    last = [line for line in err.splitlines() if line.strip(" =")][-1]  # torchrun underlines
    assert last.startswith("burst-portable: rank") if program == OWN else told[-1] in err[-4000:], err
    run.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("python", ["forked", pytest.param("new", marks=pytest.mark.full)])
def test_run_listens_on_loopback_only_and_cleans_up_on_sigterm(run, python, forked_python):
    """Signals reach forked processes. New interpreters, which import torch three times, run with -m full."""
    if python == "forked":
        run.program = (forked_python, "-m")
    run.start()
    ranks = run.wait_for_ranks()
    listening = [address for pid in run.processes() for address in connections(pid)[0]]
    assert listening, "gloo listens for its peers"
    assert [a for a in listening if not is_loopback(a)] == []
    assert all(is_loopback(a) for pid in ranks for a in connections(pid)[1])
    assert run.files(), "the folder of the job, which must go"
    at = time.monotonic()
    run.process.terminate()
    _, err = run.process.communicate(timeout=30)
    assert time.monotonic() - at < 15
    assert run.process.returncode == 128 + signal.SIGTERM, err
    assert err == ""
    run.check_nothing_is_left()


@pytest.mark.full
def test_killed_launcher_leaves_no_process(run):
    run.start()
    run.wait_for_ranks()
    run.process.kill()
    run.check_nothing_is_left()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_interrupted_torchrun_leaves_no_process(run, number):
    """torchrun ends its processes, and ours print nothing."""
    run.program = TORCHRUN
    run.start()
    run.wait_for_ranks()
    at = time.monotonic()
    run.process.send_signal(number)
    _, err = run.process.communicate(timeout=60)
    assert time.monotonic() - at < 20
    assert run.process.returncode != 0
    assert "burst_portable" not in err.replace("burst_portable FAILED", ""), err
    run.check_nothing_is_left()
