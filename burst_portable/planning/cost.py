"""Estimate the cost of a plan: bytes, FLOPs, launches, memory and predicted time, without running it.

FLOPs count the visible pairs of the mask: forward 2·pairs·H·(D + Dv), backward 2·pairs·H·(3·D + 2·Dv). For Dv = D these
are the usual 4·pairs·H·D and 2.5 times that. The time comes from a simulation of one rank's kernels and links, each of
which does one thing at a time. It models neither contention nor slow neighbors, so it ranks plans and is no forecast of
seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import NamedTuple

from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.head_division import heads_per_rank
from burst_portable.planning.memory import score_bytes
from burst_portable.planning.messages import exchanges, local_block_size, message_sizes, row_size
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.rank_order import keeps_rank_order
from burst_portable.planning.routes import Move, Rows, to_pack
from burst_portable.planning.schedule import Compute, interleave_groups

# In bytes of the message:
_PACK = _COPY = 2  # read and written once: `runtime.blocks.Blocks.copy`, `runtime.reshard`
# Received gradients are read and added to sums, which are twice as wide if the gradients were rounded:
# `runtime.block_gradients.BlockGradients._add`.
_ADD, _ADD_ROUNDED = 3, 5
# Sums are zeroed, then read and written by the kernel (`BlockGradients.accumulators` there). Rounded gradients are read
# again and rounded into their message (`_message`).
_ACCUMULATE, _ACCUMULATE_ROUNDED = 3, 9
# Bytes for each number of a 16-bit tensor:
_RUNNING = 8  # a kernel that merges in its epilogue reads and writes its running out
_MERGE_PART, _MERGE_PART_ONCE = 26, 10  # merge a part of a tile by `numerics.merge_into`; in one pass over memory
_ADD_PART = 10  # add a gradient of a part of a tile to its sum
_SUM = 10  # sum a gradient in float32: zeros before, rounding after
# Reads and writes of each score in the round of K or of V: `runtime.score_rows`
_SCORES = {"forward": 2.5, "backward": 1.75}
_SURROGATE = 52  # make out by `numerics.surrogate_out`, if queries are sent

STRIDED_BATCHES = 4
"""Largest batch whose rows are sent as strips without packing; larger batches are packed."""


def _joined_bytes(pass_plan: PassPlan, rank: int) -> int:
    """Return the bytes for the local block in a launch with blocks that arrived: one copy, and adding its gradients."""
    block, (call, side) = local_block_size(pass_plan, rank), (pass_plan.call, pass_plan.side)
    if pass_plan.name == "forward":
        return _COPY * block
    rows = block // row_size(call, side, is_result=False)
    return _COPY * block + _ADD * rows * row_size(call, side, is_result=True)


def _merged_bytes(pass_plan: PassPlan, compute: Compute, traits: KernelTraits, *, first: bool) -> int:
    """Return the bytes for merging a launch into earlier ones. `first`: whether there was none."""
    call = pass_plan.call
    rows, tallest = compute.heights
    d, dv, batch = call.head_dim, call.v_head_dim, call.batch
    if pass_plan.name == "forward":
        if traits.splits_tiles:  # each part is merged; the first is kept as it is if it has all rows
            bytes_each = _MERGE_PART_ONCE if traits.single_pass_merge else _MERGE_PART
            return bytes_each * (rows - first * tallest) * call.heads * dv * batch
        return 0 if first else _RUNNING * compute.covered[0] * call.heads * dv * batch
    if not traits.splits_tiles:
        return 0
    surrogate = _SURROGATE * tallest if "q" in pass_plan.sides else 0  # else only K and V are sent, and out is local
    queries = surrogate * dv + _ADD_PART * rows * d
    return batch * (queries * call.heads + _ADD_PART * compute.columns * call.kv_heads * (d + dv))


def _summed_bytes(pass_plan: PassPlan, rank: int, traits: KernelTraits) -> int:
    """Return the bytes for summing the gradients of the local rows, for one group of heads; 0 in the forward pass."""
    if pass_plan.name == "forward":
        return 0
    call, member = pass_plan.call, pass_plan.member(rank)
    queries = call.layout.count(member) * call.heads * call.head_dim
    keys = call.k_layout.count(member) * call.kv_heads * (call.head_dim + call.v_head_dim)
    if pass_plan.single_compute(rank):  # see `kernels.base`
        if traits.splits_tiles:
            return 0
        keys = 0 if traits.writes_gradients else keys
    return _SUM * call.batch * (queries + keys)


class ReshardTraffic(NamedTuple):
    """Bytes of memory that one group of heads reads and writes around its exchanges: see `runtime.reshard`."""

    pack: int  # before tensors are sent to head shards
    reorder: int  # before and after the computation, to change the order of rows
    save: int  # for the backward pass, after all groups have been computed
    unpack: int  # after results have arrived at their sequence shards


def reshard_traffic(
    plan: Plan, pass_name: PassName, rank: int, traits: KernelTraits, *, sends_strided: bool
) -> list[ReshardTraffic]:
    """Return the memory traffic of a rank's exchanges, for each group of heads.

    `sends_strided`: whether the transport sends rows without packing, unless the batch is large, into inboxes that the
    next pass overwrites.
    """
    call = plan.call
    packs = not sends_strided or call.batch > STRIDED_BATCHES
    rows = call.layout.count(rank) * plan.head_parallel_size
    node_rows = plan.forward.call.layout.count(plan.forward.member(rank))
    in_rank_order = keeps_rank_order(plan, traits)
    groups = []
    for to_heads, to_sequence in exchanges(plan, pass_name):
        there, back = (sum(field.bytes(call.batch) for field in fields) for fields in (to_heads, to_sequence))
        # Tensors are copied to natural order, and results back to the order of ranks.
        reorder = 0 if in_rank_order else _COPY * node_rows * (there + back)
        pack = _COPY * rows * there if packs else 0
        stays = pass_name == "backward" or not sends_strided or not in_rank_order
        save = 0 if stays else _COPY * node_rows * there
        groups.append(ReshardTraffic(pack, reorder, save, _COPY * rows * back))
    return groups


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cost of one pass on one rank.

    Attributes:
        flops: Of the visible pairs of the mask: see the module's docstring.
        memory: Least bytes that the kernel launches read and write: see `pass_memory`.
        sent: Bytes of messages sent.
        received: Bytes of messages received.
        messages: Messages received, including those of head exchanges.
        launches: Kernel launches.
        tiles: Tiles of all launches.
        blocks_held: Bytes of the largest set of remote blocks in memory at once, including those in flight.
        scores: Bytes of the scores in memory at once, for a plan that stores rows of scores; else 0.
        seconds: Predicted time of the pass.
        compute_seconds: Predicted time of the kernels without communication.
        link_seconds: Predicted time of the messages one after the other. Kernels may hide some of it.
    """

    flops: int
    memory: int
    sent: int
    received: int
    messages: int
    launches: int
    tiles: int
    blocks_held: int
    scores: int
    seconds: float
    compute_seconds: float
    link_seconds: float


def pass_flops(call: AttentionCall, pass_name: PassName, num_pairs: int) -> int:
    """Return the FLOPs of a pass over `num_pairs` visible pairs per head."""
    d, dv = call.head_dim, call.v_head_dim
    return 2 * num_pairs * call.heads * call.batch * ((d + dv) if pass_name == "forward" else (3 * d + 2 * dv))


def pass_memory(call: AttentionCall, pass_name: PassName, compute: Compute) -> int:
    """Return the least bytes that one launch reads and writes: each input row once, each result once.

    Rows that a kernel reads again are not counted, nor are sums that it reads to add to them.
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
    """Return (bytes to head shards, bytes back) that a rank sends, or receives, for each group of heads.

    LSE is not included: it is sent back only if the call requests it.
    """
    call = plan.call
    rows, node_rows = call.layout.count(rank), plan.forward.call.layout.count(plan.forward.member(rank))
    # To head shards a rank sends its rows to every other rank; back, it sends the rows of the other ranks.
    local, remote = rows * (plan.head_parallel_size - 1), node_rows - rows
    rows_there, rows_back = (remote, local) if received else (local, remote)
    return [
        (
            rows_there * sum(field.size(call.batch) for field in to_heads),
            rows_back * sum(field.bytes(call.batch) for field in to_sequence),
        )
        for to_heads, to_sequence in exchanges(plan, pass_name)
    ]


def rank_cost(plan: Plan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> PassCost:
    """Return the cost of one pass on one rank."""
    pass_plan = plan.pass_plan(pass_name)
    steps = plan.steps(pass_name, rank)
    computes = [s.compute for s in steps if s.compute]
    receives = [m for s in steps for m in (*s.receives, *s.result_receives)]
    size = message_sizes(pass_plan)
    received = plan.head_groups * sum(map(size, receives))
    sent = plan.head_groups * sum(size(m) for s in steps for m in (*s.sends, *s.result_sends))
    link = plan.head_groups * sum(
        hardware.transfer(size(m), direct=plan.direct, is_inter_node=hardware.is_inter_node(m.source, m.target))
        for m in receives
    )
    groups = reshard_bytes(plan, pass_name, rank)
    sent += sum(map(sum, groups))
    received += sum(map(sum, reshard_bytes(plan, pass_name, rank, received=True)))
    link += sum(_all_to_all_seconds(one, plan, rank, hardware) for group in groups for one in group)
    return PassCost(
        flops=plan.head_groups * pass_flops(pass_plan.call, pass_name, sum(c.num_pairs for c in computes)),
        memory=plan.head_groups * sum(pass_memory(pass_plan.call, pass_name, c) for c in computes),
        sent=sent,
        received=received,
        messages=plan.rounds * len(receives) + (2 * len(groups) if plan.head_parallel_size > 1 else 0),
        launches=plan.rounds * len(computes),
        tiles=plan.head_groups * sum(c.count for c in computes),
        blocks_held=_peak_block_bytes(plan, pass_name, rank),
        scores=score_bytes(plan.call, pass_name, rank) if plan.score_rows else 0,
        seconds=rank_seconds(plan, pass_name, rank, hardware),
        compute_seconds=plan.head_groups
        * sum(_launch_seconds(pass_plan, c, hardware) for c in computes)
        / _launch_efficiency(pass_plan, rank, hardware),
        link_seconds=link,
    )


def rank_seconds(plan: Plan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> float:
    """Return the predicted seconds of one pass on one rank: `rank_cost(...).seconds` alone, to compare plans."""
    pass_plan = plan.pass_plan(pass_name)
    if plan.heads:
        return _head_parallel_seconds(plan, pass_plan, rank, hardware)
    if plan.score_rows:
        return _score_row_seconds(pass_plan, rank, hardware)
    return _ring_seconds(pass_plan, rank, hardware, plan.direct, plan.head_groups)


def _launch_seconds(pass_plan: PassPlan, compute: Compute, hardware: HardwareSpec) -> float:
    """Return the seconds of one launch. A kernel that splits tiles makes at least one call for each tile."""
    call, name = pass_plan.call, pass_plan.name
    calls = compute.count if hardware.kernel.splits_tiles else 1
    flops = pass_flops(call, name, compute.visited(hardware.block))
    rows, share = hardware.long_kv_efficiency
    slow = name == "forward" and call.k_layout.length >= rows * call.ranks
    return hardware.compute(flops, name, calls) / (share if slow else 1.0)


def _all_to_all_seconds(size: int, plan: Plan, rank: int, hardware: HardwareSpec) -> float:
    """Return the seconds to send `size` bytes, in equal parts, to all ranks with which a rank divides heads."""
    assert plan.heads is not None, "heads are divided"
    among = plan.heads.peers(rank)
    outside = sum(hardware.is_inter_node(rank, peer) for peer in among)
    peers = len(among) - 1
    inside = peers - outside
    intra_node = 0.0
    if inside:
        at_once = hardware.receives_at_once(plan.direct)
        messages = 1 if at_once else inside
        intra_node = hardware.transfer(size * inside / peers, messages, direct=plan.direct, at_once=at_once)
    inter_node = hardware.transfer(size * outside / peers, outside, is_inter_node=True) if outside else 0.0
    return max(intra_node, inter_node)


class _Timeline:
    """Simulated times of one rank: its kernels, its link inside the node and its link between nodes."""

    def __init__(self, direct: bool, pass_plan: PassPlan, hardware: HardwareSpec) -> None:
        self._direct, self._hardware = direct, hardware
        peer_copies = direct and hardware.peer_copy_bandwidth
        self._slowdown = 0.0 if peer_copies else hardware.comm_slowdown[pass_plan.name == "backward"]
        self._kernels = 0.0
        self._links = {False: 0.0, True: 0.0}  # by whether it is between nodes
        self._arrivals: dict[tuple[int, Move], float] = {}  # by group of heads

    @property
    def end(self) -> float:
        return max(self._kernels, *self._links.values())

    def wait(self, moves: Sequence[Move], group: int) -> None:
        """Delay kernels until these messages of a group of heads have arrived."""
        for move in moves:
            self._kernels = max(self._kernels, self._arrivals[group, move])

    def receive(self, moves: Sequence[Move], size: Callable[[Move], int], group: int) -> None:
        """Start these receives of a group of heads at the current time of the kernels."""
        if not moves:
            return
        for is_inter_node in (False, True) if self._hardware.ranks_per_node else (False,):
            received = [m for m in moves if self._hardware.is_inter_node(m.source, m.target) == is_inter_node]
            several = len({m.source for m in received}) > 1
            at_once = several and not is_inter_node and self._hardware.receives_at_once(self._direct)
            for batch in [received] if at_once else [[m] for m in received]:
                seconds = self._hardware.transfer(
                    sum(map(size, batch)), direct=self._direct, is_inter_node=is_inter_node, at_once=at_once
                )
                self._links[is_inter_node] = max(self._links[is_inter_node], self._kernels) + seconds
                self._arrivals.update({(group, move): self._links[is_inter_node] for move in batch})

    def launch(self, seconds: float) -> None:
        """Run a kernel that takes `seconds` without messages. Messages in flight may slow it down."""
        overlap = max(0.0, self._links[False] - self._kernels)
        longest = seconds / (1 - self._slowdown) if self._slowdown < 1 else inf
        self._kernels += min(longest, seconds + self._slowdown * overlap)

    def read_and_write(self, size: int) -> None:
        """Read and write `size` bytes of memory between kernels."""
        self._kernels += self._hardware.read_and_write(size)

    def exchange(self, seconds: float) -> float:
        """Start an exchange between all ranks that takes `seconds`. Return the time at which it ends."""
        self._links[False] = max(self._links[False], self._kernels) + seconds
        return self._links[False]

    def wait_until(self, time: float) -> None:
        """Delay kernels until this time."""
        self._kernels = max(self._kernels, time)


def _launch_efficiency(pass_plan: PassPlan, rank: int, hardware: HardwareSpec) -> float:
    """Return the share of the kernel's rate that a pass reaches, which is lower for several launches."""
    several = sum(step.compute is not None for step in pass_plan.steps_of(rank)) > 1
    return hardware.multi_launch_efficiency if several and pass_plan.name == "backward" else 1.0


@lru_cache(maxsize=512)
def _ring_seconds(pass_plan: PassPlan, rank: int, hardware: HardwareSpec, direct: bool, groups: int) -> float:
    """Return the seconds of one rank if blocks are sent. Cached: strategies that are compared share passes."""
    line = _Timeline(direct, pass_plan, hardware)
    _walk(line, pass_plan, rank, hardware, groups)
    if groups > 1:  # `runtime.head_groups` copies the results of all groups
        line.read_and_write(_COPY * _result_bytes(pass_plan, rank, groups))
    return line.end


@lru_cache(maxsize=512)
def _score_row_seconds(pass_plan: PassPlan, rank: int, hardware: HardwareSpec) -> float:
    """Return the seconds of one rank if K and V are sent separately: half of each computation comes with each."""
    line = _Timeline(False, pass_plan, hardware)
    for tensor in (0, 1):
        _walk(line, pass_plan, rank, hardware, tensor=tensor)
        line.read_and_write(int(_SCORES[pass_plan.name] * score_bytes(pass_plan.call, pass_plan.name, rank)))
    return line.end


def _result_bytes(pass_plan: PassPlan, rank: int, groups: int) -> int:
    """Return the bytes of a rank's results in the dtype of the inputs: out, or dQ, dK and dV."""
    call, member = pass_plan.call, pass_plan.member(rank)
    queries, keys = call.layout.count(member) * call.heads, call.k_layout.count(member) * call.kv_heads
    if pass_plan.name == "forward":
        return groups * call.batch * call.itemsize * queries * call.v_head_dim
    return groups * call.batch * call.itemsize * (queries * call.head_dim + keys * (call.head_dim + call.v_head_dim))


def _walk(
    line: _Timeline, pass_plan: PassPlan, rank: int, hardware: HardwareSpec, groups: int = 1, tensor: int | None = None
) -> None:
    """Simulate the steps of one rank on its timeline, for all groups of heads, or for one of K and V."""
    size, launched = message_sizes(pass_plan, tensor), set[int]()
    packed = [set[Rows]() for _ in range(groups)]
    add, accumulate = (_ADD_ROUNDED, _ACCUMULATE_ROUNDED) if pass_plan.rounds_gradients else (_ADD, _ACCUMULATE)
    if pass_plan.name == "forward":  # results of helpers are copied into messages
        accumulate = _COPY
    efficiency = _launch_efficiency(pass_plan, rank, hardware)
    for group, step in interleave_groups(pass_plan.steps_of(rank), groups):
        line.wait(step.arrivals, group)
        unpacked = to_pack((move for move in step.sends if move.owner == rank), packed[group])
        packed[group] |= {move.rows for move in unpacked}
        line.read_and_write(_PACK * sum(map(size, unpacked)))
        line.receive(step.receives, size, group)
        line.read_and_write(accumulate * sum(map(size, step.result_sends)))
        if step.joins_local:
            line.read_and_write(_joined_bytes(pass_plan, rank))
        if step.compute:
            seconds = _launch_seconds(pass_plan, step.compute, hardware) / efficiency
            line.launch(seconds if tensor is None else seconds / 2)
            helps = pass_plan.helpers is not None and step.side == "q"  # the owner of the queries merges the result
            first = helps or group not in launched
            line.read_and_write(_merged_bytes(pass_plan, step.compute, hardware.kernel, first=first))
            if not helps:
                launched.add(group)
        line.wait(step.result_arrivals, group)
        line.read_and_write(add * sum(map(size, step.result_arrivals)))
        line.receive(step.result_receives, size, group)
    line.read_and_write(groups * _summed_bytes(pass_plan, rank, hardware.kernel))


def _head_parallel_seconds(plan: Plan, pass_plan: PassPlan, rank: int, hardware: HardwareSpec) -> float:
    """Return the seconds of one rank if heads are resharded, one group after the other: see `runtime.head_parallel`."""
    computes = [step.compute for step in pass_plan.steps_of(rank) if step.compute]
    exchanged = [
        [_all_to_all_seconds(size, plan, rank, hardware) for size in group]
        for group in reshard_bytes(plan, pass_plan.name, rank)
    ]
    line = _Timeline(plan.direct, pass_plan, hardware)
    sends_strided = plan.direct and bool(hardware.peer_copy_bandwidth)
    traffic = reshard_traffic(plan, pass_plan.name, rank, hardware.kernel, sends_strided=sends_strided)
    at_heads, at_sequence = [], []  # times at which each group arrives
    for (there, _), group in zip(exchanged, traffic, strict=True):
        line.read_and_write(group.pack)
        at_heads.append(line.exchange(there))
    for time, (_, back), group in zip(at_heads, exchanged, traffic, strict=True):
        line.wait_until(time)
        line.read_and_write(group.reorder)
        if plan.ring_size > 1:
            _walk(line, pass_plan, rank, hardware)
        else:
            line.launch(sum(_launch_seconds(pass_plan, compute, hardware) for compute in computes))
            line.read_and_write(_summed_bytes(pass_plan, rank, hardware.kernel))
        at_sequence.append(line.exchange(back))
    line.read_and_write(sum(group.save for group in traffic))
    for time, group in zip(at_sequence, traffic, strict=True):
        line.wait_until(time)
        line.read_and_write(group.unpack)
    return line.end


def _peak_block_bytes(plan: Plan, pass_name: PassName, rank: int) -> int:
    """Return the bytes of the largest set of remote blocks, of all groups of heads, in a rank's memory at once."""
    pass_plan = plan.pass_plan(pass_name)
    sizes = [message_sizes(pass_plan, tensor) for tensor in plan.tensors]
    blocks: dict[tuple[int, int], int] = {}
    peak = 0
    for group, step in interleave_groups(pass_plan.steps_of(rank), 1 if plan.heads else plan.head_groups):
        blocks.update({(group, m.owner): max(size(m) for size in sizes) for m in step.receives})
        peak = max(peak, sum(blocks.values()))
        for owner in step.released:
            blocks.pop((group, owner), None)
    return peak


def local_bytes(plan: Plan, pass_name: PassName, rank: int) -> int:
    """Return the bytes of a rank's local tensors, after heads are resharded.

    Q, K, V, out and LSE; in the backward pass also dO, delta and gradients.
    """
    heads, kv_heads = heads_per_rank(plan.call, plan.head_parallel_size)
    call, member = plan.pass_plan(pass_name).call, plan.forward.member(rank)  # the call has one head group
    data, wide = call.itemsize, max(call.itemsize, 4)
    queries = call.batch * call.layout.count(member) * heads
    keys = call.batch * call.k_layout.count(member) * kv_heads
    d, dv = call.head_dim, call.v_head_dim
    inputs = data * (queries * d + keys * (d + dv))
    if pass_name == "forward":
        return inputs + wide * queries * (dv + 1)
    results = data * 2 * queries * dv + wide * 2 * queries  # out, dO; LSE, delta
    return inputs + results + wide * (queries * d + keys * (d + dv))


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Cost of a plan over a set of ranks."""

    ranks: tuple[int, ...]
    per_rank: dict[PassName, tuple[PassCost, ...]]

    @property
    def seconds(self) -> float:
        """Predicted seconds of both passes, each on its slowest rank."""
        return sum(max(c.seconds for c in costs) for costs in self.per_rank.values())

    @property
    def sent(self) -> int:
        """Bytes sent in both passes by the rank that sends most."""
        return max(sum(costs[i].sent for costs in self.per_rank.values()) for i in range(len(self.ranks)))

    def imbalance(self, pass_name: PassName = "forward") -> float:
        """Return the FLOPs of the busiest rank divided by the mean."""
        flops = [c.flops for c in self.per_rank[pass_name]]
        return max(flops) * len(flops) / sum(flops) if sum(flops) else 1.0


def plan_seconds(plan: Plan, hardware: HardwareSpec, ranks: Iterable[int]) -> float:
    """Return `PlanCost.seconds` over these ranks."""
    # Ranks that divide heads among themselves and hold equally many rows take equally long.
    distinct = {(plan.forward.member(rank), plan.layout.count(rank)): rank for rank in ranks}.values()
    return sum(max([rank_seconds(plan, name, r, hardware) for r in distinct]) for name in PASSES)


def plan_cost(plan: Plan, hardware: HardwareSpec, ranks: Sequence[int] | None = None) -> PlanCost:
    """Return the cost of a plan over these ranks. Default: all."""
    chosen = tuple(range(plan.call.ranks) if ranks is None else ranks)
    return PlanCost(chosen, {name: tuple(rank_cost(plan, name, r, hardware) for r in chosen) for name in PASSES})
