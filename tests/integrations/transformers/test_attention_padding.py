"""Test padding at the end of rows: loss, gradients and token logits equal those of one device. Other padding raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from burst_portable import Mesh, run_threads, unshard
from burst_portable.errors import BurstError, InputError, ShapeError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from tests.support.models import LENGTH, SIZES, Answer, assert_same, gradients_of, make, tokens

HELD = torch.tensor([31, LENGTH, 1])  # tokens of each row
# with fewer tokens, eager attention with a window of 9 would give NaN on one device
MOST = torch.tensor([LENGTH, 40, 44])


def mask_of(held: Tensor) -> Tensor:
    return (torch.arange(LENGTH) < held.unsqueeze(1)).long()


MASK = mask_of(HELD)


def labelled(ids: Tensor, mask: Tensor = MASK) -> Tensor:
    return ids.masked_fill(mask == 0, -100)


@pytest.mark.parametrize(
    ("kind", "ranks", "held", "exact"),
    [
        ("llama", 3, HELD, 1e-12),
        ("mistral", 2, HELD, 1e-12),
        ("gemma2", 2, MOST, 1e-6),  # transformers' eager softmax is float32
        ("mixtral", 2, HELD, 1e-12),
        ("qwen3", 1, HELD, 1e-12),
    ],
)
def test_padded_batch_equals_one_device(kind: str, ranks: int, held: Tensor, exact: float):
    model, ids, mask = make(kind), tokens(len(held)), mask_of(held)
    labels = labelled(ids, mask)

    def answer(mine: Any, inputs: dict[str, Any], mesh: Mesh, whole: Any) -> Answer:
        out = mine(**inputs, use_cache=False)
        out.loss.backward()
        all_reduce_gradients(mine.parameters(), mesh)
        loss = all_reduce(out.loss.detach().reshape(1), mesh).item()
        return Answer(loss, whole(out.logits.detach())[mask == 1], gradients_of(mine))

    def work(mesh: Mesh) -> Answer:
        mine = copy.deepcopy(model)
        sharded = parallelize(mine, mesh)
        inputs = sharded.shard(ids, labels, attention_mask=mask)
        layout = sharded.layout_of(LENGTH, None)
        return answer(mine, inputs, mesh, lambda x: unshard(x, mesh, seq_len=LENGTH, layout=layout))

    alone = copy.deepcopy(model)
    alone.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")
    inputs = {"input_ids": ids, "labels": labels, "attention_mask": mask}
    expected = answer(alone, inputs, Mesh.single(), lambda x: x)
    for found in run_threads(ranks, work):
        assert_same(found, expected, exact=exact)


@pytest.mark.parametrize(
    ("mask", "labels", "error", "told"),
    [
        (MASK.flip(1), labelled, UnsupportedError, "padding before a token"),
        (MASK, None, InputError, "labels on padding"),
        (MASK, lambda ids: ids, InputError, "labels on padding"),
        (MASK[:, 1:], labelled, ShapeError, "attention_mask"),
        (MASK[:1], labelled, ShapeError, "attention_mask"),
    ],
)
def test_shard_rejects_unsupported_padding(mask: Tensor, labels: Any, error: type[BurstError], told: str):
    ids = tokens(len(HELD))
    with parallelize(make("llama"), Mesh.single()) as sharded, pytest.raises(error, match=told):
        sharded.shard(ids, labels and labels(ids), attention_mask=mask)


def test_unmarked_encoder_with_padding_raises():
    """Its layers do not have is_causal=False, so its padding is not separated."""
    ids = tokens(len(HELD))
    model = BertForMaskedLM(BertConfig(**SIZES))
    for module in model.modules():
        vars(module).pop("is_causal", None)
    with parallelize(model, Mesh.single()) as sharded:
        inputs = sharded.shard(ids, labelled(ids), attention_mask=MASK)
        with pytest.raises(UnsupportedError, match=r"has no is_causal=False; got a mask in which every token attends"):
            model(**inputs)


def test_shard_accepts_padded_batch():
    batch = {"input_ids": tokens(len(HELD)), "attention_mask": MASK}
    batch["labels"] = labelled(batch["input_ids"])
    parts = run_threads(3, lambda mesh: parallelize(make("llama"), mesh).shard(batch))
    assert not any(isinstance(part["attention_mask"], torch.Tensor) for part in parts)
    assert sum(int(part["padded"].sum()) for part in parts) == int((LENGTH - HELD).sum())
    assert sum(int((part["shift_labels"] != -100).sum()) for part in parts) == int((HELD - 1).sum())
