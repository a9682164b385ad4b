"""The topology-aware double ring (BurstAttention, section 3.2; BurstEngine, arXiv 2509.19836; LoongTrain).

::

    for each node:                                     the outer ring
        send the block on to the next node             leaves now, is needed a whole inner round later
        for each rank of the node:                     the inner ring
            send the block on; receive the next
            compute

Either side may travel backward: "kv" as in `ring`, "q" as in `burst`. Backward, gradients of other nodes' blocks go
home a whole inner round long. So that those of the last node have work beside them, too, the own node's round is
divided::

    the first steps of the own node's round            meanwhile the next node's block comes
    for each other node: a round
    the rest of the own node's round                   meanwhile the last gradients go home

Never more blocks are held for it: what is left of the round begins at the blocks' owners.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import row_size
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import Needs, Side
from burst_portable.strategies.base import Machine, Strategy, node_size, ring_plan, travel_narrow
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
    """Plan rings inside nodes and a ring over the nodes.

    Attributes:
        ranks_per_node: Default: the largest divisor of the ranks that is at most 8 and below all of them.
    """

    name = "double_ring"
    title = "as ring or burst, round rings inside nodes and a ring over the nodes"

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    backward_circulates: Side = option(BACKWARD_CIRCULATES)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        narrow = travel_narrow(call, self.gradient_comm_dtype)
        ranks_per_node, note = self.ranks_per_node, ""
        if ranks_per_node is None:
            ranks_per_node = node_size(call.ranks)
            note = f"inner rings of {ranks_per_node}: no node size was given"
        check_divides(ranks_per_node, call.ranks)
        path = DoubleRing(call.ranks, ranks_per_node, first=ranks_per_node)
        back = replace(path, first=_first_steps(call, self.backward_circulates, ranks_per_node, narrow=narrow))
        return ring_plan(call, self.name, side=self.backward_circulates, path=path, back=back, note=note, narrow=narrow)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        if machine.ranks_per_node is not None and machine.ranks_per_node > 1:
            yield "double_ring", cls(machine.ranks_per_node)
            yield "double_ring+kv", cls(machine.ranks_per_node, backward_circulates="kv")

    @classmethod
    def trials(cls) -> Mapping[str, Strategy]:
        return {"double_ring": cls(), "double_ring+kv": cls(backward_circulates="kv")}


def _first_steps(call: AttentionCall, side: Side, ranks_per_node: int, *, narrow: bool) -> int:
    """Steps of the own node's round for a block to come; the rest is for gradients to go home. By their bytes."""
    if ranks_per_node == call.ranks:
        return ranks_per_node
    block, gradients = (row_size(call, side, result=result, narrow=narrow) for result in (False, True))
    return max(1, round(ranks_per_node * block / (block + gradients)))


@dataclass(frozen=True)
class DoubleRing:
    """Rings of `ranks_per_node` ranks (a node), and an outer ring over the nodes that hides behind whole inner rounds.

    A node takes part if one of its ranks needs the block; gradients are added up along a node's ring and go home once
    from each node. The round of the owner's node is divided: its `first` steps come before the blocks of other nodes,
    and the rest after them, while the last of their gradients go home. The rest is a ring of its own that begins at
    the owner again, so that no block is held in between.
    """

    ranks: int
    ranks_per_node: int
    first: int
    name: str = "double_ring"
    phrase: str = "round two rings"
    trims: bool = False
    before: float = 1.0

    def step(self, owner: int, rank: int) -> int:
        nodes, turn = self._distance(owner, rank)
        if nodes:
            return self.first + (nodes - 1) * self.ranks_per_node + turn
        return turn if turn < self.first else self.ranks - self.ranks_per_node + turn

    def arrival(self, needs: Needs, owner: int, rank: int) -> tuple[int, int] | None:
        nodes, turn = self._distance(owner, rank)
        node = rank // self.ranks_per_node
        if not needs.any(owner, self._members(node)):
            return None
        step = self.step(owner, rank)
        if turn:
            return owner if self._begins(nodes, turn) else self._along(rank, -1), step - 1
        before = (node - 1) % self._nodes
        unbroken = nodes == 1 or needs.any(owner, self._members(before))
        return before * self.ranks_per_node + rank % self.ranks_per_node if unbroken else owner, max(
            0, step - self.ranks_per_node
        )

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        nodes, turn = self._distance(owner, rank)
        if not self._begins(nodes, turn + 1):
            yield self._along(rank, 1)
        if owner == rank:
            if self.first < self.ranks_per_node:
                yield self._along(rank, self.first)
            yield from ((rank + step * self.ranks_per_node) % self.ranks for step in range(1, self._nodes))
        elif turn == 0 and nodes < self._nodes - 1:
            yield (rank + self.ranks_per_node) % self.ranks

    def departure(self, needs: Needs, owner: int, rank: int) -> int:
        nodes, turn = self._distance(owner, rank)
        neighbour = self._along(rank, 1)
        return neighbour if not self._begins(nodes, turn + 1) and needs(owner, neighbour) else owner

    def feeder(self, owner: int, rank: int) -> int | None:
        neighbour = self._along(rank, -1)
        return neighbour if neighbour != owner and not self._begins(*self._distance(owner, rank)) else None

    def patience(self, source: int, target: int) -> int:
        """Between nodes a whole inner round: such gradients only go home, and home can add them at any later step."""
        return 1 if source // self.ranks_per_node == target // self.ranks_per_node else self.ranks_per_node

    @property
    def _nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    def _members(self, node: int) -> range:
        return range(node * self.ranks_per_node, (node + 1) * self.ranks_per_node)

    def _along(self, rank: int, turns: int) -> int:
        """The rank `turns` places further along the node's ring."""
        return rank // self.ranks_per_node * self.ranks_per_node + (rank + turns) % self.ranks_per_node

    def _distance(self, owner: int, rank: int) -> tuple[int, int]:
        """How far the block is from its owner: in nodes, and in ranks within the node's ring."""
        return (rank // self.ranks_per_node - owner // self.ranks_per_node) % self._nodes, (
            rank - owner
        ) % self.ranks_per_node

    def _begins(self, nodes: int, turn: int) -> bool:
        """Whether a ring inside a node begins at this turn: a whole round, or the rest of the owner's node's."""
        return turn % self.ranks_per_node == 0 or (nodes == 0 and turn == self.first)
