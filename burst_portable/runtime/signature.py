"""Return the facts of a call that ranks compare before a pass: see `comm.agreement`."""

from __future__ import annotations

from burst_portable.backends.base import Backend
from burst_portable.comm.agreement import CallSignature, HashedValue, call_signature, hashed_value
from burst_portable.comm.base import Transport
from burst_portable.kernels.base import Kernel
from burst_portable.mesh import Mesh
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.runtime.request import Request


def signature_of(
    plan: Plan, backend: Backend, kernel: Kernel, transport: Transport, tokens: HashedValue, *, with_lse: bool
) -> CallSignature:
    """Return the facts that must be equal on all ranks. Vendors must not differ: their partial results would be mixed.

    Kernels may differ if they take rows in the same order.
    """
    call, forward = plan.call, plan.forward
    order_of_rows = hashed_value("none", ())
    if plan.heads and plan.ring_size > 1:
        order = f"in the order that the kernel {kernel.name!r} takes"
        order_of_rows = hashed_value(order, forward.call.layout.shards)
    return call_signature(
        {
            "backend": backend.name,
            "process group": backend.capabilities.process_group,
            "ranks per node": str(transport.ranks_per_node or "not given"),
            "batch": str(call.batch),
            "heads": f"{call.heads}, {call.kv_heads} of K and V",
            "head sizes": f"{call.head_dim}, {call.v_head_dim} of V",
            "tokens": tokens,
            "dtype": call.dtype,
            "mask": hashed_value(str(call.mask), call.mask.regions),
            "layout": hashed_value(call.layout.name, call.layout.shards),
            "strategy": plan_fact(plan),
            "rows that cross nodes": order_of_rows,
            "scale": repr(call.scale),
            "softcap": repr(call.softcap),
            "sinks": "yes" if call.sinks else "no",
            "dropout": repr(call.dropout and call.dropout[:2]),
            "LSE sent": "yes" if plan.heads and with_lse else "no",
        }
    )


def tokens_fact(call: AttentionCall, rows: int, mesh: Mesh, request: Request) -> HashedValue:
    """Return the tokens of the unsharded sequence. Its name has the rows of this rank if they define the number."""
    length = call.layout.length
    return hashed_value(str(length) if request.has_length else f"{rows} rows x {mesh.size} ranks = {length}", length)


def plan_fact(plan: Plan) -> HashedValue:
    """Return what a plan sends and along which routes, which must be equal on all ranks."""
    forward, backward = plan.forward, plan.backward
    rounded = ", rounded gradients" if backward.rounds_gradients else ""
    inside = ""
    if plan.heads and plan.ring_size > 1:
        across = plan.head_spacing > 1
        inside = f" across {plan.head_parallel_size} nodes" if across else f" in nodes of {plan.head_parallel_size}"
    sent = plan.circulates("backward")
    groups = f" in {plan.head_groups} groups of heads" if plan.head_groups > 1 else ""
    transfer = plan.transfer("forward").replace(", ", " and ")
    strategy = f"{plan.strategy}{inside}{groups} (transfer {transfer}, backward {sent}{rounded})"
    sides = forward.side, backward.side, backward.rounds_gradients
    routes = forward.route, backward.route, backward.gradient_route, forward.helpers, backward.helpers
    return hashed_value(strategy, (plan.heads, plan.head_groups, plan.score_rows, *sides, *routes))
