"""Rank the kernels of a device for a call by a file of measured times, which `burst-portable time-kernels` writes.

A file has one row per timed attention. A call is like a row if both have the same dtype, head sizes, kind of mask and
flags. Of several rows with other lengths, the one with the nearest length counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from burst_portable.errors import InputError, shown
from burst_portable.planning.call import AttentionCall
from burst_portable.utils.files import read_json

SCHEMA = "burst_portable.kernel_times/1"
NEXT_STEP = "`burst-portable time-kernels --json FILE` writes one"
MASKS = {"full": "full", "causal": "causal", "documents": "a mask that is neither full nor causal"}
"""Kinds of masks in a file, and which masks of calls they stand for."""
_LARGEST_FILE = 1 << 22


@dataclass(frozen=True, slots=True)
class TimedAttention:
    """One timed attention of one rank.

    Attributes:
        dtype: Name of the dtype of q, k and v.
        head_dim: Size of a head of Q and K.
        v_head_dim: Size of a head of V.
        grouped: Whether several query heads share a K/V head.
        mask: A key of `MASKS`.
        softcap: Whether scores are capped.
        deterministic: Whether gradients must be bitwise equal in every run.
        tokens: Tokens of the sequence.
        seconds: Seconds of both passes together, by kernel.
    """

    dtype: str
    head_dim: int
    v_head_dim: int
    grouped: bool
    mask: str
    softcap: bool
    deterministic: bool
    tokens: int
    seconds: dict[str, float]

    def is_like(self, call: AttentionCall) -> bool:
        """Return whether a call has the same dtype, head sizes, kind of mask and flags."""
        mine = (self.dtype, self.head_dim, self.v_head_dim, self.grouped, self.mask, self.softcap, self.deterministic)
        kind = call.mask.name if call.mask.name in ("full", "causal") else "documents"
        grouped, capped = call.kv_heads < call.heads, call.softcap is not None
        return mine == (call.dtype, call.head_dim, call.v_head_dim, grouped, kind, capped, call.deterministic)


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Contents of a file of kernel times.

    Attributes:
        file: Name of the file.
        backend: Name of the backend.
        device: Name of the device.
        date: Date of the measurement, as 2026-11-25.
        rows: The timed attentions.
    """

    file: str
    backend: str
    device: str
    date: str
    rows: tuple[TimedAttention, ...]

    def ranked(self, backend: str, call: AttentionCall) -> tuple[list[str], str]:
        """Return the names of the kernels, fastest first, and the source of the times.

        If no row is like the call, the list is empty and the text states it.
        """
        rows = [row for row in self.rows if row.is_like(call)] if backend == self.backend else []
        if not rows:
            return [], f"{self.file} has no times for such a call"
        length = max(1, call.layout.length)
        nearest = min(rows, key=lambda row: abs(math.log(row.tokens / length)))
        what = f"{nearest.tokens} tokens on {self.device} ({self.file}, {self.date})"
        return sorted(nearest.seconds, key=nearest.seconds.__getitem__), what


def read_kernel_times(file: str | Path) -> KernelTimes:
    """Read a file of kernel times.

    Raises:
        InputError: The file is missing, too large, not JSON or of another schema, or a value has the wrong type.
    """
    data = read_json(Path(file), "a file of kernel times", _LARGEST_FILE, next_step=NEXT_STEP)
    found = data.get("schema") if isinstance(data, dict) else None
    if found != SCHEMA:
        got = f"schema {shown(found)}"
        raise InputError(f"{file} is not a file of kernel times", got=got, allowed=SCHEMA, next_step=NEXT_STEP)
    backend, device, date = (data.get(name) for name in ("backend", "device", "date"))
    rows = data.get("rows")
    if not all(isinstance(text, str) for text in (backend, device, date)) or not isinstance(rows, list):
        raise InputError(f"{file} lacks backend, device, date or rows", next_step=NEXT_STEP)
    return KernelTimes(str(file), backend, device, date, tuple(_row(file, row) for row in rows))


def _row(file: str | Path, data: Any) -> TimedAttention:
    """Return one row. Raise `InputError` if a field is missing or has the wrong type."""
    names = [field.name for field in fields(TimedAttention)]
    values: list[Any] = [data.get(name) for name in names] if isinstance(data, dict) else []
    texts = ("dtype", "mask")
    flags = ("grouped", "softcap", "deterministic")
    for name, value in zip(names, values, strict=bool(values)):
        if name == "seconds":
            good = isinstance(value, dict) and all(_is_positive(one) for one in value.values())
        elif name in texts:
            good = isinstance(value, str)
        elif name in flags:
            good = isinstance(value, bool)
        else:
            good = type(value) is int and value > 0
        if not good:
            raise InputError(f"{file}: wrong {name} in a row", got=shown(value), next_step=NEXT_STEP)
    if not values or data["mask"] not in MASKS:
        raise InputError(
            f"{file}: wrong row", got=shown(data), allowed=f"mask: {', '.join(MASKS)}", next_step=NEXT_STEP
        )
    return TimedAttention(*values)


def _is_positive(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0
