"""DeepSpeed-Ulysses (arXiv 2309.14509): from sequence shards to head shards, attention without a ring, and back.

::

    q, k, v = all_to_all(q, k, v)       all rows of some heads          runtime/reshard.py, Reshard.to_heads
    out = attend(q, k, v)               over all tokens                 runtime/executor.py, forward_rows
    out = all_to_all(out)               the local rows of all heads     Reshard.to_sequence

Each rank computes with complete K/V heads. Their number must be a multiple of the ranks, or divide the ranks; ranks
that share a K/V head then get a copy each, and its gradients are summed. With `head_groups`, a rank computes its heads
group by group, while the next group arrives and the previous one is sent back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from burst_portable.errors import UnsupportedError
from burst_portable.layout import contiguous
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.head_division import HeadSplit, can_divide_heads, can_group_heads, heads_per_rank
from burst_portable.planning.plans import Plan, make_pass_plan
from burst_portable.planning.routes import RingRoute
from burst_portable.strategies.base import Machine, Strategy, ring_plan
from burst_portable.strategies.options import Option, option

MOST_GROUPS = 8


@dataclass(frozen=True)
class UlyssesStrategy(Strategy):
    """Exchange sequence shards for head shards during the attention.

    Attributes:
        head_groups: Number of groups in which a rank computes its heads.
    """

    name = "ulysses"
    title = "each rank gets all rows of some heads, computes attention locally, and sends the results back"
    suggested = ("ulysses",)

    head_groups: int = option(
        Option(1, "a number of groups", most=MOST_GROUPS, help="Groups in which heads are computed.")
    )

    def check(self, call: AttentionCall) -> None:
        ranks = call.ranks
        if not can_divide_heads(call, ranks):
            raise UnsupportedError(
                "ulysses cannot divide these heads among the ranks",
                got=f"{call.heads} query and {call.kv_heads} K/V heads on {ranks} ranks",
                allowed="query heads a multiple of the ranks, K/V heads a multiple or a divisor of them",
                next_step="use the strategy 'ring' or 'burst', or 'usp', which divides heads only inside nodes",
            )
        heads, kv_heads = heads_per_rank(call, ranks)
        if not can_group_heads(heads, kv_heads, self.head_groups):
            allowed = [n for n in range(1, MOST_GROUPS + 1) if can_group_heads(heads, kv_heads, n)]
            raise UnsupportedError(
                f"ulysses cannot compute these heads in {self.head_groups} groups",
                got=f"{heads} query and {kv_heads} K/V heads per rank",
                allowed=f"head_groups of {', '.join(map(str, allowed))}",
            )

    def plan(self, call: AttentionCall) -> Plan:
        self.check(call)
        ranks = call.ranks
        if ranks == 1:  # an exchange with no other rank would only copy
            return ring_plan(call, self.name, side="kv", route=RingRoute(1))
        heads, kv_heads = heads_per_rank(call, ranks)
        # After the first all-to-all every rank has all rows, here in natural order: this is a call of one rank.
        # `runtime.prepare.plan_for_kernel` may change that to rank order: see `planning.rank_order`.
        local = replace(
            call,
            layout=contiguous(call.layout.length, 1),
            kv_layout=contiguous(call.k_layout.length, 1),
            heads=heads // self.head_groups,
            kv_heads=max(1, kv_heads // self.head_groups),
        )
        return Plan(
            call,
            self.name,
            forward=make_pass_plan(local, "kv", RingRoute(1), stride=ranks),
            backward=make_pass_plan(local, "kv", RingRoute(1), RingRoute(1), stride=ranks),
            heads=HeadSplit(ranks),
            head_groups=self.head_groups,
        )

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        yield cls()
        if machine.hides_exchanges and can_divide_heads(call, call.ranks):
            heads = heads_per_rank(call, call.ranks)
            yield from (cls(n) for n in (2, 4) if can_group_heads(*heads, n))

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(head_groups=2)
