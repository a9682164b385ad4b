"""Run the ranks of `burst-portable measure`: local processes, or the ranks that a launcher started.

One local rank is the program python -m burst_portable.cli.measure_worker JOB RANK; see `cli.run.worker`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_portable.cli.run.job import RankJob
from burst_portable.cli.run.spawn import run_processes
from burst_portable.cli.run.worker import launched_mesh, local_mesh, main, write_event
from burst_portable.config import LauncherEnv

if TYPE_CHECKING:
    import torch

    from burst_portable.mesh import Mesh

Facts = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MeasureJob(RankJob):
    """One call of the command: the attention to measure."""

    kernel: str
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    length: int


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
    with launched_mesh(job, launcher) as (mesh, device):
        return _measure(job, mesh, device, on_progress)


def _measure(job: MeasureJob, mesh: Mesh, device: torch.device, on_progress: Callable[[str], None]) -> Facts:
    from burst_portable.measuring.measurement import measure, measured_call

    call = measured_call(job.heads, job.kv_heads, job.head_dim, job.dtype, device.type, job.length)
    return measure(mesh, device, call, job.kernel, on_progress)


def _local_rank(path: Path, rank: int) -> None:
    job = MeasureJob.load(path)
    with local_mesh(job, rank, path.parent) as (mesh, device):
        facts = _measure(job, mesh, device, lambda what: write_event(event="step", what=what))
        write_event(event="done", facts=facts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _local_rank))
