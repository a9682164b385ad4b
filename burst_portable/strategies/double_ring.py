"""The topology-aware double ring (BurstAttention, section 3.2; BurstEngine, arXiv 2509.19836; LoongTrain).

::

    for each node:                                     the ring over nodes
        send the block to the next node                it is needed after a complete round of the ring in the node
        for each rank of the node:                     the ring in a node
            send the block to the next rank; receive the next block
            compute

Either side may be sent in the backward pass: "kv" as in `ring`, "q" as in `burst`. Gradients of other nodes' blocks
then have a complete round of the ring in a node to reach the owner. The gradients of the last node need computation to
overlap with as well, so the round of the local node is split::

    the first steps of the local node's round          the next node's block arrives
    for each other node: a round
    the rest of the local node's round                 the last gradients reach their owners

This holds no more blocks: the rest of the round begins at the blocks' owners again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import BlockDependencies, Side
from burst_portable.strategies.base import (
    OFFERED_IN_NODES,
    Machine,
    Strategy,
    default_ranks_per_node,
    local_first_share,
    ring_plan,
    should_round_gradients,
)
from burst_portable.strategies.options import (
    BACKWARD_CIRCULATES,
    GRADIENT_COMM_DTYPE,
    RANKS_PER_NODE,
    GradientCommDtype,
    option,
)
from burst_portable.utils.values import check_divides


@dataclass(frozen=True)
class DoubleRingStrategy(Strategy):
    """Send blocks along a ring in each node and a ring over the nodes.

    Attributes:
        ranks_per_node: Ranks per node. Default: the largest divisor of the ranks that is at most 8 and leaves at least
            two nodes.
    """

    name = "double_ring"
    title = "as ring or burst, along a ring in each node and a ring over the nodes"
    offered = OFFERED_IN_NODES

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    backward_circulates: Side = option(BACKWARD_CIRCULATES)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        ranks_per_node, reason = self.ranks_per_node, ""
        if ranks_per_node is None:
            ranks_per_node = default_ranks_per_node(call.ranks)
            reason = f"ranks_per_node={ranks_per_node} by default"
        check_divides(ranks_per_node, call.ranks)
        side = self.backward_circulates
        route, backward_route = double_ring_routes(call, ranks_per_node, side, rounds_gradients=rounds_gradients)
        return ring_plan(
            call,
            self.name,
            side=side,
            route=route,
            backward_route=backward_route,
            reason=reason,
            rounds_gradients=rounds_gradients,
        )

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        if machine.ranks_per_node is not None and machine.ranks_per_node > 1:
            yield cls(machine.ranks_per_node)
            yield cls(machine.ranks_per_node, backward_circulates="kv")

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(backward_circulates="kv")


def double_ring_routes(
    call: AttentionCall, ranks_per_node: int, side: Side, *, rounds_gradients: bool
) -> tuple[DoubleRingRoute, DoubleRingRoute]:
    """Return the routes of the forward and the backward pass. `side` is sent in the backward pass."""
    first = ranks_per_node
    if ranks_per_node < call.ranks:  # a block arrives during these steps; later, gradients return to their owner
        share = local_first_share(call, "split", side, rounds_gradients=rounds_gradients)
        first = max(1, round(ranks_per_node * share))
    forward = DoubleRingRoute(call.ranks, ranks_per_node, first_steps=ranks_per_node)
    return forward, DoubleRingRoute(call.ranks, ranks_per_node, first_steps=first)


@dataclass(frozen=True)
class DoubleRingRoute:
    """A ring in each node, and a ring over the nodes whose messages overlap a complete round of the rings in nodes.

    A node receives a block if one of its ranks needs it. Gradients are summed along a node's ring, and each node sends
    them to the owner once. The round of the owner's node is split: `first_steps` steps come before the blocks of other
    nodes, and the rest after them, while the last gradients reach their owners. The rest is a separate ring that
    begins at the owner, so no block is held in between.
    """

    ranks: int
    ranks_per_node: int
    first_steps: int  # `ranks_per_node`: the round is not split
    name: str = "double_ring"
    description: str = "along two rings"
    trims: bool = False
    local_first_share: float = 1.0

    def step(self, owner: int, rank: int) -> int:
        nodes, turn = self._distance(owner, rank)
        if nodes:
            return self.first_steps + (nodes - 1) * self.ranks_per_node + turn
        return turn if turn < self.first_steps else self.ranks - self.ranks_per_node + turn

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        nodes, turn = self._distance(owner, rank)
        node = rank // self.ranks_per_node
        if not dependencies.any_needs(owner, self._members(node)):
            return None
        step = self.step(owner, rank)
        if turn:
            return owner if self._starts_ring(nodes, turn) else self._along(rank, -1), step - 1
        previous = (node - 1) % self._nodes
        has_block = nodes == 1 or dependencies.any_needs(owner, self._members(previous))
        source = previous * self.ranks_per_node + rank % self.ranks_per_node if has_block else owner
        return source, max(0, step - self.ranks_per_node)

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        nodes, turn = self._distance(owner, rank)
        if not self._starts_ring(nodes, turn + 1):
            yield self._along(rank, 1)
        if owner == rank:
            if self.first_steps < self.ranks_per_node:
                yield self._along(rank, self.first_steps)
            yield from ((rank + step * self.ranks_per_node) % self.ranks for step in range(1, self._nodes))
        elif turn == 0 and nodes < self._nodes - 1:
            yield (rank + self.ranks_per_node) % self.ranks

    def result_target(self, dependencies: BlockDependencies, owner: int, rank: int) -> int:
        nodes, turn = self._distance(owner, rank)
        neighbor = self._along(rank, 1)
        return neighbor if not self._starts_ring(nodes, turn + 1) and dependencies.needs(owner, neighbor) else owner

    def result_source(self, owner: int, rank: int) -> int | None:
        neighbor = self._along(rank, -1)
        return neighbor if neighbor != owner and not self._starts_ring(*self._distance(owner, rank)) else None

    def result_delay_steps(self, source: int, target: int) -> int:
        """Return 1 inside a node, and a complete round between nodes: the owner can add gradients at any later step."""
        same_node = source // self.ranks_per_node == target // self.ranks_per_node
        return 1 if same_node else self.ranks_per_node

    @property
    def _nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def _members(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def _along(self, rank: int, turns: int) -> int:
        """Return the rank that follows `rank` after `turns` steps along the node's ring."""
        return rank // self.ranks_per_node * self.ranks_per_node + (rank + turns) % self.ranks_per_node

    def _distance(self, owner: int, rank: int) -> tuple[int, int]:
        """Return how far a block is from its owner: (nodes, ranks along the node's ring)."""
        nodes = (rank // self.ranks_per_node - owner // self.ranks_per_node) % self._nodes
        return nodes, (rank - owner) % self.ranks_per_node

    def _starts_ring(self, nodes: int, turn: int) -> bool:
        """Return whether a ring in a node begins here: a complete round, or the rest of the local node's round."""
        return turn % self.ranks_per_node == 0 or (nodes == 0 and turn == self.first_steps)
