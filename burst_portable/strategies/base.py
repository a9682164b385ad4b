"""Define `Strategy`, which makes plans, and the helpers that several strategies share.

A strategy is one file, which also declares its options, its candidates for `auto` and its configurations for the tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.messages import row_size
from burst_portable.planning.plans import Plan, make_pass_plan
from burst_portable.planning.routes import DirectRoute, RingRoute, Route, Side
from burst_portable.strategies.options import GradientCommDtype, LocalBlockOrder, Transfer, check_options, options_of
from burst_portable.utils.values import divisors

_MOST_RANKS_AT_ONCE = 16  # with more ranks, the blocks of all would fill the memory
OFFERED_AT_ONCE = f"only with measured links (--hardware-spec), and up to {_MOST_RANKS_AT_ONCE} ranks"
"""`Strategy.offered` of a strategy that depends on `Machine.can_hold_all`."""
OFFERED_IN_NODES = "only with the ranks per node (--ranks-per-node)"
"""`Strategy.offered` of a strategy that depends on `Machine.ranks_per_node`."""
_SMALL_SLOWDOWN = 0.5  # share of a message's time: if messages delay a forward kernel by less, splitting them pays


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine for which `auto` compares candidates.

    Attributes:
        hardware: Speeds from which the time of plans is predicted.
        ranks_per_node: Ranks per node. None: one node, or unknown.
    """

    hardware: HardwareSpec
    ranks_per_node: int | None = None

    def can_hold_all(self, call: AttentionCall) -> bool:
        """Return whether a rank may receive all blocks at once: few ranks, and that bandwidth was measured."""
        return (
            bool(self.hardware.peer_copy_bandwidth or self.hardware.all_to_all_bandwidth)
            and call.ranks <= _MOST_RANKS_AT_ONCE
        )

    @property
    def hides_exchanges(self) -> bool:
        """Return whether an all-to-all is worth splitting, so that kernels overlap its parts."""
        return bool(self.hardware.peer_copy_bandwidth) or bool(
            self.hardware.p2p_bandwidth and self.hardware.comm_slowdown[0] < _SMALL_SLOWDOWN
        )


@dataclass(frozen=True)
class Strategy(ABC):
    """One way to distribute an attention over ranks: a frozen dataclass whose fields are its options.

    Attributes:
        name: Name of the file, registry key, value on the command line and label in traces.
        title: One line that describes it.
        exact: Whether it computes the given mask. If not, `computes` returns the mask that it computes, and `auto`
            never chooses it.
        suggested: Labels of those of `trials` that a profile may recommend.
        offered: When `candidates` yields anything, for `plan --strategy all`: ``only with ...``. Default: always.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    exact: ClassVar[bool] = True
    suggested: ClassVar[tuple[str, ...]] = ()
    offered: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_options(self)

    @abstractmethod
    def plan(self, call: AttentionCall) -> Plan:
        """Return the plan for a call. Equal calls must give equal plans on every rank.

        Raises:
            UnsupportedError: The strategy cannot serve this call. `auto` then leaves it out.
            InputError: An option does not fit this call. `auto` then leaves it out.
        """

    def check(self, call: AttentionCall) -> None:
        """Raise the error that `plan` would raise for this call."""
        self.plan(call)

    @property
    def label(self) -> str:
        """Name and options that differ from their defaults: ``ring``, or ``ring(transfer=direct, prefetch_steps=8)``.

        `registry.make_strategy` reads it back.
        """
        given = ((name, getattr(self, name), declared.default) for name, declared in options_of(self))
        changed = ", ".join(f"{name}={value}" for name, value, default in given if value != default)
        return f"{self.name}({changed})" if changed else self.name

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        """Yield each configuration that `auto` compares. Those that cannot plan are left out."""
        yield cls()

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        """Yield the configurations that the conformance tests run."""
        yield cls()

    def computes(self, mask: Mask) -> Mask:
        """Return the mask that is computed for `mask`; another one only if the strategy is not `exact`."""
        return mask


def default_ranks_per_node(ranks: int, fits: Callable[[int], bool] = lambda ranks_per_node: True) -> int:
    """Return the default number of ranks per node.

    This is the largest divisor of `ranks` that satisfies `fits`, is at most 8 and leaves at least two nodes; 1 if
    there is none.
    """
    return max((i for i in divisors(ranks) if i <= min(ranks // 2, 8) and fits(i)), default=1)


def should_round_gradients(call: AttentionCall, gradient_comm_dtype: GradientCommDtype) -> bool:
    """Return whether gradients are rounded before they are sent. Gradients of 32-bit inputs never are."""
    return gradient_comm_dtype == "input" and call.itemsize < 4


def local_first_share(call: AttentionCall, order: LocalBlockOrder, side: Side, *, rounds_gradients: bool) -> float:
    """Return the share of the local block that is computed before all remote blocks: 1 for "first", 0 for "last".

    For "split", it is block bytes / (block + gradient bytes), so that each part overlaps the transfer of its size.
    """
    if order != "split":
        return float(order == "first")
    block = row_size(call, side, is_result=False)
    gradients = row_size(call, side, is_result=True, rounds_gradients=rounds_gradients)
    return block / (block + gradients)


def make_route(
    ranks: int, transfer: Transfer, prefetch_steps: int = 1, blocks_per_launch: int = 1, local_first_share: float = 1.0
) -> Route:
    """Return the route for a value of the option `transfer`. The other options are those of `routes.DirectRoute`."""
    if transfer == "direct":
        remote_blocks = max(1, ranks - 1)
        blocks_per_launch = min(blocks_per_launch, remote_blocks)
        launches = -(-remote_blocks // blocks_per_launch)
        return DirectRoute(ranks, min(prefetch_steps, launches), blocks_per_launch, local_first_share)
    return RingRoute(ranks)


def ring_plan(
    call: AttentionCall,
    strategy: str,
    *,
    side: Side,
    route: Route,
    backward_route: Route | None = None,
    reason: str = "",
    stride: int = 1,
    rounds_gradients: bool = False,
) -> Plan:
    """Return a plan that sends K and V in the forward pass, and `side` with its gradients in the backward pass.

    `backward_route` is also the route of gradients. Default: `route`.
    """
    backward_route = backward_route or route
    return Plan(
        call,
        strategy,
        forward=make_pass_plan(call, "kv", route, stride=stride),
        backward=make_pass_plan(call, side, backward_route, backward_route, stride, rounds_gradients),
        reason=reason,
    )


def kv_plan(
    call: AttentionCall,
    strategy: str,
    make: Callable[..., Route],
    local_block_order: LocalBlockOrder,
    gradient_comm_dtype: GradientCommDtype,
) -> Plan:
    """Return a plan that sends K and V in both passes.

    `make(local_first_share=...)` returns a route. The share of `local_block_order` is that of the backward pass.
    """
    rounds_gradients = should_round_gradients(call, gradient_comm_dtype)
    share = local_first_share(call, local_block_order, "kv", rounds_gradients=rounds_gradients)
    return ring_plan(
        call,
        strategy,
        side="kv",
        route=make(),
        backward_route=make(local_first_share=share),
        rounds_gradients=rounds_gradients,
    )
