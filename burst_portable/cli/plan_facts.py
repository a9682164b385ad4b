"""What `burst-portable plan` tells, as plain data: its JSON, and what its tables are made from. Needs no torch.

==================  ==========================================================================================
schema              "burst_portable.plan/2"; a change that breaks readers counts it up
problem             the sizes that were asked for; mask and layout by name; `area`: (query, key) pairs per head;
                    `blind_rows`: tokens that see nothing
strategy, reason    what plans, and why where it was chosen
reshard, groups     "heads" where heads are resharded, and in how many groups a rank computes them
inner               among how many ranks heads are resharded: all, or those of a node; else 1
rates               tflops and gbps a rank, that times are predicted with; outer_gbps between nodes of `node` ranks;
                    `source`: where they come from, or null where they were typed; `outer_source`: "measured",
                    "given" or "assumed", or null where there is one node, or nobody said
costed_ranks        the ranks that numbers below are taken over: all of them, or a sample
passes              by "forward" and "backward": what travels how, and
  max, mean         of one rank: flops, sent and received bytes, hops, launches, tiles
  bytes_a_hop       the largest message; null where nothing hops
  imbalance         largest over mean FLOPs of a rank
  memory            bytes: `shard` (own tensors of the pass), `in_flight` (foreign blocks here or on their way)
  seconds           of the slowest rank; `compute_seconds`: its FLOPs at the given rate and nothing else
  efficiency        mean FLOPs of a rank at the given rate, over `seconds`
notes               what a reader should know of the times: sentences
steps               of one rank: what arrives, what is computed, what leaves
check               whether every pair is computed exactly once, what is wrong if not, how many `ranks` were checked
==================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from burst_portable import __version__
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import PassCost, plan_cost
from burst_portable.planning.messages import message_size
from burst_portable.planning.plans import PassName, PassPlan, Plan, heads_each
from burst_portable.planning.rates import Rates
from burst_portable.planning.routes import Move
from burst_portable.planning.schedule import Step
from burst_portable.planning.verify import verify

SCHEMA = "burst_portable.plan/2"
ALL_RANKS = 64
"""Up to this many ranks are costed one by one, of more a sample: all would cost ranks² blocks."""

CHECKED_RANKS = 128
"""Up to this many ranks are checked one by one, of more a sample that takes as long."""
_NEIGHBOURS = 4

Facts = dict[str, Any]


def plan_facts(plan: Plan, rates: Rates, rank: int) -> Facts:
    """All but the check, with the steps of one rank."""
    costed = costed_ranks(plan.call.ranks, rank)
    cost = plan_cost(plan, rates, costed)
    return {
        "schema": SCHEMA,
        "version": __version__,
        "problem": call_facts(plan.call),
        "strategy": plan.strategy,
        "reason": plan.reason,
        "reshard": "heads" if plan.heads else None,
        "groups": plan.groups,
        "inner": plan.head_parallel_size,
        "rates": rates_facts(rates),
        "costed_ranks": list(costed),
        "passes": {
            name: {
                **_pass(plan, name, pass_plan, cost.per_rank[name], costed, rates),
                "imbalance": cost.imbalance(name),
            }
            for name, pass_plan in plan.passes()
        },
        "seconds": cost.seconds,
        "steps": {
            "rank": rank,
            **{name: _steps(plan, name, pass_plan, rank) for name, pass_plan in plan.passes()},
        },
    }


def check(plan: Plan, ranks: Sequence[int], progress: Callable[[int], None]) -> Facts:
    """The check's outcome over these ranks; `progress` hears how many of both passes are done."""
    wrong = verify(plan, progress, ranks if len(ranks) < plan.call.ranks else None)
    return {"done": True, "ok": not wrong, "wrong": wrong, "ranks": len(ranks)}


def checked_ranks(ranks: int, everyone: bool, inner: int = 1) -> Sequence[int]:
    """All ranks where they are few or `everyone` is to be checked; else neighbours, in runs spread over all.

    Where `inner` ranks share heads out, neighbours in their ring; of rings of few ranks, some are checked whole.
    """
    nodes = ranks // inner
    if everyone or ranks <= CHECKED_RANKS:
        return range(ranks)
    if nodes <= CHECKED_RANKS:
        rings = min(inner, CHECKED_RANKS // nodes)
        return sorted(node * inner + i * inner // rings for node in range(nodes) for i in range(rings))
    runs = max(2, CHECKED_RANKS**2 // nodes // _NEIGHBOURS)
    starts = (i * (nodes - _NEIGHBOURS) // (runs - 1) for i in range(runs))
    return sorted({(start + i) * inner for start in starts for i in range(_NEIGHBOURS)})


def costed_ranks(ranks: int, shown: int) -> tuple[int, ...]:
    """All ranks where they are few, else eight spread over them and the one that is shown."""
    if ranks <= ALL_RANKS:
        return tuple(range(ranks))
    return tuple(sorted({i * (ranks - 1) // 7 for i in range(8)} | {shown}))


def rates_facts(rates: Rates) -> Facts:
    """Return the rates that times are predicted with."""
    return {
        "tflops": rates.tflops,
        "gbps": rates.gbps,
        "node": rates.node or None,
        "outer_gbps": rates.outer_gbps if rates.node else None,
        "outer_source": (rates.outer_origin or None) if rates.node else None,
        "source": rates.source or None,
    }


def call_facts(problem: AttentionCall) -> Facts:
    """Return the sizes that were asked for."""
    return {
        "seq_len": problem.layout.length,
        "ranks": problem.ranks,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "batch": problem.batch,
        "itemsize": problem.itemsize,
        "mask": str(problem.mask),
        "layout": problem.layout.name,
        "area": problem.area,
        "blind_rows": problem.mask.blind_rows(problem.layout.length),
    }


def _pass(
    plan: Plan, name: PassName, pass_plan: PassPlan, costs: Sequence[PassCost], ranks: Sequence[int], rates: Rates
) -> Facts:
    seconds = max(c.seconds for c in costs)
    flops = [c.flops for c in costs]
    per_second = (rates.tflops if name == "forward" else rates.backward or rates.tflops) * 1e12
    columns = {
        "flops": flops,
        "sent_bytes": [c.sent for c in costs],
        "received_bytes": [c.received for c in costs],
        "hops": [c.hops for c in costs],
        "launches": [c.launches for c in costs],
        "tiles": [c.tiles for c in costs],
    }
    return {
        "travels": plan.travels(name),
        "moves": plan.moves(name),
        "max": {column: max(values) for column, values in columns.items()},
        "mean": {column: sum(values) / len(values) for column, values in columns.items()},
        "bytes_a_hop": _largest_hop(pass_plan, ranks) if plan.ring_size > 1 or not plan.heads else None,
        "memory": {
            "shard": _shard(plan, name, pass_plan, ranks),
            "in_flight": max(c.blocks_held for c in costs),
        },
        "seconds": seconds,
        "compute_seconds": max(flops) / per_second,
        "efficiency": sum(flops) / len(flops) / per_second / seconds if seconds else 1.0,
    }


def _shard(plan: Plan, name: PassName, pass_plan: PassPlan, ranks: Sequence[int]) -> int:
    """Of the rank that holds most: of its rows, or of all rows, or those of its node, of its heads."""
    p, inner = plan.call, plan.head_parallel_size
    heads, kv_heads = heads_each(p.heads, p.kv_heads, inner)
    every = replace(pass_plan.call, heads=heads, kv_heads=kv_heads)  # not of a group
    return max(shard_bytes(every, name, member) for member in {rank // inner for rank in ranks})


def shard_bytes(problem: AttentionCall, pass_name: PassName, rank: int) -> int:
    """A rank's own tensors: Q, K, V, out, LSE; backward also dO, delta and the gradients, in wide accumulators."""
    data, wide = problem.itemsize, max(problem.itemsize, 4)
    queries = problem.batch * problem.layout.count(rank) * problem.heads
    keys = problem.batch * problem.k_layout.count(rank) * problem.kv_heads
    d, dv = problem.head_dim, problem.value_dim
    inputs = data * (queries * d + keys * (d + dv))
    if pass_name == "forward":
        return inputs + wide * queries * (dv + 1)
    results = data * 2 * queries * dv + wide * 2 * queries  # out, dO; LSE, delta
    return inputs + results + wide * (queries * d + keys * (d + dv))


def _largest_hop(pass_plan: PassPlan, ranks: Sequence[int]) -> int:
    """Bytes of the largest message that one of these ranks gets."""
    moves = (m for r in ranks for s in pass_plan.steps_of(r) for m in (*s.receives, *s.result_receives))
    return max((message_size(pass_plan.call, move, narrow=pass_plan.narrow) for move in moves), default=0)


def _steps(plan: Plan, name: PassName, pass_plan: PassPlan, rank: int) -> list[Facts]:
    return [_step(pass_plan, step) for step in plan.steps(name, rank)]


def _step(pass_plan: PassPlan, step: Step) -> Facts:
    def moved(moves: Sequence[Move], other: str) -> list[Facts]:
        return [
            {
                "what": m.label,
                "rank": getattr(m, other),
                "rows": list(m.rows),
                "bytes": message_size(pass_plan.call, m, narrow=pass_plan.narrow),
            }
            for m in moves
        ]

    return {
        "step": step.index,
        "arrives": moved(step.arrivals, "source"),
        "computes": _compute(step),
        "sends": moved(step.sends, "target"),
        "results_arrive": moved(step.result_arrivals, "source"),
        "results_sent": moved(step.result_sends, "target"),
    }


def _compute(step: Step) -> Facts | None:
    if step.compute is None:
        return None
    c = step.compute
    full = sum(tile.full for tile in c.tiles)
    return {
        "label": c.label,
        "q": list(c.q_owners),
        "kv": list(c.k_owners),
        "full_tiles": full,
        "masked_tiles": len(c.tiles) - full,
        "area": c.tiles.area,
    }
