"""Create the errors of calls of a sharded model, with the call to make instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from burst_portable.errors import InputError, ShapeError, UnsupportedError


def wrong_tokens(tokens: Any) -> ShapeError:
    """Return the error of a call whose first argument is not a batch of token ids or embeddings."""
    what, next_step = "a sharded model needs input_ids [batch, tokens] or inputs_embeds", None
    if isinstance(tokens, Mapping):
        next_step = "add ** to the call: model(**sharded.shard(batch)), or model(**batch) with full_batches=True"
    elif isinstance(tokens, Tensor):
        next_step = "add the batch dimension: input_ids.unsqueeze(0)"
    got = tuple(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
    return ShapeError(what, got=got, next_step=next_step)


def unknown_order(layout: str) -> InputError:
    """Return the error of a call with tokens that the caller may have divided by another layout."""
    return InputError(
        "the order of tokens that you divided yourself is unknown",
        got="no position_ids, and no layout= in parallelize()",
        next_step="call model(**sharded.shard(batch)); or pass position_ids=, divided like the tokens; or name the "
        f"layout of the tokens in parallelize() (default: {layout!r})",
    )


def unknown_labels() -> InputError:
    """Return the error of a call whose labels may have been shifted, and counted, on each rank alone."""
    return InputError(
        "whether labels were shifted before you divided them is unknown, and whether labels of all ranks were counted",
        got="labels without sharded.shard",
        next_step="call model(**sharded.shard(input_ids, labels)); or pass no labels, and compute the loss from the "
        "logits and labels of burst_portable.shard_batch, which shifts them",
    )


def no_attention(module: PreTrainedModel, name: str) -> UnsupportedError:
    """Return the error of a call in which our attention function, of that name, did not run."""
    if (used := module.config._attn_implementation) != name:
        what = "the attention implementation of a parallelized model was replaced"
        next_step = "omit model.set_attn_implementation() after parallelize(), or call undo() and parallelize() again"
        return UnsupportedError(what, got=used, allowed=name, next_step=next_step)
    return UnsupportedError(f"{type(module).__name__} did not attend through transformers' AttentionInterface")
