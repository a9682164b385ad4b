"""Measure the ranks of a mesh for a hardware spec file: see `planning.hardware`."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from math import ceil
from typing import Any

import torch

from burst_portable.backends.base import HardwareSpec
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
    TransportClock,
    fit_speed,
    lap,
    measure_curve,
    memory_bandwidth,
    message_latency,
    messages_in_flight,
    slowdown_share,
)
from burst_portable.mesh import Mesh
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import SCHEMA, Curve, as_json
from burst_portable.planning.plans import PASSES
from burst_portable.utils.text import bytes_text, seconds_text
from burst_portable.utils.torch_modes import disable_autocast

_KIB, _MIB = 1 << 10, 1 << 20
_NAME = 200  # bytes of a device's name
_SHORTER = 4  # the shorter of the two lengths is 1/_SHORTER of the longer
# Messages during a kernel: their share of its time, and the largest numbers of messages and kernels.
_FILLED, _MAX_MESSAGES, _MAX_KERNELS = 0.7, 32, 16

_REPEATS = f"up to {CALLS} messages back to back"
_TO_NEXT = f"to the next rank and from the previous one, {_REPEATS}"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measured operations: tokens of the longer kernel call, and bytes.

    Attributes:
        message_bytes: Bytes of messages, ascending.
        overlap_bytes: Bytes of a message during a kernel.
        memory_bytes: Bytes of an added tensor.
    """

    length: int
    message_bytes: tuple[int, ...]
    overlap_bytes: int
    memory_bytes: int


ACCELERATOR = Sizes(16384, (1 * _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB), 64 * _MIB, 256 * _MIB)
HOST = Sizes(512, (64 * _KIB, 1 * _MIB, 8 * _MIB), 8 * _MIB, 32 * _MIB)  # takes seconds on two cores


def measured_call(heads: int, kv_heads: int, head_dim: int, dtype: str, device_type: str, length: int) -> AttentionCall:
    """Return the measured causal attention of one rank over this many tokens."""
    return AttentionCall(
        Mask.causal(),
        make_layout("contiguous", length, 1),
        heads,
        kv_heads,
        head_dim,
        head_dim,
        itemsize=getattr(torch, dtype).itemsize,
        dtype=dtype,
        device=device_type,
        scale=head_dim**-0.5,
        deterministic=False,
    )


def measure(
    mesh: Mesh, device: torch.device, call: AttentionCall, kernel: str, on_progress: Progress = lambda what: None
) -> dict[str, Any]:
    """Measure kernels, memory and links. All ranks of the mesh must call it.

    Args:
        mesh: Ranks whose links are measured.
        device: Device of this rank.
        call: Longer call of the kernel, see `measured_call`.
        kernel: Name of the local kernel, or "auto".
        on_progress: Called with the name of each measurement before it starts. Default: none.

    Returns:
        The contents of a hardware spec file, equal on every rank.

    Raises:
        UnsupportedError: If no kernel supports the call.
        DeviceError: If the measurement does not fit the device's memory.
        CommunicationError: If the transport fails.
    """
    chosen, _ = choose_kernel(mesh.backend_for(device.type), call, mesh.config.kernel if kernel == "auto" else kernel)
    try:
        with torch.no_grad(), disable_autocast(device):
            return _Measurement(mesh, device, chosen, call, on_progress).facts()
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            "the measurement does not fit the device's memory",
            got=str(error).split(".")[0],
            next_step="take fewer heads or tokens",
        ) from error


@dataclass(frozen=True)
class Measured:
    """The measurement of one field of `HardwareSpec`.

    Attributes:
        value: New value; None if it could not be measured, so that the field keeps its value.
        method: How it was measured, or why not.
        max_over_min: Longest of its rounds over the shortest; None without rounds.
        is_measured: Whether the value was measured; False also if it was taken from another field.
    """

    value: Any
    method: str
    max_over_min: float | None = None
    is_measured: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the description of the measurement for a file."""
        ratio, method = self.max_over_min, self.method
        if ratio is not None:
            ratio, method = round(ratio, 3), f"{method}; rounds within {ratio:.2f} times the shortest"
        return {"measured": self.is_measured, "method": method, "max_over_min": ratio}


class _Measurement:
    """Measure the fields of `HardwareSpec` one after the other."""

    def __init__(
        self, mesh: Mesh, device: torch.device, kernel: Kernel, call: AttentionCall, on_progress: Progress
    ) -> None:
        self.mesh, self.device, self.kernel, self.call = mesh, device, kernel, call
        self.backend = mesh.backend_for(device.type)
        streams = self.backend.capabilities.streams
        self.sizes = ACCELERATOR if streams else HOST
        self.lengths = max(1, call.layout.length // _SHORTER), call.layout.length
        self.transport = mesh.transport(device.type)
        self.clock: Clock = TransportClock(self.transport, device, streams=streams)
        self.on_progress, self.found = on_progress, dict[str, Measured]()
        self.node = mesh.ranks_per_node if mesh.ranks_per_node and 1 < mesh.ranks_per_node < mesh.size else 0
        self.neighbors = Peers.next(mesh.rank, mesh.size, self.node)
        self.direct = ""

    def facts(self) -> dict[str, Any]:
        """Run all measurements; return the contents of a hardware spec file."""
        block = self._kernel()
        self._memory()
        if self.mesh.size > 1:
            self._links()
            self._slowdown(block)
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
            "lengths": list(self.lengths),
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
            return Measured(None, f"declared by the kernel {self.kernel.name}", is_measured=False)
        has_no_links = self.mesh.size == 1 and name in _LINK_FIELDS
        reason = found.method if found else "one rank has no links" if has_no_links else "not measured"
        source = f"known {before.source}" if before.source else f"the guess of the backend {self.backend.name}"
        return Measured(None, f"{reason}; unchanged: {source}", is_measured=False)

    def _device(self) -> str:
        """Return the names of the devices of all ranks."""
        module = torch.get_device_module(self.device)
        name = module.get_device_name() if hasattr(module, "get_device_name") else platform.processor()
        local = (name or platform.machine()).encode()[:_NAME].ljust(_NAME)
        names = [one.decode(errors="replace").strip() for one in self.transport.share(local, "names of devices")]
        return ", ".join(dict.fromkeys(names))[:_NAME]

    # ------------------------------------------------------------------------------------------------- kernel, memory

    def _kernel(self) -> Block:
        """Measure two blocks; return the longer one, whose calls later run during messages."""
        seconds, ratios = [], []
        for length in self.lengths:
            self.on_progress(f"{self.kernel.name}, {length:,} tokens")
            block = Block(self.kernel, self.call, length, self.device, yields_to_comm=self.transport.high_priority)
            seconds.append((block.flops, block.seconds(self.clock)))
            ratios.append(block.max_over_min)
        names = {"forward": ("tflops", "launch_latency"), "backward": ("backward_tflops", "backward_launch_latency")}
        for one in PASSES:
            points = [(float(flops[one]), took[one]) for flops, took in seconds]
            speed = fit_speed(*points)
            rate, latency = names[one]
            times = zip(self.lengths, points, strict=True)
            took = ", ".join(f"{length:,} tokens {seconds_text(time)}" for length, (_, time) in times)
            method = f"{one} of {self.kernel.name}, causal: {took}"
            ratio = max(of_length[one] for of_length in ratios)
            self.found[rate] = Measured(speed.tflops, f"{method}; by the exact number of pairs", ratio)
            method += "" if speed.is_resolved else "; no latency can be derived, so it is taken as none"
            self.found[latency] = Measured(speed.latency, method)
        return block

    def _memory(self) -> None:
        self.on_progress("memory")
        self.clock.pop_max_over_min()
        size = self.sizes.memory_bytes
        rate = memory_bandwidth(self.clock, size)
        method = f"an elementwise add of tensors of {bytes_text(size)}, which reads two and writes one"
        self.found["memory_bandwidth"] = Measured(rate, method, self.clock.pop_max_over_min())

    # ---------------------------------------------------------------------------------------------------------- links

    def _links(self) -> None:
        found, name, sizes = self.found, self.transport.name, self.sizes.message_bytes
        self.on_progress(f"{name} to the next rank")
        link = found["p2p_bandwidth"] = self._curve(self.transport, self.neighbors, sizes, _TO_NEXT)
        found["intra_node_bandwidth"] = Measured(max(rate for _, rate in link.value), "the maximum of `p2p_bandwidth`")
        latency = message_latency(self.clock, self.transport, self.neighbors)
        found["message_latency"] = Measured(latency, f"{name}: a message of a few bytes, of many back to back")
        self._all_to_all()
        self._direct()
        if self.node:
            self.on_progress(f"{name} to the next node")
            peers = Peers.next_node(self.mesh.rank, self.mesh.size, self.node)
            between = self._curve(self.transport, peers, sizes[-1:], "")
            method = f"{name}: each rank to the same local rank of the next node, {bytes_text(sizes[-1])}"
            found["inter_node_bandwidth"] = Measured(between.value[-1][1], method, between.max_over_min)
            found["ranks_per_node"] = Measured(self.node, "set by --ranks-per-node")

    def _curve(self, transport: Transport, peers: Peers, sizes: Sequence[int], method: str) -> Measured:
        """Measure a `Curve`; `method` follows the name of the transport."""
        self.clock.pop_max_over_min()
        points: Curve = measure_curve(self.clock, transport, peers, sizes)
        return Measured(points, f"{transport.name} {method}", self.clock.pop_max_over_min())

    def _all_to_all(self) -> None:
        peers = Peers.all_in_node(self.mesh.rank, self.mesh.size, self.node)
        if len(peers.targets) < 2:
            self.found["all_to_all_bandwidth"] = Measured((), "with two ranks, this is `p2p_bandwidth`")
            return
        self.on_progress(f"{self.transport.name} to all other ranks")
        method = f"to all other ranks and from all at once, {_REPEATS}; total bytes"
        self.found["all_to_all_bandwidth"] = self._curve(self.transport, peers, self.sizes.message_bytes, method)

    def _direct(self) -> None:
        """Measure the backend's own transport, if it has one that these ranks can use."""
        direct, reason = self.mesh.transport_for(self.device.type, direct=True)
        if direct is self.transport:
            self.found["peer_copy_bandwidth"] = Measured((), f"no direct transport: {reason}")
            return
        self.on_progress(f"{direct.name} to the next rank")
        self.direct = direct.name
        self.found["peer_copy_bandwidth"] = self._curve(direct, self.neighbors, self.sizes.message_bytes, _TO_NEXT)

    def _slowdown(self, block: Block) -> None:
        """Measure kernels alone, messages alone, and both, for each pass."""
        data = torch.ones(self.sizes.overlap_bytes, dtype=torch.uint8, device=self.device)
        name = "comm_slowdown_high_priority" if self.transport.high_priority else "comm_slowdown"
        known = hardware_of(self.backend, self.mesh.size, self.kernel)
        before = getattr(known, name) or known.comm_slowdown
        shares, methods = [], []
        for one in PASSES:
            self.on_progress(f"{one} of {self.kernel.name} during messages")
            calls = block.passes[one], block.overlapped[one]
            share, method = measure_slowdown(self.clock, self.transport, *calls, data, self.neighbors)
            shares.append(share)
            methods.append(f"{one}: {method}")
        forward, backward = (old if share is None else share for old, share in zip(before, shares, strict=True))
        value = None if shares == [None, None] else (forward, backward)
        self.found[name] = Measured(value, "; ".join(methods))
        if self.transport.high_priority and not any(known.comm_slowdown):  # otherwise the field would stay 0
            method = "not measured, messages had high priority; taken from comm_slowdown_high_priority"
            self.found["comm_slowdown"] = Measured((forward, backward), method, is_measured=False)


_LINK_FIELDS = (
    "intra_node_bandwidth",
    "message_latency",
    "p2p_bandwidth",
    "peer_copy_bandwidth",
    "all_to_all_bandwidth",
    "comm_slowdown",
    "comm_slowdown_high_priority",
)


def measure_slowdown(
    clock: Clock,
    transport: Transport,
    call: Callable[[], object],
    overlapped: Callable[[], object],
    data: torch.Tensor,
    peers: Peers,
) -> tuple[float | None, str]:
    """Measure the share of the time of messages by which they delay a kernel; see `timing.slowdown_share`.

    It sends as many messages as take most of the kernel's time, or runs as many kernels as take longer than a message.
    `call` runs alone, `overlapped` during messages of `data`. Return the share, and a text about the measured times.
    """
    one = clock.median(lap(transport, data, peers, 1))
    kernel = clock.median(call)
    count = max(1, min(_MAX_MESSAGES, int(_FILLED * kernel / one)))
    repeats = max(1, min(_MAX_KERNELS, ceil(one / (_FILLED * kernel))))

    def compute(call: Callable[[], object]) -> None:
        for _ in range(repeats):
            call()

    def overlap() -> None:
        with messages_in_flight(transport, data, peers, count):
            compute(overlapped)

    overlap()
    kernels, messages, both = clock.medians([partial(compute, call), lap(transport, data, peers, count), overlap])
    share = slowdown_share(kernels, messages, both)
    took = f"kernels {seconds_text(kernels)}, messages {seconds_text(messages)}, both {seconds_text(both)}"
    return share, took if share is not None else f"{took}: the kernels end too early to measure a slowdown"
