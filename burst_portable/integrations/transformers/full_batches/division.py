"""Divide the full batch of a call: the arguments of this rank, and those that models of several parts get undivided."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.errors import DtypeError, InputError
from burst_portable.integrations.transformers.batches.divider import LONGEST, BatchDivider, batch_arguments
from burst_portable.integrations.transformers.batches.left_padding import move_left_padding, roll_rows
from burst_portable.integrations.transformers.batches.packed_rows import check_counted
from burst_portable.integrations.transformers.call_errors import wrong_tokens
from burst_portable.integrations.transformers.full_batches.embeddings import with_full_gradient
from burst_portable.integrations.transformers.full_batches.text_model import (
    checksum_of,
    lengths_of,
    rolled,
    take_undivided,
)
from burst_portable.integrations.transformers.models.padding_positions import POSITIONS, add_positions
from burst_portable.integrations.transformers.training.batch_check import KEY
from burst_portable.sharding import shard

_OF_LOSS = ("labels", "shift_labels", "num_items_in_batch")
"""Arguments of a shard that a call without labels does not have."""
_OF_BATCH = (
    *("input_ids", "labels", "attention_mask", "position_ids", "cu_seqlens", "seq_idx"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)
_OTHERS = ("inputs_embeds", "num_items_in_batch")
"""Tensors of a call that are not divided as token ids are."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class DividedBatch(NamedTuple):
    """The arguments of a call whose batch was divided.

    Attributes:
        kwargs: Arguments of this rank.
        undivided: Arguments that replace them in the end, of a model of several parts. They include the rows, without
            padding mask: padding is at the end.
        padding: Tokens of padding at the beginning of each row ``[B]``, which were moved to its end. None: none.
        joined_rows: Number of rows that the call has as one. None: rows are not joined.
        is_padding: Which tokens of the rows are padding ``[B, N]``, before it was moved. None: none is.
    """

    kwargs: dict[str, Any]
    undivided: dict[str, Any]
    padding: Tensor | None
    joined_rows: int | None
    is_padding: Tensor | None


def divide_full_batch(
    kwargs: dict[str, Any],
    config: Any,
    divider: BatchDivider,
    *,
    has_parts: bool,
    has_recurrent_layers: bool,
    averaged: bool = False,
) -> DividedBatch:
    """Divide the batch among the arguments of a call, which every rank has in full.

    Args:
        kwargs: Arguments of the call. The batch is removed from them.
        config: Configuration of the text model.
        divider: Divides batches of the model.
        has_parts: Whether the model has a text model among several parts, which divides its rows itself.
        has_recurrent_layers: Whether layers of the model have states along the sequence.
        averaged: Whether gradients will be averaged over the ranks. Default: they will be summed.

    Raises:
        ShapeError: If the batch has no token ids or embeddings.
        UnsupportedError: If a part of the batch cannot be divided.
    """
    labels = kwargs.get("labels")
    undivided = take_undivided(kwargs) if has_parts else {}
    batch, embeddings = batch_of(kwargs)
    if not isinstance(batch.get("input_ids"), Tensor):
        raise wrong_tokens(batch.get("input_ids", kwargs.get("inputs_embeds")))
    if embeddings is not None:
        embeddings = with_full_gradient(embeddings, divider.mesh, averaged=averaged)
    token_inputs = divider.token_inputs
    if divider.padding_idx is not None:
        add_positions(batch, divider.padding_idx, has_embeddings=embeddings is not None)
        token_inputs = (*token_inputs, POSITIONS)
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    padding = move_left_padding(
        batch,
        config,
        token_inputs,
        shifts_labels=divider.shifts_labels,
        has_recurrent_layers=has_recurrent_layers,
    )
    if padding is not None:
        embeddings = None if embeddings is None else roll_rows(embeddings, padding)
        undivided = rolled(undivided, padding, batch["input_ids"].shape[1])
        if POSITIONS in batch and POSITIONS not in token_inputs:
            token_inputs = (*token_inputs, POSITIONS)
    given = {"labels": None, "cu_seqlens": None, "attention_mask": None}  # all of them are in the batch
    arguments = batch_arguments(batch, given, token_inputs)
    inputs = divider.divide(**arguments)
    if padding is not None and positions is not None and divider.depends_on_length:
        # One device takes the largest position that was passed, of rows that count from their first token.
        inputs[LONGEST] = longest = int(positions.max()) + 1
        if KEY in inputs:
            inputs[KEY] = inputs[KEY] + longest
    rows, length = batch["input_ids"].shape
    joined_rows = rows if inputs["seq_len"] != length else None
    if joined_rows is not None and embeddings is not None:
        embeddings = embeddings.flatten(0, 1).unsqueeze(0)
    if labels is None:
        inputs = {name: x for name, x in inputs.items() if name not in _OF_LOSS}
    elif kwargs.get("num_items_in_batch") is not None:
        if "shift_labels" in inputs and inputs["cu_seqlens"] and not arguments.get("predicts_first"):
            check_counted(batch["labels"], inputs["num_items_in_batch"])
        del inputs["num_items_in_batch"]
    if has_parts:
        undivided = _with_rows(undivided, kwargs, inputs, batch, embeddings)
    elif embeddings is not None:
        del inputs["input_ids"]
        layout = divider.layouts.of(inputs["seq_len"], inputs["cu_seqlens"])
        kwargs["inputs_embeds"] = shard(embeddings, divider.mesh, layout=layout)
    is_padding = mask == 0 if isinstance(mask, Tensor) and "padded" in inputs else None
    return DividedBatch(kwargs | inputs, undivided, padding, joined_rows, is_padding)


def _with_rows(
    undivided: dict[str, Any],
    kwargs: dict[str, Any],
    inputs: dict[str, Any],
    batch: dict[str, Any],
    embeddings: Tensor | None,
) -> dict[str, Any]:
    """Return the undivided arguments of a model of several parts with the rows of the batch.

    The checksum of `inputs` then covers them, and `inputs` also have the lengths of rows that end with padding.
    """
    if KEY in inputs:
        inputs[KEY] = inputs[KEY] + checksum_of(undivided, inputs[KEY].device)
    if "padded" in inputs:
        inputs["lengths"] = lengths_of(batch["attention_mask"])
    full = {"input_ids": batch["input_ids"]} if embeddings is None else {"inputs_embeds": embeddings}
    kwargs.pop("inputs_embeds", None)
    return {"position_ids": None, "input_ids": None, **undivided, **full}


def batch_of(kwargs: dict[str, Any]) -> tuple[dict[str, Any], Tensor | None]:
    """Remove the batch from the arguments of a call. Return it for `shard`, and the embeddings ``[B, N, H]``, if any.

    The embeddings' batch has checksums of the tokens in place of the ids, so that ranks compare the embeddings. Unknown
    tensors are part of the batch: `shard` raises an error for them.
    """
    unknown = [name for name, x in kwargs.items() if isinstance(x, Tensor) and x.dim() and name not in _OTHERS]
    batch = {name: x for name in dict.fromkeys((*_OF_BATCH, *unknown)) if (x := kwargs.pop(name, None)) is not None}
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is not None and "input_ids" in batch:
        raise InputError("a call takes input_ids or inputs_embeds", got="both", next_step="pass one of them")
    if isinstance(embeddings, Tensor) and embeddings.dim() == 3:
        bits = _INTEGERS.get(embeddings.element_size())
        if bits is None or not embeddings.is_floating_point():
            allowed = "float16, bfloat16, float32 or float64"
            raise DtypeError("unsupported dtype of inputs_embeds", got=embeddings.dtype, allowed=allowed)
        batch["input_ids"] = embeddings.detach().contiguous().view(bits).sum(dim=-1)
    else:
        embeddings = None
    if "labels" not in batch and isinstance(batch.get("input_ids"), Tensor):
        batch["labels"] = torch.full_like(batch["input_ids"], -100)
    return batch, embeddings
