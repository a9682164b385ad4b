"""Test classes of a program that keep the model they call under another name than `base_model_prefix`.

For such a class, `base_model` is the class itself, as for a model without a head.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Llama4ForCausalLM, Llama4TextConfig, LlamaConfig, LlamaModel
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from burst_portable import Mesh, run_threads
from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers import all_reduce, all_reduce_gradients, parallelize
from burst_portable.integrations.transformers.models.checks import part_below_head
from tests.support.models import EXPERTS, SIZES, gradients_of, tokens


class OwnClassifier(LlamaPreTrainedModel):
    """Classifies the last token of rows."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.llama = LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 3)
        self.post_init()

    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, labels: Any = None, **others: Any
    ) -> Any:
        states = self.llama(input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)
        return self.output(self.score(states.last_hidden_state), labels)

    def output(self, scores: Tensor, labels: Tensor) -> Any:
        return CausalLMOutput(loss=nn.functional.cross_entropy(scores[:, -1], labels), logits=scores)


class OwnTokenHead(OwnClassifier):
    """Takes the mean over its own tokens."""

    def output(self, scores: Tensor, labels: Tensor) -> Any:
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten() % 3)
        return CausalLMOutput(loss=loss, logits=scores)


class OwnForCausalLM(OwnTokenHead):
    """Has a name with which a head works token by token, but a separate loss."""


class OwnValues(LlamaPreTrainedModel):
    """Returns a value of each row, and takes no labels."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.llama = LlamaModel(config)
        self.post_init()

    def forward(self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, **others: Any) -> Any:
        states = self.llama(input_ids, attention_mask=attention_mask, position_ids=position_ids, **others)
        return {"value": states.last_hidden_state[:, -1].sum(-1)}


def model_of(kind: type[Any]) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(**SIZES)).double()


@pytest.mark.parametrize("full_batches", [False, True])
@pytest.mark.parametrize("kind", [OwnClassifier, OwnTokenHead, OwnValues])
def test_parallelize_rejects_own_classes(kind: type[Any], full_batches: bool) -> None:
    """On two ranks, the loss of `OwnTokenHead` was 2.18 in place of 1.09 with full batches, as of SequenceTrainer."""
    with pytest.raises(UnsupportedError, match=r"an own forward around another model.*parallelize\(model\.llama, mesh"):
        parallelize(model_of(kind), Mesh.single(), full_batches=full_batches)


def test_own_loss_of_known_name_raises() -> None:
    copies = [model_of(OwnForCausalLM) for _ in range(2)]

    def work(mesh: Mesh) -> None:
        inputs = parallelize(copies[mesh.rank], mesh).shard(tokens())
        with pytest.raises(UnsupportedError, match="computes its loss from this rank's tokens only"):
            copies[mesh.rank](**inputs)

    run_threads(2, work)


@pytest.mark.parametrize("kind", [OwnClassifier, OwnTokenHead])
def test_model_below_own_head_equals_one_device(kind: type[Any]) -> None:
    """Frameworks shard the inner model. Each rank computes the head, and the average of gradients is right."""
    model, ids = model_of(kind), tokens()
    labels = torch.tensor([1, 2]) if kind is OwnClassifier else ids

    def step(mine: Any, mesh: Mesh | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        if mesh is not None:
            assert part_below_head(mine) is mine.llama
            parallelize(part_below_head(mine), mesh, full_batches=True, averaged_gradients=True)
        loss = mine(ids, labels=labels).loss
        loss.backward()
        gradients = gradients_of(mine)
        if mesh is None:
            return loss.detach(), gradients
        return loss.detach(), {name: all_reduce(x, mesh) / mesh.size for name, x in gradients.items()}

    expected = step(copy.deepcopy(model))
    copies = [copy.deepcopy(model) for _ in range(2)]
    for found in run_threads(2, lambda mesh: step(copies[mesh.rank], mesh)):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # norms and RoPE are float32


def test_projected_pooled_output_raises() -> None:
    """`text_embeds` of CLAP differed by 0.85 of their norm: each rank projected its first token."""
    cls = transformers.ClapTextModelWithProjection
    with torch.device("meta"):
        model = cls(cls.config_class(num_hidden_layers=1))
    with pytest.raises(UnsupportedError, match="a head or a pooler that reads single tokens"):
        parallelize(model, Mesh.single())


def llama4() -> Any:
    """Return a language model whose `base_model_prefix` is that of its vision-language model."""
    sizes = {**SIZES, **EXPERTS, "num_local_experts": 2, "intermediate_size_mlp": 48, "head_dim": 8}
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes, attention_chunk_size=11)).double()
    assert model.base_model is model
    return model


def test_language_model_without_base_model_takes_full_batches() -> None:
    model, ids = llama4(), tokens()

    def step(mine: Any, mesh: Mesh | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        if mesh is not None:
            parallelize(mine, mesh, full_batches=True)
        loss = mine(input_ids=ids, labels=ids).loss
        loss.backward()
        if mesh is not None:
            all_reduce_gradients(mine.parameters(), mesh)
        return loss.detach(), gradients_of(mine)

    copies = [copy.deepcopy(model) for _ in range(2)]
    expected = step(copy.deepcopy(model))
    for found in run_threads(2, lambda mesh: step(copies[mesh.rank], mesh)):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)  # Transformers' loss is float32


def test_loss_function_of_model_without_base_model_is_checked() -> None:
    """Each rank divided by the number of its labels, so that the loss was twice that of one device."""

    def own(logits: Tensor, shift_labels: Tensor, num_items_in_batch: Any = None, **_: Any) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())

    copies = [llama4() for _ in range(2)]

    def work(mesh: Mesh) -> None:
        copies[mesh.rank].loss_function = own
        inputs = parallelize(copies[mesh.rank], mesh).shard(tokens())
        with pytest.raises(UnsupportedError, match="does not divide by num_items_in_batch"):
            copies[mesh.rank](**inputs)

    run_threads(2, work)
