"""Define the entries of a benchmark: strategies of the registry. `peers` has those of other libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from burst_portable.api import attention
from burst_portable.bench.task import SEED, Task
from burst_portable.comm.base import Handles, Message, Transport, WrappedTransport
from burst_portable.config import Config
from burst_portable.errors import StrategyError
from burst_portable.mesh import Mesh
from burst_portable.planning.plans import Plan
from burst_portable.planning.verify import verify
from burst_portable.runtime.explanation import explain
from burst_portable.sharding import shard
from burst_portable.strategies.planner import plan
from burst_portable.strategies.registry import strategy_name


def _unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class PreparedEntry:
    """An entry that is ready to run a row on this rank.

    Attributes:
        forward: Compute `out` from the leaves.
        leaves: q, k and v of this rank, in the shape that the implementation takes.
        dout: Gradient of `out`.
        shard: Return this rank's tokens of an unsharded tensor [1, S, H, D].
        to_bshd: Return a view [1, S, H, D] of a result.
    """

    forward: Callable[[], Tensor]
    leaves: tuple[Tensor, ...]
    dout: Tensor
    shard: Callable[[Tensor], Tensor]
    to_bshd: Callable[[Tensor], Tensor] = _unchanged

    def run(self) -> tuple[Tensor, ...]:
        """Run both passes once. Return out, dq, dk and dv of this rank, [1, S, H, D]."""
        out = self.forward()
        return tuple(map(self.to_bshd, (out.detach(), *torch.autograd.grad(out, self.leaves, self.dout))))


class Sent(NamedTuple):
    """Bytes and messages that this rank sent in a pass."""

    bytes: int
    messages: int


class Entry:
    """A strategy of the registry in a benchmark. Subclasses run other implementations.

    Attributes:
        errors: Exceptions after which the other entries of the row are still measured.
    """

    errors: tuple[type[BaseException], ...] = (Exception,)  # a package's strategy may raise any

    def __init__(self, name: str) -> None:
        self.name = name

    def prepare(self, task: Task, mesh: Mesh) -> PreparedEntry:
        """Return the calls of a row. Raise a `BurstError` if the entry cannot serve it."""
        return self._calls(task, mesh)

    def _calls(self, task: Task, mesh: Mesh) -> PreparedEntry:
        """Return the calls of a row whose plan was checked."""
        layout = task.layout
        q, k, v, dout = (shard(x, mesh, layout=layout) for x in task.tensors)
        leaves = tuple(x.requires_grad_() for x in (q, k, v))

        def forward() -> Tensor:
            return attention(
                *leaves, mask=task.mask, mesh=mesh, strategy=self.name, layout=task.layout, kernel=task.kernel,
                seq_len=task.layout.length, deterministic=False, dropout_p=task.dropout, dropout_seed=SEED,
            )  # fmt: skip

        return PreparedEntry(forward, leaves, dout, lambda x: shard(x, mesh, layout=layout))

    def checked_plan(self, task: Task, mesh: Mesh) -> Plan | None:
        """Return the plan of a row, so that ranks can compare it before any of them waits for messages.

        Raises:
            UnsupportedError, InputError: The strategy cannot serve this row.
            StrategyError: The plan is wrong. Other errors are those of a strategy that is broken.
        """
        if strategy_name(self.name) == "auto":  # it takes no strategy whose plan it cannot make
            return None
        q, k, v, _ = task.tensors
        made = plan(
            seq_len=task.layout.length, ranks=mesh.size, heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3],
            v_head_dim=v.shape[3], mask=task.mask, strategy=self.name, layout=task.layout, batch=q.shape[0],
            itemsize=q.element_size(), dropout_p=task.dropout,
        )  # fmt: skip
        if wrong := verify(made):
            raise StrategyError(f"its plan is wrong: {wrong[0]}")
        return made

    def known_fault(self, task: Task) -> str:
        """Return the known cause of wrong gradients of this row; "" if there is none."""
        return ""

    def choice(self, prepared: PreparedEntry, task: Task, mesh: Mesh) -> str | None:
        """Return the label of the strategy that `auto` chooses now. None for all other entries.

        `auto` chooses again in its first call if the ranks cannot connect the transport that it assumed.
        """
        if strategy_name(self.name) != "auto":
            return None
        return explain(
            *prepared.leaves, mask=task.mask, mesh=mesh, strategy=self.name, layout=task.layout, kernel=task.kernel,
            seq_len=task.layout.length, deterministic=False, dropout_p=task.dropout,
        ).strategy.name  # fmt: skip

    def count(self, prepared: PreparedEntry, task: Task, mesh: Mesh) -> list[Sent]:
        """Return what this rank sends in each pass, over the plain transport.

        `auto` would predict other times for that transport, so the strategy that it chose is counted.
        """
        counting = CountingTransport(mesh.transport(prepared.dout.device.type))
        config = Config(timeout=mesh.config.timeout, transport=counting.name)
        counted = Mesh(
            mesh.rank, mesh.size, lambda _: counting, group=mesh.group, backend=mesh.backend, config=config
        )  # fmt: skip
        counted_entry = Entry(self.choice(prepared, task, mesh) or self.name)
        return sent_by_passes(counted_entry._calls(task, counted), lambda: Sent(counting.sent, counting.messages))


def sent_by_passes(prepared: PreparedEntry, total: Callable[[], Sent]) -> list[Sent]:
    """Run both passes, and return what each has added to the total."""
    totals = [total()]
    out = prepared.forward()
    totals.append(total())
    torch.autograd.grad(out, prepared.leaves, prepared.dout)
    totals.append(total())
    return [Sent(new.bytes - old.bytes, new.messages - old.messages) for old, new in pairwise(totals)]


class CountingTransport(WrappedTransport):
    """Count the bytes and the messages that this rank sends in passes."""

    def __init__(self, wrapped: Transport) -> None:
        super().__init__(wrapped)
        self.sent = self.messages = 0

    def post(self, sends: Sequence[Message], receives: Sequence[Message], label: str = "") -> Handles:
        self.sent += sum(one.buffer.numel() for one in sends)
        self.messages += len(sends)
        return super().post(sends, receives, label)

    def share(self, data: bytes, label: str = "share", timeout: float | None = None) -> list[bytes]:
        return self._wrapped.share(data, label, timeout)
