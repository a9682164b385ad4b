"""All that is measured of the ranks of a mesh, as what a hardware spec file holds: see `planning.hardware`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from math import ceil
from typing import Any

import torch

from burst_portable.backends.base import Backend, HardwareSpec
from burst_portable.backends.selection import choose_kernel, hardware_of
from burst_portable.comm.base import Transport
from burst_portable.errors import DeviceError
from burst_portable.kernels.base import Kernel
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.measuring.timing import (
    CALLS,
    Block,
    Clock,
    Peers,
    Speed,
    TransportClock,
    curve,
    hop,
    lap,
    memory_rate,
    share_held_up,
    speed,
    under_way,
)
from burst_portable.mesh import Mesh
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import SCHEMA, Curve, as_json
from burst_portable.planning.plans import PASSES
from burst_portable.utils.text import bytes_text, seconds_text
from burst_portable.utils.torch_modes import own_precision

_KIB, _MIB = 1 << 10, 1 << 20
_NAME = 200  # bytes of a device's name
_SHORTER = 4  # the shorter of the two lengths is 1/_SHORTER of the longer
# Messages beside a kernel: their share of its time; how many of each at most.
_FILLED, _MESSAGES, _REPEATS = 0.7, 32, 16

Told = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured with.

    Attributes:
        length: tokens of the longer call.
        messages: bytes, ascending.
        beside: bytes of a message that runs beside a kernel.
        memory: bytes of a tensor that is added.
    """

    length: int
    messages: tuple[int, ...]
    beside: int
    memory: int


ACCELERATOR = Sizes(16384, (1 * _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB), 64 * _MIB, 256 * _MIB)
HOST = Sizes(512, (64 * _KIB, 1 * _MIB, 8 * _MIB), 8 * _MIB, 32 * _MIB)  # so that two cores are done in seconds


@dataclass(frozen=True)
class Shape:
    """The attention that is measured; None as `dtype` or `length` takes the backend's usual one."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype | None = None
    length: int | None = None


def measure(
    mesh: Mesh, device: torch.device, shape: Shape, kernel: str, told: Told = lambda what: None
) -> dict[str, Any]:
    """What a hardware spec file holds; the same on every rank. All ranks of the mesh must call it.

    Args:
        device: this rank's.
        kernel: the local kernel by name, or "auto".
        told: hears what is measured next.

    Raises `UnsupportedError` where no kernel serves the shape, `DeviceError` where the device's memory does not hold
    it, and what transports raise.
    """
    backend = mesh.backend_for(device.type)
    dtype = shape.dtype or (torch.bfloat16 if backend.capabilities.streams else torch.float32)
    length = shape.length or (ACCELERATOR if backend.capabilities.streams else HOST).length
    call = measured_call(shape, dtype, device.type, length)
    named = mesh.config.kernel if kernel == "auto" else kernel
    chosen, _ = choose_kernel(backend, call, named)
    try:
        with torch.no_grad(), own_precision(device):
            return _Measurement(mesh, device, backend, chosen, call, told).facts()
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "what is measured does not fit the device's memory",
            got=str(error).split(".")[0],
            next_step="take fewer heads or tokens",
        ) from error


def measured_call(shape: Shape, dtype: torch.dtype, device: str, length: int) -> AttentionCall:
    """Return the causal attention of one rank that is measured."""
    return AttentionCall(
        Mask.causal(),
        make_layout("contiguous", length, 1),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim,
        itemsize=dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        scale=shape.head_dim**-0.5,
        deterministic=False,
    )


@dataclass(frozen=True)
class Measured:
    """One field of `HardwareSpec`.

    Attributes:
        value: None if it could not be measured; the field then keeps its value.
        method: how it was measured, or why not.
        max_over_min: the longest of its rounds over the shortest; None if there were no rounds.
        is_measured: False also for a value that was taken from another field.
    """

    value: Any
    method: str
    max_over_min: float | None = None
    is_measured: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return what a file says besides the value."""
        if self.max_over_min is None:
            return {"measured": self.is_measured, "method": self.method, "max_over_min": None}
        rounds = f"{self.method}; rounds within {self.max_over_min:.2f} times the shortest"
        return {"measured": self.is_measured, "method": rounds, "max_over_min": round(self.max_over_min, 3)}


class _Measurement:
    """Measure one field of `HardwareSpec` after the other, into `found`."""

    def __init__(
        self, mesh: Mesh, device: torch.device, backend: Backend, kernel: Kernel, call: AttentionCall, told: Told
    ) -> None:
        self.mesh, self.device, self.backend, self.kernel, self.call = mesh, device, backend, kernel, call
        streams = backend.capabilities.streams
        self.sizes = ACCELERATOR if streams else HOST
        self.length = call.layout.length
        self.transport = mesh.transport(device.type)
        self.clock: Clock = TransportClock(self.transport, device, streams=streams)
        self.told, self.found = told, dict[str, Measured]()
        self.node = mesh.ranks_per_node if mesh.ranks_per_node and 1 < mesh.ranks_per_node < mesh.size else 0
        self.direct = ""

    def facts(self) -> dict[str, Any]:
        """All of it."""
        block = self._kernel()
        self._memory()
        if self.mesh.size > 1:
            self._links()
            self._held_up(block)
        del block
        before = hardware_of(self.backend, self.mesh.size, self.kernel)
        call = self.call
        values = {name: one.value for name, one in self.found.items() if one.value is not None}
        return {
            "schema": SCHEMA,
            "date": date.today().isoformat(),
            "device": self._device(),
            "backend": self.backend.name,
            "ranks": self.mesh.size,
            "kernel": self.kernel.name,
            "transport": self.transport.name,
            "direct_transport": self.direct,
            "heads": call.heads,
            "kv_heads": call.kv_heads,
            "head_dim": call.head_dim,
            "dtype": call.dtype,
            "lengths": list(self._lengths()),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
            "hardware": as_json(replace(before, kernel=self.kernel.traits, **values)),
            "methods": {name: self._method(name, before).as_json() for name in as_json(before)},
        }

    def _method(self, name: str, before: HardwareSpec) -> Measured:
        """Return how a field was measured, or why it kept its value."""
        found = self.found.get(name)
        if found and found.value is not None:
            return found
        if name == "kernel":
            return Measured(None, f"what the kernel {self.kernel.name} says of itself", is_measured=False)
        alone = self.mesh.size == 1 and name in _OF_LINKS
        why = found.method if found else "one rank has no links" if alone else "not measured"
        source = f"known {before.source}" if before.source else f"the guess of the backend {self.backend.name}"
        return Measured(None, f"{why}; kept as it was: {source}", is_measured=False)

    def _device(self) -> str:
        """The devices of all ranks by name."""
        module = torch.get_device_module(self.device)
        name = module.get_device_name() if hasattr(module, "get_device_name") else platform.processor()
        mine = (name or platform.machine()).encode()[:_NAME].ljust(_NAME)
        names = [one.decode(errors="replace").strip() for one in self.transport.share(mine, "names of devices")]
        return ", ".join(dict.fromkeys(names))[:_NAME]

    # ------------------------------------------------------------------------------------------------- kernel, memory

    def _lengths(self) -> tuple[int, int]:
        return max(1, self.length // _SHORTER), self.length

    def _kernel(self) -> Block:
        """The longer of the two blocks, whose calls then run beside messages."""
        lengths, seconds, varied = self._lengths(), [], []
        for length in lengths:
            self.told(f"{self.kernel.name}, {length:,} tokens")
            block = Block(self.kernel, self.call, length, self.device, yields_to_comm=self.transport.high_priority)
            seconds.append((block.flops, block.seconds(self.clock)))
            varied.append(block.varied)
        names = {"forward": ("tflops", "launch_latency"), "backward": ("backward_tflops", "backward_launch_latency")}
        for one in PASSES:
            points = [(float(flops[one]), took[one]) for flops, took in seconds]
            made: Speed = speed(*points)
            rate, latency = names[one]
            took = ", ".join(
                f"{length:,} tokens {seconds_text(time)}" for length, (_, time) in zip(lengths, points, strict=True)
            )
            told = f"{one} of {self.kernel.name}, causal: {took}"
            most = max(of_length[one] for of_length in varied)
            self.found[rate] = Measured(made.tflops, f"{told}; by exact area", most)
            how = told if made.apart else f"{told}; too near to tell a latency, taken for none"
            self.found[latency] = Measured(made.latency, how)
        return block

    def _memory(self) -> None:
        self.told("memory")
        self.clock.varied()
        rate = memory_rate(self.clock, self.sizes.memory)
        how = f"an elementwise add of tensors of {bytes_text(self.sizes.memory)}, read twice, written once"
        self.found["memory_bandwidth"] = Measured(rate, how, self.clock.varied())

    # ---------------------------------------------------------------------------------------------------------- links

    def _links(self) -> None:
        rank, ranks, name = self.mesh.rank, self.mesh.size, self.transport.name
        sizes, several = self.sizes.messages, f"up to {CALLS} messages back to back"
        near = Peers.next(rank, ranks, self.node)
        self.told(f"{name} to the next rank")
        found = self.found
        how = f"to the next rank and from the last, {several}"
        link = found["p2p_bandwidth"] = self._curve(self.transport, near, sizes, how)
        found["intra_node_bandwidth"] = Measured(
            max(intra_node_bandwidth for _, intra_node_bandwidth in link.value), "the most of `p2p_bandwidth`"
        )
        latency = hop(self.clock, self.transport, near)
        found["message_latency"] = Measured(latency, f"{name}: a message of a few bytes, of many back to back")
        self._spread(several)
        self._direct(near, several)
        if self.node:
            self.told(f"{name} to the next node")
            there = Peers.next_node(rank, ranks, self.node)
            beyond = self._curve(self.transport, there, sizes[-1:], "")
            how = f"{name}: all ranks to the same place of the next node, {bytes_text(sizes[-1])}"
            found["inter_node_bandwidth"] = Measured(beyond.value[-1][1], how, beyond.max_over_min)
            found["ranks_per_node"] = Measured(self.node, "named by --ranks-per-node")

    def _curve(self, transport: Transport, peers: Peers, sizes: Sequence[int], how: str) -> Measured:
        """Measure a `Curve`; `how` follows the name of the transport."""
        self.clock.varied()
        points: Curve = curve(self.clock, transport, peers, sizes)
        return Measured(points, f"{transport.name} {how}", self.clock.varied())

    def _spread(self, several: str) -> None:
        everybody = Peers.others(self.mesh.rank, self.mesh.size, self.node)
        if len(everybody.there) < 2:
            self.found["all_to_all_bandwidth"] = Measured(
                (), "two ranks: the other one is the next, see `p2p_bandwidth`"
            )
            return
        self.told(f"{self.transport.name} to all others")
        how = f"to all others and from all at once, {several}; bytes of all together"
        self.found["all_to_all_bandwidth"] = self._curve(self.transport, everybody, self.sizes.messages, how)

    def _direct(self, near: Peers, several: str) -> None:
        """Over the backend's own transport, if it has one and these ranks can have it; else nothing is direct."""
        direct, why = self.mesh.transport_for(self.device.type, direct=True)
        if direct is self.transport:
            self.found["peer_copy_bandwidth"] = Measured((), f"no transport of its own for it: {why}")
            return
        self.told(f"{direct.name} to the next rank")
        self.direct = direct.name
        how = f"to the next rank and from the last, {several}"
        self.found["peer_copy_bandwidth"] = self._curve(direct, near, self.sizes.messages, how)

    def _held_up(self, block: Block) -> None:
        """Kernels alone, messages alone, both: of either pass."""
        near = Peers.next(self.mesh.rank, self.mesh.size, self.node)
        data = torch.ones(self.sizes.beside, dtype=torch.uint8, device=self.device)
        name = "comm_slowdown_high_priority" if self.transport.high_priority else "comm_slowdown"
        known = hardware_of(self.backend, self.mesh.size, self.kernel)
        before = getattr(known, name) or known.comm_slowdown
        shares, tellings = [], []
        for one in PASSES:
            self.told(f"{one} of {self.kernel.name} beside messages")
            calls = block.passes[one], block.beside[one]
            share, tale = held_up(self.clock, self.transport, *calls, data, near)
            shares.append(share)
            tellings.append(f"{one}: {tale}")
        forward, backward = (old if share is None else share for old, share in zip(before, shares, strict=True))
        told = "; ".join(tellings)
        self.found[name] = Measured(None if shares == [None, None] else (forward, backward), told)
        if self.transport.high_priority and not any(known.comm_slowdown):  # else 0 would be said of messages that wait
            how = "not measured, messages went first; taken from comm_slowdown_high_priority"
            self.found["comm_slowdown"] = Measured((forward, backward), how, is_measured=False)


_OF_LINKS = (
    "intra_node_bandwidth",
    "message_latency",
    "p2p_bandwidth",
    "peer_copy_bandwidth",
    "all_to_all_bandwidth",
    "comm_slowdown",
    "comm_slowdown_high_priority",
)


def held_up(
    clock: Clock,
    transport: Transport,
    call: Callable[[], object],
    beside: Callable[[], object],
    data: torch.Tensor,
    peers: Peers,
) -> tuple[float | None, str]:
    """The share of their time that messages keep a kernel waiting (None where it cannot be told), and how it was found.

    As many messages as take most of the kernel's time; or as many kernels as take longer than one message.

    call, beside: the kernel as it is called alone, and beside messages.
    """
    one = clock.median(lap(transport, data, peers, 1))
    kernel = clock.median(call)
    count = max(1, min(_MESSAGES, int(_FILLED * kernel / one)))
    repeats = max(1, min(_REPEATS, ceil(one / (_FILLED * kernel))))

    def compute(call: Callable[[], object]) -> None:
        for _ in range(repeats):
            call()

    def together() -> None:
        with under_way(transport, data, peers, count):
            compute(beside)

    together()
    alone, messages, both = clock.medians([partial(compute, call), lap(transport, data, peers, count), together])
    share = share_held_up(alone, messages, both)
    took = f"kernels {seconds_text(alone)}, messages {seconds_text(messages)}, both {seconds_text(both)}"
    return share, took if share is not None else f"{took}: the kernels end too soon to tell"
