"""Estimate the cost of a plan: bytes, FLOPs, launches, memory and predicted time, without running it.

`work` counts FLOPs and bytes, `predicted_time` simulates the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory import score_bytes
from burst_portable.planning.messages import message_sizes
from burst_portable.planning.plans import PASSES, PassName, Plan
from burst_portable.planning.predicted_time import (
    all_to_all_seconds,
    launch_efficiency,
    launch_seconds,
    rank_seconds,
)
from burst_portable.planning.work import pass_flops, pass_memory, peak_block_bytes, reshard_bytes


@dataclass(frozen=True, slots=True)
class PassCost:
    """Cost of one pass on one rank.

    Attributes:
        flops: Of the visible pairs of the mask: see `work`.
        memory: Least bytes that the kernel launches read and write: see `work.pass_memory`.
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
    link += sum(all_to_all_seconds(one, plan, rank, hardware) for group in groups for one in group)
    return PassCost(
        flops=plan.head_groups * pass_flops(pass_plan.call, pass_name, sum(c.num_pairs for c in computes)),
        memory=plan.head_groups * sum(pass_memory(pass_plan.call, pass_name, c) for c in computes),
        sent=sent,
        received=received,
        messages=plan.rounds * len(receives) + (2 * len(groups) if plan.head_parallel_size > 1 else 0),
        launches=plan.rounds * len(computes),
        tiles=plan.head_groups * sum(c.count for c in computes),
        blocks_held=peak_block_bytes(plan, pass_name, rank),
        scores=score_bytes(plan.call, pass_name, rank) if plan.score_rows else 0,
        seconds=rank_seconds(plan, pass_name, rank, hardware),
        compute_seconds=plan.head_groups
        * sum(launch_seconds(pass_plan, c, hardware) for c in computes)
        / launch_efficiency(pass_plan, rank, hardware),
        link_seconds=link,
    )


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
