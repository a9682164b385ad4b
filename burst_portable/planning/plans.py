"""Define `Plan`: the complete schedule of a distributed attention, as data, before any communication.

A `Plan` has a `PassPlan` for each pass. That has a tuple of `Step`s for each rank: what the rank receives, sends and
computes::

    step 0   compute q1 x kv1 (local)   send kv1 -> 2     receive kv0 <- 0
    step 1   compute q1 x kv0           send kv0 -> 2     receive kv3 <- 0
    ...

A plan needs no device and no torch: it can be made, printed, estimated and verified for any number of ranks on any
machine. The steps of a rank are made on demand, so planning one rank of a thousand costs the time of one rank.

A block is one rank's shard of one side, and that rank is its owner: see `routes`. If heads are resharded inside nodes
and blocks are sent between nodes (usp), the ranks with the same offset in their nodes form a ring. All these rings do
the same, and a block is what a rank holds after the reshard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, cast

from burst_portable.errors import StrategyError
from burst_portable.layout import Layout, cut
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.head_division import HeadGroup, HeadSplit, heads_per_rank, split_heads
from burst_portable.planning.routes import BlockDependencies, Helpers, Move, Route, Rows, Side, count_rows
from burst_portable.planning.schedule import (
    BlockTiles,
    Compute,
    Steps,
    make_steps,
    merged_rows,
    rename_members,
    split_compute,
)
from burst_portable.planning.tiles import BlockPairs, Positions, Tiles
from burst_portable.utils.cache import Cache

_LEAST_GAP = 128  # rows, and at most an eighth of a block: shorter gaps between needed rows cost more to copy around
PassName = Literal["forward", "backward"]
PASSES: tuple[PassName, ...] = ("forward", "backward")
Circulates = Literal["kv", "q", "both"]
"""The sides whose blocks are sent in a pass: one, or K and V for some pairs and queries for others."""
_BLOCKS: dict[tuple[PassName, Circulates], str] = {
    ("forward", "kv"): "K and V are sent",
    ("backward", "kv"): "K and V are sent, then dK and dV",
    ("backward", "q"): "Q, dO, LSE and delta are sent, then dQ",
    ("forward", "both"): "K and V are sent, or Q to a helper that returns out and LSE",
    ("backward", "both"): "K and V are sent, then dK and dV; or Q, dO, LSE and delta to a helper, then dQ",
}
_SEPARATE: dict[PassName, str] = {
    "forward": "all steps run with K, then again with V",
    "backward": "all steps run with V and dV, then again with K and dK",
}
_HEADS: dict[PassName, str] = {
    "forward": "all rows {where}of some heads are sent to each rank, then out back",
    "backward": "all rows {where}of some heads of dO are sent to each rank, then gradients back",
}


def traffic_text(pass_name: PassName, circulates: str) -> str:
    """Return the sentence for a value of `Plan.circulates`: which tensors are sent in a pass."""
    heads, plus, side = circulates.rpartition("+") if circulates != "heads" else ("heads", "", "")
    blocks = _BLOCKS[pass_name, cast(Circulates, side)] if side else ""
    if not heads:
        return blocks
    exchanged = _HEADS[pass_name].format(where="of its node " if plus else "")
    return f"{exchanged}; between nodes {blocks}" if plus else exchanged


@dataclass(frozen=True)
class PassPlan:
    """One pass: which side's blocks are sent, along which route, and what each rank does.

    Attributes:
        call: The attention of one ring.
        side: The side whose blocks are sent. Blocks of the other side stay on their ranks.
        route: From which rank each block comes, and when.
        gradient_route: To which rank its gradients go. None in the forward pass: results stay on their ranks, and those
            of helpers go along `route`.
        stride: Distance in ranks from one member of a ring to the next. The call and the routes count members, steps
            contain ranks. With 4, the ranks 1, 5, 9 ... are the members 0, 1, 2 ... of one of four rings. With 1 and
            three members, the ranks 3, 4, 5 are the members 0, 1, 2 of the second ring.
        rounds_gradients: Whether gradients are sent in the dtype of the inputs, and not in the accumulation dtype.
        helpers: Pairs for which queries are sent instead of K and V, along the same route. None: no pair.
    """

    call: AttentionCall
    side: Side
    route: Route
    gradient_route: Route | None = None
    stride: int = 1
    rounds_gradients: bool = False
    helpers: Helpers | None = None
    _pairs: BlockPairs = field(init=False, repr=False, compare=False)
    _dependencies: dict[Side, BlockDependencies] = field(init=False, repr=False, compare=False)
    _steps: Cache[int, Steps] = field(init=False, repr=False, compare=False, default_factory=lambda: Cache(64))
    _merged: dict[int, tuple[int, int] | None] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        call = self.call
        if self.helpers is not None and (self.side != "kv" or not self.trims):
            got = f"side {self.side!r}, the route {self.route.name!r}"
            raise StrategyError("helpers need a pass that sends K and V from their owners", got=got)
        object.__setattr__(self, "_pairs", block_pairs(call.mask, call.layout, call.k_layout))
        found = {side: BlockDependencies(self._pairs, side, self.helpers) for side in self.sides}
        object.__setattr__(self, "_dependencies", found)

    def steps_of(self, rank: int) -> Steps:
        """Return the steps of one rank; recent ones are cached."""
        steps = self._steps.get(rank)
        if steps is None:  # read once: another thread, planning for another rank, may clear the cache
            member, offset = self.member(rank), self.offset(rank)
            steps = self._make(member)
            if self.stride > 1 or offset:
                steps = tuple(rename_members(step, self.stride, offset) for step in steps)
            self._steps.keep(rank, steps)
        return steps

    def member(self, rank: int) -> int:
        """Return which member of its ring a rank is."""
        return rank // self.stride % self.call.ranks

    def offset(self, rank: int) -> int:
        """Return the first rank of the ring of a rank."""
        return rank - self.member(rank) * self.stride

    def single_compute(self, rank: int) -> Compute | None:
        """Return the only computation of a rank that sends and receives nothing in this pass; None for other ranks."""
        steps = self.steps_of(rank)
        return steps[0].compute if len(steps) == 1 and not steps[0].has_moves else None

    def merged_rows(self, rank: int) -> tuple[int, int] | None:
        """Return `planning.schedule.merged_rows` of a rank, for a pass in which only K and V are sent."""
        if self.helpers is not None:
            return None
        steps = self.steps_of(rank)
        if rank not in self._merged:
            self._merged[rank] = merged_rows(steps, self.call.layout.count(self.member(rank)))
        return self._merged[rank]

    def _make(self, member: int) -> Steps:
        """Return the steps of one member of the ring. From here on, all numbers count members: see `stride`."""
        owners: dict[int, list[int]] = defaultdict(list)  # by step: owners of the blocks that it computes with
        side_of: dict[int, Side] = {}  # by step: the side of these blocks
        for side, dependencies in self._dependencies.items():
            for owner in (*range(member), *range(member + 1, self.call.ranks), member):  # see `Compute`
                if dependencies.needs(owner, member):
                    step = self.route.step(owner, member)
                    if side_of.setdefault(step, side) != side:
                        text = (
                            f"step {step} of rank {member} would compute with K and V and with queries of other ranks"
                        )
                        raise StrategyError(text, next_step="change `step` of the route, or `helps` of the helpers")
                    owners[step].append(owner)
        computes = {step: self._compute(side_of[step], tuple(blocks), member) for step, blocks in owners.items()}
        last = self.route.step(member, member)
        may_split = last in computes and len(computes) > 1 and len(computes[last].blocks) == 1
        if may_split and (parts := split_compute(computes[last], self.route.local_first_share)):
            computes[0], computes[last] = parts
        moves = (move for side in self.sides for move in (*self._inputs(side, member), *self._results(side, member)))
        return make_steps(member, moves, computes)

    def _compute(self, side: Side, owners: tuple[int, ...], member: int) -> Compute:
        """Return the computation of a member at one step, with blocks that are contiguous in memory."""
        blocks: list[BlockTiles] = []
        offset = 0
        for owner in owners:
            tiles, rows = self._tiles(side, owner, member), self._rows(side, owner, member)
            if len(rows) > 1:
                tiles, first = tiles.packed(rows, is_columns=side == "kv"), 0
            else:
                first = rows[0][0]
            shift = (0, offset - first) if side == "kv" else (offset - first, 0)
            blocks.append(BlockTiles(tiles, *shift))
            offset += count_rows(rows)
        q_owners, k_owners = ((member,), owners) if side == "kv" else (owners, (member,))
        positions = None
        if self.call.dropout is not None:
            positions = self._positions(side, q_owners, member), self._positions(side, k_owners, member, keys=True)
        return Compute(q_owners, k_owners, tuple(blocks), positions)

    def _positions(self, side: Side, owners: tuple[int, ...], member: int, *, keys: bool = False) -> Positions:
        """Return the positions of the queries or the keys of a computation: of this member's block or received rows."""
        layout = self.call.k_layout if keys else self.call.layout
        if keys != (side == "kv"):
            return Positions(layout.shards[member])
        received = ((layout.shards[owner], rows) for owner in owners for rows in self._rows(side, owner, member))
        return Positions(segment for shard, (start, stop) in received for segment in cut(shard, start, stop))

    def _tiles(self, side: Side, owner: int, member: int) -> Tiles:
        return self._pairs.tiles(member, owner) if side == "kv" else self._pairs.tiles(owner, member)

    def _rows(self, side: Side, owner: int, member: int) -> Rows:
        """Return the owner's rows that a member receives: those it needs, or all for a ring."""
        layout = self.call.k_layout if side == "kv" else self.call.layout
        tiles = self._tiles(side, owner, member) if owner != member and self.trims else None
        if not tiles:  # also if a route sends a block that is not needed: `verify` reports that
            return ((0, layout.count(owner)),)
        return needed_rows(tiles, side, layout.count(owner))

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides whose blocks are sent."""
        return (self.side,) if self.helpers is None else ("kv", "q")

    @property
    def circulates(self) -> Circulates:
        """The side whose blocks are sent, or "both"."""
        return self.side if self.helpers is None else "both"

    @property
    def name(self) -> PassName:
        """Return which pass it is. Only the backward pass sends gradients."""
        return "forward" if self.gradient_route is None else "backward"

    @property
    def trims(self) -> bool:
        """Return whether a member receives only the rows that it needs, and sends only their gradients back."""
        return self.route.trims and (self.gradient_route is None or self.gradient_route.trims)

    def _inputs(self, side: Side, member: int) -> Iterator[Move]:
        """Yield the blocks that a member receives, and those that it sends: its own, and those that it forwards."""
        for owner in range(self.call.ranks):
            if owner != member and (move := self._input(side, owner, member)):
                yield move
            for target in self.route.targets(owner, member):
                move = self._input(side, owner, target)
                if move and move.source == member:
                    yield move

    def _input(self, side: Side, owner: int, target: int) -> Move | None:
        """Return the move that brings a block to a member; None if the block is not sent there."""
        found = self.route.block_source(self._dependencies[side], owner, target)
        if found is None:
            return None
        source, step = found
        wait_step = self.route.step(owner, target)
        return Move(side, owner, source, target, step, wait_step, self._rows(side, owner, target))

    def _results(self, side: Side, member: int) -> Iterator[Move]:
        """Yield the results for remote blocks that a member sends, and the results that it receives."""
        route = self._result_route(side)
        if route is None:
            return
        for other in range(self.call.ranks):
            if other == member:
                continue
            # Received: gradients of the local block from every other rank, and gradients of the other's block from the
            # neighbor, to which this member adds its own before it forwards them.
            neighbor = route.result_source(other, member)
            for owner, source in ((other, member), (member, other), (other, neighbor)):
                move = self._result(side, route, owner, source) if source is not None else None
                if move and member in (move.source, move.target):
                    yield move

    def _result_route(self, side: Side) -> Route | None:
        """Return the route of gradients, or of the partial results of helpers. None: results stay on their ranks."""
        return self.route if side == "q" and self.name == "forward" else self.gradient_route

    def _result(self, side: Side, route: Route, owner: int, source: int) -> Move | None:
        """Return the move that sends a member's results for a block; None if it computes none."""
        dependencies = self._dependencies[side]
        if not dependencies.needs(owner, source):
            return None
        target = route.result_target(dependencies, owner, source)
        step = self.route.step(owner, source)
        wait_step = step + route.result_delay_steps(source, target)
        is_gradient = self.name == "backward"
        rows = self._rows(side, owner, source)
        return Move(side, owner, source, target, step, wait_step, rows, is_gradient, not is_gradient)


def needed_rows(tiles: Tiles, side: Side, count: int) -> Rows:
    """Return the rows of a block of `count` rows that a rank needs to compute these tiles.

    Rows between them are sent too, if they are few: see `_LEAST_GAP`.
    """
    return tiles.ranges(is_columns=side == "kv", least_gap=max(1, min(_LEAST_GAP, count // 8)))


@lru_cache(maxsize=8)
def block_pairs(mask: Mask, q_layout: Layout, k_layout: Layout) -> BlockPairs:
    """Return the pairs of blocks of all ranks, cached: both passes and all compared strategies share them."""
    return BlockPairs(mask, q_layout.shards, k_layout.shards)


def make_pass_plan(
    call: AttentionCall,
    side: Side,
    route: Route,
    gradient_route: Route | None = None,
    stride: int = 1,
    rounds_gradients: bool = False,
    helpers: Helpers | None = None,
) -> PassPlan:
    """Return a `PassPlan`, cached: strategies that `auto` compares share passes.

    Raises:
        StrategyError: A route or the helpers cannot be hashed.
    """
    for what, one in (("route", route), ("route", gradient_route), ("helpers", helpers)):
        try:
            hash(one)
        except TypeError:
            raise StrategyError(
                f"the {what} {type(one).__name__} cannot be hashed",
                next_step="make it a frozen dataclass with hashable fields",
            ) from None
    return _make_pass_plan(call, side, route, gradient_route, stride, rounds_gradients, helpers)


_make_pass_plan = lru_cache(maxsize=64)(PassPlan)


@dataclass(frozen=True, repr=False)
class Plan:
    """The schedule of one attention: both passes, and the reason for the choice of strategy.

    Attributes:
        call: The attention.
        strategy: Name of the strategy that made the plan.
        forward: The forward pass.
        backward: The backward pass.
        heads: How heads are divided among ranks; None if they are not. If they are, both passes plan one group of a
            rank's heads over the rows of all these ranks. The layout of their call then has one member per node, and
            defines the order of its rows.
        head_groups: Number of groups in which a rank computes its heads. Both passes plan one group. If heads are not
            divided, the groups run their steps at the same time, each one step later than the group before it: see
            `schedule.interleave_groups`.
        score_rows: Whether K and V are sent one after the other, and a rank stores its rows of scores in between: see
            `runtime.score_rows`. The steps of a pass then run twice.
        reason: Why `auto` chose the strategy, or which option the strategy chose itself; "" if neither applies.
        label: The strategy with its options, as `Strategy.label` writes it. Default: `strategy`.
    """

    call: AttentionCall
    strategy: str
    forward: PassPlan
    backward: PassPlan
    heads: HeadSplit | None = None
    head_groups: int = 1
    score_rows: bool = False
    reason: str = ""
    label: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "label", self.label or self.strategy)

    def __repr__(self) -> str:
        call = self.call
        size = f"ranks={call.ranks}, tokens={call.layout.length}"
        return f"Plan({self.label!r}, {size}, mask={call.mask!s}, layout={call.layout.name})"

    def __str__(self) -> str:
        """Describe the plan in a few lines. `burst-portable plan` also prints steps and costs."""
        call = self.call
        values = f" (values {call.v_head_dim})" if call.v_head_dim != call.head_dim else ""
        lines = [
            f"{self.label} over {call.ranks:,} rank{'' if call.ranks == 1 else 's'}, layout {call.layout.name}, "
            f"{call.layout.length:,} tokens, batch {call.batch}, {call.heads} query and {call.kv_heads} K/V heads of "
            f"{call.head_dim}{values}, {call.itemsize} bytes a number",
            f"mask      {call.mask}: {call.num_pairs:,} pairs per head",
        ]
        for name in PASSES:
            lines.append(f"{name:<10}{self.describe_pass(name)}")
        return "\n".join([*lines, *([f"why       {self.reason}"] if self.reason else [])])

    @property
    def layout(self) -> Layout:
        """The tokens of each rank, as `shard` and `attention` take them."""
        return self.call.layout

    @property
    def direct(self) -> bool:
        """Return whether no rank forwards a message: each goes from the rank that computed it to its user."""
        if self.ring_size == 1 and self.heads:
            return True
        return self.forward.trims and self.backward.trims

    @property
    def overlaps_communication(self) -> bool:
        """Return whether messages are in flight while kernels compute."""
        only_exchanges = self.heads is not None and self.ring_size == 1 and self.head_groups == 1
        return self.call.ranks > 1 and not only_exchanges

    @property
    def saves_more(self) -> bool:
        """Return whether the backward pass needs more of the forward pass than q, k, v, out and LSE of this rank."""
        return self.heads is not None or self.score_rows

    @property
    def tensors(self) -> tuple[int | None, ...]:
        """Index of the tensor of a block that the messages of each round contain; None if they contain all of them."""
        return (0, 1) if self.score_rows else (None,)

    @property
    def rounds(self) -> int:
        """Return how often the steps run: for each group of heads, or for K and V if they are sent separately."""
        return self.head_groups * len(self.tensors)

    @property
    def head_parallel_size(self) -> int:
        """Return the number of ranks that divide heads among themselves; 1 if heads are not divided."""
        return self.heads.ranks if self.heads else 1

    @property
    def head_spacing(self) -> int:
        """Return `HeadSplit.spacing`; 1 if heads are not divided."""
        return self.heads.spacing if self.heads else 1

    @property
    def ring_size(self) -> int:
        """Return the number of members of a ring: all ranks, the nodes under usp, 1 under ulysses."""
        return self.forward.call.ranks

    def circulates(self, pass_name: PassName) -> str:
        """Return what is sent in a pass: `PassPlan.circulates`, "heads" if heads are divided, or "heads+" and it."""
        side = self.pass_plan(pass_name).circulates
        if not self.heads:
            return side
        return f"heads+{side}" if self.ring_size > 1 else "heads"

    def transfer(self, pass_name: PassName) -> str:
        """Return how tensors are sent in a pass: the name of the route, "all_to_all", or both."""
        name = self.pass_plan(pass_name).route.name
        if not self.heads:
            return name
        return f"all_to_all, {name}" if self.ring_size > 1 else "all_to_all"

    def describe_traffic(self, pass_name: PassName) -> str:
        """Return a sentence: which tensors are sent in a pass."""
        if self.score_rows:
            return _SEPARATE[pass_name]
        text = traffic_text(pass_name, self.circulates(pass_name))
        if self.head_spacing > 1:  # the exchange is between nodes, and the ring inside them
            text = text.replace("of its node", "of one rank per node").replace("between nodes", "inside nodes")
        return text

    def describe_pass(self, pass_name: PassName) -> str:
        """Return a sentence: which tensors are sent in a pass, and how."""
        if self.call.ranks == 1:
            return "no communication, one rank holds all tokens"
        return f"{self.describe_traffic(pass_name)} ({self.transfer(pass_name)})"

    def split_heads(self) -> tuple[HeadGroup, ...]:
        """Return the groups of one rank's heads."""
        return split_heads(*heads_per_rank(self.call, self.head_parallel_size), self.head_groups)

    def steps(self, pass_name: PassName, rank: int) -> Steps:
        """Return the steps of a rank in a pass. Each group of heads runs them."""
        return self.pass_plan(pass_name).steps_of(rank)

    def pass_plan(self, pass_name: PassName) -> PassPlan:
        """Return the plan of one pass by its name."""
        return self.forward if pass_name == "forward" else self.backward

    def passes(self) -> tuple[tuple[PassName, PassPlan], ...]:
        """Return (name, plan) of both passes."""
        return ("forward", self.forward), ("backward", self.backward)
