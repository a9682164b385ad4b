"""Run Gluon kernels for Hopper on the CPU and detect wrong results, races and deadlocks.

    Machine(seed=0, eager=0.5).launch(kernel, grid, *arguments)    # tensors, Descriptors, numbers

The Python of a kernel runs unchanged; `language` defines the names of the language. Each partition of
gl.warp_specialize is a thread, of which one runs at a time. Threads are greenlets, because the operating system's take
longer to switch than to work. TMA copies and wgmma run between their start and the wait
for them: as early as possible with eager=1, and only when no thread can continue with eager=0. A missing wait is
therefore detected::

    a slot        holds NaN from the start of a TMA load into it to its end
    a store       of a thread into shared memory is NaN to TMA and wgmma until fence_async_shared
    a product     has no value before warpgroup_mma_wait
    a barrier     that is never reached raises an error with the state of all threads

Not emulated: layouts and registers, order between the warps of one warpgroup, and compiler optimizations.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from tests.support.emulator.language import language_of
from tests.support.emulator.memory import Pointer, Product, Shared


class Deadlock(AssertionError):
    """Error: no thread can continue."""


class _Stopped(BaseException):
    """Raised in a thread after another thread has failed."""


@dataclass(eq=False)
class Thread:
    """A partition of a program, and its pending hardware operations."""

    name: str
    program: tuple[int, ...]
    grid: tuple[int, ...]
    body: greenlet | None = None
    ready: Callable[[], bool] = lambda: True
    waits_for: str = ""
    over: bool = False
    products: deque[Product] = field(default_factory=deque)
    stores: int = 0
    """TMA copies out of shared memory that have not read it yet."""
    writes: int = 0
    """TMA copies out of shared memory that have not written global memory yet."""
    unfenced: list[Shared] = field(default_factory=list)


class Machine:
    """Run launches in sequence.

    Args:
        seed: Seed of the order in which threads and engines run.
        eager: Probability that an engine runs before a thread.
        together: Number of programs of a launch that run concurrently.
    """

    def __init__(self, seed: int = 0, eager: float = 0.5, together: int = 3) -> None:
        self._random = random.Random(seed)
        self._eager, self._together = eager, together
        self._threads: list[Thread] = []
        self._functions: dict[Any, FunctionType] = {}
        self._failure: BaseException | None = None
        self._language = language_of(self)
        self.copies: list[Callable[[], None]] = []
        self.me: Thread = Thread("host", (), ())

    def launch(self, kernel: JITFunction, grid: Sequence[int], *arguments: Any) -> None:
        """Run a kernel. Raise the error of a thread, or `Deadlock`."""
        function = self._bound(kernel)
        given = [Pointer.to(x) if isinstance(x, Tensor) else x for x in arguments]
        programs = list(itertools.product(*(range(n) for n in grid)))
        with torch.inference_mode():
            for first in range(0, len(programs), self._together):
                self._run_together(programs[first : first + self._together], tuple(grid), function, given)

    def _run_together(
        self, programs: Sequence[tuple[int, ...]], grid: tuple[int, ...], function: FunctionType, given: list[Any]
    ) -> None:
        self._host = getcurrent()
        for at in programs:
            self.start(Thread(f"program {at}", at, grid), function, given)
        while following := self._next():  # a thread that is over returns to here
            self._hand_to(following)
        self._threads.clear()
        while self.copies and self._failure is None:
            self.copies.pop()()
        if self._failure is not None:
            raise self._failure

    def start(self, thread: Thread, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Add a thread, which begins at its first turn."""
        self._threads.append(thread)
        thread.body = greenlet(partial(self._body, thread, function, arguments), parent=self._host)

    def turn(self, ready: Callable[[], bool] = lambda: True, waits_for: str = "") -> None:
        """Let other threads and engines run until the next turn of this thread, which requires `ready`."""
        me = self.me
        me.ready, me.waits_for = ready, waits_for
        following = self._next()
        if following is not me:
            self._hand_to(following)
        if self._failure is not None:
            raise _Stopped

    def _body(self, me: Thread, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
        try:
            if self._failure is None:
                function(*arguments)
                assert not me.products, f"{me.name} ends before its products do"
                assert not me.stores, f"{me.name} ends before TMA has read what it stores"
        except _Stopped:
            pass
        except Exception as error:  # `launch` raises it  # noqa: BLE001
            self._failure = self._failure or error
        me.over = True

    def _hand_to(self, thread: Thread) -> None:
        self.me = thread
        thread.body.switch()

    def _next(self) -> Thread | None:
        """Return the next thread to run, or None if all are over. Engines may run in between."""
        alive = [one for one in self._threads if not one.over]
        while alive and self._failure is None:
            able = [one for one in alive if one.ready()]
            busy = [one.products for one in alive if one.products]
            if (busy or self.copies) and (not able or self._random.random() < self._eager):
                self._work(busy)
            elif able:
                return self._random.choice(able)
            else:
                stand = "; ".join(f"{one.name} waits for {one.waits_for}" for one in alive)
                self._failure = Deadlock(f"nobody can go on: {stand}")
        return alive[0] if alive else None

    def _work(self, busy: list[deque[Product]]) -> None:
        """Run one product or copy. The products of a thread run in order, copies in any order."""
        which = self._random.randrange(len(busy) + len(self.copies))
        if which < len(busy):
            busy[which].popleft().run()
        else:
            self.copies.pop(which - len(busy))()

    def _bound(self, function: JITFunction) -> FunctionType:
        """Return the Python function of a jit function, bound to this machine's language."""
        python = function.fn
        if python not in self._functions:
            names = {name: self._meaning(name, value) for name, value in python.__globals__.items()}
            self._functions[python] = FunctionType(python.__code__, names, python.__name__, python.__defaults__)
        return self._functions[python]

    def _meaning(self, name: str, value: Any) -> Any:
        if name in self._language:
            return self._language[name]
        if isinstance(value, gl.constexpr):
            return value.value
        return _Bound(self, value) if isinstance(value, JITFunction) else value


class _Bound:
    """A jit function that another one calls."""

    def __init__(self, machine: Machine, function: JITFunction) -> None:
        self._machine, self._function = machine, function

    def __call__(self, *arguments: Any) -> Any:
        return self._machine._bound(self._function)(*arguments)
