"""Test how a mesh is created, and the errors of invalid arguments."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import burst_portable as bp
from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.comm.base import Message
from burst_portable.comm.faults import exchange_error_notes
from burst_portable.comm.local import Fabric, LocalTransport, run_transports
from burst_portable.config import Config
from burst_portable.errors import (
    BackendUnavailableError,
    InputError,
    MismatchError,
    PeerLostError,
    UnknownNameError,
    UnsupportedError,
)
from burst_portable.mesh import as_mesh
from burst_portable.runtime.prepare import prepare
from burst_portable.runtime.request import Request


@pytest.fixture
def one_process():
    """Create a process group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 2}, "no such rank; got 2; allowed: 0 to 1"),
        ({"rank": "0"}, "no such rank"),
        ({"rank": True}, "no such rank"),
        ({"size": 0}, "size of a mesh"),
        ({"size": 2.0}, "size of a mesh"),
        (
            {"ranks_per_node": 3},
            "ranks_per_node does not divide the number of ranks; got ranks_per_node=3, 2 ranks; allowed: 1, 2",
        ),
        ({"ranks_per_node": 1.0}, "ranks_per_node is not a size"),
        ({"connect": None}, "must be a function of the device type"),
        ({"config": {"timeout": 3}}, "config is not a Config"),
        ({"backend": "cpo"}, "did you mean 'cpu'"),
        ({"backend": None}, "unknown backend; got None"),
        ({"backend": ["cpu"]}, "unknown backend"),
    ],
)
def test_mesh_rejects_invalid_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        bp.Mesh(**{"rank": 0, "size": 2, "connect": lambda device_type: None} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks is not a size"),
        ({"ranks": "2"}, "ranks is not a size"),
        ({"ranks": 2.0}, "ranks is not a size"),
        ({"ranks": True}, "ranks is not a size"),
        ({"ranks": 10**9}, "too many ranks for one process"),
        ({"work": 3}, "must be a function of a mesh"),
        ({"timeout": float("nan")}, "timeout must be a number of seconds; got nan"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": None}, "timeout"),
        ({"timeout": "5"}, "timeout"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 0.0005}, "timeout"),  # gloo would round this to 0 ms
        ({"timeout": -1.0}, "timeout"),
        ({"ranks_per_node": 4}, "does not divide"),
        ({"backend": "gpu"}, "unknown backend"),
    ],
)
def test_run_threads_rejects_invalid_arguments(arguments, message):
    threads = threading.active_count()
    with pytest.raises(InputError, match=message):
        bp.run_threads(**{"ranks": 2, "work": lambda mesh: mesh.rank} | arguments)
    assert threading.active_count() == threads


@pytest.mark.parametrize("again", [0, 1])
def test_rank_that_returned_raises_peer_lost_error(again):
    """The error is raised long before the timeout. Calls before the return have completed."""

    def work(mesh):
        rows = torch.randn(1, 8, 2, 4)
        for _ in range(again if mesh.rank == 1 else 2):
            bp.attention(rows, rows, rows, mesh=mesh)

    begun = time.monotonic()
    with pytest.raises(PeerLostError, match=r"rank [02], checking that ranks agree on .*: rank 1 returned without"):
        bp.run_threads(3, work)
    assert time.monotonic() - begun < 20


def test_message_sent_before_return_arrives():
    def work(transport):
        buffer = torch.full((4,), transport.rank, dtype=torch.uint8)
        if transport.rank == 0:
            transport.post([Message(buffer, 1)], [])
            return None
        time.sleep(0.3)
        _, (arriving,) = transport.post([], [Message(buffer, 0)])
        arriving.wait()
        return buffer.tolist()

    assert run_transports(2, work)[1] == [0, 0, 0, 0]


def test_named_backend_serves_or_raises():
    q, k, v = (torch.randn(1, 8, 2, 4) for _ in range(3))
    out = bp.attention(q, k, v, mesh=bp.Mesh.single(backend="cpu"))
    torch.testing.assert_close(out, bp.attention(q, k, v))
    named = bp.Mesh.single(backend="cpu")
    with pytest.raises(UnsupportedError, match="'cpu' was named, and it takes tensors on cpu; got tensors on 'meta'"):
        bp.attention(*(x.to("meta") for x in (q, k, v)), mesh=named)
    assert bp.run_threads(2, lambda mesh: mesh.backend_for("cpu").name, backend="cpu") == ["cpu", "cpu"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for a backend that cannot run here")
def test_named_backend_that_cannot_run_raises():
    with pytest.raises(BackendUnavailableError, match=r"'cuda' cannot run here: .*; allowed: cpu"):
        bp.Mesh.single(backend="cuda")


def test_device_mesh_needs_one_axis(one_process):
    grid = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "sequence"))
    for whole in (lambda: as_mesh(grid), lambda: bp.Mesh.from_device_mesh(grid)):
        with pytest.raises(
            InputError, match=r"2-D DeviceMesh \(data, sequence\); pass a 1-D submesh: mesh\['sequence'\]"
        ):
            whole()
    for one in (as_mesh(grid["sequence"]), *(bp.Mesh.from_device_mesh(grid, axis) for axis in ("data", 0, -0, 1))):
        assert (one.rank, one.size) == (0, 1)
    with pytest.raises(UnknownNameError, match="did you mean 'sequence'"):
        bp.Mesh.from_device_mesh(grid, "sequenze")
    for axis in (2, -1, 1.0, True):
        with pytest.raises(InputError, match="no such axis"):
            bp.Mesh.from_device_mesh(grid, axis)
    with pytest.raises(InputError, match="not a DeviceMesh"):
        bp.Mesh.from_device_mesh("grid")
    assert as_mesh(init_device_mesh("cpu", (1,))).size == 1


def test_mesh_rejects_invalid_process_groups(one_process):
    with pytest.raises(InputError, match="not a member of the group"):
        as_mesh(dist.GroupMember.NON_GROUP_MEMBER)
    for wrong in ("gloo", [0]):
        with pytest.raises(InputError, match="not a process group"):
            bp.Mesh.from_group(wrong)
    gone = dist.new_group([0])
    assert as_mesh(gone).size == 1
    dist.destroy_process_group(gone)
    with pytest.raises(InputError, match="has no such process group"):
        bp.Mesh.from_group(gone)


def test_mesh_of_destroyed_group_raises(one_process):
    x, group = torch.randn(1, 4, 2, 8), dist.group.WORLD
    mesh = bp.Mesh.from_group()
    dist.destroy_process_group()
    with pytest.raises(InputError, match=r"has no such process group; .*has not been initialized"):
        bp.attention(x, x, x, mesh=mesh)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(InputError, match=r"has no such process group; .*not registered"):
        bp.attention(x, x, x, mesh=mesh)
    assert "this rank has destroyed the process group: make a new Mesh" in exchange_error_notes(group, "waiting")
    assert bp.attention(x, x, x).shape == x.shape  # the new group has another mesh


def test_destroyed_groups_are_released(one_process):
    """Each group has threads, connections and, on devices, buffers."""
    x = torch.randn(1, 4, 2, 8)

    def used(group):
        bp.attention(x, x, x, mesh=group)
        return weakref.ref(as_mesh(group))

    first, beside = used(None), dist.new_group([0])
    second = used(beside)
    assert as_mesh(None) is first()
    dist.destroy_process_group(beside)
    used(dist.new_group([0]))
    gc.collect()
    assert second() is None
    assert as_mesh(None) is first()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    used(None)
    gc.collect()
    assert first() is None


def test_mesh_drops_least_recently_used_call():
    mesh = bp.Mesh.single()
    for number in range(512):
        mesh.cached(number, lambda: object())
    kept, lost = mesh.cached(0, object), mesh.cached(1, object)
    mesh.cached(0, object)
    for number in range(512, 1023):
        mesh.cached(number, object)
    assert mesh.cached(0, object) is kept
    assert mesh.cached(1, object) is not lost


def test_mesh_returns_call_that_another_thread_removed():
    mesh = bp.Mesh.single()

    class Key:
        """A key that later calls displace from the cache while it is used, as those of another thread may."""

        uses = 0

        def __hash__(self):
            self.uses += 1
            if self.uses == 4:  # two uses store it, and the third one finds it
                for number in range(512):
                    mesh.cached(number, object)
            return hash("key")

        def __eq__(self, other):
            return self is other

    key = Key()
    made = mesh.cached(key, object)
    mesh.cached("later", object)
    assert mesh.cached(key, object) is made
    assert key.uses > 4
    assert mesh.cached(key, object) is made


def test_mesh_of_one_rank_can_be_pickled():
    mesh = pickle.loads(pickle.dumps(bp.Mesh.single(config=Config(timeout=5.0), backend="cpu")))
    assert (mesh.size, mesh.config.timeout, mesh.backend) == (1, 5.0, "cpu")

    def work(mesh):
        assert copy.deepcopy({"mesh": mesh})["mesh"] is mesh
        with pytest.raises(UnsupportedError, match=r"state_dict\(\).*let a data loader fork"):
            pickle.dumps(mesh)

    bp.run_threads(2, work)


class Straight(CpuBackend):
    """A backend with a direct transport. `answer` is this transport, or the reason why these ranks cannot use it."""

    capabilities = replace(
        CpuBackend.capabilities,
        direct_transport="straight",
        hardware=replace(CpuBackend.capabilities.hardware, peer_copy_bandwidth=((1, 1e6),)),
    )

    def __init__(self, answer):
        super().__init__()
        self.answer, self.asked = answer, 0

    def connect_direct(self, other, group, timeout):
        self.asked += 1
        if isinstance(self.answer, str):
            raise UnsupportedError(self.answer)
        return self.answer


def on_straight(one_process, backend, transport="auto"):
    plain = LocalTransport(Fabric(2, 1.0), 0)
    plain.share = lambda data, *_: [data, data]  # simulates a second rank with the same answer
    mesh = bp.Mesh(0, 2, lambda device_type: plain, group=dist.group.WORLD)
    mesh.config, mesh.backend_for = Config(transport=transport), lambda device_type: backend
    return mesh


def test_direct_transport_of_backend_is_chosen_by_default(one_process):
    own = LocalTransport(Fabric(2, 1.0), 0)
    backend = Straight(own)
    mesh = on_straight(one_process, backend)
    said = mesh.expected_transport("cpu", direct=True)
    assert said == ("straight", "messages go straight to where they are used")
    assert backend.asked == 0, "one rank asks alone"
    for _ in range(2):
        assert mesh.transport_for("cpu", direct=True) == (own, said[1])
    assert backend.asked == 1
    plain, why = mesh.transport_for("cpu", direct=False)
    assert (plain.name, why) == ("local", "not straight: blocks are handed on from rank to rank")
    named = on_straight(one_process, backend, "local")
    assert named.transport_for("cpu", direct=True)[1] == "named"
    assert not named.may_be_direct("cpu")
    mesh.group = None  # the ranks are threads
    assert mesh.transport_for("cpu", direct=True) == (plain, "not straight: these ranks are in no process group")
    assert not mesh.may_be_direct("cpu")


def test_unavailable_direct_transport_falls_back_or_raises(one_process):
    """`auto` falls back and gives the reason; a named transport raises."""
    mesh = on_straight(one_process, Straight("two hosts"))
    assert mesh.may_be_direct("cpu")
    assert mesh.transport_for("cpu", direct=True)[1] == "not straight: two hosts"
    assert mesh.expected_transport("cpu", direct=True) == ("local", "not straight: two hosts")
    assert not mesh.may_be_direct("cpu")
    named = on_straight(one_process, Straight("two hosts"), "straight")
    for direct, said in (
        (True, r"got two hosts; remove the reason, or set the transport to 'auto' or 'local'$"),
        (False, r"got blocks are handed on from rank to rank; take a strategy whose messages go straight"),
    ):
        with pytest.raises(UnsupportedError, match=f"'straight' cannot serve this call; {said}"):
            named.transport_for("cpu", direct=direct)


class Talking(Straight):
    """A backend whose ranks exchange data when they connect."""

    def connect_direct(self, other, group, timeout):
        assert other.share(b"mine") == [b"mine", b"mine"]
        raise UnsupportedError("two hosts")


def test_failed_call_during_connection_raises_on_all_ranks():
    """All ranks get the reason and are in sync afterwards."""

    def work(local):
        mesh = bp.Mesh(local.rank, 2, lambda device_type: local)
        mesh.group, mesh.backend_for = object(), lambda device_type: Talking("")
        x = torch.ones(1, 8, 2, 4, requires_grad=True)
        with pytest.raises((InputError, MismatchError), match="scale is not a number"):
            bp.attention(x, x, x, mesh=mesh, strategy="ulysses", scale="bad" if mesh.rank else 0.5)
        bp.attention(x, x, x, mesh=mesh, strategy="ulysses", scale=0.5).sum().backward()
        return mesh.transport("cpu").state.passes

    assert run_transports(2, work, timeout=3.0) == [4, 4]  # two agreements to connect, one per pass


def test_plan_ignores_unavailable_direct_transport(one_process):
    """The first call detects it and plans for the remaining transport."""
    backend = Straight("two hosts")
    mesh = on_straight(one_process, backend)
    x = torch.randn(1, 1 << 14, 4, 16)
    counting_on_it = bp.explain(x, x, x, mesh=mesh).strategy.why
    made, *_ = prepare(x, x, x, None, mesh, Request())
    assert made.plan.reason == bp.explain(x, x, x, mesh=mesh).strategy.why != counting_on_it
    assert made.transport.name == "local"


def test_from_group_rejects_transport_of_another_group(one_process, monkeypatch):
    """Such a transport would send messages to other ranks."""
    wrong = LocalTransport(Fabric(3, 1.0), 1)
    monkeypatch.setattr(CpuBackend, "transport", lambda self, group, timeout: wrong)
    with pytest.raises(BackendUnavailableError, match="another process group; got rank 1 of 3; allowed: rank 0 of 1"):
        bp.Mesh.from_group().transport("cpu")


def test_single_takes_settings_as_keywords():
    with pytest.raises(TypeError, match="positional"):
        bp.Mesh.single(Config())
