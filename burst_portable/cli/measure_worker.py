"""Run the ranks of `burst-portable measure`: local processes, or the ranks that a launcher started.

One local rank is the program python -m burst_portable.cli.measure_worker JOB RANK; see `cli.run.worker`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burst_portable.cli.run.job import Saved
from burst_portable.cli.run.spawn import run_processes
from burst_portable.cli.run.worker import device_of, join, join_launched, main, write_event
from burst_portable.config import LauncherEnv

Facts = dict[str, Any]


@dataclass(frozen=True)
class MeasureJob(Saved):
    """One call of the command: the shapes to measure, the backend, and the CPU threads per rank."""

    ranks: int
    backend: str
    device_type: str
    kernel: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str | None
    length: int | None
    ranks_per_node: int | None
    threads: int


def measure_local(job: MeasureJob, on_progress: Callable[[str], None]) -> Facts:
    """Start the ranks as processes and return their measurement. Raises the errors of `run_processes`."""
    with tempfile.TemporaryDirectory(prefix="burst-portable-") as folder:
        done = run_processes(
            job, Path(folder), lambda event: on_progress(event["what"]), "burst_portable.cli.measure_worker"
        )
    facts: Facts = done[0]["facts"]
    return facts


def measure_rank(job: MeasureJob, launcher: LauncherEnv, on_progress: Callable[[str], None]) -> Facts:
    """Measure as one rank of a launcher, and return the measurement of all ranks."""
    import torch.distributed as dist

    device = device_of(job.device_type, launcher.local_rank)
    join_launched(job.backend, launcher)
    try:
        return _measure(job, device, on_progress)
    finally:
        dist.destroy_process_group()


def _measure(job: MeasureJob, device: Any, on_progress: Callable[[str], None]) -> Facts:
    import torch

    from burst_portable.measuring.measurement import Shape, measure
    from burst_portable.mesh import Mesh

    dtype = None if job.dtype is None else getattr(torch, job.dtype)
    shape = Shape(job.heads, job.kv_heads, job.head_dim, dtype, job.length)
    mesh = Mesh.from_group(ranks_per_node=job.ranks_per_node, backend=job.backend)
    return measure(mesh, device, shape, job.kernel, on_progress)


def _local_rank(path: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    job = MeasureJob.load(path)
    torch.set_num_threads(job.threads)
    device = device_of(job.device_type, rank)
    join(job.backend, rank, job.ranks, path.parent)
    try:
        facts = _measure(job, device, lambda what: write_event(event="step", what=what))
        write_event(event="done", facts=facts)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _local_rank))
