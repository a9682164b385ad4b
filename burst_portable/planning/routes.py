"""Moves: which rows of which tensors go from whom to whom, when they may leave, when they are needed.

A block is one rank's shard of one side: its keys and values (``kv``) or its queries (``q``, in the backward pass
with dO, LSE and delta). At step s, a rank computes with one foreign block, or several. A `Route` says how each
block gets to each rank that needs it, and how the gradients that were made of it get home::

    ring     0 -> 1 -> 2 -> 3           a block goes from neighbour to neighbour, its gradients follow it
    direct   0 -> 1, 0 -> 2, 0 -> 3     each block straight from its owner, its gradients straight home; several may
                                        come together, for one launch

A strategy may bring its own route. A block is sent only to ranks that need it under the mask; where that breaks a
chain, the owner sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from burst_portable.planning.tiles import BlockPairs

Side = Literal["kv", "q"]
"""Which side of the attention travels."""


class Move(NamedTuple):
    """Rows of one block from one rank to another. Both post it at step `issue`; step `needed` waits for it.

    An input (``result`` false) is posted before the computation of its step, once that step's own arrivals are
    there. A result, the gradients of the block, is posted after it, and added after the computation of `needed`.
    """

    side: Side
    owner: int
    source: int
    target: int
    issue: int
    needed: int
    rows: tuple[int, int]
    result: bool = False

    @property
    def label(self) -> str:
        """The name of its content, as traces and printed plans show it."""
        return f"{'d' if self.result else ''}{self.side}{self.owner}"


def holder(rows: tuple[int, int], among: Iterable[tuple[int, int]]) -> tuple[int, int] | None:
    """The first [start, stop) of `among` that holds all of these rows."""
    return next((one for one in among if one[0] <= rows[0] and rows[1] <= one[1]), None)


def to_pack(sends: Iterable[Move], packed: Iterable[tuple[int, int]]) -> list[Move]:
    """Of the moves of one block that leave together, those whose rows must be packed: the others lie within them.

    packed: rows that were packed before.
    """
    fresh, held = [], list(packed)
    for move in sorted(sends, key=lambda m: m.rows[0] - m.rows[1]):  # most rows first
        if holder(move.rows, held) is None:
            fresh.append(move)
            held.append(move.rows)
    return fresh


class Needs:
    """Which rank needs whose block: whether the mask connects a travelling block with what stays on a rank."""

    def __init__(self, pairs: BlockPairs, side: Side) -> None:
        self._pairs, self._side = pairs, side

    def __call__(self, owner: int, rank: int) -> bool:
        """Whether `rank` computes with the block of `owner`."""
        return self._pairs.sees(rank, owner) if self._side == "kv" else self._pairs.sees(owner, rank)

    def any(self, owner: int, ranks: Sequence[int]) -> bool:
        """Whether one of these ranks does."""
        return any(self(owner, rank) for rank in ranks)


class Route(Protocol):
    """How blocks travel among ranks: a frozen dataclass, whose answers are the same on every rank.

    Every rank asks for itself and for its neighbors, so that both ends post the same moves: `arrival` and `targets`
    must agree, and `departure` and `feeder`. `planning.verify.verify` says where they do not.
    """

    @property
    def name(self) -> str:
        """Its name on the command line and in printed plans."""

    @property
    def phrase(self) -> str:
        """How blocks travel, in a few words: "from neighbour to neighbour"."""

    @property
    def trims(self) -> bool:
        """Whether only the rows that the target needs are sent, because nobody hands them on."""

    @property
    def before(self) -> float:
        """The share of its own block's pairs that a rank computes at step 0; the rest at the step of that block."""

    def __hash__(self) -> int:
        """Passes are looked up by their route."""

    def step(self, owner: int, rank: int) -> int:
        """The step at which `rank` computes with the block of `owner`; with its own block at 0 if `before` is 1.

        Blocks of the same step are one launch. Gradients of the block leave after it.
        """

    def arrival(self, needs: Needs, owner: int, rank: int) -> tuple[int, int] | None:
        """(source, issue) of the hop that brings the block of `owner` to `rank`; None if it need not come.

        `issue` is below `step`, and not before the source has the block. It is not asked of the owner itself. Where a
        route trims, or blocks share a launch, it is None unless `needs(owner, rank)`.
        """

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        """The ranks that `rank` may have to hand the block of `owner` to, and never `rank` itself.

        At least all ranks for which `arrival` may name `rank` as the source; others are ignored.
        """

    def departure(self, needs: Needs, owner: int, rank: int) -> int:
        """Where `rank` sends its gradients of the block of `owner`: the next that adds to them, or home.

        The next must need the block, and have computed with it by then, but not sent its own gradients on.
        """

    def feeder(self, owner: int, rank: int) -> int | None:
        """The neighbour that may send `rank` gradients of the block of `owner` to add to; None if nobody does.

        `departure` of that neighbor says whether it does. Gradients of the rank's own block are expected without this.
        """

    def patience(self, source: int, target: int) -> int:
        """How many steps after leaving `source` gradients are added at `target`: at least 1.

        At a rank that sends them on, no more than until its own gradients of the block leave.
        """


@dataclass(frozen=True)
class Ring:
    """One ring over all ranks: RingAttention (arXiv 2310.01889), and the burst backward of BurstAttention."""

    ranks: int
    name: str = "ring"
    phrase: str = "from neighbour to neighbour"
    trims: bool = False
    before: float = 1.0

    def step(self, owner: int, rank: int) -> int:
        return (rank - owner) % self.ranks

    def arrival(self, needs: Needs, owner: int, rank: int) -> tuple[int, int] | None:
        if not needs(owner, rank):
            return None
        neighbour = (rank - 1) % self.ranks
        unbroken = neighbour == owner or needs(owner, neighbour)
        return neighbour if unbroken else owner, self.step(owner, rank) - 1

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        if owner == rank:
            yield from ((rank + distance) % self.ranks for distance in range(1, self.ranks))
        elif (rank + 1) % self.ranks != owner:
            yield (rank + 1) % self.ranks

    def departure(self, needs: Needs, owner: int, rank: int) -> int:
        neighbour = (rank + 1) % self.ranks
        return neighbour if neighbour != owner and needs(owner, neighbour) else owner

    def feeder(self, owner: int, rank: int) -> int | None:
        neighbour = (rank - 1) % self.ranks
        return neighbour if neighbour != owner else None

    def patience(self, source: int, target: int) -> int:
        return 1


@dataclass(frozen=True)
class Fetch:
    """Straight from the owner, straight home; at each step every rank asks one other, and is asked by one other.

    A block is requested `ahead` steps before it is needed: a larger number holds more blocks and waits less. A step
    computes `together` blocks in one launch: for short blocks, launches and merges cost more than waiting. A rank
    computes the share `before` of its own block first, while the first foreign block comes, and the rest last, while
    the gradients of the last foreign block leave.
    """

    ranks: int
    ahead: int
    together: int
    before: float
    name: str = "direct"
    phrase: str = "from their owners"
    trims: bool = True

    def step(self, owner: int, rank: int) -> int:
        if owner == rank and self.before < 1:
            return -(-(self.ranks - 1) // self.together) + 1
        return -(-((rank - owner) % self.ranks) // self.together)

    def arrival(self, needs: Needs, owner: int, rank: int) -> tuple[int, int] | None:
        return (owner, max(0, self.step(owner, rank) - self.ahead)) if needs(owner, rank) else None

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        if owner == rank:
            yield from ((rank + distance) % self.ranks for distance in range(1, self.ranks))

    def departure(self, needs: Needs, owner: int, rank: int) -> int:
        return owner

    def feeder(self, owner: int, rank: int) -> int | None:
        return None

    def patience(self, source: int, target: int) -> int:
        return 1
