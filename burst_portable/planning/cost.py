"""What a plan costs: bytes, FLOPs, launches, memory and predicted time, from the plan alone.

FLOPs count exact mask area: forward 2·area·H·(D + Dv), backward 2·area·H·(3·D + 2·Dv), which for Dv = D are the usual
4·area·H·D and 2.5 times that. The time is a simulation of one rank's kernels and links, each busy with one thing at a
time; it knows no contention and no slow neighbour, so it ranks plans rather than promising seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.messages import exchanges, local_block_size, row_size
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.routes import Move, to_pack
from burst_portable.planning.row_order import keeps_rank_order
from burst_portable.planning.schedule import Compute, Step

Size = Callable[[Move], int]
"""Bytes of a message."""

# In bytes of the message:
_PACKED = _COPIED = 2  # read and written once: `runtime.executor._Blocks._pack`, `reshard`
_ADDED, _NARROW_ADDED = (
    3,
    5,
)  # it is read and added to sums, twice as wide if it is narrow: `runtime.executor._Results._add`
# Sums are zeroed, then read and written by the kernel (`executor._Results.accumulators`); narrow ones are read again
# and rounded into their message (`_outgoing` there).
_MADE, _NARROW_MADE = 3, 9
# Bytes for each number of a 16-bit tensor:
_RUNNING = 8  # a kernel that merges in its epilogue reads and writes its running out
_PIECE_MERGED, _PIECE_MERGED_ONCE = 26, 10  # merging a piece by `numerics.merge_into`; in one pass that does the same
_PIECE_ADDED = 10  # a gradient of a piece, added to its sum
_SUMMED = 10  # a gradient that is added up in float32: zeros before, rounding afterwards
_PIECE_STARTED = 52  # an out made by `numerics.surrogate_out`, where queries travel

PICKED_BATCHES = 4
"""The most batch rows that are sent as strips from where they lie; larger batches are packed."""


def packed_bytes(sends: Iterable[Move], size: Size, rank: int, done: set[tuple[int, int]]) -> int:
    """For a rank's own block that it sends at a step. `done`: rows packed before; rows packed now are added to it."""
    fresh = to_pack((m for m in sends if m.owner == rank), done)
    done.update(m.rows for m in fresh)
    return sum([_PACKED * size(m) for m in fresh])


def added_bytes(arrivals: Iterable[Move], size: Size, *, narrow: bool) -> int:
    """For gradients that have arrived."""
    return (_NARROW_ADDED if narrow else _ADDED) * sum([size(m) for m in arrivals])


def made_bytes(result_sends: Iterable[Move], size: Size, *, narrow: bool) -> int:
    """For gradients of foreign blocks, beyond what a kernel does for gradients of a rank's own block."""
    return (_NARROW_MADE if narrow else _MADE) * sum([size(m) for m in result_sends])


def joined_bytes(pass_plan: PassPlan, pass_name: PassName, rank: int) -> int:
    """Return the bytes for a rank's own block in a launch with blocks that arrived: copied, its gradients added."""
    copied = _COPIED * local_block_size(pass_plan, rank)
    if pass_name == "forward":
        return copied
    call, layout = pass_plan.call, pass_plan.call.k_layout if pass_plan.side == "kv" else pass_plan.call.layout
    sums = layout.count(rank // pass_plan.stride) * row_size(call, pass_plan.side, result=True)
    return copied + _ADDED * sums


def merged_bytes(
    pass_plan: PassPlan, pass_name: PassName, compute: Compute, traits: KernelTraits, *, first: bool
) -> int:
    """For merging the results of a launch into those of earlier launches; `first`: there were none."""
    call = pass_plan.call
    rows, tallest = compute.heights
    d, dv, batch = call.head_dim, call.v_head_dim, call.batch
    if pass_name == "forward":
        if traits.splits_tiles:  # each piece is merged; the first, where it has all rows, is kept as it is
            bytes_each = _PIECE_MERGED_ONCE if traits.single_pass_merge else _PIECE_MERGED
            return bytes_each * (rows - first * tallest) * call.heads * dv * batch
        return 0 if first else _RUNNING * tallest * call.heads * dv * batch
    if not traits.splits_tiles:
        return 0
    started = _PIECE_STARTED * tallest if pass_plan.side == "q" else 0  # else out is at hand
    queries = started * dv + _PIECE_ADDED * rows * d
    return batch * (queries * call.heads + _PIECE_ADDED * compute.columns * call.kv_heads * (d + dv))


def summed_bytes(pass_plan: PassPlan, pass_name: PassName, rank: int, traits: KernelTraits) -> int:
    """For the gradients of a rank's own rows, of one group of heads; the forward pass has none."""
    if pass_name == "forward":
        return 0
    p, member = pass_plan.call, rank // pass_plan.stride
    queries = p.layout.count(member) * p.heads * p.head_dim
    keys = p.k_layout.count(member) * p.kv_heads * (p.head_dim + p.v_head_dim)
    if pass_plan.alone(rank):  # see `kernels.base`
        if traits.splits_tiles:
            return 0
        keys = 0 if traits.writes_gradients else keys
    return _SUMMED * p.batch * (queries + keys)


class Resharded(NamedTuple):
    """Bytes for one group of heads: see `runtime.head_parallel`.

    Attributes:
        packed: before it is sent.
        computed: before, and after, it is computed.
        kept: for the backward pass, when all groups have been computed.
        home: when it has come home.
    """

    packed: int
    computed: int
    kept: int
    home: int


def resharded_bytes(
    plan: Plan, pass_name: PassName, rank: int, traits: KernelTraits, *, picks: bool
) -> list[Resharded]:
    """For taking a rank's tensors to head shards and back, for each group of heads.

    `picks`: the transport sends rows from where they lie, unless the batch is large, into inboxes that the next
    pass overwrites.
    """
    p = plan.call
    packs = not picks or p.batch > PICKED_BATCHES
    mine, everyone = (
        p.layout.count(rank) * plan.head_parallel_size,
        plan.forward.call.layout.count(rank // plan.head_parallel_size),
    )
    as_it_comes = keeps_rank_order(plan, traits)
    groups = []
    for there, back in exchanges(plan, pass_name):
        coming, leaving = (sum(field.bytes(p.batch) for field in fields) for fields in (there, back))
        # Tensors are put in natural order, in memory of their own, and results back in the order of ranks.
        computed = 0 if as_it_comes else _COPIED * everyone * (coming + leaving)
        packed = _COPIED * mine * coming if packs else 0
        stays = pass_name == "backward" or not picks or not as_it_comes
        kept = 0 if stays else _COPIED * everyone * coming
        groups.append(Resharded(packed, computed, kept, _COPIED * mine * leaving))
    return groups


@dataclass(frozen=True, slots=True)
class PassCost:
    """One rank's share of one pass.

    Attributes:
        flops: exact mask area counts, see the top of this module.
        memory: the least bytes that its kernel calls move, see `pass_memory`.
        sent, received: bytes of messages.
        hops: messages that it receives; where heads are resharded, its exchanges count as well.
        launches, tiles: kernel launches, and the tiles in them.
        blocks_held: bytes of the largest set of foreign blocks held at once, including those on their way.
        seconds: predicted time of the whole pass.
        compute_seconds: predicted time of the kernel calls alone.
        link_seconds: predicted time of the messages alone, one after the other; kernels may hide some of it.
    """

    flops: int
    memory: int
    sent: int
    received: int
    hops: int
    launches: int
    tiles: int
    blocks_held: int
    seconds: float
    compute_seconds: float
    link_seconds: float


def pass_flops(call: AttentionCall, pass_name: PassName, num_pairs: int) -> int:
    """FLOPs of a pass over `area` (q, k) pairs of every head."""
    d, dv = call.head_dim, call.v_head_dim
    return 2 * num_pairs * call.heads * call.batch * ((d + dv) if pass_name == "forward" else (3 * d + 2 * dv))


def pass_memory(call: AttentionCall, pass_name: PassName, compute: Compute) -> int:
    """The least bytes that one kernel call moves: each row that it needs is read once, each result written once.

    Rows that a kernel reads again, and sums that it reads in order to add to them, are not counted.
    """
    queries, keys = compute.covered
    lse = queries * call.heads
    q, out = lse * call.head_dim, lse * call.v_head_dim
    k, v = (keys * call.kv_heads * d for d in (call.head_dim, call.v_head_dim))
    data, wide = call.itemsize, max(call.itemsize, 4)
    if pass_name == "forward":
        return call.batch * (data * (q + k + v) + wide * (out + lse))
    return call.batch * (data * (q + k + v + out) + wide * (2 * lse + q + k + v))  # LSE and delta; dQ, dK, dV


def reshard_bytes(plan: Plan, pass_name: PassName, rank: int, *, received: bool = False) -> list[tuple[int, int]]:
    """(bytes to head shards, bytes back) that a rank sends for each group of heads, or that it receives.

    LSE is not included: it comes home only if it is asked for.
    """
    p = plan.call
    rows, everyone = p.layout.count(rank), plan.forward.call.layout.count(rank // plan.head_parallel_size)
    # To head shards it sends its own rows to every other rank; back, the rows of the others. Receiving is the reverse.
    mine, theirs = rows * (plan.head_parallel_size - 1), everyone - rows
    rows_there, rows_back = (theirs, mine) if received else (mine, theirs)
    return [
        (
            rows_there * sum(field.size(p.batch) for field in there),
            rows_back * sum(field.bytes(p.batch) for field in back),
        )
        for there, back in exchanges(plan, pass_name)
    ]


def rank_cost(plan: Plan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> PassCost:
    """The cost of one pass on one rank."""
    pass_plan = plan.pass_plan(pass_name)
    steps = plan.steps(pass_name, rank)
    computes = [s.compute for s in steps if s.compute]
    coming = [m for s in steps for m in (*s.receives, *s.result_receives)]
    size = _sizes(pass_plan)
    received, sent = sum(map(size, coming)), sum(size(m) for s in steps for m in (*s.sends, *s.result_sends))
    link = sum(_transfer(m, size(m), plan.direct, hardware) for m in coming)
    groups = reshard_bytes(plan, pass_name, rank)
    sent += sum(map(sum, groups))
    received += sum(map(sum, reshard_bytes(plan, pass_name, rank, received=True)))
    link += sum(map(sum, _exchanges(groups, plan, rank, hardware)))
    return PassCost(
        flops=plan.groups * pass_flops(pass_plan.call, pass_name, sum(c.num_pairs for c in computes)),
        memory=plan.groups * sum(pass_memory(pass_plan.call, pass_name, c) for c in computes),
        sent=sent,
        received=received,
        hops=len(coming) + (2 * len(groups) if plan.head_parallel_size > 1 else 0),
        launches=plan.groups * len(computes),
        tiles=plan.groups * sum(c.count for c in computes),
        blocks_held=_most_held(steps, size),
        seconds=rank_seconds(plan, pass_name, rank, hardware),
        compute_seconds=plan.groups
        * sum(_work(pass_plan.call, pass_name, c, hardware) for c in computes)
        / _in_turn(steps, pass_name, hardware),
        link_seconds=link,
    )


def rank_seconds(plan: Plan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> float:
    """Predicted seconds of one pass on one rank: `rank_cost` without the rest, for comparing plans."""
    pass_plan = plan.pass_plan(pass_name)
    if plan.heads:
        return _by_groups(plan, pass_plan, pass_name, rank, hardware)
    return _by_blocks(pass_plan, pass_name, rank, hardware, plan.direct)


def _work(call: AttentionCall, pass_name: PassName, compute: Compute, hardware: HardwareSpec) -> float:
    """Seconds of one launch; a kernel that calls an operator on pieces makes at least one call for each tile."""
    calls = compute.count if hardware.kernel.splits_tiles else 1
    flops = pass_flops(call, pass_name, compute.visited(hardware.block))
    rows, share = hardware.long_kv_efficiency
    slow = pass_name == "forward" and call.k_layout.length >= rows * call.ranks
    return hardware.compute(flops, pass_name, calls) / (share if slow else 1.0)


def _transfer(move: Move, size: int, direct: bool, hardware: HardwareSpec) -> float:
    return hardware.transfer(size, direct=direct, outer=hardware.apart(move.source, move.target))


def _sizes(pass_plan: PassPlan) -> Callable[[Move], int]:
    """A function: the bytes of a move of this pass."""
    rows = {
        result: row_size(pass_plan.call, pass_plan.side, result=result, narrow=pass_plan.narrow)
        for result in (False, True)
    }
    return lambda move: (move.rows[1] - move.rows[0]) * rows[move.result]


def _exchanges(
    groups: Iterable[tuple[int, int]], plan: Plan, rank: int, hardware: HardwareSpec
) -> list[tuple[float, float]]:
    """(seconds to head shards, seconds back) for each group of heads, from the bytes."""
    return [(_exchanged(there, plan, rank, hardware), _exchanged(back, plan, rank, hardware)) for there, back in groups]


def _exchanged(size: int, plan: Plan, rank: int, hardware: HardwareSpec) -> float:
    """Seconds in which a rank sends `size` bytes, in equal parts, to all ranks with which it divides heads, over its
    links inside and between nodes."""
    node, first = hardware.ranks_per_node or plan.call.ranks, rank - rank % plan.head_parallel_size
    others = plan.head_parallel_size - 1
    inside = min(first + plan.head_parallel_size, rank - rank % node + node) - max(first, rank - rank % node) - 1
    far = others - inside
    near = 0.0
    if inside:
        spread = hardware.spreads(plan.direct)
        parts = 1 if spread else inside
        near = hardware.transfer(size * inside / others, parts, direct=plan.direct, spread=spread)
    return max(near, hardware.transfer(size * far / others, far, outer=True) if far else 0.0)


class _Timeline:
    """One rank's kernels and its two links, inside its node and between nodes; each does one thing at a time."""

    def __init__(self, direct: bool, pass_name: PassName, hardware: HardwareSpec) -> None:
        self._direct, self._hardware = direct, hardware
        self._held_up = (
            0.0 if direct and hardware.peer_copy_bandwidth else hardware.comm_slowdown[pass_name == "backward"]
        )
        self._kernels = 0.0
        self._links = {False: 0.0, True: 0.0}
        self._arrives: dict[Move, float] = {}

    @property
    def end(self) -> float:
        return max(self._kernels, *self._links.values())

    def wait(self, moves: Sequence[Move]) -> None:
        """Kernels continue when these messages have arrived."""
        for move in moves:
            self._kernels = max(self._kernels, self._arrives[move])

    def receive(self, moves: Sequence[Move], size: Callable[[Move], int]) -> None:
        """Receives are posted at the point that kernels have reached. A plain transport brings all of them at once."""
        if not moves:
            return
        for outer in (False, True) if self._hardware.ranks_per_node else (False,):
            here = [m for m in moves if self._hardware.apart(m.source, m.target) == outer]
            together = len({m.source for m in here}) > 1 and not outer and self._hardware.spreads(self._direct)
            for batch in [here] if together else [[m] for m in here]:
                seconds = self._hardware.transfer(
                    sum(map(size, batch)), direct=self._direct, outer=outer, spread=together
                )
                self._links[outer] = max(self._links[outer], self._kernels) + seconds
                self._arrives.update(dict.fromkeys(batch, self._links[outer]))

    def launch(self, work: float) -> None:
        """A kernel that takes `work` seconds; messages under way beside it may delay it."""
        beside = max(0.0, self._links[False] - self._kernels)
        slowed = work / (1 - self._held_up) if self._held_up < 1 else inf
        self._kernels += min(slowed, work + self._held_up * beside)

    def read_and_write(self, size: int) -> None:
        """`size` bytes of memory are read and written between kernels."""
        self._kernels += self._hardware.read_and_write(size)

    def exchange(self, seconds: float) -> float:
        """All ranks exchange messages, which takes `seconds` from now on; returns the time at which they arrive."""
        self._links[False] = max(self._links[False], self._kernels) + seconds
        return self._links[False]

    def wait_until(self, at: float) -> None:
        """Kernels continue at that time."""
        self._kernels = max(self._kernels, at)


def _in_turn(steps: Sequence[Step], pass_name: PassName, hardware: HardwareSpec) -> float:
    """Return the share of the kernel's rate that remains if a pass has several launches."""
    several = sum(step.compute is not None for step in steps) > 1
    return hardware.multi_launch_efficiency if several and pass_name == "backward" else 1.0


@lru_cache(maxsize=512)
def _by_blocks(pass_plan: PassPlan, pass_name: PassName, rank: int, hardware: HardwareSpec, direct: bool) -> float:
    """Seconds of one rank where blocks travel. Cached, because strategies that are compared have passes in common."""
    line = _Timeline(direct, pass_name, hardware)
    _walk(line, pass_plan, pass_name, rank, hardware)
    return line.end


def _walk(line: _Timeline, pass_plan: PassPlan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> None:
    """The steps of one rank, on its timeline."""
    size, packed, launched = _sizes(pass_plan), set[tuple[int, int]](), False
    steps, narrow = pass_plan.steps_of(rank), pass_plan.narrow
    kept = _in_turn(steps, pass_name, hardware)
    for step in steps:
        line.wait(step.arrivals)
        line.read_and_write(packed_bytes(step.sends, size, rank, packed))
        line.receive(step.receives, size)
        line.read_and_write(made_bytes(step.result_sends, size, narrow=narrow))
        if step.joins_local:
            line.read_and_write(joined_bytes(pass_plan, pass_name, rank))
        if step.compute:
            line.launch(_work(pass_plan.call, pass_name, step.compute, hardware) / kept)
            line.read_and_write(merged_bytes(pass_plan, pass_name, step.compute, hardware.kernel, first=not launched))
            launched = True
        line.wait(step.result_arrivals)
        line.read_and_write(added_bytes(step.result_arrivals, size, narrow=narrow))
        line.receive(step.result_receives, size)
    line.read_and_write(summed_bytes(pass_plan, pass_name, rank, hardware.kernel))


def _by_groups(plan: Plan, pass_plan: PassPlan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> float:
    """Seconds of one rank whose heads are resharded, group after group: see `runtime.head_parallel`."""
    work = sum(_work(pass_plan.call, pass_name, s.compute, hardware) for s in pass_plan.steps_of(rank) if s.compute)
    moving = _exchanges(reshard_bytes(plan, pass_name, rank), plan, rank, hardware)
    line = _Timeline(plan.direct, pass_name, hardware)
    picks = plan.direct and bool(hardware.peer_copy_bandwidth)
    passes = resharded_bytes(plan, pass_name, rank, hardware.kernel, picks=picks)
    arrivals, homes = [], []
    for (there, _), traffic in zip(moving, passes, strict=True):
        line.read_and_write(traffic.packed)
        arrivals.append(line.exchange(there))
    for at, (_, back), traffic in zip(arrivals, moving, passes, strict=True):
        line.wait_until(at)
        line.read_and_write(traffic.computed)
        if plan.ring_size > 1:
            _walk(line, pass_plan, pass_name, rank, hardware)
        else:
            line.launch(work)
            line.read_and_write(summed_bytes(pass_plan, pass_name, rank, hardware.kernel))
        homes.append(line.exchange(back))
    line.read_and_write(sum(traffic.kept for traffic in passes))
    for at, traffic in zip(homes, passes, strict=True):
        line.wait_until(at)
        line.read_and_write(traffic.home)
    return line.end


def _most_held(steps: Sequence[Step], size: Callable[[Move], int]) -> int:
    """Bytes of the largest set of foreign blocks that a rank holds at once."""
    held: dict[int, int] = {}
    most = 0
    for step in steps:
        held.update({m.owner: size(m) for m in step.receives})
        most = max(most, sum(held.values()))
        for owner in step.released:
            held.pop(owner, None)
    return most


@dataclass(frozen=True, slots=True)
class PlanCost:
    """A plan's cost over a set of ranks: the slowest rank counts; the mean shows the balance."""

    ranks: tuple[int, ...]
    per_rank: dict[PassName, tuple[PassCost, ...]]

    @property
    def seconds(self) -> float:
        """Predicted seconds, forward and backward, of the slowest rank in each."""
        return sum(max(c.seconds for c in costs) for costs in self.per_rank.values())

    @property
    def sent(self) -> int:
        """Bytes sent by the rank that sends most, both passes."""
        return max(sum(costs[i].sent for costs in self.per_rank.values()) for i in range(len(self.ranks)))

    def imbalance(self, pass_name: PassName = "forward") -> float:
        """The FLOPs of the busiest rank over the mean."""
        flops = [c.flops for c in self.per_rank[pass_name]]
        return max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0


def plan_seconds(plan: Plan, hardware: HardwareSpec, ranks: Iterable[int]) -> float:
    """`PlanCost.seconds` over these ranks."""
    # Ranks that divide heads among themselves and hold equally many rows take equally long.
    unlike = {(rank // plan.head_parallel_size, plan.layout.count(rank)): rank for rank in ranks}.values()
    return sum(max([rank_seconds(plan, name, r, hardware) for r in unlike]) for name in PASSES)


def plan_cost(plan: Plan, hardware: HardwareSpec, ranks: Sequence[int] | None = None) -> PlanCost:
    """The cost of a plan, over all ranks or those given."""
    chosen = tuple(range(plan.call.ranks) if ranks is None else ranks)
    return PlanCost(chosen, {name: tuple(rank_cost(plan, name, r, hardware) for r in chosen) for name in PASSES})
