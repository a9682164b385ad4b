"""Test hooks on saved tensors that return them with other strides: gradients stay equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import burst_portable as bp
from burst_portable import run_threads


def as_images(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.channels_last) if x.dim() == 4 else x


def reversed_in_memory(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return x.permute(order).contiguous().permute(order)


def plain(tensors: list[Tensor], weights: Tensor) -> list[Tensor]:
    exact = [x.double().transpose(1, 2).requires_grad_() for x in tensors]
    out = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    return [g.transpose(1, 2) for g in torch.autograd.grad(out, exact, weights.double().transpose(1, 2))]


@pytest.mark.parametrize(
    "hooks",
    [
        lambda: saved_tensors_hooks(as_images, lambda x: x),
        lambda: saved_tensors_hooks(lambda x: x, reversed_in_memory),
        save_on_cpu,
    ],
    ids=["as images", "reversed", "on the host"],
)
@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ring"), (2, "ring"), (2, "burst"), (2, "ulysses")])
def test_backward_accepts_saved_tensors_with_other_strides(ranks, strategy, kernel, hooks):
    whole = [torch.randn(2, 16, heads, 8) for heads in (4, 2, 2)]
    weights = torch.randn(2, 16, 4, 8)

    def work(mesh: bp.Mesh) -> list[Tensor]:
        mine = [bp.shard(x, mesh).requires_grad_() for x in whole]
        with hooks():
            out = bp.attention(*mine, mesh=mesh, strategy=strategy, kernel=kernel)
        made = torch.autograd.grad(out, mine, bp.shard(weights, mesh))
        return [bp.unshard(x, mesh, seq_len=16) for x in made]

    for made, exact in zip(run_threads(ranks, work)[0], plain(whole, weights), strict=True):
        torch.testing.assert_close(made.double(), exact, rtol=0, atol=1e-5)
