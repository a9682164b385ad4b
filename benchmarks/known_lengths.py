"""Run a kernel and a copy of known lengths at the same time on one device, and profile them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import burst_portable as bp
from burst_portable.backends.selection import for_device
from burst_portable.comm.agreement import call_signature
from burst_portable.comm.local import Fabric, LocalTransport
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.profiling.recorder import Recorder
from burst_portable.profiling.recording_observer import RecordingObserver
from burst_portable.runtime.prepare import prepared_call

_HELD = 20_000_000  # cycles: about 10 ms, at first
_CHUNK = 1024  # MiB of a device's memory that are copied at a time
Found = dict[str, Any]


class Device:
    """Work of a chosen length: a kernel on the current stream, and a copy on another one."""

    def __init__(self, device: torch.device) -> None:
        self.streams = for_device(device.type).capabilities.streams
        self.device = device
        if self.streams:
            self._module = torch.get_device_module(device)
            self._side = torch.Stream(device)
            self._here, self._there = (torch.empty(_CHUNK << 20, dtype=torch.uint8, device=device) for _ in range(2))
            self._cycles, self._over = _HELD, torch.Event(device)

    def kernel(self, amount: float) -> None:
        """Run a kernel that only takes time: millions of cycles on a device, milliseconds on a CPU."""
        if self.streams:
            self._module._sleep(int(amount * 1e6))
        else:
            time.sleep(amount / 1e3)

    def copy(self, amount: float) -> Callable[[], None]:
        """Start a copy in the device's memory: MiB on a device, milliseconds on a CPU.

        Returns a handle to wait for it.
        """
        if not self.streams:
            thread = threading.Thread(target=time.sleep, args=(amount / 1e3,))
            thread.start()
            return thread.join
        left, current = int(amount * (1 << 20)), torch.accelerator.current_stream(self.device)
        self._side.wait_stream(current)
        with self._side:
            while left > 0:
                self._there[:left].copy_(self._here[:left])
                left -= len(self._here)
            over = torch.Event(self.device)
            over.record()
        return lambda: torch.accelerator.current_stream(self.device).wait_event(over)

    def hold(self) -> None:
        """Delay the work queued from now on by some milliseconds, until the host has queued all of it."""
        if self.streams:
            self._module._sleep(self._cycles)
            self._over.record()

    def held(self) -> bool:
        """Return whether the host was done first. If not, the device is held for longer next time."""
        if not self.streams or not self._over.query():
            return True
        self._cycles *= 2
        if self._cycles > 64 * _HELD:
            raise SystemExit("the host never gives its work ahead of the device: something in it waits for the device")
        return False

    def seconds(self, work: Callable[[], Any]) -> float:
        """Return the median seconds of work alone, as its device measures it."""
        times: list[float] = []
        while len(times) < 7:
            self.settle()
            if self.streams:
                before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
                self.hold()
                before.record()
                work()
                after.record()
                held = self.held()
                after.synchronize()
                times += [before.elapsed_time(after) / 1e3] if held else []
            else:
                began = time.perf_counter()
                work()
                times.append(time.perf_counter() - began)
        return statistics.median(times)

    def settle(self) -> None:
        if self.streams:
            torch.accelerator.synchronize()


class Waits:
    """See `comm.base.Handle`."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait


def beside(device: Device, kernel: float, copy: float) -> Found:
    """Run a kernel and a copy of given lengths, begun together; then the rank waits for the copy."""
    while (found := _beside(device, kernel, copy)) is None:
        pass
    return found


def _beside(device: Device, kernel: float, copy: float) -> Found | None:
    """Return None if the two did not begin together."""
    plan = bp.plan(seq_len=64, ranks=2, heads=1, head_dim=16, mask="full", layout="contiguous", strategy="ring")
    transport = LocalTransport(Fabric(2, 1.0), 0)
    arriving: list[Callable[[], None]] = []

    backend = for_device(device.device.type)
    prepared = prepared_call(plan, backend, ReferenceKernel(), transport, call_signature({"call": "known lengths"}))
    ranks = [RecordingObserver(prepared, Recorder(rank, "host")) for rank in (0, 1)]
    q = torch.empty(1, device=device.device)
    first, second = plan.forward.steps_of(0)
    assert first.compute is not None, "each step of this ring computes"
    assert second.compute is not None, "and so does the other"
    move, sent = first.receives[0], torch.empty(8, dtype=torch.uint8, device=device.device)
    for observer in ranks:  # the clocks' first marks wait for the device
        observer.recorder.clock(device.device)
    device.settle()
    device.hold()
    with ranks[1].posts([(move, sent)], [], 0, backward=False) as posting:
        pass
    ((leaving,), _) = posting.wrap([Waits(lambda: None)], [])
    leaving.wait()
    arriving.append(device.copy(copy))
    with ranks[0].posts([], [(move, sent)], 0, backward=False) as posting:
        pass
    (_, (handle,)) = posting.wrap([], [Waits(arriving[0])])
    with ranks[0].computes(first.compute, q, backward=False):
        device.kernel(kernel)
    handle.wait()
    with ranks[0].computes(second.compute, q, backward=False):
        device.kernel(kernel)
    if not device.held():
        device.settle()
        return None
    device.settle()
    found: Found = analyze([one.recorder.records() for one in ranks])["ranks"][0]
    return {name: found[f"{name}_ns"] / 1e9 for name in ("span", "compute", "exposed_comm", "overlap")}


def overlap(device: torch.device) -> list[Found]:
    """Measure a copy that is shorter than the kernel, and one that is longer."""
    one = Device(device)
    kernel, unit = (8.0, 4.0 * _CHUNK) if one.streams else (60.0, 20.0)
    alone = one.seconds(lambda: one.kernel(kernel))
    found = []
    for times in (0.5, 2.0):
        length = one.seconds(lambda: one.copy(unit)())
        copy = unit * times * alone / length
        length = one.seconds(lambda copy=copy: one.copy(copy)())  # type: ignore[misc]  # no type for the default
        expected = {
            "span": max(alone, length) + alone,
            "compute": 2 * alone,
            "exposed_comm": max(0.0, length - alone),
            "overlap": min(alone, length),
        }
        if length < alone and not one.streams:
            del expected["overlap"]
        runs = [beside(one, kernel, copy) for _ in range(5)]
        measured = {name: statistics.median(run[name] for run in runs) for name in expected}
        apart = {name: apart_of(measured[name], expected[name], expected["span"]) for name in expected}
        found.append({"kernel": alone, "copy": length, "expected": expected, "measured": measured, "apart": apart})
    return found


def apart_of(found: float, right: float, span: float) -> dict[str, float | None]:
    """Return a difference as a share of the expected value (None if that is 0), and of the span."""
    gap = abs(found - right)
    return {"of_itself": gap / right if right else None, "of_span": gap / span}
