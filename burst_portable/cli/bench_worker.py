"""Run the ranks of `burst-portable bench`: local processes, or the ranks that a launcher started.

One local rank is the program python -m burst_portable.cli.bench_worker JOB RANK; see `cli.run.worker`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_portable.bench.names import PEERS
from burst_portable.bench.results import Row
from burst_portable.cli.run.job import RankJob
from burst_portable.cli.run.spawn import run_processes
from burst_portable.cli.run.worker import launched_mesh, local_mesh, main, write_event
from burst_portable.config import LauncherEnv

if TYPE_CHECKING:
    import torch

    from burst_portable.bench.entries import Entry
    from burst_portable.mesh import Mesh

OnRows = Callable[[list[Row]], None]


@dataclass(frozen=True, kw_only=True)
class BenchJob(RankJob):
    """One call of the command.

    Attributes:
        setting: Fields of `bench.entries.Setting`.
        work: (mask, length, kernel, names of entries) in order.
    """

    setting: dict[str, Any]
    work: Sequence[tuple[str, int, str, Sequence[str]]]


def bench_local(job: BenchJob, on_rows: OnRows) -> None:
    """Start the ranks as processes. Raises the errors of `run_processes`."""
    with tempfile.TemporaryDirectory(prefix="burst-portable-") as folder:
        run_processes(job, Path(folder), lambda event: on_rows(event["rows"]), "burst_portable.cli.bench_worker")


def bench_rank(job: BenchJob, launcher: LauncherEnv, on_rows: OnRows) -> None:
    """Measure as one rank of a launcher."""
    with launched_mesh(job, launcher) as (mesh, device):
        _bench(job, mesh, device, on_rows)


def _bench(job: BenchJob, mesh: Mesh, device: torch.device, on_rows: OnRows) -> None:
    from burst_portable.bench.entries import Benchmark, Setting

    names = dict.fromkeys(name for *_, entries in job.work for name in entries)
    benchmark = Benchmark(mesh, device, Setting(**job.setting), list(map(_make_entry, names)))
    for mask, length, kernel, only in job.work:
        on_rows(benchmark.measure(mask, length, kernel, only))


def _make_entry(name: str) -> Entry:
    if name not in PEERS:
        from burst_portable.bench.entries import Entry

        return Entry(name)
    from burst_portable.bench.peers import make_peer  # imports much of torch

    return make_peer(name)


def _local_rank(path: Path, rank: int) -> None:
    job = BenchJob.load(path)
    with local_mesh(job, rank, path.parent) as (mesh, device):
        _bench(job, mesh, device, lambda rows: write_event(event="step", rows=rows))
        write_event(event="done")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _local_rank))
