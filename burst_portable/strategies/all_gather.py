"""All-gather of K and V (Llama 3, arXiv 2407.21783, section 3.3.2): one launch over all keys that a rank sees.

::

    forward                                        backward
    for each group of heads:                       for each group of heads:
        K, V = all_gather(k, v)                        K, V = all_gather(k, v)
        out, lse = attend(q, K, V)                     dq, dK, dV = attend_backward(q, K, V, dout, lse)
                                                       dk, dv = reduce_scatter(dK, dV)

Only rows that a rank sees under the mask are sent to it, and only their gradients come back. Both are messages between
two ranks; the owner of a row adds its gradients. With full masks these are the bytes of an all-gather and of a
reduce-scatter: (ranks - 1) blocks per rank, as in a ring.

A rank has few and large launches and merges nothing, but it holds all rows of a group of heads. While one group
computes, K and V of the next one arrive and dK and dV of the one before are sent (`runtime/head_groups.py`). So two
groups are in memory. If there are few K/V heads (GQA), they are short to send and small. That is where this strategy
is best.

Differs from Llama 3: K and V are sent in groups of heads, and rows that the mask hides are not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from burst_portable.errors import UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import BlockDependencies, FromOwners
from burst_portable.strategies.base import OFFERED_AT_ONCE, Machine, Strategy, ring_plan, should_round_gradients
from burst_portable.strategies.options import GRADIENT_COMM_DTYPE, GradientCommDtype, Option, option
from burst_portable.utils.values import divisors

MOST_GROUPS = 8
_DEFAULT_GROUPS = 4


@dataclass(frozen=True)
class AllGatherStrategy(Strategy):
    """Gather K and V in both passes, and reduce dK and dV at their owners.

    Attributes:
        head_groups: Number of groups in which K/V heads are gathered. With one group, all heads are in memory and no
            message overlaps with a kernel; each further group costs a launch. Default: the largest divisor of the K/V
            heads that is at most 4. That halves the memory. For 8 K/V heads, its predicted time on H200 is at most 1 %
            above that of the best number, from 32,768 tokens on 4 ranks to 1,048,576 on 16.
    """

    name = "all_gather"
    title = "each rank gathers K and V that its queries see, in groups of heads; dK and dV are reduced at their owners"
    suggested = ("all_gather",)
    offered = OFFERED_AT_ONCE

    head_groups: int | None = option(
        Option(None, "a number of groups", most=MOST_GROUPS, help="Groups in which K/V heads are gathered.")
    )
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def check(self, call: AttentionCall) -> None:
        if call.kv_heads % self._groups(call):
            allowed = [n for n in divisors(call.kv_heads) if n <= MOST_GROUPS]
            raise UnsupportedError(
                f"all_gather cannot gather these heads in {self.head_groups} groups",
                got=f"{call.kv_heads} K/V heads",
                allowed=f"head_groups of {', '.join(map(str, allowed))}",
            )

    def plan(self, call: AttentionCall) -> Plan:
        self.check(call)
        groups = self._groups(call) if call.ranks > 1 else 1
        group = replace(call, heads=call.heads // groups, kv_heads=call.kv_heads // groups)
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        plan = ring_plan(group, self.name, side="kv", route=GatherRoute(call.ranks), rounds_gradients=rounds_gradients)
        return replace(plan, call=call, head_groups=groups)

    def _groups(self, call: AttentionCall) -> int:
        """Return the number of groups of heads."""
        if self.head_groups is not None:
            return self.head_groups
        return max(n for n in divisors(call.kv_heads) if n <= _DEFAULT_GROUPS)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        if machine.can_hold_all(call):
            yield cls()
            yield from (cls(n) for n in (1, 2, 8) if call.kv_heads % n == 0)

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(head_groups=1)


@dataclass(frozen=True)
class GatherRoute(FromOwners):
    """Every block leaves its owner at step 0, and is computed with at step 1 together with the local block."""

    ranks: int
    name: str = "all_gather"
    description: str = "all at once from their owners"
    trims: bool = True
    local_first_share: float = 0.0

    def step(self, owner: int, rank: int) -> int:
        return 1

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        return (owner, 0) if dependencies.needs(owner, rank) else None
