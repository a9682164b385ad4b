"""The ranks of `burst-portable measure`: processes of this machine, or those that a launcher has started.

As a program, one local rank: python -m burst_portable.cli.measuring JOB RANK; see `cli.run.worker`.
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
from burst_portable.cli.run.worker import device_of, join, join_launched, main, tell
from burst_portable.config import Launched

Facts = dict[str, Any]


@dataclass(frozen=True)
class MeasureJob(Saved):
    """One call of the command: what is measured, on which backend, and the threads that a rank has."""

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


def measure_local(job: MeasureJob, told: Callable[[str], None]) -> Facts:
    """Start the ranks as processes; what they found. Raises as `run_processes`."""
    with tempfile.TemporaryDirectory(prefix="burst-portable-") as folder:
        done = run_processes(job, Path(folder), lambda event: told(event["what"]), "burst_portable.cli.measure_worker")
    facts: Facts = done[0]["facts"]
    return facts


def measure_joined(job: MeasureJob, place: Launched, told: Callable[[str], None]) -> Facts:
    """This rank's part among those of a launcher; what all of them found."""
    import torch.distributed as dist

    device = device_of(job.device_type, place.local_rank)
    join_launched(job.backend, place)
    try:
        return _measured(job, device, told)
    finally:
        dist.destroy_process_group()


def _measured(job: MeasureJob, device: Any, told: Callable[[str], None]) -> Facts:
    import torch

    from burst_portable.measuring.measurement import Shape, measure
    from burst_portable.mesh import Mesh

    dtype = None if job.dtype is None else getattr(torch, job.dtype)
    shape = Shape(job.heads, job.kv_heads, job.head_dim, dtype, job.length)
    mesh = Mesh.from_group(ranks_per_node=job.ranks_per_node, backend=job.backend)
    return measure(mesh, device, shape, job.kernel, told)


def _local_rank(path: Path, rank: int) -> None:
    import torch
    import torch.distributed as dist

    job = MeasureJob.load(path)
    torch.set_num_threads(job.threads)
    device = device_of(job.device_type, rank)
    join(job.backend, rank, job.ranks, path.parent)
    try:
        tell(event="done", facts=_measured(job, device, lambda what: tell(event="step", what=what)))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _local_rank))
