"""The ranks that share one sequence, as seen from one of them: a `Mesh`, made once and passed on.

Where a caller passes a process group or nothing, the mesh made of that is kept here (`as_mesh`): by its group until
that is destroyed, or by its thread.
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
from burst_portable.utils.values import as_int, check_divides, size


def checked_rank(rank: object, ranks: object) -> tuple[int, int]:
    """A rank and how many there are."""
    number, count = as_int(rank), size("the size of a mesh", ranks)
    if number is None or not 0 <= number < count:
        raise InputError("no such rank", got=shown(rank), allowed=f"0 to {count - 1}")
    return number, count


def checked_ranks_per_node(ranks_per_node: object, ranks: int) -> int | None:
    """Ranks a node, which divide all; None for a single node."""
    if ranks_per_node is None:
        return None
    number = size("ranks_per_node", ranks_per_node)
    check_divides(number, ranks)
    return number


def checked_backend(name: object) -> str:
    """The name of a backend that can run here, or "auto"."""
    if not isinstance(name, str):
        raise unknown_name("backend", name, ("auto", *known()))
    if name != "auto":
        runnable(name)
    return name


def checked_config(config: object) -> Config:
    """The settings; None for those of the environment."""
    if config is None:
        return from_environment()
    if not isinstance(config, Config):
        raise InputError("config is not a Config", got=shown(config), allowed="burst_portable.config.Config")
    return config


def place_in(group: Any) -> tuple[int, int]:
    """(rank, ranks) of this process in a process group."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to those that it leaves out
        raise _no_member()
    if not isinstance(group, dist.ProcessGroup):
        raise InputError("this is not a process group", got=shown(group), next_step="dist.new_group makes one")
    try:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    except ValueError as error:  # made by hand, or destroyed
        raise InputError(
            "torch.distributed does not know this process group", got=error, next_step="dist.new_group makes one"
        ) from error
    if rank < 0:
        raise _no_member()
    return rank, ranks


def _no_member() -> InputError:
    return InputError(
        "this rank is not a member of the group",
        got=f"global rank {dist.get_rank()}",
        next_step="let the members alone make the call",
    )


def axis_group(device_mesh: Any, axis: object) -> Any:
    """The process group of one axis of a DeviceMesh."""
    if not hasattr(device_mesh, "get_group"):
        raise InputError("this is not a DeviceMesh", got=shown(device_mesh), next_step="init_device_mesh makes one")
    names, axes = device_mesh.mesh_dim_names or (), device_mesh.ndim
    told = f"a DeviceMesh of {axes} axes ({', '.join(names) or 'without names'})"
    if axis is None and axes > 1:
        example = f"mesh[{names[-1]!r}]" if names else "Mesh.from_device_mesh(mesh, axis)"
        raise InputError(
            "the sequence lies along one axis, and none is named", got=told, next_step=f"pass one: {example}"
        )
    if isinstance(axis, str):
        if axis not in names:
            raise unknown_name("axis of the DeviceMesh", axis, names)
        return device_mesh.get_group(axis)
    number = 0 if axis is None else as_int(axis)
    if number is None or not 0 <= number < axes:
        raise InputError("no such axis", got=shown(axis), allowed=f"one of {told}")
    return device_mesh.get_group(number)


if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
_CALLS_KEPT = 512


class Mesh:
    """The ranks of one sequence axis.

    Make one with `Mesh.single`, `Mesh.from_group`, `Mesh.from_device_mesh` or, for threads, `run_threads`. Keep it:
    it holds the transports and the plans of earlier calls.

    Attributes:
        rank, size: this rank's number, and how many ranks share the sequence.
        inner: ranks per node, where there are several nodes. Lets `auto` consider strategies for nodes, which also
            use it where they are named, and gives messages between nodes their own connections, made in the first pass.
        backend: the name of the backend to use, or "auto": the first that can serve the tensors' device.
        config: settings, from the environment unless given.

    Raises:
        InputError: a rank that is not below `size`, an `ranks_per_node` that does not divide it, an unknown backend.
        BackendUnavailableError: the named backend cannot run here.
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
        self.rank, self.size = checked_rank(rank, size)
        self.group, self.ranks_per_node, self.backend = (
            group,
            checked_ranks_per_node(ranks_per_node, self.size),
            checked_backend(backend),
        )
        self.config = checked_config(config)
        if not isinstance(group, dist.ProcessGroup | None):
            raise InputError("this is not a process group", got=shown(group), allowed="one of dist's, or None")
        if not callable(connect):
            raise InputError("a mesh connects by a function of the device type", got=shown(connect))
        self._connect = connect
        self._transports: dict[str, Transport] = {}
        self._direct: dict[str, Transport | str] = {}
        self._calls: OrderedDict[Hashable, Any] = OrderedDict()

    def __repr__(self) -> str:
        node = "" if self.ranks_per_node is None else f", ranks_per_node={self.ranks_per_node}"
        return f"Mesh(rank={self.rank}, size={self.size}{node})"

    def __eq__(self, other: object) -> bool:
        """Equal to itself alone. Said, since torch.compile takes objects as constants only if their class says so."""
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: object) -> Mesh:
        """Itself: a copied module uses the same ranks, and connections cannot be copied."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Mesh], tuple[()]]:
        """A mesh of one rank can be pickled; connections to other ranks cannot."""
        if self.size > 1:
            raise UnsupportedError(
                "a mesh of several ranks cannot be pickled: it holds connections",
                got=self,
                next_step="save the module's state_dict() and make mesh and module again; let a data loader fork "
                "its workers, or cut batches outside of them",
            )
        return partial(Mesh.single, config=self.config, backend=self.backend), ()

    @classmethod
    def single(cls, *, backend: str = "auto", config: Config | None = None) -> Mesh:
        """One rank: no sequence is shared."""
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
        """The ranks of a process group; None for the default one.

        Raises `InputError` if torch.distributed is not initialised, or this rank is not in the group.
        """
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialised; start with torchrun and call init_process_group, "
                "or use run_threads for ranks as threads"
            )
        process_group: Any = dist.group.WORLD if group is None else group
        rank, ranks = place_in(process_group)
        settings = checked_config(config)
        timeout = settings.timeout

        def transport(group: Any, device_type: str) -> Transport:
            serving = for_device(device_type, backend)
            made = serving.transport(group, timeout)
            if (made.rank, made.size) != place_in(group):  # its messages would go to other ranks
                what = f"the transport of the backend {serving.name!r} is of another process group"
                got, (place, size) = f"rank {made.rank} of {made.size}", place_in(group)
                next_step = "mend its transport(group, timeout): ranks are numbers within `group`"
                raise BackendUnavailableError(what, got=got, allowed=f"rank {place} of {size}", next_step=next_step)
            return made

        def connect(device_type: str) -> Transport:
            place_in(process_group)  # it may have been destroyed since
            if ranks_per_node in (None, 1, ranks):
                return transport(process_group, device_type)
            connected = partial(transport, device_type=device_type)
            options = partial(group_options_of, for_device(device_type, backend))
            return with_two_levels(connected, process_group, ranks_per_node, timeout, options)

        return cls(
            rank, ranks, connect, group=process_group, ranks_per_node=ranks_per_node, backend=backend, config=settings
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
        """The ranks along one axis of a torch DeviceMesh; other axes are left to data or tensor parallelism.

        `axis` is its name or number, and may be left out where there is only one.
        """
        return cls.from_group(
            axis_group(device_mesh, axis), ranks_per_node=ranks_per_node, backend=backend, config=config
        )

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """Its ranks, by their numbers in the default process group, or in the mesh if it has no group."""
        return tuple(range(self.size) if self.group is None else dist.get_process_group_ranks(self.group))

    def backend_for(self, device_type: str) -> Backend:
        """The backend for tensors of a device type: the one that this mesh names, or the first that can serve them."""
        return for_device(device_type, self.backend)

    def transport(self, device_type: str) -> Transport:
        """The transport for tensors of a device type; connected once."""
        if device_type not in self._transports:
            self._transports[device_type] = self._connect(device_type)
        return self._transports[device_type]

    def connected(self) -> Transport | None:
        """A transport that this mesh has used already, if any."""
        return next(iter(self._transports.values()), None)

    def transport_for(self, device_type: str, *, direct: bool) -> tuple[Transport, str]:
        """The transport of a plan, and why: the one that the settings name, or else the fastest that serves the plan.

        Args:
            direct: whether all messages go straight to where they are used: see `Plan.direct`.

        Raises `UnknownNameError`, or `UnsupportedError` if the named one cannot serve, with the reason.
        """
        name, why = self.expected_transport(device_type, direct=direct)
        plain = self.transport(device_type)
        if name == plain.name:
            return plain, why
        found = self._direct_transport(device_type, name)
        if isinstance(found, Transport):
            return found, why
        return plain, self.expected_transport(device_type, direct=direct)[1]  # raises, if it was named

    def expected_transport(self, device_type: str, *, direct: bool) -> tuple[str, str]:
        """The name of the transport that `transport_for` would give, and why, as far as one rank alone can tell.

        Raises as `transport_for`. Whether the ranks can have the backend's own transport, they find out together when
        it is first needed.
        """
        plain, named = self.transport(device_type).name, self.config.transport
        if self.size == 1 or named == plain:
            return plain, "one rank" if self.size == 1 else "named"
        name = self.backend_for(device_type).capabilities.direct_transport
        if named not in ("auto", name):
            raise unknown_name("transport in BURST_TRANSPORT or Config", named, filter(None, ("auto", plain, name)))
        if not name:
            return plain, "the only one"
        found = self._direct.get(device_type) if direct else "blocks are handed on from rank to rank"
        if self.group is None:
            found = "these ranks are in no process group"
        if not isinstance(found, str):
            return name, "named" if named != "auto" else "messages go straight to where they are used"
        if named != "auto":
            raise UnsupportedError(
                f"the transport {name!r} cannot serve this call",
                got=found,
                next_step="take a strategy whose messages go straight to their users, or leave the transport to 'auto'",
            )
        return plain, f"not {name}: {found}"

    def may_be_direct(self, device_type: str) -> bool:
        """Whether plans may count on the backend's own transport: it is connected, or has not been tried."""
        if self.group is None or isinstance(self._direct.get(device_type), str):
            return False
        return self.config.transport in ("auto", self.backend_for(device_type).capabilities.direct_transport)

    def _direct_transport(self, device_type: str, name: str) -> Transport | str:
        """The backend's own transport, or why these ranks cannot have it. All ranks settle this together, once."""
        if device_type not in self._direct:
            backend = self.backend_for(device_type)
            plain = self.transport(device_type)
            # `agree` also hears from a rank that refuses its call, so nobody waits for that rank.
            agree(plain, call_signature({"pass": f"connecting the transport {name!r}"}))
            try:
                self._direct[device_type] = backend.connect_direct(plain, self.group, self.config.timeout)
            except UnsupportedError as error:
                self._direct[device_type] = str(error)
        return self._direct[device_type]

    def remembered(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned for this key; the least recently used results are forgotten.

        A key that cannot be hashed is not looked up: `make` then says what is wrong with it.
        """
        try:
            found: T | None = self._calls.get(key)
        except TypeError:
            return make()
        if found is not None:
            self._calls.move_to_end(key)
            return found
        made = self._calls[key] = make()
        if len(self._calls) > _CALLS_KEPT:
            self._calls.popitem(last=False)
        return made


if TYPE_CHECKING:
    MeshLike: TypeAlias = Mesh | DeviceMesh | dist.ProcessGroup | None
else:  # a torch without torch.distributed has no such classes
    MeshLike = Any


def as_mesh(mesh: Any) -> Mesh:
    """A mesh from what the caller passed: a Mesh, a DeviceMesh of one axis, a process group, or None.

    None is the default process group where torch.distributed is initialised, and one rank elsewhere.
    """
    if isinstance(mesh, Mesh):
        return mesh
    if mesh is None:
        if dist.is_available() and dist.is_initialized():
            return _of_group(dist.group.WORLD)
        return _alone(from_environment(), get_ident())
    if isinstance(mesh, dist.ProcessGroup) or mesh is dist.GroupMember.NON_GROUP_MEMBER:
        return _of_group(mesh)
    if hasattr(mesh, "get_group"):
        return _of_group(axis_group(mesh, None))
    raise InputError(
        "this is not a mesh",
        got=shown(mesh),
        allowed="Mesh, torch DeviceMesh with one axis, process group, or None",
    )


@lru_cache(maxsize=64)
def _alone(config: Config, thread: int) -> Mesh:
    """Return the mesh of one rank for a thread, the same one each time, because a mesh keeps plans.

    Raises:
        InputError: a launcher started several processes, and none has joined a process group.
    """
    if (ranks := launched_processes()) > 1:
        raise InputError(
            f"a launcher started {ranks} processes, but there is no process group",
            got=f"mesh=None and WORLD_SIZE={ranks}",
            next_step="call torch.distributed.init_process_group() first; pass Mesh.single() for a process by itself",
        )
    return Mesh.single(config=config)


def _of_group(group: Any) -> Mesh:
    """The mesh of a process group: the same one each time, because its transport counts passes."""
    kept = _of_groups()
    if (found := kept.get(group)) is not None:
        return found
    made = Mesh.from_group(group)
    for gone in [other for other in kept if _destroyed(other)]:
        kept.pop(gone, None)
    return kept.setdefault(group, made)


@lru_cache(maxsize=1)
def _of_groups() -> dict[Any, Mesh]:
    """By process group. A mesh holds threads, connections and buffers of its group: destroyed ones are let go."""
    return {}


def _destroyed(group: Any) -> bool:
    try:
        return dist.get_rank(group) < 0
    except ValueError:  # torch knows it no more
        return True


_MOST_RANKS = 1024


def run_threads(
    ranks: int,
    work: Callable[[Mesh], T],
    *,
    timeout: float = 60.0,
    ranks_per_node: int | None = None,
    backend: str = "auto",
) -> list[T]:
    """Run `work(mesh)` on this many ranks, as threads of this process; returns the results in rank order.

    They share all that a process shares, torch's global random numbers too: who draws which is left to chance, and
    `torch.manual_seed` in one sets them for all. Give each rank a generator of its own::

        def work(mesh):
            generator = torch.Generator().manual_seed(mesh.rank)
            q, k, v = (torch.randn(1, 16, 2, 8, generator=generator) for _ in range(3))
            return attention(q, k, v, mesh=mesh)

    On one accelerator gradients need processes: torch's autograd has one worker per device.

    Args:
        ranks: how many, up to 1024.
        work: called once per rank, with that rank's mesh.
        timeout: seconds that a rank waits for another before that is an error.
        inner, backend: see `Mesh`.

    Raises what the first failing rank raised.
    """
    ranks = size("ranks", ranks)
    if ranks > _MOST_RANKS:
        most = f"up to {_MOST_RANKS}: each is a thread"
        raise InputError("too many ranks for one process", got=ranks, allowed=most)
    if not callable(work):
        raise InputError("work must be a function of a mesh", got=shown(work), allowed="such as work(mesh)")
    seconds = Config(timeout=timeout).timeout
    checked_ranks_per_node(ranks_per_node, ranks)
    checked_backend(backend)
    config = from_environment()

    def body(transport: LocalTransport) -> T:
        mesh = Mesh(
            transport.rank,
            ranks,
            lambda device_type: transport,
            ranks_per_node=ranks_per_node,
            backend=backend,
            config=config,
        )
        return work(mesh)

    return run_transports(ranks, body, timeout=seconds)


def position_ids(layout: Layout, rank: int, device: torch.device | None) -> Tensor:
    """Return the global positions of a rank's tokens, in the order of the layout: int64 ``[S]``."""
    return torch.cat([torch.arange(s.start, s.last + 1, s.step, device=device) for s in layout.shards[rank]])
