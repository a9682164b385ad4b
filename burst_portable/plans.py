"""Plans: everything that a distributed attention will do, as data, before a byte moves.

A `Plan` has a `PassPlan` for each pass, and that has a tuple of `Step`s for each rank; a step is what arrives, what
leaves, and what is computed::

    step 0   compute q1 x kv1 (own)     send kv1 -> 2     receive kv0 <- 0
    step 1   compute q1 x kv0           send kv0 -> 2     receive kv3 <- 0
    ...

It needs no device and no torch: it can be made, printed, costed and verified for any number of ranks on any
machine. A rank's steps are made when they are asked for, so planning one rank of a thousand costs one rank's time.

A block is one rank's shard of one side, and that rank is its owner: see `moves`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

from burst_portable.heads import HeadGroup, head_groups
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.moves import Move, Needs, Route, Side
from burst_portable.tiles import BlockPairs, Tiles, covered

PassName = Literal["forward", "backward"]
PASSES: tuple[PassName, ...] = ("forward", "backward")
TRAVELS: dict[tuple[str, str], str] = {
    ("forward", "kv"): "K and V travel",
    ("backward", "kv"): "K and V travel, dK and dV after them",
    ("backward", "q"): "Q, dO, LSE and delta travel, dQ after them",
    ("forward", "heads"): "all rows of some heads come before, out goes back after",
    ("backward", "heads"): "all rows of some heads of dO come before, gradients go back after",
}
"""What travels, in words, by pass and by side ("kv", "q"), or "heads" where they are resharded."""
_RANKS_KEPT = 64  # ranks whose steps a pass keeps


@dataclass(frozen=True)
class Problem:
    """What is planned: the mask, who holds which positions, and the sizes that bytes and FLOPs follow from.

    Attributes:
        heads, kv_heads: query heads, and K/V heads, of all that a rank computes with.
        head_dim, value_dim: the size of a head of Q and K, and of V.
        batch: sequences side by side.
        itemsize: bytes of an element of Q, K and V.
        narrow: gradients travel in the dtype of the inputs, and not in the one that they are added up in.
    """

    mask: Mask
    q_layout: Layout
    k_layout: Layout
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    batch: int = 1
    itemsize: int = 2
    narrow: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks share the sequence."""
        return self.q_layout.ranks

    @property
    def area(self) -> int:
        """(q, k) pairs that the mask lets through, of one head, over the whole sequence."""
        return self.mask.area(self.q_layout.length, self.k_layout.length)


class BlockTiles(NamedTuple):
    """The tiles of one pair of blocks, and where the pair's first row and column lie among those of a `Compute`."""

    tiles: Tiles
    row: int = 0
    column: int = 0


@dataclass(frozen=True)
class Compute:
    """One kernel launch: a rank's own block of one side with one or several blocks of the other.

    Several blocks lie one after the other in memory, in the order of their owners here.
    """

    q_owners: tuple[int, ...]
    k_owners: tuple[int, ...]
    blocks: tuple[BlockTiles, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """(owner of queries, owner of keys)."""
        return tuple((q, k) for q in self.q_owners for k in self.k_owners)

    @property
    def label(self) -> str:
        """Its name in traces and printed plans: q1 x kv0, or q1 x kv0+3 for several."""
        q, k = ("+".join(map(str, owners)) for owners in (self.q_owners, self.k_owners))
        return f"q{q} x kv{k}"

    @cached_property
    def tiles(self) -> Tiles:
        """The tiles of all its pairs; rows and columns count from the first block of each side on."""
        return Tiles(
            tile.shifted(row, column) if row or column else tile for tiles, row, column in self.blocks for tile in tiles
        )

    # The rest does without `tiles`: most plans are only priced, and shifting tiles for that would take longest.

    @property
    def count(self) -> int:
        """How many tiles it has."""
        return sum([len(tiles) for tiles, _, _ in self.blocks])

    @property
    def area(self) -> int:
        """(q, k) pairs of one head."""
        return sum([tiles.area for tiles, _, _ in self.blocks])

    @property
    def rows(self) -> tuple[int, int]:
        """(rows of all its tiles together, rows of the tallest one); a row in several tiles counts in each."""
        every = [tiles.rows for tiles, _, _ in self.blocks]
        return sum([rows for rows, _ in every]), max([tallest for _, tallest in every])

    @property
    def columns(self) -> int:
        """Columns of all its tiles together; a column in several tiles counts in each."""
        return sum([tiles.columns for tiles, _, _ in self.blocks])

    @property
    def covered(self) -> tuple[int, int]:
        """(rows, columns) that are in any of its tiles, each counted once."""
        if len(self.blocks) == 1:
            return self.blocks[0].tiles.covered
        rows = [(t.q_start + row, t.q_stop + row) for tiles, row, _ in self.blocks for t in tiles]
        columns = [(t.k_start + column, t.k_stop + column) for tiles, _, column in self.blocks for t in tiles]
        return covered(rows), covered(columns)

    def visited(self, block: int) -> int:
        """Pairs of the blocks that a kernel computes: see `Tile.visited`."""
        return sum([tiles.visited(block, row) for tiles, row, _ in self.blocks])


@dataclass(frozen=True, slots=True)
class Step:
    """What a rank does at one step, in this order.

    1. wait for `arrivals`; 2. post `sends` and `receives`; 3. compute with what came, in one launch; 4. wait for
    `result_arrivals` and add them; 5. post `result_sends` and `result_receives`; 6. let go of blocks that no later
    step uses.
    """

    index: int
    arrivals: tuple[Move, ...] = ()
    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()
    compute: Compute | None = None
    result_arrivals: tuple[Move, ...] = ()
    result_sends: tuple[Move, ...] = ()
    result_receives: tuple[Move, ...] = ()
    released: tuple[int, ...] = ()


Steps = tuple[Step, ...]
_MOVES = ("arrivals", "sends", "receives", "result_arrivals", "result_sends", "result_receives")
"""The fields of a `Step` that hold moves."""


@dataclass(frozen=True)
class PassPlan:
    """How one pass goes: which side travels, along which route, and what each rank does.

    Attributes:
        side: which side's blocks travel; the other side's stay where they are.
        route: how they travel.
        results: how their gradients get home; None forward, where results stay where they are made.
    """

    problem: Problem
    side: Side
    route: Route
    results: Route | None = None
    _pairs: BlockPairs = field(init=False, repr=False, compare=False)
    _needs: Needs = field(init=False, repr=False, compare=False)
    _ranks: dict[int, Steps] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        object.__setattr__(self, "_pairs", block_pairs(p.mask, p.q_layout, p.k_layout))
        object.__setattr__(self, "_needs", Needs(self._pairs, self.side))

    def steps_of(self, rank: int) -> Steps:
        """The steps of one rank; those of the last few asked for are kept."""
        found = self._ranks.get(rank)
        if found is None:  # asked once: another thread, which plans for another rank, may clear them
            if len(self._ranks) >= _RANKS_KEPT:
                self._ranks.clear()
            self._ranks[rank] = found = self._make(rank)
        return found

    def _make(self, rank: int) -> Steps:
        inputs = list(self._inputs(rank))
        owners: dict[int, list[int]] = defaultdict(list)  # by step, of the blocks that it computes with
        for owner in range(self.problem.ranks):
            if self._needs(owner, rank):
                owners[self.route.step(owner, rank)].append(owner)
        computes = {step: self._compute(tuple(ranks), rank) for step, ranks in owners.items()}
        return _scheduled(rank, inputs, computes, list(self._results(rank)))

    def _compute(self, owners: tuple[int, ...], rank: int) -> Compute:
        """The launch of a rank with the blocks of a step, which lie one after the other."""
        blocks: list[BlockTiles] = []
        before = 0
        for owner in owners:
            first, past = self._rows(owner, rank)
            shift = (0, before - first) if self.side == "kv" else (before - first, 0)
            blocks.append(BlockTiles(self._tiles(owner, rank), *shift))
            before += past - first
        q_owners, k_owners = ((rank,), owners) if self.side == "kv" else (owners, (rank,))
        return Compute(q_owners, k_owners, tuple(blocks))

    def _tiles(self, owner: int, rank: int) -> Tiles:
        return self._pairs.tiles(rank, owner) if self.side == "kv" else self._pairs.tiles(owner, rank)

    def _rows(self, owner: int, rank: int) -> tuple[int, int]:
        """[start, stop) of the owner's rows that come to this rank: those that it needs, or all if it hands them on."""
        if owner == rank or not self.trims:
            layout = self.problem.k_layout if self.side == "kv" else self.problem.q_layout
            return 0, layout.count(owner)
        box = self._tiles(owner, rank).box
        return box[2:] if self.side == "kv" else box[:2]

    @property
    def trims(self) -> bool:
        """Whether only the rows that a rank needs are sent to it, and only their gradients back."""
        return self.route.trims and (self.results is None or self.results.trims)

    def _inputs(self, rank: int) -> Iterator[Move]:
        """Blocks that come to a rank, and those that it sends: its own, and what it hands on."""
        for owner in range(self.problem.ranks):
            if owner != rank and (move := self._input(owner, rank)):
                yield move
            for target in self.route.targets(owner, rank):
                move = self._input(owner, target)
                if move and move.source == rank:
                    yield move

    def _input(self, owner: int, target: int) -> Move | None:
        """The move that brings a block to a rank; None if it need not come."""
        arrival = self.route.arrival(self._needs, owner, target)
        if arrival is None:
            return None
        source, issue = arrival
        step = self.route.step(owner, target)
        return Move(self.side, owner, source, target, issue, step, self._rows(owner, target))

    def _results(self, rank: int) -> Iterator[Move]:
        """Gradients of foreign blocks that a rank sends, and gradients that come to it."""
        if self.results is None:
            return
        for other in range(self.problem.ranks):
            if other == rank:
                continue
            if move := self._result(other, rank):
                yield move
            feeder = self.results.feeder(other, rank)
            for owner, source in ((rank, other), (other, feeder)):
                move = self._result(owner, source) if source is not None else None
                if move and move.target == rank:
                    yield move

    def _result(self, owner: int, source: int) -> Move | None:
        """The move of the gradients of a block away from a rank; None if it makes none."""
        if self.results is None or not self._needs(owner, source):
            return None
        target = self.results.departure(self._needs, owner, source)
        issue = self.route.step(owner, source)
        needed = issue + self.results.patience(source, target)
        return Move(self.side, owner, source, target, issue, needed, self._rows(owner, source), result=True)


@lru_cache(maxsize=8)
def block_pairs(mask: Mask, q_layout: Layout, k_layout: Layout) -> BlockPairs:
    """The pairs of blocks of all ranks; made once, as both passes and every strategy that `auto` tries share them."""
    return BlockPairs(mask, q_layout.shards, k_layout.shards)


@lru_cache(maxsize=64)
def make_pass_plan(problem: Problem, side: Side, route: Route, results: Route | None = None) -> PassPlan:
    """A `PassPlan`; made once, as strategies that `auto` compares have passes in common."""
    return PassPlan(problem, side, route, results)


@dataclass(frozen=True)
class Plan:
    """All of one attention: both passes, what made it, and why.

    Attributes:
        strategy: the name of the strategy that made it.
        reshard: "heads" where tensors go from sequence shards to head shards before, and back after (Ulysses). Then
            `forward` and `backward` are the plan of one rank for one group of its heads over all rows; the layout of
            their problem says in which order these rows lie.
        groups: in how many groups a rank computes its heads.
        reason: why `auto` chose it, or what the strategy chose by itself; for people.
    """

    problem: Problem
    strategy: str
    forward: PassPlan
    backward: PassPlan
    reshard: Literal["heads"] | None = None
    groups: int = 1
    reason: str = ""

    @property
    def layout(self) -> Layout:
        """Which rows each rank holds: what `shard` and `attention` take."""
        return self.problem.q_layout

    @property
    def direct(self) -> bool:
        """Whether every message goes straight from the rank that made it to the one that uses it."""
        return self.reshard is not None or (self.forward.trims and self.backward.trims)

    @property
    def head_groups(self) -> tuple[HeadGroup, ...]:
        """The groups of one rank's heads, where heads are resharded."""
        p = self.problem
        return head_groups(p.heads // p.ranks, max(1, p.kv_heads // p.ranks), self.groups)

    def steps(self, pass_name: PassName, rank: int) -> Steps:
        """What a rank does in a pass. Where heads are resharded, every rank does this for each group of its heads."""
        return self.pass_plan(pass_name).steps_of(0 if self.reshard else rank)

    def pass_plan(self, pass_name: PassName) -> PassPlan:
        """The plan of one pass, by its name."""
        return self.forward if pass_name == "forward" else self.backward

    def passes(self) -> tuple[tuple[PassName, PassPlan], ...]:
        """(name, plan) of both passes."""
        return ("forward", self.forward), ("backward", self.backward)


def _ordered(moves: Iterable[Move]) -> tuple[Move, ...]:
    """Sorted, so that both ends of every pair of ranks post their moves in the same order."""
    ordered = list(moves)
    if len(ordered) > 1:
        ordered.sort(key=lambda m: (m.needed, m.side, m.owner, m.source, m.target))
    return tuple(ordered)


def _scheduled(rank: int, inputs: list[Move], computes: dict[int, Compute], results: list[Move]) -> Steps:
    """Moves and computations, sorted into steps: one `Step` for every index at which anything happens."""
    at: dict[str, dict[int, list[Move]]] = {name: defaultdict(list) for name in _MOVES}
    last_use: dict[int, int] = {}
    for move in inputs:
        if move.target == rank:
            at["receives"][move.issue].append(move)
            at["arrivals"][move.needed].append(move)
            last_use[move.owner] = max(last_use.get(move.owner, 0), move.needed)
        else:
            at["sends"][move.issue].append(move)
            if move.owner != rank:
                last_use[move.owner] = max(last_use.get(move.owner, 0), move.issue)
    for move in results:
        if move.target == rank:
            at["result_receives"][move.issue].append(move)
            at["result_arrivals"][move.needed].append(move)
        else:
            at["result_sends"][move.issue].append(move)
    released = defaultdict(list)
    for owner, step in last_use.items():
        released[step].append(owner)
    indices = sorted({*computes, *released, *(step for slot in at.values() for step in slot)})
    return tuple(
        Step(
            index,
            compute=computes.get(index),
            released=tuple(sorted(released.get(index, ()))),
            **{name: _ordered(slot[index]) for name, slot in at.items() if index in slot},
        )
        for index in indices
    )
