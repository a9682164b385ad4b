"""Run ranks as processes with the backend's own transport: a process group on this machine, one device per rank."""

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
from burst_portable.config import listen_on_loopback
from burst_portable.conformance.base import BackendUnderTest, describe_error, identity
from burst_portable.conformance.cases import Case
from burst_portable.conformance.exchanges import JOBS
from burst_portable.conformance.fresh_memory import fresh_memory_is_nan
from burst_portable.conformance.oracle import Answer, make_inputs
from burst_portable.conformance.running import run_rank
from burst_portable.errors import CommunicationError

START = 120.0
"""Default seconds until all ranks have imported torch and connected."""
REPORT_TIMEOUT = 3.0
"""Default seconds for the other ranks to report after the first failure, which may be a consequence of theirs."""


class RankError(Exception):
    """At least one rank that is a process did not return a result."""


def skip_reason(target: BackendUnderTest, ranks: int) -> str:
    """Return why this many processes cannot be connected on this machine; "" if they can."""
    if type(target.backend).transport is Backend.transport:
        return f"the backend {target.backend.name!r} has no transport, so it supports one rank only"
    # Ranks on a device without streams may share it.
    found = torch.get_device_module(target.device).device_count() if target.backend.capabilities.streams else ranks
    return f"{ranks} ranks need {ranks} devices; found {found}" if found < ranks else ""


def run_exchanges(target: BackendUnderTest, ranks: int, *, in_subgroup: bool = False) -> str:
    """Run every job of `exchanges` on `ranks` processes and return what is wrong, or "".

    If `in_subgroup`, the jobs run in a process group of all these processes but the first.
    """
    reports = enumerate(_spawn(target, ranks, None, in_subgroup))
    return "; ".join(f"rank {r}, {job}: {wrong}" for r, jobs in reports for job, wrong in jobs.items() if wrong)


def run_on_processes(target: BackendUnderTest, case: Case) -> list[Answer]:
    """Run a case with one process per rank and return the shards in rank order."""
    return _spawn(target, case.ranks, case)


def pack(target: BackendUnderTest) -> BackendUnderTest:
    """Replace the backend by its name, if it has one, for another process: a backend may not support pickling."""
    backend = target.backend
    has_name = backend.name in known() and load(backend.name) is backend
    return replace(target, backend=backend.name) if has_name else target  # type: ignore[arg-type]  # until `unpack`


def unpack(target: BackendUnderTest) -> BackendUnderTest:
    """Undo `pack` in the other process."""
    return replace(target, backend=load(target.backend)) if isinstance(target.backend, str) else target


@contextmanager
def ignore_interrupts() -> Iterator[None]:
    """Start processes that ignore Ctrl-C. It reaches all processes of a terminal, and the parent ends its children."""
    resource_tracker.ensure_running()  # a process of multiprocessing; its start would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _spawn(target: BackendUnderTest, ranks: int, case: Case | None, in_subgroup: bool = False) -> list[Any]:
    """Run a case, or the jobs, on one process per rank. Raise `RankError` with the error and its rank."""
    context = multiprocessing.get_context("spawn")
    lean = replace(pack(target), wrap=identity)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            arguments = (sender, lean, rank, ranks, str(Path(folder, "store")), case, in_subgroup)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            with ignore_interrupts():
                process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        try:
            return collect(pipes, processes)
        finally:
            for process in processes:
                process.join(2)
                process.kill()
                process.join()


def collect(
    pipes: Sequence[Connection],
    processes: Sequence[BaseProcess],
    *,
    start: float = START,
    report_timeout: float = REPORT_TIMEOUT,
) -> list[Any]:
    """Return what each rank sends through its pipe, in rank order.

    `start` is the time in seconds until the first rank reports, and from each report to the next. After one rank has
    failed, the other ranks have `report_timeout` seconds. Raises `RankError` if a rank failed, ended without a report,
    or sent none in time. The message names the rank whose own error it was, if one had such an error.
    """
    results: dict[int, Any] = {}
    failed: list[tuple[bool, str]] = []  # whether another rank may be the cause, and the message
    waiting = dict(enumerate(pipes))
    until = time.monotonic() + start
    while waiting and (ready := wait(waiting.values(), max(0.0, until - time.monotonic()))):
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            try:
                ok, result = pickle.loads(waiting.pop(rank).recv_bytes())
            except EOFError:
                processes[rank].join(report_timeout)
                ok, result = False, (False, f"ended without a report; exit code {processes[rank].exitcode}")
            if ok:
                results[rank] = result
            else:
                failed.append((result[0], f"rank {rank}: {result[1]}"))
            until = time.monotonic() + (report_timeout if failed else start)
    silent = [f"rank {rank} did not report" for rank in waiting]
    if failed:
        # An error with its cause on the same rank explains more than a communication error on another rank.
        raise RankError("; ".join([min(failed, key=lambda one: one[0])[1], *silent]))
    if silent:
        raise RankError(f"{'; '.join(silent)} within {start:g} s")
    return [results[rank] for rank in range(len(pipes))]


def _rank(pipe: Connection, *work: Any) -> None:
    """Run one rank in its process."""
    torch.set_num_threads(1)
    try:
        # By value: multiprocessing would send tensors in shared memory, which ends with this process.
        pipe.send_bytes(pickle.dumps((True, _run(*work))))
    except BaseException as error:  # noqa: BLE001  (sent to the parent, which raises it)
        pipe.send_bytes(pickle.dumps((False, (isinstance(error, CommunicationError), describe_error(error)))))


def _run(
    target: BackendUnderTest, rank: int, ranks: int, store: str, case: Case | None, in_subgroup: bool
) -> Answer | dict[str, str]:
    target = unpack(target)
    capabilities, device, timeout = target.backend.capabilities, target.device, timedelta(seconds=target.timeout)
    if capabilities.streams:
        device = torch.device(capabilities.device_type, rank)
        torch.get_device_module(device).set_device(device)
    listen_on_loopback(capabilities.process_group)
    dist.init_process_group(
        capabilities.process_group,
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        **group_options_of(target.backend, timeout),
    )
    try:
        group = None
        if in_subgroup:
            group = dist.new_group(list(range(1, ranks)), **group_options_of(target.backend, timeout))
            if rank == 0:
                return {}
        transport = target.backend.transport(group, target.timeout)
        with fresh_memory_is_nan():
            if case is not None:
                return run_rank(target, case, make_inputs(case), transport, device)
            return {name: job(transport, device) for name, job in JOBS.items()}
    finally:
        dist.destroy_process_group()
