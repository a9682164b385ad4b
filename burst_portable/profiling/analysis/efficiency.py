"""Compare measured with planned efficiency: FLOP/s, bytes, bandwidth, the roofline, and the balance between ranks.

The ceiling of kernels is min(peak FLOP/s, FLOPs per byte x memory bandwidth). FLOPs, and the least bytes that kernels
read and write, come from the plan. Peaks come from the backend: a vendor's data sheet, or a measurement on this
machine. If the backend has none, there is no ceiling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.matching import Messages
from burst_portable.profiling.event_tables import RankRecords, Table
from burst_portable.profiling.intervals import total, union

Row = dict[str, Any]
_UNKNOWN: Row = {"flops": None, "bandwidth": None}
_CALLS_PER_STEP = 1 << 31  # upper bound, to make one integer of (train step, attention call)


def efficiency(one: RankRecords, messages: Messages) -> list[Row]:
    """Return a row per plan and pass of this rank in which a kernel ran, over all its calls."""
    compute, message, collective = (one.table(kind) for kind in ("compute", "message", "collective"))
    sends = message.select(message["sends"] == 1), collective.select(collective["agreement"] == 0)
    observed = (messages.target == one.rank) & messages.is_observed
    receive, transfers = messages.receive.select(observed), messages.transfers()[observed]
    rows = []
    for number, plan in enumerate(one.plans):
        calls = np.array([i * _CALLS_PER_STEP + call for i, call, n in one.calls if n == number], dtype=np.int64)
        peaks = next((p for p in one.facts.get("peaks", ()) if p["dtype"] == plan["dtype"]), _UNKNOWN)
        for backward, name in enumerate(PASSES):
            kernels = compute.select(_of(compute, calls, backward))
            if not len(kernels):
                continue
            times = len(np.unique(kernels.data[:, :2], axis=0))
            planned: Row = {key: value * times for key, value in plan["planned"][name].items()}
            time, flops = total(union(kernels.spans())), int(kernels["flops"].sum())
            arrived = _of(receive, calls, backward)
            transfer = total(union(transfers[arrived]))
            sent = sum(int(table["bytes"][_of(table, calls, backward)].sum()) for table in sends)
            rows.append(
                {
                    "rank": one.rank,
                    "plan": number,
                    "pass": name,
                    "count": times,
                    "flops": flops,
                    "compute_ns": time,
                    "flops_per_second": _rate(flops, time),
                    "planned_flops_per_second": _rate(planned["flops"], planned["compute_seconds"] * 1e9),
                    "planned_sent_bytes": planned["sent_bytes"],
                    "sent_bytes": None if one.facts.get("level") == "basic" else sent,
                    "bytes_per_second": _rate(int(receive["bytes"][arrived].sum()), transfer),
                    "planned_bytes_per_second": _rate(planned["received_bytes"], planned["link_seconds"] * 1e9),
                    **_roofline(plan["planned"][name], _rate(flops, time), peaks),
                }
            )
    return rows


def _of(table: Table, calls: NDArray[np.int64], backward: int) -> NDArray[np.bool_]:
    """Return which rows of a table belong to these calls, in one of their passes."""
    of_calls = np.isin(table["train_step"] * _CALLS_PER_STEP + table["attention_call"], calls)
    found: NDArray[np.bool_] = of_calls & (table["backward"] == backward)
    return found


def _rate(amount: float, nanoseconds: float) -> float | None:
    """Return an amount per second; None if no time was recorded."""
    return amount * 1e9 / nanoseconds if amount and nanoseconds > 0 else None


def _roofline(planned: Mapping[str, Any], rate: float | None, peaks: Mapping[str, Any]) -> Row:
    """Return the roofline of kernels and the fraction that they reached; None for unknown values."""
    intensity = planned["flops"] / planned["memory_bytes"] if planned["memory_bytes"] else None
    ceiling = bound = None
    if intensity and peaks["flops"] and peaks["bandwidth"]:
        ridge = peaks["flops"] / peaks["bandwidth"]
        ceiling = min(peaks["flops"], intensity * peaks["bandwidth"])
        bound = "compute" if intensity >= ridge else "memory"
    return {
        "flops_per_byte": intensity,
        "peak_flops_per_second": peaks["flops"],
        "memory_bytes_per_second": peaks["bandwidth"],
        "ceiling_flops_per_second": ceiling,
        "bound": bound,
        "ceiling_fraction": rate / ceiling if rate and ceiling else None,
    }


def balance(ranks: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return a row per pass: the busiest rank over the mean, by the plan's FLOPs and by the time of kernels."""
    rows = []
    for name in PASSES:
        flops, times = ([r["passes"][name][key] for r in ranks] for key in ("flops", "compute_ns"))
        if sum(flops) and sum(times):
            rows.append(
                {
                    "pass": name,
                    "planned": max(flops) * len(ranks) / sum(flops),
                    "planned_rank": ranks[flops.index(max(flops))]["rank"],
                    "measured": max(times) * len(ranks) / sum(times),
                    "measured_rank": ranks[times.index(max(times))]["rank"],
                }
            )
    return rows
