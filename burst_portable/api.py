"""`attention` and `partial_attention`: what users call. A call is checked, planned and remembered here, then run.

Shapes: B batch, S rows of this rank, Hq query heads, Hkv key/value heads, D head size, Dv value size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from burst_portable.autocast import as_autocast_would, own_precision
from burst_portable.autograd import Call, apply
from burst_portable.backends.registry import choose_kernel, for_device
from burst_portable.checks import (
    check_data,
    check_no_transforms,
    check_tensor,
    check_tensors,
    checked_scale,
    checked_softcap,
    not_to_be_kept,
    tell_the_others,
)
from burst_portable.choices import Choices, Request, choose, requested
from burst_portable.comm.agreement import Named, Statement, named, statement
from burst_portable.comm.base import Transport
from burst_portable.compiling import outside_graphs
from burst_portable.errors import InputError, explain, shown
from burst_portable.kernels.contract import KernelProblem, Options, as_kernels_take, row_delta_of, takes_pieces
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.messages import Inboxes, inboxes
from burst_portable.numerics import State, finished
from burst_portable.runtime import PlainRuntime
from burst_portable.strategies.base import Strategy
from burst_portable.tiles import Tile, checked_tiles


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = ...,
    mesh: MeshLike = ...,
    strategy: Strategy | str = ...,
    layout: Layout | str = ...,
    seq_len: int | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    kernel: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = ...,
    mesh: MeshLike = ...,
    strategy: Strategy | str = ...,
    layout: Layout | str = ...,
    seq_len: int | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    kernel: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = ...,
    mesh: MeshLike = ...,
    strategy: Strategy | str = ...,
    layout: Layout | str = ...,
    seq_len: int | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    kernel: str = ...,
    deterministic: bool | None = ...,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


@outside_graphs
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = "causal",
    mesh: MeshLike = None,
    strategy: Strategy | str = "auto",
    layout: Layout | str = "zigzag",
    seq_len: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose rows are spread over the ranks of a mesh; differentiable once.

    Every rank makes the same call with its own rows, in the order of the layout (`positions` lists them, `shard`
    cuts them out).

    Args:
        q: ``[B, S, Hq, D]``, float32, bfloat16, float16 or float64; the last stride is 1. Under autocast, all
            three are cast to its dtype first, float64 excepted, as torch's scaled_dot_product_attention does.
        k, v: ``[B, S, Hkv, D]`` and ``[B, S, Hkv, Dv]``; Hq is a multiple of Hkv; they are never repeated.
        mask: a `Mask`, or its short form (see `Mask.parse`), in global positions.
        mesh: a `Mesh` (keep it: it remembers plans), a DeviceMesh of one axis, a process group, or None for the
            default group or, without one, this process alone.
        strategy: "auto" or one of the registry's names, or a strategy object with its options.
        layout: which rows a rank holds: "contiguous", "zigzag", "striped", or a `Layout`; for masks of documents also
            "whole_documents" and "document_zigzag". `plan_on` tells which is fastest.
        seq_len: tokens of the whole sequence. None takes the length of a `Layout`, or assumes that all ranks hold
            equally many rows.
        scale: factor of the scores; 1/sqrt(D) unless given.
        softcap: scores become softcap·tanh(scores / softcap).
        sinks: one logit per query head, ``[Hq]``, that takes part in every row's softmax without a value; -inf is
            no sink. As with q, k and v, numbers are not read, so none is refused: +inf and NaN have NaN gradients.
        kernel: "auto", or the name of one of the backend's kernels.
        deterministic: whether gradients must be bit-identical every time, which rules out the fastest kernels.
            None follows `torch.use_deterministic_algorithms`.
        return_lse: also return LSE ``[B, Hq, S]``, float32 (float64 for float64), with no gradient.

    Returns:
        ``[B, S, Hq, Dv]`` in q's dtype, or autocast's; rows that see nothing are 0 (and their LSE -inf).

    Raises:
        InputError: shapes, names, a mask or a layout that do not fit together (a ValueError).
        DtypeError: dtypes that differ, or that no kernel takes (a TypeError).
        UnsupportedError: a strategy, kernel, backend or transport that was named cannot serve this call.
        CommunicationError: something went wrong between ranks.
    """
    mesh = as_mesh(mesh)
    try:
        check_no_transforms(q, k, v, sinks)
        if not isinstance(return_lse, bool):
            raise InputError(explain("return_lse must be a bool", got=shown(return_lse), allowed="True or False"))
        request = requested(mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic)
        q, k, v = as_autocast_would(q, k, v)
        key = return_lse, _key(request, q, k, v, sinks)
        call = mesh.remembered(key, lambda: _prepare(q, k, v, sinks, mesh, request, return_lse))
        q, k, v = map(as_kernels_take, (q, k, v))
    except Exception as refusal:
        tell_the_others(mesh, refusal, q, k, v)
        raise
    out, lse = apply(call, mesh, q, k, v, sinks)
    if not return_lse:
        return out
    assert lse is not None, "LSE was asked for"
    return out, lse


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


# ------------------------------------------------------------------------------------ parts of an attention


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Iterable[Tile],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
) -> State:
    """Attention of q over the pairs of the given tiles alone: a partial result for `merge`. No gradients.

    Args:
        q: ``[B, Sq, Hq, D]``, dtypes and strides as in `attention`.
        k, v: ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``; Sk may differ from Sq.
        tiles: which rows see which columns, in local indices (see `tiles.banded_box`); disjoint. Rows of a tile may
            see nothing.
        scale, softcap, kernel: as in `attention`.

    Returns:
        (out ``[B, Sq, Hq, Dv]``, LSE ``[B, Hq, Sq]``) in the accumulation dtype; rows outside every tile: 0, -inf.

    Raises:
        InputError, DtypeError, UnsupportedError: as `attention`; also for tiles that overlap or reach past their block,
            and for tensors that require gradients.
    """
    q, k, v = as_autocast_would(q, k, v)
    check_tensors(q, k, v, same_rows=False)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise InputError(
            "partial_attention has no gradient: detach its tensors first, or call attention(), which has one"
        )
    tiles = checked_tiles(tiles, q.shape[1], k.shape[1])
    backend = for_device(q.device.type)
    options = Options(checked_scale(scale, q.shape[3]), checked_softcap(softcap))
    chosen, _ = choose_kernel(backend, KernelProblem.of(q, k, v, options, q.device.type), kernel)
    q, k, v = map(as_kernels_take, (q, k, v))
    with torch.no_grad(), own_precision(q.device):
        return finished(chosen.attend(q, k, v, tiles, options), q.dtype)
