"""Test ESM with `token_dropout`, whose embeddings depend on the masked tokens of a whole row."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EsmConfig, EsmForMaskedLM

from burst_portable import Mesh, run_threads, unshard
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from tests.support.models import LENGTH, SIZES, gradients_of, tokens

PAD, MASK_TOKEN = 1, 3
KINDS: dict[str, dict[str, Any]] = {
    "esm2": {"position_embedding_type": "rotary"},
    "esm1": {"emb_layer_norm_before": True},
}


def make(kind: str = "esm2", **options: Any) -> Any:
    options = {
        **SIZES,
        **KINDS[kind],
        "pad_token_id": PAD,
        "mask_token_id": MASK_TOKEN,
        "token_dropout": True,
    } | options
    torch.manual_seed(0)
    config = EsmConfig(**options, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = EsmForMaskedLM(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def masked_batch(padded: bool = False) -> dict[str, Tensor]:
    """Return three rows, whose masked tokens are all at their beginning, or most of the row, or none."""
    labels = tokens(batch=3).clamp(min=4)
    ids = labels.clone()
    ids[0, 2:13] = MASK_TOKEN
    ids[1, 5:40] = MASK_TOKEN
    batch = {"input_ids": ids, "labels": labels}
    if padded:
        is_token = torch.arange(LENGTH) < torch.tensor([[35], [47], [17]])
        batch = {"input_ids": ids.where(is_token, PAD), "labels": labels.where(is_token, -100)}
        batch["attention_mask"] = is_token.long()
    return batch


def on_one_device(model: Any, batch: dict[str, Tensor]) -> tuple[float, Tensor, dict[str, Tensor]]:
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    out = alone(**batch)
    out.loss.backward()
    return out.loss.item(), out.logits.detach(), gradients_of(alone)


def assert_equal(found: tuple[Any, ...], expected: tuple[Any, ...], is_token: Tensor) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0.0)  # the loss is float32
    torch.testing.assert_close(found[1][is_token], expected[1][is_token], rtol=1e-7, atol=1e-7)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        assert (found[2][name] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_token_dropout_equals_one_device(kind: str, ranks: int, padded: bool) -> None:
    model, batch = make(kind), masked_batch(padded)
    expected = on_one_device(model, batch)
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> tuple[float, Tensor, dict[str, Tensor]]:
        mine = models[mesh.rank]
        sharded = parallelize(mine, mesh)
        inputs = sharded.shard(batch)
        out = mine(**inputs)
        out.loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        layout = sharded.layout_of(inputs["seq_len"], inputs["cu_seqlens"])
        logits = unshard(out.logits.detach(), mesh, seq_len=inputs["seq_len"], layout=layout)
        loss = all_reduce(out.loss.detach().reshape(1), mesh).item()
        return loss, logits.view(3, LENGTH, -1), gradients_of(mine)

    is_token = batch.get("attention_mask", torch.ones(3, LENGTH)) == 1
    for found in run_threads(ranks, work):
        assert_equal(found, expected, is_token)


@pytest.mark.parametrize(("kind", "side"), [("esm2", "right"), ("esm1", "right"), ("esm1", "left")])
def test_token_dropout_of_full_batches_equals_one_device(kind: str, side: str) -> None:
    model, batch = make(kind), masked_batch(padded=True)
    if side == "left":
        batch = {name: x.flip(1) for name, x in batch.items()}
    expected = on_one_device(model, batch)
    models = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> tuple[float, Tensor, dict[str, Tensor]]:
        mine = models[mesh.rank]
        parallelize(mine, mesh, full_batches=True, gather_outputs=True)
        out = mine(**batch)
        out.loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        return out.loss.item(), out.logits.detach(), gradients_of(mine)

    for found in run_threads(2, work):
        assert_equal(found, expected, batch["attention_mask"] == 1)


def test_token_dropout_of_packed_documents_is_of_each_document() -> None:
    model, ends = make(), (0, 9, 30, 47)
    batch = masked_batch()
    ids = batch["input_ids"][:1]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=ids[:, a:b]).logits for a, b in pairwise(ends)], dim=1)

    def work(mesh: Mesh) -> Tensor:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        with torch.no_grad():
            logits = mine(**sharded.shard({"input_ids": ids}, cu_seqlens=ends)).logits
        return unshard(logits, mesh, seq_len=47, layout=sharded.layout_of(47, ends))

    for ranks in (1, 2):
        for logits in run_threads(ranks, work):
            torch.testing.assert_close(logits, alone, rtol=1e-7, atol=1e-7)


def test_planted_fault_of_the_share_of_a_shard_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make(), masked_batch()
    expected = on_one_device(model, batch)
    monkeypatch.setattr("burst_portable.integrations.transformers.layers.token_dropout.all_reduce", lambda x, mesh: x)

    def work(mesh: Mesh) -> Tensor:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        with torch.no_grad():
            return unshard(mine(**sharded.shard(batch)).logits, mesh, seq_len=LENGTH, layout=sharded.layout)

    apart = (run_threads(2, work)[0] - expected[1]).abs().amax(dim=(1, 2))
    assert apart[:2].min() > 1e-2
    assert apart[2] < 1e-7  # no masked tokens


def test_undo_restores_token_dropout() -> None:
    model, batch = make(), masked_batch()
    expected = model(**batch).logits
    parallelize(model, Mesh.single()).undo()
    assert model.esm.embeddings.token_dropout
    assert not model.esm.embeddings.word_embeddings._forward_hooks
    assert torch.equal(model(**batch).logits, expected)


def test_word_embeddings_replaced_after_parallelize_raise() -> None:
    model = make()
    sharded = parallelize(model, Mesh.single())
    embeddings = model.esm.embeddings
    embeddings.word_embeddings = torch.nn.Sequential(embeddings.word_embeddings)  # as adapters do
    with pytest.raises(UnsupportedError, match=r"word embeddings were replaced after parallelize.*undo"):
        model(**sharded.shard(masked_batch()))


def test_copy_of_sharded_model_drops_tokens() -> None:
    model, batch = make(), masked_batch()
    expected = on_one_device(model, batch)
    sharded = parallelize(model, Mesh.single())
    copied = copy.deepcopy(model)
    assert copied(**sharded.shard(batch)).loss.item() == pytest.approx(expected[0], rel=1e-6)


def test_token_dropout_of_decoder_raises() -> None:
    with pytest.raises(UnsupportedError, match="token_dropout in other models than ESM's encoders"):
        parallelize(make(is_decoder=True), Mesh.single())
