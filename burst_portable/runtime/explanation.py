"""Explain what a call of `attention` would run, and why, without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import kernels_of, known, supports_high_priority, unavailable_reason
from burst_portable.errors import InputError
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.checked_kernel import support_of
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.planning.plans import PASSES, PassName, Plan
from burst_portable.runtime.prepare import choose, describe
from burst_portable.runtime.request import Request, RequestOptions
from burst_portable.runtime.validation import checked_device, checked_seed
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.utils.torch_modes import cast_for_autocast


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen name and the reason; for each other name, the reason why it was not chosen."""

    name: str
    why: str
    not_chosen: Mapping[str, str]

    def lines(self) -> list[str]:
        """Return one line for the chosen name, and one for each other."""
        return [f"{self.name}: {self.why}", *(f"not {name}: {reason}" for name, reason in self.not_chosen.items())]


@dataclass(frozen=True, slots=True)
class Explanation:
    """The choices of `attention` for a call. As text, it has at least one line for each attribute.

    Attributes:
        backend: The backend, and the reasons.
        strategy: The strategy, and the reason.
        layout: Name of the layout, and the tokens of this rank.
        mask: Name of the mask, its visible pairs per head and its fully masked tokens.
        traffic: Tensors that are sent in "forward" and "backward", and how.
        transport: The transport of blocks. The ranks connect a backend's own transport only in their first call.
        kernel: The kernel, and the reasons.
    """

    backend: Choice
    strategy: Choice
    layout: str
    mask: str
    traffic: Mapping[str, str]
    transport: Choice
    kernel: Choice

    def __str__(self) -> str:
        parts = {
            "backend": self.backend.lines(),
            "strategy": self.strategy.lines(),
            "layout": [self.layout],
            "mask": [self.mask],
            "traffic": [f"{name}: {what}" for name, what in self.traffic.items()],
            "transport": self.transport.lines(),
            "kernel": self.kernel.lines(),
        }
        return "\n".join(
            f"{'' if i else name:<9} {line}" for name, lines in parts.items() for i, line in enumerate(lines)
        )


def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    device: torch.device | str | int | None = None,
    mesh: MeshLike = None,
    sinks: Tensor | None = None,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    **options: Unpack[RequestOptions],
) -> Explanation:
    """Return which backend, strategy, layout, messages and kernel `attention` uses, and why no others.

    A single rank may call this: it sends nothing. It reads only the shapes and dtypes of the tensors, so they may be on
    the "meta" device if `device` is given.

    Args:
        q: As for `attention`.
        k: As for `attention`.
        v: As for `attention`.
        device: Device for which the call is explained. Default: that of q.
        mesh: As for `attention`.
        sinks: As for `attention`.
        dropout_seed: As for `attention`. No seed is drawn without it, since nothing here depends on it.
        return_lse: As for `attention`.
        **options: As for `attention`: mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic,
            dropout_p, first_head.

    Raises the errors that `attention` raises before it sends anything.
    """
    mesh = as_mesh(mesh)
    request = Request(**options, return_lse=return_lse).checked()
    if dropout_seed is not None:
        checked_seed(dropout_seed)
    target = checked_device(device)
    device_type = None if target is None else target.type
    if target is None and isinstance(q, Tensor) and q.is_meta:
        next_step = 'name the device of the call: explain(q, k, v, device="cuda", ...)'
        raise InputError("tensors on the meta device name no backend", got="no device", next_step=next_step)
    q, k, v = cast_for_autocast(q, k, v, device_type)
    call = describe(q, k, v, sinks, mesh, request, device_type)
    plan, backend, kernel, why_kernel = choose(call, mesh, request)
    automatic = request.strategy == "auto" or isinstance(request.strategy, AutoStrategy)
    why = filter(None, ("" if automatic else "named", plan.reason))
    mask, layout, rank = plan.call.mask, plan.call.layout, mesh.rank
    masked = mask.fully_masked_tokens(layout.length)
    held = f"rank {rank} of {layout.ranks} holds {layout.count(rank)} of {layout.length} tokens"
    return Explanation(
        backend=_backend(backend, mesh, call.device),
        strategy=Choice(plan.label, "; ".join(why), {}),
        layout=f"{layout.name}: {held}",
        mask=f"{mask}: {plan.call.num_pairs} pairs per head" + (f"; {masked} fully masked tokens" if masked else ""),
        traffic={name: _traffic(plan, name) for name in PASSES},
        transport=_transport(plan, backend, mesh),
        kernel=_kernel(plan, backend, kernel, why_kernel.partition(";")[0]),  # the other kernels have their own lines
    )


def _backend(chosen: Backend, mesh: Mesh, device: str) -> Choice:
    why = f"the first for tensors on {device} that can run here" if mesh.backend == "auto" else "named by the mesh"
    not_chosen = {
        name: unavailable_reason(name, device) or _passed_over(named=mesh.backend != "auto")
        for name in known()
        if name != chosen.name
    }
    return Choice(chosen.name, why, not_chosen)


def _passed_over(*, named: bool, timed: bool = False) -> str:
    """Return why an alternative that could serve was not chosen."""
    if timed:
        return "it can serve too, and was slower or not timed"
    return "it can serve too, and was not named" if named else "it can serve too, and comes later"


def _traffic(plan: Plan, name: PassName) -> str:
    if plan.call.ranks == 1:
        return "nothing, one rank holds all tokens"
    how = plan.transfer(name)
    if plan.heads and plan.ring_size > 1:
        how += f", nodes of {plan.ring_size if plan.head_spacing > 1 else plan.head_parallel_size} ranks"
    if plan.head_groups > 1:
        how += f", {plan.head_groups} head groups"
    if name == "backward" and plan.backward.rounds_gradients:
        how += ", gradients in the dtype of the inputs"
    return f"{plan.describe_traffic(name)} ({how})"


def _transport(plan: Plan, backend: Backend, mesh: Mesh) -> Choice:
    device = plan.call.device
    name, why = mesh.expected_transport(device, direct=plan.direct)
    plain = mesh.transport(device)
    waits = name == plain.name and not plain.high_priority and mesh.group is not None
    if waits and plan.overlaps_communication and supports_high_priority(backend):
        why += "; its kernels wait for those that compute: make its group with a stream of high priority"
    return Choice(name, why, {})


def _kernel(plan: Plan, backend: Backend, chosen: Kernel, why: str) -> Choice:
    not_chosen = {}
    for kernel in () if plan.score_rows else kernels_of(backend):  # none of them can compute such a plan
        if kernel.name != chosen.name:
            support = support_of(kernel, plan.forward.call)
            passed_over = _passed_over(named=why.startswith("named"), timed=why.startswith("the fastest"))
            not_chosen[kernel.name] = (support.slower or passed_over) if support.ok else support.reason
    return Choice(chosen.name, why, not_chosen)
