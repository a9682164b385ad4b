"""Run our strategies over several devices; `other_rings` runs other libraries.

A contestant takes a `Task` (this rank's shards) and returns two calls, forward and backward, or raises `Absent` with
the reason. Results are this rank's (out) and (dq, dk, dv), in the rows of the contestant's layout.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import burst_portable as bp
from benchmarks.providers import Absent
from benchmarks.ranks import Links
from benchmarks.ring_rows import Row
from burst_portable.bench.benchmark import backward_of
from burst_portable.comm.base import Exchange, Transport
from burst_portable.errors import BurstError
from burst_portable.layout import Layout
from burst_portable.strategies.registry import make_strategy

Gradients = tuple[Tensor, ...]
Calls = tuple[Callable[[], Tensor], Callable[[], Gradients]]


@dataclass
class Task:
    """One row, as one rank has it: shards of a contestant's layout."""

    links: Links
    length: int
    mask: bp.Mask
    layout: Layout
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    kernel: str
    chose: tuple[str, str] = ("", "")  # what `auto` took, and why

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)


@dataclass(frozen=True)
class Contestant:
    """layout: Its layout; "" for that of the row, "auto" for the choice of the library with `transport`."""

    name: str
    prepare: Callable[[Task], Calls]
    layout: str = ""
    transport: str = ""

    def settle(self, links: Links, row: Row, mask: bp.Mask, kernel: str) -> Layout:
        """Return its layout for a row. If `auto` finds none, it is the row's, and `prepare` raises the reason."""
        transport = links.transports.get(self.transport)
        if self.layout == "auto" and isinstance(transport, Transport):
            with suppress(BurstError):
                return bp.plan_for_mesh(
                    links.mesh(transport), seq_len=row.length, heads=row.heads[0], kv_heads=row.heads[1],
                    head_dim=row.head, mask=mask, dtype=torch.bfloat16, device=links.device, kernel=kernel,
                    deterministic=False,
                ).layout  # fmt: skip
        named = self.layout if self.layout not in ("", "auto") else row.layout
        return bp.make_layout(named, row.length, links.size, mask)


def through_autograd(attention: Callable[[], Tensor], leaves: tuple[Tensor, ...], dout: Tensor) -> Calls:
    """Return the forward pass as training runs it, and its backward pass."""
    return attention, backward_of(attention, leaves, dout)


# ------------------------------------------------------------------------------------------------- ours


def ours(strategy: str, transport: str, *, sent: bool = True) -> Contestant:
    """Return one of our strategies; with `sent` False, the same tiles and merges run and no message is sent."""

    def prepare(task: Task) -> Calls:
        found = task.links.transports.get(transport, "not asked for")
        if isinstance(found, str):
            raise Absent(f"no {transport}: {found}")
        chosen = "auto" if strategy == "auto" else make_strategy(strategy)
        still = Still(found)
        mesh = task.links.mesh(found if sent else still)
        leaves = tuple(x.detach().requires_grad_() for x in (task.q, task.k, task.v))

        call: Any = {
            "mask": task.mask, "mesh": mesh, "strategy": chosen, "layout": task.layout, "seq_len": task.length,
            "kernel": task.kernel, "deterministic": False,
        }  # fmt: skip

        def attention() -> Tensor:
            return bp.attention(*leaves, **call)

        if chosen == "auto":
            why = bp.explain(*leaves, **call).strategy.why
            task.chose = why.removeprefix("chose ").partition(" by predicted time")[0], why
        if not sent:
            torch.autograd.grad(attention(), leaves, task.dout)  # with everything sent, to keep what came
            still.moving = False
        return through_autograd(attention, leaves, task.dout)

    name = f"{strategy} {transport}{'' if sent else ', nothing sent'}"
    return Contestant(name, prepare, "auto" if strategy == "auto" else "", transport)


class Still(Transport):
    """Another transport, until `moving` is False: then every message is there already, as it came before."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size, wrapped.state)
        self._wrapped, self.moving = wrapped, True
        self.host, self.agreed = wrapped.host, wrapped.agreed
        self.direct, self.keeps_received = wrapped.direct, True
        self.supports_strided_sends = wrapped.supports_strided_sends
        self._kept: dict[bytes, list[Tensor]] = {}
        self._pass: list[Tensor] = []

    def begin(self, digest: bytes = b"", bytes_per_sender: int = 0) -> None:
        self._key, self._next = digest[:16], 0
        self._pass = [] if self.moving else self._kept[self._key]
        if self.moving:
            self._wrapped.begin(digest, bytes_per_sender)

    def end(self) -> None:
        if self.moving:
            self._kept[self._key] = [x.clone() for x in self._pass]
            self._wrapped.end()

    def receive_buffer(self, size: int, device: torch.device, peer: int, offset: int | None = None) -> Tensor:
        if self.moving:
            self._pass.append(self._wrapped.receive_buffer(size, device, peer, offset))
            return self._pass[-1]
        self._next += 1
        return self._pass[self._next - 1]

    def post(self, sends: Any, receives: Any, label: str = "") -> Any:
        if self.moving:
            return self._wrapped.post(sends, receives, label)
        return [self] * len(sends), [self] * len(receives)

    def exchange(self, sends: Any, receives: Any, label: str, *, exclusive: bool = False) -> Exchange:
        if self.moving:
            return self._wrapped.exchange(sends, receives, label, exclusive=exclusive)
        return Exchange([self], [self])

    def wait(self) -> None:
        """Return at once: the message arrived before."""

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self._wrapped.share(data, label, timeout)
