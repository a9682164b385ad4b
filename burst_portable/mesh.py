"""The ranks that share one sequence, as seen from one of them. No globals: a mesh is made once and passed on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch.distributed as dist

from burst_portable.backends.registry import for_device
from burst_portable.comm.base import Transport
from burst_portable.comm.local import Fabric, LocalTransport, run_threads
from burst_portable.config import Config, from_environment
from burst_portable.errors import InputError, explain

T = TypeVar("T")
_CALLS_KEPT = 512


class Mesh:
    """The ranks of one sequence axis.

    Make one with `Mesh.single`, `Mesh.from_group`, `Mesh.from_device_mesh` or, for threads, `run_local`. Keep it:
    it holds the transports, and the plans of calls that were made on it.

    Attributes:
        rank, size: this rank among those that share the sequence, and how many they are.
        inner: ranks a node, where there are several nodes: lets `auto` consider the double ring.
        config: settings, from the environment unless given.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[str], Transport],
        *,
        group: dist.ProcessGroup | None = None,
        inner: int | None = None,
        config: Config | None = None,
    ) -> None:
        self.rank, self.size, self.group, self.inner = rank, size, group, inner
        self.config = from_environment() if config is None else config
        self._connect = connect
        self._transports: dict[str, Transport] = {}
        self._calls: OrderedDict[Hashable, Any] = OrderedDict()

    def __repr__(self) -> str:
        return f"Mesh(rank={self.rank}, size={self.size})"

    @classmethod
    def single(cls, config: Config | None = None) -> Mesh:
        """One rank: no sequence is shared."""
        transport = LocalTransport(Fabric(1, 1.0), 0)
        return cls(0, 1, lambda device_type: transport, config=config)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        inner: int | None = None,
        config: Config | None = None,
    ) -> Mesh:
        """The ranks of a process group; None for the default one.

        Raises `InputError` where torch.distributed is not initialised, or this rank is no member.
        """
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised; start with torchrun and call init_process_group, "
                "or use run_local for ranks as threads"
            )
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        if rank < 0:
            raise InputError(explain("this rank is no member of the group", got=f"global rank {dist.get_rank()}"))
        settings = from_environment() if config is None else config

        def connect(device_type: str) -> Transport:
            return for_device(device_type).transport(group, settings.deadline)

        return cls(rank, dist.get_world_size(group), connect, group=group, inner=inner, config=settings)

    @classmethod
    def from_device_mesh(
        cls, device_mesh: Any, axis: str | int = 0, *, inner: int | None = None, config: Config | None = None
    ) -> Mesh:
        """One axis of a torch DeviceMesh, by name or number; the others are left to data or tensor parallelism."""
        return cls.from_group(device_mesh.get_group(axis), inner=inner, config=config)

    def transport(self, device_type: str) -> Transport:
        """The transport for tensors of a device type; connected once."""
        if device_type not in self._transports:
            self._transports[device_type] = self._connect(device_type)
        return self._transports[device_type]

    def connected(self) -> Transport | None:
        """A transport that this mesh has been using, if any."""
        return next(iter(self._transports.values()), None)

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave for this key before; the least recently used are forgotten."""
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = make()
            if len(self._calls) > _CALLS_KEPT:
                self._calls.popitem(last=False)
        return found


def as_mesh(mesh: Any) -> Mesh:
    """A mesh from whatever was passed: a Mesh, a DeviceMesh of one axis, a process group, or None.

    None is the default process group where torch.distributed is initialised, and one rank elsewhere.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        return Mesh.from_group() if dist.is_available() and dist.is_initialized() else Mesh.single()
    if isinstance(mesh, dist.ProcessGroup):
        return Mesh.from_group(mesh)
    if hasattr(mesh, "get_group"):
        return Mesh.from_device_mesh(mesh)
    raise InputError(
        explain(
            "this is no mesh",
            got=type(mesh).__name__,
            allowed="Mesh, torch DeviceMesh with one axis, process group, or None",
        )
    )


def run_local(ranks: int, work: Callable[[Mesh], T], *, deadline: float = 60.0, inner: int | None = None) -> list[T]:
    """Run `work(mesh)` on so many ranks, as threads of this process; the results in rank order.

    On one accelerator gradients need processes: torch's autograd has one worker a device.
    """
    config = from_environment()

    def body(transport: LocalTransport) -> T:
        return work(Mesh(transport.rank, ranks, lambda device_type: transport, inner=inner, config=config))

    return run_threads(ranks, body, deadline=deadline)
