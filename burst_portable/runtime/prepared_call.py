"""Define `PreparedCall`, what one call of `attention` runs, with `Executor`, which runs it, and `Observer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.comm.agreement import CallSignature
from burst_portable.comm.base import Handle, Transport
from burst_portable.kernels.base import Kernel
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import PassMessages
from burst_portable.planning.plans import PassName, PassPlan, Plan
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Compute

if TYPE_CHECKING:
    from burst_portable.mesh import Mesh

_NOTHING = nullcontext()
Sent = tuple[Move, Tensor]
"""A message: its move in the plan, and its buffer."""


class Observer:
    """Observe a pass. This class does nothing; the profiler derives from it."""

    def computes(self, compute: Compute, like: Tensor, *, backward: bool) -> AbstractContextManager[object]:
        """Return a context around one launch of the kernel. `like` has its device, and the dtype of q, k and v."""
        return _NOTHING

    def copies(self, device: torch.device, step: int, *, backward: bool) -> AbstractContextManager[object]:
        """Return a context around copies and additions outside of kernels: messages, and gradients that arrived."""
        return _NOTHING

    def posts(self, sends: Sequence[Sent], receives: Sequence[Sent], step: int, *, backward: bool) -> Posting:
        """Return a context around the start of one step's messages."""
        return NO_POSTING


class Posting:
    """Context around the start of one step's messages. This class does nothing."""

    def __enter__(self) -> Posting:
        return self

    def __exit__(self, *_: object) -> None:
        """Record nothing."""

    def wrap(self, sends: list[Handle], receives: list[Handle]) -> tuple[list[Handle], list[Handle]]:
        """Return the handles of the sends and of the receives, in order."""
        return sends, receives


NO_POSTING = Posting()
NO_OBSERVER = Observer()


class PreparedPass(NamedTuple):
    """One pass of a prepared call, on one rank."""

    plan: PassPlan  # the schedule of all ranks
    signature: CallSignature  # facts that must be equal on all ranks when the pass begins
    single: Compute | None  # the computation, if the pass of this rank is one launch without messages
    messages: PassMessages
    bytes_per_sender: int = 0  # see `planning.messages.Inboxes`
    separate: tuple[PassMessages, ...] = ()  # the messages of K and those of V, if they are sent separately

    @classmethod
    def of(
        cls,
        plan: PassPlan,
        rank: int,
        signature: CallSignature,
        bytes_per_sender: int = 0,
        tensors: tuple[int | None, ...] = (),
    ) -> PreparedPass:
        """Return the prepared pass of a rank. `tensors`: see `Plan.tensors`; empty if K and V are sent together."""
        separate = tuple(PassMessages(plan, rank, tensor) for tensor in tensors)
        return cls(plan, signature, plan.single_compute(rank), PassMessages(plan, rank), bytes_per_sender, separate)


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """Everything about one call of `attention` except its tensors. A mesh remembers it."""

    plan: Plan
    kernel_call: AttentionCall  # what a launch computes: one group of this rank's heads. `plan.call` has all heads.
    backend: Backend
    kernel: Kernel
    transport: Transport
    executor: Executor
    forward: PreparedPass
    backward: PreparedPass
    # By pass and round (`Plan.rounds`): byte offsets of messages in the receivers' inboxes. Empty if senders do not
    # write there.
    offsets: Mapping[PassName, tuple[Mapping[Move, int], ...]] = field(default_factory=dict)
    yields_to_comm: bool = False  # whether kernels leave multiprocessors to kernels that send messages
    backward_takes_out: bool = False  # whether the backward kernel takes out instead of delta
    with_lse: bool = True  # whether the caller requests LSE, which a head-parallel plan then sends back
    reason: str = ""  # why this kernel was chosen
    values_key: bytes = b""  # see `runtime.equal_shards`; empty if ranks do not compare V
    observer: Observer = NO_OBSERVER  # the profiler, if one is installed

    def with_seed(self, seed: int) -> PreparedCall:
        """Return the call with this seed of dropout."""
        assert self.kernel_call.dropout is not None, "the caller has checked"
        return replace(
            self, kernel_call=replace(self.kernel_call, dropout=self.kernel_call.dropout._replace(seed=seed))
        )

    def from_head(self, head: int) -> PreparedCall:
        """Return the call of some of the heads, from `head` on. Only dropout depends on it."""
        dropout = self.kernel_call.dropout
        if dropout is None or not head:
            return self
        return replace(
            self, kernel_call=replace(self.kernel_call, dropout=dropout._replace(first_head=dropout.first_head + head))
        )


class Executor(ABC):
    """Run the passes of a plan on one rank. It has no state."""

    @abstractmethod
    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """Run a forward pass, which the caller begins and ends. `keep`: Whether a backward pass may follow.

        Returns:
            out of shape [B, S, Hq, Dv] in the dtype of q; LSE of shape [B, Hq, S] in the accumulation dtype, or None if
            the caller does not request it; the tensors that `backward` needs, without the sinks.
        """

    @abstractmethod
    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Run a backward pass, which the caller begins and ends. Return (dq, dk, dv, dsinks).

        `saved`: The tensors that `forward` returned. `dout` is None if this rank's result was not used.
        """


CallWrapper = Callable[["PreparedCall", "Mesh"], PreparedCall]
call_wrapper: ContextVar[CallWrapper | None] = ContextVar("call_wrapper", default=None)
"""If set, replaces the observer, kernel or transport of each call before its forward pass. Backward keeps them."""
