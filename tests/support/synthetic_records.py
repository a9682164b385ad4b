"""Make synthetic records: a few with known answers, and any number of ranks and steps."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import burst_portable as bp
from burst_portable.backends.selection import load
from burst_portable.planning.plans import Plan
from burst_portable.profiling.ablation import Ablation
from burst_portable.profiling.event_tables import COLUMNS, NEVER, KernelTrace, RankRecords, Table
from burst_portable.profiling.plan_facts import PlanFacts


class Maker:
    """Make the records of one rank, row by row. Times are in microseconds."""

    def __init__(self, rank: int, host: str = "host") -> None:
        self.rank, self.host = rank, host
        self._rows: dict[str, list[tuple[int, ...]]] = {kind: [] for kind in COLUMNS}
        self.train_step = self.attention_call = 0
        self.train_steps: list[tuple[int, int, int]] = []
        self.core_waits: list[tuple[int, int]] = []
        self._kernels: list[tuple[int, ...]] = []

    def compute(self, step: int, start: float, end: float, flops: int = 1000, backward: int = 0) -> None:
        place = self.train_step, self.attention_call, backward, step
        owner = step % 8
        self._rows["compute"].append((*place, self.rank, owner, flops // 10, 1, flops, _ns(start), _ns(end)))

    def message(
        self, step: int, peer: int, *, sends: bool, posted: float, start: float, end: float, size: int = 1000,
        owner: int = 0, backward: int = 0, issued: int | None = None, arrived: float | None = None,
        left: float | None = None, result: bool = False,
    ) -> None:  # fmt: skip
        place = self.train_step, self.attention_call, backward, step
        issued = max(0, step - 1) if issued is None else issued
        what = issued, int(sends), peer, owner, int(result), size
        there = NEVER if arrived is None else _ns(arrived)
        posting = _ns(posted), _ns(posted if left is None else left)
        self._rows["message"].append((*place, *what, *posting, there, _ns(start), _ns(end)))

    def collective(self, ordinal: int, start: float, end: float, backward: int = 0, *, agreement: bool = True) -> None:
        place = self.train_step, self.attention_call, backward, 0
        self._rows["collective"].append((*place, ordinal, int(agreement), 24, _ns(start), _ns(end)))

    def copy(self, step: int, start: float, end: float, backward: int = 0) -> None:
        self._rows["copy"].append((self.train_step, self.attention_call, backward, step, _ns(start), _ns(end)))

    def traced(self, step: int, start: float, end: float, backward: int = 0) -> None:
        """Add the traced kernel of a step."""
        self._kernels.append((self.train_step, self.attention_call, backward, step, 0, 0, _ns(start), _ns(end)))

    def mark(self, start: float, end: float, core_wait: float | None = None) -> None:
        """End a training step and begin the next."""
        if core_wait is not None:
            self.core_waits.append((self.train_step, _ns(core_wait)))
        self.train_steps.append((self.train_step, _ns(start), _ns(end)))
        self.train_step += 1

    def records(self, plan: Plan | None = None) -> RankRecords:
        tables = {kind: Table.of(kind, rows) for kind, rows in self._rows.items()}
        plans = [PlanFacts(plan, self.rank).describe(load("cpu"))] if plan else []
        calls = [(0, 0, 0)] if plan else []
        traced = KernelTrace.of([("q0 x kv0", "_forward")], self._kernels, on_device=True) if self._kernels else None
        return RankRecords(
            self.rank,
            self.host,
            "host clock",
            tables,
            plans,
            calls,
            {"device": "cpu"},
            train_steps=self.train_steps,
            kernel_trace=traced,
            core_waits=self.core_waits,
        )


def _ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def ring(ranks: int, steps: int, *, slow: Sequence[int] = ()) -> list[RankRecords]:
    """Return records of a ring: 100 µs kernels (300 on slow ranks), 30 µs late, 20 µs of transfer."""
    makers = [Maker(rank) for rank in range(ranks)]
    for one in makers:
        at = 0.0
        took = 300 if one.rank in slow else 100
        for step in range(steps):
            begin = at
            if step:
                peer = (one.rank - 1) % ranks
                one.message(step, peer, sends=False, posted=at - took, start=at, end=at + 50, owner=step % ranks)
                at += 50
            one.compute(step, at, at + took)
            at += took
            if step < steps - 1:
                posted = begin + 30 if step else 0
                target = (one.rank + 1) % ranks
                one.message(
                    step, target, sends=True, posted=posted, start=at, end=at + 1, owner=(step + 1) % ranks, issued=step
                )
    plan = bp.plan(seq_len=64 * ranks, ranks=ranks, heads=2, head_dim=16, itemsize=4, strategy="ring")
    return [one.records(plan) for one in makers]


def with_ablation(records: Sequence[RankRecords]) -> list[RankRecords]:
    """Add an ablation to each rank: 10 ms rest, 3 ms messages, 5 ms kernels, 2 ms of both at once."""
    facts = Ablation(0.020, 0.017, 0.015, 0.010).facts()
    return [replace(one, facts={**one.facts, "ablation": facts}) for one in records]


_QUANTILES = (0.0, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
_DELAYS = {
    "agreement": (0, 310, 410, 3290, 7490, 13730, 22400, 30330, 52810),
    "message": (0, 10, 20, 30, 1050, 5520, 11020, 15580, 30680),
    "kernel": (0, 0, 0, 30, 150, 7690, 20340, 31950, 80450),
    "outside": (0, 310, 620, 1570, 3710, 8110, 15970, 25310, 62690),
}
"""Quantiles of delays in microseconds, measured on two gloo processes that shared two cores with five processes."""


def training_run(
    seed: int, ranks: int, steps: int = 8, fault: str = "", share: float = 0.0, *, shared_cores: bool = False
) -> list[RankRecords]:
    """Return records of marked steps of two layers on a ring, with random times as on a machine that is not busy.

    Kernels and work outside of attention vary by 3 %, messages by 20 %; one in 200 takes half as long again, as if the
    host were interrupted. Messages are hidden. A fault on rank 1 takes `share` of a step: "late rank", "slow link" (to
    rank 2 or 0), "slow rank" (kernels), "slow host", or on all ranks "agreement", or "communication" (a collective).
    With `shared_cores`, each of these also waits for a core, with the distribution of `_DELAYS`.
    """
    draw = random.Random(seed)

    def vary(mean: float, sigma: float = 0.03) -> float:
        return mean * draw.lognormvariate(0, sigma) * (1.5 if draw.random() < 0.005 else 1)

    waited = [0.0] * ranks  # for a core, in this step

    def delay(kind: str, rank: int) -> float:
        if not shared_cores:
            return 0.0
        at = draw.uniform(0, _QUANTILES[-1])
        i = bisect_right(_QUANTILES[:-1], at)
        (low, high), (a, b) = _QUANTILES[i - 1 : i + 1], _DELAYS[kind][i - 1 : i + 1]
        took = a + (b - a) * (at - low) / (high - low)
        waited[rank] += took
        return took

    outside, kernel, message, ask, launch = 20_000.0, 24_000.0 / ranks, 8_000.0 / ranks, 150.0, 30.0
    passes = [(layer, backward) for backward in (0, 1) for layer in (0, 1)]
    step_time = len(passes) * (outside / 2 + ranks * kernel)
    planted = share * step_time / (1 - share) / len(passes)  # microseconds of a pass
    makers, at = [Maker(rank) for rank in range(ranks)], [draw.uniform(0, 300) for _ in range(ranks)]
    for _ in range(steps):
        began = list(at)
        waited[:] = [0.0] * ranks
        for layer, backward in passes:
            for rank, one in enumerate(makers):
                at[rank] += vary(outside / 2) + delay("outside", rank)
                at[rank] += planted if fault == "late rank" and rank == 1 else 0
                one.attention_call = layer
            agreed = max(at) + vary(ask, 0.2) + (planted if fault in ("agreement", "communication") else 0)
            for rank, one in enumerate(makers):
                end = agreed + delay("agreement", rank)
                one.collective(0, at[rank], end, backward, agreement=fault != "communication")
                at[rank] = end + vary(launch, 0.2)
            for step in range(ranks):
                posted = list(at)
                for rank, one in enumerate(makers):
                    took = (
                        vary(kernel)
                        + delay("kernel", rank)
                        + (planted / ranks if fault == "slow rank" and rank == 1 else 0)
                    )
                    one.compute(step, at[rank], at[rank] + took, 1_000_000, backward)
                    at[rank] += took
                for rank, one in enumerate(makers) if step < ranks - 1 else ():
                    source, target = (rank - 1) % ranks, (rank + 1) % ranks
                    took = vary(message, 0.2)
                    if fault == "slow link" and source == 1:
                        took = kernel + planted / (ranks - 1)
                    end = max(at[rank] + vary(2, 0.2), max(posted[rank], posted[source]) + took)
                    end += delay("message", rank)
                    both = {"posted": posted[rank], "backward": backward, "issued": step}
                    one.message(
                        step + 1, source, sends=False, start=at[rank], end=end, owner=(rank - step - 1) % ranks, **both
                    )
                    one.message(
                        step + 1, target, sends=True, start=end, end=end + 1, owner=(rank - step) % ranks, **both
                    )
                    slow = planted / (ranks - 1) if fault == "slow host" and rank == 1 else 0
                    at[rank] = end + vary(launch, 0.2) + slow
        for rank, one in enumerate(makers):
            one.mark(began[rank], at[rank], waited[rank] if shared_cores else None)
    return [one.records() for one in makers]
