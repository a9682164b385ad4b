"""Test the scans of Mamba 1 layers, which continue from a state. `test_recurrent_states` compares whole models."""

from __future__ import annotations

import copy

import peft
import pytest
import torch
import transformers
from transformers.models.jamba import modeling_jamba

from burst_portable import run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import all_reduce, parallelize
from burst_portable.integrations.transformers.layers.selective_scans import selective_scan_of
from tests.support.models import EXPERTS, SIZES, assert_same, on_one_device, on_ranks, tokens


def make(**options):
    """Return a small model whose states decay slowly, so that tokens of other ranks count."""
    torch.manual_seed(0)
    layers = {"attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_offset": 0, "num_experts": 4}
    sizes = {**SIZES, **EXPERTS, **layers, "num_hidden_layers": 3, "mamba_d_state": 8}
    model = transformers.JambaForCausalLM(transformers.JambaConfig(**sizes, **options)).double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.rand(parameter.shape) - 4)
            elif parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float64, False), (torch.float32, False), (torch.float32, True)])
def test_first_state_without_inputs_decays(dtype, autocast):
    """Inputs of zero leave ``exp(A * sum(dt)) * first``, also under autocast, which must not round states."""
    layer = make().to(dtype).model.layers[0].mamba
    rates = torch.logspace(3, -4, 8)  # with dt from 5e-6 to 2
    with torch.no_grad():
        layer.conv1d.bias.zero_()
        layer.dt_proj.bias.copy_(torch.linspace(-12, 2, 64))
        layer.A_log.copy_(rates.log().expand_as(layer.A_log))
    scan = selective_scan_of(layer)
    handles = list(scan.hooks())
    first = 1000 * torch.randn(2, 1, 64, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.no_grad():
        layer.in_proj(torch.randn(2, 9, 32, dtype=dtype))
        last = scan.resume(first, torch.zeros(2, 64, 3 + 9, dtype=dtype))
    for handle in handles:
        handle.remove()
    seconds = 9 * torch.nn.functional.softplus(layer.dt_proj.bias.detach().double())
    expected = first.double() * torch.exp(-layer.A_log.detach().double().exp() * seconds[:, None])
    torch.testing.assert_close(last.double(), expected, rtol=1e-5, atol=1e-9)


def test_last_state_of_kernel_without_gradient(monkeypatch):
    """The kernel of mamba_ssm computes no gradient of its last state, and takes all inputs in one dtype."""
    scan = modeling_jamba.mamba_selective_scan
    calls = []

    def kernel(u, delta, A, B, C, D=None, z=None, return_last_state=False, **options):
        assert {x.dtype for x in (delta, B, C)} == {u.dtype}
        options = {name: options[name] for name in options.keys() & {"delta_bias", "delta_softplus"}}
        found = scan(u, delta, A, B, C, D=D, z=z, return_last_state=return_last_state, **options)
        calls.append(u.shape[-1])
        return (found[0], found[1].detach()) if return_last_state else found

    model, ids = make(), tokens()
    expected = on_one_device(model, ids)
    monkeypatch.setattr(modeling_jamba, "mamba_selective_scan", kernel)
    for answer in on_ranks(2, model, ids):
        assert_same(answer, expected, exact=2e-5, gradients=2e-5)
    assert sorted(set(calls)) == [23, 24, 23 + 2 * 8, 24 + 2 * 8]


@pytest.mark.parametrize("ranks", [2, 3])
def test_router_loss_of_jamba_is_over_all_tokens(ranks):
    model, ids = make(output_router_logits=True, router_aux_loss_coef=0.7), tokens()
    expected = on_one_device(model, ids)
    assert expected.loss > 1.1 * on_one_device(make(), ids).loss
    for answer in on_ranks(ranks, model, ids):
        assert_same(answer, expected, exact=2e-5, gradients=2e-5)


def with_adapters(model):
    torch.manual_seed(1)
    parts = ["in_proj", "x_proj", "out_proj"]
    return peft.inject_adapter_in_model(peft.LoraConfig(target_modules=parts, init_lora_weights=False), model).double()


def test_scan_with_adapters_equals_one_device():
    model, ids = with_adapters(make()), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(2, model, ids):
        assert_same(answer, expected, exact=2e-5, gradients=2e-5)


def test_projections_replaced_after_parallelize_raise():
    model, ids = make(), tokens()

    def work(mesh):
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        for layer in mine.model.layers[:2]:  # as adapters do
            layer.mamba.in_proj = torch.nn.Sequential(layer.mamba.in_proj)
        with pytest.raises(UnsupportedError, match=r"JambaMambaMixer were replaced after parallelize.*undo"):
            mine(**sharded.shard(ids))

    run_threads(2, work)


def test_copy_of_sharded_jamba_has_scans_of_its_own():
    model, ids = make(), tokens()
    expected = on_one_device(model, ids)

    def work(mesh):
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        copied = copy.deepcopy(mine)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.zero_()
            return all_reduce(copied(**sharded.shard(ids)).loss, mesh).item()

    for loss in run_threads(2, work):
        assert loss == pytest.approx(expected.loss, rel=1e-6)


def test_undo_removes_hooks_of_scans():
    model, ids = make(), tokens()
    expected = model(input_ids=ids).logits
    run_threads(1, lambda mesh: parallelize(model, mesh).undo())
    layer = model.model.layers[0].mamba
    assert not layer.in_proj._forward_hooks
    assert not layer.out_proj._forward_pre_hooks
    assert torch.equal(model(input_ids=ids).logits, expected)
