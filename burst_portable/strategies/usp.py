"""Unified Sequence Parallelism (arXiv 2405.07719), the head-first 2D attention of LoongTrain (arXiv 2406.18485).

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

If heads can only be divided among part of a node, consecutive members of a ring share a node. With `inner_ring_size`,
that many members form an inner ring, and another ring connects the inner rings (LoongTrain's double ring). A message
between nodes then overlaps with a round of the inner ring, instead of delaying each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import HeadSplit, Plan, can_divide_heads, heads_per_rank
from burst_portable.planning.routes import Side
from burst_portable.strategies.base import Machine, Strategy, make_route, node_size, ring_plan, should_round_gradients
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


@dataclass(frozen=True)
class UspStrategy(Strategy):
    """Use Ulysses inside nodes and a ring over the nodes.

    Attributes:
        ranks_per_node: Ranks per node, or per part of a node, that divide heads. Default: the largest divisor of the
            ranks that the heads allow, is at most 8 and leaves at least two nodes.
        inner_ring_size: Members of a ring that form an inner ring. Default: 1, no inner rings.
    """

    name = "usp"
    title = "each rank gets the node's rows of some heads, runs a ring over the nodes, and sends the results back"

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    backward_circulates: Side = option(BACKWARD_CIRCULATES, default="kv")
    transfer: Transfer = option(TRANSFER)  # between nodes, as the next option
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)
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
        nodes = call.ranks // ranks_per_node
        if nodes % self.inner_ring_size:
            allowed = f"a divisor of the {nodes} members of a ring"
            raise InputError("inner_ring_size does not divide the ring", got=self.inner_ring_size, allowed=allowed)
        if ranks_per_node == 1:
            return self._ring(call, nodes, reason=reason)
        if nodes == 1:
            return replace(UlyssesStrategy().plan(call), strategy=self.name, reason=reason)
        # After the first all-to-all a rank has the rows of its node: this is a call of one rank per node.
        heads, kv_heads = heads_per_rank(call, ranks_per_node)
        between_nodes = replace(
            call,
            layout=call.layout.joined(ranks_per_node).sorted(),
            kv_layout=call.k_layout.joined(ranks_per_node).sorted(),
            heads=heads,
            kv_heads=kv_heads,
        )
        ring = self._ring(between_nodes, nodes, reason=reason, stride=ranks_per_node)
        return replace(ring, call=call, heads=HeadSplit(ranks_per_node))

    def _ring(self, call: AttentionCall, nodes: int, *, reason: str, stride: int = 1) -> Plan:
        """Return the plan of a ring over nodes, or of inner rings and a ring over them."""
        side, inner = self.backward_circulates, self.inner_ring_size
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        route, backward_route = make_route(nodes, self.transfer), None
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
        """Yield Ulysses inside nodes, or inside the largest parts of nodes that the heads allow."""
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

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(backward_circulates="q", transfer="direct")
        yield cls(2, inner_ring_size=2)

    def _ranks_per_node(self, call: AttentionCall) -> tuple[int, str]:
        """Return (ranks per node, the reason if it is a default). Raises the errors of `plan`."""
        ranks = call.ranks
        if self.ranks_per_node is None:
            largest = node_size(ranks)
            ranks_per_node = node_size(ranks, lambda size: can_divide_heads(call, size))
            fewer = f"; these heads cannot be divided among {largest}" if ranks_per_node < largest else ""
            return ranks_per_node, f"ranks_per_node={ranks_per_node} by default{fewer}"
        check_divides(self.ranks_per_node, ranks)
        if not can_divide_heads(call, self.ranks_per_node):
            fitting = [i for i in divisors(ranks) if can_divide_heads(call, i)]
            raise UnsupportedError(
                "usp cannot divide these heads among the ranks of a node",
                got=f"{call.heads} query and {call.kv_heads} K/V heads, ranks_per_node={self.ranks_per_node}",
                allowed=f"ranks_per_node of {', '.join(map(str, fitting))} on {ranks} ranks: "
                "query heads a multiple of it, K/V heads a multiple or a divisor",
                next_step="use one of these, or the strategy 'double_ring'",
            )
        return self.ranks_per_node, ""
