"""List and find the tests of a backend by name: all, groups of them, or single ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from burst_portable.backends.selection import kernels_of
from burst_portable.conformance.base import BackendUnderTest, TestCase
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks import CHECKS
from burst_portable.errors import InputError, unknown_name


def select_tests(target: BackendUnderTest, only: Iterable[str] = (), cases: Sequence[str] = ()) -> list[TestCase]:
    """Return the tests of some names, or of some groups, or all."""
    return [find_test(target, text) for text in cases] or list(list_tests(target, only))


def list_tests(target: BackendUnderTest, only: Iterable[str] = ()) -> Iterator[TestCase]:
    """Yield all tests, or those of some groups."""
    available = [name for name, check in CHECKS.items() if check.by_strategy or not target.strategy]
    names = tuple(only) or tuple(available)
    for name in names:
        if name not in CHECKS:
            raise unknown_name("group of checks", name, CHECKS)
        if name not in available:
            raise InputError(f"the group {name!r} has no tests of a strategy", allowed=", ".join(available))
    for name in CHECKS:
        if name in names:
            yield from CHECKS[name].tests(target)


def find_test(target: BackendUnderTest, text: str) -> TestCase:
    """Return the test of a name: ``group:case``, ``kernels:kernel:case`` or ``group:name``."""
    group, _, name = text.partition(":")
    if group not in CHECKS:
        raise unknown_name("group of checks", group, CHECKS)
    check = CHECKS[group]
    head, colon, spec = name.rpartition(":")
    kernels = [kernel.name for kernel in kernels_of(target.backend)]
    is_case = "=" in spec or spec == "default"
    if group == "kernels" and target.kernel != "auto" and name.partition(":")[0] in set(kernels) - {target.kernel}:
        got = f"{text}, but kernel {target.kernel!r}"
        raise InputError("the test belongs to another kernel", got=got, next_step="pass only one of them")
    if check.make_test is not None and is_case and (head in kernels if group == "kernels" else not colon):
        return check.make_test(target, Case.parse(spec), head)
    every = {test.name: test for test in check.tests(replace(target, coverage="usual"))}
    if name not in every:
        raise unknown_name(f"test of {group!r}", name, every)
    return every[name]
