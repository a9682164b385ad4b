"""Test whole attentions of extreme numbers: large and small scores, NaN and infinity."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from burst_portable.conformance.base import BackendUnderTest, Outcome, TestCase, make_plain_test, skippable
from burst_portable.conformance.cases import (
    DTYPES,
    VALUES,
    Case,
)
from burst_portable.conformance.checks.comparison import check_of_cases
from burst_portable.conformance.oracle import Answer, make_inputs
from burst_portable.conformance.running import run_case

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


CHECK = check_of_cases(
    "extremes",
    "very large and very small scores; NaN and infinity change only what depends on them",
    extreme_cases,
    _bad_number_tests,
)
