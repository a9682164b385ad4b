"""A call of `attention` before it runs: checked, planned, and remembered by its mesh."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.backends.registry import choose_kernel, rates_of
from burst_portable.comm.agreement import CallSignature, HashedValue, call_signature, hashed_value
from burst_portable.comm.base import Transport
from burst_portable.errors import InputError, shown
from burst_portable.kernels.base import (
    Kernel,
    KernelProblem,
    Options,
    as_kernels_take,
    faster_on_squares,
    row_delta_of,
    takes_pieces,
)
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.messages import Inboxes, inboxes
from burst_portable.planning.plans import Plan
from burst_portable.runtime.autograd import Call
from burst_portable.runtime.observer import PlainRuntime
from burst_portable.runtime.validation import (
    as_number,
    broadcast_error,
    check_data,
    check_kept,
    check_no_transforms,
    check_rows,
    check_sinks,
    check_tensor,
    check_tensors,
    checked_device,
    checked_scale,
    checked_softcap,
    not_to_be_kept,
    whole_length,
)
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import layout_of, mask_of, plan, planned
from burst_portable.strategies.registry import strategy_of
from burst_portable.strategies.ulysses import in_rank_order
from burst_portable.utils.torch_modes import as_autocast_would
from burst_portable.utils.values import size


class Request(NamedTuple):
    """The arguments of a call besides its tensors; part of the key under which its plan is remembered."""

    mask: Mask | str
    strategy: Strategy | str
    layout: Layout | str
    seq_len: int | None
    scale: float | None
    softcap: float | None
    kernel: str
    deterministic: bool


def requested(
    mask: Mask | str,
    strategy: Strategy | str,
    layout: Layout | str,
    seq_len: int | None,
    scale: float | None,
    softcap: float | None,
    kernel: str,
    deterministic: bool | None,
) -> Request:
    """The arguments, with numbers as ints or floats: 1, 1.0 and True are equal as keys.

    Raises `InputError` for numbers, names and flags of the wrong type.
    """
    deterministic = _checked_deterministic(deterministic)
    if seq_len is not None:
        seq_len = size("seq_len", seq_len)
    if scale is not None:
        scale = as_number("scale", scale)
    if softcap is not None:
        softcap = as_number("softcap", softcap)
    if not isinstance(kernel, str):
        raise InputError("kernel must be a name", got=shown(kernel), allowed="'auto', or a kernel of the backend")
    return Request(mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic)


def _checked_deterministic(given: bool | None) -> bool:
    """The flag that a user passed; None follows torch's setting."""
    if given is None:
        return torch.are_deterministic_algorithms_enabled()
    if not isinstance(given, bool):
        allowed = "True, False, or None to do as torch does"
        raise InputError("deterministic must be a bool or None", got=shown(given), allowed=allowed)
    return given


@dataclass(frozen=True, slots=True)
class Choices:
    """What a call runs.

    Attributes:
        problem: what the kernel said it can serve; where heads are sharded, with the heads of one rank.
        why_kernel: why this kernel, in words.
        options: what the kernel is called with.
    """

    plan: Plan
    backend: Backend
    problem: KernelProblem
    kernel: Kernel
    why_kernel: str
    options: Options


def choose(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, request: Request, device: str | None = None
) -> Choices:
    """What a call with these tensors runs on, or with tensors like them on another type of device (`device`).

    Raises what `attention` raises before a byte moves.
    """
    check_tensors(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q)
    check_kept(q, k, v, sinks)
    device = q.device.type if device is None else device
    backend = mesh.backend_for(device)
    options = Options(checked_scale(request.scale, q.shape[3]), checked_softcap(request.softcap), request.deterministic)
    whole = KernelProblem.of(q, k, v, options, device)
    by_setting = request.kernel == "auto" and mesh.config.kernel != "auto"
    named = mesh.config.kernel if by_setting else request.kernel
    made = _plan(q, k, v, mesh, request, backend, lambda: choose_kernel(backend, whole, named)[0])
    local = made.forward.call  # of fewer heads, where heads are sharded
    problem = replace(whole, heads=local.heads, kv_heads=local.kv_heads)
    kernel, _ = choose_kernel(backend, problem, named)
    why = "the first of the backend's that serves it" if named == "auto" else "named"
    suited = plan_for_kernel(made, kernel)
    suited.forward.steps_of(mesh.rank)  # kept; a layout whose segments cannot meet is found here, and not in a pass
    return Choices(
        suited,
        backend,
        problem,
        kernel,
        "named by the settings (BURST_KERNEL)" if by_setting else why,
        options,
    )


def plan_for_kernel(plan: Plan, kernel: Kernel) -> Plan:
    """The plan as it suits this kernel: rows of head shards stay as they arrive if it takes any tiles in one launch."""
    if not plan.heads or takes_pieces(kernel):
        return plan
    return in_rank_order(plan, faster_squares=faster_on_squares(kernel))


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh,
    request: Request,
    backend: Backend,
    kernel: Callable[[], Kernel],
) -> Plan:
    """The plan of a call. `kernel` chooses the kernel for all heads; it is called only if plans are priced."""
    rows = q.shape[1]
    length = whole_length(request.layout, request.seq_len, rows, mesh)
    mask = mask_of(request.mask, length)
    layout = layout_of(request.layout, length, mesh.size, mask)
    check_rows(layout, rows, mesh)
    strategy = _strategy(request.strategy, mesh, q.device.type, backend, kernel, q.dtype, q.shape[3])
    problem = AttentionCall(
        mask=mask,
        layout=layout,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        batch=q.shape[0],
        itemsize=q.dtype.itemsize,
    )
    return planned(strategy, problem)


def _strategy(
    asked: Strategy | str, mesh: Mesh, device: str, backend: Backend, kernel: Callable[[], Kernel],
    dtype: torch.dtype, head_dim: int,
) -> Strategy:  # fmt: skip
    """The strategy that a user passed. "auto" predicts with the file of rates that the settings name, or else with
    rates that were measured on machines like this one.
    """
    if not isinstance(asked, str) or asked != "auto":  # an array would be compared element by element
        return strategy_of(asked, mesh.inner)
    named = str(dtype).removeprefix("torch.")
    first = mesh.size > 1 and mesh.transport(device).high_priority
    rates = rates_of(backend, mesh.size, kernel(), mesh.config.rates, named, head_dim, high_priority=first)
    if rates.direct and not mesh.may_be_direct(device):
        rates = replace(rates, direct=())
    return AutoStrategy(inner=mesh.inner, rates=rates)


def plan_on(
    mesh: MeshLike = None,
    *,
    seq_len: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 128,
    value_dim: int | None = None,
    mask: Mask | str = "causal",
    strategy: Strategy | str = "auto",
    layout: Layout | str = "auto",
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | int | None = None,
    kernel: str = "auto",
    deterministic: bool | None = None,
) -> Plan:
    """What `attention` would do on this mesh, before there are tensors; above all, which layout is fastest.

    Like `plan`, but it knows this machine, its links and the kernel that will compute. Pass its `.layout` to `shard`
    and `attention`; `.reason` says why. The same question has the same answer on every rank.

    Args:
        mesh, mask, strategy, kernel, deterministic: as `attention` takes them.
        seq_len, heads, kv_heads, head_dim, value_dim, layout, batch: as `plan` takes them.
        dtype: of q, k and v.
        device: of q, k and v; None for torch's default.

    Raises:
        InputError: as `plan`, and a dtype or device that torch does not know.
        UnsupportedError: no kernel, or not the named one, serves such a call; or as `plan`.
    """
    mesh = as_mesh(mesh)
    kv_heads = heads if kv_heads is None else kv_heads
    planner = strategy_on(
        mesh, strategy, device, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim, dtype=dtype,
        kernel=kernel, deterministic=deterministic,
    )  # fmt: skip
    return plan(
        seq_len=seq_len, ranks=mesh.size, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim,
        mask=mask, strategy=planner, layout=layout, batch=batch, itemsize=dtype.itemsize,
    )  # fmt: skip


def strategy_on(
    mesh: Mesh,
    strategy: Strategy | str,
    device: torch.device | str | int | None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    dtype: torch.dtype,
    kernel: str = "auto",
    deterministic: bool | None = None,
) -> Strategy:
    """The strategy that a user passed; "auto" with the rates of this machine: see `plan_on`."""
    if not isinstance(dtype, torch.dtype):
        raise InputError("dtype is not one of torch's", got=shown(dtype), allowed="such as torch.bfloat16")
    sizes = size("heads", heads), size("kv_heads", kv_heads), size("head_dim", head_dim)
    device_type = (checked_device(device) or torch.get_default_device()).type
    problem = KernelProblem(
        dtype, device_type, *sizes, sizes[2] if value_dim is None else size("value_dim", value_dim),
        deterministic=_checked_deterministic(deterministic),
    )  # fmt: skip
    backend = mesh.backend_for(device_type)
    named = mesh.config.kernel if kernel == "auto" else kernel
    chosen, _ = choose_kernel(backend, problem, named)  # refused now, even if the strategy does not need it
    return _strategy(strategy, mesh, device_type, backend, lambda: chosen, dtype, sizes[2])


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
            raise InputError("return_lse must be a bool", got=shown(return_lse), allowed="True or False")
        request = requested(*arguments)
        q, k, v = as_autocast_would(q, k, v)
        key = return_lse, _key(request, q, k, v, sinks)
        call = mesh.remembered(key, lambda: _prepare(q, k, v, sinks, mesh, request, return_lse))
        q, k, v = map(as_kernels_take, (q, k, v))
    except Exception as refusal:
        broadcast_error(mesh, refusal, q, k, v)
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
    stated = _call_signature(chosen, transport, q, sinks, with_lse)
    inbox = inboxes(plan, mesh.rank) if transport.direct else Inboxes()
    return Call(
        plan,
        PlainRuntime(chosen.kernel, transport, inbox.places),
        replace(chosen.options, makes_way=transport.high_priority and chosen.plan.moves_beside_kernels),
        forward_signature=stated.of_pass("forward"),
        backward_signature=stated.of_pass("backward"),
        inboxes=(inbox.forward, inbox.backward),
        by_out=plan.backward.side == "kv" and takes_pieces(chosen.kernel),
        with_lse=with_lse,
        row_delta=row_delta_of(chosen.kernel),
    )


def _call_signature(
    chosen: Choices, transport: Transport, q: Tensor, sinks: Tensor | None, with_lse: bool
) -> CallSignature:
    """What every rank must state alike. Vendors must not differ: their partial results would be mixed.

    Kernels may differ if they take rows in the same order.
    """
    plan, backend, options = chosen.plan, chosen.backend, chosen.options
    p, forward, backward = plan.call, plan.forward, plan.backward
    narrow = ", narrow gradients" if plan.backward.narrow else ""
    inside = f" in nodes of {plan.head_parallel_size}" if plan.heads and plan.nodes > 1 else ""
    moves = f"{plan.strategy}{inside} by {plan.moves('forward')} with {plan.travels('backward')} backward{narrow}"
    routes = (
        plan.heads,
        plan.head_parallel_size,
        plan.groups,
        forward.side,
        forward.route,
        backward.side,
        backward.route,
        backward.results,
    )
    return call_signature(
        {
            "backend": backend.name,
            "process group": backend.capabilities.process_group,
            "ranks per node": str(transport.ranks_per_node or "not told"),
            "batch": str(p.batch),
            "heads": f"{p.heads}, {p.kv_heads} of K and V",
            "head sizes": f"{p.head_dim}, {p.value_dim} of V",
            "tokens": str(p.layout.length),
            "dtype": str(q.dtype).removeprefix("torch."),
            "mask": hashed_value(str(p.mask), p.mask.regions),
            "layout": hashed_value(p.layout.name, p.layout.shards),
            "strategy": hashed_value(moves, (*routes, plan.backward.narrow)),
            "rows that cross nodes": _order_of_rows(chosen),
            "scale": repr(options.scale),
            "softcap": repr(options.softcap),
            "sinks": "no" if sinks is None else "yes",
            "LSE sent": "yes" if plan.heads and with_lse else "no",
        }
    )


def _order_of_rows(chosen: Choices) -> HashedValue:
    """The order in which a node's rows go to other nodes: kernels differ in the order that they want."""
    plan = chosen.plan
    if not plan.heads or plan.nodes == 1:
        return hashed_value("none are put together", ())
    layout = plan.forward.call.layout
    return hashed_value(f"in the order that the kernel {chosen.kernel.name!r} takes", layout.shards)
