"""Run one case over ranks, with the plan, executor and gradients of `attention`, on a given kernel and transports.

Backward passes are called directly. torch's engine has one worker thread per device, so ranks that are threads of one
process would wait for each other forever on an accelerator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burst_portable.comm.agreement import call_signature
from burst_portable.comm.base import Transport
from burst_portable.conformance.base import BackendUnderTest, record_kernel
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import Answer, Inputs, in_memory
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.kernels.checked_kernel import support_of
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.planning.plans import Plan
from burst_portable.runtime.autograd import begin, run_backward, wrapped_call
from burst_portable.runtime.prepare import (
    kernel_for_plan,
    plan_for_kernel,
    prepared_call,
    with_checked_results,
)
from burst_portable.runtime.signature import plan_fact
from burst_portable.strategies.planner import cached_plan


def plan_of(case: Case, device: str = "cpu") -> Plan:
    """Return the plan of a case. A kernel gets its `forward.call`: one group of the heads of one rank."""
    return cached_plan(case.make_strategy(), case.make_call(device))


def serves(kernel: Kernel | LazyKernel, case: Case, device: str) -> bool:
    """Return whether a kernel supports a case. True if `supports` raises, so that the test fails with that error."""
    try:
        return support_of(kernel, case.make_call(device)).ok
    # All tests are listed before the first one runs: an exception here would end them all.
    except Exception:  # noqa: BLE001
        return True


def run_rank(target: BackendUnderTest, case: Case, x: Inputs, transport: Transport, device: torch.device) -> Answer:
    """Run one rank's part of a case, and return its shards."""
    plan = plan_of(case, device.type)
    kernel = kernel_for_plan(plan, target.choose(plan.forward.call))
    plan = plan_for_kernel(plan, kernel)
    unobserved = prepared_call(
        plan, target.backend, kernel, transport, call_signature({"case": case.spec(), "strategy": plan_fact(plan)})
    )
    mesh = Mesh(transport.rank, transport.size, lambda _: transport)
    prepared = wrapped_call(with_checked_results(unobserved), mesh)  # as in a call: a profiling session records it
    rows = torch.tensor(plan.call.layout.positions(transport.rank))
    q, k, v = (in_memory(t[:, rows], case.memory, device) for t in (x.q, x.k, x.v))
    dout = in_memory(x.dout[:, rows], case.memory, device)
    sinks = None if x.sinks is None else x.sinks.to(device)
    with torch.no_grad():
        begin(prepared, device)
        out, lse, saved = prepared.executor.forward(prepared, q, k, v, sinks, keep=True)
        number = transport.state.passes
        if transport.size > 1:
            prepared.transport.end()
        gradients = run_backward(prepared, number, (*saved, sinks), dout)
    shards: Any = (None if x is None else x.cpu() for x in (out, lse, *gradients))
    return Answer(*shards)


def run_case(target: BackendUnderTest, case: Case, x: Inputs) -> Answer:
    """Run a case over ranks that are threads, and return the unsharded result.

    Raises:
        UnsupportedError: If the backend does not support the case.
    """
    plan = plan_of(case, target.device.type)
    record_kernel(kernel_for_plan(plan, target.choose(plan.forward.call)).name)
    shards = target.threads(case.ranks, lambda transport: run_rank(target, case, x, transport, target.device))
    return gather_shards(shards, case.make_layout())


def gather_shards(shards: Sequence[Answer], layout: Layout) -> Answer:
    """Return the unsharded tensors, in the order of positions."""

    def gather(name: str, dim: int = 1) -> Tensor:
        parts = [getattr(shard, name) for shard in shards]
        order = torch.tensor([p for rank in range(layout.ranks) for p in layout.positions(rank)])
        return torch.cat(parts, dim).index_select(dim, torch.argsort(order))

    sinks = [shard.dsinks for shard in shards if shard.dsinks is not None]
    dsinks = torch.stack(sinks).sum(0) if sinks else None
    return Answer(gather("out"), gather("lse", 2), gather("dq"), gather("dk"), gather("dv"), dsinks)
