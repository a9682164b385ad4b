"""Contention: a kernel that runs slower because communication runs beside it is a cost of communication.

Kernels that do the same work are compared with one another: those that ran beside communication, and those that ran
alone. Nothing is told where either is missing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.intervals import Intervals, within

_BESIDE = 0.5  # of a kernel's time: from this share on, communication ran beside it
_ALONE = 0.05  # of a kernel's time: up to this share, it ran alone


def contention(kernels: Intervals, work: NDArray[np.int64], comm: Intervals) -> dict[str, Any] | None:
    """Kernels beside communication compared with the same kernels alone; None if there is nothing to compare.

    Args:
        kernels: from when to when each ran, ``[n, 2]``.
        work: ``[n, any]``; rows that are equal did the same.
        comm: when anything was transferred: disjoint and sorted.

    Returns `beside` and `alone`, the numbers of kernels compared; `ratio`, how much longer the former took; and `lost`,
    the nanoseconds that this comes to.
    """
    if not len(kernels):
        return None
    times = kernels[:, 1] - kernels[:, 0]
    shared = within(comm, kernels) / np.maximum(times, 1)
    beside, alone = shared >= _BESIDE, shared <= _ALONE
    _, group = np.unique(work, axis=0, return_inverse=True)
    group = group.reshape(-1)
    found = [(times[(group == g) & beside], times[(group == g) & alone]) for g in range(group.max() + 1)]
    compared = [(b, a) for b, a in found if len(b) and len(a)]
    if not compared:
        return None
    took = sum(int(b.sum()) for b, _ in compared)
    expected = sum(len(b) * float(np.median(a)) for b, a in compared)
    return {
        "beside": sum(len(b) for b, _ in compared),
        "alone": sum(len(a) for _, a in compared),
        "ratio": took / expected if expected else 1.0,
        "lost": round(took - expected),
    }


def contended(data: dict[str, Any]) -> dict[str, Any] | None:
    """The rank that loses most to communication beside its kernels; None if that is not known.

    The tracer's word counts before that of the marks around kernel calls.
    """
    told = [{"rank": r["rank"], **r["contention"]} for r in data.get("traced", ()) if r["contention"]]
    told = told or list(data.get("contention", ()))
    return max(told, key=lambda c: c["lost"], default=None)
