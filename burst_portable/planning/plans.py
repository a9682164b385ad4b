"""Plans: everything that a distributed attention will do, as data, before a byte moves.

A `Plan` has a `PassPlan` for each pass, and that has a tuple of `Step`s for each rank; a step is what arrives, what
leaves, and what is computed::

    step 0   compute q1 x kv1 (own)     send kv1 -> 2     receive kv0 <- 0
    step 1   compute q1 x kv0           send kv0 -> 2     receive kv3 <- 0
    ...

It needs no device and no torch: it can be made, printed, priced and verified for any number of ranks on any machine.
A rank's steps are made when they are asked for, so planning one rank of a thousand costs one rank's time.

A block is one rank's shard of one side, and that rank is its owner: see `routes`. Where heads are resharded inside
nodes and blocks travel between nodes, ranks with the same place in their nodes form a ring, and all these rings do the
same; a block is then what a rank has after the reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, cast

from burst_portable.errors import InputError
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.routes import Move, Needs, Route, Side
from burst_portable.planning.schedule import BlockTiles, Compute, Steps, divided, merged_rows, renamed, scheduled
from burst_portable.planning.tiles import BlockPairs, Tiles

HeadRange = tuple[int, int]
"""[first, past) among the heads that a rank holds."""


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Heads that a rank computes together, while those of the next group arrive and of the previous one leave.

    Attributes:
        q_heads: Its query heads.
        kv_heads: The K/V heads that they read. Several groups may share one K/V head.
        brings_kv: Whether K and V of these heads arrive with it: it is the first group that reads them.
        returns_kv: Whether dK and dV of these heads leave after it: it is the last group that reads them.
    """

    q_heads: HeadRange
    kv_heads: HeadRange
    brings_kv: bool
    returns_kv: bool


def heads_of(rank: int, ranks: int, heads: int) -> slice:
    """The heads that a rank holds; if there are fewer heads than ranks, ranks share a head."""
    if heads >= ranks:
        return slice(rank * heads // ranks, (rank + 1) * heads // ranks)
    owned = rank * heads // ranks
    return slice(owned, owned + 1)


def can_share(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether this many ranks can have equally many heads each, with whole K/V heads."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def heads_each(heads: int, kv_heads: int, ranks: int) -> tuple[int, int]:
    """(query heads, K/V heads) that each rank has."""
    assert can_share(heads, kv_heads, ranks), "the strategy has checked"
    return heads // ranks, max(1, kv_heads // ranks)


def can_group(heads: int, kv_heads: int, groups: int) -> bool:
    """Whether a rank's heads form this many equal groups, each of whole K/V heads or within one."""
    if groups < 1 or heads % groups:
        return False
    size, readers = heads // groups, heads // kv_heads
    return size % readers == 0 or readers % size == 0


def head_groups(heads: int, kv_heads: int, groups: int) -> tuple[HeadGroup, ...]:
    """The groups of one rank's heads, in the order in which they are computed."""
    assert can_group(heads, kv_heads, groups), "the strategy has checked"
    size, readers = heads // groups, heads // kv_heads
    return tuple(
        HeadGroup(
            (start, start + size),
            (start // readers, (start + size - 1) // readers + 1),
            start % readers == 0,
            (start + size) % readers == 0,
        )
        for start in range(0, heads, size)
    )


PassName = Literal["forward", "backward"]
PASSES: tuple[PassName, ...] = ("forward", "backward")
_BLOCKS: dict[tuple[PassName, Side], str] = {
    ("forward", "kv"): "K and V travel",
    ("backward", "kv"): "K and V travel, dK and dV after them",
    ("backward", "q"): "Q, dO, LSE and delta travel, dQ after them",
}
_HEADS: dict[PassName, str] = {
    "forward": "all rows {where}of some heads come before, out goes back after",
    "backward": "all rows {where}of some heads of dO come before, gradients go back after",
}
_RANKS_KEPT = 64  # ranks whose steps a pass caches


def travels_text(pass_name: PassName, travels: str) -> str:
    """Return what travels in a pass, in words, for a value of `Plan.travels`."""
    heads, plus, side = travels.rpartition("+") if travels != "heads" else ("heads", "", "")
    blocks = _BLOCKS[pass_name, cast(Side, side)] if side else ""
    if not heads:
        return blocks
    exchanged = _HEADS[pass_name].format(where="of the node " if plus else "")
    return f"{exchanged}; between nodes {blocks}" if plus else exchanged


@dataclass(frozen=True)
class PassPlan:
    """One pass: which side travels, along which route, and what each rank does.

    Attributes:
        side: which side's blocks travel; the other side's stay where they are.
        route: how they travel.
        results: how their gradients get home; None forward, where results stay where they are made.
        narrow: whether gradients travel in the dtype of the inputs, not in the one in which they are summed.
        stride: distance in ranks from one member of a ring to the next. The call and the routes count members, steps
            name ranks. With 4, ranks 1, 5, 9 ... are the members 0, 1, 2 ... of one of four rings.
    """

    call: AttentionCall
    side: Side
    route: Route
    results: Route | None = None
    stride: int = 1
    narrow: bool = False
    _pairs: BlockPairs = field(init=False, repr=False, compare=False)
    _needs: Needs = field(init=False, repr=False, compare=False)
    _ranks: dict[int, Steps] = field(init=False, repr=False, compare=False, default_factory=dict)
    _merged: dict[int, tuple[int, int] | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        p = self.call
        object.__setattr__(self, "_pairs", block_pairs(p.mask, p.layout, p.k_layout))
        object.__setattr__(self, "_needs", Needs(self._pairs, self.side))

    def steps_of(self, rank: int) -> Steps:
        """The steps of one rank; recent ones are kept."""
        found = self._ranks.get(rank)
        if found is None:  # read once: another thread, planning for another rank, may clear the dict
            if len(self._ranks) >= _RANKS_KEPT:
                self._ranks.clear()
            member, place = divmod(rank, self.stride)
            steps = self._make(member)
            if self.stride > 1:
                steps = tuple(renamed(step, self.stride, place) for step in steps)
            self._ranks[rank] = found = steps
        return found

    def alone(self, rank: int) -> Compute | None:
        """The one computation of a rank that sends and receives nothing in this pass; None for any other rank."""
        steps = self.steps_of(rank)
        return steps[0].compute if len(steps) == 1 and not steps[0].has_moves else None

    def merged_rows(self, rank: int) -> tuple[int, int] | None:
        """See `planning.schedule.merged_rows`; of a pass in which K and V travel."""
        steps = self.steps_of(rank)
        if rank not in self._merged:
            self._merged[rank] = merged_rows(steps, self.call.layout.count(rank // self.stride))
        return self._merged[rank]

    def _make(self, member: int) -> Steps:
        """The steps of one member of the ring. From here on, all numbers are of members: see `stride`."""
        inputs = list(self._inputs(member))
        owners: dict[int, list[int]] = defaultdict(list)  # by step, of the blocks that it computes with
        for owner in (*range(member), *range(member + 1, self.call.ranks), member):  # see `Compute`
            if self._needs(owner, member):
                owners[self.route.step(owner, member)].append(owner)
        computes = {step: self._compute(tuple(blocks), member) for step, blocks in owners.items()}
        last = self.route.step(member, member)
        may_divide = last in computes and len(computes) > 1 and len(computes[last].blocks) == 1
        if may_divide and (parts := divided(computes[last], self.route.before)):
            computes[0], computes[last] = parts
        return scheduled(member, inputs, computes, list(self._results(member)))

    def _compute(self, owners: tuple[int, ...], member: int) -> Compute:
        """What a member computes at one step, with blocks that lie one after the other."""
        blocks: list[BlockTiles] = []
        before = 0
        for owner in owners:
            first, past = self._rows(owner, member)
            shift = (0, before - first) if self.side == "kv" else (before - first, 0)
            blocks.append(BlockTiles(self._tiles(owner, member), *shift))
            before += past - first
        q_owners, k_owners = ((member,), owners) if self.side == "kv" else (owners, (member,))
        return Compute(q_owners, k_owners, tuple(blocks))

    def _tiles(self, owner: int, member: int) -> Tiles:
        return self._pairs.tiles(member, owner) if self.side == "kv" else self._pairs.tiles(owner, member)

    def _rows(self, owner: int, member: int) -> tuple[int, int]:
        """[start, stop) of the owner's rows that this member gets: the ones it needs, or all if it hands them on."""
        tiles = self._tiles(owner, member) if owner != member and self.trims else None
        if not tiles:  # also for a route that brings what is not needed: `verify` says so
            layout = self.call.k_layout if self.side == "kv" else self.call.layout
            return 0, layout.count(owner)
        return tiles.box[2:] if self.side == "kv" else tiles.box[:2]

    @property
    def trims(self) -> bool:
        """Whether a member is sent only the rows that it needs, and sends back only their gradients."""
        return self.route.trims and (self.results is None or self.results.trims)

    def _inputs(self, member: int) -> Iterator[Move]:
        """Blocks that a member receives, and blocks that it sends: its own, and those that it hands on."""
        for owner in range(self.call.ranks):
            if owner != member and (move := self._input(owner, member)):
                yield move
            for target in self.route.targets(owner, member):
                move = self._input(owner, target)
                if move and move.source == member:
                    yield move

    def _input(self, owner: int, target: int) -> Move | None:
        """The move that brings a block to a member; None if it need not come."""
        arrival = self.route.arrival(self._needs, owner, target)
        if arrival is None:
            return None
        source, issue = arrival
        step = self.route.step(owner, target)
        return Move(self.side, owner, source, target, issue, step, self._rows(owner, target))

    def _results(self, member: int) -> Iterator[Move]:
        """Gradients of foreign blocks that a member sends, and gradients that come to it."""
        if self.results is None:
            return
        for other in range(self.call.ranks):
            if other == member:
                continue
            if move := self._result(other, member):
                yield move
            # What comes here: gradients of our own block, which the other made; and of the other's block, from the
            # neighbour whose sum gets ours added before it goes on.
            feeder = self.results.feeder(other, member)
            for owner, source in ((member, other), (other, feeder)):
                move = self._result(owner, source) if source is not None else None
                if move and move.target == member:
                    yield move

    def _result(self, owner: int, source: int) -> Move | None:
        """The move of the gradients of a block away from a member; None if it makes none."""
        if self.results is None or not self._needs(owner, source):
            return None
        target = self.results.departure(self._needs, owner, source)
        issue = self.route.step(owner, source)
        needed = issue + self.results.patience(source, target)
        return Move(self.side, owner, source, target, issue, needed, self._rows(owner, source), result=True)


@lru_cache(maxsize=8)
def block_pairs(mask: Mask, q_layout: Layout, k_layout: Layout) -> BlockPairs:
    """The pairs of blocks of all ranks; made once and shared by both passes and every strategy that `auto` tries."""
    return BlockPairs(mask, q_layout.shards, k_layout.shards)


def make_pass_plan(
    call: AttentionCall, side: Side, route: Route, results: Route | None = None, stride: int = 1, narrow: bool = False
) -> PassPlan:
    """A `PassPlan`; made once, because strategies that `auto` compares have passes in common.

    Raises `InputError` for a route that cannot be hashed.
    """
    for one in (route, results):
        try:
            hash(one)
        except TypeError:
            raise InputError(
                f"the route {type(one).__name__} cannot be hashed",
                next_step="make it a frozen dataclass, with fields that can be",
            ) from None
    return _kept_pass_plan(call, side, route, results, stride, narrow)


@lru_cache(maxsize=64)
def _kept_pass_plan(
    call: AttentionCall, side: Side, route: Route, results: Route | None, stride: int, narrow: bool
) -> PassPlan:
    return PassPlan(call, side, route, results, stride, narrow)


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Divide heads among ranks: tensors go from sequence shards to head shards before a pass, and back after it.

    Attributes:
        ranks: How many ranks divide the heads among themselves: all, or those of a node.
        groups: In how many groups a rank computes its heads.
    """

    ranks: int
    groups: int = 1


@dataclass(frozen=True, repr=False)
class Plan:
    """A whole attention: both passes, which strategy made it, and why.

    Attributes:
        call: What is computed.
        strategy: The name of the strategy that made it.
        forward: The forward pass.
        backward: The backward pass.
        heads: How heads are divided among ranks; None if they are not. If they are, both passes plan one group of a
            rank's heads over the rows of all these ranks. The layout of their call has a member per node and says in
            which order its rows lie.
        reason: Why `auto` chose it, or what the strategy chose by itself, in words.
    """

    call: AttentionCall
    strategy: str
    forward: PassPlan
    backward: PassPlan
    heads: HeadSplit | None = None
    reason: str = ""

    def __repr__(self) -> str:
        p = self.call
        size = f"ranks={p.ranks}, tokens={p.layout.length}"
        return f"Plan({self.strategy!r}, {size}, mask={p.mask!s}, layout={p.layout.name})"

    def __str__(self) -> str:
        """Return a summary of a few lines; `burst-portable plan` prints steps and costs, too."""
        p = self.call
        values = f" (values {p.v_head_dim})" if p.v_head_dim != p.head_dim else ""
        lines = [
            f"{self.strategy} over {p.ranks:,} rank{'' if p.ranks == 1 else 's'}, layout {p.layout.name}, "
            f"{p.layout.length:,} tokens, batch {p.batch}, {p.heads} query and {p.kv_heads} K/V heads of "
            f"{p.head_dim}{values}, {p.itemsize} bytes a number",
            f"mask      {p.mask}: {p.num_pairs:,} pairs per head",
        ]
        for name in PASSES:
            lines.append(f"{name:<10}{self.how(name)}")
        return "\n".join([*lines, *([f"why       {self.reason}"] if self.reason else [])])

    @property
    def layout(self) -> Layout:
        """Which rows each rank holds: what `shard` and `attention` take."""
        return self.call.layout

    @property
    def direct(self) -> bool:
        """Whether every message goes straight from the rank that made it to the one that uses it."""
        if self.ring_size == 1 and self.heads:
            return True
        return self.forward.trims and self.backward.trims

    @property
    def moves_beside_kernels(self) -> bool:
        """Whether messages are under way while kernels compute."""
        whole_exchanges = self.heads is not None and self.ring_size == 1 and self.groups == 1
        return self.call.ranks > 1 and not whole_exchanges

    @property
    def head_parallel_size(self) -> int:
        """Return the number of ranks that divide heads among themselves; 1 if heads are not divided."""
        return self.heads.ranks if self.heads else 1

    @property
    def groups(self) -> int:
        """Return the number of groups in which a rank computes its heads; 1 if heads are not divided."""
        return self.heads.groups if self.heads else 1

    @property
    def ring_size(self) -> int:
        """Return the number of members of a ring: all ranks, the nodes under usp, 1 under ulysses."""
        return self.forward.call.ranks

    def travels(self, pass_name: PassName) -> str:
        """Return what travels in a pass, in a word: a side, "heads" if they are divided, or "heads+" and a side."""
        side = self.pass_plan(pass_name).side
        if not self.heads:
            return side
        return f"heads+{side}" if self.ring_size > 1 else "heads"

    def moves(self, pass_name: PassName) -> str:
        """Return how blocks travel, by the name that the command line and printed plans use."""
        name = self.pass_plan(pass_name).route.name
        if not self.heads:
            return name
        return f"all_to_all, {name}" if self.ring_size > 1 else "all_to_all"

    def what_travels(self, pass_name: PassName) -> str:
        """Return what travels in a pass, in words."""
        return travels_text(pass_name, self.travels(pass_name))

    def how(self, pass_name: PassName) -> str:
        """What travels in a pass and how, for people."""
        if self.call.ranks == 1:
            return "nothing travels, one rank holds all"
        return f"{self.what_travels(pass_name)} ({self.moves(pass_name)})"

    @property
    def head_groups(self) -> tuple[HeadGroup, ...]:
        """The groups of one rank's heads, where heads are resharded."""
        p = self.call
        return head_groups(*heads_each(p.heads, p.kv_heads, self.head_parallel_size), self.groups)

    def steps(self, pass_name: PassName, rank: int) -> Steps:
        """What a rank does in a pass; where heads are resharded, what it does between the exchanges for each group."""
        return self.pass_plan(pass_name).steps_of(rank)

    def pass_plan(self, pass_name: PassName) -> PassPlan:
        """The plan of one pass, by its name."""
        return self.forward if pass_name == "forward" else self.backward

    def passes(self) -> tuple[tuple[PassName, PassPlan], ...]:
        """(name, plan) of both passes."""
        return ("forward", self.forward), ("backward", self.backward)
