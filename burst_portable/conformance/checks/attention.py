"""Check whole attentions: run a case, compare every quantity with the oracle.

Five groups: choices in pairs, sizes, rows that see nothing, extreme numbers, and steadiness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle

import torch
from torch import Tensor

from burst_portable.conformance.cases import (
    AXES,
    DTYPES,
    LENGTH,
    MEMORY,
    VALUES,
    Case,
    covering,
    product,
)
from burst_portable.conformance.oracle import (
    FLOOR,
    Answer,
    Inputs,
    error_of_weights,
    errors,
    expected,
    make_inputs,
    relative_error,
)
from burst_portable.conformance.running import run_case
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain
from burst_portable.errors import UnsupportedError

Attempt = Callable[[Subject, Case], Outcome]


def attempt(subject: Subject, case: Case) -> Outcome:
    """Compare out, LSE and every gradient with float64; rows that see nothing exactly."""
    x = make_inputs(case)
    try:
        answer = run_case(subject, case, x)
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    return judged(case, x, answer)


def judged(case: Case, x: Inputs, answer: Answer, rounding: float = 0.0) -> Outcome:
    """Compare an answer with the oracle's. `rounding`: see `kernels.base.Kernel`."""
    exact, plain = expected(case, x)
    extra = 0.0 if case.values == "usual" else error_of_weights(exact, case.dtype, rounding)
    return Outcome(errors(answer, exact, plain, case.dtype, extra, rounding), fully_masked_tokens(answer, exact))


def fully_masked_tokens(answer: Answer, exact: Answer) -> str:
    """Say what is wrong with rows that see nothing and with keys that no row sees: they must be exactly 0."""
    blind = exact.lse.transpose(1, 2) == float("-inf")
    unseen = (exact.dv == 0).all(-1) & (exact.dk == 0).all(-1)
    if bool(answer.out[blind].any()):
        return "a row that sees nothing has an out that is not 0"
    if bool((answer.lse.transpose(1, 2)[blind] != float("-inf")).any()):
        return "a row that sees nothing has an LSE that is not -inf"
    if bool(answer.dq[blind].any()):
        return "a row that sees nothing has a gradient that is not 0"
    if bool(answer.dv[unseen].any()):
        return "a key that no row sees has a gradient that is not 0"
    return ""


def case_trial(check: str, subject: Subject, case: Case, run: Attempt = attempt) -> Trial:
    """Return the trial of one case."""
    return Trial(check, case.spec(), lambda tried: run(subject, tried), case)


def case_trials(check: str, subject: Subject, cases: Iterable[Case], run: Attempt = attempt) -> Iterator[Trial]:
    """Yield the trials of the cases that are possible and have no more ranks than asked for."""
    for case in dict.fromkeys(cases):
        if case.ranks <= subject.ranks and case.possible():
            yield case_trial(check, subject, case, run)


def check_of_cases(
    name: str,
    title: str,
    cases: Callable[[Subject], Iterable[Case]],
    others: Callable[[Subject], Iterable[Trial]] = lambda subject: (),
    *,
    by_strategy: bool = False,
) -> Check:
    """Return a group of trials of cases, followed by `others`; any other case can be tried in it too."""

    def trials(subject: Subject) -> Iterator[Trial]:
        yield from case_trials(name, subject, cases(subject))
        yield from others(subject)

    return Check(name, title, trials, lambda subject, case, kernel: case_trial(name, subject, case), by_strategy)


# ---------------------------------------------------------------------------------------------------- choices in pairs

# A handful in which each mask, layout and strategy still occurs: what a quick look affords.
_QUICK_CASES = (
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


def attention_cases(subject: Subject) -> Iterable[Case]:
    """Return few cases in which every pair of choices occurs, or a handful; for "full", also a product of choices."""
    if subject.effort == "quick":
        return _quick_cases(subject)
    every = axes(subject.ranks, subject.strategies)
    cases = covering(every)
    if subject.effort == "full":  # dtypes, softcap, sinks meet each other in pairs only: all of it would take days
        cases += product({axis: every[axis] for axis in _PRODUCT})
    return cases


def _quick_cases(subject: Subject) -> Iterable[Case]:
    if not subject.strategy:
        return _QUICK_CASES
    strategies = cycle(subject.strategies)
    return (replace(case, strategy=label) for case, label in zip(_QUICK_CASES, strategies, strict=False))


ATTENTION = check_of_cases(
    "attention", "forward, LSE and each gradient over ranks, against float64", attention_cases, by_strategy=True
)


# --------------------------------------------------------------------------------------------------------------- sizes

HEAD_SIZES = (16, 24, 32, 40, 64, 72, 80, 96, 112, 128, 160, 192, 256)
GROUPS = ("4x4", "4x2", "6x3", "6x2", "8x1", "5x5", "1x1")
LENGTHS = (2, 3, 7, 8, 9, 16, 17, 31, 33, 64, 127, 130)


def size_cases(subject: Subject) -> Iterator[Case]:
    """Yield each size with 16 and with 32 bits, on an uneven number of ranks; few of them for "quick"."""
    quick = subject.effort == "quick"
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


# ----------------------------------------------------------------------------------------------- rows that see nothing


def blind_cases(subject: Subject) -> Iterator[Case]:
    """Yield masks with rows that see nothing, by every strategy and dtype."""
    quick = subject.effort == "quick"
    for strategy in ("ring", "burst") if quick and not subject.strategy else subject.strategies:
        yield Case(mask="rows_see_nothing", strategy=strategy, ranks=2)
        yield Case(mask="custom", strategy=strategy, layout="striped", ranks=3, sinks=strategy == "burst")
    for dtype in () if quick or subject.strategy else DTYPES.values():
        for ranks in (1, 2, 3, 8):
            yield Case(mask="rows_see_nothing", dtype=dtype, ranks=ranks, layout="contiguous", length=LENGTH)


BLIND = check_of_cases("blind", "rows that see nothing: out 0, LSE -inf, gradients 0", blind_cases, by_strategy=True)


# ----------------------------------------------------------------------------------------------------- extreme numbers

BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
BAD_ROW = 11  # where something bad is put: batch row 0, position BAD_ROW, head 0
_BAD_CASE = Case(mask="causal", layout="zigzag", strategy="ring", ranks=2, heads="gqa")


def extreme_cases(subject: Subject) -> Iterator[Case]:
    """Yield cases of large and of small scores."""
    for values in VALUES[1:]:
        yield Case(values=values, ranks=2, strategy="burst")
        if subject.effort != "quick":
            yield Case(values=values, ranks=3, mask="documents", strategy="ring", sinks=True)
            for dtype in DTYPES.values():
                yield Case(values=values, ranks=4, dtype=dtype, mask="full", layout="striped", strategy="ring")


def _bad_trials(subject: Subject) -> Iterator[Trial]:
    """Yield each bad number in each input."""
    for where in ("q", "k", "v", "dout"):
        for bad in ("nan",) if subject.effort == "quick" else BAD:
            for ranks in (1, 2):
                if ranks <= subject.ranks:
                    name = f"{bad}-in-{where}-{ranks}ranks"
                    yield plain("extremes", name, _attend_bad, subject, where, BAD[bad], ranks)


def _attend_bad(subject: Subject, where: str, value: float, ranks: int) -> Outcome:
    """Check that a bad number shows in what depends on it, and changes no other batch row, head or query."""
    case = replace(_BAD_CASE, ranks=ranks)
    x = make_inputs(case)
    tensor: Tensor = getattr(x, where).clone()
    tensor[0, BAD_ROW, 0, 0] = value
    try:
        clean, dirty = run_case(subject, case, x), run_case(subject, case, replace(x, **{where: tensor}))
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    return Outcome(wrong=_changed(case, clean, dirty, where) or _not_shown(dirty, where))


def _changed(case: Case, clean: Answer, dirty: Answer, where: str) -> str:
    """Say which numbers changed that must not: of other batch rows, of heads with other keys, of other queries."""
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
        others = torch.arange(case.length) != BAD_ROW
        for name in ("out", "dq"):
            if not torch.equal(getattr(clean, name)[:, others], getattr(dirty, name)[:, others]):
                return f"{name} of another query changed"
    return ""


def _not_shown(dirty: Answer, where: str) -> str:
    """Say what should show the bad number and does not: an answer that looks right is worse than none."""
    if where == "dout":
        shows = {"dv": dirty.dv[0, 0, 0, 0], "dq": dirty.dq[0, BAD_ROW, 0, 0]}
    elif where == "v":
        shows = {"out": dirty.out[0, BAD_ROW, 0, 0]}
    else:  # the score of this query with this key is NaN or infinite; -inf alone hides a key and is not a fault
        shows = {"dk": dirty.dk[0, 0, 0, 0]} if where == "q" else {"dq": dirty.dq[0, BAD_ROW, 0, 0]}
    silent = [name for name, value in shows.items() if bool(value.isfinite())]
    return f"{silent[0]} is finite, and depends on a number that is not" if silent else ""


EXTREMES = check_of_cases(
    "extremes", "very large and very small scores; NaN and infinity stay where they belong", extreme_cases, _bad_trials
)


# ---------------------------------------------------------------------------------------------------------- steadiness

GROWTH = 1.25
"""How much larger the error may be than on the fewest ranks."""


def _steady_trials(subject: Subject) -> Iterator[Trial]:
    """Yield each case three times, and each dtype over a growing number of ranks."""
    quick = subject.effort == "quick"
    for case in (
        Case(ranks=4, strategy="burst", mask="documents", layout="document_zigzag"),
        Case(ranks=3, strategy="ring", dtype=torch.bfloat16),
        Case(ranks=2, strategy="ulysses", heads="mqa"),
    ):
        if case.ranks <= subject.ranks:
            yield plain("steady", f"same-bits-{case}", _repeat, subject, case)
    for dtype in (torch.bfloat16,) if quick else (torch.float32, torch.bfloat16, torch.float16):
        for strategy in ("burst",) if quick else ("ring", "burst"):
            short = str(dtype).removeprefix("torch.")
            yield plain("steady", f"flat-error-{strategy}-{short}", _growth, subject, dtype, strategy)


def _repeat(subject: Subject, case: Case) -> Outcome:
    x = make_inputs(case)
    try:
        first, *others = (run_case(subject, case, x) for _ in range(3))
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    for other in others:
        if name := first.differs(other):
            return Outcome(wrong=f"{name} has other bits the second time, though deterministic was asked for")
    return Outcome()


def _growth(subject: Subject, dtype: torch.dtype, strategy: str) -> Outcome:
    try:
        return grown(subject, dtype, strategy, lambda case, x: run_case(subject, case, x))
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))


def grown(subject: Subject, dtype: torch.dtype, strategy: str, run: Callable[[Case, Inputs], Answer]) -> Outcome:
    """Compare the largest error over numbers of ranks with that of the fewest; errors below rounding do not count."""
    counts = (2, 4, 8, 16, 32, 64) if subject.effort == "full" else (2, 32)
    smallest: dict[str, float] = {}
    worst: dict[str, tuple[float, float]] = {}
    for ranks in counts:
        case = Case(ranks=ranks, strategy=strategy, dtype=dtype, length=256, batch=1, heads="2x1x64x64")
        x = make_inputs(case)
        x = replace(x, q=x.q * 4)  # scores as far apart as in trained attention
        exact, _ = expected(case, x)
        for name, value in run(case, x).quantities().items():
            error = relative_error(value, exact.quantities()[name])
            least = smallest[name] = min(error, smallest.get(name, error))
            allowed = GROWTH * max(least, FLOOR[dtype] / 8)
            worst[name] = max(worst.get(name, (0.0, allowed)), (error, allowed))
    return Outcome(worst)


STEADY = Check("steady", "the same bits every time; an error that is flat in the number of ranks", _steady_trials)
