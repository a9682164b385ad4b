"""Define `profile`, a context manager that records every attention call of this rank.

    with bp.profile(mesh=mesh) as session:      # default mesh: that of the recorded calls
        for batch in data:
            train(batch)
            session.mark()              # the next training step begins
    report = session.report()           # every rank calls it; rank 0 gets the report, other ranks None
    if report:
        print(report.summary)
        report.write_html("profile.html")

A session records the calls of the thread that opened it, of ranks that are started as threads inside the block, and
their backward passes. Without a session, this package is not imported.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from contextvars import Token
from dataclasses import replace
from pathlib import Path
from threading import Lock, Thread, current_thread
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import nn

from burst_portable.errors import InputError, shown
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.profiling.event_tables import RankRecords, pack, unpack
from burst_portable.profiling.recorder import Recorder
from burst_portable.profiling.recording_observer import RecordingObserver
from burst_portable.profiling.recording_transport import RecordingTransport
from burst_portable.runtime.prepared_call import CallWrapper, PreparedCall, call_wrapper
from burst_portable.utils.text import rank_names

if TYPE_CHECKING:
    from burst_portable.profiling.ablation import Ablation
    from burst_portable.profiling.report import Report
    from burst_portable.profiling.tracing import Tracer

LEVELS = ("basic", "standard", "kernels")
_MAX_LISTED = 8  # ranks in an error message


class _MeshRank(NamedTuple):
    """A rank of a mesh: with data parallelism, every sequence group has a rank 0."""

    global_ranks: tuple[int, ...]
    rank: int


class Session:
    """A profiling session, created by `profile`."""

    def __init__(self, level: str, mesh: MeshLike) -> None:
        self.level, self._mesh = level, mesh
        self._recorders: dict[_MeshRank, Recorder] = {}
        self._meshes: dict[_MeshRank, Mesh] = {}
        self._ablations: dict[_MeshRank, Ablation] = {}
        self._since = 0  # start of the first training step: the session was opened, or marked before any attention
        self._by_thread: dict[Thread, set[_MeshRank]] = {}
        self._opener: Thread | None = None
        self._lock = Lock()
        self._token: Token[Any] | None = None
        self._outer: CallWrapper | None = None
        self._tracer: Tracer | None = None
        if level == "kernels":
            from burst_portable.profiling.tracing import Tracer

            self._tracer = Tracer()

    def __enter__(self) -> Session:
        if self._token is not None:
            raise InputError("this profiling session is already open; create another one with profile()")
        if self._tracer is not None:
            self._tracer.start()
        self._opener, self._outer = current_thread(), call_wrapper.get()
        self._token = call_wrapper.set(self.observe)
        self._since = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is None:
            raise InputError("this profiling session is not open")
        if call_wrapper.get() != self.observe:
            raise InputError(
                "this profiling session is not the last one that was opened in this thread",
                next_step="first close the sessions that were opened after it, in the thread that opened them",
            )
        call_wrapper.reset(self._token)
        self._token = self._outer = None
        for recorder in self._recorders.values():
            if recorder.sensors is not None:
                recorder.sensors.stop()
        if self._tracer is not None:
            self._tracer.stop()

    def observe(self, prepared: PreparedCall, mesh: Mesh) -> PreparedCall:
        """Return the call with recording added. A session around this one also records it."""
        if self._outer:
            prepared = self._outer(prepared, mesh)
        observer = RecordingObserver(prepared, self._recorder(mesh))
        return replace(prepared, observer=observer, transport=RecordingTransport(prepared.transport, observer))

    @property
    def used_kernels(self) -> dict[str, str]:
        """Names of the kernels that the recorded calls of this process used -> reason."""
        return {name: why for recorder in self._recorders.values() for name, why in recorder.used_kernels.items()}

    def _recorder(self, mesh: Mesh) -> Recorder:
        key = _MeshRank(mesh.global_ranks, mesh.rank)
        with self._lock:
            self._meshes[key] = mesh
            self._by_thread.setdefault(current_thread(), set()).add(key)
            if key not in self._recorders:
                self._recorders[key] = Recorder(
                    mesh.rank,
                    host_name(),
                    level=self.level,
                    annotate=self._tracer.annotate if self._tracer else None,
                    since=self._since,
                    hardware=mesh.config.hardware_spec,
                )
            return self._recorders[key]

    def _known_mesh(self, mesh: MeshLike) -> Mesh | None:
        """Return the mesh that was passed, else that of the recorded calls; None without recorded calls."""
        given = self._mesh if mesh is None else mesh
        meshes = {key.global_ranks: self._meshes[key] for key in list(self._recorders)}
        if given is not None:
            found = as_mesh(given)
            if meshes and found.global_ranks not in meshes:
                recorded = "; of ".join(map(rank_names, sorted(meshes)))
                raise InputError(
                    "no call of this mesh was recorded",
                    got=f"mesh= of {rank_names(found.global_ranks)}, calls of {recorded}",
                    next_step="pass the mesh that attention is called with as mesh=",
                )
            return found
        if len(meshes) > 1:
            raise InputError(
                "calls of several meshes were recorded",
                got="; ".join(map(rank_names, sorted(meshes))),
                next_step="pass mesh= to profile() or report(): the mesh whose calls are to be reported",
            )
        return next(iter(meshes.values()), None)

    def mark(self) -> None:
        """End a training or inference step and begin the next one.

        The first step begins when the session is opened, or with a mark before any attention. The time after the last
        mark is not a step.

        A thread marks the ranks that called attention in it. The thread that opened the session marks all ranks if it
        called no attention itself.
        """
        self._since = time.perf_counter_ns()
        thread = current_thread()
        with self._lock:
            default = self._recorders if thread is self._opener else ()
            recorders = [self._recorders[key] for key in self._by_thread.get(thread, default)]
        for recorder in recorders:
            recorder.next_train_step()

    def ablate(
        self, step: Callable[[], Any], *, model: nn.Module | None = None, repeat: int = 3, device: str | None = None
    ) -> Ablation:
        """Measure what communication and computing add to a step, and add the result to the report.

        All ranks of the mesh must call it. These steps are not recorded. See `ablation.ablate` for the arguments and
        errors. Default of `device`: that of the recorded calls.
        """
        from burst_portable.profiling.ablation import ablate

        mesh = self._known_mesh(None) or as_mesh(None)
        key = _MeshRank(mesh.global_ranks, mesh.rank)
        if device is None and key in self._recorders:
            device = self._recorders[key].device_type
        found = self._ablations[key] = ablate(step, mesh=mesh, model=model, repeat=repeat, device=device)
        self._since = time.perf_counter_ns()
        for recorder in list(self._recorders.values()):
            recorder.begin_step()
        return found

    def totals(self) -> tuple[float, float]:
        """Return the seconds in kernels and in waits so far, over this process's ranks; 0 with device events."""
        recorders = list(self._recorders.values())
        return sum(r.kernels for r in recorders) / 1e9, sum(r.waiting for r in recorders) / 1e9

    def records(self) -> list[RankRecords]:
        """Return the records of this process, one entry per rank of a mesh. Wait for asynchronous devices."""
        return self._read(sorted(self._recorders))

    def _read(self, keys: Sequence[_MeshRank]) -> list[RankRecords]:
        records = []
        for key in keys:
            one = self._recorders[key].records()
            if found := self._ablations.get(key):
                one = replace(one, facts={**one.facts, "ablation": found.facts()})
            records.append(one)
        if self._tracer is None:
            return records
        if len({key.rank for key in self._recorders}) < len(self._recorders):  # labels in the trace name no mesh
            raise InputError(
                "a session of level 'kernels' cannot separate calls of several meshes",
                next_step="record calls of one mesh only",
            )
        traces = self._tracer.kernel_traces()
        return [replace(one, kernel_trace=traces.get(one.rank)) for one in records]

    def write_trace(self, path: str | Path) -> None:
        """Write the file of the vendor's tracer, for ui.perfetto.dev; attention has labels from the plan.

        Raises:
            InputError: If the level is not "kernels", or the session is still open.
        """
        if self._tracer is None:
            raise InputError("this session has no tracer", got=f"level {self.level!r}", allowed="level 'kernels'")
        self._tracer.write(Path(path))

    def gather(self, mesh: MeshLike = None) -> list[RankRecords] | None:
        """Return the records of all ranks in rank order on rank 0, None on other ranks. All ranks must call it.

        Args:
            mesh: Mesh whose calls are gathered. Default: the mesh passed to `profile`, else that of the recorded calls.

        Raises:
            InputError: If the mesh is unknown, because calls of several meshes or none were recorded. If no call of the
                passed mesh was recorded. On rank 0: if ranks recorded different training steps.
            CommunicationTimeoutError: If a rank does not call this function; the message names the rank.
            PeerLostError: If a rank has failed; the message names the rank.
            MismatchError: On every rank, if other ranks call attention instead and the transport can detect it.
        """
        known = self._known_mesh(mesh)
        mesh = known or as_mesh(None)
        if known is None and mesh.size > 1:
            raise InputError(
                "this rank recorded no attention call, so its mesh is unknown",
                next_step="call attention inside `with burst_portable.profile(...)`, or pass mesh= to profile()",
            )
        records = self._read([key for key in sorted(self._recorders) if key.global_ranks == mesh.global_ranks])
        if mesh.size == 1 or len(records) > 1:
            return records
        record = records[0] if records else RankRecords(mesh.rank, host_name(), "host clock", {})
        parts = _gather_bytes(mesh, pack(record), torch.device(record.facts.get("device", "cpu")))
        return None if parts is None else _check_same_steps([unpack(part) for part in parts])

    def report(self, mesh: MeshLike = None, *, skip: int = 0) -> Report | None:
        """Return the report on rank 0, None on other ranks. All ranks of the mesh must call it.

        Args:
            mesh: See `gather`.
            skip: Number of first training steps (warm-up) to leave out. Default: 0.

        Raises:
            InputError: If no step is left to report; see also `gather`.
        """
        gathered = self.gather(mesh)
        if gathered is None:
            return None
        from burst_portable.profiling.report import Report

        return Report.of(gathered, skip=skip)


def profile(level: Literal["basic", "standard", "kernels"] = "standard", *, mesh: MeshLike = None) -> Session:
    """Return a context manager that records the time of every attention call.

    Args:
        level: "basic" records only the durations of kernels and waits, and keeps the latest of them, for runs that are
            always profiled. "standard" records every kernel call and message with the facts of the plan. "kernels" adds
            the device kernels that the vendor's tracer records, for a few steps. Default: "standard".
        mesh: Ranks whose records `gather` and `report` collect: a Mesh, or any value that `attention` accepts as one.
            Default: the mesh of the recorded calls, which must then all be of one mesh.

    Raises:
        InputError: If the level is unknown.
    """
    if not isinstance(level, str) or level not in LEVELS:
        raise InputError("unknown level of profiling", got=shown(level), allowed=", ".join(LEVELS))
    return Session(level, mesh)


def host_name() -> str:
    """Return a name for this machine's monotonic clock: its boot id if it has one, else the machine's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else platform.node()


def _check_same_steps(ranks: list[RankRecords]) -> list[RankRecords]:
    """Return the records if all ranks recorded the same training steps; otherwise raise `InputError`.

    With different steps, the report would name the wrong rank as the cause of waits.
    """
    steps = {one.rank: one.last_train_step + 1 for one in ranks}
    if len(set(steps.values())) > 1:
        counts = ", ".join(f"{steps[rank]} on rank {rank}" for rank in sorted(steps)[:_MAX_LISTED])
        raise InputError(
            "ranks recorded different training steps",
            got=f"{counts}{', ...' if len(steps) > _MAX_LISTED else ''}",
            next_step="open the session on every rank of the mesh before its first call, and mark() on every rank",
        )
    return ranks


def _gather_bytes(mesh: Mesh, data: bytes, device: torch.device) -> Sequence[bytes] | None:
    """Return the bytes of all ranks on rank 0, None on other ranks, over the mesh's transport."""
    from burst_portable.comm.agreement import agree_on_call
    from burst_portable.comm.base import Message

    transport = mesh.transport(device.type)
    agree_on_call(transport, "session.report() or gather()")
    with transport.between_passes():
        local = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        sizes = [torch.empty(8, dtype=torch.uint8, device=device) for _ in range(mesh.size)]
        transport.all_gather(torch.tensor([len(data)], device=device).view(torch.uint8), sizes, "profile sizes")
        if mesh.rank:
            handles, _ = transport.post([Message(local, 0)], [], "profile")
            handles[0].wait()
            return None
        parts = [local] + [torch.empty(int(s.view(torch.int64)), dtype=torch.uint8, device=device) for s in sizes[1:]]
        _, handles = transport.post([], [Message(part, r) for r, part in enumerate(parts) if r], "profile")
        for handle in handles:
            handle.wait()
        return [part.cpu().numpy().tobytes() for part in parts]
