"""What the vendor's tracer saw of one rank's attention, and what is reckoned from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.partition import Timeline


@dataclass(frozen=True)
class Traced:
    """Kernels of a device, or operators of the host, under the plan's names (see `deep`).

    Attributes:
        names: (what of the plan, such as "q0 x kv2"; name of the kernel or operator).
        rows: ``[n, 8]``: iteration, call, backward, step, index into `KINDS`, index into `names`, start, end;
            nanoseconds of the tracer's clock.
        on_device: whether these are kernels of a device; else operators of the host.
    """

    names: Sequence[tuple[str, str]]
    rows: NDArray[np.int64]
    on_device: bool

    KINDS: ClassVar[tuple[str, ...]] = ("compute", "comm", "wait", "copy")

    @classmethod
    def of(cls, names: Sequence[Sequence[str]], rows: Any, *, on_device: bool) -> Traced:
        """From rows as above."""
        return cls([(a, b) for a, b in names], np.array(rows, dtype=np.int64).reshape(-1, 8), on_device)


def traced_facts(traced: Traced) -> dict[str, Any]:
    """Time by place and name, the longest first; and the partition, where a device was traced."""
    rows = traced.rows
    places, group = np.unique(rows[:, [2, 3, 5]], axis=0, return_inverse=True)
    group = group.reshape(-1)
    counts = np.bincount(group, minlength=len(places))
    times = np.zeros(len(places), dtype=np.int64)
    np.add.at(times, group, rows[:, 7] - rows[:, 6])
    kinds = np.zeros(len(places), dtype=np.int64)
    kinds[group] = rows[:, 4]
    kernels = [
        {
            "backward": int(backward),
            "step": int(step),
            "what": traced.names[name][0],
            "kind": Traced.KINDS[kinds[i]],
            "name": traced.names[name][1],
            "times": int(counts[i]),
            "time": int(times[i]),
        }
        for i, (backward, step, name) in enumerate(places)
    ]
    kernels.sort(key=lambda k: -k["time"])
    return {
        "on_device": traced.on_device,
        "partition": _partition(rows) if traced.on_device else None,
        "kernels": kernels,
    }


def _partition(rows: NDArray[np.int64]) -> dict[str, int]:
    compute, comm, waits, copies = (rows[rows[:, 4] == kind][:, 6:] for kind in range(len(Traced.KINDS)))
    return Timeline.of(compute, np.concatenate((comm, waits)), copies, waits).partition()
