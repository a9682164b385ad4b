"""Test stale memory, late messages, stream order and buffers in use: none of them may change a result."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Handles, Message, Transport, WrappedTransport
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test, skippable
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks.comparison import compare
from burst_portable.conformance.checks.kernel_contract import plainest
from burst_portable.conformance.kernel_runs import run_kernel
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import run_case
from burst_portable.kernels.base import BackwardInputs, Kernel, LazyKernel, WrappedKernel
from burst_portable.kernels.checked_kernel import support_of
from burst_portable.numerics import State

NAME = "memory"
_BUSY = 1 << 25  # bytes of a copy that keeps a stream busy
_CASES = (
    Case(mask="custom", ranks=4, strategy="burst", layout="striped"),
    Case(mask="documents", ranks=3, strategy="ring(transfer=direct)"),
    Case(mask="causal", ranks=4, strategy="double_ring"),
    Case(mask="causal", ranks=2, strategy="ulysses", heads="mqa"),
    Case(mask="causal", ranks=4, strategy="usp"),
)


class _Late:
    """A handle whose wait takes a random time longer."""

    def __init__(self, handle: Handle, chance: random.Random, seconds: float) -> None:
        self._handle, self._chance, self._seconds = handle, chance, seconds

    def wait(self) -> None:
        time.sleep(self._chance.random() * self._seconds)
        self._handle.wait()


class Delayed(WrappedTransport):
    """A transport whose ranks post and wait after random delays.

    On a device with streams, random work is also queued on the current stream before each post.
    """

    def __init__(self, wrapped: Transport, seed: int, seconds: float, *, streams: bool) -> None:
        super().__init__(wrapped)
        self._seconds, self._streams = seconds, streams
        self._chance = random.Random(1000 * seed + wrapped.rank)

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        if self._streams and (messages := (*sends, *receives)):
            _keep_busy(messages[0].buffer.device, self._chance.randrange(4))
        time.sleep(self._chance.random() * self._seconds)
        leaving, arriving = self._wrapped.post(sends, receives, label)
        return [self._late(handle) for handle in leaving], [self._late(handle) for handle in arriving]

    def _late(self, handle: Handle) -> Handle:
        return _Late(handle, self._chance, self._seconds)


def _keep_busy(device: torch.device, rounds: int) -> None:
    """Queue copies on the current stream without waiting for them."""
    x = torch.zeros(_BUSY, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    for _ in range(rounds):
        y.copy_(x)


class LateInputs(WrappedKernel):
    """A kernel whose inputs are written right before the call, behind work that keeps the current stream busy."""

    def __init__(self, wrapped: Kernel, rounds: int) -> None:
        super().__init__(wrapped)
        self._rounds = rounds

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> State:
        return super().attend(*self._rewrite(q, k, v), *args, **options)

    def attend_backward(self, x: BackwardInputs, *args: Any, **options: Any) -> None:
        dout, q, k, v, lse = self._rewrite(x.dout, x.q, x.k, x.v, x.lse)
        super().attend_backward(x._replace(dout=dout, q=q, k=k, v=v, lse=lse), *args, **options)

    def _rewrite(self, *tensors: Tensor) -> list[Tensor]:
        written = [torch.empty_like(tensor) for tensor in tensors]
        _keep_busy(tensors[0].device, self._rounds)
        for target, tensor in zip(written, tensors, strict=True):
            target.copy_(tensor)
        return written


def _count_rounds(device: torch.device, seconds: float = 0.05) -> int:
    """Return the number of copies that keep a device busy for `seconds`, longer than a kernel launch takes."""
    module, rounds = torch.get_device_module(device), 32
    module.synchronize()
    began = time.perf_counter()
    _keep_busy(device, rounds)
    module.synchronize()
    return 1 + round(seconds * rounds / (time.perf_counter() - began))


def list_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield each case with delays and on stale memory, and each kernel behind work on its stream."""
    if target.backend.capabilities.streams:
        yield from (make_plain_test(NAME, f"stream-order-{k.name}", _order, target, k) for k in target.kernels)
    for case in _CASES[:2] if target.coverage == "quick" else _CASES:
        if case.ranks <= target.ranks:
            yield make_plain_test(NAME, f"delays-{case}", _delays, target, case)
            yield make_plain_test(NAME, f"stale-{case}", _stale, target, case)


def _order(target: BackendUnderTest, kernel: Kernel | LazyKernel) -> Outcome:
    """Check that a kernel reads what the current stream has written, not the previous contents."""
    case = Case(ranks=1, **plainest(kernel, target.device.type))
    support = support_of(kernel, case.make_call(target.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason)
    x, loaded = make_inputs(case), kernel.load()
    run_kernel(loaded, case, x, target.device)  # compile first: that takes longer than the stream is kept busy
    late = LateInputs(loaded, _count_rounds(target.device))
    return compare(case, x, run_kernel(late, case, x, target.device), loaded.traits.rounding)


@skippable
def _delays(target: BackendUnderTest, case: Case) -> Outcome:
    """Check that delays of any rank change no bit."""
    x, streams = make_inputs(case), target.backend.capabilities.streams
    expected = run_case(target, case, x)
    for seed in range(2 if target.coverage == "quick" else 5):

        def delay(transport: Transport, seed: int = seed) -> Transport:
            return Delayed(target.wrap(transport), seed, 0.004, streams=streams)

        if name := expected.differs(run_case(replace(target, wrap=delay), case, x)):
            return Outcome(wrong=f"{name} depends on which rank is late (delays of seed {seed})")
    return Outcome()


@skippable
def _stale(target: BackendUnderTest, case: Case) -> Outcome:
    """Check that a case gives the same bits after another one of the same shapes: no data is kept from call to call."""
    x = make_inputs(case)
    before = run_case(target, case, x)
    run_case(target, case, make_inputs(case, seed=1))
    name = before.differs(run_case(target, case, x))
    return Outcome(wrong=f"{name} depends on the previous call" if name else "")


CHECK = Check(
    NAME, "injected delays, stream order, fresh memory of NaN, no data kept from the previous call", list_tests
)
