"""Unified Sequence Parallelism (arXiv 2405.07719), the head-first 2D attention of LoongTrain (arXiv 2406.18485).

Ulysses inside nodes of `ranks_per_node` ranks, a ring over the nodes::

    q, k, v <- all-to-all in the node: the node's rows of some heads     node 0    0   1   2   3
    for each node:                                                                 |   |   |   |    a ring for each
        send k, v on to the next node; receive the next                  node 1    4   5   6   7    place in a node
        out, LSE <- merge(attend(q, k, v))                                         |   |   |   |
    out <- all-to-all in the node: the rank's rows of all heads          node 2    8   9  10  11

A launch takes the rows of a whole node, `ranks_per_node` times as many as in a ring over all ranks, and there are
`ranks_per_node` times fewer launches; every rank's own network card carries a share of what crosses nodes. With all
ranks in one node this is Ulysses, with one rank per node a ring: the same plans. Ranks hold whole K/V heads, so their
number is a multiple of `ranks_per_node` or divides it. In the latter case ranks of a node that share a K/V head each
get a copy, which travels too, and its gradients are added up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from burst_portable.errors import UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import HeadSplit, Plan, heads_each
from burst_portable.planning.routes import Side
from burst_portable.strategies.base import Machine, Strategy, node_size, ring_plan, route, travel_narrow
from burst_portable.strategies.options import (
    BACKWARD_CIRCULATES,
    GRADIENT_COMM_DTYPE,
    RANKS_PER_NODE,
    TRANSFER,
    GradientCommDtype,
    Transfer,
    option,
)
from burst_portable.strategies.ulysses import UlyssesStrategy, shares_out
from burst_portable.utils.values import check_divides, divisors


@dataclass(frozen=True)
class UspStrategy(Strategy):
    """Plan Ulysses inside nodes and a ring over the nodes.

    Attributes:
        ranks_per_node: Default: the largest divisor of the ranks that the heads allow, at most 8 and below all.
    """

    name = "usp"
    title = "all rows of the node of some heads to each rank, a ring over the nodes, and back"

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    backward_circulates: Side = option(BACKWARD_CIRCULATES, default="kv")
    transfer: Transfer = option(TRANSFER)  # between nodes, as the next
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        ranks_per_node, note = self._ranks_per_node(call)
        nodes = call.ranks // ranks_per_node
        if nodes == 1 and ranks_per_node > 1:
            return replace(UlyssesStrategy().plan(call), strategy=self.name, reason=note)
        narrow = travel_narrow(call, self.gradient_comm_dtype)
        # After the first all-to-all a rank holds the rows of its node: a call of one rank a node.
        heads, kv_heads = heads_each(call.heads, call.kv_heads, ranks_per_node)
        between = replace(
            call,
            layout=call.layout.joined(ranks_per_node).sorted() if ranks_per_node > 1 else call.layout,
            kv_layout=call.k_layout.joined(ranks_per_node).sorted() if ranks_per_node > 1 else call.k_layout,
            heads=heads,
            kv_heads=kv_heads,
        )
        path = route(nodes, self.transfer)
        ring = ring_plan(
            between,
            self.name,
            side=self.backward_circulates,
            path=path,
            note=note,
            stride=ranks_per_node,
            narrow=narrow,
        )
        return replace(ring, call=call, heads=HeadSplit(ranks_per_node) if ranks_per_node > 1 else None)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        """Yield USP inside nodes, or inside the largest parts of them that the heads allow."""
        node = machine.ranks_per_node
        if node is None or node == 1:
            return
        fitting = [i for i in divisors(node) if i > 1 and shares_out(call, i)]
        ranks_per_node = max(fitting, default=node)  # its plan is refused, with the reason
        if ranks_per_node < call.ranks and call.ranks % ranks_per_node == 0:
            part = "" if ranks_per_node == node else f" in {ranks_per_node}"
            yield f"usp{part}", cls(ranks_per_node)
            yield f"usp{part}+q", cls(ranks_per_node, backward_circulates="q")
            yield f"usp{part}+fetch", cls(ranks_per_node, transfer="direct")

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {"usp": cls(), "usp+fetch": cls(backward_circulates="q", transfer="direct")}

    def _ranks_per_node(self, call: AttentionCall) -> tuple[int, str]:
        """(ranks per node, a note if they were not given). Raises if the ranks or heads do not fit what was given."""
        ranks = call.ranks
        if self.ranks_per_node is None:
            ranks_per_node, largest = (
                node_size(ranks, lambda ranks_per_node: shares_out(call, ranks_per_node)),
                node_size(ranks),
            )
            fewer = f", and these heads are not shared out among {largest}" if ranks_per_node < largest else ""
            return ranks_per_node, f"nodes of {ranks_per_node}: no node size was given{fewer}"
        check_divides(self.ranks_per_node, ranks)
        if not shares_out(call, self.ranks_per_node):
            fitting = [i for i in divisors(ranks) if shares_out(call, i)]
            raise UnsupportedError(
                "usp cannot share these heads out in a node",
                got=f"{call.heads} query and {call.kv_heads} K/V heads, ranks_per_node={self.ranks_per_node}",
                allowed=f"ranks_per_node of {', '.join(map(str, fitting))} on {ranks} ranks: "
                "query heads a multiple of it, K/V heads a multiple or a divisor",
                next_step="take one of these, or the strategy 'double_ring'",
            )
        return self.ranks_per_node, ""
