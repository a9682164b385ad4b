"""Run the ranks of tests/profiling/test_session_processes.py: attention over gloo with a planted delay.

One link is slow, then one rank, then all ranks, so that every message arrives long before it is awaited. Rank 0 writes
the reports.

python -m tests.support.profiled_gloo_ranks RANKS FOLDER

The slow rank writes the measured delays, because a sleep of 50 ms takes longer on a busy machine.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.comm.torch_dist import TorchDistTransport
from tests.support.forked import run_forked

DELAY = 0.05  # seconds
SLOW_RANK = 1
slept: list[float] = []  # measured seconds


def slow_link(ranks: int) -> tuple[int, int]:
    return (0, 1) if ranks == 2 else (1, 2)


def delay() -> None:
    began = time.perf_counter()
    time.sleep(DELAY)
    slept.append(time.perf_counter() - began)


class SlowLink(TorchDistTransport):
    """Delay messages from one peer."""

    slow_source = -1

    def post(self, sends, receives, label=""):
        leaving, arriving = super().post(sends, receives, label)
        slow = self.slow_source if label.startswith(("forward", "backward")) else -1
        return leaving, [Late(h) if m.peer == slow else h for h, m in zip(arriving, receives, strict=True)]


class Late:
    def __init__(self, handle) -> None:
        self._handle = handle
        self._thread = threading.Thread(target=self._arrive, daemon=True)
        self._thread.start()

    def _arrive(self) -> None:
        self._handle.wait()
        delay()

    def wait(self) -> None:
        self._thread.join()


def slow_kernel() -> None:
    for name in ("attend", "attend_backward"):
        fast = getattr(CpuFlashKernel, name)

        def slow(*arguments, _fast=fast, **options):
            delay()
            return _fast(*arguments, **options)

        setattr(CpuFlashKernel, name, slow)


def profiled(mesh: bp.Mesh, path: Path, steps: int, *, gradients: bool) -> None:
    def step() -> None:
        q, k, v = (torch.randn(1, 64, 2, 16, requires_grad=gradients) for _ in range(3))
        out = bp.attention(q, k, v, mesh=mesh, mask="full", strategy="ring")
        if gradients:
            out.sum().backward()

    dist.barrier()
    with bp.profile(mesh=mesh) as session:
        for _ in range(steps if mesh.size > 2 else 3 * steps):
            step()
            session.mark()
    report = session.report()
    assert (report is None) == (mesh.rank > 0)
    if report:
        report.write_json(path)


def run_ablation(mesh: bp.Mesh, path: Path) -> None:
    """Time a step whose kernels sleep on one rank, with communication or kernels removed."""
    q, k, v = (torch.randn(1, 64, 2, 16) for _ in range(3))

    def step() -> None:
        bp.attention(q, k, v, mesh=mesh, mask="full", strategy="ring")

    with bp.profile(mesh=mesh) as session:
        step()
        session.ablate(step)
    if report := session.report():
        report.write_json(path)


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # forked ranks have one random state, and would draw the same shards
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    transport = SlowLink(None, "gloo", batched=False, timeout=60)
    mesh = bp.Mesh(rank, ranks, lambda device_type: transport)
    profiled(mesh, folder / "warm.json", 1, gradients=True)
    if rank == slow_link(ranks)[1]:
        transport.slow_source = slow_link(ranks)[0]
    profiled(mesh, folder / "link.json", 3, gradients=False)
    if rank == slow_link(ranks)[1]:
        (folder / "link.delays").write_text(json.dumps(slept))
    transport.slow_source = -1
    slept.clear()
    if rank == SLOW_RANK:
        slow_kernel()
    profiled(mesh, folder / "compute.json", 2, gradients=True)
    if rank == SLOW_RANK:
        (folder / "compute.delays").write_text(json.dumps(slept))
    if ranks == 2:
        slept.clear()
        run_ablation(mesh, folder / "ablated.json")
        if rank == SLOW_RANK:
            (folder / "ablated.delays").write_text(json.dumps(slept))
    slept.clear()
    if rank != SLOW_RANK:
        slow_kernel()
    profiled(mesh, folder / "hidden.json", 2, gradients=False)
    if rank == SLOW_RANK:
        (folder / "hidden.delays").write_text(json.dumps(slept))
    dist.barrier()


if __name__ == "__main__":
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    run_forked(int(sys.argv[1]), main, int(sys.argv[1]), folder)
