"""Test the example that shards heads over one axis of a DeviceMesh, and sequences over another."""

from __future__ import annotations

import argparse
import pydoc_data.topics
import runpy
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fork_server import run_program

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "train_with_tensor_parallelism.py"


@cache
def losses_on_one_device() -> list[float]:
    """Return the losses of the example's steps with transformers alone."""
    tokens = torch.tensor(list("\n".join(pydoc_data.topics.topics.values()).encode()[: 3 * 2 * 253]))
    model = runpy.run_path(str(EXAMPLE))["load"](None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for input_ids in tokens.view(3, 2, 253):
        loss = model(input_ids=input_ids, labels=input_ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(ranks: int, *options: str) -> None:
    """Run the example over ranks and compare its losses with those of one device."""
    done = run_program("tests.support.ranks_of", ranks, "examples.train_with_tensor_parallelism", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [float(loss) for loss in done.stdout.split()[1:]] == pytest.approx(losses_on_one_device(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_sequence_and_tensor_axes_give_losses_of_one_device():
    expected = losses_on_one_device()
    assert expected[-1] < expected[0] - 0.2
    check(4, "--tensor", "2")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (8, "--data 2 --tensor 2 --strategy ring"),
        (8, "--tensor 2 --strategy ulysses"),
        (8, "--tensor 4 --strategy burst"),
        (6, "--tensor 2 --strategy dispatch"),
        (4, "--tensor 4"),
        (4, "--data 2"),
    ],
)
def test_other_grids_and_strategies_give_losses_of_one_device(ranks: int, options: str):
    check(ranks, *options.split())


def test_plan_that_does_not_fit_is_refused():
    shard_heads = runpy.run_path(str(EXAMPLE))["shard_heads"]
    model = SimpleNamespace(tp_plan={"*.q_proj": "colwise"}, config=argparse.Namespace(num_key_value_heads=4))
    with pytest.raises(SystemExit, match="--tensor 3 does not divide 4 K/V heads"):
        shard_heads(model, SimpleNamespace(size=lambda: 3))
    model.tp_plan = {"*.q_norm": "replicated_with_grad_allreduce"}
    with pytest.raises(SystemExit, match="styles that this example has not: replicated_with_grad_allreduce"):
        shard_heads(model, SimpleNamespace(size=lambda: 2))
