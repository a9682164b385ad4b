"""torch's default device is where a user's new tensors go; attention is where its own tensors are."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable import run_local


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "usp"])
@pytest.mark.parametrize("mask", ["causal", "window:5"])
def test_another_default_device(mask: str, strategy: str):
    """A mask without memory was read as if it had some, and numbers were wrong."""
    length = 34 if mask == "causal" else 38  # of nobody else's: the order of rows is kept
    whole = [torch.randn(1, length, heads, 8) for heads in (4, 4, 4)]

    def work(mesh: bp.Mesh) -> list[torch.Tensor]:
        mine = [bp.shard(x, mesh).requires_grad_() for x in whole]
        with torch.device("meta"):
            out = bp.attention(*mine, mask=mask, mesh=mesh, strategy=strategy, seq_len=length)
            made = torch.autograd.grad(out.sum(), mine)
            return [bp.unshard(x, mesh, seq_len=length) for x in (out.detach(), *made)]

    exact = [x.double().transpose(1, 2).requires_grad_() for x in whole]
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (distance >= 0) & (distance <= (length if mask == "causal" else 5))
    out = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=seen, enable_gqa=True)
    good = [out, *torch.autograd.grad(out.sum(), exact)]
    for found in run_local(4, work):
        for made, other in zip(found, good, strict=True):
            torch.testing.assert_close(made.double(), other.transpose(1, 2), rtol=0, atol=1e-5)
