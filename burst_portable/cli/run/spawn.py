"""Starts a job's ranks as processes of this machine, listens to them, and ends them all when one fails.

Ranks meet through a file and talk over the loopback interface alone.
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
from typing import Any, Protocol

from burst_portable.config import environment_of_children
from burst_portable.errors import BurstError, CommunicationError, InputError, PeerLostError, format_error

GRACE = 3.0
"""Default seconds for other ranks to report their own reason, and then to end when asked."""
_LAST_LINES = 12

Event = dict[str, Any]


class Job(Protocol):
    """What processes are started for."""

    @property
    def ranks(self) -> int:
        """How many."""

    def save(self, path: Path) -> None:
        """Write it where they find it."""


def run_processes(
    job: Job,
    folder: Path,
    on_step: Callable[[Event], None],
    worker: str = "burst_portable.cli.run.worker",
    *,
    grace: float = GRACE,
) -> list[Event]:
    """Run every rank of a job to its end; what each said when it was done, in rank order.

    Args:
        folder: an empty folder of ours: the job, the rendezvous, the ranks' output.
        on_step: hears the "step" events of rank 0.
        worker: the module that is a rank, see `worker.main`.
        grace: Seconds for the other ranks to report their reason after one failed, and then to end.

    Raises:
        BurstError: what the first failing rank raised, or `PeerLostError` with the last lines of one that died.
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
        self._said: queue.SimpleQueue[tuple[int, Event | None]] = queue.SimpleQueue()
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
                    start_new_session=True,  # Ctrl-C reaches this process alone, which ends them quietly
                )
            self._processes.append(process)
            listener = threading.Thread(target=self._hear, args=(rank, process), daemon=True)
            listener.start()
            self._listeners.append(listener)

    def _hear(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """One rank's events, then None for its end."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a library that prints to stdout
            if isinstance(event, dict):
                self._said.put((rank, event))
        process.wait()
        self._said.put((rank, None))

    def listen(self, on_step: Callable[[Event], None]) -> list[Event]:
        """Events until all ranks are done."""
        done: dict[int, Event] = {}
        ended = 0
        while ended < len(self._processes):
            rank, event = self._said.get()
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
        """The error of the rank that failed by itself: others only lose it, and may be heard first."""
        heard: dict[int, Event | None] = {rank: event}
        until = monotonic() + self._grace
        while len(heard) < len(self._processes) and (left := until - monotonic()) > 0:
            try:
                other, said = self._said.get(timeout=left)
            except queue.Empty:
                break
            if said is None or said.get("event") == "error":
                heard.setdefault(other, said)
        rank, event = min(heard.items(), key=lambda one: self._order(*one))
        for other, said in heard.items():
            if other != rank and said is not None and (event is None or said["message"] != event["message"]):
                message = said["message"].removeprefix(f"rank {other}").lstrip(":, ")
                print(f"rank {other}: {message}", file=sys.stderr)
        if event is None:
            return PeerLostError(self._last_words(rank))
        kind = InputError if event["kind"] == "input" else CommunicationError
        return kind(event["message"])

    def _order(self, rank: int, event: Event | None) -> int:
        """A sort key: a rank's own mistake explains most, then a death by a signal, another death, a lost peer."""
        if event is not None:
            return {"input": 0, "communication": 3}[event["kind"]]
        return 1 if self._processes[rank].wait() < 0 else 2

    def _last_words(self, rank: int) -> str:
        text = (self._folder / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        for line in lines[-_LAST_LINES:]:
            print(f"rank {rank}: {line}", file=sys.stderr)
        code = self._processes[rank].wait()
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        memory = "the system ends processes so when memory runs out; take fewer tokens or ranks"
        return format_error(
            f"rank {rank} {what}",
            got=lines[-1].strip() if lines else "no word on stderr",
            next_step=memory if -code == signal.SIGKILL else None,
        )

    def end(self) -> None:
        """End what still runs, and wait for it."""
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
