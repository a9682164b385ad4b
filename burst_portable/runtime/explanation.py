"""What a call would run, and why: the choices of `attention`, described instead of run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from burst_portable.backends.registry import known, supports_high_priority, unavailable_reason
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.planning.plans import PASSES, PassName, Plan
from burst_portable.runtime.prepare import Choices, choose, requested
from burst_portable.runtime.validation import checked_device
from burst_portable.strategies.base import Strategy
from burst_portable.utils.torch_modes import as_autocast_would


@dataclass(frozen=True, slots=True)
class Choice:
    """What is chosen and why; for each of the others, why not."""

    name: str
    why: str
    others: Mapping[str, str]

    def lines(self) -> list[str]:
        """As text, one line for each."""
        return [f"{self.name}: {self.why}", *(f"not {name}: {reason}" for name, reason in self.others.items())]


@dataclass(frozen=True, slots=True)
class Explanation:
    """What `attention` runs for a call. As text, it has a line or more for each attribute.

    Attributes:
        backend, strategy, kernel: what is chosen, and why.
        layout: its name, and what this rank holds.
        mask: its name, how many pairs per head it lets through, how many tokens see nothing.
        moves: what travels in "forward" and "backward", and along which route.
        transport: what moves blocks. Whether these ranks can have a backend's own, they find out in their first call.
    """

    backend: Choice
    strategy: Choice
    layout: str
    mask: str
    moves: Mapping[str, str]
    transport: Choice
    kernel: Choice

    def __str__(self) -> str:
        parts = {
            "backend": self.backend.lines(),
            "strategy": self.strategy.lines(),
            "layout": [self.layout],
            "mask": [self.mask],
            "moves": [f"{name}: {what}" for name, what in self.moves.items()],
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
    device: torch.device | str | int | None = None,
) -> Explanation:
    """Which backend, strategy, layout, moves and kernel `attention` takes for these arguments, and why no others.

    One rank may call this alone: nothing is sent, and only shapes and dtypes of the tensors are read, so they may be on
    the "meta" device if `device` says which device is meant.

    Raises what `attention` raises before a byte moves, such as why something that was named cannot serve.
    """
    mesh = as_mesh(mesh)
    request = requested(mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic)
    meant = checked_device(device)
    device_type = None if meant is None else meant.type
    q, k, v = as_autocast_would(q, k, v, device_type)
    chosen = choose(q, k, v, sinks, mesh, request, device_type)
    automatic = "auto" in (strategy, getattr(strategy, "name", ""))
    why = filter(None, ("" if automatic else "named", chosen.plan.reason))
    return Explanation(
        backend=_backend(chosen, mesh),
        strategy=Choice(chosen.plan.strategy, "; ".join(why), {}),
        layout=_layout(chosen.plan, mesh),
        mask=_mask(chosen.plan),
        moves=_moves(chosen.plan),
        transport=_transport(chosen, mesh),
        kernel=_kernel(chosen),
    )


def _backend(chosen: Choices, mesh: Mesh) -> Choice:
    device = chosen.problem.device
    why = f"the first for tensors on {device} that can run here" if mesh.backend == "auto" else "named by the mesh"
    others = {
        name: unavailable_reason(name, device) or _passed_over(named=mesh.backend != "auto")
        for name in known()
        if name != chosen.backend.name
    }
    return Choice(chosen.backend.name, why, others)


def _passed_over(*, named: bool) -> str:
    """Why an alternative that could serve was not chosen."""
    return "it can serve too, and was not named" if named else "it can serve too, and comes later"


def _layout(plan: Plan, mesh: Mesh) -> str:
    layout = plan.call.layout
    return (
        f"{layout.name}: rank {mesh.rank} of {layout.ranks} holds {layout.count(mesh.rank)} of {layout.length} tokens"
    )


def _mask(plan: Plan) -> str:
    mask, length = plan.call.mask, plan.call.layout.length
    blind = mask.blind_rows(length)
    return f"{mask}: {plan.call.area} pairs per head" + (f"; {blind} tokens see nothing" if blind else "")


def _moves(plan: Plan) -> dict[str, str]:
    def what(name: PassName) -> str:
        if plan.call.ranks == 1:
            return "nothing, one rank holds all"
        how = plan.moves(name)
        if plan.heads and plan.nodes > 1:
            how += f", nodes of {plan.head_parallel_size} ranks"
        if plan.groups > 1:
            how += f", {plan.groups} groups of heads"
        if name == "backward" and plan.backward.narrow:
            how += ", gradients in the dtype of the inputs"
        return f"{plan.what_travels(name)} ({how})"

    return {name: what(name) for name in PASSES}


def _transport(chosen: Choices, mesh: Mesh) -> Choice:
    device = chosen.problem.device
    name, why = mesh.expected_transport(device, direct=chosen.plan.direct)
    plain = mesh.transport(device)
    waits = name == plain.name and not plain.high_priority and mesh.group is not None
    if waits and chosen.plan.moves_beside_kernels and supports_high_priority(chosen.backend):
        why += "; its kernels wait for those that compute: make its group with a stream of high priority"
    return Choice(name, why, {})


def _kernel(chosen: Choices) -> Choice:
    others = {}
    for kernel in chosen.backend.kernels():
        if kernel.name != chosen.kernel.name:
            support = kernel.supports(chosen.problem)
            passed_over = _passed_over(named=chosen.why_kernel.startswith("named"))
            others[kernel.name] = passed_over if support.ok else support.reason
    return Choice(chosen.kernel.name, chosen.why_kernel, others)
