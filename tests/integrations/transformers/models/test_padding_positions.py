"""Test models whose positions count from their padding token, as RoBERTa's: results equal those of one device."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    CamembertConfig,
    CamembertForMaskedLM,
    Data2VecTextConfig,
    Data2VecTextForMaskedLM,
    EsmConfig,
    EsmForMaskedLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaForTokenClassification,
    RobertaPreLayerNormConfig,
    RobertaPreLayerNormForMaskedLM,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
    XLMRobertaXLConfig,
    XLMRobertaXLForMaskedLM,
)

from burst_portable import Mesh, local_position_ids, run_threads, shard, unshard
from burst_portable.errors import InputError, MismatchError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.models.padding_positions import positions_from_padding
from tests.support.models import LENGTH, SIZES, gradients_of, tokens

PAD, MASK_TOKEN, ROWS = 1, 3, 3
OPTIONS: dict[str, Any] = {**SIZES, "pad_token_id": PAD, "mask_token_id": MASK_TOKEN}
OPTIONS |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "roberta": (RobertaForMaskedLM, RobertaConfig, {}),
    "roberta_causal": (RobertaForCausalLM, RobertaConfig, {"is_decoder": True}),
    "roberta_tokens": (RobertaForTokenClassification, RobertaConfig, {"num_labels": 64}),
    "roberta_row": (RobertaForSequenceClassification, RobertaConfig, {"num_labels": 3}),
    "roberta_prelayernorm": (RobertaPreLayerNormForMaskedLM, RobertaPreLayerNormConfig, {}),
    "xlm_roberta": (XLMRobertaForMaskedLM, XLMRobertaConfig, {}),
    "xlm_roberta_xl": (XLMRobertaXLForMaskedLM, XLMRobertaXLConfig, {}),
    "camembert": (CamembertForMaskedLM, CamembertConfig, {}),
    "data2vec": (Data2VecTextForMaskedLM, Data2VecTextConfig, {}),
    "esm": (EsmForMaskedLM, EsmConfig, {"emb_layer_norm_before": True}),
    "esm_rotary": (EsmForMaskedLM, EsmConfig, {"position_embedding_type": "rotary"}),
}
AT_END = torch.tensor([12, 0, 30])


def make(kind: str, **changes: Any) -> Any:
    model_class, config_class, options = MODELS[kind]
    torch.manual_seed(0)
    model = model_class(config_class(**{**OPTIONS, **options, **changes})).double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def batch_of(side: str) -> dict[str, Tensor]:
    """Return rows with padding at one side. The first row also has two padding tokens between its tokens."""
    ids = tokens(batch=ROWS).clamp(min=4)
    ids[0, [3, 8]] = PAD
    if side == "none":
        return {"input_ids": ids, "labels": ids}
    places = torch.arange(LENGTH)
    counted = AT_END.unsqueeze(1)
    is_token = places < LENGTH - counted if side == "right" else places >= counted
    ids = ids.masked_fill(~is_token, PAD)
    labels = ids.masked_fill(~is_token | (places == counted), -100)
    return {"input_ids": ids, "attention_mask": is_token.long(), "labels": labels}


def expected_of(model: PreTrainedModel, batch: dict[str, Tensor]) -> tuple[float, Tensor, dict[str, Tensor]]:
    alone = copy.deepcopy(model)
    alone.set_attn_implementation("sdpa")
    out = alone(**batch)
    out.loss.backward()
    return out.loss.item(), out.logits.detach(), gradients_of(alone)


def assert_equal(found: tuple[Any, ...], expected: tuple[Any, ...], batch: dict[str, Tensor]) -> None:
    is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"])) == 1
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0.0)  # some losses are float32
    torch.testing.assert_close(found[1][is_token], expected[1][is_token], rtol=1e-6, atol=1e-6)
    assert found[2].keys() == expected[2].keys()
    for name, gradient in expected[2].items():
        torch.testing.assert_close(found[2][name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")


def on_shards(ranks: int, model: Any, batch: dict[str, Tensor]) -> list[tuple[float, Tensor, dict[str, Tensor]]]:
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> tuple[float, Tensor, dict[str, Tensor]]:
        sharded = parallelize(models[mesh.rank], mesh)
        inputs = sharded.shard(batch)
        out = models[mesh.rank](**{name: x.clone() if name == "position_ids" else x for name, x in inputs.items()})
        out.loss.backward()
        all_reduce_gradients(models[mesh.rank].parameters(), mesh)
        layout = sharded.layout_of(inputs["seq_len"], inputs["cu_seqlens"])
        logits = unshard(out.logits.detach(), mesh, seq_len=inputs["seq_len"], layout=layout)
        loss = all_reduce(out.loss.detach().reshape(1), mesh).item()
        return loss, logits.reshape(ROWS, LENGTH, -1), gradients_of(models[mesh.rank])

    return run_threads(ranks, work)


def on_full_batches(ranks: int, model: Any, batch: dict[str, Tensor]) -> list[tuple[float, Tensor, dict[str, Tensor]]]:
    models = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> tuple[float, Tensor, dict[str, Tensor]]:
        parallelize(models[mesh.rank], mesh, full_batches=True, gather_outputs=True)
        out = models[mesh.rank](**batch)
        out.loss.backward()
        all_reduce_gradients(models[mesh.rank].parameters(), mesh)
        return out.loss.item(), out.logits.detach(), gradients_of(models[mesh.rank])

    return run_threads(ranks, work)


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize(
    ("kind", "ranks"), [*((kind, 2) for kind in MODELS if kind != "roberta_row"), ("roberta", 1), ("roberta", 3)]
)
def test_shards_equal_one_device(kind: str, ranks: int, side: str) -> None:
    model, batch = make(kind), batch_of(side)
    expected = expected_of(model, batch)
    for found in on_shards(ranks, model, batch):
        assert_equal(found, expected, batch)


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize(("kind", "ranks"), [("roberta", 1), ("roberta", 3), ("roberta_causal", 2), ("camembert", 2)])
def test_full_batches_equal_one_device(kind: str, ranks: int, side: str) -> None:
    model, batch = make(kind), batch_of(side)
    expected = expected_of(model, batch)
    for found in on_full_batches(ranks, model, batch):
        assert_equal(found, expected, batch)


@pytest.mark.parametrize("side", ["none", "left"])
def test_embeddings_equal_one_device(side: str) -> None:
    """Their positions count padding as well, as on one device."""
    model, batch = make("roberta"), batch_of(side)
    batch["inputs_embeds"] = model.get_input_embeddings()(batch["input_ids"]).detach()
    ids = batch.pop("input_ids")
    expected = expected_of(model, batch)
    for found in on_full_batches(2, model, batch):
        assert_equal(found, expected, {"input_ids": ids, **batch})


def test_documents_equal_those_alone() -> None:
    """Positions count in each document."""
    model, ids = make("roberta"), batch_of("none")["input_ids"][:1]
    ends = (0, 6, 31, LENGTH)
    parts = [make("roberta").eval()(ids[:, a:b]).logits for a, b in pairwise(ends)]

    def work(mesh: Mesh) -> Tensor:
        mine = copy.deepcopy(model).eval()
        parallelize(mine, mesh, full_batches=True)
        with torch.no_grad():
            return mine(input_ids=ids, cu_seqlens=ends).logits

    for found in run_threads(3, work):
        torch.testing.assert_close(found, torch.cat(parts, dim=1).detach(), rtol=1e-9, atol=1e-12)


def test_positions_that_the_model_computes_are_accepted() -> None:
    model, batch = make("roberta"), batch_of("right")
    create = model.roberta.embeddings.create_position_ids_from_input_ids
    positions = create(batch["input_ids"], PAD)
    assert torch.equal(positions, positions_from_padding(batch["input_ids"], PAD))
    expected = expected_of(model, batch)
    for found in on_shards(2, model, batch | {"position_ids": positions}):
        assert_equal(found, expected, batch)
    for found in on_full_batches(2, model, batch | {"position_ids": positions}):
        assert_equal(found, expected, batch)


def test_other_positions_raise() -> None:
    model, batch = make("roberta"), batch_of("none")
    places = torch.arange(LENGTH).expand(ROWS, -1)
    with parallelize(model, Mesh.single()) as sharded, pytest.raises(UnsupportedError, match="leave them out"):
        sharded.shard(batch | {"position_ids": places})
    with parallelize(model, Mesh.single(), full_batches=True), pytest.raises(UnsupportedError, match="leave them out"):
        model(**batch, position_ids=places)


def test_tokens_divided_by_the_caller_need_their_positions() -> None:
    """The planted fault has the positions of BERT: those of a rank's places, without the offset of the padding."""
    whole, ids = make("roberta").eval(), batch_of("none")["input_ids"]
    expected = whole(ids).logits.detach()

    def work(mesh: Mesh) -> Tensor:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, layout="contiguous", seq_len=LENGTH)
        divide = {"mesh": mesh, "layout": sharded.layout_of(LENGTH)}
        mine, right = (shard(x, **divide) for x in (ids, positions_from_padding(ids, PAD)))
        places = local_position_ids(mesh, seq_len=LENGTH, layout=sharded.layout_of(LENGTH)).expand_as(mine)
        with torch.no_grad():
            for wrong in (None, places):
                # Rank 1 gets the message of rank 0, whose position ids are wrong.
                with pytest.raises((InputError, MismatchError), match=r"sharded\.shard\(batch\)"):
                    model(input_ids=mine, position_ids=wrong)
            out = model(input_ids=mine, position_ids=right).logits
        return unshard(out, mesh, seq_len=LENGTH, layout=sharded.layout_of(LENGTH))

    for found in run_threads(2, work):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_planted_fault_of_positions_of_a_shard_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = make("roberta"), batch_of("none")
    expected = expected_of(model, batch)
    name = "burst_portable.integrations.transformers.batches.divider.positions_from_padding"
    monkeypatch.setattr(name, lambda ids, idx, documents: torch.arange(ids.shape[1]).expand_as(ids) + idx + 1)
    module = "burst_portable.integrations.transformers.shard_arguments.checked_shard_positions"
    monkeypatch.setattr(module, lambda given, *others: given)
    assert (on_shards(2, model, batch)[0][1] - expected[1]).abs().max() > 1e-2


def test_model_without_padding_token_raises() -> None:
    with pytest.raises(UnsupportedError, match="without pad_token_id"):
        parallelize(make("roberta", pad_token_id=None), Mesh.single())


@pytest.mark.parametrize("name", ["Kosmos2", "Kosmos2_5"])
def test_sinusoidal_positions_that_count_from_padding_raise(name: str) -> None:
    """They begin at 2, and began at 0: gradients of logits of Kosmos-2.5 differed by 0.6 of their norm."""
    cls = getattr(transformers, f"{name}ForConditionalGeneration")
    with torch.device("meta"):
        model = cls(cls.config_class(text_config={"layers": 1}))
    with pytest.raises(UnsupportedError, match="embeddings of positions that depend on padding"):
        parallelize(model, Mesh.single(), full_batches=True)


def test_left_padding_of_shards_raises() -> None:
    with parallelize(make("roberta"), Mesh.single()) as sharded, pytest.raises(UnsupportedError, match="padding_side"):
        sharded.shard(batch_of("left"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_left_padding_below_a_head_of_tokens_equals_one_device(ranks: int) -> None:
    model, batch = make("roberta_tokens"), batch_of("left")
    expected = expected_of(model, batch)
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> tuple[float, Tensor, dict[str, Tensor]]:
        m = copies[mesh.rank]
        parallelize(m.roberta, mesh, full_batches=True, averaged_gradients=True)
        out = m(**batch)
        out.loss.backward()
        averaged = {name: all_reduce(x, mesh) / mesh.size for name, x in gradients_of(m).items()}
        return out.loss.item(), out.logits.detach(), averaged

    for found in run_threads(ranks, work):
        assert_equal(found, expected, batch)


@pytest.mark.parametrize("head", ["row", "own"])
@pytest.mark.parametrize("is_checked", [True, False])
def test_left_padding_below_a_head_that_reads_it_raises(
    head: str, is_checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head reads the first token of each row: on one device, padding that attends to the tokens of its row."""
    model, batch = make("roberta_row").eval(), batch_of("left")
    del batch["labels"]
    of_rows = (lambda: model(**batch).logits) if head == "row" else lambda: model.roberta(**batch)[0][:, 0]
    with torch.no_grad():
        expected = of_rows()
        parallelize(model.roberta, Mesh.single(), full_batches=True, averaged_gradients=True)
        if is_checked:
            name = "RobertaForSequenceClassification" if head == "row" else "a head that reads the first token"
            with pytest.raises(UnsupportedError, match=rf"{name}.*begin with padding.*padding_side='right'"):
                of_rows()
        else:
            module = "burst_portable.integrations.transformers.model_calls.check_padding_below_heads"
            monkeypatch.setattr(module, lambda *_, **__: None)
            assert (of_rows() - expected).abs().max() > 1e-4, "the planted fault"
