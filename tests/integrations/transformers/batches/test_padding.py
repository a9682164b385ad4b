"""Test padded batches of encoders, whose padding becomes a document, and other inputs with values for each token."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForTokenClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ErnieConfig,
    ErnieForMaskedLM,
    LlamaConfig,
    LlamaForTokenClassification,
    ModernBertConfig,
    ModernBertForMaskedLM,
)

from burst_portable import Mesh, run_threads, shard, unshard
from burst_portable.errors import InputError, MismatchError, ShapeError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.batches.padding import separated
from tests.support.models import SIZES, gradients_of, make, tokens

LENGTH = 23
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "local_attention": 6}
HELD = {"different rows": (23, 9, 16), "equal rows": (14, 14, 14), "a row of padding": (23, 0, 5)}


def _model(kind: str) -> Any:
    """Return a model whose tokens attend unequally, so that padding would count."""
    model = _initial(kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[-1] ** -0.5)
    return model


def _initial(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "modernbert":  # windows and RoPE
        return ModernBertForMaskedLM(ModernBertConfig(**SIZES, **WINDOWS)).double().eval()
    if kind == "ernie":
        return ErnieForMaskedLM(ErnieConfig(**SIZES, **NO_DROPOUT, use_task_id=True)).double().train()
    if kind == "llama token classes":
        return LlamaForTokenClassification(LlamaConfig(**SIZES, num_labels=5)).eval()
    if kind == "bert token classes":
        return BertForTokenClassification(BertConfig(**SIZES, **NO_DROPOUT, num_labels=5)).double().train()
    return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)).double().train()


def _batch(held: tuple[int, ...], kind: str = "bert") -> dict[str, Tensor]:
    ids = tokens(len(held), LENGTH)
    mask = (torch.arange(LENGTH) < torch.tensor(held)[:, None]).long()
    classes = 5 if kind.endswith("classes") else 64
    labels = tokens(len(held), LENGTH, seed=2) % classes
    labels = labels.masked_fill((mask == 0) | (torch.arange(LENGTH) % 3 == 0), -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _compare(model: Any, batch: dict[str, Tensor], ranks: int, *, full_batches: bool, exact: float = 1e-9) -> None:
    """Compare loss and gradients of a batch with one device."""
    alone = copy.deepcopy(model)
    expected = alone(**batch).loss
    expected.backward()
    gradients = gradients_of(alone)

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh, full_batches=full_batches)
        loss = mine(**batch if full_batches else sharded.shard(batch)).loss
        loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        total = loss.detach() if full_batches else all_reduce(loss.detach(), mesh)
        torch.testing.assert_close(total, expected.detach(), rtol=exact, atol=0)
        found = gradients_of(mine)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert (found[name] - gradient).norm() <= exact * gradient.norm().clamp(min=1e-3), name

    run_threads(ranks, work)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shards", "full batches"])
@pytest.mark.parametrize(
    ("kind", "held", "ranks"),
    [
        ("bert", "different rows", 3),
        ("bert", "equal rows", 2),
        ("bert", "a row of padding", 2),
        ("modernbert", "different rows", 2),
        ("bert token classes", "different rows", 2),
        ("llama token classes", "different rows", 2),
    ],
)
def test_padded_batch_equals_one_device(kind: str, held: str, ranks: int, full_batches: bool) -> None:
    exact = 2e-5 if kind == "llama token classes" else 2e-7 if kind == "modernbert" else 1e-9  # float32 model or loss
    _compare(_model(kind), _batch(HELD[held], kind), ranks, full_batches=full_batches, exact=exact)


def test_padding_that_is_not_separated_changes_the_loss() -> None:
    model, batch = _model("bert"), _batch(HELD["different rows"])
    with torch.no_grad():
        right = model(**batch).loss
        wrong = model(**{name: x for name, x in batch.items() if name != "attention_mask"}).loss
    assert abs(right - wrong) > 1e-4


def test_outputs_of_padded_encoder_without_labels() -> None:
    """Their default labels are none, so none can be on padding."""
    torch.manual_seed(0)
    model = BertModel(BertConfig(**SIZES, **NO_DROPOUT), add_pooling_layer=False).double().eval()
    batch = _batch(HELD["different rows"])
    del batch["labels"]
    expected = model(**batch).last_hidden_state.detach()
    token = batch["attention_mask"] != 0

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        inputs = sharded.shard(batch)
        assert "labels" not in inputs
        states = mine(**inputs).last_hidden_state.detach()
        layout = sharded.layout_of(inputs["seq_len"], inputs["cu_seqlens"])
        whole = unshard(states, mesh, seq_len=inputs["seq_len"], layout=layout).view(expected.shape)
        torch.testing.assert_close(whole[token], expected[token], rtol=0, atol=1e-9)
        sharded.undo()
        parallelize(mine, mesh, full_batches=True)
        with torch.no_grad():
            whole = mine(**batch).last_hidden_state
        torch.testing.assert_close(whole[token], expected[token], rtol=0, atol=1e-9)

    run_threads(2, work)


def test_separated_adds_a_border_at_the_padding() -> None:
    mask = (torch.arange(9) < torch.tensor([[9], [5], [0]])).long()
    assert separated((), mask) == ((0, 9), (0, 5, 9), (0, 9))
    assert separated(((0, 3, 9),), mask) == ((0, 3, 9), (0, 3, 5, 9), (0, 3, 9))
    assert separated((), mask[1:2]) == ((0, 5, 9),)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shards", "full batches"])
@pytest.mark.parametrize("held", [(23, 9, 16), (23, 23, 23)], ids=["padded", "full rows"])
def test_inputs_of_tokens_are_divided(held: tuple[int, ...], full_batches: bool) -> None:
    model, batch = _model("ernie"), _batch(held)
    loss = model(**batch).loss
    batch |= {name: tokens(3, LENGTH, seed) % 2 for name, seed in (("token_type_ids", 3), ("task_type_ids", 4))}
    assert abs(model(**batch).loss - loss) > 1e-3
    _compare(model, batch, 2, full_batches=full_batches)


def test_inputs_of_tokens_move_with_left_padding() -> None:
    """Positions count from the first token, so that BERT may get padding before it."""
    model, batch = _model("bert"), _batch((23, 9, 16))
    batch["token_type_ids"] = tokens(3, LENGTH, seed=3) % 2
    batch = {name: x.flip(1) for name, x in batch.items()}
    batch["position_ids"] = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    _compare(model, batch, 2, full_batches=True)


def test_inputs_of_tokens_must_fit() -> None:
    model, batch = _model("bert"), _batch((23, 23))
    sharded = parallelize(model, Mesh.single())
    with pytest.raises(ShapeError, match=r"token_type_ids has no value for each token; got \(2, 22\)"):
        sharded.shard(batch | {"token_type_ids": batch["input_ids"][:, 1:]})
    with pytest.raises(
        InputError, match=r"got 'weights'; allowed: .*token_type_ids, .*position_ids, .*divide it by burst"
    ):
        sharded.shard(batch | {"weights": torch.ones(2, LENGTH)})
    llama = parallelize(make("llama"), Mesh.single())
    with pytest.raises(InputError, match=r"got 'token_type_ids'; allowed: input_ids, labels.*; remove these tensors"):
        llama.shard(batch | {"token_type_ids": batch["input_ids"]})


def test_inputs_of_tokens_that_the_caller_divides() -> None:
    model, batch = _model("bert"), _batch((23, 23))
    types = tokens(2, LENGTH, seed=3) % 2
    expected = model(**batch, token_type_ids=types).loss.detach()

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        own = shard(types, mesh, layout=sharded.layout_of(LENGTH))
        torch.testing.assert_close(
            all_reduce(mine(**sharded.shard(batch), token_type_ids=own).loss.detach(), mesh), expected
        )

    run_threads(2, work)


def test_inputs_of_tokens_that_differ_between_ranks_raise() -> None:
    model, batch = _model("bert"), _batch((23, 23))

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        types = torch.zeros_like(batch["input_ids"]).index_fill(1, torch.tensor([mesh.rank]), 1)
        with pytest.raises(MismatchError, match="rows of the masked batch"):
            mine(**sharded.shard(batch | {"token_type_ids": types}))

    run_threads(2, work)


class _WeightedBert(BertForMaskedLM):  # type: ignore[misc]
    """A model of another package, whose labels have different weights."""

    def forward(self, input_ids: Any, position_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        found = super().forward(input_ids, position_ids=position_ids, **inputs)
        weight = torch.linspace(0.1, 2, 64, dtype=found.logits.dtype)
        found.loss = torch.nn.CrossEntropyLoss(weight)(found.logits.flatten(0, 1), labels.flatten())
        return found


def test_loss_of_another_package_raises() -> None:
    """Its mean is not that of Transformers' models of this kind."""
    torch.manual_seed(0)
    model, batch = _WeightedBert(BertConfig(**SIZES, **NO_DROPOUT)).double(), _batch((23, 23))

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        with pytest.raises(UnsupportedError, match="_WeightedBert computes its loss from this rank's tokens only"):
            mine(**sharded.shard(batch))

    run_threads(2, work)


@pytest.mark.parametrize("ranks", [2, 3])
def test_padded_classifier_with_an_encoder_equals_one_device(ranks: int) -> None:
    """Its base model is sharded, and its head reads the first token of each row on every rank."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
    config = DistilBertConfig(**sizes, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=3)
    model = DistilBertForSequenceClassification(config).double().train()
    batch = _batch(HELD["different rows"]) | {"labels": torch.tensor([0, 2, 1])}
    alone = copy.deepcopy(model)
    expected = alone(**batch).loss
    expected.backward()
    gradients = gradients_of(alone)

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        parallelize(mine.base_model, mesh, full_batches=True, averaged_gradients=True)
        loss = mine(**batch).loss
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
        for name, parameter in mine.named_parameters():
            average = all_reduce(parameter.grad, mesh) / mesh.size
            assert (average - gradients[name]).norm() <= 1e-9 * gradients[name].norm().clamp(min=1e-3), name

    run_threads(ranks, work)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shards", "full batches"])
def test_mask_of_pairs_raises(full_batches: bool) -> None:
    model = make("llama")
    sharded = parallelize(model, Mesh.single(), full_batches=full_batches)
    call = model if full_batches else sharded.shard
    with pytest.raises(UnsupportedError, match=r"each pair of tokens.*pass cu_seqlens for packed documents"):
        call(input_ids=tokens(1, LENGTH), attention_mask=torch.ones(1, 1, LENGTH, LENGTH).tril())
