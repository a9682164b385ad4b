"""Run forward and backward passes in a recording session."""

from __future__ import annotations

import torch

import burst_portable as bp

RANKS = 3
LENGTH = 96


def inputs(rank: int):
    own = torch.Generator().manual_seed(rank)  # ranks are threads, which share torch's default generator
    q, k, v, dout = (torch.randn(2, LENGTH // RANKS, heads, 8, generator=own) for heads in (6, 3, 3, 6))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def one_step(mesh, strategy, mask="causal"):
    q, k, v, dout = inputs(mesh.rank)
    out = bp.attention(q, k, v, mask=mask, mesh=mesh, strategy=strategy, layout="contiguous")
    out.backward(dout)
    return out.detach(), q.grad, k.grad, v.grad


def recorded(strategy, level="standard", steps=1, mask="causal"):
    """Return the results and the records of all ranks."""

    def work(mesh):
        with bp.profile(level, mesh=mesh) as session:
            for _ in range(steps):
                results = one_step(mesh, strategy, mask)
                session.mark()
        return results, session.gather()

    done = bp.run_threads(RANKS, work)
    assert [gathered is None for _, gathered in done] == [False, True, True]
    return [results for results, _ in done], done[0][1]
