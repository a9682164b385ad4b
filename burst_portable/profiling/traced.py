"""What the vendor's tracer saw of one rank's attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray


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
