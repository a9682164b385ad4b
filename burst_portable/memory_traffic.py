"""Memory traffic between a plan's kernels: blocks packed, results merged, gradients added up. In bytes of one device.

These passes over memory multiply nothing, and the next kernel waits for them. Each number below is what the code named
beside it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

from burst_portable.layout import Layout
from burst_portable.messages import head_fields
from burst_portable.moves import Move, to_pack
from burst_portable.plans import PassName, PassPlan, Plan
from burst_portable.steps import Compute

Size = Callable[[Move], int]
"""Bytes of a message."""

# In bytes of the message:
_PACKED = _COPIED = 2  # read and written once: `executor._Blocks._pack`, `reshard`
_ADDED, _NARROW_ADDED = 3, 5  # it is read and added to sums, twice as wide if it is narrow: `executor._Results._add`
# Sums are zeroed, then read and written by the kernel (`executor._Results.accumulators`); narrow ones are read again
# and rounded into their message (`_outgoing` there).
_MADE, _NARROW_MADE = 3, 9
# Bytes for each number of a 16-bit tensor:
_RUNNING = 8  # a kernel that merges in its epilogue reads and writes its running out
_PIECE_MERGED, _PIECE_MERGED_ONCE = 26, 10  # merging a piece by `numerics.merge_into`; in one pass that does the same
_PIECE_ADDED = 10  # a gradient of a piece, added to its sum
_SUMMED = 10  # a gradient that is added up in float32: zeros before, rounding afterwards
_PIECE_STARTED = 52  # an out made by `numerics.surrogate_out`, where queries travel

PICKED_BATCHES = 4
"""The most batch rows that are sent as strips from where they lie; larger batches are packed."""
_SEGMENTS = 2  # the most that a rank may hold if rows of head shards are computed as they arrive


def packed(sends: Iterable[Move], size: Size, rank: int, done: set[tuple[int, int]]) -> int:
    """For a rank's own block that it sends at a step. `done`: rows packed before; rows packed now are added to it."""
    fresh = to_pack((m for m in sends if m.owner == rank), done)
    done.update(m.rows for m in fresh)
    return sum([_PACKED * size(m) for m in fresh])


def added(arrivals: Iterable[Move], size: Size, *, narrow: bool) -> int:
    """For gradients that have arrived."""
    return (_NARROW_ADDED if narrow else _ADDED) * sum([size(m) for m in arrivals])


def made(result_sends: Iterable[Move], size: Size, *, narrow: bool) -> int:
    """For gradients of foreign blocks, beyond what a kernel does for gradients of a rank's own block."""
    return (_NARROW_MADE if narrow else _MADE) * sum([size(m) for m in result_sends])


class Traits(Protocol):
    """The fields of `rates.Rates` that a kernel says of itself: how its results are merged and gradients added up."""

    @property
    def in_pieces(self) -> bool: ...

    @property
    def merged_once(self) -> bool: ...

    @property
    def writes_gradients(self) -> bool: ...

    @property
    def faster_squares(self) -> bool: ...


def merged(pass_plan: PassPlan, pass_name: PassName, compute: Compute, how: Traits, *, first: bool) -> int:
    """For merging the results of a launch into those of earlier launches; `first`: there were none."""
    problem = pass_plan.problem
    rows, tallest = compute.heights
    d, dv, batch = problem.head_dim, problem.value_dim, problem.batch
    if pass_name == "forward":
        if how.in_pieces:  # each piece is merged; the first, where it has all rows, is kept as it is
            bytes_each = _PIECE_MERGED_ONCE if how.merged_once else _PIECE_MERGED
            return bytes_each * (rows - first * tallest) * problem.heads * dv * batch
        return 0 if first else _RUNNING * tallest * problem.heads * dv * batch
    if not how.in_pieces:
        return 0
    started = _PIECE_STARTED * tallest if pass_plan.side == "q" else 0  # else out is at hand
    queries = started * dv + _PIECE_ADDED * rows * d
    return batch * (queries * problem.heads + _PIECE_ADDED * compute.columns * problem.kv_heads * (d + dv))


def summed(pass_plan: PassPlan, pass_name: PassName, rank: int, how: Traits) -> int:
    """For the gradients of a rank's own rows, of one group of heads; the forward pass has none."""
    if pass_name == "forward":
        return 0
    p, member = pass_plan.problem, rank // pass_plan.stride
    queries = p.q_layout.count(member) * p.heads * p.head_dim
    keys = p.k_layout.count(member) * p.kv_heads * (p.head_dim + p.value_dim)
    if pass_plan.alone(rank):  # see `kernels.whole`
        if how.in_pieces:
            return 0
        keys = 0 if how.writes_gradients else keys
    return _SUMMED * p.batch * (queries + keys)


def comes_in_order(plan: Plan, *, in_pieces: bool = False, faster_squares: bool = False) -> bool:
    """Whether a head shard is computed as it arrives, rank after rank; else its rows are put in natural order first.

    It is if that order is the natural one. It also is if ranks hold few segments and the kernel takes any tiles in one
    launch: many segments would make too many tiles. But not if rows that nobody needs are left out between nodes: more
    rows can be left out in natural order. Nor if that order makes a box or a causal square, on which the kernel is
    faster.

    plan: one whose head shards are in natural order.
    """
    trims = any(part.trims for _, part in plan.passes())
    square = faster_squares and _is_square(plan)
    return _in_order(plan.problem.q_layout, plan.inner, in_pieces or trims or square)


def _is_square(plan: Plan) -> bool:
    """Whether a rank computes a box or a causal square and no more, in natural order."""
    compute = plan.forward.alone(0)
    if compute is None or compute.count != 1:
        return False
    (tile,) = compute.tiles
    return tile.hi >= tile.q_stop - 1 - tile.k_start  # no window


@lru_cache(maxsize=64)
def _in_order(layout: Layout, inner: int, in_pieces: bool) -> bool:
    """Between nodes, segments with steps stay as they arrive: see `Layout.sorted`. Several steps cannot meet."""
    one_step = len({s.step for shard in layout.shards for s in shard}) == 1
    if one_step and not in_pieces and max(map(len, layout.shards)) <= _SEGMENTS:
        return True
    if inner == layout.ranks and any(s.step > 1 for shard in layout.shards for s in shard):
        return False
    return all(a.start < b.start for shard in layout.joined(inner).shards for a, b in pairwise(shard))


class Resharded(NamedTuple):
    """Bytes for one group of heads: see `by_heads`.

    Attributes:
        packed: before it is sent.
        computed: before, and after, it is computed.
        kept: for the backward pass, when all groups have been computed.
        home: when it has come home.
    """

    packed: int
    computed: int
    kept: int
    home: int


def resharded(plan: Plan, pass_name: PassName, rank: int, how: Traits, *, picks: bool) -> list[Resharded]:
    """For taking a rank's tensors to head shards and back, for each group of heads.

    `picks`: the transport sends rows from where they lie, unless the batch is large, into inboxes that the next
    pass overwrites.
    """
    p = plan.problem
    packs = not picks or p.batch > PICKED_BATCHES
    mine, everyone = p.q_layout.count(rank) * plan.inner, plan.forward.problem.q_layout.count(rank // plan.inner)
    as_it_comes = comes_in_order(plan, in_pieces=how.in_pieces, faster_squares=how.faster_squares)
    groups = []
    for there, back in head_fields(plan, pass_name):
        coming, leaving = (sum(field.bytes(p.batch) for field in fields) for fields in (there, back))
        # Tensors are put in natural order, in memory of their own, and results back in the order of ranks.
        computed = 0 if as_it_comes else _COPIED * everyone * (coming + leaving)
        packed = _COPIED * mine * coming if packs else 0
        stays = pass_name == "backward" or not picks or not as_it_comes
        kept = 0 if stays else _COPIED * everyone * coming
        groups.append(Resharded(packed, computed, kept, _COPIED * mine * leaving))
    return groups
