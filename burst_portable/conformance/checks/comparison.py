"""Run a case and compare every quantity with the oracle; make tests and groups of tests of that."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from burst_portable.conformance import oracle
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, skippable
from burst_portable.conformance.cases import (
    Case,
)
from burst_portable.conformance.checks.likely_cause import find_cause, find_cause_in_heads, find_masked_error
from burst_portable.conformance.checks.plans import find_plan_error
from burst_portable.conformance.oracle import Answer, Inputs, expected, make_inputs
from burst_portable.conformance.running import run_case
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
