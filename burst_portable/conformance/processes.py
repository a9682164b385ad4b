"""Ranks as processes, over the backend's own transport: a process group of this machine, one device per rank."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import group_options_of, known, load
from burst_portable.comm.base import Transport
from burst_portable.config import listen_on_loopback
from burst_portable.conformance.cases import Case
from burst_portable.conformance.exchanges import JOBS
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import Shard, fresh_memory_is_nan, run_rank
from burst_portable.conformance.trial import Subject, as_it_is, raised
from burst_portable.errors import CommunicationError

START = 120.0
"""Default seconds until all ranks have imported torch and met."""
LAST_WORDS = 3.0
"""Default seconds for the other ranks to report when one has failed, since it need not be the one with the fault."""
_JOBS, _JOBS_IN_SUBGROUP = "jobs", "jobs in a subgroup"

Work = str | Case


class RankError(Exception):
    """Ranks that are processes did not all come to their end."""


def devices(backend: Backend) -> int | None:
    """How many ranks can have a device of their own; None for as many as you like."""
    if not backend.capabilities.streams:
        return None
    return int(torch.get_device_module(backend.capabilities.device_type).device_count())


def exchange(subject: Subject, ranks: int) -> str:
    """Run every job of `exchanges` on this many processes; returns what was wrong."""
    return _told(_spawn(subject, ranks, _JOBS))


def exchange_in_subgroup(subject: Subject, ranks: int) -> str:
    """Do the same in a process group of all these processes but the first."""
    return _told(_spawn(subject, ranks, _JOBS_IN_SUBGROUP))


def _told(said: Sequence[dict[str, str]]) -> str:
    """Return what was wrong on the ranks, in one line."""
    return "; ".join(f"rank {r}, {job}: {wrong}" for r, told in enumerate(said) for job, wrong in told.items() if wrong)


def shards(subject: Subject, case: Case) -> list[Shard]:
    """A case on processes."""
    return _spawn(subject, case.ranks, case)


def carried(subject: Subject) -> Subject:
    """For another process: its backend by name where it has one, for a backend need not be something that pickles."""
    backend = subject.backend
    named = backend.name in known() and load(backend.name) is backend
    return replace(subject, backend=backend.name) if named else subject  # type: ignore[arg-type]  # till unpacked


def unpacked(subject: Subject) -> Subject:
    """In that process."""
    return replace(subject, backend=load(subject.backend)) if isinstance(subject.backend, str) else subject


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C, which reaches all processes of a terminal; the first ends the others."""
    resource_tracker.ensure_running()  # multiprocessing's own process: starting it would end what is asked for here
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(subject: Subject, ranks: int, work: Work) -> list[Any]:
    """Start, wait, collect. Raises `RankError` with what went wrong, and on which rank."""
    context = multiprocessing.get_context("spawn")
    lean = replace(carried(subject), wrap=as_it_is)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe(duplex=False)
            arguments = (theirs, lean, rank, ranks, str(Path(folder, "store")), work)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            with deaf_to_interrupts():
                process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            return collect(pipes, processes)
        finally:
            for process in processes:
                process.join(2)
                if process.is_alive():
                    process.kill()
                    process.join()


def collect(
    pipes: Sequence[Connection],
    processes: Sequence[BaseProcess],
    *,
    start: float = START,
    last_words: float = LAST_WORDS,
) -> list[Any]:
    """Return what each rank sends through its pipe, in rank order.

    Args:
        pipes, processes: One for each rank.
        start: Seconds until the first rank reports, and from each report to the next.
        last_words: Seconds for the other ranks to report after one has failed.

    Raises:
        RankError: A rank failed, ended without a report, or sent none in time. The message names the rank whose own
            error it was, if one had such an error.
    """
    told: dict[int, Any] = {}
    failed: list[tuple[bool, str]] = []  # whether another rank may have caused it, and what to say
    waiting = dict(enumerate(pipes))
    until = time.monotonic() + start
    while waiting and (ready := wait(waiting.values(), max(0.0, until - time.monotonic()))):
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                ok, result = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join(last_words)
                ok, result = False, (False, f"ended without a word, with exit code {processes[rank].exitcode}")
            if ok:
                told[rank] = result
            else:
                failed.append((result[0], f"rank {rank}: {result[1]}"))
            until = time.monotonic() + (last_words if failed else start)
    silent = [f"rank {rank} said nothing" for rank in waiting]
    if failed:
        # What a rank raised of its own explains more than what others raised because of it.
        raise RankError("; ".join([min(failed, key=lambda one: one[0])[1], *silent]))
    if silent:
        raise RankError(f"{'; '.join(silent)} for {start:g} s")
    return [told[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, subject: Subject, rank: int, ranks: int, store: str, work: Work) -> None:
    """One process."""
    torch.set_num_threads(1)
    try:
        # By value: multiprocessing would hand tensors over in shared memory, which ends with this process.
        pipe.send_bytes(pickle.dumps((True, _run(subject, rank, ranks, store, work))))
    except BaseException as error:  # noqa: BLE001  (told to the parent, which raises it)
        pipe.send_bytes(pickle.dumps((False, (isinstance(error, CommunicationError), raised(error)))))


def _run(subject: Subject, rank: int, ranks: int, store: str, work: Work) -> Any:
    subject = unpacked(subject)
    capabilities, device = subject.backend.capabilities, subject.device
    if capabilities.streams:
        device = torch.device(capabilities.device_type, rank)
        torch.get_device_module(device).set_device(device)
    listen_on_loopback(capabilities.process_group)
    dist.init_process_group(
        capabilities.process_group,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        **group_options_of(subject.backend, timedelta(seconds=subject.timeout)),
    )
    try:
        group = None
        if work == _JOBS_IN_SUBGROUP:
            timeout = timedelta(seconds=subject.timeout)
            group = dist.new_group(list(range(1, ranks)), **group_options_of(subject.backend, timeout))
            if rank == 0:
                return {}
        transport = subject.backend.transport(group, subject.timeout)
        with fresh_memory_is_nan():
            return _do(subject, transport, device, work)
    finally:
        dist.destroy_process_group()


def _do(subject: Subject, transport: Transport, device: torch.device, work: Work) -> Any:
    if isinstance(work, Case):
        return run_rank(subject, work, make_inputs(work), transport, device)
    return {name: job(transport, device) for name, job in JOBS.items()}
