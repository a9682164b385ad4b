"""Run the ranks of `burst-portable bench`: local processes, or the ranks that a launcher started.

One local rank is the program python -m burst_portable.cli.bench_worker JOB RANK; see `cli.run.worker`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_portable.bench.peer_names import PEERS
from burst_portable.bench.results import Row
from burst_portable.cli.process import Ended
from burst_portable.cli.run.job import RankJob
from burst_portable.cli.run.spawn import run_processes
from burst_portable.cli.run.worker import launched_mesh, local_mesh, main, write_event
from burst_portable.config import LauncherEnv
from burst_portable.errors import CommunicationError

if TYPE_CHECKING:
    import torch

    from burst_portable.bench.entries import Entry
    from burst_portable.mesh import Mesh

OnRows = Callable[[list[Row]], None]
Work = tuple[str, int, str, Sequence[str]]
"""(mask, length, kernel, names of entries)."""
_MOST = 400  # characters of an error in a row


@dataclass(frozen=True, kw_only=True)
class BenchJob(RankJob):
    """One call of the command.

    Attributes:
        setting: Fields of `bench.task.Setting`.
        work: (mask, length, kernel, names of entries) in order.
    """

    setting: dict[str, Any]
    work: Sequence[Work]


class Running:
    """Progress of a benchmark.

    Attributes:
        entry: Name of the entry that ranks examine now; "" for none.
    """

    def __init__(self, job: BenchJob, on_rows: OnRows) -> None:
        self._job, self._on_rows = job, on_rows
        self._left = list(job.work)
        self.entry = ""

    def on_entry(self, name: str) -> None:
        """Record the entry that all ranks begin to examine; "" for none."""
        self.entry = name

    def on_rows(self, rows: list[Row]) -> None:
        """Record that the first part of the work is done."""
        self._left, self.entry = self._left[1:], ""
        self._on_rows(rows)

    def fail(self, error: CommunicationError) -> BenchJob:
        """Report the rows of the entry that ended a rank as failed. Return the job without it.

        An entry that ended a rank once does not run again.

        Raises:
            CommunicationError: `error`, if the ranks examined no entry.
        """
        if not self.entry:
            raise error
        failed, left = self.entry, list[Work]()
        reason = str(error)[:_MOST]
        for mask, length, kernel, names in self._left:
            if failed in names:
                where: Row = {"mask": mask, "seq_len": length, "ranks": self._job.ranks, "kernel": kernel}
                self._on_rows([{**where, "entry": failed, "status": "failed", "reason": reason}])
                reason = f"it does not run again, since it ended a rank on {self._left[0][0]}"
            if others := [name for name in names if name != failed]:
                left.append((mask, length, kernel, others))
        return replace(self._job, work=left)


def bench_local(job: BenchJob, on_rows: OnRows) -> None:
    """Start the ranks as processes, and again without an entry that ended one. Raises the errors of `run_processes`."""
    while job.work:
        running = Running(job, on_rows)

        def on_event(event: dict[str, Any], running: Running = running) -> None:
            if "entry" in event:
                running.on_entry(event["entry"])
            else:
                running.on_rows(event["rows"])

        try:
            with tempfile.TemporaryDirectory(prefix="burst-portable-") as folder:
                run_processes(job, Path(folder), on_event, "burst_portable.cli.bench_worker")
            return
        except CommunicationError as error:
            job = running.fail(error)


def bench_rank(job: BenchJob, launcher: LauncherEnv, on_rows: OnRows) -> None:
    """Measure as one rank of a launcher.

    Raises:
        CommunicationError: A rank ended. The rows of the entry that ended it are reported as failed before.
    """
    running = Running(job, on_rows)
    with launched_mesh(job, launcher) as (mesh, device):
        try:
            _bench(job, mesh, device, running.on_rows, running.on_entry)
        except CommunicationError as error:
            running.fail(error)
            raise
        except Ended:  # a launcher also ends the ranks whose peer has ended
            if launcher.rank == 0 and running.entry:
                print(f"rank 0 examined {running.entry} when it was ended", file=sys.stderr)
            raise


def _bench(job: BenchJob, mesh: Mesh, device: torch.device, on_rows: OnRows, on_entry: Callable[[str], None]) -> None:
    from burst_portable.bench.benchmark import Benchmark
    from burst_portable.bench.task import Setting

    names = dict.fromkeys(name for *_, entries in job.work for name in entries)
    benchmark = Benchmark(mesh, device, Setting(**job.setting), list(map(_make_entry, names)))
    for mask, length, kernel, only in job.work:
        on_rows(benchmark.measure(mask, length, kernel, only, on_entry))


def _make_entry(name: str) -> Entry:
    if name not in PEERS:
        from burst_portable.bench.entries import Entry

        return Entry(name)
    from burst_portable.bench.peers import make_peer  # imports much of torch

    return make_peer(name)


def _local_rank(path: Path, rank: int) -> None:
    job = BenchJob.load(path)
    with local_mesh(job, rank, path.parent) as (mesh, device):
        _bench(
            job, mesh, device, lambda rows: write_event(event="step", rows=rows),
            lambda name: write_event(event="step", entry=name),
        )  # fmt: skip
        write_event(event="done")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _local_rank))
