"""A step again with communication off, and again with computing off: what overlap is worth, where no trace shows it.

    found = ablate(step, mesh=mesh)         # every rank calls it, with the same step
    found.exposed_communication             # seconds that communication adds
    found.hidden                            # seconds that overlapping saves

With communication off, nothing is sent and blocks hold whatever their memory holds; with computing off, kernels are
skipped. The results of such steps are nonsense, so `step` must not keep them: no optimizer, no statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.registry import for_device
from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.errors import InputError, explain
from burst_portable.kernels.contract import Gradients, Options
from burst_portable.mesh import Mesh, as_mesh
from burst_portable.moves import Move
from burst_portable.numerics import State, empty_state
from burst_portable.plans import Compute, Plan
from burst_portable.runtime import Queries, Runtime, installed


@dataclass(frozen=True)
class Ablation:
    """Seconds of one step on this rank, the best of a few: as it is, without communication, without computing."""

    whole: float
    without_communication: float
    without_computing: float

    @property
    def exposed_communication(self) -> float:
        """What communication adds to the step; contention with kernels counts as its cost."""
        return self.whole - self.without_communication

    @property
    def hidden(self) -> float:
        """What doing both at once saves, against one after the other."""
        return self.without_communication + self.without_computing - self.whole


def ablate(step: Callable[[], Any], *, mesh: Any = None, repeat: int = 3, device: str = "cpu") -> Ablation:
    """Time a step whole, without communication and without computing. All ranks of the mesh must call it together.

    Args:
        step: attention calls, forward and backward, that may be repeated; what they give is thrown away.
        repeat: how often each is run; the shortest counts.
        device: the type of the step's tensors.

    Raises `InputError` for fewer than one repetition.
    """
    if repeat < 1:
        raise InputError(explain("a step must be run at least once", got=repeat))
    mesh = as_mesh(mesh)
    step()  # warm
    best = [min(_timed(step, mesh, device, off) for _ in range(repeat)) for off in ("", "communication", "computing")]
    return Ablation(*best)


def _timed(step: Callable[[], Any], mesh: Mesh, device: str, off: str) -> float:
    def wrap(runtime: Runtime, _: Plan) -> Runtime:
        return _Ablated(runtime, off)

    streams = for_device(device).capabilities.streams
    token = installed.set(wrap) if off else None
    try:
        _meet(mesh, device)
        began = time.perf_counter()
        step()
        if streams:
            torch.get_device_module(device).synchronize()
        return time.perf_counter() - began
    finally:
        if token is not None:
            installed.reset(token)


def _meet(mesh: Mesh, device: str) -> None:
    """All ranks begin together."""
    mine = torch.zeros(1, dtype=torch.uint8, device=device)
    mesh.transport(device).all_gather(mine, [torch.empty_like(mine) for _ in range(mesh.size)], "ablation")
    if for_device(device).capabilities.streams:
        torch.get_device_module(device).synchronize()


class _Done:
    """See `comm.base.Handle`: nothing was sent, so nothing is waited for."""

    def wait(self) -> None:
        return


class _Silent(Transport):
    """See `comm.base.Transport`. Whether ranks agree is still asked; blocks stay at home."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self.name, self.rank, self.size, self.host = inner.name, inner.rank, inner.size, inner.host
        self.lasting = True

    @property
    def passes(self) -> int:  # type: ignore[override]
        """Counted by the transport itself."""
        return self._inner.passes

    @passes.setter
    def passes(self, count: int) -> None:
        self._inner.passes = count

    @property
    def agreed(self) -> set[bytes]:
        return self._inner.agreed

    def post(
        self, sends: Sequence[Message], receives: Sequence[Message], label: str = ""
    ) -> tuple[list[Handle], list[Handle]]:
        return [_Done() for _ in sends], [_Done() for _ in receives]

    def buffer(self, size: int, device: torch.device) -> Tensor:
        return self._inner.buffer(size, device)

    def share(self, data: bytes, label: str = "share", deadline: float | None = None) -> list[bytes]:
        return self._inner.share(data, label, deadline)


class _Ablated:
    """See `runtime.Runtime`."""

    def __init__(self, inner: Runtime, off: str) -> None:
        self._inner, self._off = inner, off
        self.transport = _Silent(inner.transport) if off == "communication" else inner.transport

    def attend(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options, state: State | None) -> State:
        if self._off == "computing":
            return empty_state(q, v.shape[-1]) if state is None else state
        return self._inner.attend(compute, q, k, v, options, state)

    def attend_backward(
        self,
        compute: Compute,
        queries: Queries,
        k: Tensor,
        v: Tensor,
        options: Options,
        into: tuple[Tensor, ...],
    ) -> None:
        if self._off != "computing":
            self._inner.attend_backward(compute, queries, k, v, options, into)

    def attend_whole(self, compute: Compute, q: Tensor, k: Tensor, v: Tensor, options: Options) -> State:
        if self._off == "computing":
            return empty_state(q, v.shape[-1])
        return self._inner.attend_whole(compute, q, k, v, options)

    def gradients(self, compute: Compute, tensors: tuple[Tensor, ...], options: Options) -> Gradients:
        if self._off == "computing":
            _, q, k, v, *_ = tensors
            return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        return self._inner.gradients(compute, tensors, options)

    def inbox(self, moves: Sequence[Move], size: int, device: torch.device) -> Tensor:
        if self._off == "communication":
            return self.transport.inbox(size, device, moves[0].source)
        return self._inner.inbox(moves, size, device)

    def post(
        self, sends: list[tuple[Move, Tensor]], receives: list[tuple[Move, Tensor]], label: str
    ) -> tuple[list[Handle], list[Handle]]:
        if self._off == "communication":
            return [_Done() for _ in sends], [_Done() for _ in receives]
        return self._inner.post(sends, receives, label)
