"""Test the load-balancing loss of mixtures of experts over ranks against one device, and the unsupported models."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import JetMoeConfig, JetMoeForCausalLM
from trl.trainer.utils import add_fused_lm_head

from burst_portable import Mesh, run_threads
from burst_portable.errors import MismatchError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.loss import router_loss, with_router_loss
from tests.support.models import (
    SIZES,
    assert_same,
    gradients_of,
    make,
    mesh_without_peer,
    on_one_device,
    on_ranks,
    tokens,
)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_router_loss_is_over_all_tokens(kind: str, ranks: int):
    """It is a product of two means, so values of ranks neither add up nor average to it."""
    model, ids = make(kind, output_router_logits=True, router_aux_loss_coef=0.7), tokens()
    expected = on_one_device(model, ids)
    without = on_one_device(make(kind, router_aux_loss_coef=0.0), ids)
    assert expected.loss > 1.1 * without.loss
    for answer in on_ranks(ranks, model, ids):
        assert_same(answer, expected, gradients=1e-6)  # rounding of a float32 sum


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_router_loss_does_not_count_padding(ranks: int):
    """Ranks have different numbers of tokens. Without the mask, the router loss differs."""
    model, mask = make("mixtral", output_router_logits=True, router_aux_loss_coef=0.7), torch.ones(2, 47).long()
    mask[0, 19:], mask[1, 40:] = 0, 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= 30 if ".gate." in name else 1  # padding has one expert
    ids = tokens() * mask
    labels = ids.masked_fill(mask == 0, -100)
    alone = copy.deepcopy(model)
    expected = alone(input_ids=ids, labels=labels, attention_mask=mask)
    expected.loss.backward()
    assert abs(alone(input_ids=ids, labels=labels).aux_loss / expected.aux_loss - 1) > 1e-3

    def work(mesh: Mesh) -> tuple[float, float, dict[str, torch.Tensor]]:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        out = mine(**sharded.shard(ids, labels, attention_mask=mask))
        out.loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        both = [all_reduce(x.detach(), mesh).item() for x in (out.loss, out.aux_loss)]
        return *both, gradients_of(mine)

    for loss, router, gradients in run_threads(ranks, work):
        assert loss == pytest.approx(expected.loss.item(), rel=1e-6)
        assert router == pytest.approx(expected.aux_loss.item(), rel=1e-6)
        for name, gradient in gradients_of(alone).items():
            assert (gradients[name] - gradient).norm() <= 1e-6 * gradient.norm(), name
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-7)


def test_fused_head_of_trl_has_router_loss_of_all_tokens():
    """Its output has no router logits: they are those of the inner model."""
    model, ids = make("mixtral", torch.float32, output_router_logits=True, router_aux_loss_coef=0.7), tokens()
    mask = (torch.arange(ids.shape[1]) < torch.tensor([[19], [47]])).long()
    batch = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    models = [copy.deepcopy(model) for _ in range(3)]
    for each in models:
        add_fused_lm_head(each)

    def step(mine: Any, mesh: Mesh | None = None) -> tuple[list[float], dict[str, torch.Tensor]]:
        out = mine(**batch, fused_lm_head=True)
        (out.aux_loss * 0.7 - out.log_probs.sum() / 30).backward()
        if mesh is not None:
            all_reduce_gradients(mine.parameters(), mesh)
        return [x.sum().item() for x in (out.aux_loss, out.log_probs, out.loss)], gradients_of(mine)

    def work(mesh: Mesh) -> Any:
        parallelize(models[mesh.rank], mesh, full_batches=True, gather_outputs=True)
        return step(models[mesh.rank], mesh)

    expected, gradients = step(models.pop())
    for found in run_threads(2, work):
        assert found[0] == pytest.approx(expected, rel=2e-6)
        for name, gradient in gradients.items():
            assert (found[1][name] - gradient).norm() <= 2e-5 * gradient.norm(), name


def test_router_loss_of_jetmoe_reads_its_own_weight():
    torch.manual_seed(0)
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_key_value_heads")}
    options = {"num_local_experts": 4, "output_router_logits": True, "aux_loss_coef": 0.7}
    model = JetMoeForCausalLM(JetMoeConfig(**sizes, **options, kv_channels=8, intermediate_size=48)).double().train()
    expected = on_one_device(model, tokens())
    for answer in on_ranks(2, model, tokens()):
        assert_same(answer, expected, gradients=1e-6)


def test_router_loss_that_is_nan_is_returned():
    """One rank has the NaN rows; it must not raise an error about the formula."""
    model, ids = make("mixtral", output_router_logits=True), tokens(1, 48) % 60
    ids[0, -1] = 63
    with torch.no_grad():
        model.model.embed_tokens.weight[63] = torch.nan

    def work(mesh: Mesh) -> tuple[bool, bool]:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh, layout="contiguous")
        out = mine(**sharded.shard(ids))
        return out.aux_loss.isnan().item(), all_reduce(out.loss.detach(), mesh).isnan().item()

    assert run_threads(2, work, timeout=20) == [(False, True), (True, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_router_loss_ignores_default_dtype(dtype: torch.dtype):
    logits = [torch.randn(700, 4, generator=torch.Generator().manual_seed(0))]
    expected = router_loss(logits, 2, Mesh.single())
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        found = router_loss(logits, 2, Mesh.single())
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_unsupported_router_losses_raise():
    logits = (torch.randn(6, 4),)
    output = SimpleNamespace(aux_loss=torch.tensor(9.0), router_logits=logits, loss=None)
    for model in ({"num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}, {"router_aux_loss_coef": 0.1}, {}):
        with pytest.raises(UnsupportedError, match=r"router loss of .*; got (9\.0|a model without a known weight)"):
            with_router_loss(SimpleNamespace(**model), output, mesh_without_peer())
    model = make("mixtral")
    with parallelize(model, mesh_without_peer()) as sharded, pytest.raises(UnsupportedError, match="return_dict"):
        model(**sharded.shard(tokens(1, 47)), output_router_logits=True, return_dict=False)


def test_router_loss_error_reaches_all_ranks():
    """Rounding differs between ranks, and the other ranks wait for the sum."""
    whole = make("mixtral", output_router_logits=True)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        if mesh.rank == 1:
            model.num_experts_per_tok = 1  # the loss of the model still uses two
            model.register_forward_hook(lambda *_: setattr(model, "num_experts_per_tok", 2), prepend=True)
        with pytest.raises(MismatchError if mesh.rank == 0 else UnsupportedError, match="router loss"):
            model(**sharded.shard(tokens()))

    run_threads(2, work, timeout=20)
