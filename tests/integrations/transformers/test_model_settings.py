"""Test that ranks with equal weights and different settings of their models raise in the first call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from burst_portable import Mesh, run_threads
from burst_portable.errors import MismatchError
from burst_portable.integrations.transformers import model_settings, parallelize, rank_agreement
from tests.support.models import make, tokens

CHANGED: dict[str, dict[str, Any]] = {
    "rms_norm_eps": {"rms_norm_eps": 1e-2},
    "rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
    "hidden_act": {"hidden_act": "gelu"},
}


def losses(changed: dict[str, Any], *, full_batches: bool = True) -> list[float]:
    """Return the loss of each of two ranks, of which the second has another config."""
    models = [make("llama"), make("llama", **changed)]

    def work(mesh: Mesh) -> float:
        sharded = parallelize(models[mesh.rank], mesh, full_batches=full_batches)
        batch = {"input_ids": tokens(), "labels": tokens()} if full_batches else sharded.shard(tokens())
        loss: float = models[mesh.rank](**batch).loss.item()
        return loss

    return run_threads(2, work)


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize("name", CHANGED)
def test_ranks_with_different_configs_raise(name: str, full_batches: bool) -> None:
    with pytest.raises(MismatchError, match=rf"config\.[a-z_.]*{name}: .*give all ranks .* the same config"):
        losses(CHANGED[name], full_batches=full_batches)


def test_different_configs_that_are_not_compared_change_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_agreement, "settings_of", lambda model: {})
    right, wrong = losses({})[0], losses(CHANGED["rms_norm_eps"])
    assert wrong[0] == pytest.approx(wrong[1], rel=1e-6)
    assert abs(wrong[0] - right) > 1e-5  # of a loss that is float32


@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_ranks_in_different_modes_raise(mode: str) -> None:
    models = [make("llama"), make("llama")]

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        parallelize(model, mesh, full_batches=True)
        model.train(mode != "eval" or mesh.rank == 0)
        with torch.set_grad_enabled(mode != "no_grad" or mesh.rank == 0):
            model(input_ids=tokens(), labels=tokens())

    with pytest.raises(MismatchError, match=r"requested outputs: .*mode \(train\(\) or eval\(\)"):
        run_threads(2, work)


def other_loss(
    logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
) -> Any:
    """Return a loss that `parallelize` takes: it divides by the number of labels."""
    counted = {"num_items_in_batch": num_items_in_batch, "shift_labels": shift_labels}
    return 2 * ForCausalLMLoss(logits, labels, vocab_size, **counted)


def test_ranks_with_different_losses_raise() -> None:
    models = [make("llama"), make("llama")]
    models[1].loss_function = other_loss

    def work(mesh: Mesh) -> None:
        sharded = parallelize(models[mesh.rank], mesh)
        models[mesh.rank](**sharded.shard(tokens()))

    with pytest.raises(MismatchError, match="loss function: ForCausalLMLoss on rank 0 but other_loss on rank 1"):
        run_threads(2, work)


@pytest.mark.parametrize("full_batches", [False, True])
def test_ranks_with_losses_that_differ_later_raise(full_batches: bool) -> None:
    """Each rank would compute its part of another loss: only the first call compared settings."""
    models, ids = [make("llama"), make("llama")], tokens()
    labels = ids.clone()
    labels[:, 0] = -100  # the losses have equally many labels

    def work(mesh: Mesh) -> None:
        model = models[mesh.rank]
        sharded = parallelize(model, mesh, full_batches=full_batches)
        for kind in ("ForCausalLM", "ForMaskedLM"):
            model.loss_type = kind if mesh.rank else "ForCausalLM"
            model(**{"input_ids": ids, "labels": labels} if full_batches else sharded.shard(ids, labels))

    with pytest.raises(
        MismatchError, match=r"ForCausalLMLoss on rank 0 but .*ForMaskedLMLoss on rank 1.*loss function"
    ):
        run_threads(2, work)


def test_settings_of_leaves_out_paths_and_fits_large_configs() -> None:
    model = make("llama")
    before = model_settings.settings_of(model)
    model.config._name_or_path, model.config.use_cache = "/scratch/node7", False
    assert model_settings.settings_of(model) == before
    model.config.big = {f"entry_{i}": i for i in range(1000)}
    assert list(model_settings.settings_of(model)) == [model_settings.SETTINGS]
