"""Collect the facts of a plan that a report compares with the recorded events."""

from __future__ import annotations

from typing import Any

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import hardware_of
from burst_portable.errors import InputError, LayoutError
from burst_portable.layout import NAMES, OF_MASKS, make_layout
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES, Plan
from burst_portable.planning.schedule import Compute
from burst_portable.planning.tiles import BlockPairs
from burst_portable.planning.work import pass_flops
from burst_portable.strategies.planner import cached_plan
from burst_portable.strategies.registry import classes, collect_reason, make_strategy

_MAX_REGIONS = 1 << 11  # ranks times regions of the mask: above this, trying layouts takes too long
_MAX_SEGMENTS = 1 << 17  # ranks times segments of all keys: half a second
_PLANNED = {
    "flops": "flops",
    "memory_bytes": "memory",
    "sent_bytes": "sent",
    "received_bytes": "received",
    "seconds": "seconds",
    "compute_seconds": "compute_seconds",
    "link_seconds": "link_seconds",
}
"""JSON keys of a pass, and the fields of `cost.PassCost`."""


class PlanFacts:
    """The facts of a plan about one rank's kernel calls."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.plan, self.rank = plan, rank
        self.dtype = ""  # of the tensors, set by the first kernel call
        self.computes: dict[tuple[bool, Compute], tuple[int, int, int, int]] = {}
        for backward, (name, pass_plan) in enumerate(plan.passes()):
            for step in plan.steps(name, rank):
                if c := step.compute:
                    num_pairs = c.tiles.num_pairs
                    work = pass_flops(pass_plan.call, name, num_pairs) // (1 + plan.score_rows)  # twice the launches
                    self.computes[bool(backward), c] = step.index, num_pairs, len(c.tiles), work

    def describe(self, backend: Backend, file: str = "", *, high_priority: bool = False) -> dict[str, Any]:
        """Return the plan's facts for a report. Predictions use the hardware of a file, else the backend's."""
        plan, call = self.plan, self.plan.call
        hardware, source = self._hardware_and_source(backend, file, high_priority)
        costs = {name: rank_cost(plan, name, self.rank, hardware) for name in PASSES}
        return {
            "strategy": plan.label,
            "reason": plan.reason,
            **call.facts(),
            "dtype": self.dtype,
            "head_parallel_size": plan.head_parallel_size,
            "head_spacing": plan.head_spacing,
            "circulates": {name: pass_plan.circulates for name, pass_plan in plan.passes()},
            "direct": plan.direct,
            "layouts": layout_imbalances(call),
            "hardware": {
                "tflops": hardware.tflops,
                "intra_node_bandwidth": hardware.intra_node_bandwidth,
                "source": source,
            },
            "planned": {
                **{name: {key: getattr(c, field) for key, field in _PLANNED.items()} for name, c in costs.items()},
                "alternatives": alternatives(plan, self.rank, hardware),
            },
        }

    def _hardware_and_source(self, backend: Backend, file: str, high_priority: bool) -> tuple[HardwareSpec, str]:
        """Return the hardware for predictions and its source. An unusable file does not prevent a report."""
        call = self.plan.call
        note = ""
        try:
            hardware = hardware_of(
                backend, call.ranks, file=file, dtype=self.dtype, head_dim=call.head_dim, high_priority=high_priority
            )
        except InputError:
            hardware = hardware_of(backend, call.ranks, high_priority=high_priority)
            note = "; the hardware spec file in the settings cannot be used"
        return hardware, (hardware.source.removeprefix("of ") or "the backend's guess") + note


def alternatives(plan: Plan, rank: int, hardware: HardwareSpec) -> dict[str, dict[str, Any]]:
    """Return other strategies: bytes sent and predicted seconds of this rank in both passes, and what circulates."""
    found = {}
    suggested = [make_strategy(label) for one in classes().values() for label in one.suggested]
    for strategy in suggested:
        with collect_reason(strategy.name, "", {}):
            other = cached_plan(strategy, plan.call)
            costs = [rank_cost(other, one, rank, hardware) for one in PASSES]
            found[strategy.label] = {
                "sent_bytes": sum(c.sent for c in costs),
                "seconds": sum(c.seconds for c in costs),
                "circulates": {one: pass_plan.circulates for one, pass_plan in other.passes()},
            }
    return found


def layout_imbalances(call: AttentionCall) -> dict[str, float]:
    """Return layouts by name with the pairs of the busiest rank over the mean; slow ones are left out."""
    length, ranks, mask = call.layout.length, call.ranks, call.mask
    if ranks * len(mask.regions) > _MAX_REGIONS or length != call.k_layout.length:
        return {}
    found = {}
    for name in NAMES:
        try:
            layout = make_layout(name, length, ranks, mask if name in OF_MASKS else None)
        except (InputError, LayoutError):
            continue  # the layout needs documents, and the mask has none
        keys = layout.joined().sorted().shards  # one segment, unless a layout has steps larger than 1
        if ranks * len(keys[0]) <= _MAX_SEGMENTS:
            blocks = BlockPairs(mask, layout.shards, keys)
            pairs = [blocks.num_pairs(rank, 0) for rank in range(ranks)]
            if sum(pairs):
                found[name] = max(pairs) * ranks / sum(pairs)
    return found
