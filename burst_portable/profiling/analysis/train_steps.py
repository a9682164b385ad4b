"""Measure the marked training steps of a session, and the share of attention in them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from burst_portable.profiling.analysis.causes import passes_of
from burst_portable.profiling.event_tables import RankRecords
from burst_portable.profiling.intervals import measure, union
from burst_portable.utils.text import percent, time_text


def training(records: Sequence[RankRecords]) -> dict[str, Any] | None:
    """Return the marked steps that contain attention, and the shortest, median and longest; None without any.

    The duration of a step is that of its slowest rank.
    """
    steps: dict[int, list[dict[str, int]]] = {}
    for one in records:
        for step, row in _train_steps(one):
            steps.setdefault(step, []).append(row)
    if not steps:
        return None
    slowest = {step: max(ranks, key=lambda row: row["duration_ns"]) for step, ranks in sorted(steps.items())}
    durations = {step: row["duration_ns"] for step, row in slowest.items()}
    longest = max(durations, key=durations.__getitem__)
    every = [row for ranks in steps.values() for row in ranks]
    total_ns, attention_ns = (sum(row[name] for row in every) for name in ("duration_ns", "attention_ns"))
    return {
        "shortest_ns": min(durations.values()),
        "median_ns": round(median(durations.values())),
        "longest_ns": durations[longest],
        "longest_step": longest,
        "longest_rank": slowest[longest]["rank"],
        "longest_attention_ns": slowest[longest]["attention_ns"],
        "attention_share": attention_ns / total_ns if total_ns else 0.0,
        "steps": [{"train_step": step, "ranks": steps[step]} for step in slowest],
    }


def _train_steps(one: RankRecords) -> list[tuple[int, dict[str, int]]]:
    """Return (train step, its row) of each marked step that contains attention; other marked steps are left out."""
    with_attention = {int(i) for table in one.tables.values() for i in np.unique(table["train_step"])}
    marked = [row for row in one.train_steps if row[0] in with_attention]
    windows = np.array([row[1:] for row in marked], dtype=np.int64).reshape(-1, 2)
    passes = union(passes_of(one))
    return [
        (row[0], {"rank": one.rank, "duration_ns": row[2] - row[1], "attention_ns": int(inside)})
        for row, inside in zip(marked, measure(passes, windows), strict=True)
    ]


def training_text(data: dict[str, Any]) -> str:
    """Return the durations of training steps as a sentence; "" if none was marked."""
    if not (training := data["training"]):
        return ""
    count, longest, rank = len(training["steps"]), training["longest_ns"], training["longest_rank"]
    of_longest = percent(training["longest_attention_ns"] / longest if longest else 0.0)
    if count == 1:
        step = f"training step {training['longest_step']}, counted from 0,"
        return f"{step} took {time_text(longest)}, {of_longest} of it attention"
    return (
        f"{count} training steps: shortest {time_text(training['shortest_ns'])}, median "
        f"{time_text(training['median_ns'])}, longest {time_text(longest)} (step {training['longest_step']}, counted "
        f"from 0, on rank {rank}); attention takes {of_longest} of the longest, "
        f"{percent(training['attention_share'])} of all"
    )
