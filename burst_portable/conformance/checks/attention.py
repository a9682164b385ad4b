"""Forward, LSE and each gradient: masks x layouts x strategies x ranks x heads x dtypes x softcap x sinks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

from burst_portable.conformance.cases import AXES, Case, covering, product
from burst_portable.conformance.checks.attending import case_trial, case_trials
from burst_portable.conformance.trial import Check, Subject, Trial

NAME = "attention"

# A handful in which each mask, layout and strategy still occurs: what a quick look affords.
_QUICK = (
    Case("causal", "zigzag", "ring", 3, "gqa"),
    Case("full", "contiguous", "burst", 4, "mha", softcap=5.0),
    Case("window", "striped", "ring+fetch", 2, "wide_values", sinks=True),
    Case("window_both", "contiguous", "burst+fetch", 3, "mqa"),
    Case("documents", "document_zigzag", "burst", 4, "gqa", sinks=True),
    Case("documents_full", "zigzag", "ulysses", 2, "gqa", softcap=5.0),
    Case("documents", "whole_documents", "ring+fetch", 2, "gqa"),
    Case("documents_window", "striped", "double_ring", 4, "mha"),
    Case("prefix", "zigzag", "double_ring+kv", 4, "gqa"),
    Case("sink_window", "contiguous", "auto", 3, "mha"),
    Case("window", "zigzag", "usp", 4, "gqa", sinks=True),
    Case("documents", "zigzag", "usp+fetch", 4, "mqa"),
    Case("global_window", "zigzag", "burst", 2, "wide_heads", sinks=True),
    Case("block_causal", "striped", "ulysses", 3, "mqa", sinks=True),
    Case("share_question", "zigzag", "ring", 4, "wide_heads"),
    Case("custom", "striped", "burst", 3, "gqa"),
)
_PRODUCT = ("mask", "layout", "strategy", "ranks", "heads")


def axes(ranks: int, strategies: Sequence[str] = AXES["strategy"]) -> Mapping[str, tuple[object, ...]]:
    """Return all choices, up to this many ranks."""
    counts = tuple(n for n in AXES["ranks"] if isinstance(n, int) and n <= ranks)
    return {**AXES, "strategy": tuple(strategies), "ranks": counts, "deterministic": (True, False)}


def trials(subject: Subject) -> Iterator[Trial]:
    """Few cases in which every pair of choices occurs, or a handful; besides, the product of `_PRODUCT`."""
    if subject.effort == "quick":
        yield from case_trials(NAME, subject, _quick(subject))
        return
    every = axes(subject.ranks, subject.strategies)
    cases = covering(every)
    if subject.effort == "full":  # dtypes, softcap, sinks meet each other in pairs only: all of it would take days
        cases += product({axis: every[axis] for axis in _PRODUCT})
    yield from case_trials(NAME, subject, cases)


def _quick(subject: Subject) -> Iterable[Case]:
    if not subject.strategy:
        return _QUICK
    return (replace(case, strategy=label) for case, label in zip(_QUICK, cycle(subject.strategies), strict=False))


def of_case(subject: Subject, case: Case, kernel: str) -> Trial:
    """Any case."""
    return case_trial(NAME, subject, case)


CHECK = Check(NAME, "forward, LSE and each gradient over ranks, against float64", trials, of_case, by_strategy=True)
