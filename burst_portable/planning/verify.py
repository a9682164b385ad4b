"""Checks a plan without running it: every pair exactly once, every send met by its receive, every gradient home."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from burst_portable.planning.plans import HeadSplit, PassPlan, Plan, heads_of
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import BlockTiles, Compute
from burst_portable.planning.tiles import Tiles, find_tiles


def verify(
    plan: Plan, progress: Callable[[int], None] = lambda _: None, ranks: Sequence[int] | None = None
) -> list[str]:
    """What is wrong with a plan, as a list; empty for a correct plan. Walks every rank, so it costs ranks² tiles.

    Args:
        plan: any plan.
        progress: called with the number of ranks done, over both passes.
        ranks: a sample to walk instead. That shows whether each of them computes every pair of its rows exactly once,
            and whether moves between them meet, but not whether gradients get home.
    """
    wrong = _wrong_heads(plan, plan.heads) if plan.heads else []
    done = 0
    for name, pass_plan in plan.passes():
        rings = defaultdict(list)  # ranks with the same place in their nodes, if heads are resharded; else all
        for rank in range(plan.call.ranks) if ranks is None else ranks:
            rings[rank % pass_plan.stride].append(rank)
        for walked in rings.values():
            checker = _Checker(pass_plan, walked)
            for rank in walked:
                checker.walk(rank)
                done += 1
                progress(done)
            wrong += [f"{name}: {call}" for call in checker.finish()]
    return wrong


def _wrong_heads(plan: Plan, split: HeadSplit) -> list[str]:
    """Return what is wrong: members must have the rows of their ranks, and the ranks of a node all heads.

    A layout holds every position once, so if there is only one member, it has all rows.
    """
    p, head_parallel_size = plan.call, split.ranks
    wrong = []
    if head_parallel_size * plan.ring_size != p.ranks:
        wrong.append(f"{plan.ring_size} nodes of {head_parallel_size} ranks are not {p.ranks} ranks")
    for name, pass_plan in plan.passes():
        part = pass_plan.call
        for before, after in ((p.layout, part.layout), (p.k_layout, part.k_layout)):
            nodes = before.joined(head_parallel_size).sorted().shards
            if len(nodes) != after.ranks or (after.ranks > 1 and nodes != after.sorted().shards):
                wrong.append(f"{name}: nodes compute with other rows than their ranks have")
        heads, readers = split.groups * part.heads, p.heads // p.kv_heads
        if pass_plan.stride != head_parallel_size or heads * head_parallel_size != p.heads:
            wrong.append(f"{name}: {pass_plan.stride} ranks with {heads} query heads each are not {p.heads} heads")
            continue
        for group in plan.head_groups:
            first, past = group.kv_heads
            if past - first != part.kv_heads:
                wrong.append(f"{name}: query heads {group.q_heads} read K/V heads {first, past}, not {part.kv_heads}")
        for place in range(head_parallel_size):
            kept = heads_of(place, head_parallel_size, p.kv_heads)
            if (place * heads // readers, ((place + 1) * heads - 1) // readers + 1) != (kept.start, kept.stop):
                wrong.append(f"{name}: place {place} of a node has other K/V heads than its query heads read")
    return wrong


def _overlap(one: Tiles, other: Tiles) -> bool:
    """Whether two lists of tiles of the same pair of blocks have rows in common."""
    (first, past, *_), (other_first, other_past, *_) = one.box, other.box
    return first < other_past and other_first < past


class _Checker:
    """Walks the ranks of a ring, each once, in one pass, and keeps only moves that one end alone has posted so far."""

    def __init__(self, pass_plan: PassPlan, ranks: Sequence[int]) -> None:
        self.pass_plan = pass_plan
        self.ranks = frozenset(ranks)
        self.wrong: list[str] = []
        self.computed: Counter[tuple[int, int]] = Counter()  # (query block, key block)
        self.num_pairs = 0
        self.open: dict[Move, int] = {}  # +1: sent and not yet received; -1: the opposite
        self.onwards: dict[tuple[int, int], int] = {}  # (owner, rank) -> where that rank sends its gradients

    def walk(self, rank: int) -> None:
        """Walk one rank's steps, in order; a block may be used only while it is there."""
        self._walk_blocks(rank)
        self._walk_order(rank)

    def _walk_order(self, rank: int) -> None:
        """Check that whatever comes is posted before it is waited for, and is then used."""
        posted: set[Move] = set()
        idle: dict[int, Move] = {}  # arrivals, by owner, that nothing has used yet
        made: set[int] = set()  # owners whose gradients were made here and have not left
        for step in self.pass_plan.steps_of(rank):
            for move in step.arrivals:
                self._check_posted(rank, step.index, move, posted)
                if step.compute or self.pass_plan.trims:  # else a ring may pass by a rank, and end there
                    idle[move.owner] = move
            posted.update(step.receives)
            others = set(self._others(step.compute)) if step.compute else set()
            made |= others - {rank}
            for owner in {m.owner for m in step.sends} | others:
                idle.pop(owner, None)
            for move in step.result_arrivals:
                self._check_posted(rank, step.index, move, posted)
                if move.owner != rank and move.owner not in made:
                    self.wrong.append(
                        f"rank {rank} has no gradient of block {move.owner} to add {move.label} of rank {move.source} "
                        f"to at step {step.index}: it has made none yet, or has sent it; see `departure`, `patience`"
                    )
            for move in step.result_sends:
                if move.owner not in made:
                    self.wrong.append(f"rank {rank} sends {move.label} at step {step.index} without having made it")
                made.discard(move.owner)
            posted.update(step.result_receives)
        for move in idle.values():
            self.wrong.append(
                f"rank {rank} receives {move.label}, but neither computes with it nor hands it on; see `arrival`"
            )

    def _check_posted(self, rank: int, index: int, move: Move, posted: set[Move]) -> None:
        if move not in posted:
            asked = "`patience` must be at least 1" if move.result else "`arrival` must say a step before `step`"
            self.wrong.append(
                f"rank {rank} waits for {move.label} at step {index}, but has not posted its receive by then, which is "
                f"for step {move.issue}; {asked}"
            )

    def _others(self, compute: Compute) -> tuple[int, ...]:
        """Return the owners of the travelling blocks of a computation."""
        return compute.k_owners if self.pass_plan.side == "kv" else compute.q_owners

    def _walk_blocks(self, rank: int) -> None:
        held = {rank}
        parts: dict[tuple[int, int], list[BlockTiles]] = defaultdict(list)  # pairs that are computed in parts
        for step in self.pass_plan.steps_of(rank):
            held |= {m.owner for m in step.arrivals}
            for move in step.sends:
                if move.owner not in held:
                    self.wrong.append(f"rank {rank} sends {move.label} at step {step.index} without holding it")
            self._count((*step.sends, *step.result_sends), +1)
            self._count((*step.receives, *step.result_receives), -1)
            if step.compute:
                self._compute(rank, step.compute, held, parts)
            self.onwards.update({(m.owner, rank): m.target for m in step.result_sends})
            held -= set(step.released)
        if kept := sorted(held - {rank}):
            self.wrong.append(f"rank {rank} still holds the blocks of {kept} at the end")
        if rank not in held:
            self.wrong.append(f"rank {rank} lets go of its own block; it must not be among its own `targets`")

    def _compute(
        self, rank: int, compute: Compute, held: set[int], parts: dict[tuple[int, int], list[BlockTiles]]
    ) -> None:
        for other in self._others(compute):
            if other not in held:
                self.wrong.append(f"rank {rank} computes with the block of {other} without holding it")
        for pair, block in zip(compute.pairs, compute.blocks, strict=True):
            if not parts[pair] or any(_overlap(block.tiles, other.tiles) for other in parts[pair]):
                self.computed[pair] += 1
            parts[pair].append(block)
        self.num_pairs += compute.num_pairs

    def _count(self, moves: Iterable[Move], sign: int) -> None:
        for move in moves:
            if move.source not in self.ranks or move.target not in self.ranks:
                continue  # its other end is not walked
            balance = self.open.pop(move, 0) + sign
            if balance:
                self.open[move] = balance

    def finish(self) -> list[str]:
        """Check what only all ranks together show; returns everything that is wrong."""
        if twice := [pair for pair, count in self.computed.items() if count > 1]:
            self.wrong.append(f"block pairs computed more than once: {twice[:4]}")
        if self.num_pairs != (expected := self._expected()):
            self.wrong.append(f"{self.num_pairs} pairs computed, but the mask has {expected}")
        for result, methods in ((False, "`arrival` and `targets`"), (True, "`departure` and `feeder`")):
            if alone := [move for move in self.open if move.result is result]:
                self.wrong.append(
                    f"{len(alone)} moves posted by one end alone, such as {alone[0]}; {methods} of the route disagree"
                )
        if self.pass_plan.results is not None and len(self.ranks) == self.pass_plan.call.ranks:
            self.wrong += self._gradients_home()
        return self.wrong

    def _expected(self) -> int:
        """How many pairs the walked ranks must compute: their blocks of the side that stays, against all others."""
        p = self.pass_plan.call
        if len(self.ranks) == p.ranks:
            return p.num_pairs
        stays, travels = (p.layout, p.k_layout) if self.pass_plan.side == "kv" else (p.k_layout, p.layout)
        whole = sorted((s for shard in travels.shards for s in shard), key=lambda s: s.start)
        sides = ((stays.shards[rank // self.pass_plan.stride], whole) for rank in self.ranks)
        return sum(find_tiles(p.mask, *(s if self.pass_plan.side == "kv" else s[::-1])).num_pairs for s in sides)

    def _gradients_home(self) -> list[str]:
        """Follow each contribution from where it is made to its owner."""
        wrong = []
        for q_owner, k_owner in self.computed:
            owner, made_at = (k_owner, q_owner) if self.pass_plan.side == "kv" else (q_owner, k_owner)
            seen: set[int] = set()
            at = made_at
            while at != owner and at not in seen:
                seen.add(at)
                at = self.onwards.get((owner, at), at)
            if at != owner:
                wrong.append(f"the gradient of block {owner} made on rank {made_at} gets no further than rank {at}")
        return wrong
