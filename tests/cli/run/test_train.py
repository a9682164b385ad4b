"""Test how a rank scores a text and compares its parameters with the other ranks."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from burst_portable import Mesh, run_threads
from burst_portable.cli import main
from burst_portable.cli.run.models import build, config_of, outline
from burst_portable.cli.run.outcome import relative_differences
from burst_portable.cli.run.texts import batches, tokens_of
from burst_portable.cli.run.train import Sharded, StepHistory, Trainer, fingerprint
from burst_portable.integrations.transformers import parallelize
from tests.support.models import SIZES, make


def test_perplexity_does_not_depend_on_ranks():
    model = make("llama", torch.float32)
    device, dtype = torch.device("cpu"), torch.float32
    data = [ids % 64 for ids in batches(tokens_of(None, None)[0], 45, 2, 3)]

    def nothing(history: StepHistory) -> None:
        pass

    expected = Trainer(model, device, dtype).score(data, nothing).losses

    def work(mesh: Mesh) -> list[float]:
        # Threads share the constant weights, but not the hooks.
        mine = copy.deepcopy(model)
        return Trainer(mine, device, dtype, Sharded(parallelize(mine, mesh), mesh)).score(data, nothing).losses

    for ranks in (1, 2, 3):
        for losses in run_threads(ranks, work):
            assert max(relative_differences(losses, expected)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "sizes", "dtype"),
    [
        ("gemma2", {"head_dim": 8, "sliding_window": 9}, torch.float32),
        (
            "gpt_oss",
            {"head_dim": 8, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
            torch.float32,
        ),
        ("mixtral", {"num_local_experts": 4}, torch.float64),
    ],
)
def test_models_without_sdpa_support_score_equally(
    kind: str, sizes: dict[str, int], dtype: torch.dtype, tmp_path: Path
):
    """Softcap, sinks and float64 experts need transformers' eager functions on one device."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    fields = {"model_type": kind, **SIZES, **rope, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    name, device = str(tmp_path / "config.json"), torch.device("cpu")
    assert outline(config_of(name, 45)).device.type == "meta"
    data = [ids % 64 for ids in batches(tokens_of(None, None)[0], 45, 2, 3)]
    whole, _ = build(name, config_of(name, 45), dtype, 0)
    expected = Trainer(whole, device, dtype).score(data, lambda history: None).losses

    def work(mesh: Mesh) -> list[float]:
        mine = copy.deepcopy(whole)
        trainer = Trainer(mine, device, dtype, Sharded(parallelize(mine, mesh), mesh))
        return trainer.score(data, lambda history: None).losses

    for losses in run_threads(2, work):
        assert max(relative_differences(losses, expected)) < 1e-6


@pytest.mark.full
@pytest.mark.slow
def test_perplexity_of_checkpoint_over_processes(tmp_path: Path):
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 256})).save_pretrained(tmp_path / "checkpoint")
    found = []
    for ranks in ("1", "2", "3"):
        out = tmp_path / f"{ranks}.json"
        arguments = ["run", "--model", str(tmp_path / "checkpoint"), "--eval", "--seq-len", "101", "--steps", "2"]
        assert main([*arguments, "--ranks", ranks, "--json", str(out)]) == 0
        found.append(json.loads(out.read_text(encoding="utf-8"))["perplexity"])
    assert 100 < found[0] < 1000  # with random weights, about one per byte value
    assert found == pytest.approx([found[0]] * 3, rel=1e-5)


def test_fingerprint_depends_on_each_bit():
    model = make("llama", torch.float32)
    before = fingerprint(model)
    assert fingerprint(make("llama", torch.float32)) == before
    with torch.no_grad():
        flat = model.lm_head.weight.view(-1)
        flat[[3, 5]] = flat[[5, 3]]
        swapped = fingerprint(model)
        flat[[3, 5]] = flat[[5, 3]]
        flat.view(torch.int32)[-1] ^= 1 << 31
    assert len({before, swapped, fingerprint(model)}) == 3
