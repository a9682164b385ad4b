"""Attention that one kernel call of a rank computes as a whole: nothing is merged there, and nothing is added up."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.oracle import dense_mask
from burst_portable.kernels import whole
from burst_portable.kernels.reference import ReferenceKernel


def qkv():
    return [torch.randn(1, 16, heads, 8) for heads in (4, 2, 2)]


@pytest.fixture
def asked(monkeypatch):
    """Which methods for attention as a whole the reference kernel is asked for; it has them here, and gives 16 bits."""
    names = []

    def attend_whole(self, *arguments):
        names.append("attend_whole")
        out, lse = self.attend(*arguments)
        return out.bfloat16(), lse

    def gradients(self, dout, q, k, v, out, lse, tiles, options):
        names.append("gradients")
        assert out.dtype == torch.bfloat16
        return tuple(x.bfloat16() for x in whole.added_up(self, dout, q, k, v, out, lse, tiles, options))

    monkeypatch.setattr(ReferenceKernel, "attend_whole", attend_whole, raising=False)
    monkeypatch.setattr(ReferenceKernel, "gradients", gradients, raising=False)
    return names


def test_on_one_rank_a_kernel_is_asked_for_the_whole(asked):
    """Nothing is merged and nothing added, so it may give 16 bits. Sinks come before out is rounded."""
    for layout in ("contiguous", "zigzag"):
        asked.clear()
        q, k, v = (x.bfloat16().requires_grad_() for x in qkv())
        out = bp.attention(q, k, v, mesh=bp.Mesh.single(), kernel="reference", layout=layout)
        weights = torch.randn(out.shape)
        made = torch.autograd.grad((out * weights).sum(), (q, k, v))
        assert asked == ["attend_whole", "gradients"]
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        good = torch.nn.functional.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in exact), is_causal=True, enable_gqa=True
        ).transpose(1, 2)
        torch.testing.assert_close(out.double(), good, rtol=0, atol=2e-2)
        for mine, other in zip(made, torch.autograd.grad((good * weights).sum(), exact), strict=True):
            torch.testing.assert_close(mine.double(), other, rtol=2e-2, atol=5e-2)
        bp.attention(q, k, v, mesh=bp.Mesh.single(), kernel="reference", sinks=torch.zeros(q.shape[2])).sum().backward()
        assert asked == ["attend_whole", "gradients", "gradients"]


@pytest.mark.parametrize(
    ("mask", "layout", "forward", "backward"),
    [
        # Each rank holds whole documents: nothing moves.
        (bp.Mask.documents((0, 8, 13, 16)), "contiguous", [True, True], [True, True]),
        # Rank 0 sees no other's rows, but what it sends is used, and its gradients come back.
        (bp.Mask.window(3), "contiguous", [True, False], [False, False]),
        ("causal", "zigzag", [False, False], [False, False]),
    ],
    ids=["documents", "window", "causal"],
)
def test_of_several_ranks_those_that_compute_once_ask_for_the_whole(asked, mask, layout, forward, backward):
    """Nothing is merged there, or added. A result that is rounded before it is merged would be rounded twice."""
    whole_q, whole_k, whole_v = (x.bfloat16() for x in qkv())
    weights = torch.randn(whole_q.shape)

    def work(mesh):
        mine = [bp.shard(x, mesh, layout=layout).requires_grad_() for x in (whole_q, whole_k, whole_v)]
        use = {"mask": mask, "mesh": mesh, "layout": layout, "strategy": "ring", "kernel": "reference"}
        out = bp.attention(*mine, **use)
        rows = bp.positions(mesh, seq_len=16, layout=layout)
        return rows, out.detach(), *torch.autograd.grad((out * bp.shard(weights, mesh, layout=layout)).sum(), mine)

    made = bp.run_local(2, work)
    assert asked.count("attend_whole") == sum(forward)
    assert asked.count("gradients") == sum(backward)
    exact = [x.double().requires_grad_() for x in (whole_q, whole_k, whole_v)]
    sees = dense_mask(bp.Mask.parse(mask, 16) if isinstance(mask, str) else mask, 16)
    q, k, v = (x.transpose(1, 2) for x in exact)
    good = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True).transpose(1, 2)
    right = good.detach(), *torch.autograd.grad((good * weights).sum(), exact)
    for rows, *found in made:
        for mine, other in zip(found, right, strict=True):
            torch.testing.assert_close(mine.double(), other[:, rows], rtol=2e-2, atol=2e-2)
