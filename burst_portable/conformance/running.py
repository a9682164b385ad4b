"""Runs one case over ranks: the same plan, executor and gradients as `attention`, on a kernel and transports of choice.

Forward and backward of the autograd function are called directly, without torch's engine: it has one worker per device,
so ranks that are threads of one process would wait for each other on an accelerator for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burst_portable.autograd import Attention, Call
from burst_portable.choices import plan_for_kernel
from burst_portable.comm.agreement import agree, statement
from burst_portable.comm.base import Transport
from burst_portable.conformance.cases import Case
from burst_portable.conformance.inputs import Inputs, in_memory
from burst_portable.conformance.oracle import Answer
from burst_portable.conformance.subject import Subject
from burst_portable.kernels.contract import Kernel, KernelProblem, Options
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.planning import planned
from burst_portable.plans import Plan, Problem
from burst_portable.runtime import PlainRuntime, Runtime, installed


class _Context:
    """What torch passes to an autograd function, as far as ours uses it."""

    saved_tensors: tuple[Tensor | None, ...] = ()
    call: Any = None

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """LSE has no gradient here either."""

    def set_materialize_grads(self, value: bool) -> None:
        """No gradient of LSE is passed at all."""


@dataclass(frozen=True)
class Shard:
    """What one rank holds after a case."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    heads, kv_heads, head_dim, value_dim = case.sizes
    where = case.make_layout()
    problem = Problem(
        mask=case.make_mask(),
        q_layout=where,
        k_layout=where,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        batch=case.batch,
        itemsize=case.dtype.itemsize,
    )
    return planned(case.make_strategy(), problem)


def kernel_problem(case: Case, device: str, plan: Plan | None = None) -> KernelProblem:
    """The problem that a kernel is asked about: with the heads of one rank if the plan divides heads."""
    heads, kv_heads, head_dim, value_dim = case.sizes
    if plan is not None:
        heads, kv_heads = plan.forward.problem.heads, plan.forward.problem.kv_heads
    options = options_of(case)
    return KernelProblem(
        case.dtype,
        device,
        heads,
        kv_heads,
        head_dim,
        value_dim,
        softcap=case.softcap is not None,
        deterministic=case.deterministic,
        positive_scale=options.positive_scale,
    )


def serves(kernel: Kernel, case: Case, device: str) -> bool:
    """Whether it claims a case. A kernel that raises when asked is tried with the case, and fails with that error."""
    try:
        return bool(kernel.supports(kernel_problem(case, device)).ok)
    # Trials are listed before the first is made, and what is raised then would end them all.
    except Exception:  # noqa: BLE001
        return True


def options_of(case: Case) -> Options:
    """Scale, softcap, determinism of a case."""
    return Options(case.factor, case.softcap, case.deterministic)


def run_rank(subject: Subject, case: Case, x: Inputs, transport: Transport, device: torch.device) -> Shard:
    """One rank's part of a case."""
    plan = plan_of(case)
    kernel = subject.choose(kernel_problem(case, device.type, plan))
    plan = plan_for_kernel(plan, kernel)
    said = statement({"case": case.spec()})
    runtime: Runtime = PlainRuntime(kernel, transport)
    if (wrap := installed.get()) is not None:  # as in a call: a profiling session records it
        runtime = wrap(runtime, plan, Mesh(transport.rank, transport.size, lambda _: transport))
    call = Call(plan, runtime, options_of(case), said.of_pass("forward"), said.of_pass("backward"))
    rows = torch.tensor(plan.problem.q_layout.positions(transport.rank))
    q, k, v = (in_memory(t[:, rows], case.memory, device) for t in (x.q, x.k, x.v))
    dout = in_memory(x.dout[:, rows], case.memory, device)
    sinks = None if x.sinks is None else x.sinks.to(device)
    context: Any = _Context()
    with torch.no_grad():
        agree(runtime.transport, call.forward_statement)
        runtime.transport.begin(call.forward_statement.digest)
        out, lse = Attention.forward(context, q, k, v, sinks, call)
        dq, dk, dv, dsinks, _ = (None if g is None else g.cpu() for g in Attention.backward(context, dout, None))
    assert lse is not None, "it is asked for unless a call says otherwise"
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return Shard(out.cpu(), lse.cpu(), dq, dk, dv, dsinks)


def run_case(subject: Subject, case: Case, x: Inputs) -> Answer:
    """A case over ranks as threads, put together. Raises `UnsupportedError` where the backend refuses it."""
    subject.choose(kernel_problem(case, subject.device.type, plan_of(case)))
    return together(
        subject.threads(case.ranks, lambda transport: run_rank(subject, case, x, transport, subject.device)),
        case.make_layout(),
    )


def together(shards: Sequence[Shard], layout: Layout) -> Answer:
    """Whole tensors from the ranks' shards, by the positions that their rows have."""

    def whole(name: str, dim: int = 1) -> Tensor:
        parts = [getattr(shard, name) for shard in shards]
        order = torch.tensor([p for rank in range(layout.ranks) for p in layout.positions(rank)])
        return torch.cat(parts, dim).index_select(dim, torch.argsort(order))

    sinks = [shard.dsinks for shard in shards if shard.dsinks is not None]
    total = torch.stack(sinks).sum(0) if sinks else None
    return Answer(whole("out"), whole("lse", 2), whole("dq"), whole("dk"), whole("dv"), total)
