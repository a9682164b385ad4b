"""Count the work of a pass on one rank: FLOPs, and bytes of its tensors, launches, exchanges and blocks.

FLOPs count the visible pairs of the mask: forward 2·pairs·H·(D + Dv), backward 2·pairs·H·(3·D + 2·Dv). For Dv = D these
are the usual 4·pairs·H·D and 2.5 times that.
"""

from __future__ import annotations

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.head_division import heads_per_rank
from burst_portable.planning.messages import exchanges, message_sizes
from burst_portable.planning.plans import PassName, Plan
from burst_portable.planning.schedule import Compute, interleave_groups


def pass_flops(call: AttentionCall, pass_name: PassName, num_pairs: int) -> int:
    """Return the FLOPs of a pass over `num_pairs` visible pairs per head."""
    d, dv = call.head_dim, call.v_head_dim
    return 2 * num_pairs * call.heads * call.batch * ((d + dv) if pass_name == "forward" else (3 * d + 2 * dv))


def pass_memory(call: AttentionCall, pass_name: PassName, compute: Compute) -> int:
    """Return the least bytes that one launch reads and writes: each input row once, each result once.

    Rows that a kernel reads again are not counted, nor are sums that it reads to add to them.
    """
    queries, keys = compute.covered
    lse = queries * call.heads
    q, out = lse * call.head_dim, lse * call.v_head_dim
    k, v = (keys * call.kv_heads * d for d in (call.head_dim, call.v_head_dim))
    data, wide = call.itemsize, max(call.itemsize, 4)
    if pass_name == "forward":
        return call.batch * (data * (q + k + v) + wide * (out + lse))
    return call.batch * (data * (q + k + v + out) + wide * (2 * lse + q + k + v))  # LSE and delta; dQ, dK, dV


def reshard_bytes(plan: Plan, pass_name: PassName, rank: int, *, received: bool = False) -> list[tuple[int, int]]:
    """Return (bytes to head shards, bytes back) that a rank sends, or receives, for each group of heads.

    LSE is not included: it is sent back only if the call requests it.
    """
    call = plan.call
    rows, node_rows = call.layout.count(rank), plan.forward.call.layout.count(plan.forward.member(rank))
    # To head shards a rank sends its rows to every other rank; back, it sends the rows of the other ranks.
    local, remote = rows * (plan.head_parallel_size - 1), node_rows - rows
    rows_there, rows_back = (remote, local) if received else (local, remote)
    return [
        (
            rows_there * sum(field.size(call.batch) for field in to_heads),
            rows_back * sum(field.bytes(call.batch) for field in to_sequence),
        )
        for to_heads, to_sequence in exchanges(plan, pass_name)
    ]


def peak_block_bytes(plan: Plan, pass_name: PassName, rank: int) -> int:
    """Return the bytes of the largest set of remote blocks, of all groups of heads, in a rank's memory at once."""
    pass_plan = plan.pass_plan(pass_name)
    sizes = [message_sizes(pass_plan, tensor) for tensor in plan.tensors]
    blocks: dict[tuple[int, int], int] = {}
    peak = 0
    for group, step in interleave_groups(pass_plan.steps_of(rank), 1 if plan.heads else plan.head_groups):
        blocks.update({(group, m.owner): max(size(m) for size in sizes) for m in step.receives})
        peak = max(peak, sum(blocks.values()))
        for owner in step.released:
            blocks.pop((group, owner), None)
    return peak


def local_bytes(plan: Plan, pass_name: PassName, rank: int) -> int:
    """Return the bytes of a rank's local tensors, after heads are resharded.

    Q, K, V, out and LSE; in the backward pass also dO, delta and gradients.
    """
    heads, kv_heads = heads_per_rank(plan.call, plan.head_parallel_size)
    call, member = plan.pass_plan(pass_name).call, plan.forward.member(rank)  # the call has one head group
    data, wide = call.itemsize, max(call.itemsize, 4)
    queries = call.batch * call.layout.count(member) * heads
    keys = call.batch * call.k_layout.count(member) * kv_heads
    d, dv = call.head_dim, call.v_head_dim
    inputs = data * (queries * d + keys * (d + dv))
    if pass_name == "forward":
        return inputs + wide * queries * (dv + 1)
    results = data * 2 * queries * dv + wide * 2 * queries  # out, dO; LSE, delta
    return inputs + results + wide * (queries * d + keys * (d + dv))
