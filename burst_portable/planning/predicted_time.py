"""Predict the time of a pass on one rank, without running it.

The time comes from a simulation of one rank's kernels and links, each of which does one thing at a time. It models
neither contention nor slow neighbors, so it ranks plans and is no forecast of seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import inf

from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory import score_bytes
from burst_portable.planning.memory_traffic import (
    ACCUMULATE,
    ACCUMULATE_ROUNDED,
    ADD,
    ADD_ROUNDED,
    COPY,
    PACK,
    SCORES,
    joined_bytes,
    merged_bytes,
    reshard_traffic,
    result_bytes,
    summed_bytes,
)
from burst_portable.planning.messages import message_sizes
from burst_portable.planning.plans import PassName, PassPlan, Plan
from burst_portable.planning.routes import Move, Rows, to_pack
from burst_portable.planning.schedule import Compute, interleave_groups
from burst_portable.planning.work import pass_flops, reshard_bytes


def rank_seconds(plan: Plan, pass_name: PassName, rank: int, hardware: HardwareSpec) -> float:
    """Return the predicted seconds of one pass on one rank: `rank_cost(...).seconds` alone, to compare plans."""
    pass_plan = plan.pass_plan(pass_name)
    if plan.heads:
        return _head_parallel_seconds(plan, pass_plan, rank, hardware)
    if plan.score_rows:
        return _score_row_seconds(pass_plan, rank, hardware)
    return _ring_seconds(pass_plan, rank, hardware, plan.direct, plan.head_groups)


def launch_seconds(pass_plan: PassPlan, compute: Compute, hardware: HardwareSpec) -> float:
    """Return the seconds of one launch. A kernel that splits tiles makes at least one call for each tile."""
    call, name = pass_plan.call, pass_plan.name
    calls = compute.count if hardware.kernel.splits_tiles else 1
    flops = pass_flops(call, name, compute.visited(hardware.block))
    rows, share = hardware.long_kv_efficiency
    slow = name == "forward" and call.k_layout.length >= rows * call.ranks
    return hardware.compute(flops, name, calls) / (share if slow else 1.0)


def all_to_all_seconds(size: int, plan: Plan, rank: int, hardware: HardwareSpec) -> float:
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


def launch_efficiency(pass_plan: PassPlan, rank: int, hardware: HardwareSpec) -> float:
    """Return the share of the kernel's rate that a pass reaches, which is lower for several launches."""
    several = sum(step.compute is not None for step in pass_plan.steps_of(rank)) > 1
    return hardware.multi_launch_efficiency if several and pass_plan.name == "backward" else 1.0


@lru_cache(maxsize=512)
def _ring_seconds(pass_plan: PassPlan, rank: int, hardware: HardwareSpec, direct: bool, groups: int) -> float:
    """Return the seconds of one rank if blocks are sent. Cached: strategies that are compared share passes."""
    line = _Timeline(direct, pass_plan, hardware)
    _walk(line, pass_plan, rank, hardware, groups)
    if groups > 1:  # `runtime.head_groups` copies the results of all groups
        line.read_and_write(COPY * result_bytes(pass_plan, rank, groups))
    return line.end


@lru_cache(maxsize=512)
def _score_row_seconds(pass_plan: PassPlan, rank: int, hardware: HardwareSpec) -> float:
    """Return the seconds of one rank if K and V are sent separately: half of each computation comes with each."""
    line = _Timeline(False, pass_plan, hardware)
    for tensor in (0, 1):
        _walk(line, pass_plan, rank, hardware, tensor=tensor)
        line.read_and_write(int(SCORES[pass_plan.name] * score_bytes(pass_plan.call, pass_plan.name, rank)))
    return line.end


def _walk(
    line: _Timeline, pass_plan: PassPlan, rank: int, hardware: HardwareSpec, groups: int = 1, tensor: int | None = None
) -> None:
    """Simulate the steps of one rank on its timeline, for all groups of heads, or for one of K and V."""
    size, launched = message_sizes(pass_plan, tensor), set[int]()
    packed = [set[Rows]() for _ in range(groups)]
    add, accumulate = (ADD_ROUNDED, ACCUMULATE_ROUNDED) if pass_plan.rounds_gradients else (ADD, ACCUMULATE)
    if pass_plan.name == "forward":  # results of helpers are copied into messages
        accumulate = COPY
    efficiency = launch_efficiency(pass_plan, rank, hardware)
    for group, step in interleave_groups(pass_plan.steps_of(rank), groups):
        line.wait(step.arrivals, group)
        unpacked = to_pack((move for move in step.sends if move.owner == rank), packed[group])
        packed[group] |= {move.rows for move in unpacked}
        line.read_and_write(PACK * sum(map(size, unpacked)))
        line.receive(step.receives, size, group)
        line.read_and_write(accumulate * sum(map(size, step.result_sends)))
        if step.joins_local:
            line.read_and_write(joined_bytes(pass_plan, rank))
        if step.compute:
            seconds = launch_seconds(pass_plan, step.compute, hardware) / efficiency
            line.launch(seconds if tensor is None else seconds / 2)
            helps = pass_plan.helpers is not None and step.side == "q"  # the owner of the queries merges the result
            first = helps or group not in launched
            line.read_and_write(merged_bytes(pass_plan, step.compute, hardware.kernel, first=first))
            if not helps:
                launched.add(group)
        line.wait(step.result_arrivals, group)
        line.read_and_write(add * sum(map(size, step.result_arrivals)))
        line.receive(step.result_receives, size, group)
    line.read_and_write(groups * summed_bytes(pass_plan, rank, hardware.kernel))


def _head_parallel_seconds(plan: Plan, pass_plan: PassPlan, rank: int, hardware: HardwareSpec) -> float:
    """Return the seconds of one rank if heads are resharded, one group after the other: see `runtime.head_parallel`."""
    computes = [step.compute for step in pass_plan.steps_of(rank) if step.compute]
    exchanged = [
        [all_to_all_seconds(size, plan, rank, hardware) for size in group]
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
            line.launch(sum(launch_seconds(pass_plan, compute, hardware) for compute in computes))
            line.read_and_write(summed_bytes(pass_plan, rank, hardware.kernel))
        at_sequence.append(line.exchange(back))
    line.read_and_write(sum(group.save for group in traffic))
    for time, group in zip(at_sequence, traffic, strict=True):
        line.wait_until(time)
        line.read_and_write(group.unpack)
    return line.end
