"""Test batches at the edge, divided by `shard` and by the forward pass: loss and gradients of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from burst_portable import Mesh, run_threads
from burst_portable.errors import LayoutError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from tests.support.models import gradients_of, make, tokens

LENGTHS = (13, 31, 3, 46, 13)


def backward(model: Any, batch: dict[str, Tensor], mesh: Mesh | None = None, sharded: Any = None) -> float:
    """Return the loss of a batch after its backward pass. `sharded`: divide the batch before the call."""
    inputs = batch | {"use_cache": False} if mesh is None else batch if sharded is None else sharded.shard(batch)
    loss = model(**inputs).loss
    loss.backward()
    if mesh is not None:
        all_reduce_gradients(model.parameters(), mesh)
    return (loss.detach() if mesh is None or sharded is None else all_reduce(loss.detach(), mesh)).item()


def on_ranks(model: Any, full_batches: bool, batches: list[dict[str, Tensor]], ranks: int) -> list[Any]:
    """Return each rank's losses and last gradients, with an SGD step after each batch but the last."""
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def on_a_rank(mesh: Mesh) -> Any:
        sharded = parallelize(copies[mesh.rank], mesh, full_batches=full_batches)
        return steps(copies[mesh.rank], batches, mesh, None if full_batches else sharded)

    return run_threads(ranks, on_a_rank)


def steps(model: Any, batches: list[dict[str, Tensor]], mesh: Mesh | None = None, sharded: Any = None) -> Any:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for batch in batches:
        optimizer.zero_grad()
        losses.append(backward(model, batch, mesh, sharded))
        if batch is not batches[-1]:
            optimizer.step()
    return losses, gradients_of(model)


def with_row_of_padding() -> dict[str, Tensor]:
    ids, token = tokens(2, 13), torch.tensor([[1], [0]]).expand(2, 13)
    return {"input_ids": ids, "labels": ids.masked_fill(token == 0, -100), "attention_mask": token}


@pytest.mark.parametrize("full_batches", [False, True], ids=["shard", "full"])
@pytest.mark.parametrize("case", ["row of padding", "lengths"])
def test_edge_batches_equal_one_device(case: str, full_batches: bool) -> None:
    model = make("llama")
    batches = [with_row_of_padding()]
    if case == "lengths":
        rows = [tokens(1 + n % 2, n, seed=n) for n in LENGTHS]  # 3 ranks hold one token each of the third
        batches = [{"input_ids": ids, "labels": ids} for ids in rows]
    losses, gradients = steps(copy.deepcopy(model), batches)
    for found, summed in on_ranks(model, full_batches, batches, ranks=3):
        assert found == pytest.approx(losses, rel=4e-7)  # Transformers computes losses in float32
        for name, gradient in gradients.items():
            torch.testing.assert_close(summed[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shard", "full"])
def test_batch_without_labels_changes_nothing(full_batches: bool) -> None:
    """One device divides 0 by 0. Here the loss is 0, and so are the gradients."""
    ids = tokens(2, 13)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100)}
    for losses, gradients in on_ranks(make("llama"), full_batches, [batch], ranks=3):
        assert losses == [0.0]
        assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("full_batches", [False, True], ids=["shard", "full"])
def test_fewer_tokens_than_ranks_raise(full_batches: bool) -> None:
    ids = tokens(1, 2)
    with pytest.raises(LayoutError, match=r"more ranks than tokens; got 3 ranks for 2 tokens; .*pad the sequence to"):
        on_ranks(make("llama"), full_batches, [{"input_ids": ids, "labels": ids}], ranks=3)
