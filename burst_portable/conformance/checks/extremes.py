"""Very large and very small scores, and NaN or infinity in the inputs, which must stay where they belong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from burst_portable.conformance.cases import DTYPES, VALUES, Case
from burst_portable.conformance.checks.attending import case_trial, case_trials
from burst_portable.conformance.oracle import Answer, make_inputs
from burst_portable.conformance.running import run_case
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain
from burst_portable.errors import UnsupportedError

NAME = "extremes"
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
ROW = 11  # where something bad is put: batch row 0, position ROW, head 0
_CASE = Case(mask="causal", layout="zigzag", strategy="ring", ranks=2, heads="gqa")


def cases(effort: str) -> Iterator[Case]:
    """Scores of every kind."""
    for values in VALUES[1:]:
        yield Case(values=values, ranks=2, strategy="burst")
        if effort != "quick":
            yield Case(values=values, ranks=3, mask="documents", strategy="ring", sinks=True)
            for dtype in DTYPES.values():
                yield Case(values=values, ranks=4, dtype=dtype, mask="full", layout="striped", strategy="ring")


def trials(subject: Subject) -> Iterator[Trial]:
    """Large and small scores as cases; each bad number in each input."""
    yield from case_trials(NAME, subject, cases(subject.effort))
    for where in ("q", "k", "v", "dout"):
        for bad in ("nan",) if subject.effort == "quick" else BAD:
            for ranks in (1, 2):
                if ranks <= subject.ranks:
                    yield plain(NAME, f"{bad}-in-{where}-{ranks}ranks", _bad, subject, where, BAD[bad], ranks)


def _bad(subject: Subject, where: str, value: float, ranks: int) -> Outcome:
    """A bad number shows in what depends on it, and leaves other batch rows, heads and queries as they were."""
    case = replace(_CASE, ranks=ranks)
    x = make_inputs(case)
    tensor: Tensor = getattr(x, where).clone()
    tensor[0, ROW, 0, 0] = value
    try:
        clean, dirty = run_case(subject, case, x), run_case(subject, case, replace(x, **{where: tensor}))
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    return Outcome(wrong=_spilt(case, clean, dirty, where) or _hidden(dirty, where))


def _spilt(case: Case, clean: Answer, dirty: Answer, where: str) -> str:
    """Which numbers changed that must not: of other batch rows, of heads with other keys, of other queries."""
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
    if where in ("q", "dout"):
        others = torch.arange(case.length) != ROW
        for name in ("out", "dq"):
            if not torch.equal(getattr(clean, name)[:, others], getattr(dirty, name)[:, others]):
                return f"{name} of another query changed"
    return ""


def _hidden(dirty: Answer, where: str) -> str:
    """What should show the bad number and does not: an answer that looks right is worse than none."""
    if where == "dout":
        shows = {"dv": dirty.dv[0, 0, 0, 0], "dq": dirty.dq[0, ROW, 0, 0]}
    elif where == "v":
        shows = {"out": dirty.out[0, ROW, 0, 0]}
    else:  # the score of the query ROW with the key ROW is NaN or infinite; -inf alone hides a key and is not a fault
        shows = {"dk": dirty.dk[0, 0, 0, 0]} if where == "q" else {"dq": dirty.dq[0, ROW, 0, 0]}
    silent = [name for name, value in shows.items() if bool(value.isfinite())]
    return f"{silent[0]} is finite, and depends on a number that is not" if silent else ""


def of_case(subject: Subject, case: Case, kernel: str) -> Trial:
    """Any case."""
    return case_trial(NAME, subject, case)


CHECK = Check(NAME, "very large and very small scores; NaN and infinity stay where they belong", trials, of_case)
