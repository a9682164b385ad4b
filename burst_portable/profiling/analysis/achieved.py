"""What was achieved beside what was planned: FLOP/s, bytes, bandwidth, the roofline, and how evenly work lies.

::

    intensity = FLOPs / least bytes that the kernels move           both from the plan
    ceiling   = min(peak FLOP/s, intensity x memory bandwidth)      what the device could do with such kernels

Peaks come from the backend: a vendor's data sheet, or a measurement on this machine. Where it knows none, there is no
ceiling: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.matching import Messages
from burst_portable.profiling.intervals import total, union
from burst_portable.profiling.records import RankRecords, Table

Row = dict[str, Any]
_MANY = 1 << 31  # calls of a training step, for a key of (training step, call)


def achieved(one: RankRecords, messages: Messages) -> list[Row]:
    """A row per plan and pass of this rank, over all its calls."""
    seen = _Seen(one, messages)
    rows = []
    for number, plan in enumerate(one.plans):
        calls = np.array([i * _MANY + call for i, call, n in one.calls if n == number], dtype=np.int64)
        for backward in range(len(PASSES)):
            row = seen.row(plan, calls, backward)
            if row is not None:
                rows.append({"rank": one.rank, "plan": number, **row})
    return rows


class _Seen:
    """What was recorded of a rank: its kernels, what it sent, and the messages whose arrival was seen."""

    def __init__(self, one: RankRecords, messages: Messages) -> None:
        self._one = one
        message, collective = one.table("message"), one.table("collective")
        self._compute = one.table("compute")
        self._sent = message.where(message["sends"] == 1), collective.where(collective["agreement"] == 0)
        came = (messages.target == one.rank) & messages.known
        self._receive = messages.receive.where(came)
        self._moved = np.stack((messages.ready[came], np.maximum(messages.arrived, messages.ready)[came]), axis=1)

    def row(self, plan: Mapping[str, Any], calls: NDArray[np.int64], backward: int) -> Row | None:
        """A pass of a plan, over these calls; None if no kernel ran."""
        name = PASSES[backward]
        kernels = self._compute.where(_of(self._compute, calls, backward))
        if not len(kernels):
            return None
        times = len(np.unique(kernels.data[:, :2], axis=0))
        planned: Row = {key: value * times for key, value in plan["planned"][name].items()}
        time, flops = total(union(kernels.spans())), int(kernels["flops"].sum())
        arrived = _of(self._receive, calls, backward)
        transfer = total(union(self._moved[arrived]))
        sent = sum(int(table["bytes"][_of(table, calls, backward)].sum()) for table in self._sent)
        return {
            "pass": name,
            "times": times,
            "flops": flops,
            "compute": time,
            "flop_rate": _rate(flops, time),
            "planned_flop_rate": _rate(planned["flops"], planned["compute_seconds"] * 1e9),
            "planned_sent": planned["sent"],
            "sent": None if self._one.facts.get("light") else sent,
            "bandwidth": _rate(int(self._receive["bytes"][arrived].sum()), transfer),
            "planned_bandwidth": _rate(planned["received"], planned["link_seconds"] * 1e9),
            **_roofline(plan["planned"][name], _rate(flops, time), _peaks(self._one, plan)),
        }


def _of(table: Table, calls: NDArray[np.int64], backward: int) -> NDArray[np.bool_]:
    """Which rows of a table belong to these calls, in one of their passes."""
    of_calls = np.isin(table["iteration"] * _MANY + table["call"], calls)
    found: NDArray[np.bool_] = of_calls & (table["backward"] == backward)
    return found


def _rate(amount: float, nanoseconds: float) -> float | None:
    """A second; None where no time was seen."""
    return amount * 1e9 / nanoseconds if amount and nanoseconds > 0 else None


def _peaks(one: RankRecords, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    found = [p for p in one.facts.get("peaks", ()) if p["dtype"] == plan["dtype"]]
    return found[0] if found else {"flops": None, "bandwidth": None}


def _roofline(planned: Mapping[str, Any], rate: float | None, peaks: Mapping[str, Any]) -> Row:
    """How the kernels compare with what the device can do; None for what is not known."""
    intensity = planned["flops"] / planned["memory"] if planned["memory"] else None
    ceiling = bound = None
    if intensity and peaks["flops"] and peaks["bandwidth"]:
        ridge = peaks["flops"] / peaks["bandwidth"]
        ceiling = min(peaks["flops"], intensity * peaks["bandwidth"])
        bound = "compute" if intensity >= ridge else "memory"
    return {
        "intensity": intensity,
        "peak": peaks["flops"],
        "memory_bandwidth": peaks["bandwidth"],
        "ceiling": ceiling,
        "bound": bound,
        "of_ceiling": rate / ceiling if rate and ceiling else None,
    }


def balance(ranks: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row per pass: the busiest rank against the mean, by the plan's FLOPs and by the time that kernels took."""
    rows = []
    for name in PASSES:
        flops, times = ([r["passes"][name][key] for r in ranks] for key in ("flops", "compute"))
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
