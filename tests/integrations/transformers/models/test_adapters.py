"""Test PEFT's adapters that do not change each token alone: errors in place of other losses than one device's."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from burst_portable import Mesh, run_threads
from burst_portable.errors import LayoutError, UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.models.adapters import reads_logits
from burst_portable.integrations.transformers.shard_mark import ShardReadError
from tests.support.models import gradients_of, make, tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing.* is deprecated:FutureWarning"
)  # PEFT reads it
IDS = tokens(1)
TARGETS: dict[str, Any] = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"]}
ADALORA: dict[str, Any] = {**TARGETS, "total_step": 10, "tinit": 2, "tfinal": 2, "init_lora_weights": False}
CONFIGS: dict[str, Any] = {
    "adalora": lambda: peft.AdaLoraConfig(**ADALORA),
    "adalora without norm": lambda: peft.AdaLoraConfig(**ADALORA, orth_reg_weight=0),
    "alora": lambda: peft.LoraConfig(
        **TARGETS, init_lora_weights=False, alora_invocation_tokens=IDS[0, 20:22].tolist()
    ),
    "lily": lambda: peft.LilyConfig(**TARGETS, r=4),
    "adaption": lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "cpt": lambda: peft.CPTConfig(
        task_type="CAUSAL_LM", cpt_token_ids=[4, 5, 6, 7], cpt_mask=[1, 1, 1, 1], cpt_tokens_type_mask=[1, 2, 3, 4]
    ),
    "replicated": lambda: peft.LoraConfig(**TARGETS, layer_replication=[(0, 2), (0, 2)], init_lora_weights=False),
}


def adapted(kind: str) -> Any:
    torch.manual_seed(0)
    model = peft.get_peft_model(make("llama"), CONFIGS[kind]())
    for p in model.parameters():
        if p.requires_grad and not p.any():
            torch.nn.init.normal_(p, std=0.1)
    return model.double()


def results(whole: Any, ranks: int, full_batches: bool, *, is_checked: bool = True) -> list[Any]:
    """Return the loss and the gradients of each rank."""

    def work(mesh: Mesh) -> tuple[Tensor, dict[str, Tensor]]:
        model = copy.deepcopy(whole)
        inner = model.get_base_model()
        options: dict[str, Any] = {"gather_outputs": True} if reads_logits(model) else {}
        sharded = parallelize(inner, mesh, full_batches=full_batches, **options)
        if not is_checked:
            inner.peft_config = {}
        out = model(input_ids=IDS, labels=IDS) if full_batches else model(**sharded.shard(IDS))
        out.loss.backward()
        all_reduce_gradients(model.parameters(), mesh)
        return out.loss.detach() if full_batches else all_reduce(out.loss.detach(), mesh), gradients_of(model)

    return run_threads(ranks, work)


@pytest.mark.parametrize(
    ("kind", "full_batches"),
    [
        *(("adalora without norm", False), ("adaption", False), ("prompt", True), ("cpt", True)),
        *(("replicated", False), ("replicated", True)),
    ],
)
def test_adapter_equals_one_device(kind: str, full_batches: bool) -> None:
    whole = adapted(kind)
    expected = copy.deepcopy(whole)
    loss = expected(input_ids=IDS, labels=IDS).loss
    loss.backward()
    for found, gradients in results(whole, 2, full_batches):
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=0)
        for name, gradient in gradients_of(expected).items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "full_batches", "text"),
    [
        ("adalora", False, "norm of its weights.* once per rank; got orth_reg_weight=0.5; allowed: 0"),
        ("alora", False, "activated LoRA starts at certain tokens"),
        ("alora", True, "activated LoRA starts at certain tokens"),
        ("lily", False, "averages its router over all tokens"),
        ("lily", True, "averages its router over all tokens"),
    ],
)
def test_adapter_that_would_give_other_losses_raises(kind: str, full_batches: bool, text: str) -> None:
    whole = adapted(kind)
    expected = whole(input_ids=IDS, labels=IDS).loss
    for found, _ in results(whole, 1, full_batches):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    wrong = results(whole, 2, full_batches, is_checked=False)[0][0]
    assert abs(wrong - expected) > 1e-5  # of a loss in float32
    with pytest.raises(UnsupportedError, match=text):
        results(whole, 2, full_batches)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("adalora", "AdaLoRA calls forward.*; use LoRA"),
        ("adaption", r"forward\(\) was called directly.*divide batches by ShardedModel"),
    ],
)
def test_adapter_that_calls_forward_takes_no_full_batches(kind: str, text: str) -> None:
    for ranks in (1, 2):
        with pytest.raises(UnsupportedError, match=text):
            results(adapted(kind), ranks, full_batches=True)


@pytest.mark.filterwarnings("ignore:Position ids are not supported for parameter efficient tuning")
def test_prompt_of_shard_names_full_batches() -> None:
    for ranks, error in ((1, LayoutError), (2, ShardReadError)):
        with pytest.raises(error, match=r"prompts of PEFT, which add tokens, parallelize with full_batches=True"):
            results(adapted("prompt"), ranks, full_batches=False)
