"""A call of `attention` before it runs: checked, planned, and remembered by its mesh."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from burst_portable.autocast import as_autocast_would
from burst_portable.autograd import Call
from burst_portable.checks import (
    check_data,
    check_no_transforms,
    check_tensor,
    check_tensors,
    not_to_be_kept,
    tell_the_others,
)
from burst_portable.choices import Choices, Request, choose, requested
from burst_portable.comm.agreement import Named, Statement, named, statement
from burst_portable.comm.base import Transport
from burst_portable.errors import InputError, explain, shown
from burst_portable.kernels.contract import as_kernels_take, row_delta_of, takes_pieces
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh
from burst_portable.messages import Inboxes, inboxes
from burst_portable.runtime import PlainRuntime
from burst_portable.strategies.base import Strategy

Arguments: TypeAlias = tuple[
    Mask | str, Strategy | str, Layout | str, int | None, float | None, float | None, str, bool | None
]
"""mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic: as `attention` takes them."""


def called(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, return_lse: bool, arguments: Arguments
) -> tuple[Call, Tensor, Tensor, Tensor]:
    """What a call of `attention` runs, and q, k and v as its kernel takes them. Raises what `attention` refuses."""
    try:
        check_no_transforms(q, k, v, sinks)
        if not isinstance(return_lse, bool):
            raise InputError(explain("return_lse must be a bool", got=shown(return_lse), allowed="True or False"))
        request = requested(*arguments)
        q, k, v = as_autocast_would(q, k, v)
        key = return_lse, _key(request, q, k, v, sinks)
        call = mesh.remembered(key, lambda: _prepare(q, k, v, sinks, mesh, request, return_lse))
        q, k, v = map(as_kernels_take, (q, k, v))
    except Exception as refusal:
        tell_the_others(mesh, refusal, q, k, v)
        raise
    return call, q, k, v


def _key(request: Request, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Hashable:
    """Everything a call depends on: a call with an equal key runs like the remembered one, without another check."""
    try:
        return (
            request,
            not_to_be_kept(q, k, v, sinks),
            type(q), q.shape, q.dtype, q.device, q.layout,
            type(k), k.shape, k.dtype, k.device, k.layout,
            type(v), v.shape, v.dtype, v.device, v.layout,
            sinks is None or (type(sinks), sinks.shape, sinks.dtype, sinks.device, sinks.layout),
        )  # fmt: skip
    except (AttributeError, RuntimeError):  # not tensors, or tensors without a shape (nested ones)
        check_tensors(q, k, v)
        if sinks is not None:
            check_tensor("sinks", sinks)
        raise


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, request: Request, with_lse: bool
) -> Call:
    """Everything that can be refused is refused here, before a byte moves."""
    check_data(mesh, q, k, v)
    chosen = choose(q, k, v, sinks, mesh, request)
    transport, _ = mesh.transport_for(q.device.type, direct=chosen.plan.direct)
    if chosen.plan.direct and not transport.direct:
        # `auto` may have counted on a direct transport, which the ranks have just found out they cannot have.
        chosen = choose(q, k, v, sinks, mesh, request)
        transport, _ = mesh.transport_for(q.device.type, direct=chosen.plan.direct)
    plan = chosen.plan
    stated = _statement(chosen, transport, q, sinks, with_lse)
    inbox = inboxes(plan, mesh.rank) if transport.direct else Inboxes()
    return Call(
        plan,
        PlainRuntime(chosen.kernel, transport, inbox.places),
        replace(chosen.options, makes_way=transport.goes_first and chosen.plan.moves_beside_kernels),
        forward_statement=stated.of_pass("forward"),
        backward_statement=stated.of_pass("backward"),
        inboxes=(inbox.forward, inbox.backward),
        by_out=plan.backward.side == "kv" and takes_pieces(chosen.kernel),
        with_lse=with_lse,
        row_delta=row_delta_of(chosen.kernel),
    )


def _statement(chosen: Choices, transport: Transport, q: Tensor, sinks: Tensor | None, with_lse: bool) -> Statement:
    """What every rank must state alike. Vendors must not differ: their partial results would be mixed.

    Kernels may differ if they take rows in the same order.
    """
    plan, backend, options = chosen.plan, chosen.backend, chosen.options
    p, forward, backward = plan.problem, plan.forward, plan.backward
    narrow = ", narrow gradients" if p.narrow else ""
    inside = f" in nodes of {plan.inner}" if plan.reshard and plan.nodes > 1 else ""
    moves = f"{plan.strategy}{inside} by {plan.moves('forward')} with {plan.travels('backward')} backward{narrow}"
    routes = (
        plan.reshard,
        plan.inner,
        plan.groups,
        forward.side,
        forward.route,
        backward.side,
        backward.route,
        backward.results,
    )
    return statement(
        {
            "backend": backend.name,
            "process group": backend.capabilities.process_group,
            "ranks per node": str(transport.node or "not told"),
            "batch": str(p.batch),
            "heads": f"{p.heads}, {p.kv_heads} of K and V",
            "head sizes": f"{p.head_dim}, {p.value_dim} of V",
            "tokens": str(p.q_layout.length),
            "dtype": str(q.dtype).removeprefix("torch."),
            "mask": named(str(p.mask), p.mask.regions),
            "layout": named(p.q_layout.name, p.q_layout.shards),
            "strategy": named(moves, (*routes, p.narrow)),
            "rows that cross nodes": _order_of_rows(chosen),
            "scale": repr(options.scale),
            "softcap": repr(options.softcap),
            "sinks": "no" if sinks is None else "yes",
            "LSE sent": "yes" if plan.reshard and with_lse else "no",
        }
    )


def _order_of_rows(chosen: Choices) -> Named:
    """The order in which a node's rows go to other nodes: kernels differ in the order that they want."""
    plan = chosen.plan
    if not plan.reshard or plan.nodes == 1:
        return named("none are put together", ())
    layout = plan.forward.problem.q_layout
    return named(f"in the order that the kernel {chosen.kernel.name!r} takes", layout.shards)
