"""Test losses of masked language models, which compute the mean over their labels themselves."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    DistilBertConfig,
    DistilBertForMaskedLM,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)
from transformers.trainer_utils import seed_worker

from burst_portable import Mesh, run_threads
from burst_portable.errors import MismatchError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.masked_loss import has_masked_loss
from tests.support.models import LENGTH, SIZES, gradients_of, make, tokens

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        return BertForMaskedLM(BertConfig(**SIZES, **NO_DROPOUT)).double().train()
    sizes = {"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "dropout": 0.0}
    return DistilBertForMaskedLM(DistilBertConfig(**sizes, attention_dropout=0.0)).double().train()


def labels_of(ids: torch.Tensor, case: str) -> torch.Tensor:
    """Return the labels of a few tokens, in a seventh of the places or at the end, where one rank has them all."""
    places = torch.arange(LENGTH)
    return ids.masked_fill(places % 7 != 0 if case == "spread" else places < LENGTH - 4, -100)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shards", "full batches"])
@pytest.mark.parametrize(("kind", "case", "ranks"), [("bert", "spread", 3), ("bert", "last", 2), ("distil", "last", 3)])
def test_masked_loss_equals_one_device(kind: str, case: str, ranks: int, full_batches: bool):
    model, ids = model_of(kind), tokens()
    batch = {"input_ids": ids, "labels": labels_of(ids, case)}
    alone = copy.deepcopy(model)
    expected = alone(**batch).loss
    expected.backward()

    def work(mesh: Mesh) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mine = copy.deepcopy(model)
        options: dict[str, Any] = {"full_batches": True} if full_batches else {"layout": "contiguous"}
        sharded = parallelize(mine, mesh, **options)
        # A model that ignores the count on one device ignores it in full batches as well.
        inputs = batch | {"num_items_in_batch": torch.tensor(1)} if full_batches else sharded.shard(batch)
        loss = mine(**inputs).loss
        loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        return loss.detach() if full_batches else all_reduce(loss.detach(), mesh), gradients_of(mine)

    for loss, gradients in run_threads(ranks, work):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
        assert gradients.keys() == gradients_of(alone).keys()
        for name, gradient in gradients_of(alone).items():
            assert (gradients[name] - gradient).norm() <= 1e-10 * gradient.norm().clamp(min=1e-3), name
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-12)


def test_masked_loss_is_divided_by_the_given_count():
    """As for accumulated batches of one step."""
    ids = tokens()
    whole = model_of("bert")

    def work(mesh: Mesh) -> tuple[float, float]:
        mine = copy.deepcopy(whole)
        inputs = parallelize(mine, mesh).shard(ids, labels_of(ids, "spread"))
        usual, halved = (mine(**inputs | {"num_items_in_batch": n * inputs["num_items_in_batch"]}).loss for n in (1, 2))
        return usual.item(), halved.item()

    for usual, halved in run_threads(2, work):
        assert usual == pytest.approx(2 * halved, rel=1e-12)


def test_masked_loss_needs_a_dictionary():
    model, ids = model_of("bert"), tokens(1, 48)
    with parallelize(model, Mesh.single()):
        assert has_masked_loss(model)
    assert not has_masked_loss(make("llama"))
    assert "loss_function" in ModernBertForMaskedLM.forward.__wrapped__.__code__.co_names

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        with pytest.raises(UnsupportedError, match="needs a dictionary output; got return_dict=False"):
            mine(**sharded.shard(ids, ids), return_dict=False)

    run_threads(2, work)


def test_tokens_masked_by_unseeded_workers_raise():
    """Trainer seeds its workers differently on each rank."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({str(i): i for i in range(64)}, unk_token="0")),
        mask_token="1",
        pad_token="2",
    )
    examples = [{"input_ids": row.tolist()} for row in tokens(4, 40)]

    def batch_of(rank: int, seed: int | None) -> dict[str, torch.Tensor]:
        loader = DataLoader(
            examples,
            batch_size=4,
            num_workers=1,
            collate_fn=DataCollatorForLanguageModeling(tokenizer, seed=seed),
            worker_init_fn=partial(seed_worker, num_workers=1, rank=rank),
            generator=torch.Generator().manual_seed(1),
        )
        return next(iter(loader))

    whole = model_of("bert")
    batches = {seed: [batch_of(rank, seed) for rank in range(2)] for seed in (None, 5)}

    def work(mesh: Mesh) -> None:
        mine = copy.deepcopy(whole)
        sharded = parallelize(mine, mesh)
        equal, different = ({**batches[seed][mesh.rank]} for seed in (5, None))
        mine(**sharded.shard(equal))
        with pytest.raises(MismatchError, match=r"rows of the masked batch.*pass seed= to DataCollatorForLanguage"):
            mine(**sharded.shard(different))

    run_threads(2, work)
