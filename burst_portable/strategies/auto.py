"""Choose the strategy whose plan has the least predicted time.

Bytes per token of the ring family, with 16-bit inputs: K and V with their float32 gradients are 12·Hkv·D bytes. Q with
dO, LSE, delta and float32 dQ are 8·Hq·D + 8·Hq bytes. So burst's backward pass sends less than the ring's if Hq/Hkv is
below about 1.5. Windows and documents favor `transfer="direct"`, which sends only the rows that are needed. Ulysses is
fastest if the heads allow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from burst_portable.errors import InputError, MemoryLimitError, shown
from burst_portable.layout import Segment
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost, plan_seconds
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory import plan_memory
from burst_portable.planning.plans import Plan
from burst_portable.planning.tiles import BlockPairs
from burst_portable.strategies.base import Machine, Strategy
from burst_portable.strategies.checked_plans import verified_plan
from burst_portable.strategies.options import RANKS_PER_NODE, Option, option
from burst_portable.strategies.registry import broken, by_label, classes, collect_reason, make_strategy
from burst_portable.utils.text import by_time, bytes_text
from burst_portable.utils.values import check_divides

DEFAULT_HARDWARE = HardwareSpec(tflops=400.0, intra_node_bandwidth=100.0)
"""Speeds of a current accelerator, used if the backend has no measured ones."""

_SMALLEST_GAIN = 1.005  # ratio of predicted times: smaller gains from more head groups were not seen in measurements
_SAMPLED_RANKS = 4  # with more ranks, only this many and the busiest are estimated: all would need ranks² tiles
_LARGEST_SEARCH = 1 << 13  # segments, and ranks times regions: beyond this, the busiest rank is not searched for


@dataclass(frozen=True)
class AutoStrategy(Strategy):
    """Use the plan of another strategy: the one with the least predicted time.

    Attributes:
        ranks_per_node: Ranks per node. If given, strategies for several nodes are compared too, and messages between
            nodes are predicted with their own bandwidth.
        max_memory_mib: Largest memory of attention on a rank, in MiB: local tensors and their gradients, remote blocks
            and scores, as `plan --strategy all` lists them. Candidates that need more are left out. Default: no limit.
        hardware: Speeds from which times are predicted.
    """

    name = "auto"
    title = "the strategy whose plan has the least predicted time"

    ranks_per_node: int | None = option(RANKS_PER_NODE)
    max_memory_mib: int | None = option(
        Option(None, "a size in MiB", flag=True, help="Leave out strategies that need more memory per rank, in MiB.")
    )
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
        """Do nothing, unless memory is limited: every call has a candidate that serves it."""
        if self.max_memory_mib is not None:
            self.plan(call)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        """Yield nothing: `auto` is no candidate of itself."""
        yield from ()

    def seconds(self, plan: Plan) -> float:
        """Return the predicted time of a plan, over a sample of ranks if there are many."""
        return plan_seconds(plan, self._hardware_for(plan.call), sampled_ranks(plan.call))

    def _memory(self, plan: Plan) -> int:
        """Return the peak memory of a plan in bytes, over a sample of ranks if there are many."""
        return plan_memory(plan, sampled_ranks(plan.call), self._hardware_for(plan.call).kernel)

    def plan(self, call: AttentionCall) -> Plan:
        if call.ranks == 1:
            plan = replace(make_strategy("ring").plan(call), reason="one rank: no communication, so nothing to choose")
            self._check_memory({plan.label: self._memory(plan)})
            return plan
        plans: dict[str, Plan] = {}
        memory: dict[str, int] = {}
        seconds: dict[str, float] = {}
        candidates, refused = self.list_candidates(call)
        for label, strategy in candidates.items():
            with collect_reason(strategy.name, label, refused):
                plan = verified_plan(strategy, call)
                if self.max_memory_mib is not None:
                    memory[label] = self._memory(plan)
                    if memory[label] > self.max_memory_mib << 20:
                        refused[label] = f"it needs {bytes_text(memory[label])} per rank"
                        continue
                seconds[label] = self.seconds(plan)  # the route of another package may raise an error here
                plans[label] = plan
        if memory:
            self._check_memory(memory)
        best, criterion = self._best(call, plans, seconds)
        chose = f"chose {best} {criterion}{self._hardware_text(call)} ({by_time(seconds)})"
        left_out = (f"not {label}: {reason}" for label, reason in refused.items())
        return replace(plans[best], reason="; ".join([chose, *left_out]))

    def _best(self, call: AttentionCall, plans: dict[str, Plan], seconds: dict[str, float]) -> tuple[str, str]:
        """Return the label of the plan to run, and the criterion by which it was chosen."""
        least = min(round(time, 7) for time in seconds.values())
        fastest = [label for label, time in seconds.items() if round(time, 7) == least]
        tie = len(fastest) > 1
        best = fastest[0]
        if tie:  # the plan whose busiest rank sends the fewest bytes
            hardware, ranks = self._hardware_for(call), sampled_ranks(call)
            best = min(fastest, key=lambda label: plan_cost(plans[label], hardware, ranks).sent)
        criterion = "by predicted time, then by bytes sent" if tie else "by predicted time"
        if self.max_memory_mib is not None:
            criterion += f", within max_memory_mib={self.max_memory_mib}"
        if (fewer := _fewest_groups(best, plans, seconds)) != best:
            criterion += f", since {best} would save under {100 * (_SMALLEST_GAIN - 1):.2g} %,"
            best = fewer
        return best, criterion

    def _check_memory(self, needed: dict[str, int]) -> None:
        """Raise `MemoryLimitError` if none of these needs, in bytes by label, is within the limit."""
        if self.max_memory_mib is None or min(needed.values()) <= self.max_memory_mib << 20:
            return
        label = min(needed, key=needed.__getitem__)
        raise MemoryLimitError(
            "attention needs more memory than the limit of 'auto'",
            got=f"at least {bytes_text(needed[label])} per rank, of {label}",
            allowed=f"max_memory_mib={self.max_memory_mib}",
            next_step="use more ranks, or raise max_memory_mib",
        )

    def _hardware_text(self, call: AttentionCall) -> str:
        """Return the origin of the speeds, for the reason of a plan."""
        hardware = self._hardware_for(call)
        text = f" at rates {hardware.source}" if hardware.source else ""
        return f"{text}, {hardware.between_nodes()}" if 0 < hardware.ranks_per_node < call.ranks else text

    def _hardware_for(self, call: AttentionCall) -> HardwareSpec:
        """Return the speeds for a call. Over several nodes there are no peer copies: one transport serves all ranks."""
        node = self.ranks_per_node or self.hardware.ranks_per_node
        if not 0 < node < call.ranks:
            return self.hardware
        return replace(self.hardware.with_nodes(node), peer_copy_bandwidth=())

    def list_candidates(self, call: AttentionCall) -> tuple[dict[str, Strategy], dict[str, str]]:
        """Return the candidates for a call, by label, and the reasons for leaving out broken strategies, by name."""
        if self.ranks_per_node is not None:
            check_divides(self.ranks_per_node, call.ranks)
        machine = Machine(self._hardware_for(call), self.ranks_per_node)
        found: dict[str, Strategy] = {}
        refused = dict(broken())
        for name, strategy in classes().items():
            if strategy.exact:
                with collect_reason(name, name, refused):
                    found |= by_label(strategy, strategy.candidates(call, machine), "candidate")
        return found, refused


def _fewest_groups(best: str, plans: dict[str, Plan], seconds: dict[str, float]) -> str:
    """Return the label of the same strategy with fewer head groups, if it is predicted to be about as fast.

    A message takes memory bandwidth and power from a concurrent kernel, which the prediction does not include. Over
    131,072 tokens on two H200, four groups took 0.7 % longer than one and were predicted to take 0.9 % less. With 8 K/V
    heads, two groups took 0.8 % longer and were predicted to take 0.4 % less (runs `groups-128k` and `priced` in
    tests/strategies/measured/strategies-h200x2-2026-11-23.json).
    """
    strategy, groups = plans[best].strategy, plans[best].head_groups
    fewer = [name for name, plan in plans.items() if plan.strategy == strategy and plan.head_groups < groups]
    close = [name for name in fewer if seconds[name] <= _SMALLEST_GAIN * seconds[best]]
    return min(close, key=lambda name: plans[name].head_groups, default=best)


@lru_cache(maxsize=64)
def sampled_ranks(call: AttentionCall) -> tuple[int, ...]:
    """Return the ranks whose costs are estimated: all if there are few, else equally spaced ones and the busiest."""
    ranks, mask = call.ranks, call.mask
    if ranks <= _SAMPLED_RANKS:
        return tuple(range(ranks))
    chosen = {i * (ranks - 1) // (_SAMPLED_RANKS - 1) for i in range(_SAMPLED_RANKS)}
    queries, keys = call.layout, call.k_layout
    segments = [s for layout in (queries, keys) for shard in layout.shards for s in shard]
    if max(len(segments), ranks * len(mask.regions)) <= _LARGEST_SEARCH and all(s.step == 1 for s in segments):
        every_query, every_key = (((Segment(0, layout.length),),) for layout in (queries, keys))
        rows, columns = BlockPairs(mask, queries.shards, every_key), BlockPairs(mask, every_query, keys.shards)
        by_rows = [rows.num_pairs(rank, 0) for rank in range(ranks)]
        by_columns = [columns.num_pairs(0, rank) for rank in range(ranks)]
        chosen |= {pairs.index(max(pairs)) for pairs in (by_rows, by_columns)}
    return tuple(sorted(chosen))
