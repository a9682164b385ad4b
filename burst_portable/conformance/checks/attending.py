"""What the checks share that try whole attentions: run a case, compare every quantity with the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import Answer, Inputs, error_of_weights, errors, expected, make_inputs
from burst_portable.conformance.running import run_case
from burst_portable.conformance.trial import Outcome, Subject, Trial
from burst_portable.errors import UnsupportedError

Attempt = Callable[[Subject, Case], Outcome]


def attempt(subject: Subject, case: Case) -> Outcome:
    """Out, LSE and every gradient against float64; rows that see nothing exactly."""
    x = make_inputs(case)
    try:
        answer = run_case(subject, case, x)
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    return judged(case, x, answer)


def judged(case: Case, x: Inputs, answer: Answer, rounding: float = 0.0) -> Outcome:
    """An answer against the oracle's. `rounding`: see `kernels.base.Kernel`."""
    exact, plain = expected(case, x)
    extra = 0.0 if case.values == "usual" else error_of_weights(exact, case.dtype, rounding)
    return Outcome(errors(answer, exact, plain, case.dtype, extra, rounding), blind_rows(answer, exact))


def blind_rows(answer: Answer, exact: Answer) -> str:
    """What is wrong with rows that see nothing, and with keys that nobody sees: they must be exactly 0."""
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


def case_trial(check: str, subject: Subject, case: Case, how: Attempt = attempt) -> Trial:
    """The trial of one case."""
    return Trial(check, case.spec(), lambda tried: how(subject, tried), case)


def case_trials(check: str, subject: Subject, cases: Iterable[Case], how: Attempt = attempt) -> Iterator[Trial]:
    """Trials of those cases that are possible and have no more ranks than asked for."""
    for case in dict.fromkeys(cases):
        if case.ranks <= subject.ranks and case.possible():
            yield case_trial(check, subject, case, how)
