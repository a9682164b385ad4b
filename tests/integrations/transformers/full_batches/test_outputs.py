"""Test outputs of calls with full batches that programs use in a loss."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from burst_portable import Mesh, all_reduce, all_reduce_gradients, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import parallelize
from tests.support.models import gradients_of, make, tokens

IDS = tokens(2, 23)
MASK = torch.ones_like(IDS)
MASK[1, 17:] = 0
LEFT = MASK.flip(1)


def own_loss(model: Any, mask: Tensor | None = None, of_padding: bool = False) -> Tensor:
    """Return a loss with a router loss that the program computes itself."""
    out = model(input_ids=IDS, attention_mask=mask, output_router_logits=True)
    used = MASK if mask is None else mask
    aux = load_balancing_loss_func(out.router_logits, 4, 2, None if of_padding else mask)
    loss: Tensor = (out.logits * used.unsqueeze(-1)).pow(2).mean() + 0.5 * aux
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("mask", [None, MASK, LEFT], ids=["full", "right", "left"])
@pytest.mark.parametrize("averaged", [True, False])
def test_router_logits_are_those_of_all_tokens(averaged: bool, mask: Tensor | None):
    """Transformers' function returns 0 for an output that is None: the router was trained without this loss."""
    model = make("mixtral")

    def work(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
        own = copy.deepcopy(model)
        parallelize(own, mesh, full_batches=True, averaged_gradients=averaged)
        loss = own_loss(own, mask)
        if averaged:
            return loss, {n: all_reduce(g, mesh) / mesh.size for n, g in gradients_of(own).items()}
        all_reduce_gradients(own.parameters(), mesh)
        return loss, gradients_of(own)

    expected = copy.deepcopy(model)
    loss = own_loss(expected, mask)
    for found, gradients in (one for ranks in (2, 3) for one in run_threads(ranks, work)):
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        for name, gradient in gradients_of(expected).items():
            # Mixtral's router computes in float32, also the gradients that were multiplied by the ranks.
            assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name


def test_router_loss_of_padding_raises():
    """Padding has other states than on one device, and so other router logits."""

    def work(mesh: Mesh) -> None:
        model = make("mixtral")
        parallelize(model, mesh, full_batches=True, averaged_gradients=True)
        own_loss(model, MASK, of_padding=True)

    with pytest.raises(UnsupportedError, match="the loss depends on outputs of padding"):
        run_threads(2, work)


def test_outputs_that_are_not_returned_raise_if_used():
    def work(mesh: Mesh) -> None:
        model = make("mixtral")
        sharded = parallelize(model, mesh, full_batches=True)
        out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        assert set(out) == {"loss", "aux_loss"}
        with pytest.raises(InputError, match=r"with labels does not return the router_logits.*gather_outputs=True"):
            load_balancing_loss_func(out.router_logits, 4, 2)
        with pytest.raises(InputError, match="router_logits"):
            list(out.router_logits)
        assert copy.deepcopy(out.router_logits) is None
        sharded.gather_outputs = True
        out = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        assert [tuple(x.shape) for x in out.router_logits] == [(46, 4)] * 2

    run_threads(2, work)
