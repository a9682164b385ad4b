"""What a call runs on: its plan, its backend and its kernel. Everything that can be refused is refused here.

Nothing is sent and nothing is computed: `attention` runs what is chosen, and `explain` tells it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.backends.registry import choose_kernel, rates_of
from burst_portable.checks import (
    as_number,
    check_rows,
    check_sinks,
    check_tensors,
    checked_scale,
    checked_softcap,
    whole_length,
)
from burst_portable.errors import InputError, explain, shown
from burst_portable.kernels import contract
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh
from burst_portable.planning import layout_of, mask_of, planned, strategy_of
from burst_portable.plans import Plan, Problem
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.ulysses import in_rank_order
from burst_portable.values import size


class Request(NamedTuple):
    """What a call asks for besides its tensors: part of the key that its plan is looked up by."""

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
    """The options as they are looked up by. 1, 1.0 and True are equal keys, so numbers are made what they must be."""
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    elif not isinstance(deterministic, bool):
        allowed = "True, False, or None to do as torch does"
        raise InputError(explain("deterministic is no choice", got=shown(deterministic), allowed=allowed))
    if seq_len is not None:
        seq_len = size("seq_len", seq_len)
    if scale is not None:
        scale = as_number("scale", scale)
    if softcap is not None:
        softcap = as_number("softcap", softcap)
    if not isinstance(kernel, str):
        raise InputError(explain("kernel is no name", got=shown(kernel), allowed="'auto', or a kernel of the backend"))
    return Request(mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic)


@dataclass(frozen=True, slots=True)
class Choices:
    """What a call runs, and what its kernels are asked."""

    plan: Plan
    backend: Backend
    problem: contract.Problem
    kernel: contract.Kernel
    why_kernel: str
    options: contract.Options


def choose(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: Mesh, request: Request, device: str | None = None
) -> Choices:
    """Settle a call for its tensors, or for tensors like these on another type of device.

    Raises what `attention` raises before a byte moves.
    """
    check_tensors(q, k, v)
    if sinks is not None:
        check_sinks(sinks, q)
    device = q.device.type if device is None else device
    backend = mesh.backend_for(device)
    options = contract.Options(
        checked_scale(request.scale, q.shape[3]), checked_softcap(request.softcap), request.deterministic
    )
    whole = contract.Problem(
        q.dtype,
        device,
        q.shape[2],
        k.shape[2],
        q.shape[3],
        v.shape[3],
        request.softcap is not None,
        request.deterministic,
        options.positive_scale,
    )
    by_setting = request.kernel == "auto" and mesh.config.kernel != "auto"
    named = mesh.config.kernel if by_setting else request.kernel
    plan = _plan(q, k, v, mesh, request, backend, lambda: choose_kernel(backend, whole, named)[0])
    local = plan.forward.problem  # of fewer heads, where heads are sharded
    problem = replace(whole, heads=local.heads, kv_heads=local.kv_heads)
    kernel, _ = choose_kernel(backend, problem, named)
    why = "the first of the backend's that serves it" if named == "auto" else "named"
    return Choices(
        suited(plan, kernel),
        backend,
        problem,
        kernel,
        "named by the settings (BURST_KERNEL)" if by_setting else why,
        options,
    )


def suited(plan: Plan, kernel: contract.Kernel) -> Plan:
    """A plan as this kernel is best given it: rows of head shards as they come, if it takes any tiles in one launch."""
    return in_rank_order(plan) if plan.reshard and not getattr(kernel, "in_pieces", False) else plan


def _plan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mesh: Mesh,
    request: Request,
    backend: Backend,
    kernel: Callable[[], contract.Kernel],
) -> Plan:
    """The plan of a call; `kernel` gives what will compute all heads, asked where plans are priced."""
    rows = q.shape[1]
    length = whole_length(request.layout, request.seq_len, rows, mesh)
    mask = mask_of(request.mask, length)
    layout = layout_of(request.layout, length, mesh.size, mask)
    check_rows(layout, rows, mesh)
    strategy = strategy_of(request.strategy)
    if request.strategy == "auto":
        rates = rates_of(backend, mesh.size, kernel())
        if rates.direct and not mesh.may_be_direct(q.device.type):
            rates = replace(rates, direct=())
        strategy = AutoStrategy(inner=mesh.inner, rates=rates)
    problem = Problem(
        mask=mask,
        q_layout=layout,
        k_layout=layout,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        batch=q.shape[0],
        itemsize=q.dtype.itemsize,
    )
    return planned(strategy, problem)
