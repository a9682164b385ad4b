"""Test copies of sharded models, calls of `forward` in the place of the model, and backward passes after `undo`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel
from transformers import BertConfig, BertForMaskedLM

from burst_portable import Mesh, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, model_calls, parallelize
from tests.support.models import SIZES, checkpoint_activations, gradients_of, make, tokens

LENGTH = 33


def _bert() -> Any:
    torch.manual_seed(0)
    options = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SIZES, **options)).double().train()


def _batch(kind: str) -> dict[str, torch.Tensor]:
    """Return a batch whose labels are not equally many on the ranks."""
    ids = tokens(2, LENGTH)
    return {"input_ids": ids, "labels": ids if kind == "llama" else ids.masked_fill(torch.arange(LENGTH) > 9, -100)}


def _expected(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    alone = copy.deepcopy(model)
    loss = alone(**batch).loss
    loss.backward()
    return loss.detach(), gradients_of(alone)


@pytest.mark.parametrize("full_batches", [False, True], ids=["shards", "full batches"])
@pytest.mark.parametrize("when", ["at once", "after a step", "averaged", "original undone", "parallelized again"])
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_deepcopy_of_sharded_model_is_sharded(kind: str, when: str, full_batches: bool) -> None:
    """As reference models and exponential moving averages are made."""
    whole, batch = make("llama") if kind == "llama" else _bert(), _batch(kind)
    expected, gradients = _expected(whole, batch)

    def work(mesh: Mesh) -> None:
        original = copy.deepcopy(whole)
        sharded = parallelize(original, mesh, full_batches=full_batches)
        if when == "after a step":
            original(**batch if full_batches else sharded.shard(batch)).loss.backward()
            original.zero_grad()
        copied = AveragedModel(original).module if when == "averaged" else copy.deepcopy(original)
        inputs = batch if full_batches else sharded.shard(batch)
        if when == "parallelized again":
            again = parallelize(copied, mesh, full_batches=full_batches)
            inputs = batch if full_batches else again.shard(batch)
            assert again.model is copied
            with pytest.raises(InputError, match="parallelized already"):
                parallelize(copied, mesh)
        if when in ("original undone", "parallelized again"):
            sharded.undo()
        loss = copied(**inputs).loss
        loss.backward()
        all_reduce_gradients(copied.parameters(), mesh)
        total = loss.detach() if full_batches else all_reduce(loss.detach(), mesh)
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)
        found = gradients_of(copied)
        assert found.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9)
        assert not gradients_of(original)

    run_threads(2, work)


def test_copy_of_a_part_belongs_to_the_sharded_model() -> None:
    whole, ids = make("llama"), tokens(1, LENGTH)
    expected = whole.model(input_ids=ids).last_hidden_state.detach()

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh)
        part = copy.deepcopy(model.model)
        assert part._burst_portable is sharded
        own = sharded.layout_of(LENGTH).positions(mesh.rank)
        states = part(input_ids=ids[:, own], seq_len=LENGTH, position_ids=torch.tensor(own)[None]).last_hidden_state
        torch.testing.assert_close(states, expected[:, own], rtol=0, atol=1e-9)

    run_threads(2, work)


@pytest.mark.parametrize("case", ["masked loss", "full batches", "full batches without gradients"])
def test_forward_in_the_place_of_the_model_raises(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked language model would take the mean over the labels of each rank."""
    kind = "bert" if case == "masked loss" else "llama"
    whole, batch = _bert() if kind == "bert" else make("llama"), _batch(kind)
    expected, _ = _expected(whole, batch)

    def work(mesh: Mesh) -> torch.Tensor | None:
        model = copy.deepcopy(whole)
        sharded = parallelize(model, mesh, full_batches=kind == "llama")
        inputs = batch if kind == "llama" else sharded.shard(batch)
        if is_planted:
            return all_reduce(model.forward(**inputs).loss.detach(), mesh)
        with (
            torch.set_grad_enabled(case != "full batches without gradients"),
            pytest.raises(UnsupportedError, match=r"forward\(\) was called directly, so .* got labels; call the model"),
        ):
            model.forward(**inputs)
        return None

    is_planted = False
    run_threads(2, work)
    if case == "masked loss":
        is_planted = True
        monkeypatch.setattr(model_calls, "check_forward", lambda *_, **__: None)
        assert abs(run_threads(2, work)[0] - expected) > 0.1


def test_forward_of_a_causal_model_takes_shards() -> None:
    """Its loss function is the sharded one. PEFT's AdaptionPromptConfig calls forward."""
    whole, batch = make("llama"), _batch("llama")
    expected, _ = _expected(whole, batch)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        inputs = parallelize(model, mesh).shard(batch)
        torch.testing.assert_close(all_reduce(model.forward(**inputs).loss.detach(), mesh), expected)
        with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM\.forward\(\).* got logits_to_keep"):
            model.forward(**inputs, logits_to_keep=1)

    run_threads(2, work)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("way", ["undo", "paused"])
def test_layers_computed_again_after_undo_raise(attention: str, way: str) -> None:
    whole, ids = make("llama"), tokens(1, LENGTH)
    whole.set_attn_implementation(attention)

    def work(mesh: Mesh) -> None:
        model = copy.deepcopy(whole)
        checkpoint_activations(model)
        sharded = parallelize(model, mesh)
        loss = model(**sharded.shard(ids)).loss
        if way == "undo":
            sharded.undo()
            with pytest.raises(InputError, match=r"again after undo\(\); .* or enter paused\(\) after backward\(\)"):
                loss.backward()
            return
        with sharded.paused(), pytest.raises(InputError, match=r"again after undo\(\)"):
            loss.backward()
        model.zero_grad()
        model(**sharded.shard(ids)).loss.backward()

    run_threads(2, work)
