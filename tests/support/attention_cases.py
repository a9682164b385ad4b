"""Run one case over ranks, and the oracle on the same inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import burst_portable as bp
from burst_portable.comm.local import LocalTransport, run_transports
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import Answer
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES
from tests.support.thread_peers import World, run_peers


@dataclass(frozen=True)
class Inputs:
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    sinks: torch.Tensor | None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, d, dv = case.sizes

    def normal(count: int, dim: int) -> torch.Tensor:
        return torch.randn(case.batch, case.length, count, dim, generator=generator).to(case.dtype)

    sinks = torch.randn(heads, generator=generator).to(case.dtype) if case.sinks else None
    return Inputs(normal(heads, d), normal(kv_heads, d), normal(kv_heads, dv), normal(heads, dv), sinks)


def dropout_options(case: Case) -> dict[str, Any]:
    """Return the arguments of `attention` for the dropout of a case."""
    settings = case.dropout_settings
    if settings is None:
        return {}
    return {"dropout_p": settings.p, "dropout_seed": settings.seed, "first_head": settings.first_head}


def on_one_rank(
    mesh: bp.Mesh,
    case: Case,
    x: Inputs,
    kernel: str = "auto",
    use: Callable[[torch.Tensor], torch.Tensor] | None = None,
    *,
    at_once: bool = False,
) -> Answer:
    """Compute a case as a user does and return the unsharded results. Sinks are a parameter with summed gradients.

    use: applied to out before backward.
    at_once: unshard all results in one call, which takes a fifth of the messages.
    """
    where = case.make_layout()
    q, k, v = (bp.shard(t, mesh, layout=where).requires_grad_() for t in (x.q, x.k, x.v))
    sinks = None if x.sinks is None else x.sinks.clone().requires_grad_()
    out, lse = bp.attention(
        q,
        k,
        v,
        mask=case.make_mask(),
        mesh=mesh,
        strategy=case.make_strategy(),
        layout=where,
        softcap=case.softcap,
        sinks=sinks,
        kernel=kernel,
        return_lse=True,
        **dropout_options(case),
    )
    used = out if use is None else use(out)
    used.backward(bp.shard(x.dout, mesh, layout=where))

    def whole(t: torch.Tensor, dim: int = 1) -> torch.Tensor:
        return bp.unshard(t.detach(), mesh, seq_len=case.length, layout=where, dim=dim)

    dsinks = None
    if sinks is not None:
        parts = [torch.empty_like(sinks) for _ in range(mesh.size)]
        flat = [part.view(torch.uint8) for part in parts]
        mesh.transport("cpu").all_gather(sinks.grad.view(torch.uint8), flat)
        dsinks = torch.stack(parts).sum(0)
    if at_once:
        results = (out.detach(), lse.detach().transpose(1, 2).unsqueeze(-1), q.grad, k.grad, v.grad)
        out, lse, *gradients = _whole_at_once(results, whole)
        return Answer(out, lse.squeeze(-1).transpose(1, 2), *gradients, dsinks)
    return Answer(whole(out), whole(lse, dim=2), whole(q.grad), whole(k.grad), whole(v.grad), dsinks)


def _whole_at_once(
    results: Sequence[torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Return the unsharded tensors [B, S, H, D]. They travel as the bytes of one tensor, which keeps their bits."""
    rows = [one.flatten(2).contiguous().view(torch.uint8) for one in results]
    parts = whole(torch.cat(rows, 2)).split([one.shape[2] for one in rows], 2)
    for part, one in zip(parts, results, strict=True):
        yield part.contiguous().view(one.dtype).unflatten(2, one.shape[2:])


def expected(case: Case, x: Inputs) -> tuple[Answer, Answer]:
    """Return the oracle's answer in float64, and plain attention's in the dtype of the case."""
    seen = oracle.dense_mask(case.make_mask(), case.length)
    settings = {"softcap": case.softcap, "sinks": x.sinks, "dropout": case.dropout_settings}
    exact, plain = (
        oracle.attention(x.q, x.k, x.v, x.dout, seen, scale=case.sizes[2] ** -0.5, dtype=dtype, **settings)
        for dtype in (torch.float64, case.dtype)
    )
    return exact, plain


def sent_and_planned(
    case: Case, watch: Callable[[LocalTransport], None] = lambda transport: None
) -> tuple[list[int], list[int]]:
    """Return the bytes that each rank sends over threads, forward and backward, and those of the plan.

    watch: called with the transport of each rank before the call.
    """
    x, where, strategy = make_inputs(case), case.make_layout(), case.make_strategy()

    def work(transport: LocalTransport) -> dict[int, int]:
        watch(transport)
        mesh = bp.Mesh(transport.rank, case.ranks, lambda device_type: transport)
        q, k, v = (bp.shard(t, mesh, layout=where).requires_grad_() for t in (x.q, x.k, x.v))
        out = bp.attention(q, k, v, mask=case.make_mask(), mesh=mesh, strategy=strategy, layout=where)
        out.backward(bp.shard(x.dout, mesh, layout=where))
        return transport.fabric.sent

    sent = run_transports(case.ranks, work)[0]
    heads, kv_heads, d, dv = case.sizes
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": d, "v_head_dim": dv, "batch": case.batch}
    mask = case.make_mask()
    plan = bp.plan(seq_len=case.length, ranks=case.ranks, mask=mask, strategy=strategy, layout=where, **sizes)
    costs = plan_cost(plan, HardwareSpec(1.0, 1.0)).per_rank
    planned = [sum(costs[name][rank].sent for name in PASSES) for rank in range(case.ranks)]
    return [sent[rank] for rank in range(case.ranks)], planned


def check_on_threads(case: Case, *, peers: bool) -> None:
    """Compute a case on threads, over messages or emulated peer copies, and compare it with float64."""
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)

    def work(mesh: bp.Mesh) -> Answer:
        return on_one_rank(mesh, case, inputs)

    world = World(case.ranks, delay=2e-3, seed=1)
    for answer in run_peers(world, work) if peers else bp.run_threads(case.ranks, work):
        assert oracle.find_violations(answer, exact, plain, case.dtype) == {}
