"""Test the models of `run`: checkpoints, the built-in model, recomputed layers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from burst_portable.cli.run.models import build, config_of, enable_gradient_checkpointing, local_model
from burst_portable.errors import InputError
from tests.support.models import SIZES, make, tokens


def test_tiny_model_equals_readme():
    config = config_of("tiny", 4096)
    sizes = (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.vocab_size)
    assert sizes == (4, 8, 2, 256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make("llama", torch.float32).save_pretrained(folder)
    return folder


def changed(checkpoint: Path, tmp_path: Path, change) -> str:
    """Return a copy of a checkpoint after `change` has changed its weights."""
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return str(tmp_path)


def loaded(folder: str):
    return build(folder, config_of(folder, 16), torch.float32, 0)


def test_complete_checkpoint_loads(checkpoint):
    model, notes = loaded(str(checkpoint))
    expected = load_file(checkpoint / "model.safetensors")
    assert notes == []
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in expected.items())


@pytest.fixture
def cached(checkpoint: Path, monkeypatch, tmp_path: Path) -> Path:
    """Return the folder of a copy as huggingface_hub stores it."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    shutil.copytree(checkpoint, folder / "snapshots" / ("a" * 40))
    return folder / "snapshots" / ("a" * 40)


def test_hub_id_is_found_in_the_cache(checkpoint: Path, cached: Path, monkeypatch):
    folder = local_model("some/model")
    assert Path(folder) == cached
    model, _ = loaded(folder)
    expected = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in expected.items())
    with pytest.raises(InputError, match=r"no such model; got 'other/model'; .*run `hf download other/model`, or"):
        config_of(local_model("other/model"), 16)
    (cached / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"copy of some/model is incomplete; got no \*.*run `hf download some/model`"):
        local_model("some/model")
    monkeypatch.chdir(cached.parents[2])
    Path("some/model").mkdir(parents=True)
    assert local_model("some/model") == "some/model"  # a folder comes first


def test_folder_without_weights_has_random_ones_and_a_note(checkpoint: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    model, notes = loaded(str(tmp_path))
    again, _ = loaded(str(tmp_path))
    assert notes == [f"{tmp_path} has no weights; they are random"]
    assert torch.equal(model.lm_head.weight, again.lm_head.weight)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match="no weights that are safe to load"):
        loaded(str(tmp_path))


def test_checkpoint_with_missing_weights_raises(checkpoint, tmp_path):
    def change(weights):
        weights["other.weight"] = weights.pop("model.layers.0.self_attn.q_proj.weight")

    with pytest.raises(
        InputError, match=r"1 missing: model\..*q_proj\.weight; 1 of its weights are not .*: other\.weight"
    ):
        loaded(changed(checkpoint, tmp_path, change))


def test_checkpoint_with_unused_weights_adds_note(checkpoint, tmp_path):
    _, (note,) = loaded(changed(checkpoint, tmp_path, lambda weights: weights.update(extra=torch.ones(1))))
    assert "1 of its weights are not in the model: extra" in note


def test_checkpoint_of_other_shapes_raises(checkpoint, tmp_path):
    def change(weights):
        weights["model.norm.weight"] = torch.ones(3)

    with pytest.raises(InputError, match="cannot be loaded"):
        loaded(changed(checkpoint, tmp_path, change))


def test_truncated_checkpoint_raises(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda weights: None)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cannot be loaded"):
        loaded(folder)


def test_integer_weights_raise(checkpoint, tmp_path):
    """A quantized checkpoint without quantization in its config must not be read as plain weights."""

    def change(weights):
        name = "model.layers.0.self_attn.q_proj.weight"
        weights[name] = weights[name].to(torch.int32)

    with pytest.raises(InputError, match=r"not floats; got I32: model\..*q_proj"):
        loaded(changed(checkpoint, tmp_path, change))


def test_quantized_checkpoint_raises(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda weights: None)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"bits": 4}}))
    with pytest.raises(InputError, match="quantized"):
        config_of(folder, 16)


def test_recompute_layers_runs_layers_twice():
    model, _ = build("x.json", LlamaConfig(**SIZES), torch.float32, 0)
    enable_gradient_checkpointing(model)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    ids = tokens(1, 9)
    model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert len(calls) == 2
