"""`with burst_portable.profile() as session:` records every attention that this rank computes in the block.

    with bp.profile(mesh=mesh) as session:      # without mesh=, that of the calls, where they are all of one
        for batch in data:
            train(batch)
            session.mark()              # the next training step begins
    report = session.report()           # every rank calls it; rank 0 gets the report, the others None
    if report:
        print(report.verdict)
        report.write_html("where-the-time-went.html")

It installs itself for the calls of this thread (and of ranks that are started as threads inside the block), and is
inherited by their backward passes. Off, nothing of it is imported.
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
from burst_portable.profiling.recorder import Recorder, RecordingObserver, RecordingTransport
from burst_portable.profiling.records import RankRecords, pack, unpack
from burst_portable.runtime.prepared_call import PreparedCall, installed
from burst_portable.utils.text import rank_names

if TYPE_CHECKING:
    from burst_portable.profiling.ablation import Ablation
    from burst_portable.profiling.report import Report
    from burst_portable.profiling.tracing import Tracer

LEVELS = ("session", "light", "deep")
Wrap = Callable[[PreparedCall, Mesh], PreparedCall]
_NAMED = 8  # ranks that an error lists


class _Who(NamedTuple):
    """Whose rows: a rank's number is not enough, since with data parallelism every sequence group has a rank 0."""

    global_ranks: tuple[int, ...]
    rank: int


def _who(mesh: Mesh) -> _Who:
    return _Who(mesh.global_ranks, mesh.rank)


class Session:
    """See the module. Made by `profile`."""

    def __init__(self, level: str, mesh: MeshLike) -> None:
        self.level, self._mesh = level, mesh
        self._recorders: dict[_Who, Recorder] = {}
        self._meshes: dict[_Who, Mesh] = {}
        self._ablations: dict[_Who, Ablation] = {}
        self._since = 0  # when the first training step began: the session was opened, or marked before any attention
        self._by_thread: dict[Thread, set[_Who]] = {}
        self._opener: Thread | None = None
        self._lock = Lock()
        self._token: Token[Any] | None = None
        self._outer: Wrap | None = None
        self._tracer = _tracer() if level == "deep" else None

    def __enter__(self) -> Session:
        if self._token is not None:
            raise InputError("this profiling session is open already; make another with profile()")
        if self._tracer is not None:
            self._tracer.start()
        self._opener, self._outer = current_thread(), installed.get()
        self._token = installed.set(self.observe)
        self._since = time.perf_counter_ns()
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is None:
            raise InputError("this profiling session is not open")
        if installed.get() != self.observe:
            raise InputError(
                "this profiling session is not the one that was opened last in this thread",
                next_step="close those first that were opened after it, in the thread that opened them",
            )
        installed.reset(self._token)
        self._token = self._outer = None
        for recorder in self._recorders.values():
            if recorder.sensors is not None:
                recorder.sensors.stop()
        if self._tracer is not None:
            self._tracer.stop()

    def observe(self, prepared: PreparedCall, mesh: Mesh) -> PreparedCall:
        """Return the call, recorded. Inside another session that one records as well."""
        if self._outer:
            prepared = self._outer(prepared, mesh)
        observer = RecordingObserver(prepared, self._recorder(mesh))
        return replace(prepared, observer=observer, transport=RecordingTransport(prepared.transport, observer))

    def _recorder(self, mesh: Mesh) -> Recorder:
        who = _who(mesh)
        with self._lock:
            self._meshes[who] = mesh
            self._by_thread.setdefault(current_thread(), set()).add(who)
            if who not in self._recorders:
                annotate = self._tracer.annotate if self._tracer else None
                light = self.level == "light"
                self._recorders[who] = Recorder(
                    mesh.rank,
                    host_name(),
                    light=light,
                    annotate=annotate,
                    since=self._since,
                    hardware=mesh.config.hardware_spec,
                )
            return self._recorders[who]

    def _known_mesh(self, mesh: MeshLike) -> Mesh | None:
        """The mesh that was passed, else that of the recorded calls; None where nothing was recorded either.

        Raises `InputError` where calls of several meshes were recorded, and none was passed that says which are meant.
        """
        given = self._mesh if mesh is None else mesh
        meshes = {who.global_ranks: self._meshes[who] for who in list(self._recorders)}
        if given is not None:
            found = as_mesh(given)
            if meshes and found.global_ranks not in meshes:
                recorded = "; of ".join(map(rank_names, sorted(meshes)))
                raise InputError(
                    "no call of this mesh was recorded",
                    got=f"mesh= of {rank_names(found.global_ranks)}, calls of {recorded}",
                    next_step="pass as mesh= the one that attention is called with",
                )
            return found
        if len(meshes) > 1:
            raise InputError(
                "calls of several meshes were recorded",
                got="; ".join(map(rank_names, sorted(meshes))),
                next_step="pass mesh= to profile() or report(): the one whose calls are to be brought together",
            )
        return next(iter(meshes.values()), None)

    def mark(self) -> None:
        """A training or inference step is over, and the next one begins: the calls to come belong to it.

        The first step begins when the session is opened, or with a mark before any attention. What comes after the last
        mark is not timed as a step of its own.

        Ranks that are threads mark for themselves: those that have called attention in this thread. The thread that
        opened the session marks for all where it has called none itself.
        """
        self._since = time.perf_counter_ns()
        here = current_thread()
        with self._lock:
            everybody = self._recorders if here is self._opener else ()
            recorders = [self._recorders[who] for who in self._by_thread.get(here, everybody)]
        for recorder in recorders:
            recorder.next_iteration()

    def ablate(
        self, step: Callable[[], Any], *, model: nn.Module | None = None, repeat: int = 3, device: str | None = None
    ) -> Ablation:
        """What communication and computing add to a step, see `ablation.ablate`; it is kept for the report.

        All ranks of the mesh must call it. Nothing of these steps is recorded. `device` is, unless given, that of what
        was recorded.
        """
        from burst_portable.profiling.ablation import ablate

        mesh = self._known_mesh(None) or as_mesh(None)
        who = _who(mesh)
        if device is None and who in self._recorders:
            device = self._recorders[who].device_type
        found = self._ablations[who] = ablate(step, mesh=mesh, model=model, repeat=repeat, device=device)
        self._since = time.perf_counter_ns()
        for recorder in list(self._recorders.values()):
            recorder.begin_step()
        return found

    def totals(self) -> tuple[float, float]:
        """Seconds in kernels and in waiting so far, over this process's ranks; 0 where only the device knows."""
        recorders = list(self._recorders.values())
        return sum(r.kernels for r in recorders) / 1e9, sum(r.waiting for r in recorders) / 1e9

    def records(self) -> list[RankRecords]:
        """What this process recorded, one entry per rank of a mesh. Waits for the device if it works asynchronously."""
        return self._read(sorted(self._recorders))

    def _read(self, who: Sequence[_Who]) -> list[RankRecords]:
        mine = [self._with_ablation(one) for one in who]
        if self._tracer is None:
            return mine
        if len({one.rank for one in self._recorders}) < len(self._recorders):  # the tracer's names have no mesh
            raise InputError(
                "a deep session cannot tell calls of several meshes apart", next_step="call those of one alone"
            )
        traced = self._tracer.joined()
        return [replace(one, traced=traced.get(one.rank)) for one in mine]

    def _with_ablation(self, who: _Who) -> RankRecords:
        one, found = self._recorders[who].records(), self._ablations.get(who)
        return one if found is None else replace(one, facts={**one.facts, "ablation": found.facts()})

    def write_trace(self, path: str | Path) -> None:
        """Write the file of the vendor's tracer, for ui.perfetto.dev: all that ran, attention under the plan's names.

        Raises `InputError` where the level is not "deep", or the session is still open.
        """
        if self._tracer is None:
            raise InputError("this session has no tracer", got=f"level {self.level!r}", allowed="level 'deep'")
        self._tracer.write(Path(path))

    def gather(self, mesh: MeshLike = None) -> list[RankRecords] | None:
        """Everybody's records, in rank order, on rank 0; None on the others. All ranks of the mesh must call it.

        The mesh is the one that is passed here or was to `profile`, and then only its calls count. Without one it is
        that of the recorded calls.

        Raises `InputError` where nothing says which mesh: calls of several were recorded, or none of several ranks;
        and where calls were recorded, but none of the mesh that was passed; on rank 0, where a rank recorded nothing or
        marked other steps than the others. `CommunicationTimeoutError` or `PeerLostError`, naming the rank, where one
        does not take part; `MismatchError` on every rank where some call attention instead, if the transport can tell.
        """
        known = self._known_mesh(mesh)
        mesh = known or as_mesh(None)
        if known is None and mesh.size > 1:
            raise InputError(
                "nothing was recorded here, so nothing says which ranks belong together",
                next_step="call attention inside `with burst_portable.profile(...)`, or pass mesh= to profile()",
            )
        mine = self._read([who for who in sorted(self._recorders) if who.global_ranks == mesh.global_ranks])
        if mesh.size == 1 or len(mine) > 1:
            return mine
        if not mine:
            mine = [RankRecords(mesh.rank, host_name(), "host clock", {})]
        device = torch.device(mine[0].facts.get("device", "cpu"))
        parts = _collected(mesh, pack(mine[0]), device)
        return None if parts is None else _same_calls([unpack(part) for part in parts])

    def report(self, mesh: MeshLike = None, *, skip: int = 0) -> Report | None:
        """Where the time went, on rank 0; None on the others. All ranks of the mesh must call it.

        The first `skip` training steps, which also warm up, are left out.

        Raises `InputError` where nothing was recorded, or nothing says of which mesh, see `gather`.
        """
        gathered = self.gather(mesh)
        if gathered is None:
            return None
        from burst_portable.profiling.report import Report

        return Report.of(gathered, skip=skip)


def profile(level: Literal["session", "light", "deep"] = "session", *, mesh: MeshLike = None) -> Session:
    """Record where the time of attention goes; a context manager, see `profiling.session`.

    Args:
        level: "session" notes every kernel and message with the plan's facts; "light" only how long kernels and
            waits for blocks took, and keeps the latest of them, for runs that are always watched; "deep" is "session"
            with torch.profiler beside it, for a few steps: which kernels ran where in the plan, as the tracer saw them.
        mesh: the ranks that `gather` and `report` bring together: a Mesh, or what `attention` takes for one. None
            means that of the recorded calls, which must then all be of one mesh.

    Raises `InputError` for another level.
    """
    if not isinstance(level, str) or level not in LEVELS:
        raise InputError("unknown level of profiling", got=shown(level), allowed=", ".join(LEVELS))
    return Session(level, mesh)


def _tracer() -> Tracer:
    from burst_portable.profiling.tracing import Tracer

    return Tracer()


def host_name() -> str:
    """A name for this machine's monotonic clock: the id of its boot if the system has one, else the machine's name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text(encoding="ascii").strip() if boot.is_file() else platform.node()


def _same_calls(ranks: list[RankRecords]) -> list[RankRecords]:
    """These records, if all ranks recorded the same training steps; otherwise the report would blame the wrong rank.

    Raises `InputError` where a rank recorded nothing and others did, or other training steps.
    """
    steps = {
        one.rank: max((int(t["iteration"].max()) + 1 for t in one.tables.values() if len(t)), default=0)
        for one in ranks
    }
    if len(set(steps.values())) > 1:
        counts = ", ".join(f"{steps[rank]} on rank {rank}" for rank in sorted(steps)[:_NAMED])
        raise InputError(
            "ranks have recorded different training steps",
            got=f"{counts}{', ...' if len(steps) > _NAMED else ''}",
            next_step="open the session on every rank of the mesh before its first call, and mark() on every rank",
        )
    return ranks


def _collected(mesh: Mesh, data: bytes, device: torch.device) -> Sequence[bytes] | None:
    """Everybody's bytes on rank 0, over the mesh's transport."""
    from burst_portable.comm.agreement import agree_on_call
    from burst_portable.comm.base import Message

    transport = mesh.transport(device.type)
    agree_on_call(transport, "session.report() or gather()")
    with transport.between_passes():
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        sizes = [torch.empty(8, dtype=torch.uint8, device=device) for _ in range(mesh.size)]
        transport.all_gather(torch.tensor([len(data)], device=device).view(torch.uint8), sizes, "profile sizes")
        if mesh.rank:
            handles, _ = transport.post([Message(mine, 0)], [], "profile")
            handles[0].wait()
            return None
        parts = [mine] + [torch.empty(int(s.view(torch.int64)), dtype=torch.uint8, device=device) for s in sizes[1:]]
        _, handles = transport.post([], [Message(part, r) for r, part in enumerate(parts) if r], "profile")
        for handle in handles:
            handle.wait()
        return [part.cpu().numpy().tobytes() for part in parts]
