"""Decide in which order a rank computes the rows that it receives if heads are divided (ulysses, usp).

Each rank that divides heads sends its rows of some heads. In rank order these rows lie as they arrive: all rows of the
first rank, then all rows of the second. In natural order they lie by their position in the sequence, which costs a
copy before the computation and one after it. Strategies plan the natural order. `with_rank_order` changes a plan to
rank order if that is faster for the kernel. `planning.cost` estimates the time of the copies::

    zigzag, 2 ranks     rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2
    rank order          0 3 1 2
    natural order       0 1 2 3
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from burst_portable.layout import Layout
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.plans import Plan

_SEGMENTS = 2  # the most that a rank may hold if rows are computed in rank order: more make too many tiles


def keeps_rank_order(plan: Plan, traits: KernelTraits) -> bool:
    """Return whether rows are computed in rank order, as they arrive; else they are put in natural order first.

    True if both orders are the same. Also true if ranks hold few segments (many would make too many tiles) and the
    kernel takes any tiles in one launch, with two exceptions. Either messages between nodes leave out rows that are not
    needed: natural order has more of them. Or natural order makes a box or a causal square: the kernel is faster there.

    Args:
        plan: A plan in natural order, as strategies make it.
        traits: What the kernel declares.
    """
    trims = any(part.trims for _, part in plan.passes())
    square = traits.prefers_square and _is_square(plan)
    return _fits_rank_order(plan.call.layout, plan.head_parallel_size, traits.splits_tiles or trims or square)


def with_rank_order(plan: Plan, traits: KernelTraits) -> Plan:
    """Return the plan in rank order, or unchanged if natural order is faster: see `keeps_rank_order`."""
    if not keeps_rank_order(plan, traits):
        return plan
    queries, keys = (layout.joined(plan.head_parallel_size) for layout in (plan.call.layout, plan.call.k_layout))
    joined = replace(plan.forward.call, layout=queries, kv_layout=keys)
    return replace(plan, forward=replace(plan.forward, call=joined), backward=replace(plan.backward, call=joined))


def _is_square(plan: Plan) -> bool:
    """Return whether a rank computes a box or a causal square and no more, in natural order."""
    compute = plan.forward.single_compute(0)
    if compute is None or compute.count != 1:
        return False
    (tile,) = compute.tiles
    return tile.hi >= tile.q_stop - 1 - tile.k_start  # no window


@lru_cache(maxsize=64)
def _fits_rank_order(layout: Layout, node_ranks: int, needs_few_tiles: bool) -> bool:
    """Return whether rows may be computed in rank order, by their layout and whether there must be few tiles.

    Between nodes, segments with steps stay as they arrive: see `Layout.sorted`. Several steps cannot meet.
    """
    one_step = len({s.step for shard in layout.shards for s in shard}) == 1
    if one_step and not needs_few_tiles and max(map(len, layout.shards)) <= _SEGMENTS:
        return True
    if node_ranks == layout.ranks and any(s.step > 1 for shard in layout.shards for s in shard):
        return False
    return all(a.start < b.start for shard in layout.joined(node_ranks).shards for a, b in pairwise(shard))
