"""Chooses a strategy by the predicted time of its plan, and says why.

Which side should travel is arithmetic: per token, K and V with their float32 gradients are 12·Hkv·D bytes in 16
bits, Q with dO, LSE, delta and float32 dQ 8·Hq·D + 8·Hq. So burst's backward wins while Hq/Hkv is below about 1.5,
and the ring's above; windows and documents favour fetching only what is needed; Ulysses wins where heads allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_portable.errors import InputError, shown
from burst_portable.layout import Segment
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost, plan_seconds
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import Plan
from burst_portable.planning.tiles import BlockPairs
from burst_portable.strategies.base import Machine, Strategy
from burst_portable.strategies.options import RANKS_PER_NODE, option
from burst_portable.strategies.registry import broken, by_label, checked_plan, classes, leaving_out, make_strategy
from burst_portable.utils.text import by_time
from burst_portable.utils.values import check_divides

DEFAULT_HARDWARE = HardwareSpec(tflops=400.0, intra_node_bandwidth=100.0)
"""A present-day accelerator, used where no backend knows better."""

_NO_FASTER = 1.005  # of the predicted time: smaller gains from more groups of heads were not seen when measured
_SAMPLED_RANKS = 4  # with more ranks, only this many and the busiest are priced: all would take ranks² tiles
_LOOKED_AT = 1 << 13  # segments, and ranks times regions: beyond this, the busiest rank is not searched for


@dataclass(frozen=True)
class AutoStrategy(Strategy):
    """Of the plans of the other strategies, the one that is predicted to be fastest at these `hardware`.

    With `ranks_per_node`, strategies for several nodes are candidates too, and messages between nodes have their own
    predicted time.
    """

    name = "auto"
    title = "the strategy whose plan has the least predicted time"

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    hardware: HardwareSpec = DEFAULT_HARDWARE

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.hardware, HardwareSpec):
            raise InputError(
                "hardware is not a HardwareSpec",
                got=shown(self.hardware),
                allowed="burst_portable.planning.hardware.HardwareSpec",
            )

    def check(self, call: AttentionCall) -> None:
        """Every call has a candidate that plans it."""

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[tuple[str, Strategy]]:
        """It chooses among the others."""
        yield from ()

    def seconds(self, plan: Plan) -> float:
        """What plans are compared by: their predicted time at these rates, over a sample of ranks if there are many."""
        return plan_seconds(plan, self._hardware_for(plan.call), sampled_ranks(plan.call))

    def plan(self, call: AttentionCall) -> Plan:
        if call.ranks == 1:
            return replace(make_strategy("ring").plan(call), reason="on one rank nothing travels, so nothing is chosen")
        plans: dict[str, Plan] = {}
        seconds: dict[str, float] = {}
        candidates, refused = self.compared(call)
        for label, strategy in candidates.items():
            with leaving_out(strategy.name, label, refused):
                plan = checked_plan(strategy, call)
                seconds[label] = self.seconds(plan)  # a route of another package may fail here
                plans[label] = plan
        least = min(round(time, 7) for time in seconds.values())
        fastest = [label for label, time in seconds.items() if round(time, 7) == least]
        tie = len(fastest) > 1
        best = min(fastest, key=lambda label: self._sent(plans[label])) if tie else fastest[0]
        how = "by predicted time, then by bytes sent" if tie else "by predicted time"
        if (fewer := _fewest_groups(best, plans, seconds)) != best:
            how += f", since {best} would save under {100 * (_NO_FASTER - 1):.2g} %,"
            best = fewer
        chose = f"chose {best} {how}{self._at_hardware(call)} ({by_time(seconds)})"
        refusals = (f"not {label}: {reason}" for label, reason in refused.items())
        return replace(plans[best], reason="; ".join([chose, *refusals]))

    def _at_hardware(self, call: AttentionCall) -> str:
        """Where the rates come from, for the reason of a plan."""
        hardware = self._hardware_for(call)
        text = f" at rates {hardware.source}" if hardware.source else ""
        return f"{text}, {hardware.between_nodes()}" if 0 < hardware.ranks_per_node < call.ranks else text

    def _sent(self, plan: Plan) -> int:
        """Bytes sent by the rank that sends most, in both passes: the tie-breaker between equally fast plans."""
        return plan_cost(plan, self._hardware_for(plan.call), sampled_ranks(plan.call)).sent

    def _hardware_for(self, call: AttentionCall) -> HardwareSpec:
        """These rates; over several nodes without peer copies: one transport serves all, and they end at the node."""
        node = self.ranks_per_node or self.hardware.ranks_per_node
        if not 0 < node < call.ranks:
            return self.hardware
        return replace(self.hardware.with_nodes(node), peer_copy_bandwidth=())

    def compared(self, call: AttentionCall) -> tuple[dict[str, Strategy], dict[str, str]]:
        """Return the strategies that are compared for a call, by label, and why broken ones are not, by name."""
        if self.ranks_per_node is not None:
            check_divides(self.ranks_per_node, call.ranks)
        machine = Machine(self._hardware_for(call), self.ranks_per_node)
        found: dict[str, Strategy] = {}
        refused = dict(broken())
        for name, strategy in classes().items():
            if strategy.exact:
                with leaving_out(name, name, refused):
                    found |= by_label(strategy, strategy.candidates(call, machine), "candidate")
        return found, refused


def _fewest_groups(best: str, plans: dict[str, Plan], seconds: dict[str, float]) -> str:
    """The same strategy in fewer groups of heads, where that is predicted to take no longer, or hardly.

    A message beside a kernel takes memory and power from it, which is not priced: over 131,072 tokens on two H200 four
    groups took 0.7 % longer than one, and were predicted to take 0.9 % less; with 8 K/V heads two took 0.8 % longer,
    predicted to take 0.4 % less (groups-128k and priced in benchmarks/results/strategies-h200x2-2026-11-23.json).
    """
    alike = [n for n, p in plans.items() if p.strategy == plans[best].strategy and p.groups < plans[best].groups]
    near = [name for name in alike if seconds[name] <= _NO_FASTER * seconds[best]]
    return min(near, key=lambda name: plans[name].groups, default=best)


@lru_cache(maxsize=64)
def sampled_ranks(call: AttentionCall) -> tuple[int, ...]:
    """Return the ranks whose costs are compared: all if there are few, else some evenly spaced ones and the busiest."""
    ranks, mask = call.ranks, call.mask
    if ranks <= _SAMPLED_RANKS:
        return tuple(range(ranks))
    chosen = {i * (ranks - 1) // (_SAMPLED_RANKS - 1) for i in range(_SAMPLED_RANKS)}
    queries, keys = call.layout, call.k_layout
    segments = [s for layout in (queries, keys) for shard in layout.shards for s in shard]
    if max(len(segments), ranks * len(mask.regions)) <= _LOOKED_AT and all(s.step == 1 for s in segments):
        every_query, every_key = (((Segment(0, layout.length),),) for layout in (queries, keys))
        rows, columns = BlockPairs(mask, queries.shards, every_key), BlockPairs(mask, every_query, keys.shards)
        by_rows = [rows.num_pairs(rank, 0) for rank in range(ranks)]
        by_columns = [columns.num_pairs(0, rank) for rank in range(ranks)]
        chosen |= {pairs.index(max(pairs)) for pairs in (by_rows, by_columns)}
    return tuple(sorted(chosen))
