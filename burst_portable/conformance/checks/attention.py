"""Test whole attentions: run a case and compare every quantity with the oracle.

Five groups: choices in pairs, sizes, fully masked rows, extreme numbers, and determinism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain, cycle

import torch
from torch import Tensor

from burst_portable.conformance import oracle
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test, skippable
from burst_portable.conformance.cases import (
    AXES,
    DTYPES,
    LENGTH,
    MEMORY,
    PRODUCT_RANKS,
    VALUES,
    Case,
    covering,
    product,
)
from burst_portable.conformance.checks.plans import find_plan_error
from burst_portable.conformance.oracle import Answer, Inputs, expected, make_inputs
from burst_portable.conformance.processes import run_on_processes, skip_reason
from burst_portable.conformance.running import gather_shards, run_case
from burst_portable.strategies.registry import OURS, strategy_name

Run = Callable[[BackendUnderTest, Case], Outcome]


@skippable
def run_and_compare(target: BackendUnderTest, case: Case) -> Outcome:
    """Compare out, LSE and every gradient with float64; fully masked rows must be exact.

    The plan of a tested strategy, and of one of another package, is checked first: ranks with a wrong route would wait
    until the timeout.
    """
    x = make_inputs(case)
    examined = target.strategy or strategy_name(case.strategy) not in OURS
    if examined and (wrong := find_plan_error(case, target.device.type)):
        return Outcome(wrong=wrong)
    return compare(case, x, run_case(target, case, x))


def compare(case: Case, x: Inputs, answer: Answer, rounding: float = 0.0) -> Outcome:
    """Compare an answer with the oracle's. `rounding`: see `planning.call.KernelTraits`."""
    exact, plain = expected(case, x)
    extra = 0.0 if case.values == "usual" else oracle.error_of_weights(exact, case.dtype, rounding)
    errors = oracle.errors(answer, exact, plain, case.dtype, extra, rounding)
    too_large = Outcome(errors).too_large
    cause = find_cause(answer, exact, too_large) or find_cause_in_heads(answer, case, x, too_large)
    return Outcome(errors, find_masked_error(answer, exact) or cause)


def find_cause(answer: Answer, exact: Answer, too_large: Container[str]) -> str:
    """Return the likely cause of errors that are too large, if they look like one of a few known bugs; else ""."""
    if "lse" in too_large and (text := _find_lse_cause(answer.lse, exact.lse)):
        return text
    if "out" in too_large and answer.out.itemsize > 2:
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(answer.out, answer.out.to(dtype).to(answer.out.dtype)):
                return f"out looks like it was rounded to {str(dtype).removeprefix('torch.')}"
    if "out" in too_large or "lse" in too_large:
        return ""  # gradients depend on them
    if _are_swapped(answer, exact):
        return "dk and dv look swapped"
    for name, found in answer.quantities().items():
        if name in too_large and not found.any():
            return f"{name} is 0 everywhere: it was not written"
        if name in too_large and oracle.relative_error(2 * found, exact.quantities()[name]) < _SIMILAR:
            return f"{name} is half of the exact value: it may be written instead of added"
    return ""


def find_cause_in_heads(answer: Answer, case: Case, x: Inputs, too_large: Container[str]) -> str:
    """Return whether query head h seems to read K/V head h % Hkv, as if K and V were tiled over heads; else ""."""
    heads, kv_heads = x.q.shape[2], x.k.shape[2]
    if "lse" not in too_large or kv_heads in (1, heads):
        return ""
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()  # heads with equal remainders are a group
    sinks = None if x.sinks is None else x.sinks[order]
    grouped, _ = expected(case, replace(x, q=x.q[:, :, order], dout=x.dout[:, :, order], sinks=sinks))
    if oracle.relative_error(answer.lse, grouped.lse[:, order.argsort()]) < _SIMILAR:
        group = heads // kv_heads
        return f"query head h looks as if it read K/V head h % {kv_heads}; it must read h // {group}"
    return ""


_SIMILAR = 0.02  # relative difference up to which numbers look alike


def _are_swapped(answer: Answer, exact: Answer) -> bool:
    """Return whether dk looks like the exact dv, and dv like the exact dk."""
    pairs = ((answer.dk, exact.dv), (answer.dv, exact.dk))
    return all(oracle.relative_error(found, other) < _SIMILAR for found, other in pairs)


def _find_lse_cause(lse: Tensor, exact: Tensor) -> str:
    """Return whether the LSE looks like a logarithm in base 2, or like the exact one plus a constant; else ""."""
    finite = exact.isfinite() & lse.isfinite()
    found, expected = lse[finite].double(), exact[finite].double()
    if len(found) < 2:
        return ""
    difference = found - expected
    offset = float(difference.mean())
    near = _SIMILAR * float(difference.abs().max())
    if float((difference - offset).abs().max()) < near:
        counted = round(math.exp(min(offset, 8.0)))
        repeated = counted > 1 and abs(offset - math.log(counted)) < near
        hint = f", as if each key were counted {counted} times" if repeated else ""
        return f"lse is off by the same number in every row: {offset:.2g}{hint}"
    if float((found - expected / math.log(2)).abs().max()) < near:
        return "lse looks like base 2; it must be the natural logarithm"
    return ""


def find_masked_error(answer: Answer, exact: Answer) -> str:
    """Return what is wrong in fully masked rows and in keys that no row sees, which must be exactly 0."""
    masked = exact.lse.transpose(1, 2) == float("-inf")
    unseen = (exact.dv == 0).all(-1) & (exact.dk == 0).all(-1)
    wrong = {
        "out of a fully masked row is not 0": answer.out[masked],
        "LSE of a fully masked row is not -inf": answer.lse.transpose(1, 2)[masked] != float("-inf"),
        "dq of a fully masked row is not 0": answer.dq[masked],
        "dv of a key that no row sees is not 0": answer.dv[unseen],
    }
    return next((text for text, elements in wrong.items() if bool(elements.any())), "")


def make_case_test(check: str, target: BackendUnderTest, case: Case, run: Run = run_and_compare) -> TestCase:
    """Return the test of one case."""
    return TestCase(check, case.spec(), lambda other: run(target, other), case)


def make_case_tests(
    check: str, target: BackendUnderTest, cases: Iterable[Case], run: Run = run_and_compare
) -> Iterator[TestCase]:
    """Yield the tests of the cases that are possible and have at most `target.ranks` ranks."""
    for case in dict.fromkeys(cases):
        if case.ranks <= target.ranks and case.possible():
            yield make_case_test(check, target, case, run)


def check_of_cases(
    name: str,
    title: str,
    cases: Callable[[BackendUnderTest], Iterable[Case]],
    more: Callable[[BackendUnderTest], Iterable[TestCase]] = lambda target: (),
    *,
    by_strategy: bool = False,
) -> Check:
    """Return a group of tests of cases, followed by `more`. `--case` can run any other case in it too."""

    def tests(target: BackendUnderTest) -> Iterator[TestCase]:
        yield from make_case_tests(name, target, cases(target))
        yield from more(target)

    return Check(name, title, tests, lambda target, case, kernel: make_case_test(name, target, case), by_strategy)


# ---------------------------------------------------------------------------------------------------- choices in pairs


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
ATTENTION = check_of_cases(
    "attention",
    "forward, LSE and each gradient over ranks, against float64",
    attention_cases,
    _process_tests,
    by_strategy=True,
)


# --------------------------------------------------------------------------------------------------------------- sizes

HEAD_SIZES = (16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
GROUPS = ("4x4", "4x2", "6x3", "6x2", "8x1", "5x5", "1x1")
LENGTHS = (2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 127, 130)


def size_cases(target: BackendUnderTest) -> Iterator[Case]:
    """Yield each size with 16 and with 32 bits, on an uneven number of ranks; few of them for "quick"."""
    quick = target.coverage == "quick"
    for size in (16, 40, 80) if quick else HEAD_SIZES:
        for dtype in (torch.float32,) if quick else DTYPES.values():
            yield Case(ranks=2, heads=f"4x2x{size}x{size}", dtype=dtype, batch=1, length=67, strategy="burst")
    for group in ("6x2",) if quick else GROUPS:
        yield Case(ranks=3, heads=f"{group}x32x32", dtype=torch.float32, mask="full", layout="striped")
        yield Case(ranks=2, heads=f"{group}x32x48", dtype=torch.bfloat16, strategy="burst")
    for length in (3, 17) if quick else LENGTHS:
        for layout in ("zigzag",) if quick else ("contiguous", "zigzag", "striped"):
            for ranks in (3,) if quick else (1, 3, 8):
                yield Case(length=length, layout=layout, ranks=ranks, strategy="burst", heads="4x2x16x16")
    for memory in MEMORY:
        for strategy in ("ring",) if quick else ("ring", "burst", "ulysses"):
            yield Case(ranks=2, memory=memory, strategy=strategy, dtype=torch.float32, length=LENGTH)
    for batch in () if quick else (1, 3, 5):
        yield Case(ranks=2, batch=batch, mask="documents", strategy="burst")


SIZES = check_of_cases("sizes", "dtypes, head sizes, shared K/V heads, ragged lengths, strides", size_cases)


# --------------------------------------------------------------------------------------------------- fully masked rows


def fully_masked_cases(target: BackendUnderTest) -> Iterator[Case]:
    """Yield masks with fully masked rows, for every strategy and dtype."""
    quick = target.coverage == "quick"
    for strategy in ("ring", "burst") if quick and not target.strategy else target.strategies:
        yield Case(mask="fully_masked_rows", strategy=strategy, ranks=2)
        yield Case(mask="custom", strategy=strategy, layout="striped", ranks=3, sinks=strategy == "burst")
    for dtype in () if quick or target.strategy else DTYPES.values():
        for ranks in (1, 2, 3, 8):
            yield Case(mask="fully_masked_rows", dtype=dtype, ranks=ranks, layout="contiguous", length=LENGTH)


FULLY_MASKED = check_of_cases(
    "fully_masked", "fully masked rows: out 0, LSE -inf, gradients 0", fully_masked_cases, by_strategy=True
)


# ----------------------------------------------------------------------------------------------------- extreme numbers

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
BAD_ROW = 11  # the bad number is at batch row 0, position BAD_ROW, head 0
_BAD_CASE = Case(mask="causal", layout="zigzag", strategy="ring", ranks=2, heads="gqa")


def extreme_cases(target: BackendUnderTest) -> Iterator[Case]:
    """Yield cases of large and of small scores."""
    for values in VALUES[1:]:
        yield Case(values=values, ranks=2, strategy="burst")
        if target.coverage != "quick":
            yield Case(values=values, ranks=3, mask="documents", strategy="ring", sinks=True)
            for dtype in DTYPES.values():
                yield Case(values=values, ranks=4, dtype=dtype, mask="full", layout="striped", strategy="ring")


def _bad_number_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield each bad number in each input."""
    for name in ("q", "k", "v", "dout"):
        for bad in ("nan",) if target.coverage == "quick" else BAD:
            for ranks in (1, 2):
                if ranks <= target.ranks:
                    title = f"{bad}-in-{name}-{ranks}ranks"
                    yield make_plain_test("extremes", title, _attend_bad, target, name, BAD[bad], ranks)


@skippable
def _attend_bad(target: BackendUnderTest, bad_input: str, value: float, ranks: int) -> Outcome:
    """Check that a bad number changes everything that depends on it, and no other batch row, head or query."""
    case = replace(_BAD_CASE, ranks=ranks)
    x = make_inputs(case)
    tensor: Tensor = getattr(x, bad_input).clone()
    tensor[0, BAD_ROW, 0, 0] = value
    clean, dirty = run_case(target, case, x), run_case(target, case, replace(x, **{bad_input: tensor}))
    return Outcome(wrong=_find_changed(case, clean, dirty, bad_input) or _find_hidden(dirty, bad_input))


def _find_changed(case: Case, clean: Answer, dirty: Answer, bad_input: str) -> str:
    """Return which independent numbers changed: those of other batch rows, other keys' heads or other queries."""
    group = case.sizes[0] // case.sizes[1]
    heads = {"out": group, "dq": group, "dk": 1, "dv": 1}
    for name, first in heads.items():
        before, after = getattr(clean, name), getattr(dirty, name)
        if not torch.equal(before[1:], after[1:]):
            return f"{name} of another batch row changed"
        if not torch.equal(before[:, :, first:], after[:, :, first:]):
            return f"{name} of a head with other keys changed"
    if not torch.equal(clean.lse[:, group:], dirty.lse[:, group:]):
        return "LSE of a head with other keys changed"
    if bad_input in ("q", "dout"):
        rows = torch.arange(case.length) != BAD_ROW
        for name in ("out", "dq"):
            if not torch.equal(getattr(clean, name)[:, rows], getattr(dirty, name)[:, rows]):
                return f"{name} of another query changed"
    return ""


def _find_hidden(dirty: Answer, bad_input: str) -> str:
    """Return which dependent number is finite: a result that only looks right is worse than none."""
    if bad_input == "dout":
        shows = {"dv": dirty.dv[0, 0, 0, 0], "dq": dirty.dq[0, BAD_ROW, 0, 0]}
    elif bad_input == "v":
        shows = {"out": dirty.out[0, BAD_ROW, 0, 0]}
    else:  # the score of this query with this key is NaN or infinite; -inf alone hides a key, which is correct
        shows = {"dk": dirty.dk[0, 0, 0, 0]} if bad_input == "q" else {"dq": dirty.dq[0, BAD_ROW, 0, 0]}
    finite = [name for name, value in shows.items() if bool(value.isfinite())]
    return f"{finite[0]} is finite, but depends on a number that is not" if finite else ""


EXTREMES = check_of_cases(
    "extremes",
    "very large and very small scores; NaN and infinity change only what depends on them",
    extreme_cases,
    _bad_number_tests,
)


# --------------------------------------------------------------------------------------------------------- determinism

GROWTH = 1.25
"""Largest allowed ratio of an error to the error on fewer ranks."""


def _determinism_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield each case three times, and each dtype over a growing number of ranks."""
    quick = target.coverage == "quick"
    for case in (
        Case(ranks=4, strategy="burst", mask="documents", layout="document_zigzag"),
        Case(ranks=3, strategy="ring", dtype=torch.bfloat16),
        Case(ranks=2, strategy="ulysses", heads="mqa"),
    ):
        if case.ranks <= target.ranks:
            yield make_plain_test("determinism", f"same-bits-{case}", _repeat, target, case)
    for dtype in ("bfloat16",) if quick else ("float32", "bfloat16", "float16"):
        for strategy in ("burst",) if quick else ("ring", "burst"):
            title = f"flat-error-{strategy}-{dtype}"
            yield make_plain_test("determinism", title, _growth, target, DTYPES[dtype], strategy)


@skippable
def _repeat(target: BackendUnderTest, case: Case) -> Outcome:
    x = make_inputs(case)
    first, *repeats = (run_case(target, case, x) for _ in range(3))
    for repeat in repeats:
        if name := first.differs(repeat):
            return Outcome(wrong=f"{name} has other bits in a repeated run with deterministic=True")
    return Outcome()


@skippable
def _growth(target: BackendUnderTest, dtype: torch.dtype, strategy: str) -> Outcome:
    return compare_growth(target, dtype, strategy, lambda case, x: run_case(target, case, x))


def compare_growth(
    target: BackendUnderTest, dtype: torch.dtype, strategy: str, run: Callable[[Case, Inputs], Answer]
) -> Outcome:
    """Check that errors do not grow with the number of ranks. Errors below rounding do not count."""
    counts = (2, 4, 8, 16, 32, 64) if target.coverage == "full" else (2, 32)
    smallest: dict[str, float] = {}
    worst: dict[str, tuple[float, float]] = {}
    for ranks in counts:
        case = Case(ranks=ranks, strategy=strategy, dtype=dtype, length=256, batch=1, heads="2x1x64x64")
        x = make_inputs(case)
        x = replace(x, q=x.q * 4)  # scores with the spread of trained attention
        exact, _ = expected(case, x)
        for name, value in run(case, x).quantities().items():
            error = oracle.relative_error(value, exact.quantities()[name])
            least = smallest[name] = min(error, smallest.get(name, error))
            allowed = GROWTH * max(least, oracle.FLOOR[dtype] / 8)
            worst[name] = max(worst.get(name, (0.0, allowed)), (error, allowed))
    return Outcome(worst)


DETERMINISM = Check(
    "determinism", "the same bits every time; an error that is flat in the number of ranks", _determinism_tests
)
