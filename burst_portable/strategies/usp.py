"""Unified Sequence Parallelism (arXiv 2405.07719), the 2D attention of LoongTrain (arXiv 2406.18485).

Ulysses inside nodes of `ranks_per_node` ranks, a ring over the nodes::

    q, k, v = all_to_all in the node: the node's rows of some heads      node 0    0   1   2   3
    for each node:                                                                 |   |   |   |    one ring per column
        send k, v to the next node; receive the next block               node 1    4   5   6   7
        out, lse = merge(attend(q, k, v))                                          |   |   |   |
    out = all_to_all in the node: the local rows of all heads            node 2    8   9  10  11

A launch takes the rows of a node, `ranks_per_node` times as many as in a ring over all ranks, and there are
`ranks_per_node` times fewer launches. The network card of every rank carries an equal share of the bytes between nodes.
With all ranks in one node the plan is that of `ulysses`, with one rank per node that of `ring`. Each rank computes with
complete K/V heads, so their number is a multiple of `ranks_per_node` or divides it. In the latter case, ranks of a node
that share a K/V head get a copy each. The copies are sent between nodes too, and their gradients are summed.

That is LoongTrain's head-first placement. With the placement "context_first", the ring is inside nodes. Ranks at the
same position of all nodes then divide heads: an all-to-all per column of the picture, and a ring per row. Forward, a
rank sends 2·(Hq + Hkv)·S·D·(n - 1)/n elements to the other n - 1 nodes, and 2·Hkv·S·D·(n - 1) with "head_first". The
first is less if n is above (Hq + Hkv) / Hkv, but nothing overlaps with it.

If heads can only be divided among part of a node, consecutive members of a ring share a node. With `inner_ring_size`,
that many members form an inner ring, and another ring connects the inner rings (LoongTrain's double ring). A message
between nodes then overlaps with a round of the inner ring, instead of delaying each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.head_division import HeadSplit, can_divide_heads, heads_per_rank
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import Side
from burst_portable.strategies.base import (
    OFFERED_IN_NODES,
    Machine,
    Strategy,
    default_ranks_per_node,
    make_route,
    ring_plan,
    should_round_gradients,
)
from burst_portable.strategies.double_ring import double_ring_routes
from burst_portable.strategies.options import (
    BACKWARD_CIRCULATES,
    GRADIENT_COMM_DTYPE,
    RANKS_PER_NODE,
    TRANSFER,
    GradientCommDtype,
    Option,
    Transfer,
    option,
)
from burst_portable.strategies.ulysses import UlyssesStrategy
from burst_portable.utils.values import check_divides, divisors

Placement = Literal["head_first", "context_first"]


@dataclass(frozen=True)
class UspStrategy(Strategy):
    """Use Ulysses inside nodes and a ring over the nodes, or the reverse.

    Attributes:
        ranks_per_node: Ranks per node, or per part of a node, that divide heads. With `placement` "context_first", they
            form a ring. Default: the largest divisor of the ranks that the heads allow, is at most 8 and leaves at
            least two nodes.
        placement: Whether the ranks of a node divide heads and form rings over the nodes ("head_first"), or form a ring
            and divide heads over the nodes ("context_first").
        inner_ring_size: Members of a ring that form an inner ring. Default: 1, no inner rings.
    """

    name = "usp"
    title = "each rank gets the node's rows of some heads, runs a ring over the nodes, and sends the results back"
    offered = OFFERED_IN_NODES

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    backward_circulates: Side = option(BACKWARD_CIRCULATES, default="kv")
    transfer: Transfer = option(TRANSFER)  # of the ring, as the next option
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)
    placement: Placement = option(
        Option(
            "head_first",
            "placement",
            choices=("head_first", "context_first"),
            help="The ranks of a node divide heads, or form a ring.",
        )
    )
    inner_ring_size: int = option(
        Option(
            1,
            "a number of members",
            requires=("transfer", "ring", "blocks that come from their owners have no inner ring"),
            help="Members of a ring that form an inner ring.",
        )
    )

    def plan(self, call: AttentionCall) -> Plan:
        ranks_per_node, reason = self._ranks_per_node(call)
        size = self._head_ranks(call.ranks, ranks_per_node)
        members = call.ranks // size
        if members % self.inner_ring_size:
            allowed = f"a divisor of the {members} members of a ring"
            raise InputError("inner_ring_size does not divide the ring", got=self.inner_ring_size, allowed=allowed)
        if size == 1:
            return self._ring(call, members, reason=reason)
        if members == 1:
            return replace(UlyssesStrategy().plan(call), strategy=self.name, reason=reason)
        spacing, stride = (1, size) if self.placement == "head_first" else (members, 1)
        # After the first all-to-all a rank has the rows of all ranks with which it divides heads, for example of its
        # node: this is a call of one rank for each member of a ring.
        heads, kv_heads = heads_per_rank(call, size)
        of_ring = replace(
            call,
            layout=call.layout.joined(size, spacing).sorted(),
            kv_layout=call.k_layout.joined(size, spacing).sorted(),
            heads=heads,
            kv_heads=kv_heads,
        )
        ring = self._ring(of_ring, members, reason=reason, stride=stride)
        return replace(ring, call=call, heads=HeadSplit(size, spacing))

    def _ring(self, call: AttentionCall, members: int, *, reason: str, stride: int = 1) -> Plan:
        """Return the plan of a ring, or of inner rings and a ring over them."""
        side, inner = self.backward_circulates, self.inner_ring_size
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        route, backward_route = make_route(members, self.transfer), None
        if inner > 1:
            route, backward_route = double_ring_routes(call, inner, side, rounds_gradients=rounds_gradients)
        return ring_plan(
            call,
            self.name,
            side=side,
            route=route,
            backward_route=backward_route,
            reason=reason,
            stride=stride,
            rounds_gradients=rounds_gradients,
        )

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        """Yield Ulysses inside nodes, or inside the largest parts of nodes that the heads allow; also across nodes."""
        node = machine.ranks_per_node
        if node is None or node == 1:
            return
        fitting = [i for i in divisors(node) if i > 1 and can_divide_heads(call, i)]
        ranks_per_node = max(fitting, default=node)  # its plan raises an error with the reason
        if ranks_per_node < call.ranks and call.ranks % ranks_per_node == 0:
            yield cls(ranks_per_node)
            yield cls(ranks_per_node, backward_circulates="q")
            yield cls(ranks_per_node, transfer="direct")
            if ranks_per_node < node:
                yield cls(ranks_per_node, inner_ring_size=node // ranks_per_node)
        if node < call.ranks and call.ranks % node == 0 and can_divide_heads(call, call.ranks // node):
            yield cls(node, placement="context_first")
            yield cls(node, placement="context_first", transfer="direct")

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(backward_circulates="q", transfer="direct")
        yield cls(2, inner_ring_size=2)
        yield cls(placement="context_first")

    def _head_ranks(self, ranks: int, ranks_per_node: int) -> int:
        """Return how many ranks divide heads among themselves."""
        return ranks_per_node if self.placement == "head_first" else ranks // ranks_per_node

    def _ranks_per_node(self, call: AttentionCall) -> tuple[int, str]:
        """Return (ranks per node, the reason if it is a default). Raises the errors of `plan`."""
        ranks = call.ranks

        def fits(ranks_per_node: int) -> bool:
            return can_divide_heads(call, self._head_ranks(ranks, ranks_per_node))

        if self.ranks_per_node is None:
            largest = default_ranks_per_node(ranks)
            ranks_per_node = default_ranks_per_node(ranks, fits)
            if not fits(ranks_per_node):  # with "context_first", one rank per node divides heads among all ranks
                ranks_per_node = ranks
            among = self._head_ranks(ranks, largest)
            fewer = f"; these heads cannot be divided among {among}" if ranks_per_node != largest else ""
            return ranks_per_node, f"ranks_per_node={ranks_per_node} by default{fewer}"
        check_divides(self.ranks_per_node, ranks)
        if not fits(self.ranks_per_node):
            fitting = [i for i in divisors(ranks) if fits(i)]
            across = self.placement == "context_first"
            raise UnsupportedError(
                f"usp cannot divide these heads among {'the nodes' if across else 'the ranks of a node'}",
                got=f"{call.heads} query and {call.kv_heads} K/V heads, ranks_per_node={self.ranks_per_node}",
                allowed=f"ranks_per_node of {', '.join(map(str, fitting))} on {ranks} ranks: "
                f"query heads a multiple of {'the nodes' if across else 'it'}, K/V heads a multiple or a divisor",
                next_step="use one of these, or the strategy 'double_ring'",
            )
        return self.ranks_per_node, ""
