"""Define `Route`: from which rank each block arrives, when it is sent, and where its results go.

A block is one rank's shard of one side: its keys and values (``kv``), or its queries (``q``; in the backward pass with
dO, LSE and delta). At each step a rank computes with one or several remote blocks. A route answers, for every block and
rank, from where the block comes and how the results computed with it return to the block's owner::

    ring     0 -> 1 -> 2 -> 3           a block goes from neighbor to neighbor, its gradients follow it
    direct   0 -> 1, 0 -> 2, 0 -> 3     each block comes from its owner, its gradients go to its owner; one launch may
                                        compute with several blocks

Results are gradients, or in the forward pass the partial (out, LSE) of queries that were sent to another rank: see
`Helpers`.

A strategy may define its own route. A block is sent only to ranks that need it under the mask. If this interrupts a
ring, the owner sends the block to the next rank that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from burst_portable.planning.tiles import BlockPairs

Side = Literal["kv", "q"]
"""The side of the attention whose blocks are sent: keys and values, or queries."""
Rows = tuple[tuple[int, int], ...]
"""Ranges [start, stop) of the rows of a block, in order and separate. A message has them one after the other."""


class Move(NamedTuple):
    """Send rows of one block from one rank to another. Both ranks post it at `post_step`; `wait_step` waits for it.

    A block is posted before the computation of that step, after the blocks of the same step have arrived. Results are
    posted after the computation of their step, and added after the computation of `wait_step`.
    """

    side: Side
    owner: int
    source: int
    target: int
    post_step: int
    wait_step: int
    rows: Rows
    is_gradient: bool = False
    is_partial: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows in the message."""
        return count_rows(self.rows)

    @property
    def is_result(self) -> bool:
        """Return whether it returns results to the owner of the block."""
        return self.is_gradient or self.is_partial

    @property
    def label(self) -> str:
        """The name in traces and printed plans: kv0, dkv0 for its gradients, out0 for a partial result of q0."""
        return f"out{self.owner}" if self.is_partial else f"{'d' if self.is_gradient else ''}{self.side}{self.owner}"


def count_rows(rows: Rows) -> int:
    """Return the number of rows in these ranges."""
    return sum([stop - start for start, stop in rows])


def find_containing(rows: Rows, packed: Iterable[Rows]) -> tuple[Rows, int] | None:
    """Return the first of `packed` of which these rows are one piece, and the number of its rows before them."""
    return next(((one, before) for one in packed if (before := _rows_before(rows, one)) is not None), None)


def _rows_before(rows: Rows, packed: Rows) -> int | None:
    """Return the number of packed rows before `rows`; None if `rows` are not one piece of a message with `packed`."""
    before, first = 0, rows[0][0]
    for index, (start, stop) in enumerate(packed):
        if start <= first < stop:
            piece = packed[index : index + len(rows)]
            clipped = ((first, piece[0][1]), *piece[1:])  # as if the message began with the first of these rows
            clipped = (*clipped[:-1], (clipped[-1][0], min(clipped[-1][1], rows[-1][1])))
            return before + first - start if clipped == rows else None
        before += stop - start
    return None


def to_pack(sends: Iterable[Move], packed: Iterable[Rows]) -> list[Move]:
    """Return the sends of one block whose rows must be packed. The rows of all other sends are part of these.

    Args:
        sends: Moves of one block that are posted at the same step.
        packed: Rows of each message that was packed at an earlier step.
    """
    unpacked, done = [], list(packed)
    for move in sorted(sends, key=lambda m: -m.num_rows):
        if find_containing(move.rows, done) is None:
            unpacked.append(move)
            done.append(move.rows)
    return unpacked


class Helpers(Protocol):
    """The pairs of blocks that the owner of the keys computes, in passes that send K and V for all other pairs.

    Such a helper rank is sent the queries and returns (out, LSE), or dQ. A frozen dataclass with the same answers on
    every rank. A rank must not need both sides of another rank's block.
    """

    def __hash__(self) -> int:
        """Passes are cached by their helpers."""

    def helps(self, pairs: BlockPairs, q_owner: int, k_owner: int) -> bool:
        """Return whether `k_owner` computes this pair of blocks of two ranks. `q_owner` computes all other pairs."""


class BlockDependencies:
    """The blocks that each rank needs: those with a visible pair between the block and the rank's shard.

    With helpers, one of the two ranks of each pair needs the other's block: K and V, or queries.
    """

    def __init__(self, pairs: BlockPairs, side: Side, helpers: Helpers | None = None) -> None:
        self._pairs, self._side, self._helpers = pairs, side, helpers

    def needs(self, owner: int, rank: int) -> bool:
        """Return whether `rank` computes with `owner`'s block."""
        pair = (rank, owner) if self._side == "kv" else (owner, rank)
        if not self._pairs.sees(*pair):
            return False
        if self._helpers is None:
            return True
        return (owner != rank and self._helpers.helps(self._pairs, *pair)) == (self._side == "q")

    def any_needs(self, owner: int, ranks: Sequence[int]) -> bool:
        """Return whether at least one of these ranks computes with `owner`'s block."""
        return any(self.needs(owner, rank) for rank in ranks)


class Route(Protocol):
    """The paths of blocks and results between ranks: a frozen dataclass with the same answers on every rank.

    A rank calls the methods for itself and for the ranks that it sends to, so that both ends post the same moves.
    Therefore `block_source` must agree with `targets`, and `result_target` with `result_source`.
    `planning.verify.verify` reports where they do not.
    """

    @property
    def name(self) -> str:
        """Its name on the command line and in printed plans."""

    @property
    def description(self) -> str:
        """A few words for printed plans: "from neighbor to neighbor"."""

    @property
    def trims(self) -> bool:
        """Return whether a message contains only the rows that its receiver needs. True if no rank forwards a block."""

    @property
    def local_first_share(self) -> float:
        """Share of the local block's pairs that is computed at step 0. The rest is computed at the block's `step`."""

    def __hash__(self) -> int:
        """Passes are cached by their route."""

    def step(self, owner: int, rank: int) -> int:
        """Return the step at which `rank` computes with `owner`'s block; 0 for its own if `local_first_share` is 1.

        Blocks of the same step share one launch. Their results are sent after it.
        """

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        """Return (source, step): which rank sends `owner`'s block to `rank`, and when. None if it is not sent there.

        The step is below `step(owner, rank)`, and not before the source has the block. It is the same for all blocks
        with which `rank` computes at one step: they arrive in one buffer. Never called for the owner itself. If the
        route trims, or several blocks share a launch, return None unless `dependencies.needs(owner, rank)`.
        """

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        """Yield the ranks to which `rank` may send `owner`'s block; never `rank` itself.

        Must include every rank for which `block_source` may return `rank` as the source. Further ranks do no harm.
        """

    def result_target(self, dependencies: BlockDependencies, owner: int, rank: int) -> int:
        """Return the rank to which `rank` sends its results for `owner`'s block: the next that adds some, or `owner`.

        That next rank must need the block, and must have computed with it but not have sent its own results by then.
        In a forward pass return `owner`: ranks merge only results for their own queries.
        """

    def result_source(self, owner: int, rank: int) -> int | None:
        """Return the neighbor whose results for `owner`'s block `rank` may have to forward; None if there is none.

        `result_target` of that neighbor decides. The owner expects results for its block from all ranks.
        """

    def result_delay_steps(self, source: int, target: int) -> int:
        """Return the number of steps between sending results from `source` and adding them at `target`; at least 1.

        If `target` forwards them, they must be added before its own results for the block are sent.
        """


@dataclass(frozen=True)
class RingRoute:
    """One ring over all ranks: RingAttention (arXiv 2310.01889), and the burst backward of BurstAttention."""

    ranks: int
    name: str = "ring"
    description: str = "from neighbor to neighbor"
    trims: bool = False
    local_first_share: float = 1.0

    def step(self, owner: int, rank: int) -> int:
        return (rank - owner) % self.ranks

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        if not dependencies.needs(owner, rank):
            return None
        neighbor = (rank - 1) % self.ranks
        has_block = neighbor == owner or dependencies.needs(owner, neighbor)
        return neighbor if has_block else owner, self.step(owner, rank) - 1

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        if owner == rank:
            yield from ((rank + distance) % self.ranks for distance in range(1, self.ranks))
        elif (rank + 1) % self.ranks != owner:
            yield (rank + 1) % self.ranks

    def result_target(self, dependencies: BlockDependencies, owner: int, rank: int) -> int:
        neighbor = (rank + 1) % self.ranks
        return neighbor if neighbor != owner and dependencies.needs(owner, neighbor) else owner

    def result_source(self, owner: int, rank: int) -> int | None:
        neighbor = (rank - 1) % self.ranks
        return neighbor if neighbor != owner else None

    def result_delay_steps(self, source: int, target: int) -> int:
        return 1


class FromOwners:
    """The part of a `Route` that is common if each block comes from its owner, and its gradients go back to it."""

    ranks: int

    def targets(self, owner: int, rank: int) -> Iterator[int]:
        if owner == rank:
            yield from ((rank + distance) % self.ranks for distance in range(1, self.ranks))

    def result_target(self, dependencies: BlockDependencies, owner: int, rank: int) -> int:
        return owner

    def result_source(self, owner: int, rank: int) -> int | None:
        return None

    def result_delay_steps(self, source: int, target: int) -> int:
        return 1


@dataclass(frozen=True)
class DirectRoute(FromOwners):
    """Each block comes from its owner, and its gradients go back to it. At each step another rank is the source.

    The first part of the local block is computed while the first remote block arrives, the rest while the gradients of
    the last remote block are sent.
    """

    ranks: int
    prefetch_steps: int  # before its computation, at which a block is sent; more hold more blocks and wait less
    blocks_per_launch: int  # for short blocks, launches and merges cost more than waiting
    local_first_share: float
    name: str = "direct"
    description: str = "from their owners"
    trims: bool = True

    def step(self, owner: int, rank: int) -> int:
        if owner == rank and self.local_first_share < 1:
            return -(-(self.ranks - 1) // self.blocks_per_launch) + 1
        return -(-((rank - owner) % self.ranks) // self.blocks_per_launch)

    def block_source(self, dependencies: BlockDependencies, owner: int, rank: int) -> tuple[int, int] | None:
        if not dependencies.needs(owner, rank):
            return None
        return owner, max(0, self.step(owner, rank) - self.prefetch_steps)
