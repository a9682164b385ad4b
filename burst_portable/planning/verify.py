"""Check a plan without running it.

Every query-key pair must be computed exactly once, every send must match a receive, and every gradient must reach the
owner of its block. Messages must have the rows that their receivers need: see `verify_rows`. Steps must have the form
on which the executor relies: see `verify_steps`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

from burst_portable.planning.head_division import HeadSplit, heads_of_rank
from burst_portable.planning.plans import PassPlan, Plan, block_pairs
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import BlockTiles, Compute, Step
from burst_portable.planning.tiles import Tiles, find_tiles
from burst_portable.planning.verify_rows import wrong_rows
from burst_portable.planning.verify_steps import wrong_score_rows, wrong_steps


def verify(
    plan: Plan, progress: Callable[[int], None] = lambda _: None, ranks: Sequence[int] | None = None
) -> list[str]:
    """Return the errors of a plan; an empty list if it is correct. Walks every rank, so it costs ranks² tiles.

    Args:
        plan: Any plan.
        progress: Called with the number of ranks that were walked, over both passes.
        ranks: A sample of ranks to walk. It does not show whether gradients reach their owners. Default: all.
    """
    if wrong := _wrong_passes(plan):
        return wrong  # their steps may not exist
    wrong = _wrong_heads(plan, plan.heads) if plan.heads else _wrong_groups(plan)
    done = 0
    for name, pass_plan in plan.passes():
        rings = defaultdict(list)  # if heads are resharded, by first rank; else all
        for rank in range(plan.call.ranks) if ranks is None else ranks:
            rings[pass_plan.offset(rank)].append(rank)
        for walked in rings.values():
            checker = _Checker(pass_plan, walked)
            for rank in walked:
                try:
                    pass_plan.steps_of(rank)
                except Exception as error:  # noqa: BLE001  a route of another package may raise anything
                    return [*wrong, f"{name}: the steps of rank {rank} cannot be made: {error!r}; see the route"]
                checker.walk_blocks(rank)
                checker.walk_order(rank)
                checker.wrong += wrong_rows(pass_plan, rank)
                checker.wrong += wrong_steps(pass_plan, rank)
                checker.wrong += wrong_score_rows(pass_plan, rank) if plan.score_rows else ()
                done += 1
                progress(done)
            wrong += [f"{name}: {call}" for call in checker.finish()]
    return wrong


def _wrong_passes(plan: Plan) -> list[str]:
    """Return the errors of passes that no executor can run, or that would compute with other rows than the call's."""
    call, wrong = plan.call, []
    for name, pass_plan in plan.passes():
        pass_call = pass_plan.call
        if pass_plan.name != name:
            has = "no `gradient_route`" if name == "backward" else "a `gradient_route`, and results stay on their ranks"
            wrong.append(f"{name}: it has {has}")
        if name == "forward" and pass_plan.side != "kv":
            wrong.append(f"{name}: it sends queries instead of K and V; their results would not be sent back")
        if plan.score_rows and (pass_plan.trims or pass_plan.side != "kv" or plan.heads):
            wrong.append(f"{name}: rows of scores need complete blocks of K and V of every rank, see `score_rows`")
        if plan.heads:
            continue  # see `_wrong_heads`
        for before, after in ((call.layout, pass_call.layout), (call.k_layout, pass_call.k_layout)):
            if before.shards != after.shards:  # names may differ, as of nodes of one rank
                wrong.append(f"{name}: ranks compute with other rows, {after.name}, than those that they have")
        if pass_plan.stride != 1:
            wrong.append(f"{name}: its ring skips ranks, stride {pass_plan.stride}, but heads are not divided")
    return wrong


def _wrong_heads(plan: Plan, split: HeadSplit) -> list[str]:
    """Return the errors of divided heads. Members must have the rows of their ranks, the ranks of a node all heads.

    A layout has every position once, so a single member has all rows.
    """
    call, head_parallel_size = plan.call, split.ranks
    if split.ranks < 1 or split.spacing < 1:
        return [f"{split} has no ranks that divide heads"]
    wrong = []
    if head_parallel_size * plan.ring_size != call.ranks:
        wrong.append(f"{plan.ring_size} nodes of {head_parallel_size} ranks are not {call.ranks} ranks")
    for name, pass_plan in plan.passes():
        pass_call = pass_plan.call
        for before, after in ((call.layout, pass_call.layout), (call.k_layout, pass_call.k_layout)):
            nodes = before.joined(head_parallel_size, split.spacing).sorted().shards
            if len(nodes) != after.ranks or (after.ranks > 1 and nodes != after.sorted().shards):
                wrong.append(f"{name}: nodes compute with other rows than those of their ranks")
        heads, readers = plan.head_groups * pass_call.heads, call.heads // call.kv_heads
        among = -(-call.ranks // pass_call.ranks)
        if among != head_parallel_size or heads * head_parallel_size != call.heads:
            wrong.append(f"{name}: {among} ranks with {heads} query heads each are not {call.heads} heads")
            continue
        if any(pass_plan.member(rank) != pass_plan.member(split.peers(rank)[0]) for rank in range(call.ranks)):
            wrong.append(f"{name}: ranks that divide heads are not the same member of their rings")
        for group in plan.split_heads():
            first, past = group.kv_heads
            if past - first != pass_call.kv_heads:
                wrong.append(
                    f"{name}: query heads {group.q_heads} read K/V heads {first, past}, not {pass_call.kv_heads}"
                )
        for offset in range(head_parallel_size):
            held = heads_of_rank(offset, head_parallel_size, call.kv_heads)
            if (offset * heads // readers, ((offset + 1) * heads - 1) // readers + 1) != (held.start, held.stop):
                wrong.append(f"{name}: rank {offset} of a node has other K/V heads than its query heads read")
    return wrong


def _wrong_groups(plan: Plan) -> list[str]:
    """Return the errors of groups of heads that are not divided among ranks. A block has complete K/V heads."""
    call, wrong = plan.call, []
    for name, pass_plan in plan.passes():
        pass_call = pass_plan.call
        if (plan.head_groups * pass_call.heads, plan.head_groups * pass_call.kv_heads) != (call.heads, call.kv_heads):
            wrong.append(
                f"{name}: {plan.head_groups} groups of {pass_call.heads} query and {pass_call.kv_heads} K/V heads "
                f"are not {call.heads} and {call.kv_heads}"
            )
    return wrong


def _overlap(one: Tiles, other: Tiles) -> bool:
    """Return whether two lists of tiles of the same pair of blocks have rows in common."""
    if not one or not other:
        return False
    (first, past, *_), (other_first, other_past, *_) = one.box, other.box
    return first < other_past and other_first < past


class _Checker:
    """Walk each rank of a ring once, in one pass. Keeps only moves that one of their two ranks has not posted yet."""

    def __init__(self, pass_plan: PassPlan, ranks: Sequence[int]) -> None:
        self.pass_plan = pass_plan
        self.ranks = frozenset(ranks)
        self.wrong: list[str] = []
        self.computed: Counter[tuple[int, int]] = Counter()  # (query block, key block)
        self.computed_by: dict[tuple[int, int], int] = {}  # the same -> rank
        self.num_pairs = 0
        self.open: dict[Move, int] = {}  # +1: sent and not yet received; -1: the opposite
        self.targets: dict[tuple[int, int], int] = {}  # (owner, rank) -> rank to which that rank sends its results

    def walk_order(self, rank: int) -> None:
        """Check that every receive is posted before the rank waits for it, and is used after it."""
        posted: set[Move] = set()
        idle: dict[int, Move] = {}  # arrivals that no step has used yet, by owner
        computed: set[int] = set()  # owners of blocks whose gradients were computed and not sent yet
        for step in self.pass_plan.steps_of(rank):
            for move in step.arrivals:
                self._check_posted(rank, step.index, move, posted)
                if step.compute or self.pass_plan.trims:  # else a ring may end at a rank that only forwards
                    idle[move.owner] = move
            posted.update(step.receives)
            others = set(self._others(step)) if step.compute else set()
            computed |= others - {rank}
            for owner in {m.owner for m in step.sends} | others:
                idle.pop(owner, None)
            for move in step.result_arrivals:
                self._check_posted(rank, step.index, move, posted)
                if move.owner != rank and move.is_partial:
                    self.wrong.append(
                        f"rank {rank} receives {move.label} of rank {move.source}, but merges only results for its own "
                        "queries; `result_target` must return the owner in a forward pass"
                    )
                elif move.owner != rank and move.owner not in computed:
                    self.wrong.append(
                        f"rank {rank} has no gradient of block {move.owner} to add {move.label} of rank {move.source} "
                        f"to at step {step.index}: it has computed none yet, or has sent it; "
                        "see `result_target`, `result_delay_steps`"
                    )
            for move in step.result_sends:
                if move.owner not in computed:
                    self.wrong.append(f"rank {rank} sends {move.label} at step {step.index} without having computed it")
                computed.discard(move.owner)
            posted.update(step.result_receives)
        for move in idle.values():
            self.wrong.append(
                f"rank {rank} receives {move.label}, but neither computes with it nor forwards it; see `block_source`"
            )

    def _check_posted(self, rank: int, index: int, move: Move, posted: set[Move]) -> None:
        if move not in posted:
            rule = (
                "`result_delay_steps` must be at least 1"
                if move.is_result
                else "`block_source` must return an earlier step"
            )
            self.wrong.append(
                f"rank {rank} waits for {move.label} at step {index}, but posts its receive only at step "
                f"{move.post_step}; {rule}"
            )

    def _others(self, step: Step) -> tuple[int, ...]:
        """Return the owners of the blocks that are sent, for the computation of a step."""
        assert step.compute, "the caller has checked"
        return step.compute.k_owners if (step.side or self.pass_plan.side) == "kv" else step.compute.q_owners

    def walk_blocks(self, rank: int) -> None:
        """Check that a block is sent and computed with only while the rank has it."""
        held = {rank}
        parts = defaultdict[tuple[int, int], list[BlockTiles]](list)  # a pair of blocks may be computed in parts
        for step in self.pass_plan.steps_of(rank):
            held |= {m.owner for m in step.arrivals}
            for move in step.sends:
                if move.owner not in held:
                    self.wrong.append(f"rank {rank} sends {move.label} at step {step.index} without holding it")
            self._count((*step.sends, *step.result_sends), +1)
            self._count((*step.receives, *step.result_receives), -1)
            if step.compute:
                self._compute(rank, step, step.compute, held, parts)
            self.targets.update({(m.owner, rank): m.target for m in step.result_sends})
            held -= set(step.released)
        if kept := sorted(held - {rank}):
            self.wrong.append(f"rank {rank} still holds the blocks of {kept} at the end")
        if rank not in held:
            self.wrong.append(f"rank {rank} releases its local block; it must not be among its own `targets`")

    def _compute(
        self, rank: int, step: Step, compute: Compute, held: set[int], parts: dict[tuple[int, int], list[BlockTiles]]
    ) -> None:
        for other in self._others(step):
            if other not in held:
                self.wrong.append(f"rank {rank} computes with the block of {other} without holding it")
        if len(compute.pairs) != len(compute.blocks):
            self.wrong.append(
                f"rank {rank} computes {compute.label} at step {step.index} with tiles of {len(compute.blocks)} pairs "
                f"of blocks instead of {len(compute.pairs)}"
            )
        for pair, block in zip(compute.pairs, compute.blocks, strict=False):
            if not parts[pair] or any(_overlap(block.tiles, other.tiles) for other in parts[pair]):
                self.computed[pair] += 1
                self.computed_by[pair] = rank
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
        """Check what depends on all ranks. Return all errors."""
        if twice := [pair for pair, count in self.computed.items() if count > 1]:
            self.wrong.append(f"block pairs computed more than once: {twice[:4]}")
        if self.num_pairs != (expected := self._expected()):
            self.wrong.append(f"{self.num_pairs} pairs computed, but the mask has {expected}")
        pairs = ((False, "`block_source` and `targets`"), (True, "`result_target` and `result_source`"))
        for is_result, methods in pairs:
            if unmatched := [move for move in self.open if move.is_result is is_result]:
                self.wrong.append(
                    f"{len(unmatched)} moves posted by only one of their two ranks, such as {unmatched[0]}; "
                    f"{methods} of the route disagree"
                )
        if len(self.ranks) == self.pass_plan.call.ranks:
            self.wrong += self._lost_results()
        return self.wrong

    def _expected(self) -> int:
        """Return the number of pairs that the walked ranks must compute: their blocks of the side that is not sent."""
        call = self.pass_plan.call
        if len(self.ranks) == call.ranks:
            return call.num_pairs
        if (helpers := self.pass_plan.helpers) is not None:
            pairs, every = block_pairs(call.mask, call.layout, call.k_layout), range(call.ranks)

            def computes(rank: int, q: int, k: int) -> bool:
                return rank == (k if q != k and pairs.sees(q, k) and helpers.helps(pairs, q, k) else q)

            needed = {(r, o) for r in self.ranks for o in every} | {(o, r) for r in self.ranks for o in every}
            return sum(pairs.num_pairs(q, k) for q, k in needed for r in self.ranks if computes(r, q, k))
        local, sent = (call.layout, call.k_layout) if self.pass_plan.side == "kv" else (call.k_layout, call.layout)
        every_token = sorted((s for shard in sent.shards for s in shard), key=lambda s: s.start)
        sides = ((local.shards[self.pass_plan.member(rank)], every_token) for rank in self.ranks)
        return sum(find_tiles(call.mask, *(s if self.pass_plan.side == "kv" else s[::-1])).num_pairs for s in sides)

    def _lost_results(self) -> list[str]:
        """Return the gradients that do not reach the owner of their block, and partial results of helpers."""
        wrong = []
        forward = self.pass_plan.name == "forward"
        for (q_owner, k_owner), source in self.computed_by.items():
            owner = k_owner if source == q_owner else q_owner
            if forward and source == q_owner:
                continue  # out and LSE stay on their rank
            seen: set[int] = set()
            rank = source
            while rank != owner and rank not in seen:
                seen.add(rank)
                rank = self.targets.get((owner, rank), rank)
            if rank != owner:
                what = "result" if forward else "gradient"
                wrong.append(f"the {what} of block {owner} computed on rank {source} is not sent on by rank {rank}")
        return wrong
