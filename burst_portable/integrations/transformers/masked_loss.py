"""Compute the loss of models whose forward divides by the labels that it gets, as BERT's, of which none is shifted.

Such a model takes the mean over its labels, without its `loss_function`. On a shard, that is the mean of one rank. So
the model gets no labels, and the loss is computed from its logits, in their dtype as in the model. It is divided by the
labels of all ranks.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from burst_portable.errors import UnsupportedError

_HEADS = ("ForMaskedLM", "ForTokenClassification")

_GENERIC_HEADS = "transformers.modeling_layers"
"""Module of the heads that decoders share. They do not pass `num_items_in_batch` to their `loss_function`."""


def has_masked_loss(model: PreTrainedModel) -> bool:
    """Return whether a model takes the mean cross entropy over labels itself, without its `loss_function`.

    These are models of Transformers for masked language modeling and for the classification of tokens. The forward of
    another package may compute another loss, for example with weights of classes.
    """
    if not any(cls.__name__.endswith(_HEADS) for cls in type(model).__mro__):
        return False
    forward: Any = inspect.unwrap(type(model).forward)
    names = forward.__code__.co_names
    return forward.__module__.startswith("transformers.models.") and not {
        "CrossEntropyLoss",
        "mlm_loss_fct",
    }.isdisjoint(names)


def has_masked_tokens(model: PreTrainedModel) -> bool:
    """Return whether a model is one for masked language modeling."""
    return any(cls.__name__.endswith(_HEADS[0]) for cls in type(model).__mro__)


def ignores_count(model: PreTrainedModel) -> bool:
    """Return whether a model of Transformers takes the mean over its labels, whatever `num_items_in_batch` is."""
    forward: Any = inspect.unwrap(type(model).forward)
    return has_masked_loss(model) or forward.__module__ == _GENERIC_HEADS


def with_masked_loss(output: Any, labels: Tensor, count: Tensor | int) -> Any:
    """Return an output of logits ``[B, S, V]`` with this rank's part of the mean over the labels of all ranks.

    Args:
        output: The output of a call without labels.
        labels: Labels of this rank's tokens ``[B, S]``, -100 for none. They are not shifted.
        count: Number of labels on all ranks, at least 1.

    Raises:
        UnsupportedError: If the output is not a dictionary.
    """
    if not hasattr(output, "logits"):
        raise UnsupportedError("the loss of a masked language model needs a dictionary output", got="return_dict=False")
    logits = output.logits
    total = cross_entropy(logits.flatten(0, -2), labels.flatten().to(logits.device), reduction="sum")
    loss = total / (count.to(total.device) if isinstance(count, Tensor) else count)
    return type(output)(**{"loss": loss, **{name: x for name, x in output.items() if name != "loss"}})
