"""Check the model that calls a parallelized base model, for example the language model with a head around it.

No hook of such a model runs, because only the base model was passed to `parallelize`. Its forward computes losses,
pooled outputs and router losses from the tokens of a shard. It is found among the calls that are running, because a
module knows its parts and not the module that it is a part of. The other ways to find it are worse:

- A hook on the outer model needs that model. Referrers of the base model (`gc.get_referrers`) take a pass over all
  objects of the process, and do not show an outer model that is created afterwards.
- torch's hooks of all modules are global: they would run for each module of the process, also of other libraries.
- Its loss function belongs to the outer model, and the arguments of the base model do not contain the labels.
- An output that raises when a head reads it would also raise for a head that works token by token, as of a user.

The frames are walked once per call of the base model, up to the start of the program.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel

from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers.models.model_parts import LANGUAGE_HEADS, has_head, has_tokenwise_head


def check_outer_models(module: PreTrainedModel) -> None:
    """Raise `UnsupportedError` if a model around `module` calls it, and would compute with the tokens of a shard.

    Args:
        module: The called model, which is parallelized, while models around it are not.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward":
            given, model = frame.f_locals, _first_argument(frame)
            is_outer = isinstance(model, PreTrainedModel) and model is not module
            if is_outer and (got := _computes_from_shard(model, given)):
                _raise_if_around(model, module, got)
        frame = frame.f_back


def check_padding_below_heads(module: PreTrainedModel, *, reads_first: bool) -> None:
    """Raise `UnsupportedError` if a head may read the states of padding, which are not those of one device.

    On one device, padding attends to tokens of its row. Here it does not in an encoder, and in a decoder it also
    attends to padding. In training, `padding_gradients` finds heads that do read it; this check is for evaluation too.

    Args:
        module: The called model, which is parallelized and returns the states of all tokens of a padded batch.
        reads_first: Whether a head that reads the first token of a row would read padding. It may be one that is no
            model of Transformers, so that no such model is found around `module`.
    """
    around = _running_models_around(module)
    ignoring = _IGNORE_PADDING if reads_first else (*_IGNORE_PADDING, *_READ_ONE_TOKEN)
    reading = [model for model in around if not any(cls.__name__.endswith(ignoring) for cls in type(model).__mro__)]
    if not reading and (around or not reads_first):
        return
    name = type(reading[0]).__name__ if reading else "a head that reads the first token of a row"
    reads_one = not reading or (reads_first and name.endswith(_READ_ONE_TOKEN))
    raise UnsupportedError(
        f"{name} may read the states of padding, which are not those of one device",
        got="a batch whose rows begin with padding" if reads_first else "a batch with padding",
        allowed=f"models whose names end with {', '.join(ignoring)}",
        next_step="pad at the end of rows (padding_side='right' of the tokenizer)"
        if reads_one
        else "pass rows of one length without padding",
    )


_IGNORE_PADDING = (*LANGUAGE_HEADS, "ForTokenClassification")
"""Endings of the names of models whose heads read labeled tokens only."""
_READ_ONE_TOKEN = ("ForSequenceClassification", "ForMultipleChoice")
"""Of models whose heads read one token of each row: the last one that is no padding, or the first one in encoders."""


def _running_models_around(module: PreTrainedModel) -> list[PreTrainedModel]:
    """Return the models with a head whose `forward` calls `module`, the inner ones first."""
    found: list[PreTrainedModel] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        model = _first_argument(frame) if frame.f_code.co_name == "forward" else None
        if isinstance(model, PreTrainedModel) and model is not module and has_head(model):
            found.append(model)
        frame = frame.f_back
    return found


def check_forward(model: PreTrainedModel, *, full_batches: bool, averaged: bool, takes_labels: bool) -> None:
    """Raise `UnsupportedError` if `forward` of the parallelized model was called and needs the hooks of the model.

    Hooks of its inner model still run. They complete the arguments of a shard, and divide full batches.

    Args:
        model: The parallelized model, of which a part was called.
        full_batches: Whether its calls take full batches.
        averaged: Whether its gradients will be averaged over the ranks.
        takes_labels: Whether its loss function, and not its forward, divides by the number of labels.
    """
    if (given := _running_forward(model)) is None:
        return
    got = _computes_from_shard(model, given)
    if full_batches and got != "labels":
        got = "gradients that will be summed over the ranks" if torch.is_grad_enabled() and not averaged else None
    if got is None or (got == "labels" and takes_labels and not full_batches):
        return
    next_step = "call the model itself: model(**inputs), and not model.forward(**inputs)"
    if full_batches and takes_labels:
        next_step += " (PEFT's AdaptionPromptConfig does that); or divide batches by ShardedModel.shard"
    what = f"{type(model).__name__}.forward() was called directly, so the hooks of the parallelized model did not run"
    raise UnsupportedError(what, got=got, next_step=next_step)


def _running_forward(model: PreTrainedModel) -> dict[str, Any] | None:
    """Return the variables of a running `forward` of a model, or None."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "forward" and _first_argument(frame) is model:
            return frame.f_locals
        frame = frame.f_back
    return None


def _first_argument(frame: FrameType) -> Any:
    """Return the first argument of a running function: the object of a method, whatever its name is there."""
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _computes_from_shard(model: PreTrainedModel, given: dict[str, Any]) -> str | None:
    """Return what a model with these arguments computes from the tokens of a shard, or None."""
    if not has_tokenwise_head(model):
        return "a head that reads single tokens"
    for name in ("logits_to_keep", "labels"):
        value = given.get(name)
        if value is not None and not (isinstance(value, int) and value == 0):
            return name
    named = given.get("kwargs") or {}
    requested = given.get("output_router_logits", named.get("output_router_logits"))
    if requested is None:
        requested = getattr(model.config, "output_router_logits", False)
    return "output_router_logits" if requested else None


def _raise_if_around(model: PreTrainedModel, module: PreTrainedModel, got: str) -> None:
    if any(part is module for part in model.modules()):
        raise UnsupportedError(
            f"{type(model).__name__} is not parallelized, only its part {type(module).__name__}",
            got=f"{got}, which it would compute from the tokens of a shard",
            next_step="pass the outer model to parallelize(); or call it without labels and compute the loss from the "
            "logits and shift_labels",
        )
