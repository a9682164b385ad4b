"""What a rank would send under other strategies, and how evenly other layouts would spread the work: by plans alone."""

from __future__ import annotations

from typing import Any

from burst_portable.cost import rank_cost
from burst_portable.errors import InputError, LayoutError, UnsupportedError
from burst_portable.layouts import NAMES, OF_DOCUMENTS, make_layout
from burst_portable.planning import planned
from burst_portable.plans import PASSES, Plan, Problem
from burst_portable.rates import Rates
from burst_portable.strategies.registry import make_strategy
from burst_portable.tiles import BlockPairs

_STRATEGIES: dict[str, tuple[str, dict[str, object]]] = {
    "strategy='ring'": ("ring", {}),
    "strategy='burst'": ("burst", {}),
    "RingStrategy(moves='fetch')": ("ring", {"moves": "fetch"}),
    "BurstStrategy(moves='fetch')": ("burst", {"moves": "fetch"}),
    "strategy='ulysses'": ("ulysses", {}),
}
"""As a program writes it -> name and options."""
_MOST = 1 << 11  # ranks times regions of the mask: with more, trying layouts takes too long
_MOST_PIECES = 1 << 17  # ranks times segments of all keys: half a second


def strategies(plan: Plan, rank: int, rates: Rates) -> dict[str, dict[str, Any]]:
    """Other strategies: bytes sent and predicted seconds of this rank in both passes, and which side travels."""
    found = {}
    for label, (name, options) in _STRATEGIES.items():
        try:
            other = planned(make_strategy(name, **options), plan.problem)
        except (InputError, UnsupportedError):
            continue  # it does not go with this problem
        costs = [rank_cost(other, one, rank, rates) for one in PASSES]
        found[label] = {
            "sent": sum(c.sent for c in costs),
            "seconds": sum(c.seconds for c in costs),
            "travels": {one: pass_plan.side for one, pass_plan in other.passes()},
        }
    return found


def layouts(problem: Problem) -> dict[str, float]:
    """Layouts by name: the pairs of the busiest rank over the mean; without those that would take long to try."""
    length, ranks, mask = problem.q_layout.length, problem.ranks, problem.mask
    if ranks * len(mask.regions) > _MOST or length != problem.k_layout.length:
        return {}
    found = {}
    for name in NAMES:
        try:
            layout = make_layout(name, length, ranks, mask if name in OF_DOCUMENTS else None)
        except (InputError, LayoutError):
            continue  # documents are asked for, and the mask has none
        keys = layout.joined().sorted().shards  # one segment, but where steps are larger than 1
        if ranks * len(keys[0]) <= _MOST_PIECES:
            blocks = BlockPairs(mask, layout.shards, keys)
            pairs = [blocks.area(rank, 0) for rank in range(ranks)]
            if sum(pairs):
                found[name] = max(pairs) * ranks / sum(pairs)
    return found
