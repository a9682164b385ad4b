"""Define options, sizes, strides, numbers, addresses and errors for launches of all our Triton and Gluon kernels.

Triton is imported only when a kernel is compiled. Hopper and Ascend import this module before that, and Triton for
Ascend is an older release that lacks the imports of `prepared`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache, partial
from subprocess import CalledProcessError
from threading import Event, local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.errors import UnsupportedError
from burst_portable.kernels.dropout import positions_of, threshold
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

# a·b + c in one instruction: Triton's default. Triton 3.9 warns that the default changes in 3.10.
ALWAYS = {"enable_fp_fusion": True}
LOG2_E = math.log2(math.e)
_LEAST = torch.finfo(torch.float32).tiny  # kernels may flush smaller scales to 0


@cache
def padded(size: int) -> int:
    """Return a head size padded to a power of two of at least 16, as matrix instructions need."""
    return max(16, 1 << (size - 1).bit_length())


def strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the batch, row and head stride of each [B, S, H, D]."""
    return tuple(s for x in tensors for s in x.stride()[:3])


def score_numbers(call: AttentionCall) -> tuple[float, float, float]:
    """Return (scale, inner, outer) of the scores, in base 2: inner and outer are those of a softcap, else 0."""
    scale = call.scale if abs(call.scale) >= _LEAST else 0.0
    if call.softcap is None:
        return scale * LOG2_E, 0.0, 0.0
    return 1.0, 2.0 * scale / call.softcap * LOG2_E, call.softcap * LOG2_E


DROPOUT_PARAMETERS = ("q_at", "k_at", "first_head", "seed_low", "seed_high", "drop_below", "keep_scale")
"""Parameters of the portable kernels: positions of queries and keys, then numbers.

All are None without dropout. Triton then compiles the code that it would compile for kernels without them.
"""
DROPOUT_NUMBERS = DROPOUT_PARAMETERS[2:6]
"""Those for which Triton must not compile other code if they are 1, or multiples of 16."""
_NO_DROPOUT = (None,) * len(DROPOUT_PARAMETERS)


def dropout_arguments(tiles: Tiles, call: AttentionCall, device: torch.device) -> tuple[Tensor | float | None, ...]:
    """Return the arguments for `DROPOUT_PARAMETERS`. Words are signed, so that all have Triton's type i32."""
    if call.dropout is None:
        return _NO_DROPOUT
    p, first_head, seed = call.dropout
    words = seed & 0xFFFFFFFF, seed >> 32, threshold(p)
    numbers = (word - (word >> 31 << 32) for word in words)
    return *positions_of(tiles, device), first_head, *numbers, 1.0 / (1.0 - p)


class Address:
    """The properties of a tensor that a descriptor needs, without keeping its memory."""

    __slots__ = ("dtype", "pointer")

    def __init__(self, x: Tensor) -> None:
        self.dtype: torch.dtype = x.dtype
        self.pointer = x.data_ptr()

    def data_ptr(self) -> int:
        return self.pointer


class Unfinished(NamedTuple):
    """A compilation by another thread, and a function that raises its error as `name_compile_errors` does."""

    compilation: Future[Any]
    raise_named: Callable[[BaseException], None]


unfinished: ContextVar[list[Unfinished] | None] = ContextVar("unfinished", default=None)
"""If set, gets each compilation that `compiled_kernel` has started and not awaited."""


def compiled_kernel(
    kernel: Any,
    arguments: Sequence[object],
    options: dict[str, Any],
    target: str,
    configuration: object,
    next_step: str,
    on_compiled: Callable[[Any], None] | None = None,
) -> Any:
    """Return Triton's compiled kernel for arguments; None if they have no memory, so that it cannot be launched.

    Args:
        kernel: Jitted function.
        arguments: Its arguments. Tensors of torch's device "meta" have no memory.
        options: Launch options.
        target: As for `name_compile_errors`.
        configuration: As for `name_compile_errors`.
        next_step: As for `name_compile_errors`.
        on_compiled: Called with a kernel that is compiled while `unfinished` is set, by the thread that compiles it.
    """
    from triton import FutureKernel  # a kernel that another thread compiles

    if start_threads := _threads.get():
        start_threads()
    with name_compile_errors(kernel, target, configuration, next_step):
        made = kernel.warmup(*arguments, grid=(1,), **options)
        absent = any(isinstance(x, Tensor) and x.is_meta for x in arguments)
        started = unfinished.get() if absent else None
        if isinstance(made, FutureKernel):
            if started is not None:
                named = partial(_raise_named, kernel, target, configuration, next_step)
                started.append(Unfinished(made.future, named))
                if on_compiled is not None:
                    made.future.add_done_callback(partial(pass_on, on_compiled))
            elif not absent:
                made = made.result()
        elif started is not None and on_compiled is not None:  # Triton's cache has it
            on_compiled(made)
    return None if absent else made


def pass_on(on_compiled: Callable[[Any], None], compilation: Future[Any]) -> None:
    """Call a function with the kernel of a compilation, unless it failed: `Unfinished` raises its error."""
    if not compilation.cancelled() and compilation.exception() is None:
        on_compiled(compilation.result())


_THREADS = 6
"""Threads that compile the kernels of a call, of which it has at most so many, apart from rings."""


class Turns:
    """Let tasks begin one after another, in the order of `take`, each in another thread.

    Triton parses a kernel in Python, whose threads share one core. Without turns, the kernel that takes longest would
    leave its parser as late as the last one.
    """

    def __init__(self) -> None:
        self._last = Event()
        self._last.set()
        self._current = local()

    def take(self) -> AbstractContextManager[None]:
        """Return the context of the next task. It waits until the turns before have ended, by `end` or on exit."""
        before, ended = self._last, Event()
        self._last = ended

        @contextmanager
        def turn() -> Iterator[None]:
            before.wait()
            self._current.ended = ended
            try:
                yield
            finally:
                ended.set()

        return turn()

    def end(self) -> None:
        """End the turn of this thread, if it has one."""
        if ended := getattr(self._current, "ended", None):
            ended.set()


def ending_turns(usual: type[Any], turns: Turns) -> type[Any]:
    """Return a class of cache managers for Triton that also ends the turn of a compilation with its first file.

    That file has what the parser has made. Triton compiles it without Python's lock.
    """

    class Manager(usual):  # type: ignore[misc]  # chosen at run time
        def put(self, *arguments: Any, **options: Any) -> str:
            turns.end()
            path: str = super().put(*arguments, **options)
            return path

    return Manager


class _Pool(ThreadPoolExecutor):
    """Threads that parse kernels in turns, and that build their launchers.

    Triton 3.6 compiles launchers in C. Gluon kernels need none.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.turns = Turns()

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        turn = self.turns.take()

        def compile_in_turn() -> Any:
            with turn:
                return _with_launcher(compile_kernel)

        return super().submit(compile_in_turn)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    from triton.runtime import driver

    kernel = compile_kernel()
    if not kernel.src.fn.is_gluon():
        driver.active.launcher_cls(kernel.src, kernel.metadata)  # the real launch finds it in Triton's cache
    return kernel


def compile_side_by_side(run: Callable[[], object]) -> None:
    """Compile the kernels that `run` launches on tensors of the device "meta", for the current device.

    Errors are raised by the real launches of these kernels, which come next.
    """
    if "triton" in sys.modules:  # portable kernels, which the interpreter can run, have imported it
        from triton import knobs

        if knobs.runtime.interpret:
            return
    with ExitStack() as stack:
        token = _threads.set(cache(partial(_start_threads, stack)))
        try:
            run()
        finally:
            _threads.reset(token)


_threads: ContextVar[Callable[[], None] | None] = ContextVar("threads", default=None)
"""If set, starts the threads that compile, before the first kernel that has no machine code yet."""


def _start_threads(stack: ExitStack) -> None:
    """Let threads compile kernels until the stack is left, which waits for them. This imports Triton.

    A process needs two things before it compiles its first kernel. They are made side by side: the hash of Triton's
    files (0.8 s on the host of one H200) and Triton's driver, for which a C compiler runs (0.4 s).
    """
    from triton import AsyncCompileMode, knobs
    from triton.runtime import driver
    from triton.runtime.cache import FileCacheManager, triton_key

    pool = stack.enter_context(_Pool(_THREADS))
    hashed = ThreadPoolExecutor.submit(pool, triton_key)  # takes no turn, since it parses nothing
    driver.active.get_current_target()
    hashed.result()
    stack.enter_context(knobs.cache.scope())
    knobs.cache.manager_class = ending_turns(knobs.cache.manager_class or FileCacheManager, pool.turns)
    stack.enter_context(AsyncCompileMode(pool, ignore_errors=True))


def _raise_named(kernel: object, target: str, configuration: object, next_step: str, error: BaseException) -> None:
    with name_compile_errors(kernel, target, configuration, next_step):
        raise error


_COMPILER_WORDS = ("PassManager", "C compiler")
"""Words of a bare RuntimeError of Triton's own compiler, and of a missing C compiler for its launchers."""


@contextmanager
def name_compile_errors(kernel: object, target: str, configuration: object, next_step: str) -> Iterator[None]:
    """Raise `UnsupportedError` if the body cannot compile a jitted function; other errors pass.

    `target`: chip and dtype. `configuration`: constants and options of the compilation.
    """
    from triton.errors import TritonError

    try:
        yield
    except (TritonError, RuntimeError, CalledProcessError, OSError) as error:  # OSError: no such compiler
        bare = isinstance(error, RuntimeError) and not isinstance(error, TritonError)
        if bare and not any(word in str(error) for word in _COMPILER_WORDS):
            raise  # not an error of compiling
        name = getattr(kernel, "__name__", repr(kernel))
        raise UnsupportedError(
            f"the Triton kernel {name} does not compile for {target}",
            got=f"{configuration}: {error}",
            next_step=next_step,
        ) from error
