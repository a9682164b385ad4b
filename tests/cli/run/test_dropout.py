"""Test `burst-portable run --dropout`: ranks against one device, and the reference against an independent oracle."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from burst_portable.cli import main
from burst_portable.cli.run import dropout as run_dropout
from burst_portable.cli.run.dropout import ReferenceDropout
from burst_portable.conformance import oracle
from burst_portable.kernels.dropout import weight_factors
from burst_portable.planning.call import Dropout
from tests.support.models import SIZES

SMALL = ["run", "--seq-len", "61", "--ranks", "2", "--steps", "2", "--check", "--dropout", "0.2"]
MODELS = {
    "llama": {},
    "mistral": {"sliding_window": 9},
    "gpt_oss": {"sliding_window": 9, "num_local_experts": 2, "num_experts_per_tok": 1},  # sinks
}


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SIZES, "vocab_size": 256}), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_dropout_on_two_ranks_equals_one_device(config, tmp_path):
    """In float64 both compute the same numbers, also if layers are recomputed."""
    losses = []
    for number, options in enumerate((["--strategy", "ring"], ["--strategy", "burst", "--gradient-checkpointing"])):
        out = tmp_path / f"{number}.json"
        arguments = ["--model", str(config), "--dtype", "float64", "--batch", "2", "--json", str(out), *options]
        assert main([*SMALL, *arguments]) == 0
        facts = json.loads(out.read_text(encoding="utf-8"))
        assert (facts["status"], facts["dropout"]) == ("ok", 0.2)
        assert facts["gradient_relative_difference"] < 1e-12
        losses.append(facts["losses"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-7)
    without = tmp_path / "without.json"
    arguments = ["--model", str(config), "--dtype", "float64", "--batch", "2", "--json", str(without)]
    assert main([*SMALL[:-2], *arguments]) == 0
    facts = json.loads(without.read_text(encoding="utf-8"))
    assert "dropout" not in facts
    assert facts["losses"] != pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_dropout_of_other_weights_fails_the_check(config, monkeypatch, capsys):
    """The planted reference drops the weights of the next head."""

    def of_next_head(dropout, *places):
        return weight_factors(dropout._replace(first_head=1), *places)

    monkeypatch.setattr(run_dropout, "weight_factors", of_next_head)
    assert main([*SMALL, "--model", str(config)]) == 1
    assert "gradients differ from one device" in capsys.readouterr().out


@pytest.mark.parametrize("name", MODELS)
def test_reference_without_dropout_equals_eager_attention(name):
    """In evaluation, nothing is dropped: sinks, windows and shared K/V heads are those of transformers."""
    config = AutoConfig.for_model(name, **{**SIZES, "vocab_size": 64, **MODELS[name]}, attention_dropout=0.3)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the fast ones have no float64
    ids = torch.randint(64, (2, 33))
    expected = model(input_ids=ids, use_cache=False).logits
    ReferenceDropout(model)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-6, atol=1e-6)


def test_reference_drops_the_weights_of_the_oracle():
    """The oracle has its own generator. The seed is that of the layer in the call."""
    config = AutoConfig.for_model("llama", **{**SIZES, "vocab_size": 64}, attention_dropout=0.3)
    model = AutoModelForCausalLM.from_config(config).train()
    reference = ReferenceDropout(model)
    layer = model.model.layers[0].self_attn
    found = []
    layer.register_forward_hook(lambda module, args, output: found.append(reference.seed_of(module)))
    torch.manual_seed(3)
    model(input_ids=torch.randint(64, (1, 9), generator=torch.Generator().manual_seed(0)), use_cache=False)
    q, k, v, dout = (torch.randn(2, 9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2, 4))
    right = oracle.attention(
        q, k, v, dout, torch.ones(9, 9).tril().bool(), scale=0.4, dropout=Dropout(0.3, seed=found[0])
    )
    mask = torch.full((9, 9), float("-inf"), dtype=torch.float64).triu(1)
    leaves = [x.transpose(1, 2).requires_grad_() for x in (q, k, v)]
    assert model.config._attn_implementation == run_dropout.NAME
    out, _ = ALL_ATTENTION_FUNCTIONS[run_dropout.NAME](layer, *leaves, mask, dropout=0.3, scaling=0.4)
    torch.testing.assert_close(out, right.out)
    for grad, name in zip(torch.autograd.grad(out, leaves, dout), ("dq", "dk", "dv"), strict=True):
        torch.testing.assert_close(grad.transpose(1, 2), getattr(right, name))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--eval"], "--dropout requires training"),
        (["--dropout", "1"], "no probability of dropout; got 1.0"),
        (["--dropout", "nan"], "no probability of dropout"),
        (["--model", "{gpt2}"], "--dropout needs a model with attention_dropout in its config; got a config of gpt2"),
        (["--model", "{hidden}"], "dropout cannot be compared with one device; got {'resid_pdrop': 0.1}"),
    ],
)
def test_dropout_reports_bad_input_in_one_line(options, told, tmp_path, capsys):
    none = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    configs = {
        "gpt2": {"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, **none},
        "hidden": {"model_type": "phi3", **SIZES, "vocab_size": 256, "pad_token_id": 0, "resid_pdrop": 0.1},
    }
    for name, content in configs.items():
        (tmp_path / name).write_text(json.dumps(content), encoding="utf-8")
    paths = {name: str(tmp_path / name) for name in configs}
    assert main([*SMALL, *(one.format(**paths) for one in options)]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1
