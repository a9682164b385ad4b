"""Choose the order of the rows of ranks that divide heads: natural order or rank order.

A rank that divides heads receives rows of all ranks. In rank order they lie as they arrive: all rows of the first rank,
then all rows of the second. In natural order they lie by their position, which costs a copy before and after.
Strategies plan the natural order; `with_rank_order` changes a plan if rank order is faster for the kernel. Zigzag on
two ranks, where rank 0 holds chunks 0 and 3: rank order is 0 3 1 2, natural order 0 1 2 3.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from burst_portable.layout import Layout
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.head_division import HeadSplit
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
    return _fits_rank_order(plan.call.layout, plan.heads, traits.splits_tiles or trims or square)


def with_rank_order(plan: Plan, traits: KernelTraits) -> Plan:
    """Return the plan in rank order, or unchanged if natural order is faster: see `keeps_rank_order`."""
    if not keeps_rank_order(plan, traits):
        return plan
    sides = plan.call.layout, plan.call.k_layout
    queries, keys = (layout.joined(plan.head_parallel_size, plan.head_spacing) for layout in sides)
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
def _fits_rank_order(layout: Layout, split: HeadSplit | None, needs_few_tiles: bool) -> bool:
    """Return whether rows may be computed in rank order, by their layout and whether there must be few tiles.

    Between nodes, segments with steps stay as they arrive: see `Layout.sorted`. Several steps cannot meet.
    """
    one_step = len({s.step for shard in layout.shards for s in shard}) == 1
    if one_step and not needs_few_tiles and max(map(len, layout.shards)) <= _SEGMENTS:
        return True
    split = split or HeadSplit(1)
    if split.ranks == layout.ranks and any(s.step > 1 for shard in layout.shards for s in shard):
        return False
    shards = layout.joined(split.ranks, split.spacing).shards
    return all(a.start < b.start for shard in shards for a, b in pairwise(shard))
