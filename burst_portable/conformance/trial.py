"""One thing that is tried, and what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel, kernels_of
from burst_portable.comm.base import Transport
from burst_portable.comm.local import run_transports
from burst_portable.conformance.cases import STRATEGIES, Case, strategy_trials
from burst_portable.errors import in_a_line
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.planning.call import AttentionCall

T = TypeVar("T")
Wrap = Callable[[Transport], Transport]

EFFORTS = ("quick", "usual", "full")


def as_it_is(transport: Transport) -> Transport:
    """No wrapping."""
    return transport


@dataclass(frozen=True)
class Subject:
    """A backend under examination, and how hard.

    Attributes:
        backend: whose kernels and transports are tried.
        ranks: the most ranks of a case.
        effort: "quick" (seconds), "usual" (every pair of choices), or "full" (products).
        kernel: the one kernel to try, or "auto" for all of them, chosen as a call would.
        wrap: put around what ranks as threads talk through.
        timeout: seconds until a rank that waits gives up.
        strategy: the one strategy to try, by name; "" for all of our own.
    """

    backend: Backend
    ranks: int = 8
    effort: str = "usual"
    kernel: str = "auto"
    wrap: Wrap = as_it_is
    timeout: float = 60.0
    strategy: str = ""

    @property
    def strategies(self) -> tuple[str, ...]:
        """Labels of the trials of the strategy to try, or of all of our own."""
        return tuple(strategy_trials(self.strategy) if self.strategy else STRATEGIES)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return torch.device(self.backend.capabilities.device_type)

    @property
    def kernels(self) -> tuple[Kernel | LazyKernel, ...]:
        """Return the kernels to try by name."""
        return tuple(k for k in kernels_of(self.backend) if self.kernel in ("auto", k.name))

    def choose(self, call: AttentionCall) -> Kernel:
        """Return the kernel of a call. Raise `UnsupportedError` as a call would."""
        return choose_kernel(self.backend, call, self.kernel)[0]

    def threads(self, ranks: int, work: Callable[[Transport], T]) -> list[T]:
        """Run `work(transport)` on this many threads; returns the results in rank order."""
        return run_transports(ranks, lambda transport: work(self.wrap(transport)), timeout=self.timeout)


_NOT_THEIRS = (str(Path(__file__).parent), str(Path(torch.__file__).parent))

Errors = Mapping[str, tuple[float, float]]
"""Quantity -> (error, allowed)."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attempt: its errors, and what else is wrong; or why it was not made."""

    errors: Errors = field(default_factory=dict)
    wrong: str = ""
    skipped: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong. What was skipped is not wrong."""
        return not self.wrong and not self.too_large

    @property
    def too_large(self) -> dict[str, tuple[float, float]]:
        """The quantities that are further off than allowed."""
        return {name: pair for name, pair in self.errors.items() if not pair[0] <= pair[1]}

    def text(self) -> str:
        """What is wrong, in one line."""
        far = [
            f"{name} is off by {error:.2g}, allowed {allowed:.2g}" for name, (error, allowed) in self.too_large.items()
        ]
        return "; ".join([*far, *([self.wrong] if self.wrong else [])])


@dataclass(frozen=True)
class Trial:
    """One attempt that can be made again by its name.

    Attributes:
        check: the group that it belongs to.
        name: unique within the group; for a trial of a `Case`, what `Case.parse` reads.
        attempt: makes it. With a case, any other case can be attempted too: that is how the smallest is found.
        case: what is tried, where it is an attention.
        kernel: the kernel by name, where one is tried by itself.
    """

    check: str
    name: str
    attempt: Callable[[Case], Outcome]
    case: Case | None = None
    kernel: str = ""

    @property
    def text(self) -> str:
        """What `--case` takes."""
        return f"{self.check}:{self.name}"


@dataclass(frozen=True)
class Check:
    """A group of trials.

    Attributes:
        name: what `--only` takes.
        title: what a reader of a report should know.
        trials: all of them, for a subject.
        of_case: the trial of any case (and kernel), for groups whose trials are cases.
        by_strategy: whether its trials are those of `Subject.strategies`.
    """

    name: str
    title: str
    trials: Callable[[Subject], Iterator[Trial]]
    of_case: Callable[[Subject, Case, str], Trial] | None = None
    by_strategy: bool = False


def raised(error: BaseException) -> str:
    """What a backend raised, in one line, and where in its own code (not in this suite or torch)."""
    text = in_a_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_NOT_THEIRS)]
    return f"{text} (in {theirs[-1].filename}:{theirs[-1].lineno})" if theirs else text


def plain(check: str, name: str, attempt: Callable[..., Outcome], *arguments: object) -> Trial:
    """A trial that is not a case: `attempt` with these arguments."""
    return Trial(check, name, lambda _: attempt(*arguments))
