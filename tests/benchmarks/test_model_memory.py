"""Test the computed peak of a training step against the bytes of its largest tensors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

ROOT = Path(__file__).parents[2]
LAYERS, HIDDEN, WORDS, LOCAL = 6, 128, 32768, 8192  # the logits are the largest tensors of a step


@pytest.mark.full
def test_model_memory_counts_logits_inputs_and_states(tmp_path: Path) -> None:
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_attention_heads": 4, "vocab_size": WORDS}
    LlamaConfig(num_hidden_layers=LAYERS, num_key_value_heads=2, **sizes).save_pretrained(tmp_path)
    command = [sys.executable, "-m", "benchmarks.model_memory", "--config", str(tmp_path / "config.json")]
    command += ["--seq-len", str(2 * LOCAL), "--ranks", "2", "--loss-rows", "256"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = [float(number) * 2**30 for number in re.findall(r"([\d.]+) GiB", done.stdout)]
    logits = 2 * LOCAL * WORDS * 2  # and their gradient, in 16 bits
    states = 12 * 2 * WORDS * HIDDEN // 2  # embedding and head, and Adam's two states, over two ranks
    inputs = LAYERS * LOCAL * HIDDEN * 2
    rounding = 0.05 * 2**30
    assert found[0] > logits + states + inputs - rounding
    assert states + inputs - rounding < found[1] < found[0] - logits + rounding
