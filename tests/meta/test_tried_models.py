"""Check the page of tried models and the script that writes it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import LlamaForCausalLM

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tried_models.md").read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "ci")
    yield importlib.import_module("make_models")
    for name in ("make_models", "model_trials", "image_models", "image_trials", "try_random_models"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "class_name", "verdict"),
    [
        ("llama", "LlamaForCausalLM", "equal"),
        ("gpt_oss", "GptOssForCausalLM", "equal"),
        ("llama4_text", "Llama4ForCausalLM", "equal"),
        ("bert", "BertForMaskedLM", "equal"),
        ("modernbert", "ModernBertForMaskedLM", "equal"),
        ("roberta", "RobertaForMaskedLM", "equal"),
        ("mamba", "MambaForCausalLM", "refused"),
    ],
)
def test_tried_model_rows_are_current(kind: str, class_name: str, verdict: str, script: Any):
    trial = script.try_named(kind, class_name)
    assert trial.verdict == verdict
    assert script.row(kind, class_name, trial) in PAGE.splitlines()


def test_tried_image_rows_are_current(script: Any):
    trial = script.try_images("qwen2_5_vl")
    assert trial.verdict == "equal"
    assert script.image_row("qwen2_5_vl", trial) in PAGE.splitlines()
    assert all(f"| {name} | {script.class_of(name).__name__} |" in PAGE for name in script.FAMILIES)
    listed = script.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items()
    assert all(f"| {kind} | {class_name} |" in PAGE for kind, class_name in listed)


@pytest.mark.parametrize("kind", ["blip", "kosmos-2", "kosmos-2.5", "ovis2", "qwen3_5"])
def test_untried_image_rows_are_current(kind: str, script: Any):
    class_name = script.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind]
    reason = script.refusal(class_name)
    assert (reason is None) is (kind == "ovis2")
    row = f"| {kind} | {class_name} |" if reason is None else f"| {kind} | {class_name} | {reason} |"
    assert row in PAGE.splitlines()


def test_tried_models_page_names_transformers_version(script: Any):
    assert f"transformers {transformers.__version__};" in PAGE
    assert all(f"| {kind} | {name} |" in PAGE for kind, name in script.listed())
    assert "## Different" not in PAGE


def test_readme_counts_classes_equal_to_one_device():
    equal = [part for part in PAGE.split("\n## ") if "qual to one device" in part.splitlines()[0]]
    rows = [row.split(" | ") for part in equal for row in part.splitlines() if row.startswith("| ")]
    classes = {row[1] for row in rows} - {"class", "---"}
    assert len(equal) == 2
    assert f"{len(classes)} Transformers model" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_random_models_equal_one_device(script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    chosen = importlib.import_module("try_random_models")
    monkeypatch.setattr(chosen, "listed", lambda: [("llama", "LlamaForCausalLM"), ("gemma3_text", "Gemma3ForCausalLM")])
    assert chosen.main(["--seed", "4", "--count", "2"]) == 0
    assert "2 models with seed 4: 0 differ" in capsys.readouterr().out
    monkeypatch.setattr(chosen, "try_model", lambda _, kind, **options: script.try_model(Neighbours, "llama"))
    assert chosen.main(["--seed", "4", "--count", "1"]) == 1


class Neighbours(LlamaForCausalLM):
    """A model whose tokens interact outside attention."""

    def forward(self, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return super().forward(input_ids=input_ids.roll(1, dims=-1), position_ids=position_ids, **kwargs)


def test_try_model_finds_wrong_model(script: Any):
    trial = script.try_model(Neighbours, "llama")
    assert trial.verdict == "different"
    assert trial.apart > 0.1
    page = script.page({("llama", "Neighbours"): trial})
    assert "## Different: 1" in page
    assert f"**by {trial.apart:.1e}**" in page
