"""Find the parts of a model: its head, its base model, and the text model within a model of several parts."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from burst_portable.integrations.transformers.models.signatures import parameters_of

LANGUAGE_HEADS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM")
HEADS = (*LANGUAGE_HEADS, "ForTokenClassification")


def has_head(model: Any) -> bool:
    """Return whether a model computes logits and a loss. Some have no base model (Llama 4).

    A class of a program may keep the model that it calls under another name than `base_model_prefix`. Its forward may
    read any token of it, and compute any loss.
    """
    if text_model_of(model) is not model:
        return bool(model.can_generate())
    if model.base_model is not model or "labels" in parameters_of(model):
        return True
    return not type(model).forward.__module__.startswith("transformers.") and _inner_model(model) is not None


def _inner_model(model: nn.Module) -> PreTrainedModel | None:
    """Return the first model of Transformers within a model, or None."""
    return next((part for part in model.modules() if isinstance(part, PreTrainedModel) and part is not model), None)


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
    if any(cls.__name__.endswith(LANGUAGE_HEADS) for cls in type(model).__mro__) or text_model_of(model) is not model:
        return model
    if base is model and has_head(model):
        base = _inner_model(model)
    return base if isinstance(base, PreTrainedModel) else model


def has_tokenwise_head(model: PreTrainedModel) -> bool:
    """Return whether all layers after attention process each token independently."""
    return any(cls.__name__.endswith(HEADS) for cls in type(model).__mro__) or not (
        has_head(model) or _pools_tokens(model)
    )


def _pools_tokens(model: nn.Module) -> bool:
    """Return whether a model has pooled outputs, unless it was created without a pooler: also projected ones (CLAP)."""
    if hasattr(model, "pooler"):
        return model.pooler is not None
    if type(model).__name__.endswith("WithProjection"):
        return True
    return "Pooling" in str(inspect.signature(type(model).forward).return_annotation)
