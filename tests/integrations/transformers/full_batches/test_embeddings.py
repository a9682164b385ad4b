"""Test embeddings that depend on parameters, or on gathered outputs of a sharded model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burst_portable import Mesh, all_reduce, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import parallelize
from tests.support.models import gradients_of, make, tokens

IDS = tokens(2, 23)


class Chain(nn.Module):
    """A model whose soft tokens are the inputs of another one, after a fixed beginning of `before` tokens."""

    def __init__(self, before: int) -> None:
        super().__init__()
        self.first, self.second, self.before = make("llama"), make("qwen2"), before
        self.project = nn.Parameter(torch.arange(64 * 32, dtype=torch.float64).view(64, 32).sin())

    def loss(self) -> Tensor:
        start = IDS[:, : self.before]
        soft = self.first(input_ids=IDS).logits.softmax(-1) @ self.project
        embeddings = torch.cat([self.second.get_input_embeddings()(start), soft], dim=1)
        loss: Tensor = self.second(inputs_embeds=embeddings, labels=torch.cat([start, IDS], dim=1)).loss
        return loss


def sharded_chain(mesh: Mesh, before: int, layout: str, averaged: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss and the gradients, averaged over the ranks as DDP does it."""
    chain = Chain(before)
    parallelize(chain.first, mesh, full_batches=True, averaged_gradients=averaged, layout=layout)
    parallelize(chain.second, mesh, full_batches=True, averaged_gradients=averaged)
    (loss := chain.loss()).backward()
    return loss.detach(), {n: all_reduce(g, mesh) / mesh.size for n, g in gradients_of(chain).items()}


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Compare gradients of a loss that Transformers computes in float32."""
    assert (found - expected).norm() <= 1e-6 * expected.norm()


def assert_one_device(found: tuple[Tensor, dict[str, Tensor]], module: Any, loss: Tensor) -> None:
    loss.backward()
    torch.testing.assert_close(found[0], loss.detach(), rtol=1e-6, atol=0)
    expected = gradients_of(module)
    assert found[1].keys() == expected.keys()
    for name, gradient in expected.items():
        assert_near(found[1][name], gradient)


@pytest.mark.parametrize(("before", "layout"), [(0, "zigzag"), (7, "zigzag"), (0, "contiguous")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_soft_tokens_have_gradients_of_one_device(ranks: int, before: int, layout: str):
    """Without a sum of the parts, gradients of the first model were twice too large, or partly missing."""
    chain = Chain(before)
    for found in run_threads(ranks, lambda mesh: sharded_chain(mesh, before, layout, True)):
        chain.zero_grad()
        assert_one_device(found, chain, chain.loss())


def test_soft_tokens_with_summed_gradients_raise():
    with pytest.raises(UnsupportedError, match=r"inputs_embeds depend on gathered .*allowed: averaged_gradients=True"):
        run_threads(2, lambda mesh: sharded_chain(mesh, 0, "zigzag", False))


@pytest.mark.parametrize("averaged", [True, False])
def test_gradients_of_embeddings_are_full_if_averaged(averaged: bool):
    """Parameters before the embeddings have one device's gradients after their average, or their sum."""
    with torch.no_grad():
        values = make("llama").get_input_embeddings()(IDS)

    def work(mesh: Mesh | None) -> tuple[Tensor, Tensor]:
        model, scale = make("llama"), torch.ones(32, dtype=torch.float64, requires_grad=True)
        if mesh is not None:
            parallelize(model, mesh, full_batches=True, averaged_gradients=averaged)
        embeddings = (values * scale).detach().requires_grad_()
        model(inputs_embeds=embeddings, labels=IDS).loss.backward()
        assert embeddings.grad is not None
        model(inputs_embeds=values * scale, labels=IDS).loss.backward()
        assert scale.grad is not None
        return embeddings.grad, scale.grad

    of_embeddings, of_scale = work(None)
    for ranks in (2, 3):
        found = run_threads(ranks, work)
        total = torch.stack([one[1] for one in found]).sum(0) / (ranks if averaged else 1)
        assert_near(total, of_scale)
        parts = [one[0] for one in found] if averaged else [torch.stack([one[0] for one in found]).sum(0)]
        for part in parts:
            assert_near(part, of_embeddings)
