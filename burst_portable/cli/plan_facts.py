"""Build the JSON of `burst-portable plan`, from which its tables are made; docs/plans.md describes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from burst_portable import __version__
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import PassCost, PlanCost, plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory import peak_memory
from burst_portable.planning.messages import message_sizes
from burst_portable.planning.plans import PASSES, PassName, PassPlan, Plan
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Step
from burst_portable.planning.verify import verify
from burst_portable.planning.work import local_bytes

SCHEMA = "burst_portable.plan/6"
ALL_RANKS = 64
"""Costs are computed for all ranks up to this number, and for a sample above: all would need ranks² blocks."""

CHECKED_RANKS = 128
"""All ranks are verified up to this number, and a sample that takes as long above."""
_NEIGHBORS = 4

Facts = dict[str, Any]


def plan_facts(plan: Plan, hardware: HardwareSpec, rank: int) -> Facts:
    """Return the facts of a plan except `check`, with the steps of one rank."""
    sampled = sampled_ranks(plan.call.ranks, rank)
    cost = plan_cost(plan, hardware, sampled)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "problem": call_facts(plan.call),
        "strategy": plan.label,
        "reason": plan.reason,
        "reshard": "heads" if plan.heads else None,
        "head_groups": plan.head_groups,
        "head_parallel_size": plan.head_parallel_size,
        "hardware": hardware_facts(hardware),
        "sampled_ranks": list(sampled),
        "passes": {name: _pass(plan, name, cost, sampled, hardware) for name in PASSES},
        "seconds": cost.seconds,
        "steps": {
            "rank": rank,
            **{name: [_step(part, step) for step in plan.steps(name, rank)] for name, part in plan.passes()},
        },
    }


def verification_facts(plan: Plan, ranks: Sequence[int], progress: Callable[[int], None]) -> Facts:
    """Verify a plan for these ranks and return the outcome. `progress` gets the number of verified rank passes."""
    wrong = verify(plan, progress, ranks if len(ranks) < plan.call.ranks else None)
    return {"done": True, "ok": not wrong, "wrong": wrong, "ranks": len(ranks)}


def checked_ranks(ranks: int, check_all: bool, head_parallel_size: int = 1, spacing: int = 1) -> Sequence[int]:
    """Return the ranks to verify: all if few or `check_all` is set, else groups of neighbors spread over all.

    With head parallelism, neighbors are those of a ring. Of many short rings, some are verified completely. `spacing`:
    see `HeadSplit`. Above 1, a ring has consecutive ranks.
    """
    nodes = ranks // head_parallel_size
    if spacing > 1:
        chosen = checked_ranks(ranks, check_all, head_parallel_size)
        return sorted(rank // head_parallel_size + rank % head_parallel_size * nodes for rank in chosen)
    if check_all or ranks <= CHECKED_RANKS:
        return range(ranks)
    if nodes <= CHECKED_RANKS:
        rings = min(head_parallel_size, CHECKED_RANKS // nodes)
        return sorted(
            node * head_parallel_size + i * head_parallel_size // rings for node in range(nodes) for i in range(rings)
        )
    groups = max(2, CHECKED_RANKS**2 // nodes // _NEIGHBORS)
    starts = (i * (nodes - _NEIGHBORS) // (groups - 1) for i in range(groups))
    return sorted({(start + i) * head_parallel_size for start in starts for i in range(_NEIGHBORS)})


def sampled_ranks(ranks: int, rank: int) -> tuple[int, ...]:
    """Return all ranks if they are few, else eight spread over them and `rank`."""
    if ranks <= ALL_RANKS:
        return tuple(range(ranks))
    return tuple(sorted({i * (ranks - 1) // 7 for i in range(8)} | {rank}))


def hardware_facts(hardware: HardwareSpec) -> Facts:
    """Return the rates from which times are predicted."""
    return {
        "tflops": hardware.tflops,
        "intra_node_bandwidth": hardware.intra_node_bandwidth,
        "ranks_per_node": hardware.ranks_per_node or None,
        "inter_node_bandwidth": hardware.inter_node_bandwidth if hardware.ranks_per_node else None,
        "inter_node_source": (hardware.inter_node_origin or None) if hardware.ranks_per_node else None,
        "source": hardware.source or None,
    }


def call_facts(call: AttentionCall) -> Facts:
    """Return the facts of the call, and what of its mask is visible."""
    return {
        **call.facts(),
        "num_pairs": call.num_pairs,
        "fully_masked_tokens": call.mask.fully_masked_tokens(call.layout.length),
    }


def _pass(plan: Plan, name: PassName, cost: PlanCost, ranks: Sequence[int], hardware: HardwareSpec) -> Facts:
    costs = cost.per_rank[name]
    seconds = max(c.seconds for c in costs)
    flops = [c.flops for c in costs]
    per_second = (hardware.tflops if name == "forward" else hardware.backward_tflops or hardware.tflops) * 1e12
    columns = {
        "flops": flops,
        "sent_bytes": [c.sent for c in costs],
        "received_bytes": [c.received for c in costs],
        "messages": [c.messages for c in costs],
        "launches": [c.launches for c in costs],
        "tiles": [c.tiles for c in costs],
    }
    return {
        "circulates": plan.circulates(name),
        "transfer": plan.transfer(name),
        "max": {column: max(values) for column, values in columns.items()},
        "mean": {column: sum(values) / len(values) for column, values in columns.items()},
        "max_message_bytes": _largest_message(plan, name, ranks) if plan.ring_size > 1 or not plan.heads else None,
        "memory": memory_facts(plan, name, costs, ranks, hardware),
        "seconds": seconds,
        "compute_seconds": max(flops) / per_second,
        "efficiency": sum(flops) / len(flops) / per_second / seconds if seconds else 1.0,
        "imbalance": cost.imbalance(name),
    }


def memory_facts(
    plan: Plan, name: PassName, costs: Sequence[PassCost], ranks: Sequence[int], hardware: HardwareSpec
) -> dict[str, int]:
    """Return the bytes of the peak, of local tensors, of remote blocks and of scores; each is the largest of a rank."""
    return {
        "peak": max(peak_memory(plan, name, rank, hardware.kernel) for rank in ranks),
        "shard": max(local_bytes(plan, name, rank) for rank in ranks),
        "in_flight": max(c.blocks_held for c in costs),
        "scores": max(c.scores for c in costs),
    }


def _largest_message(plan: Plan, name: PassName, ranks: Sequence[int]) -> int:
    """Return the bytes of the largest message that one of these ranks receives."""
    sizes = [message_sizes(plan.pass_plan(name), tensor) for tensor in plan.tensors]
    moves = (m for r in ranks for s in plan.steps(name, r) for m in (*s.receives, *s.result_receives))
    return max((size(move) for move in moves for size in sizes), default=0)


def _step(pass_plan: PassPlan, step: Step) -> Facts:
    size = message_sizes(pass_plan)

    def messages(moves: Sequence[Move], peer: str) -> list[Facts]:
        return [
            {"what": m.label, "rank": getattr(m, peer), "rows": list(map(list, m.rows)), "bytes": size(m)}
            for m in moves
        ]

    return {
        "step": step.index,
        "receives": messages(step.arrivals, "source"),
        "compute": _compute(step),
        "sends": messages(step.sends, "target"),
        "result_receives": messages(step.result_arrivals, "source"),
        "result_sends": messages(step.result_sends, "target"),
    }


def _compute(step: Step) -> Facts | None:
    if (c := step.compute) is None:
        return None
    full = sum(tile.full for tile in c.tiles)
    return {
        "label": c.label,
        "q": list(c.q_owners),
        "kv": list(c.k_owners),
        "full_tiles": full,
        "masked_tiles": len(c.tiles) - full,
        "num_pairs": c.tiles.num_pairs,
    }
