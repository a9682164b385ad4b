"""DeepSpeed-Ulysses (arXiv 2309.14509): from sequence shards to head shards, plain attention, and back.

::

    q, k, v <- all-to-all: all rows of some heads
    out <- attend(q, k, v) over the whole sequence
    out <- all-to-all: all heads of some rows

Ranks hold whole K/V heads: their number must be a multiple of the ranks, or divide them (then ranks that share a
K/V head each get a copy, and its gradients are added up). With `head_groups`, a rank computes its heads group by group,
while the next group arrives and the previous one leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from burst_portable.errors import UnsupportedError
from burst_portable.layout import contiguous
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import HeadSplit, Plan, can_group, can_share, heads_each, make_pass_plan
from burst_portable.planning.routes import Ring
from burst_portable.strategies.base import Machine, Strategy
from burst_portable.strategies.options import Option, option

MOST_GROUPS = 8


@dataclass(frozen=True)
class UlyssesStrategy(Strategy):
    """Heads are sharded during the attention; a rank computes its heads in this many `head_groups`."""

    name = "ulysses"
    title = "all rows of some heads to each rank, plain attention there, and back"
    suggested = ("ulysses",)

    head_groups: int = option(
        Option(1, "a number of groups", most=MOST_GROUPS, help="Groups in which heads are computed.")
    )

    def check(self, call: AttentionCall) -> None:
        ranks = call.ranks
        if not shares_out(call, ranks):
            raise UnsupportedError(
                "ulysses cannot share these heads out",
                got=f"{call.heads} query and {call.kv_heads} K/V heads on {ranks} ranks",
                allowed="query heads a multiple of the ranks; K/V heads a multiple or a divisor of them",
                next_step="use the strategy 'ring' or 'burst', or 'usp', which shares heads out inside nodes",
            )
        heads, kv_heads = heads_each(call.heads, call.kv_heads, ranks)
        if not can_group(heads, kv_heads, self.head_groups):
            allowed = [n for n in range(1, MOST_GROUPS + 1) if can_group(heads, kv_heads, n)]
            raise UnsupportedError(
                f"ulysses cannot compute these heads in {self.head_groups} groups",
                got=f"{heads} query and {kv_heads} K/V heads per rank",
                allowed=f"groups of {', '.join(map(str, allowed))}",
            )

    def plan(self, call: AttentionCall) -> Plan:
        self.check(call)
        ranks = call.ranks
        heads, kv_heads = heads_each(call.heads, call.kv_heads, ranks)
        # After the first all-to-all every rank holds all rows, here in their natural order: a call of one rank.
        # `runtime.prepare.plan_for_kernel` may change that to rank order: see `planning.row_order`.
        whole = replace(
            call,
            layout=contiguous(call.layout.length, 1),
            kv_layout=contiguous(call.k_layout.length, 1),
            heads=heads // self.head_groups,
            kv_heads=max(1, kv_heads // self.head_groups),
        )
        return Plan(
            call,
            self.name,
            forward=make_pass_plan(whole, "kv", Ring(1), stride=ranks),
            backward=make_pass_plan(whole, "kv", Ring(1), Ring(1), stride=ranks),
            heads=HeadSplit(ranks, self.head_groups),
        )

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        yield "ulysses", cls()
        if machine.hides_exchanges:
            yield from ((f"ulysses, {groups} groups", cls(groups)) for groups in possible_groups(call))

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {"ulysses": cls(), "ulysses+groups": cls(head_groups=2)}


def possible_groups(call: AttentionCall) -> tuple[int, ...]:
    """Numbers of groups, above one, that are worth trying."""
    if not shares_out(call, call.ranks):
        return ()
    heads, kv_heads = heads_each(call.heads, call.kv_heads, call.ranks)
    return tuple(n for n in (2, 4) if can_group(heads, kv_heads, n))


def shares_out(call: AttentionCall, ranks: int) -> bool:
    """Whether this many ranks can divide the heads of a call among them."""
    return can_share(call.heads, call.kv_heads, ranks)
