"""How long training steps took, from mark to mark, and what part of that was attention.

All of a step counts: the rest of the model, the optimizer, loading data. So a step that is long for another reason than
attention is seen here, and nowhere else in a report.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from burst_portable.profiling.causes import passes_of
from burst_portable.profiling.intervals import union, within
from burst_portable.profiling.record import RankRecords
from burst_portable.units import percent, time_text


def training(records: Sequence[RankRecords]) -> dict[str, Any] | None:
    """The steps that were marked, with attention in them, and the shortest, middle and longest; None without any.

    A step takes as long as it takes the rank that takes longest.
    """
    steps: dict[int, list[dict[str, int]]] = {}
    for one in records:
        for iteration, row in _of_rank(one):
            steps.setdefault(iteration, []).append(row)
    if not steps:
        return None
    took = {iteration: max(ranks, key=lambda row: row["duration"]) for iteration, ranks in sorted(steps.items())}
    longest = max(took, key=lambda iteration: took[iteration]["duration"])
    durations = [row["duration"] for row in took.values()]
    every = [row for ranks in steps.values() for row in ranks]
    whole, inside = (sum(row[name] for row in every) for name in ("duration", "attention"))
    return {
        "shortest": min(durations),
        "median": round(median(durations)),
        "longest": took[longest]["duration"],
        "longest_step": longest,
        "longest_rank": took[longest]["rank"],
        "longest_attention": took[longest]["attention"],
        "attention_share": inside / whole if whole else 0.0,
        "steps": [{"iteration": iteration, "ranks": steps[iteration]} for iteration in took],
    }


def _of_rank(one: RankRecords) -> list[tuple[int, dict[str, int]]]:
    """(training step, its row) of each that was marked and has attention: marks may stand around other things too."""
    having = {int(i) for table in one.tables.values() for i in np.unique(table["iteration"])}
    marked = [row for row in one.marked if row[0] in having]
    windows = np.array([row[1:] for row in marked], dtype=np.int64).reshape(-1, 2)
    passes = union(np.array(passes_of(one), dtype=np.int64).reshape(-1, 2))
    return [
        (row[0], {"rank": one.rank, "duration": row[2] - row[1], "attention": int(inside)})
        for row, inside in zip(marked, within(passes, windows), strict=True)
    ]


def training_text(data: dict[str, Any]) -> str:
    """How long training steps took, in a sentence; "" where none was marked."""
    if not (told := data.get("training")):
        return ""
    count, longest, rank = len(told["steps"]), told["longest"], told["longest_rank"]
    of_longest = percent(told["longest_attention"] / longest if longest else 0.0)
    if count == 1:
        return f"training step {told['longest_step']} took {time_text(longest)}, {of_longest} of it attention"
    return (
        f"{count} training steps: shortest {time_text(told['shortest'])}, median {time_text(told['median'])}, longest "
        f"{time_text(longest)} (step {told['longest_step']}, counted from 0, on rank {rank}); attention "
        f"takes {of_longest} of the longest, {percent(told['attention_share'])} of all"
    )
