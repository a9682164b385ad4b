"""Memory that is not fresh, messages that come late, and buffers that are in use: nothing of that may show."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from burst_portable.comm.base import Handle, Message, Transport, WrappedTransport
from burst_portable.conformance.cases import Case
from burst_portable.conformance.checks.attention import judged
from burst_portable.conformance.checks.kernel_contract import plainest
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import run_case, run_kernel
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, Wrap, plain
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, LazyKernel, WrappedKernel
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

NAME = "memory"
_BUSY = 1 << 25  # bytes of a copy that keeps a stream busy
_CASES = (
    Case(mask="custom", ranks=4, strategy="burst", layout="striped"),
    Case(mask="documents", ranks=3, strategy="ring+fetch"),
    Case(mask="causal", ranks=4, strategy="double_ring"),
    Case(mask="causal", ranks=2, strategy="ulysses", heads="mqa"),
    Case(mask="causal", ranks=4, strategy="usp"),
)


class _Late:
    """A handle whose wait takes longer, by a random time."""

    def __init__(self, handle: Handle, chance: random.Random, seconds: float) -> None:
        self._handle, self._chance, self._seconds = handle, chance, seconds

    def wait(self) -> None:
        time.sleep(self._chance.random() * self._seconds)
        self._handle.wait()


class Delayed(WrappedTransport):
    """Another transport, each rank of which posts and waits at its own pace.

    On a device with streams, each post is also put behind work of random length on the stream that is current.
    """

    def __init__(self, wrapped: Transport, seed: int, seconds: float, *, streams: bool) -> None:
        super().__init__(wrapped)
        self._seconds, self._streams = seconds, streams
        self._chance = random.Random(1000 * seed + wrapped.rank)

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        if self._streams and (messages := (*sends, *receives)):
            _keep_busy(messages[0].buffer.device, self._chance.randrange(4))
        time.sleep(self._chance.random() * self._seconds)
        leaving, arriving = self._wrapped.post(sends, receives, label)
        late = [[_Late(handle, self._chance, self._seconds) for handle in group] for group in (leaving, arriving)]
        return list(late[0]), list(late[1])


def _keep_busy(device: torch.device, rounds: int) -> None:
    """Copies on the current stream; the host does not wait for them."""
    x = torch.zeros(_BUSY, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    for _ in range(rounds):
        y.copy_(x)


class LateInputs(WrappedKernel):
    """A kernel whose tensors are written right before it is called, behind work that keeps the current stream busy."""

    def __init__(self, wrapped: Kernel, rounds: int) -> None:
        super().__init__(wrapped)
        self._rounds = rounds

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        *,
        state: State | None = None,
        yields_to_comm: bool = False,
    ) -> State:
        q, k, v = self._late(q, k, v)
        return super().attend(q, k, v, tiles, call, state=state, yields_to_comm=yields_to_comm)

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        dout, q, k, v, lse = self._late(x.dout, x.q, x.k, x.v, x.lse)
        late = x._replace(dout=dout, q=q, k=k, v=v, lse=lse)
        super().attend_backward(late, tiles, call, into=into)

    def _late(self, *tensors: Tensor) -> list[Tensor]:
        written = [torch.empty_like(tensor) for tensor in tensors]
        _keep_busy(tensors[0].device, self._rounds)
        for target, tensor in zip(written, tensors, strict=True):
            target.copy_(tensor)
        return written


def _rounds(device: torch.device, seconds: float = 0.05) -> int:
    """How many rounds keep a device busy for this long: longer than launching a kernel takes."""
    module, many = torch.get_device_module(device), 32
    module.synchronize()
    began = time.perf_counter()
    _keep_busy(device, many)
    module.synchronize()
    return 1 + round(seconds * many / (time.perf_counter() - began))


def trials(subject: Subject) -> Iterator[Trial]:
    """Each case with delays, and on memory full of other things; each kernel behind work on its stream."""
    if subject.backend.capabilities.streams:
        yield from (plain(NAME, f"stream-order-{k.name}", _order, subject, k) for k in subject.kernels)
    for case in _CASES[:2] if subject.effort == "quick" else _CASES:
        if case.ranks <= subject.ranks:
            yield plain(NAME, f"delays-{case}", _delays, subject, case)
            yield plain(NAME, f"stale-{case}", _stale, subject, case)


def _order(subject: Subject, kernel: Kernel | LazyKernel) -> Outcome:
    """Check that a kernel reads what the current stream has written, not what was there before."""
    case = Case(ranks=1, **plainest(kernel, subject.device.type))
    support = kernel.supports(case.make_call(subject.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason)
    x, loaded = make_inputs(case), kernel.load()
    run_kernel(loaded, case, x, subject.device)  # compiling takes longer than any stream is kept busy
    late = LateInputs(loaded, _rounds(subject.device))
    return judged(case, x, run_kernel(late, case, x, subject.device), loaded.traits.rounding)


def _delays(subject: Subject, case: Case) -> Outcome:
    """Whoever comes late, the bits are the same."""
    x, seconds = make_inputs(case), 0.004
    try:
        calm = run_case(subject, case, x)
        for seed in range(2 if subject.effort == "quick" else 5):
            late = replace(subject, wrap=_delaying(subject, seed, seconds))
            hurried = run_case(late, case, x)
            if name := calm.differs(hurried):
                return Outcome(wrong=f"{name} depends on who comes late (delays of seed {seed})")
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    return Outcome()


def _delaying(subject: Subject, seed: int, seconds: float) -> Wrap:
    streams = subject.backend.capabilities.streams
    return lambda transport: Delayed(subject.wrap(transport), seed, seconds, streams=streams)


def _stale(subject: Subject, case: Case) -> Outcome:
    """The same case after another one of the same shapes gives the same bits: nothing is kept from call to call."""
    x = make_inputs(case)
    try:
        before = run_case(subject, case, x)
        run_case(subject, case, make_inputs(case, seed=1))
        after = run_case(subject, case, x)
    except UnsupportedError as refusal:
        return Outcome(skipped=str(refusal))
    name = before.differs(after)
    return Outcome(wrong=f"{name} depends on the call before" if name else "")


CHECK = Check(NAME, "delays injected, order of streams, memory poisoned, nothing kept from the call before", trials)
