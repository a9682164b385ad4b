"""Test whole attentions: cases in which every pair of choices occurs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, cycle

import torch

from burst_portable.conformance.base import BackendUnderTest, Outcome, TestCase, make_plain_test, skippable
from burst_portable.conformance.cases import (
    AXES,
    DTYPES,
    PRODUCT_RANKS,
    Case,
    covering,
    product,
)
from burst_portable.conformance.checks.comparison import check_of_cases, compare
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.processes import run_on_processes, skip_reason
from burst_portable.conformance.running import gather_shards

# Few cases in which each mask, layout and strategy occurs.
_QUICK_CASES = (
    Case("causal", "zigzag", "ring", 3, "gqa"),
    Case("full", "contiguous", "burst", 4, "mha", softcap=5.0),
    Case("window", "striped", "ring(transfer=direct)", 2, "wide_values", sinks=True),
    Case("window_both", "contiguous", "burst(transfer=direct)", 3, "mqa"),
    Case("documents", "document_zigzag", "burst", 4, "gqa", sinks=True),
    Case("documents_full", "zigzag", "ulysses", 2, "gqa", softcap=5.0),
    Case("documents", "whole_documents", "ring(transfer=direct)", 2, "gqa"),
    Case("documents_window", "striped", "double_ring", 4, "mha"),
    Case("prefix", "zigzag", "double_ring(backward_circulates=kv)", 4, "gqa"),
    Case("sink_window", "contiguous", "auto", 3, "mha"),
    Case("window", "zigzag", "usp", 4, "gqa", sinks=True),
    Case("documents", "zigzag", "usp(backward_circulates=q, transfer=direct)", 4, "mqa"),
    Case("global_window", "zigzag", "burst", 2, "wide_heads", sinks=True),
    Case("block_causal", "striped", "ulysses", 3, "mqa", sinks=True),
    Case("share_question", "zigzag", "ring", 4, "wide_heads"),
    Case("block_sparse", "dispatched", "dispatch", 3, "gqa"),
    Case("causal_block_sparse", "zigzag", "burst(transfer=direct)", 4, "gqa"),
    Case("custom", "striped", "burst", 3, "gqa"),
    Case("causal", "striped", "usp", 4, "gqa", dropout=0.3),
    Case("causal", "zigzag", "ring", 1, "gqa"),
    Case("window", "contiguous", "burst", 5, "mqa"),
    Case("documents", "striped", "all_gather", 7, "gqa"),
)
_PRODUCT = ("mask", "layout", "strategy", "ranks", "heads")


def axes(ranks: int, strategies: Sequence[str] = AXES["strategy"]) -> Mapping[str, tuple[object, ...]]:
    """Return all choices, up to this many ranks."""
    counts = tuple(n for n in AXES["ranks"] if n <= ranks)
    return {**AXES, "strategy": tuple(strategies), "ranks": counts, "deterministic": (True, False)}


def attention_cases(target: BackendUnderTest) -> Iterable[Case]:
    """Return few cases in which every pair of choices occurs, or a handful; for "full", also a product of choices."""
    if target.coverage == "quick":
        labels = cycle(target.strategies)
        usual = [replace(case, strategy=next(labels)) for case in _QUICK_CASES] if target.strategy else _QUICK_CASES
        return chain(usual, (replace(case, dtype=dtype) for dtype in _more_dtypes(target) for case in usual))
    every = axes(target.ranks, target.strategies)
    cases = covering(every)
    if target.coverage == "full":  # dtypes, softcap and sinks only in pairs: the full product would take days
        counts = tuple(n for n in PRODUCT_RANKS if n <= target.ranks)
        cases += product({**{axis: every[axis] for axis in _PRODUCT}, "ranks": counts})
    return cases


def _more_dtypes(target: BackendUnderTest) -> Iterator[torch.dtype]:
    """Yield dtypes in which calls use kernels that no call uses in float32, for example kernels for 16 bits only."""
    used = _chosen(target, torch.float32)
    for dtype in DTYPES.values():
        if (names := _chosen(target, dtype)) - used:
            used |= names
            yield dtype


def _chosen(target: BackendUnderTest, dtype: torch.dtype) -> set[str]:
    """Return the names of the kernels that calls of a dtype use, with small and with usual heads."""
    names = set()
    for heads in ("gqa", "wide_heads"):
        # All tests are listed before the first one runs: an exception here would end them all.
        with suppress(Exception):
            names.add(target.choose(Case(heads=heads, dtype=dtype).make_call(target.device.type)).name)
    return names


def _process_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield a test of the tested strategy, whose plans must be equal in other processes, too."""
    if target.strategy and target.coverage != "quick" and target.ranks >= _PROCESSES:
        yield make_plain_test("attention", f"{_PROCESSES}-processes", _run_in_processes, target)


@skippable
def _run_in_processes(target: BackendUnderTest) -> Outcome:
    if reason := skip_reason(target, _PROCESSES):
        return Outcome(skipped=reason)
    case = Case(strategy=target.strategies[0], ranks=_PROCESSES)
    if reason := case.conflict():
        return Outcome(skipped=reason)
    return compare(case, make_inputs(case), gather_shards(run_on_processes(target, case), case.make_layout()))


_PROCESSES = 2
CHECK = check_of_cases(
    "attention",
    "forward, LSE and each gradient over ranks, against float64",
    attention_cases,
    _process_tests,
    by_strategy=True,
)
