"""Define `Strategy`: a generator of plans, in one file that also says how it is tried, chosen and described."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.messages import row_size
from burst_portable.planning.plans import Plan, make_pass_plan
from burst_portable.planning.routes import Fetch, Ring, Route, Side
from burst_portable.strategies.options import GradientCommDtype, LocalBlockOrder, Transfer, check_options
from burst_portable.utils.values import divisors

_AT_ONCE = 16  # ranks, at most, whose blocks may all be held at once
_LITTLE = 0.5  # of a message's time: if messages delay a forward kernel by less, sending them in parts pays


@dataclass(frozen=True, slots=True)
class Machine:
    """What a candidate for `auto` may depend on besides its call.

    Attributes:
        rates: What plans are priced with.
        ranks_per_node: None if there is one node, or if nobody said.
    """

    hardware: HardwareSpec
    ranks_per_node: int | None = None

    def can_hold_all(self, call: AttentionCall) -> bool:
        """Return whether a rank may receive all blocks at once.

        That takes a measured rate of such messages, and few ranks: the blocks of many would fill the memory.
        """
        return bool(self.hardware.peer_copy_bandwidth or self.hardware.all_to_all_bandwidth) and call.ranks <= _AT_ONCE

    @property
    def hides_exchanges(self) -> bool:
        """Whether an exchange between all ranks is worth dividing, so that kernels compute beside its parts."""
        return bool(self.hardware.peer_copy_bandwidth) or bool(
            self.hardware.p2p_bandwidth and self.hardware.comm_slowdown[0] < _LITTLE
        )


@dataclass(frozen=True)
class Strategy(ABC):
    """One way to distribute an attention over ranks: a frozen, hashable dataclass, whose fields are its options.

    Attributes:
        name: The file's name, registry key, command-line value and trace label.
        title: What it does, in one line.
        exact: Whether it computes the mask that it is given. If not, `computes` says what, and `auto` never takes it.
        suggested: Those of its `trials` that a profile may propose.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    exact: ClassVar[bool] = True
    suggested: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def plan(self, call: AttentionCall) -> Plan:
        """Return the plan for a call. It is pure: equal calls give equal plans, on every rank.

        Raises `UnsupportedError` or `InputError` if strategy and call do not go together, and is then not compared.
        """

    def check(self, call: AttentionCall) -> None:
        """Raise as `plan` does if strategy and call do not go together."""
        self.plan(call)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        """Yield (label, strategy) of what `auto` compares for a call. Those that cannot plan it are left out.

        A label is the name, or the name, then "+", "," or " ", and words for the options.
        """
        yield cls.name, cls()

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        """Return what conformance tries, by label: the name, or the name, "+" and a word for the options.

        Labels of other strategies are refused, as those of `candidates` are.
        """
        return {cls.name: cls()}

    def computes(self, mask: Mask) -> Mask:
        """Return the mask that is computed if `mask` is asked for; another one only if the strategy is not `exact`."""
        return mask

    def as_code(self) -> str:
        """Return how a program writes this strategy: ``strategy='ring'``, or ``RingStrategy(transfer='direct')``."""
        given = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        changed = ", ".join(f"{name}={value!r}" for name, value, default in given if value != default)
        return f"{type(self).__name__}({changed})" if changed else f"strategy={self.name!r}"


def node_size(ranks: int, fits: Callable[[int], bool] = lambda ranks_per_node: True) -> int:
    """Return the default number of ranks per node.

    This is the largest divisor of `ranks` that satisfies `fits`, is at most 8 and leaves at least two nodes; 1 if
    there is none.
    """
    return max((i for i in divisors(ranks) if i <= min(ranks // 2, 8) and fits(i)), default=1)


def travel_narrow(call: AttentionCall, gradient_comm_dtype: GradientCommDtype) -> bool:
    """Return whether gradients travel in fewer bytes than they are summed in. Those of 32-bit inputs never do."""
    return gradient_comm_dtype == "input" and call.itemsize < 4


def share_before(call: AttentionCall, order: LocalBlockOrder, side: Side, *, narrow: bool) -> float:
    """Return the fraction of the local block that is computed before all remote blocks: 1 for "first", 0 for "last".

    For "split", it is block bytes / (block + gradient bytes), so that each part overlaps the transfer of its size.
    """
    if order != "split":
        return float(order == "first")
    block, gradients = (row_size(call, side, result=result, narrow=narrow) for result in (False, True))
    return block / (block + gradients)


def route(
    ranks: int, transfer: Transfer, prefetch_steps: int = 1, blocks_per_launch: int = 1, before: float = 1.0
) -> Route:
    """Return the route for a way to transfer blocks. The others are for `routes.Fetch`."""
    if transfer == "direct":
        others = max(1, ranks - 1)
        together = min(blocks_per_launch, others)
        return Fetch(ranks, min(prefetch_steps, -(-others // together)), together, before)
    return Ring(ranks)


def ring_plan(
    call: AttentionCall, strategy: str, *, side: Side, path: Route, back: Route | None = None, note: str = "",
    stride: int = 1, narrow: bool = False,
) -> Plan:  # fmt: skip
    """Return the plan of the whole ring family: K and V travel forward, `side` and its gradients travel backward.

    Args:
        call: What is planned.
        strategy: The name of the strategy.
        side: What travels backward.
        path: The route of the forward pass.
        back: The route of the backward pass. Default: `path`.
        note: The plan's `reason`.
        stride: See `PassPlan`.
        narrow: See `PassPlan`.
    """
    back = back or path
    return Plan(
        call,
        strategy,
        forward=make_pass_plan(call, "kv", path, stride=stride),
        backward=make_pass_plan(call, side, back, results=back, stride=stride, narrow=narrow),
        reason=note,
    )
