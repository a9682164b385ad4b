"""Test batches whose rows have different documents: losses, gradients and outputs of one device."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Llama4ForCausalLM, Llama4TextConfig

from burst_portable import Mesh, run_threads, unshard
from burst_portable.errors import InputError, MaskError, ShapeError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from tests.support.models import LENGTH, SIZES, checkpoint_activations, gradients_of, make, tokens

ROWS = ((0, 5, 35, LENGTH), (0, 30, LENGTH), (0, LENGTH))


def positions(rows: tuple[tuple[int, ...], ...] = ROWS) -> Tensor:
    return torch.stack([torch.cat([torch.arange(b - a) for a, b in pairwise(row)]) for row in rows])


def one_device(
    kind: str, *, is_first_predicted: bool = True, **options: Any
) -> tuple[Any, Tensor, Tensor, dict[str, Tensor]]:
    """Return the model, ids, logits and gradients of one device, which reads documents from position ids.

    `is_first_predicted`: Whether the last token of a document predicts the first one of the next, as one device does.
    """
    model, ids = make(kind, **options), tokens(3)
    reference = copy.deepcopy(model)
    reference.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")
    labels = ids if is_first_predicted else ids.masked_fill(positions() == 0, -100)
    out = reference(input_ids=ids, labels=labels, position_ids=positions(), use_cache=False)
    out.loss.backward()
    return model, ids, out, gradients_of(reference)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shard", "full"])
@pytest.mark.parametrize("given", ["position_ids", "cu_seqlens"])
@pytest.mark.parametrize(
    ("kind", "ranks", "layout"),
    [("llama", 1, "zigzag"), ("mistral", 2, "document_zigzag"), ("llama", 3, "zigzag")],
)
def test_rows_with_different_documents_equal_one_device(
    kind: str, ranks: int, layout: str, given: str, full_batches: bool
) -> None:
    """Labels of first tokens count as on one device with position ids. They never do with `cu_seqlens`."""
    whole, ids, expected, gradients = one_device(kind, is_first_predicted=given == "position_ids")
    batch = {"input_ids": ids, "labels": ids, given: positions() if given == "position_ids" else ROWS}

    def work(mesh: Mesh) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        gather = {"gather_outputs": True} if full_batches else {}
        sharded = parallelize(model, mesh, layout=layout, full_batches=full_batches, **gather)
        inputs = batch if full_batches else sharded.shard(batch)
        out = model(**inputs)
        out.loss.backward()
        all_reduce_gradients(model.parameters(), mesh)
        loss, logits = out.loss.detach(), out.logits.detach()
        if not full_batches:
            of_batch = sharded.layout_of(inputs["seq_len"], inputs["cu_seqlens"])
            logits = unshard(logits, mesh, seq_len=inputs["seq_len"], layout=of_batch).view(3, LENGTH, -1)
            loss = all_reduce(loss, mesh)
        return loss, logits, gradients_of(model)

    for loss, logits, found in run_threads(ranks, work):
        torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-9, atol=1e-12)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1] * 3], ids=["different", "equal"])
def test_count_of_trainer_gives_mean_of_one_device(rows: tuple[tuple[int, ...], ...]) -> None:
    """Trainer counts all labels but those of the first column, also at the borders of documents."""
    whole, ids, given = make("llama"), tokens(3), positions(rows)
    count = ids[:, 1:].numel()
    reference = copy.deepcopy(whole)
    expected = reference(input_ids=ids, labels=ids, position_ids=given, num_items_in_batch=count, use_cache=False).loss
    expected.backward()

    def work(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
        parallelize(model := copy.deepcopy(whole), mesh, full_batches=True)
        named = {"input_ids": ids, "labels": ids, "num_items_in_batch": count}
        with pytest.raises(InputError, match=rf"no token predicts them; got {count} labels, of which {count - 3}"):
            model(**named, cu_seqlens=ROWS)
        loss = model(**named, position_ids=given).loss
        loss.backward()
        all_reduce_gradients(model.parameters(), mesh)
        return loss.detach(), gradients_of(model)

    for loss, found in run_threads(2, work):
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
        for name, gradient in gradients_of(reference).items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)


def test_default_labels_end_at_documents() -> None:
    """Without labels, one device computes no loss. So they are those of documents."""
    sharded = parallelize(make("llama"), Mesh.single())
    batch = {"input_ids": tokens(3), "position_ids": positions()}
    assert sharded.shard(batch)["num_items_in_batch"] == 3 * LENGTH - 6
    assert sharded.shard(batch | {"labels": batch["input_ids"]})["num_items_in_batch"] == 3 * LENGTH - 3


@pytest.mark.parametrize("full_batches", [False, True], ids=["shard", "full"])
@pytest.mark.parametrize("kind", ["ones", "booleans", "padding elsewhere"])
def test_mask_that_joins_documents_raises(kind: str, full_batches: bool) -> None:
    """One device attends over the borders then: the loss is not that of documents."""
    whole, ids = make("llama"), tokens(3)
    mask = torch.ones_like(ids)
    if kind == "padding elsewhere":
        mask[2, 30:] = 0
    batch = {"input_ids": ids, "position_ids": positions(), "labels": ids.masked_fill(mask == 0, -100)}
    plain, joined = (whole(**batch, **m, use_cache=False).loss for m in ({}, {"attention_mask": mask}))
    assert abs(plain - joined) > 1e-4
    batch["attention_mask"] = mask.bool() if kind == "booleans" else mask

    def work(mesh: Mesh) -> None:
        sharded = parallelize(model := copy.deepcopy(whole), mesh, full_batches=full_batches)
        with pytest.raises(InputError, match=r"attention mask joins them; .*leave out attention_mask"):
            model(**batch if full_batches else sharded.shard(batch))

    run_threads(2, work)


@pytest.mark.parametrize("case", ["padding", "embeddings", "router loss", "checkpointing"])
def test_joined_rows_in_full_batches_equal_one_device(case: str) -> None:
    routed = {"output_router_logits": True} if case == "router loss" else {}
    whole, ids, expected, gradients = one_device("mixtral" if routed else "llama", **routed)
    batch = {"input_ids": ids, "labels": ids, "position_ids": positions()}
    if case == "padding":  # the second document of the second row, which has no labels then
        mask = (positions() == 0).cumsum(dim=1)  # documents are numbered: one device ignores position ids with ones
        mask[1, 30:] = 0
        batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
        reference = copy.deepcopy(whole)
        expected = reference(input_ids=ids, labels=batch["labels"], position_ids=positions(), use_cache=False)
        expected.loss.backward()
        gradients = gradients_of(reference)

    def work(mesh: Mesh) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        if case == "checkpointing":
            checkpoint_activations(model)
        parallelize(model, mesh, full_batches=True, gather_outputs=True)
        inputs = dict(batch)
        if case == "embeddings":
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
        out = model(**inputs)
        out.loss.backward()
        all_reduce_gradients(model.parameters(), mesh)
        return out.loss.detach(), out.logits.detach(), gradients_of(model)

    for loss, logits, found in run_threads(2, work):
        torch.testing.assert_close(loss, expected.loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(logits, expected.logits, rtol=1e-6, atol=1e-9)
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)


def test_equal_documents_keep_rows() -> None:
    """Equal documents, given per row, are those of all rows: no row is joined."""
    sharded, ids = parallelize(make("llama"), Mesh.single()), tokens(2)
    assert sharded.shard(ids, cu_seqlens=[ROWS[0]] * 2)["input_ids"].shape == ids.shape
    assert sharded.shard(ids, cu_seqlens=torch.tensor([ROWS[0]] * 2))["cu_seqlens"] == ROWS[0]
    assert sharded.shard(ids, cu_seqlens=ROWS[:2])["input_ids"].shape == (1, 2 * LENGTH)


@pytest.mark.parametrize(
    ("rows", "others", "error", "text"),
    [
        (ROWS, {}, InputError, "one list per row; got 3; allowed: 2"),
        (((0, 5, LENGTH), (0, LENGTH - 1)), {}, InputError, f"end with their row; got {LENGTH - 1}"),
        (((0, 5, LENGTH), (5, LENGTH)), {}, MaskError, r"cu_seqlens\[1\] takes cumulative lengths"),
        (ROWS[:2], {"labels": torch.zeros(LENGTH, 2, dtype=torch.int64)}, ShapeError, "labels and input_ids"),
        (ROWS[:2], {"attention_mask": torch.ones(1, 2 * LENGTH)}, ShapeError, "attention_mask and input_ids"),
    ],
)
def test_shard_rejects_invalid_documents_of_rows(rows: Any, others: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        parallelize(make("llama"), Mesh.single()).shard(tokens(2), cu_seqlens=rows, **others)


def test_rows_of_model_that_scales_by_row_raise() -> None:
    """Llama 4 scales queries by the place in their row, which a joined row would change."""
    config = Llama4TextConfig(
        **SIZES, head_dim=8, num_local_experts=2, intermediate_size_mlp=48, attention_chunk_size=None, floor_scale=8
    )
    sharded = parallelize(Llama4ForCausalLM(config), Mesh.single())
    with pytest.raises(UnsupportedError, match="scales queries by their row number; pass one row per batch"):
        sharded.shard(tokens(2), cu_seqlens=ROWS[:2])
