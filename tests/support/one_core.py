"""Pin threads to one core, because waking a thread on another core takes longer than its work."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_core() -> Iterator[None]:
    """Pin this thread and the threads that it starts to its current core, if Linux allows it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
