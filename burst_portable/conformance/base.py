"""Define what the suite tests: a backend under test, its test cases, their outcomes and their groups."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel, kernels_of
from burst_portable.comm.base import Transport
from burst_portable.comm.local import run_transports
from burst_portable.conformance.cases import STRATEGIES, Case, strategy_trials
from burst_portable.errors import UnsupportedError, in_a_line
from burst_portable.kernels import base, checked_kernel
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.planning.call import AttentionCall

P = ParamSpec("P")
T = TypeVar("T")
Wrap = Callable[[Transport], Transport]

COVERAGES = ("quick", "usual", "full")


def identity(transport: Transport) -> Transport:
    """Return the transport itself, without a wrapper."""
    return transport


_computed: ContextVar[set[str] | None] = ContextVar("computed", default=None)


@contextmanager
def recorded_kernels() -> Iterator[set[str]]:
    """Yield a set that gets the names of the kernels that compute while the body of the `with` block runs."""
    names = set[str]()
    token = _computed.set(names)
    try:
        yield names
    finally:
        _computed.reset(token)


def record_kernel(name: str) -> None:
    """Record that the kernel of this name computes in the current test."""
    if (names := _computed.get()) is not None:
        names.add(name)


@dataclass(frozen=True)
class BackendUnderTest:
    """The tested backend and the options of the tests.

    Attributes:
        backend: The backend whose kernels and transports are tested.
        ranks: Largest number of ranks of a case.
        coverage: "quick" (seconds), "usual" (every pair of choices) or "full" (products of choices).
        kernel: Name of the one kernel to test. "auto" tests all; attention then uses the kernel that a call would use.
        wrap: Wrapper of the transports between ranks that are threads.
        timeout: Seconds until a waiting rank raises `CommunicationTimeoutError`.
        strategy: Name of the one strategy to test. "": all built-in strategies.
    """

    backend: Backend
    ranks: int = 8
    coverage: str = "usual"
    kernel: str = "auto"
    wrap: Wrap = identity
    timeout: float = 60.0
    strategy: str = ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Labels of the configurations of the selected strategy, or of all built-in strategies."""
        return tuple(strategy_trials(self.strategy) if self.strategy else STRATEGIES)

    @property
    def device(self) -> torch.device:
        """Device of the backend's tensors."""
        return torch.device(self.backend.capabilities.device_type)

    @property
    def kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        """Kernels that are tested by name."""
        return tuple(k for k in kernels_of(self.backend) if self.kernel in ("auto", k.name))

    def choose(self, call: AttentionCall) -> Kernel:
        """Return the kernel for a call. Raise `UnsupportedError` as the call would."""
        return choose_kernel(self.backend, call, self.kernel)[0]

    def threads(self, ranks: int, work: Callable[[Transport], T]) -> list[T]:
        """Run `work(transport)` on `ranks` threads and return the results in rank order."""
        return run_transports(ranks, lambda transport: work(self.wrap(transport)), timeout=self.timeout)


_SKIPPED = tuple(
    str(path)
    for path in (Path(__file__).parent, Path(base.__file__), Path(checked_kernel.__file__), Path(torch.__file__).parent)
)
_STANDARD_LIBRARY = str(Path(traceback.__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run: (error, tolerance) by quantity, anything else that is wrong, or why it was skipped."""

    errors: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    wrong: str = ""
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Return whether nothing is wrong. A skipped test is not wrong."""
        return not self.wrong and not self.too_large

    @property
    def too_large(self) -> dict[str, tuple[float, float]]:
        """Quantities whose error exceeds the tolerance."""
        return {name: pair for name, pair in self.errors.items() if not pair[0] <= pair[1]}

    def text(self) -> str:
        """Describe what is wrong, in one line: the likely cause first, then the worse of both errors per quantity."""
        worst: dict[str, str] = {}
        for name in sorted(self.too_large, key=self._excess, reverse=True):
            worst.setdefault(name.partition(" (")[0], name)
        names = sorted(worst.values(), key=lambda name: not name.startswith("lse"))  # gradients depend on LSE
        errors = ((name, *self.errors[name]) for name in names)
        parts = [f"error of {name} is {error:.2g}; allowed: {limit:.2g}" for name, error, limit in errors]
        return "; ".join(filter(None, [self.wrong, *parts]))

    def _excess(self, name: str) -> float:
        """Return an error as a multiple of its tolerance."""
        error, limit = self.errors[name]
        return error / limit if limit and error == error else math.inf


@dataclass(frozen=True)
class TestCase:
    """One test that can be repeated by its name.

    Attributes:
        check: Name of its group.
        name: Unique name within the group. For a test of a `Case`, `Case.parse` reads it.
        run: Runs the test. If it tests a case, it accepts any case; the search for the smallest one uses this.
        case: The tested attention, if it tests one.
        kernel: Name of the kernel, if it tests one kernel.
    """

    check: str
    name: str
    run: Callable[[Case], Outcome]
    case: Case | None = None
    kernel: str = ""

    __test__ = False  # pytest does not collect this class

    @property
    def text(self) -> str:
        """Name of the test, as `--case` takes it."""
        return f"{self.check}:{self.name}"


@dataclass(frozen=True)
class Check:
    """A group of tests.

    Attributes:
        name: Name that `--only` takes.
        title: What the group tests, for readers of a report.
        tests: Returns all tests of a backend.
        make_test: Returns the test of a given case and kernel, for groups whose tests are cases.
        by_strategy: Whether the group tests each of `BackendUnderTest.strategies`.
    """

    name: str
    title: str
    tests: Callable[[BackendUnderTest], Iterator[TestCase]]
    make_test: Callable[[BackendUnderTest, Case, str], TestCase] | None = None
    by_strategy: bool = False


def describe_error(error: BaseException) -> str:
    """Describe an error of a backend in one line, with its position in code outside of this suite and torch.

    Python and `CheckedKernel` name the method in errors that only the caller's frame has, such as a missing keyword.
    """
    text = in_a_line(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        is_standard = frame.filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in frame.filename
        if not is_standard and not frame.filename.startswith(_SKIPPED):
            return f"{text} (in {frame.filename}:{frame.lineno})"
    return text


def skippable(run: Callable[P, Outcome]) -> Callable[P, Outcome]:
    """Turn an `UnsupportedError` of a test into a skipped outcome with its reason."""

    @wraps(run)
    def call(*args: P.args, **kwargs: P.kwargs) -> Outcome:
        try:
            return run(*args, **kwargs)
        except UnsupportedError as error:
            return Outcome(skipped=str(error))

    return call


def make_plain_test(check: str, name: str, run: Callable[..., Outcome], *arguments: object) -> TestCase:
    """Return a test without a case: it calls `run` with these arguments."""
    return TestCase(check, name, lambda _: run(*arguments))
