"""Test layers whose attention was replaced by one outside AttentionInterface."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import create_bidirectional_mask, sdpa_mask
from transformers.models.llama import modeling_llama

from burst_portable import Mesh, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import parallelize
from tests.support.models import SIZES, tokens


class Replaced(nn.Module):
    """Replaces the attention of a layer by one that calls torch's function."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.before = before

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        x = self.before.q_proj(hidden_states).unflatten(-1, (4, 8)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.before.o_proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("full_batches", [False, True])
def test_attention_of_one_layer_that_was_replaced_raises(full_batches: bool) -> None:
    """Gradients of two ranks differed by 0.74 of their norm."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    model.model.layers[1].self_attn = Replaced(model.model.layers[1].self_attn)
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        mine, ids = copies[mesh.rank], tokens()
        sharded = parallelize(mine, mesh, full_batches=full_batches)
        batch = {"input_ids": ids, "labels": ids} if full_batches else sharded.shard(ids)
        with pytest.raises(UnsupportedError, match=r"got model\.layers\.1\.self_attn: Replaced"):
            mine(**batch)

    run_threads(2, work)


def replace(model: Any) -> None:
    model.model.layers[1].self_attn = Replaced(model.model.layers[1].self_attn)


def append(model: Any) -> None:
    """Replace one attention and append another one, so that as many are ours as before."""
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))
    model.config.num_hidden_layers += 1
    replace(model)


def insert(model: Any) -> None:
    """Insert a layer with another attention, and leave all attentions as they are."""
    layer = copy.deepcopy(model.model.layers[0])
    layer.self_attn = Replaced(layer.self_attn)
    model.model.layers.insert(1, layer)
    model.config.num_hidden_layers += 1


def repeat(model: Any) -> None:
    replace(model)
    model.model.layers.append(model.model.layers[0])
    model.config.num_hidden_layers += 1


def make_list(model: Any) -> None:
    append(model)
    model.model.layers = nn.ModuleList(model.model.layers)


def set_forward(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.forward = Replaced(copy.deepcopy(attention)).forward


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize("change", [replace, append, insert, repeat, make_list, set_forward])
def test_attention_that_is_replaced_between_calls_raises(change: Any, full_batches: bool) -> None:
    """Loss and gradients of the second call differed by 2e-4 and 1.1 if one was replaced."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        mine, ids = copies[mesh.rank], tokens()
        sharded = parallelize(mine, mesh, full_batches=full_batches)
        batch = {"input_ids": ids, "labels": ids} if full_batches else sharded.shard(ids)
        mine(**batch)
        change(mine)
        with pytest.raises(UnsupportedError, match=r"got model\.layers\.1\.self_attn: (Replaced|LlamaAttention)"):
            mine(**batch if full_batches else sharded.shard(ids))

    run_threads(2, work)


def compare_after_changes(*changes: Callable[[LlamaForCausalLM], None]) -> None:
    """Compare the logits of one and two ranks after changes to a model, which is called before and after each."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    copies = [copy.deepcopy(model) for _ in range(3)]

    def work(mesh: Mesh) -> Tensor:
        mine, ids = copies[mesh.rank + mesh.size - 1], tokens()
        parallelize(mine, mesh, full_batches=True)
        found: Tensor = mine(input_ids=ids).logits
        for change in changes:
            change(mine)
            found = mine(input_ids=ids).logits
        return found.detach()

    (expected,) = run_threads(1, work)
    for logits in run_threads(2, work):
        torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_attention_of_transformers_replaced_between_calls() -> None:
    """Each layer calls our function: those of new modules, and through a new forward."""

    def replace(model: LlamaForCausalLM) -> None:
        layers = model.model.layers
        layers[1].self_attn = copy.deepcopy(layers[0].self_attn)
        layers[0].self_attn.forward = partial(type(layers[0].self_attn).forward, layers[0].self_attn)

    def append(model: LlamaForCausalLM) -> None:
        model.model.layers.append(copy.deepcopy(model.model.layers[0]))
        model.config.num_hidden_layers += 1

    compare_after_changes(replace, append)


def test_layer_that_a_later_call_skips_is_supported() -> None:
    def skip(model: LlamaForCausalLM) -> None:
        model.model.layers[1].forward = lambda x, *_, **__: x

    compare_after_changes(skip)


def test_model_of_one_rank_can_be_pickled() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    parallelize(model, Mesh.single())
    assert pickle.loads(pickle.dumps(model)).config.hidden_size == SIZES["hidden_size"]


def colder(module: nn.Module, *tensors: Any, scaling: float, **others: Any) -> tuple[Tensor, None]:
    """Compute attention with smaller scores."""
    return sdpa_attention_forward(module, *tensors, scaling=0.3 * scaling, **others)


def without_window(*arguments: Any, **named: Any) -> Any:
    return sdpa_mask(*arguments, **named)


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize(
    ("name", "functions", "told"),
    [
        ("colder", (colder, sdpa_mask), r"the attention function of a program.*'colder'.*\.colder"),
        ("colder in part", (partial(colder), sdpa_mask), r"the attention function of a program.*\.colder"),
        ("own mask", (sdpa_attention_forward, without_window), r"the mask function of a program.*\.without_window"),
    ],
)
def test_attention_function_of_a_program_raises(
    name: str, functions: tuple[Any, Any], told: str, full_batches: bool
) -> None:
    """Without the error, gradients with `colder` differed by 2.3 of their norm: our function replaced it."""
    AttentionInterface.register(name, functions[0])
    AttentionMaskInterface.register(name, functions[1])
    try:
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
        model.set_attn_implementation(name)
        with pytest.raises(UnsupportedError, match=told):
            parallelize(model, Mesh.single(), full_batches=full_batches)
        model.set_attn_implementation("sdpa")
        parallelize(model, Mesh.single(), full_batches=full_batches).undo()
        assert model.config._attn_implementation == "sdpa"
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name)


def test_eager_attention_that_a_program_replaced_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", colder)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation="eager"))
    with pytest.raises(UnsupportedError, match=r"'eager', .*\.colder"):
        parallelize(model, Mesh.single())
    model.set_attn_implementation("sdpa")  # does not call it
    parallelize(model, Mesh.single())


def test_model_with_the_config_of_a_sharded_model_is_sharded() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    parallelize(model, Mesh.single())
    parallelize(LlamaForCausalLM(model.config), Mesh.single())


def bidirectional(*, config: Any, inputs_embeds: Tensor, attention_mask: Any = None, **_: Any) -> Any:
    """Create the mask of an encoder, as a program does that makes one of a decoder."""
    return create_bidirectional_mask(config=config, inputs_embeds=inputs_embeds, attention_mask=attention_mask)


@pytest.mark.parametrize("full_batches", [False, True])
def test_mask_of_an_encoder_for_causal_layers_raises(full_batches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one device, SDPA gets no mask and attends causally: gradients without the error were off by 0.8."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", bidirectional)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    sharded = parallelize(model, Mesh.single(), full_batches=full_batches)
    with pytest.raises(UnsupportedError, match="is_causal of a layer whose tokens attend to all tokens is not False"):
        model(**{"input_ids": tokens()} if full_batches else sharded.shard(tokens()))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_mask_of_an_encoder_equals_one_device(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention does not read is_causal."""
    monkeypatch.setattr(modeling_llama, "create_causal_mask", bidirectional)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).double()
    for layer in model.model.layers:
        layer.self_attn.is_causal = attention == "eager"
    expected = model(input_ids=tokens()).logits.detach()
    copies = [copy.deepcopy(model) for _ in range(2)]

    def work(mesh: Mesh) -> Tensor:
        parallelize(copies[mesh.rank], mesh, full_batches=True)
        found: Tensor = copies[mesh.rank](input_ids=tokens()).logits.detach()
        return found

    for logits in run_threads(2, work):
        torch.testing.assert_close(logits, expected, rtol=1e-6, atol=1e-6)  # eager softmax is float32
