"""Who is examined: a backend, on its device, with ranks as threads that talk through a transport."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from burst_portable.backends.base import Backend
from burst_portable.backends.registry import choose_kernel
from burst_portable.comm.base import Transport
from burst_portable.comm.local import run_threads
from burst_portable.kernels.contract import Kernel, KernelProblem

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
        deadline: seconds until a rank that waits gives up.
    """

    backend: Backend
    ranks: int = 8
    effort: str = "usual"
    kernel: str = "auto"
    wrap: Wrap = as_it_is
    deadline: float = 60.0

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return torch.device(self.backend.capabilities.device_type)

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The kernels to try by name."""
        return tuple(k for k in self.backend.kernels() if self.kernel in ("auto", k.name))

    def choose(self, problem: KernelProblem) -> Kernel:
        """The kernel of a call; raises `UnsupportedError` as a call would."""
        return choose_kernel(self.backend, problem, self.kernel)[0]

    def threads(self, ranks: int, work: Callable[[Transport], T]) -> list[T]:
        """Run `work(transport)` on this many threads; returns the results in rank order."""
        return run_threads(ranks, lambda transport: work(self.wrap(transport)), deadline=self.deadline)
