"""Test models that add terms to the result of their loss function: each rank computes them from its tokens."""

from __future__ import annotations

import copy
from functools import wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BambaConfig, BambaForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from burst_portable import Mesh, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import parallelize
from tests.support.models import SIZES, assert_same, on_one_device, on_ranks, tokens


class Terms(LlamaForCausalLM):
    """Adds a term to its loss, as a z-loss or a head that predicts the token after the next one."""

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **others: Any
    ) -> Any:
        others |= {"attention_mask": attention_mask, "position_ids": position_ids, "labels": labels}
        out = super().forward(input_ids, **others)
        if out.loss is not None:
            out.loss = self.changed(out.loss, out.logits)
        return out

    def changed(self, loss: Tensor, logits: Tensor) -> Tensor:
        return loss + 0.1 * logits.logsumexp(-1).pow(2).mean()


class TermsInPlace(Terms):
    def changed(self, loss: Tensor, logits: Tensor) -> Tensor:
        loss += 0.1 * logits.logsumexp(-1).pow(2).mean()
        return loss


class Cast(Terms):
    """Changes the dtype of its loss only."""

    def changed(self, loss: Tensor, logits: Tensor) -> Tensor:
        return loss.to(logits.dtype)


def model_of(kind: type[Any]) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES)).double().train()


def bamba() -> Any:
    torch.manual_seed(0)
    sizes = {**SIZES, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": 8}
    return BambaForCausalLM(BambaConfig(**sizes, z_loss_coefficient=0.1)).train()


def call_raises(model: Any, full_batches: bool, words: str) -> None:
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        mine, ids = copies[mesh.rank], tokens()
        sharded = parallelize(mine, mesh, full_batches=full_batches)
        with pytest.raises(UnsupportedError, match=words):
            mine(**{"input_ids": ids, "labels": ids} if full_batches else sharded.shard(ids))

    run_threads(2, work)


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize("kind", [Terms, TermsInPlace, "bamba"])
def test_changed_loss_raises(kind: Any, full_batches: bool) -> None:
    """With Bamba's z-loss, gradients of two ranks differed by 0.46 of their norm."""
    model = bamba() if kind == "bamba" else model_of(kind)
    call_raises(model, full_batches, "changes the result of its loss_function by terms of this rank's tokens only")


def test_loss_of_another_dtype_equals_one_device() -> None:
    model = model_of(Cast)
    expected = on_one_device(model, tokens())
    for answer in on_ranks(2, model, tokens()):
        assert_same(answer, expected)


@wraps(ForCausalLMLoss)
def mean_of_call(logits: Tensor, labels: Tensor, shift_labels: Any = None, **_: Any) -> Tensor:
    """Return the mean over the labels of a call, whatever their number on all ranks is."""
    following = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
    return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize(
    ("function", "told"),
    [
        (mean_of_call, "does not divide by num_items_in_batch"),
        (lambda logits, labels, **_: logits.mean(), "it is unknown whether this loss shifts its labels"),
    ],
)
def test_function_of_a_program_in_the_loss_mapping_raises(
    function: Any, told: str, full_batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the error, the loss of two ranks was twice that of one device."""
    monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", function)
    call_raises(model_of(LlamaForCausalLM), full_batches, told)
