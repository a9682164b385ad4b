"""Count the bytes that a rank reads and writes between kernels: to pack, copy, merge, add and reorder tensors.

The counts follow `runtime.executor` and `runtime.reshard`. The simulation in `predicted_time` turns them into seconds.
"""

from __future__ import annotations

from typing import NamedTuple

from burst_portable.planning.call import KernelTraits
from burst_portable.planning.messages import exchanges, local_block_size, row_size
from burst_portable.planning.plans import PassName, PassPlan, Plan
from burst_portable.planning.rank_order import keeps_rank_order
from burst_portable.planning.schedule import Compute

# In bytes of the message:
PACK = COPY = 2  # read and written once: `runtime.blocks.Blocks.copy`, `runtime.reshard`
# Received gradients are read and added to sums, which are twice as wide if the gradients were rounded:
# `runtime.block_gradients.BlockGradients._add`.
ADD, ADD_ROUNDED = 3, 5
# Sums are zeroed, then read and written by the kernel (`BlockGradients.accumulators` there). Rounded gradients are read
# again and rounded into their message (`_message`).
ACCUMULATE, ACCUMULATE_ROUNDED = 3, 9
# Bytes for each number of a 16-bit tensor:
_RUNNING = 8  # a kernel that merges in its epilogue reads and writes its running out
_MERGE_PART, _MERGE_PART_ONCE = 26, 10  # merge a part of a tile by `numerics.merge_into`; in one pass over memory
_ADD_PART = 10  # add a gradient of a part of a tile to its sum
_SUM = 10  # sum a gradient in float32: zeros before, rounding after
# Reads and writes of each score in the round of K or of V: `runtime.score_rows`
SCORES = {"forward": 2.5, "backward": 1.75}
_SURROGATE = 52  # make out by `numerics.surrogate_out`, if queries are sent

STRIDED_BATCHES = 4
"""Largest batch whose rows are sent as strips without packing; larger batches are packed."""


def joined_bytes(pass_plan: PassPlan, rank: int) -> int:
    """Return the bytes for the local block in a launch with blocks that arrived: one copy, and adding its gradients."""
    block, (call, side) = local_block_size(pass_plan, rank), (pass_plan.call, pass_plan.side)
    if pass_plan.name == "forward":
        return COPY * block
    rows = block // row_size(call, side, is_result=False)
    return COPY * block + ADD * rows * row_size(call, side, is_result=True)


def merged_bytes(pass_plan: PassPlan, compute: Compute, traits: KernelTraits, *, first: bool) -> int:
    """Return the bytes for merging a launch into earlier ones. `first`: whether there was none."""
    call = pass_plan.call
    rows, tallest = compute.heights
    d, dv, batch = call.head_dim, call.v_head_dim, call.batch
    if pass_plan.name == "forward":
        if traits.splits_tiles:  # each part is merged; the first is kept as it is if it has all rows
            bytes_each = _MERGE_PART_ONCE if traits.single_pass_merge else _MERGE_PART
            return bytes_each * (rows - first * tallest) * call.heads * dv * batch
        return 0 if first else _RUNNING * compute.covered[0] * call.heads * dv * batch
    if not traits.splits_tiles:
        return 0
    surrogate = _SURROGATE * tallest if "q" in pass_plan.sides else 0  # else only K and V are sent, and out is local
    queries = surrogate * dv + _ADD_PART * rows * d
    return batch * (queries * call.heads + _ADD_PART * compute.columns * call.kv_heads * (d + dv))


def summed_bytes(pass_plan: PassPlan, rank: int, traits: KernelTraits) -> int:
    """Return the bytes for summing the gradients of the local rows, for one group of heads; 0 in the forward pass."""
    if pass_plan.name == "forward":
        return 0
    call, member = pass_plan.call, pass_plan.member(rank)
    queries = call.layout.count(member) * call.heads * call.head_dim
    keys = call.k_layout.count(member) * call.kv_heads * (call.head_dim + call.v_head_dim)
    if pass_plan.single_compute(rank):  # see `kernels.base`
        if traits.splits_tiles:
            return 0
        keys = 0 if traits.writes_gradients else keys
    return _SUM * call.batch * (queries + keys)


class ReshardTraffic(NamedTuple):
    """Bytes of memory that one group of heads reads and writes around its exchanges: see `runtime.reshard`."""

    pack: int  # before tensors are sent to head shards
    reorder: int  # before and after the computation, to change the order of rows
    save: int  # for the backward pass, after all groups have been computed
    unpack: int  # after results have arrived at their sequence shards


def reshard_traffic(
    plan: Plan, pass_name: PassName, rank: int, traits: KernelTraits, *, sends_strided: bool
) -> list[ReshardTraffic]:
    """Return the memory traffic of a rank's exchanges, for each group of heads.

    `sends_strided`: whether the transport sends rows without packing, unless the batch is large, into inboxes that the
    next pass overwrites.
    """
    call = plan.call
    packs = not sends_strided or call.batch > STRIDED_BATCHES
    rows = call.layout.count(rank) * plan.head_parallel_size
    node_rows = plan.forward.call.layout.count(plan.forward.member(rank))
    in_rank_order = keeps_rank_order(plan, traits)
    groups = []
    for to_heads, to_sequence in exchanges(plan, pass_name):
        there, back = (sum(field.bytes(call.batch) for field in fields) for fields in (to_heads, to_sequence))
        # Tensors are copied to natural order, and results back to the order of ranks.
        reorder = 0 if in_rank_order else COPY * node_rows * (there + back)
        pack = COPY * rows * there if packs else 0
        stays = pass_name == "backward" or not sends_strided or not in_rank_order
        save = 0 if stays else COPY * node_rows * there
        groups.append(ReshardTraffic(pack, reorder, save, COPY * rows * back))
    return groups


def result_bytes(pass_plan: PassPlan, rank: int, groups: int) -> int:
    """Return the bytes of a rank's results in the dtype of the inputs: out, or dQ, dK and dV."""
    call, member = pass_plan.call, pass_plan.member(rank)
    queries, keys = call.layout.count(member) * call.heads, call.k_layout.count(member) * call.kv_heads
    if pass_plan.name == "forward":
        return groups * call.batch * call.itemsize * queries * call.v_head_dim
    return groups * call.batch * call.itemsize * (queries * call.head_dim + keys * (call.head_dim + call.v_head_dim))
