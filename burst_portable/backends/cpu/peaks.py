"""What this machine's cores can do at most, measured by a matrix product and a copy: no data sheet knows a CPU."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import lru_cache

import torch

from burst_portable.backends.base import Peaks

_SIZE = 512  # rows and columns of the product: 3 MB in float32, so a few hundred microseconds to milliseconds
_COPIED = 32 << 20  # bytes: more than the caches of most machines
_SECONDS = 0.02  # for each measurement


def peaks(dtype: str) -> Peaks:
    """By the threads that torch has now; measured once per process and number of threads, in about 50 ms."""
    return _measured(dtype, torch.get_num_threads())


@lru_cache(maxsize=16)
def _measured(dtype: str, threads: int) -> Peaks:
    a, b = (torch.full((_SIZE, _SIZE), 0.5, dtype=getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(_COPIED // 4)
    target = torch.empty_like(source)
    with torch.no_grad():
        flops = 2 * _SIZE**3 / _shortest(lambda: torch.mm(a, b, out=product))
        bandwidth = 2 * _COPIED / _shortest(lambda: target.copy_(source))  # read, and written
    name = platform.processor() or platform.machine()
    told = (
        f"a matrix product of {_SIZE} x {_SIZE} and a copy of {_COPIED >> 20} MiB on this machine, threads: {threads}"
    )
    return Peaks(name, dtype, flops, bandwidth, told, measured=True)


def _shortest(work: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls, in time of this thread, so that neighbours on the machine count little."""
    work()
    times: list[float] = []
    until = time.perf_counter() + _SECONDS
    while not times or time.perf_counter() < until:
        began = time.thread_time()
        work()
        times.append(time.thread_time() - began)
    return min(times)
