"""Define `Mesh`: the ranks that share one sequence, as seen from one of them.

`as_mesh` caches the mesh of a process group until the group is destroyed, and the mesh of one rank per thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import for_device, group_options_of, known, runnable
from burst_portable.comm.agreement import agree, call_signature
from burst_portable.comm.base import Transport
from burst_portable.comm.local import Fabric, LocalTransport, run_transports
from burst_portable.comm.two_levels import with_two_levels
from burst_portable.config import Config, from_environment, launched_processes
from burst_portable.errors import BackendUnavailableError, InputError, UnsupportedError, shown, unknown_name
from burst_portable.layout import Layout
from burst_portable.utils.gradient_records import records_of
from burst_portable.utils.values import as_int, check_divides
from burst_portable.utils.values import size as checked_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_MAX_CALLS = 512
_MAX_LAYOUTS = 4096


class Mesh:
    """The ranks that share one sequence.

    Create it with `Mesh.single`, `Mesh.from_group`, `Mesh.from_device_mesh` or, for threads, `run_threads`. Reuse it:
    it caches transports and the plans of earlier calls.

    Attributes:
        rank: Number of this rank.
        size: Number of ranks that share the sequence.
        group: The process group, or None.
        ranks_per_node: Ranks per node if there are several nodes, else None. "auto" then considers strategies for
            nodes, and messages between nodes use separate connections, created in the first pass.
        backend: Name of the backend. "auto" selects the first that supports the device of the tensors.
        config: The settings. Default: those of the environment.

    Raises:
        InputError: If the rank is not below `size`, if `ranks_per_node` does not divide it, or if a name is unknown.
        BackendUnavailableError: If the named backend cannot run on this machine.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connect: Callable[[str], Transport],
        *,
        group: dist.ProcessGroup | None = None,
        ranks_per_node: int | None = None,
        backend: str = "auto",
        config: Config | None = None,
    ) -> None:
        number, self.size = as_int(rank), checked_size("the size of a mesh", size)
        if number is None or not 0 <= number < self.size:
            raise InputError("no such rank", got=shown(rank), allowed=f"0 to {self.size - 1}")
        if ranks_per_node is not None:
            ranks_per_node = checked_size("ranks_per_node", ranks_per_node)
            check_divides(ranks_per_node, self.size)
        if not isinstance(backend, str):
            raise unknown_name("backend", backend, ("auto", *known()))
        if backend != "auto":
            runnable(backend)
        if not isinstance(group, dist.ProcessGroup | None):
            allowed = "a torch.distributed.ProcessGroup, or None"
            raise InputError("not a process group", got=shown(group), allowed=allowed)
        if not callable(connect):
            raise InputError("connect must be a function of the device type", got=shown(connect))
        self.rank, self.group, self.ranks_per_node, self.backend = number, group, ranks_per_node, backend
        self.config = _checked_config(config)
        self._connect = connect
        self._transports: dict[str, Transport] = {}
        self._direct: dict[str, Transport | str] = {}
        self._calls: OrderedDict[Hashable, Any] = OrderedDict()
        # Layouts by which tensors were sharded: (name, length, hash). Those of one name differ if they follow masks.
        self.sharded_layouts: OrderedDict[tuple[str, int, int], None] = OrderedDict()
        self.gradient_records = records_of(group)

    def __repr__(self) -> str:
        node = "" if self.ranks_per_node is None else f", ranks_per_node={self.ranks_per_node}"
        return f"Mesh(rank={self.rank}, size={self.size}{node})"

    def __eq__(self, other: object) -> bool:
        """Compare by identity. torch.compile treats an object as a constant only if its class defines `__eq__`."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: object) -> Mesh:
        """Return the same object: connections cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Mesh], tuple[()]]:
        """Pickle a mesh of one rank. Raise `UnsupportedError` for several: connections cannot be pickled."""
        if self.size > 1:
            raise UnsupportedError(
                "a mesh of several ranks cannot be pickled: it has connections",
                got=self,
                next_step="save the module's state_dict() and create mesh and module again; let a data loader fork "
                "its workers, or shard batches outside of them",
            )
        return partial(Mesh.single, config=self.config, backend=self.backend), ()

    @classmethod
    def single(cls, *, backend: str = "auto", config: Config | None = None) -> Mesh:
        """Return a mesh of one rank.

        Args:
            backend: Name of a backend, or "auto".
            config: The settings. Default: those of the environment.
        """
        transport = LocalTransport(Fabric(1, 1.0), 0)
        return cls(0, 1, lambda device_type: transport, backend=backend, config=config)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        ranks_per_node: int | None = None,
        backend: str = "auto",
        config: Config | None = None,
    ) -> Mesh:
        """Return the mesh of a process group.

        Args:
            group: The process group. Default: the default group.
            ranks_per_node: Ranks per node if there are several nodes.
            backend: Name of a backend, or "auto".
            config: The settings. Default: those of the environment.

        Raises:
            InputError: If torch.distributed is not initialized, or this rank is not in the group.
        """
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialized; start with torchrun and call init_process_group, "
                "or use run_threads for ranks as threads"
            )
        process_group: Any = dist.group.WORLD if group is None else group
        rank, ranks = _rank_in(process_group)
        timeout = _checked_config(config).timeout

        def connect_group(group: Any, device_type: str) -> Transport:
            selected = for_device(device_type, backend)
            transport = selected.transport(group, timeout)
            if (transport.rank, transport.size) != _rank_in(group):  # its messages would go to other ranks
                what = f"the transport of the backend {selected.name!r} belongs to another process group"
                got, (rank, size) = f"rank {transport.rank} of {transport.size}", _rank_in(group)
                next_step = "fix its transport(group, timeout): ranks are numbers within `group`"
                raise BackendUnavailableError(what, got=got, allowed=f"rank {rank} of {size}", next_step=next_step)
            return transport

        def connect(device_type: str) -> Transport:
            _rank_in(process_group)  # it may have been destroyed since
            if ranks_per_node in (None, 1, ranks):
                return connect_group(process_group, device_type)
            connected = partial(connect_group, device_type=device_type)
            options = partial(group_options_of, for_device(device_type, backend))
            return with_two_levels(connected, process_group, ranks_per_node, timeout, options)

        return cls(
            rank, ranks, connect, group=process_group, ranks_per_node=ranks_per_node, backend=backend, config=config
        )

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        axis: str | int | None = None,
        *,
        ranks_per_node: int | None = None,
        backend: str = "auto",
        config: Config | None = None,
    ) -> Mesh:
        """Return the mesh of one dimension of a torch DeviceMesh. Other dimensions are for data or tensor parallelism.

        Args:
            device_mesh: The DeviceMesh.
            axis: Name or number of the dimension. May be omitted if there is only one.
            ranks_per_node: Ranks per node if there are several nodes.
            backend: Name of a backend, or "auto".
            config: The settings. Default: those of the environment.
        """
        group = _axis_group(device_mesh, axis)
        return cls.from_group(group, ranks_per_node=ranks_per_node, backend=backend, config=config)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Numbers of the ranks in the default process group, or in the mesh if it has no group."""
        return tuple(range(self.size) if self.group is None else dist.get_process_group_ranks(self.group))

    def backend_for(self, device_type: str) -> Backend:
        """Return the backend for tensors of a device type: the named one, or the first that supports them."""
        return for_device(device_type, self.backend)

    def transport(self, device_type: str) -> Transport:
        """Return the transport for tensors of a device type. Connects once."""
        if device_type not in self._transports:
            self._transports[device_type] = self._connect(device_type)
        return self._transports[device_type]

    def connected(self) -> Transport | None:
        """Return a transport that is already connected, or None."""
        return next(iter(self._transports.values()), None)

    def transport_for(self, device_type: str, *, direct: bool) -> tuple[Transport, str]:
        """Return the transport that `expected_transport` names, and the reason. Connect it at its first use.

        All ranks determine together whether the backend's own transport can connect. If not, the result is the plain
        one, or an `UnsupportedError` if the other is configured.
        """
        name, why = self.expected_transport(device_type, direct=direct)
        plain = self.transport(device_type)
        if name == plain.name:
            return plain, why
        if device_type not in self._direct:
            # `agree` also receives the error of a rank that fails before this point, so no rank waits for it.
            agree(plain, call_signature({"pass": f"connecting the transport {name!r}"}))
            backend = self.backend_for(device_type)
            try:
                self._direct[device_type] = backend.connect_direct(plain, self.group, self.config.timeout)
            except UnsupportedError as error:
                self._direct[device_type] = str(error)
        found = self._direct[device_type]
        if isinstance(found, Transport):
            return found, why
        return plain, self.expected_transport(device_type, direct=direct)[1]  # raises if it is configured

    def expected_transport(self, device_type: str, *, direct: bool) -> tuple[str, str]:
        """Return the name of a plan's transport, and the reason: the configured one, else the fastest that supports it.

        Args:
            device_type: Type of the tensors' device.
            direct: Whether each message goes directly to the rank that uses it: see `Plan.direct`.

        Raises:
            UnknownNameError: If the configured transport is unknown.
            UnsupportedError: If it does not support the plan; the message contains the reason.
        """
        plain, named = self.transport(device_type).name, self.config.transport
        if self.size == 1 or named == plain:
            return plain, "one rank" if self.size == 1 else "named"
        name = self.backend_for(device_type).capabilities.direct_transport
        if named not in ("auto", name):
            raise unknown_name("transport in BURST_TRANSPORT or Config", named, filter(None, ("auto", plain, name)))
        if not name:
            return plain, "the only one"
        found = self._direct.get(device_type)
        instead = f"remove the reason, or set the transport to 'auto' or {plain!r}"
        if self.group is None:
            found = "these ranks are in no process group"
        elif not direct:
            found = "blocks are handed on from rank to rank"
            instead = "take a strategy whose messages go straight to their users, or leave the transport to 'auto'"
        if not isinstance(found, str):
            return name, "named" if named != "auto" else "messages go straight to where they are used"
        if named != "auto":
            raise UnsupportedError(f"the transport {name!r} cannot serve this call", got=found, next_step=instead)
        return plain, f"not {name}: {found}"

    def may_be_direct(self, device_type: str) -> bool:
        """Return whether plans may use the backend's own transport: it is connected, or was not tried yet."""
        if self.group is None or isinstance(self._direct.get(device_type), str):
            return False
        return self.config.transport in ("auto", self.backend_for(device_type).capabilities.direct_transport)

    def note_sharded(self, layout: Layout) -> None:
        """Store a layout by which a tensor was sharded. The least recent of many are removed."""
        key = layout.name, layout.length, hash(layout)
        self.sharded_layouts.pop(key, None)  # no `move_to_end`: threads that load data may call `shard` at once
        self.sharded_layouts[key] = None
        if len(self.sharded_layouts) > _MAX_LAYOUTS:
            self.sharded_layouts.popitem(last=False)

    def cached(self, key: Hashable, make: Callable[[], T], first: Callable[[T], T] | None = None) -> T:
        """Return the result of `make` for this key, from a cache of the most recently used ones.

        The call that makes it gets `first(result)`, if `first` is given. A key without a hash is not cached: `make`
        then raises an error about it.
        """
        try:
            found: T | None = self._calls.get(key)
        except TypeError:
            return make()
        if found is not None:
            try:
                self._calls.move_to_end(key)
            except KeyError:  # removed by another thread, which may share a mesh of one rank
                self._calls[key] = found
            return found
        result = self._calls[key] = make()
        if len(self._calls) > _MAX_CALLS:
            self._calls.popitem(last=False)
        return result if first is None else first(result)


if TYPE_CHECKING:
    MeshLike: TypeAlias = Mesh | DeviceMesh | dist.ProcessGroup | None
else:  # a torch without torch.distributed has no such classes
    MeshLike = Any


def as_mesh(mesh: Any) -> Mesh:
    """Return the mesh for a Mesh, a DeviceMesh of one dimension, a process group, or None.

    None is the default process group if torch.distributed is initialized, else a mesh of one rank.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        if dist.is_available() and dist.is_initialized():
            return _of_group(dist.group.WORLD)
        return _single(from_environment(), get_ident())
    if isinstance(mesh, dist.ProcessGroup) or mesh is dist.GroupMember.NON_GROUP_MEMBER:
        return _of_group(mesh)
    if hasattr(mesh, "get_group"):
        return _of_group(_axis_group(mesh, None))
    raise InputError("not a mesh", got=shown(mesh), allowed="Mesh, 1-D torch DeviceMesh, process group, or None")


@lru_cache(maxsize=64)
def _single(config: Config, thread: int) -> Mesh:
    """Return the mesh of one rank for a thread, the same one each time, because a mesh caches plans."""
    if (ranks := launched_processes()) > 1:
        what = f"a launcher started {ranks} processes, but there is no process group"
        next_step = "call torch.distributed.init_process_group() first; pass Mesh.single() for a process by itself"
        raise InputError(what, got=f"mesh=None and WORLD_SIZE={ranks}", next_step=next_step)
    return Mesh.single(config=config)


def _of_group(group: Any) -> Mesh:
    """Return the mesh of a process group: the same one each time, because its transport counts passes."""
    meshes = _of_groups()
    if (found := meshes.get(group)) is not None:
        return found
    mesh = Mesh.from_group(group)
    for destroyed in [other for other in meshes if _is_destroyed(other)]:
        meshes.pop(destroyed, None)
    return meshes.setdefault(group, mesh)


@lru_cache(maxsize=1)
def _of_groups() -> dict[Any, Mesh]:
    """Return the meshes by process group. Those of destroyed groups are removed, with their threads and buffers."""
    return {}


def _is_destroyed(group: Any) -> bool:
    try:
        return dist.get_rank(group) < 0
    except ValueError:  # torch has removed it
        return True


def _axis_group(device_mesh: Any, axis: object) -> Any:
    """Return the process group of one dimension of a DeviceMesh."""
    if not hasattr(device_mesh, "get_group"):
        raise InputError("not a DeviceMesh", got=shown(device_mesh), next_step="create one with init_device_mesh")
    names, axes = device_mesh.mesh_dim_names or (), device_mesh.ndim
    text = f"a {axes}-D DeviceMesh ({', '.join(names) or 'without names'})"
    if axis is None and axes > 1:
        likely = [name for name in names if name == "sequence"] or names
        example = " or ".join(f"mesh[{name!r}]" for name in likely) or "Mesh.from_device_mesh(mesh, axis)"
        raise InputError("no sequence axis given", got=text, next_step=f"pass a 1-D submesh: {example}")
    if isinstance(axis, str):
        if axis not in names:
            raise unknown_name("axis of the DeviceMesh", axis, names)
        return device_mesh.get_group(axis)
    number = 0 if axis is None else as_int(axis)
    if number is None or not 0 <= number < axes:
        raise InputError("no such axis", got=shown(axis), allowed=f"one of {text}")
    return device_mesh.get_group(number)


def _rank_in(group: Any) -> tuple[int, int]:
    """Return (rank, ranks) of this process in a process group."""
    next_step = "create one with dist.new_group"
    is_group = isinstance(group, dist.ProcessGroup)
    if not is_group and group is not dist.GroupMember.NON_GROUP_MEMBER:  # of ranks outside, from new_group
        raise InputError("not a process group", got=shown(group), next_step=next_step)
    try:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    except ValueError as error:  # created without torch.distributed, or destroyed
        raise InputError("torch.distributed has no such process group", got=error, next_step=next_step) from error
    if rank < 0:
        got, next_step = f"global rank {dist.get_rank()}", "make the call only on members of the group"
        raise InputError("this rank is not a member of the group", got=got, next_step=next_step)
    return rank, ranks


def _checked_config(config: object) -> Config:
    """Return the settings. None: those of the environment."""
    if config is None:
        return from_environment()
    if not isinstance(config, Config):
        raise InputError("config is not a Config", got=shown(config), allowed="burst_portable.config.Config")
    return config


_MOST_RANKS = 1024


def run_threads(
    ranks: int,
    work: Callable[[Mesh], T],
    *,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
    backend: str = "auto",
) -> list[T]:
    """Run `work(mesh)` on `ranks` ranks that are threads of this process, and return the results in rank order.

    The threads share torch's global random state, so its numbers depend on timing, and `torch.manual_seed` in one
    thread sets it for all. Use a generator per rank::

        def work(mesh):
            generator = torch.Generator().manual_seed(mesh.rank)
            q, k, v = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(3))
            return attention(q, k, v, mesh=mesh)

    On one accelerator, gradients need processes: torch's autograd has one worker thread per device.

    Args:
        ranks: Number of ranks, at most 1024.
        work: Function that is called once per rank, with the rank's mesh.
        timeout: Seconds until a waiting rank raises `CommunicationTimeoutError`. ``BURST_TIMEOUT`` does not change it.
        ranks_per_node: See `Mesh`.
        backend: See `Mesh`.

    Raises:
        Exception: The error of the first failed rank.
    """
    ranks = checked_size("ranks", ranks)
    if ranks > _MOST_RANKS:
        raise InputError("too many ranks for one process", got=ranks, allowed=f"at most {_MOST_RANKS} threads")
    if not callable(work):
        raise InputError("work must be a function of a mesh", got=shown(work), allowed="such as work(mesh)")
    options: Any = {"ranks_per_node": ranks_per_node, "backend": backend, "config": from_environment()}

    def body(transport: LocalTransport) -> T:
        return work(Mesh(transport.rank, ranks, lambda device_type: transport, **options))

    return run_transports(ranks, body, timeout=Config(timeout=timeout).timeout)


def position_ids(layout: Layout, rank: int, device: torch.device | None) -> Tensor:
    """Return the global positions of a rank's tokens, in the order of the layout: int64 ``[S]``."""
    return torch.cat([torch.arange(s.start, s.last + 1, s.step, device=device) for s in layout.shards[rank]])
