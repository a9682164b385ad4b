"""Find the parts of a model: its head, its base model, and the text model within a model of several parts."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
HEADS = (*LANGUAGE_HEADS, "ForTokenClassification")


def has_head(model: Any) -> bool:
    """Return whether a model computes logits and a loss. Some models of several parts have no base model (Llama 4)."""
    if text_model_of(model) is not model:
        return bool(model.can_generate())
    return model.base_model is not model


def text_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return the text model within a model of several parts, or the model itself if it has no such part."""
    config = model.config.get_text_config()
    if config is model.config:
        return model
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model)
    return next((part for part in parts if part.config is config), model)


def part_below_head(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that frameworks shard: the base model of a classifier, else the model itself.

    Its head gets the hidden states of all tokens, and computes the loss on every rank. Gradients must be averaged.
    """
    base = model.base_model
    is_language_model = any(cls.__name__.endswith(LANGUAGE_HEADS) for cls in type(model).__mro__)
    if is_language_model or base is model or not isinstance(base, PreTrainedModel) or text_model_of(model) is not model:
        return model
    return base


def has_tokenwise_head(model: PreTrainedModel) -> bool:
    """Return whether all layers after attention process each token independently."""
    if model.base_model is model:
        return not _pools_tokens(model)
    return any(base.__name__.endswith(HEADS) for base in type(model).__mro__)


def _pools_tokens(model: nn.Module) -> bool:
    """Return whether the output of a model has a `pooler_output`, unless the model was created without a pooler."""
    if hasattr(model, "pooler"):
        return model.pooler is not None
    return "Pooling" in str(inspect.signature(type(model).forward).return_annotation)
