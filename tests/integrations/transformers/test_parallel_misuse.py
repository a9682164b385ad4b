"""Calls that once gave a wrong number in silence: each test shows the number, and that the call is an error today."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch

from burst_portable import Mesh, run_threads
from burst_portable.config import environment_of_children
from burst_portable.errors import InputError
from burst_portable.integrations.transformers import parallelize
from tests.support.models import make, tokens


def _embedded(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the arguments of a multimodal model's call of its text model."""
    return {"inputs_embeds": model.get_input_embeddings()(ids).detach()}


@pytest.mark.parametrize("part", ["model", "base model", "embeddings"])
def test_call_without_a_length_is_refused(part: str) -> None:
    """Every rank holds the unsharded rows, and would attend to them as a shard of a sequence twice as long."""
    whole, ids = make("llama"), tokens(1, 32)

    def work(mesh: Mesh) -> float:
        model = copy.deepcopy(whole)
        called = model.model if part == "base model" else model
        arguments = _embedded(model, ids) if part == "embeddings" else {"input_ids": ids}
        expected = called(**arguments)[0].detach()
        handle = parallelize(called, mesh)
        with pytest.raises(InputError, match=r"does not say how many tokens .* got 32 tokens on rank \d, no seq_len"):
            called(**arguments)
        handle.seq_len = 64  # what such a call assumed
        wrong = called(**arguments)[0].detach()
        return float((wrong - expected).norm() / expected.norm())

    assert min(run_threads(2, work)) > 0.01


def test_rows_divided_by_the_caller_need_a_length() -> None:
    whole, ids = make("llama"), tokens(1, 32)
    expected = whole(input_ids=ids).logits.detach()

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        handle = parallelize(model, mesh, layout="contiguous", seq_len=32)
        rows = slice(16 * mesh.rank, 16 * mesh.rank + 16)
        torch.testing.assert_close(model(input_ids=ids[:, rows]).logits, expected[:, rows], rtol=0, atol=1e-5)
        handle.seq_len = None
        torch.testing.assert_close(
            model(input_ids=ids[:, rows], seq_len=32).logits, expected[:, rows], rtol=0, atol=1e-5
        )
        with pytest.raises(InputError, match="pass seq_len="):
            model(input_ids=ids[:, rows])

    run_threads(2, work)


BEFORE_THE_GROUP = """
import torch, burst_portable as bp
from burst_portable.integrations.transformers import parallelize
from tests.support.models import make
q = torch.ones(1, 8, 2, 8)
positions = lambda: bp.local_position_ids(seq_len=8)
for call in (lambda: bp.attention(q, q, q), lambda: parallelize(make("llama")), positions):
    try:
        call()
    except bp.BurstError as error:
        assert "a launcher started 2 processes, but there is no process group" in str(error), error
    else:
        raise SystemExit("a process of two computed as if it were alone")
assert bp.attention(q, q, q, mesh=bp.Mesh.single()).shape == q.shape
assert parallelize(make("llama"), bp.Mesh.single()).mesh.size == 1
"""


def test_no_mesh_before_the_process_group_is_refused() -> None:
    """Under torchrun each process was a mesh of one rank, so training was plain data parallel training."""
    environment = environment_of_children(WORLD_SIZE="2", RANK="0")
    done = subprocess.run([sys.executable, "-c", BEFORE_THE_GROUP], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
