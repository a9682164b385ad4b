"""Test batches whose rows begin with padding, as prompts of text generation: full batches on several ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BeamConfig,
    BeamForCausalLM,
    GPT2Config,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaConfig,
    Ministral3Config,
    Ministral3ForCausalLM,
)

from burst_portable import Mesh, run_threads
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.batches import left_padding
from burst_portable.integrations.transformers.batches.left_padding import move_left_padding
from tests.support.models import EXPERTS, LENGTH, SIZES, gradients_of, make, tokens

PADDING = torch.tensor([9, 0, 14])  # before each row
AFTER = torch.tensor([0, 0, 5])
IN_FLOAT32 = 2e-5, 1e-7
"""Relative and absolute tolerance. Transformers computes cosines of positions, norms, routers and losses in float32.
How they are rounded depends on the shape of a tensor and on the processor."""


def batch_of(case: str) -> dict[str, Tensor]:
    """Return ids, a mask and labels of the tokens after the first; for "positions", position ids from the first."""
    ids, places = tokens(batch=3), torch.arange(LENGTH)
    end = LENGTH - (AFTER if case == "both ends" else torch.zeros_like(AFTER))
    token = (places >= PADDING.unsqueeze(1)) & (places < end.unsqueeze(1))
    labels = ids.masked_fill(~(token & (places > PADDING.unsqueeze(1))), -100)
    batch = {"input_ids": ids, "attention_mask": token.long(), "labels": labels}
    positions = (token.long().cumsum(1) - 1).clamp(min=0)
    return batch | ({"position_ids": positions} if case == "positions" else {})


def step(model: Any, case: str, mesh: Mesh | None = None) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the loss, the logits of tokens, and gradients of the loss and of a loss of logits."""
    batch = batch_of(case)
    if case == "embeddings":
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    out = model(**batch, use_cache=False)
    logits = out.logits[batch["attention_mask"] != 0]
    (out.loss + logits.log_softmax(-1)[:, 3].mean()).backward()
    if mesh is not None:
        all_reduce_gradients(model.parameters(), mesh)
    return out.loss.detach(), logits.detach(), gradients_of(model)


def on_ranks(ranks: int, model: Any, case: str) -> list[Any]:
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def work(mesh: Mesh) -> Any:
        parallelize(copies[mesh.rank], mesh, full_batches=True, gather_outputs=True)
        return step(copies[mesh.rank], case, mesh)

    return run_threads(ranks, work)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("case", ["plain", "both ends", "positions", "embeddings"])
def test_rows_that_begin_with_padding_equal_one_device(case: str, ranks: int) -> None:
    model = make("mistral")  # a sliding window
    expected = step(copy.deepcopy(model), case)
    rtol, atol = (1e-9, 1e-12) if case == "positions" else IN_FLOAT32
    for found in on_ranks(ranks, model, case):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(found[1:], expected[1:], rtol=rtol, atol=atol)


SCALED = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
ABSOLUTELY: dict[str, Any] = {
    "hunyuan": lambda: HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**SIZES, head_dim=8)),
    "beam": lambda: BeamForCausalLM(BeamConfig(**SIZES, **EXPERTS, head_dim=8, num_experts=4)),
    "ministral": lambda: Ministral3ForCausalLM(
        Ministral3Config(**SIZES, head_dim=8, rope_parameters=SCALED | {"llama_4_scaling_beta": 0.5})
    ),
}
"""Models with RoPE whose attention depends on more than distances."""


@pytest.mark.parametrize("kind", ABSOLUTELY)
def test_tokens_after_padding_keep_their_positions(kind: str) -> None:
    """The loss of HunYuan differed by 0.4 % if its positions counted from the first token, without an error."""
    torch.manual_seed(0)
    model = ABSOLUTELY[kind]().double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # weights of norms start at one
    expected = step(copy.deepcopy(model), "plain")
    for found in on_ranks(2, model, "plain"):
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)  # Transformers' loss is float32
        torch.testing.assert_close(found[1:], expected[1:], rtol=IN_FLOAT32[0], atol=IN_FLOAT32[1])


def test_planted_fault_in_the_order_of_outputs_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("mistral")
    expected = step(copy.deepcopy(model), "plain")[1]
    monkeypatch.setattr("burst_portable.integrations.transformers.full_batches.outputs.roll_rows", lambda x, shift: x)
    assert (on_ranks(2, model, "plain")[0][1] - expected).abs().max() > 1e-2


ABSOLUTE, RELATIVE = GPT2Config(), LlamaConfig()
LABELED = {"labels": tokens(batch=3)}
ERRORS: dict[str, tuple[dict[str, Any], Any, type[Exception], str]] = {
    "absolute positions": ({}, ABSOLUTE, UnsupportedError, "absolute positions"),
    "chunks": ({}, LlamaConfig(attention_chunk_size=8), UnsupportedError, "absolute positions"),
    "label": (LABELED, RELATIVE, InputError, "predicted from padding; .*padding_side='right'"),
    "other positions": (
        {"position_ids": torch.ones(3, LENGTH)},
        RELATIVE,
        UnsupportedError,
        r"position_ids of rows.*got 1.0 at token 9 of row 0; allowed: .*; pass attention_mask\.cumsum\(dim=1\) - 1",
    ),
    "shape of positions": ({"position_ids": torch.ones(2, 9)}, RELATIVE, UnsupportedError, r"got shape \(2, 9\)"),
    "documents": ({"cu_seqlens": (0, 20, LENGTH)}, RELATIVE, UnsupportedError, "packed documents"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_move_left_padding_raises_for(name: str) -> None:
    change, config, error, words = ERRORS[name]
    with pytest.raises(error, match=words):
        move_left_padding(batch_of("plain") | change, config)


def test_absolute_positions_that_count_from_tokens_are_taken() -> None:
    batch = batch_of("positions")
    assert move_left_padding(batch, ABSOLUTE) is not None
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["attention_mask"].tolist() == [[1] * (LENGTH - n) + [0] * n for n in PADDING.tolist()]


@pytest.mark.parametrize("mask", [None, torch.ones(3, LENGTH), torch.zeros(3, LENGTH), torch.ones(3, 4)])
def test_move_left_padding_leaves_other_batches(mask: Tensor | None) -> None:
    batch = {"input_ids": tokens(batch=3), "labels": tokens(batch=3), "attention_mask": mask}
    assert move_left_padding(batch, ABSOLUTE) is None
    assert batch["attention_mask"] is mask


def test_roll_rows_has_an_inverse() -> None:
    x = torch.rand(3, LENGTH, 5)
    moved = left_padding.roll_rows(x, PADDING)
    torch.testing.assert_close(moved[0, 0], x[0, 9], rtol=0, atol=0)
    torch.testing.assert_close(left_padding.roll_rows(moved, -PADDING), x, rtol=0, atol=0)
