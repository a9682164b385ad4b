"""What `run` is given: the launcher's variables, this machine's limits, checkpoints; how a rank says why it failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from burst_portable.cli import main
from burst_portable.cli.run import job as limits
from burst_portable.cli.run.models import build, config_of
from burst_portable.cli.run.worker import device_of
from burst_portable.config import Launched, launched
from burst_portable.errors import InputError
from tests.integration.models import make

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


def test_a_launcher_is_joined_where_there_is_one():
    assert launched({}) is None
    assert launched({"MASTER_ADDR": "host", "MASTER_PORT": "x", "LOCAL_RANK": "0"}) is None  # of a cluster, no launcher
    assert launched(TORCHRUN) == Launched(1, 2, 1, "host:29500")
    assert launched({k: v for k, v in TORCHRUN.items() if k != "LOCAL_RANK"}) == Launched(1, 2, 1, "host:29500")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        *(({name: None}, f"but not {name}") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
        *(({name: ""}, f"but not {name}") for name in TORCHRUN),
        *(({name: "x"}, f"{name}='x'") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
        *(({name: "-1"}, f"{name}='-1'") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")),
        ({"RANK": "2"}, "RANK < WORLD_SIZE"),
        ({"RANK": "²"}, "RANK='²'"),
        ({"RANK": "9" * 5000, "WORLD_SIZE": "9" * 5001}, "RANK < WORLD_SIZE"),
        ({"MASTER_PORT": "65536"}, "1 to 65535"),
    ],
    ids=str,
)
def test_variables_of_no_launcher(changes, said):
    environment = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(InputError, match="start with torchrun, or unset RANK") as error:
        launched(environment)
    assert said in str(error.value)


def test_without_transformers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr("burst_portable.cli.run.command.find_spec", lambda name: None)
    assert main(["run"]) == 2
    expected = "run needs the package transformers; in the clone, run: pip install '.[cli,transformers]'"
    assert capsys.readouterr().err == f"burst-portable: {expected}\n"


def test_what_this_machine_cannot_serve(monkeypatch):
    monkeypatch.setattr(limits, "cores", lambda: 2)
    limits.check_processes(16)
    with pytest.raises(InputError, match="at most 16"):
        limits.check_processes(17)
    monkeypatch.setattr(limits, "cores", lambda: 64)
    limits.check_processes(512)
    monkeypatch.setattr(limits, "_memory", lambda: 1000)
    # 10 weights of 4 bytes on 2 ranks, with gradients and 2 moments; 20 tokens of 4 logits, with their gradients
    sizes = {"tokens": 20, "copies": 2, "itemsize": 4}
    limits.check_memory(10, 4, **sizes, training=True)
    with pytest.raises(InputError, match="320 B of weights, gradients and moments over all ranks and 704 B of logits"):
        limits.check_memory(10, 4, **{**sizes, "tokens": 22}, training=True)
    limits.check_memory(10, 4, **{**sizes, "tokens": 22}, training=False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make("llama", torch.float32).save_pretrained(folder)
    return folder


def changed(checkpoint: Path, tmp_path: Path, change) -> str:
    """A copy of a checkpoint with other weights; `change` gets them by name."""
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    weights = load_file(checkpoint / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return str(tmp_path)


def loaded(folder: str):
    return build(folder, config_of(folder, 16), torch.float32, 0)


def test_a_whole_checkpoint(checkpoint):
    model, notes = loaded(str(checkpoint))
    expected = load_file(checkpoint / "model.safetensors")
    assert notes == []
    assert all(torch.equal(model.state_dict()[name], weight) for name, weight in expected.items())


def test_a_checkpoint_without_some_weights(checkpoint, tmp_path):
    def change(weights):
        weights["other.weight"] = weights.pop("model.layers.0.self_attn.q_proj.weight")

    with pytest.raises(InputError, match=r"1 missing: model\..*q_proj\.weight; no part of .* 1 of .*: other\.weight"):
        loaded(changed(checkpoint, tmp_path, change))


def test_a_checkpoint_with_weights_that_nobody_takes(checkpoint, tmp_path):
    _, (note,) = loaded(changed(checkpoint, tmp_path, lambda weights: weights.update(extra=torch.ones(1))))
    assert "no part of the model takes 1 of its weights: extra" in note


def test_a_checkpoint_of_other_shapes(checkpoint, tmp_path):
    def change(weights):
        weights["model.norm.weight"] = torch.ones(3)

    with pytest.raises(InputError, match="cannot be loaded"):
        loaded(changed(checkpoint, tmp_path, change))


def test_a_checkpoint_that_is_cut_off(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda weights: None)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(InputError, match="cannot be loaded"):
        loaded(folder)


def test_weights_of_whole_numbers(checkpoint, tmp_path):
    """Such as a quantized model's, whose config does not say so: they would be taken for plain ones."""

    def change(weights):
        name = "model.layers.0.self_attn.q_proj.weight"
        weights[name] = weights[name].to(torch.int32)

    with pytest.raises(InputError, match=r"not plain numbers; got I32: model\..*q_proj"):
        loaded(changed(checkpoint, tmp_path, change))


def test_a_quantized_checkpoint(checkpoint, tmp_path):
    folder = changed(checkpoint, tmp_path, lambda weights: None)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "quantization_config": {"bits": 4}}))
    with pytest.raises(InputError, match="quantized"):
        config_of(folder, 16)


def test_more_ranks_than_devices(monkeypatch):
    used = []
    for count, local_rank, device in ((0, 3, "cpu"), (1, 3, "cpu"), (4, 3, "cpu:3")):
        module = SimpleNamespace(device_count=lambda count=count: count, set_device=used.append)
        monkeypatch.setattr(torch, "get_device_module", lambda device_type, module=module: module)
        assert str(device_of("cpu", local_rank)) == device
    assert used == [3]
    with pytest.raises(InputError, match="local rank 4; allowed: 0 to 3"):
        device_of("cpu", 4)


def test_a_rank_that_fails_says_why_last(tmp_path):
    """Its thread that watches the parent's pipe must not abort it on the way out."""
    command = [sys.executable, "-m", "burst_portable.cli.run.worker", str(tmp_path / "no job"), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.wait(60) == 1
        said = rank.stderr.read().decode().splitlines()
    assert "FileNotFoundError" in said[-1], said
