"""Start the ranks of a job as local processes, read their events, and end all ranks if one fails.

Ranks find each other through a file and communicate over the loopback interface only.
"""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import Any

from burst_portable.cli.run.job import RankJob
from burst_portable.config import environment_of_children
from burst_portable.errors import BurstError, CommunicationError, InputError, PeerLostError, format_error

GRACE = 3.0
"""Default seconds for other ranks to report their errors, and then to terminate."""
_LAST_LINES = 12  # of a rank's stderr that are printed

Event = dict[str, Any]


def run_processes(
    job: RankJob,
    folder: Path,
    on_step: Callable[[Event], None],
    worker: str = "burst_portable.cli.run.worker",
    *,
    grace: float = GRACE,
) -> list[Event]:
    """Run all ranks of a job, and return the "done" event of each in rank order.

    Args:
        job: The job, of which each rank is a process.
        folder: An empty folder for the job, the rendezvous file and the ranks' stderr.
        on_step: Called with the "step" events of rank 0.
        worker: The module that runs as a rank, see `worker.main`.
        grace: Seconds for the other ranks to report their errors after one failed, and then to terminate.

    Raises:
        BurstError: The error of the rank that failed, or `PeerLostError` with the last lines of one that died.
    """
    path = folder / "job.json"
    job.save(path)
    ranks = _Ranks(path, job.ranks, worker, grace)
    try:
        return ranks.listen(on_step)
    finally:
        ranks.end()


class _Ranks:
    def __init__(self, job: Path, count: int, worker: str, grace: float) -> None:
        self._grace = grace
        self._folder = folder = job.parent
        self._events: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._listeners: list[threading.Thread] = []
        environment = environment_of_children(PYTHONUNBUFFERED="1")
        for rank in range(count):
            with (folder / f"rank{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [sys.executable, "-m", worker, str(job), str(rank)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C reaches only this process, which terminates them
                )
            self._processes.append(process)
            listener = threading.Thread(target=self._read_events, args=(rank, process), daemon=True)
            listener.start()
            self._listeners.append(listener)

    def _read_events(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Queue the events of one rank, then None for its end."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # output of a library
            if isinstance(event, dict):
                self._events.put((rank, event))
        process.wait()
        self._events.put((rank, None))

    def listen(self, on_step: Callable[[Event], None]) -> list[Event]:
        """Process events until all ranks are done."""
        done: dict[int, Event] = {}
        ended = 0
        while ended < len(self._processes):
            rank, event = self._events.get()
            if event is None:
                ended += 1
                if rank not in done:
                    raise self._failure(rank, None)
            elif event.get("event") == "step" and rank == 0:
                on_step(event)
            elif event.get("event") == "done":
                done[rank] = event
            elif event.get("event") == "error":
                raise self._failure(rank, event)
        return [done[rank] for rank in range(len(self._processes))]

    def _failure(self, rank: int, event: Event | None) -> BurstError:
        """Return the error of the rank that failed first. Other ranks lose it, and may report that earlier."""
        failed: dict[int, Event | None] = {rank: event}
        until = monotonic() + self._grace
        while len(failed) < len(self._processes) and (seconds := until - monotonic()) > 0:
            try:
                other, report = self._events.get(timeout=seconds)
            except queue.Empty:
                break
            if report is None or report.get("event") == "error":
                failed.setdefault(other, report)
        rank, event = min(failed.items(), key=lambda one: self._order(*one))
        for other, report in failed.items():
            if other != rank and report is not None and (event is None or report["message"] != event["message"]):
                message = report["message"].removeprefix(f"rank {other}").lstrip(":, ")
                print(f"rank {other}: {message}", file=sys.stderr)
        if event is None:
            return PeerLostError(self._describe_exit(rank))
        kind = InputError if event["kind"] == "input" else CommunicationError
        return kind(event["message"])

    def _order(self, rank: int, event: Event | None) -> int:
        """Return a sort key: first invalid input, then an end by a signal, another end, a lost peer."""
        if event is not None:
            return {"input": 0, "communication": 3}[event["kind"]]
        return 1 if self._processes[rank].wait() < 0 else 2

    def _describe_exit(self, rank: int) -> str:
        """Return the message for a rank that ended without an event, and print its last lines."""
        text = (self._folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        for line in lines[-_LAST_LINES:]:
            print(f"rank {rank}: {line}", file=sys.stderr)
        code = self._processes[rank].wait()
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        out_of_memory = "the system kills processes when memory runs out; use fewer tokens or ranks"
        return format_error(
            f"rank {rank} {what}",
            got=lines[-1].strip() if lines else "no output on stderr",
            next_step=out_of_memory if -code == signal.SIGKILL else None,
        )

    def end(self) -> None:
        """Terminate running processes, and wait for them."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(self._grace)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for process, listener in zip(self._processes, self._listeners, strict=True):
            listener.join(self._grace)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
