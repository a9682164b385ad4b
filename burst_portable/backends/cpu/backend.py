"""Define the backend of CPUs."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from burst_portable.backends.base import Backend, Capabilities, HardwareSpec, Peaks, Probe
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.comm.base import Transport
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.reference import ReferenceKernel

_SIZE = 512  # rows and columns of the product: 3 MB in float32, so a few hundred microseconds to milliseconds
_COPIED = 32 << 20  # bytes: more than the caches of most machines
_SECONDS = 0.02  # for each measurement


@lru_cache(maxsize=16)
def _peaks(dtype: str, threads: int) -> Peaks:
    """Measure the peaks with torch's current number of threads, in about 50 ms."""
    a, b = (torch.full((_SIZE, _SIZE), 0.5, dtype=getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    original = torch.ones(_COPIED // 4)
    copy = torch.empty_like(original)
    with torch.no_grad():
        flops = 2 * _SIZE**3 / _shortest(lambda: torch.mm(a, b, out=product))
        bandwidth = 2 * _COPIED / _shortest(lambda: copy.copy_(original))  # read, and written
    name = platform.processor() or platform.machine()
    source = (
        f"a matrix product of {_SIZE} x {_SIZE} and a copy of {_COPIED >> 20} MiB on this machine, threads: {threads}"
    )
    return Peaks(name, dtype, flops, bandwidth, source, measured=True)


def _shortest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of some calls, in CPU time of this thread: other processes affect it little."""
    work()
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while not times or time.perf_counter() < until:
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)


class CpuBackend(Backend):
    """See `backends.base.Backend`."""

    name = "cpu"
    capabilities = Capabilities(
        device_type="cpu",
        process_group="gloo",
        streams=False,
        hardware=HardwareSpec(tflops=0.1, intra_node_bandwidth=1.0, message_latency=200e-6, launch_latency=50e-6),
    )

    def __init__(self) -> None:
        self._kernels: tuple[Kernel, ...] = CpuFlashKernel(), ReferenceKernel()

    def probe(self) -> Probe:
        return Probe(
            True,
            facts={
                "evidence_level": "device",
                "processor": platform.processor() or platform.machine(),
                "cores": os.cpu_count(),
                "threads": torch.get_num_threads(),
                "gloo": torch.distributed.is_available() and torch.distributed.is_gloo_available(),
            },
        )

    def kernels(self) -> tuple[Kernel, ...]:
        return self._kernels

    def peaks(self, dtype: str) -> Peaks:
        return _peaks(dtype, torch.get_num_threads())

    def transport(self, group: Any, timeout: float) -> Transport:
        return TorchDistTransport(group, "gloo", batched=False, timeout=timeout)
