"""Prepare a call of `attention`: check it, plan it, choose its backend and kernel, and cache the result.

A call has three forms: `runtime.request.Request` (the arguments), `planning.call.AttentionCall` (the attention as
data) and `runtime.prepared_call.PreparedCall` (everything that runs it). `prepare` makes the last from the first::

    describe    Request and tensors -> AttentionCall    checks shapes, dtypes, mask and layout
    choose      AttentionCall -> Plan, Backend, Kernel  strategies/planner.py plans
    _prepare    all of these -> PreparedCall            a mesh caches it for equal calls: `_key`
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd import forward_ad

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel, hardware_of
from burst_portable.comm.agreement import CallSignature
from burst_portable.comm.base import Transport
from burst_portable.config import triton_cache
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import Kernel, as_kernels_take
from burst_portable.kernels.checked_kernel import CheckedKernel
from burst_portable.kernels.score_kernel import ScoreRowKernel
from burst_portable.mesh import Mesh
from burst_portable.planning.call import AttentionCall, Dropout
from burst_portable.planning.messages import Inboxes, inboxes
from burst_portable.planning.plans import Plan
from burst_portable.planning.rank_order import with_rank_order
from burst_portable.runtime.ahead import compile_ahead
from burst_portable.runtime.equal_shards import key_of_values
from burst_portable.runtime.executor import StepExecutor
from burst_portable.runtime.head_groups import GroupExecutor
from burst_portable.runtime.head_parallel import HeadExecutor
from burst_portable.runtime.prepared_call import Executor, PreparedCall, PreparedPass
from burst_portable.runtime.request import Request
from burst_portable.runtime.score_rows import ScoreRowExecutor
from burst_portable.runtime.signature import signature_of, tokens_fact
from burst_portable.runtime.validation import (
    broadcast_error,
    check_data,
    check_known_sizes,
    check_no_transforms,
    check_rows,
    check_saveable,
    check_sinks,
    check_tensor,
    check_tensors,
    checked_scale,
    checked_seed,
    checked_softcap,
    global_length,
    unsaveable,
    warn_of_other_layout,
)
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import layout_of, mask_of, plan_to_run
from burst_portable.strategies.registry import strategy_of
from burst_portable.utils.torch_modes import cast_for_autocast


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mesh: Mesh,
    request: Request,
    dropout_seed: int | None = None,
) -> tuple[PreparedCall, Tensor, Tensor, Tensor]:
    """Return the prepared call, and q, k and v as its kernel takes them.

    Raises the errors that `attention` raises before a block is sent, and sends them to the other ranks.
    """
    try:
        if torch._C._are_functorch_transforms_active() or torch._C._is_tracing() or forward_ad._current_level >= 0:
            check_no_transforms(q, k, v, sinks)
        request = request.checked()
        q, k, v = cast_for_autocast(q, k, v)
        key = _key(request, q, k, v, sinks)
        prepared = mesh.cached(key, lambda: _prepare(q, k, v, sinks, mesh, request), first=with_checked_results)
        if prepared.kernel_call.dropout is not None:
            prepared = prepared.with_seed(checked_seed(dropout_seed))
        elif dropout_seed is not None:
            checked_seed(dropout_seed)
        if type(q) is not Tensor or q.stride(-1) != 1 or q.is_neg():
            q = as_kernels_take(q)
        if type(k) is not Tensor or k.stride(-1) != 1 or k.is_neg():
            k = as_kernels_take(k)
        if type(v) is not Tensor or v.stride(-1) != 1 or v.is_neg():
            v = as_kernels_take(v)
    except Exception as error:
        broadcast_error(mesh, error, q, k, v)
        raise
    return prepared, q, k, v


def _key(request: Request, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Hashable:
    """Return everything on which a prepared call depends. A call with an equal key runs the cached one, unchecked."""
    try:
        inference = q.is_inference() or k.is_inference() or v.is_inference()
        inference = inference or (sinks is not None and sinks.is_inference())
        return (
            request,
            unsaveable(q, k, v, sinks) if inference else (),
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


def describe(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, request: Request, device: str | None = None
) -> AttentionCall:
    """Return the call of a request for these tensors, or for tensors like them on another type of device.

    Raises the errors of `attention` for tensors, masks and layouts that do not fit together.
    """
    check_tensors(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q)
    check_saveable(q, k, v, sinks)
    check_known_sizes(q=q, k=k, v=v)
    scale, softcap = checked_scale(request.scale, q.shape[3]), checked_softcap(request.softcap)
    length = global_length(request.layout, request.seq_len, q.shape[1], mesh)
    mask = mask_of(request.mask, length)
    layout = layout_of(request.layout, length, mesh.size, mask)
    check_rows(layout, q.shape[1], mesh)
    dropout = Dropout(request.dropout_p, request.first_head) if request.dropout_p else None
    return AttentionCall.of(
        q,
        k,
        v,
        mask=mask,
        layout=layout,
        scale=scale,
        softcap=softcap,
        deterministic=bool(request.deterministic),
        sinks=sinks is not None,
        device=device,
        dropout=dropout,
    )


def choose(call: AttentionCall, mesh: Mesh, request: Request) -> tuple[Plan, Backend, Kernel, str]:
    """Return the plan, the backend and the kernel of a call, and the reason for this kernel. Sends nothing.

    Raises the errors of `attention` if a named backend, strategy or kernel cannot serve the call.
    """
    backend = mesh.backend_for(call.device)
    by_setting = request.kernel == "auto" and mesh.config.kernel != "auto"
    name = mesh.config.kernel if by_setting else request.kernel
    times = mesh.config.kernel_times
    strategy = strategy_for_mesh(
        request.strategy, mesh, call, backend, lambda: choose_kernel(backend, call, name, times=times)[0]
    )
    plan = plan_to_run(strategy, call)
    # The call of one rank has fewer heads, if the plan is head-parallel.
    kernel, reason = choose_kernel(backend, plan.forward.call, name, times=times)
    if plan.score_rows:
        if name != "auto":
            raise UnsupportedError(
                f"the strategy {plan.strategy!r} stores rows of scores, which no kernel does",
                got=f"kernel={name!r}",
                next_step="kernel='auto', or another strategy",
            )
        kernel, reason = kernel_for_plan(plan, kernel), "the strategy stores rows of scores, which no kernel does"
    plan = plan_for_kernel(plan, kernel)
    plan.forward.steps_of(mesh.rank)  # raises before the pass if segments of the layout have different steps
    return plan, backend, kernel, "named by the settings (BURST_KERNEL)" if by_setting else reason


def _prepare(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, request: Request) -> PreparedCall:
    """Return the prepared call. Raises all errors of planning, before a block is sent."""
    check_data(mesh, q, k, v)
    call = describe(q, k, v, sinks, mesh, request)
    warn_of_other_layout(call.layout, mesh, "attention", f"the mask {str(call.mask)!r}")
    plan, backend, kernel, reason = choose(call, mesh, request)
    transport, _ = mesh.transport_for(call.device, direct=plan.direct)
    if plan.direct and not transport.direct:
        # `auto` may have assumed a direct transport, but the ranks could not connect one.
        plan, backend, kernel, reason = choose(call, mesh, request)
        transport, _ = mesh.transport_for(call.device, direct=plan.direct)
    with_lse = request.return_lse
    tokens = tokens_fact(call, q.shape[1], mesh, request)
    signature = signature_of(plan, backend, kernel, transport, tokens, with_lse=with_lse)
    prepared = prepared_call(plan, backend, kernel, transport, signature, with_lse=with_lse, reason=reason)
    if not request.has_length:
        prepared = replace(prepared, values_key=key_of_values(call, v.shape[1]))
    kernel.save_compiled_in(triton_cache())
    compile_ahead(prepared, mesh, q, k, v, sinks)
    return prepared


def prepared_call(
    plan: Plan,
    backend: Backend,
    kernel: Kernel,
    transport: Transport,
    signature: CallSignature,
    *,
    with_lse: bool = True,
    reason: str = "",
) -> PreparedCall:
    """Return what one rank runs for a plan. See `PreparedCall`."""
    rank = transport.rank
    prepared_pass = partial(PreparedPass.of, tensors=plan.tensors if plan.score_rows else ())
    planned = inboxes(plan, rank) if transport.direct else Inboxes()
    return PreparedCall(
        plan,
        plan.forward.call,
        backend,
        kernel,
        transport,
        _executor(plan),
        prepared_pass(plan.forward, rank, signature.of_pass("forward"), planned.forward),
        prepared_pass(plan.backward, rank, signature.of_pass("backward"), planned.backward),
        offsets=planned.offsets,
        yields_to_comm=transport.high_priority and plan.overlaps_communication,
        backward_takes_out=plan.backward.sides == ("kv",) and kernel.traits.splits_tiles,
        with_lse=with_lse,
        reason=reason,
    )


def with_checked_results(prepared: PreparedCall) -> PreparedCall:
    """Return the call with a kernel whose results are checked. The first of equal calls runs it, forward and backward.

    A kernel that returns None, or tensors of other shapes or dtypes, would give wrong numbers.
    """
    if prepared.plan.score_rows:  # their kernel is in this package, and has other methods
        return prepared
    return replace(prepared, kernel=CheckedKernel(prepared.kernel))


def _executor(plan: Plan) -> Executor:
    """Return what runs the passes of a plan."""
    if plan.heads:
        return HeadExecutor()
    if plan.score_rows:
        return ScoreRowExecutor()
    return GroupExecutor() if plan.head_groups > 1 else StepExecutor()


def kernel_for_plan(plan: Plan, kernel: Kernel) -> Kernel:
    """Return what computes a plan: the kernel that was chosen, unless the plan stores rows of scores."""
    return ScoreRowKernel() if plan.score_rows else kernel


def plan_for_kernel(plan: Plan, kernel: Kernel) -> Plan:
    """Return the plan with rows of head shards in rank order if that is faster for the kernel."""
    if not plan.heads or kernel.traits.splits_tiles:
        return plan
    return with_rank_order(plan, kernel.traits)


def strategy_for_mesh(
    strategy: Strategy | str, mesh: Mesh, call: AttentionCall, backend: Backend, kernel: Callable[[], Kernel]
) -> Strategy:
    """Return the strategy that a caller passed.

    "auto" predicts with the hardware spec file of the settings, or with speeds measured on devices of this name.
    `kernel` chooses the kernel for all heads; it is called only if `auto` compares plans.
    """
    chosen = strategy_of(strategy, mesh.ranks_per_node)
    if not (isinstance(strategy, str) and isinstance(chosen, AutoStrategy)):
        return chosen
    high_priority = mesh.size > 1 and mesh.transport(call.device).high_priority
    file = mesh.config.hardware_spec
    hardware = hardware_of(backend, mesh.size, kernel(), file, call.dtype, call.head_dim, high_priority=high_priority)
    if hardware.peer_copy_bandwidth and not mesh.may_be_direct(call.device):
        hardware = replace(hardware, peer_copy_bandwidth=())
    return replace(chosen, hardware=hardware)
