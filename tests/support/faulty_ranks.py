"""Run ranks with a planted fault.

As a program, run a server that forks them, so that torch is imported once for all faults.

python -m tests.support.faulty_ranks        reads scenarios, a JSON list, from each line of stdin, answers with a line
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.config import Config
from burst_portable.errors import CommunicationError
from burst_portable.runtime.prepared_call import Observer, call_wrapper

RANKS = 3
GAVE_UP = 3
"""The exit code of a rank that raised what the library raises."""


@dataclasses.dataclass(frozen=True)
class Scenario:
    """Cause `fault` on rank 1 at its `at`-th event: an agreement, a post, or a kernel call, forward or backward."""

    folder: str
    fault: str
    at: int = 1
    strategy: str = "ring"
    timeout: float = 4.0  # long enough for a busy machine without a fault


def raise_memory_error() -> None:
    raise torch.OutOfMemoryError("planted: out of memory")


def raise_own_error() -> None:
    raise ZeroDivisionError("planted: an error of the model")


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda: time.sleep(60),
    "out_of_memory": raise_memory_error,
    "raises": raise_own_error,
}
OTHER_GROUP = "other_group"
"""No fault that strikes: rank 1 uses the two groups that there are in the other order."""


class Countdown:
    """Cause the fault at the n-th event."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario, self._left = scenario, scenario.at

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            Path(self._scenario.folder, "struck").write_text(str(time.monotonic()))
            FAULTS[self._scenario.fault]()


class Striking(TorchDistTransport):
    """Count agreements and posts as events."""

    def __init__(self, timeout: float, group: dist.ProcessGroup | None, event) -> None:
        super().__init__(group, "gloo", batched=False, timeout=timeout)
        self._event = event

    def post(self, sends, receives, label=""):
        self._event()
        return super().post(sends, receives, label)

    def share(self, data, label="share", timeout=None):
        self._event()
        return super().share(data, label, timeout)


class StrikingObserver(Observer):
    """Count kernel calls as events, which are between the start of a transfer and the wait for it."""

    def __init__(self, event) -> None:
        self._event = event

    def computes(self, compute, like, *, backward):
        self._event()
        return super().computes(compute, like, backward=backward)


def train(meshes: list[bp.Mesh], strategy: str) -> None:
    """Run more steps than any fault waits for."""
    for _ in range(40):
        for mesh in meshes:
            q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (6, 3, 3))
            bp.attention(q, k, v, mask="full", mesh=mesh, strategy=strategy).sum().backward()


def run_rank(rank: int, scenario: Scenario) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # forked ranks have one random state, and would draw the same shards
    folder = Path(scenario.folder)
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), RANKS), rank=rank, world_size=RANKS)
    event = Countdown(scenario) if rank == 1 and scenario.fault in FAULTS else lambda: None
    call_wrapper.set(lambda prepared, mesh: dataclasses.replace(prepared, observer=StrikingObserver(event)))
    config = Config(timeout=scenario.timeout)

    def mesh(group: dist.ProcessGroup | None) -> bp.Mesh:
        transport = Striking(scenario.timeout, group, event)
        return bp.Mesh(rank, RANKS, lambda device_type: transport, config=config)

    meshes = [mesh(None)]
    if scenario.fault == OTHER_GROUP:
        meshes.append(mesh(dist.new_group()))
    dist.barrier()
    if scenario.fault == OTHER_GROUP:
        (folder / "struck").write_text(str(time.monotonic()))
        meshes = meshes[::-1] if rank == 1 else meshes
    try:
        train(meshes, scenario.strategy)
    except CommunicationError as error:
        told = {"error": type(error).__name__, "message": str(error), "at": time.monotonic()}
        dist.destroy_process_group()
        told["torn_down"] = time.monotonic()
        (folder / f"rank{rank}.json").write_text(json.dumps(told))
        os._exit(GAVE_UP)  # a user's program would end here


def play(scenarios: list[Scenario]) -> list[dict]:
    """Run all scenarios concurrently, because most of their time is waiting.

    For each scenario, return the exit codes of the ranks (None if a rank had to be killed) and the JSON of each rank.
    """
    context = multiprocessing.get_context("fork")
    groups = [[context.Process(target=run_rank, args=(rank, one)) for rank in range(RANKS)] for one in scenarios]
    for ranks in groups:
        for rank in ranks:
            rank.start()
    until = time.monotonic() + 60
    return [outcome(scenario, ranks, until) for scenario, ranks in zip(scenarios, groups, strict=True)]


def outcome(scenario: Scenario, ranks: list[multiprocessing.Process], until: float) -> dict:
    waited = ranks if scenario.fault == OTHER_GROUP else [ranks[0], ranks[2]]
    for rank in waited:
        rank.join(max(0.1, until - time.monotonic()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
        rank.join()
    folder = Path(scenario.folder)
    said = {path.stem: json.loads(path.read_text()) for path in folder.glob("rank*.json")}
    struck = folder / "struck"
    logs = {path.stem: path.read_text()[-2000:] for path in folder.glob("rank*.log")}
    return {
        "codes": codes,
        "said": said,
        "logs": logs,
        "struck": float(struck.read_text() if struck.exists() else "nan"),
    }


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(play([Scenario(**one) for one in json.loads(line)])), flush=True)
