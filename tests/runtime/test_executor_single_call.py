"""Test attention that a rank computes by a single kernel call: nothing is merged or accumulated."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.oracle import dense_mask
from burst_portable.kernels.base import Kernel
from burst_portable.kernels.reference import ReferenceKernel


def qkv():
    return [torch.randn(1, 16, heads, 8) for heads in (4, 2, 2)]


@pytest.fixture
def asked(monkeypatch):
    """Record which single-call methods of the reference kernel are called. They are added here and return 16 bits."""
    names = []

    def forward_single_call(self, *arguments, yields_to_comm):
        names.append("forward_single_call")
        out, lse = self.attend(*arguments)
        return out.bfloat16(), lse

    def backward_single_call(self, x, tiles, call):
        names.append("backward_single_call")
        assert x.out.dtype == torch.bfloat16
        return tuple(made.bfloat16() for made in Kernel.backward_single_call(self, x, tiles, call))

    monkeypatch.setattr(ReferenceKernel, "forward_single_call", forward_single_call)
    monkeypatch.setattr(ReferenceKernel, "backward_single_call", backward_single_call)
    return names


def test_one_rank_uses_single_call_kernels(asked):
    """Nothing is merged, so results may have 16 bits; sinks are merged before out is rounded."""
    for layout in ("contiguous", "zigzag"):
        asked.clear()
        q, k, v = (x.bfloat16().requires_grad_() for x in qkv())
        out = bp.attention(q, k, v, mesh=bp.Mesh.single(), kernel="reference", layout=layout)
        weights = torch.randn(out.shape)
        made = torch.autograd.grad((out * weights).sum(), (q, k, v))
        assert asked == ["forward_single_call", "backward_single_call"]
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        good = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in exact), is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(out.double(), good, rtol=0, atol=2e-2)
        for mine, other in zip(made, torch.autograd.grad((good * weights).sum(), exact), strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=2e-2, atol=5e-2)
        bp.attention(q, k, v, mesh=bp.Mesh.single(), kernel="reference", sinks=torch.zeros(q.shape[2])).sum().backward()
        assert asked == ["forward_single_call", "backward_single_call", "backward_single_call"]


@pytest.mark.parametrize(
    ("mask", "layout", "forward", "backward"),
    [
        # Each rank holds whole documents, so no message is sent.
        (bp.Mask.documents((0, 8, 13, 16)), "contiguous", [True, True], [True, True]),
        # Rank 0 sees no remote rows. Rank 1 uses the block of rank 0 and returns its gradients.
        (bp.Mask.window(3), "contiguous", [True, False], [False, False]),
        ("causal", "zigzag", [False, False], [False, False]),
    ],
    ids=["documents", "window", "causal"],
)
def test_single_block_ranks_use_single_call_kernels(asked, mask, layout, forward, backward):
    """Nothing is merged on these ranks, because merging would round the results twice."""
    whole_q, whole_k, whole_v = (x.bfloat16() for x in qkv())
    weights = torch.randn(whole_q.shape)

    def work(mesh):
        mine = [bp.shard(x, mesh, layout=layout).requires_grad_() for x in (whole_q, whole_k, whole_v)]
        use = {"mask": mask, "mesh": mesh, "layout": layout, "strategy": "ring", "kernel": "reference"}
        out = bp.attention(*mine, **use)
        rows = bp.local_position_ids(mesh, seq_len=16, layout=layout)
        return rows, out.detach(), *torch.autograd.grad((out * bp.shard(weights, mesh, layout=layout)).sum(), mine)

    made = bp.run_threads(2, work)
    assert asked.count("forward_single_call") == sum(forward)
    assert asked.count("backward_single_call") == sum(backward)
    exact = [x.double().requires_grad_() for x in (whole_q, whole_k, whole_v)]
    sees = dense_mask(bp.Mask.parse(mask, 16) if isinstance(mask, str) else mask, 16)
    q, k, v = (x.transpose(1, 2) for x in exact)
    good = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)
    right = good.detach(), *torch.autograd.grad((good * weights).sum(), exact)
    for rows, *found in made:
        for mine, other in zip(found, right, strict=True):
            torch.testing.assert_close(mine.double(), other[:, rows], rtol=2e-2, atol=2e-2)
