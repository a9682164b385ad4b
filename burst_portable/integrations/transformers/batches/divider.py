"""Divide an undivided batch into the arguments of this rank's call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.errors import InputError, ShapeError, UnsupportedError, shown
from burst_portable.integrations.transformers.batches.packed_rows import (
    check_mask,
    checked_documents,
    documents_of,
    join_rows,
    next_labels,
    remove_packing,
)
from burst_portable.integrations.transformers.batches.padding import has_padding, separated
from burst_portable.integrations.transformers.call_arguments import PositionCheck
from burst_portable.integrations.transformers.layouts import Layouts
from burst_portable.integrations.transformers.models.padding_positions import (
    POSITIONS,
    positions_from_padding,
    take_positions,
)
from burst_portable.integrations.transformers.models.signatures import parameters_of
from burst_portable.integrations.transformers.training.batch_check import KEY, checksum
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.runtime.validation import check_tensor
from burst_portable.sharding import shard, shard_batch

_TOKEN_INPUTS = (
    *("token_type_ids", "task_type_ids", "input_shape_ids", "input_pronunciation_ids", "bbox"),
    *("xpath_tags_seq", "xpath_subs_seq"),
)
"""Inputs of models of Transformers that they convert to embeddings of each token, and use in no other way."""
LONGEST = "longest"
"""Argument of a call: the largest position of one device plus 1, if its documents do not show it."""
_OF_POSITIONS = ("position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""Descriptions of documents in a batch: position ids, and others that must match them."""


class BatchDivider(NamedTuple):
    """Divides batches for one model.

    Attributes:
        mesh: The ranks that share a sequence.
        layouts: The layouts of sequences.
        position_check: Gets the position ids of each shard.
        shifts_labels: Whether a token is compared with the label of the next one.
        scales_by_row: Whether the model scales queries by their row number.
        depends_on_length: Whether frequencies of RoPE depend on the largest position.
        separates_padding: Whether padding becomes a document, because tokens attend to later ones.
        token_inputs: Names of the model's other inputs with values for each token (see `token_inputs_of`).
        padding_idx: Id of the padding token, if positions count from it. None: they count from 0.
    """

    mesh: Mesh
    layouts: Layouts
    position_check: PositionCheck
    shifts_labels: bool
    scales_by_row: bool
    depends_on_length: bool
    separates_padding: bool
    token_inputs: tuple[str, ...]
    padding_idx: int | None

    def divide(
        self,
        input_ids: Any,
        labels: Any,
        cu_seqlens: Any,
        attention_mask: Any,
        *,
        predicts_first: bool = False,
        **token_inputs: Any,
    ) -> dict[str, Any]:
        """Return the result of `shard`, after checking the types of its arguments.

        Args:
            input_ids: As in `shard`.
            labels: As in `shard`.
            cu_seqlens: As in `shard`.
            attention_mask: As in `shard`.
            predicts_first: Whether the last token of a document predicts the first one of the next, if that has a
                label.
            token_inputs: Other inputs of the model ``[B, N, ...]``.
        """
        _check_batch(input_ids, labels, attention_mask, token_inputs)
        documents = checked_documents(cu_seqlens)
        length = input_ids.shape[1]
        padded = has_padding(attention_mask, input_ids, input_ids if labels is None and self.shifts_labels else labels)
        inputs: dict[str, Any] = {}
        if padded and self.separates_padding:
            if self.depends_on_length:
                inputs[LONGEST] = max((b - a for row in documents for a, b in pairwise(row)), default=length)
            documents = separated(documents, attention_mask)
        cu_seqlens = documents[0] if documents else None
        if len(documents) > 1:
            if self.scales_by_row:
                what = "documents that differ between rows, in a model that scales queries by their row number"
                raise UnsupportedError(what, next_step="pass one row per batch")
            rows = join_rows(input_ids, labels, attention_mask, token_inputs, documents)
            input_ids, labels, attention_mask, token_inputs, cu_seqlens = rows
        if self.padding_idx is not None and POSITIONS not in token_inputs:
            token_inputs |= {POSITIONS: positions_from_padding(input_ids, self.padding_idx, cu_seqlens)}
        layout = self.layouts.of(input_ids.shape[1], cu_seqlens)
        inputs |= {"seq_len": input_ids.shape[1], "cu_seqlens": cu_seqlens}
        if self.mesh.size > 1:
            offsets = None if cu_seqlens is None else on_device(cu_seqlens, input_ids.device)
            inputs[KEY] = checksum(input_ids, labels, attention_mask, offsets, *token_inputs.values())
        inputs |= {name: shard(x, self.mesh, layout=layout) for name, x in token_inputs.items()}
        if padded:
            inputs["padded"] = shard(attention_mask == 0, self.mesh, layout=layout)
        batch = shard_batch(input_ids, labels, cu_seqlens=cu_seqlens, mesh=self.mesh, layout=layout)
        if POSITIONS in inputs:
            batch["position_ids"] = inputs.pop(POSITIONS)
        self.position_check.remember(batch["position_ids"], input_ids.shape[1], cu_seqlens)
        local_labels = batch.pop("labels")
        if not self.shifts_labels:
            return batch | inputs | self._labels(labels, layout)
        if predicts_first:
            return batch | inputs | self._labels_across_documents(labels, length, layout)
        return batch | inputs | _shifted_labels(local_labels, input_ids if labels is None else labels, cu_seqlens)

    def _labels(self, labels: Tensor | None, layout: Layout) -> dict[str, Any]:
        """Return this rank's labels of a model that does not shift them, and the number of all labels."""
        if labels is None:
            return {}
        local = shard(labels, self.mesh, layout=layout)
        return {"labels": local, "num_items_in_batch": (labels != -100).sum()}

    def _labels_across_documents(self, labels: Tensor, length: int, layout: Layout) -> dict[str, Any]:
        """Return this rank's shifted labels, if the last token of a document predicts the first one of the next."""
        shifted = next_labels(labels, length)
        local = shard(shifted, self.mesh, layout=layout)
        return {"shift_labels": local, "labels": local, "num_items_in_batch": (shifted != -100).sum()}


def _check_batch(input_ids: Any, labels: Any, attention_mask: Any, token_inputs: Mapping[str, Any]) -> None:
    """Raise an error for tensors of a batch that are no tensors, or whose shapes do not fit together."""
    for name, x in (("input_ids", input_ids), ("labels", labels), ("attention_mask", attention_mask)):
        if x is not None or name == "input_ids":
            check_tensor(name, x)
    if input_ids.dim() != 2:
        next_step = "add the batch dimension: input_ids.unsqueeze(0)" if input_ids.dim() == 1 else None
        raise ShapeError("input_ids must be [batch, tokens]", got=tuple(input_ids.shape), next_step=next_step)
    if not input_ids.numel():
        raise ShapeError("the batch has no tokens", got=tuple(input_ids.shape), allowed="at least one token")
    if labels is not None and labels.shape != input_ids.shape:
        what = "labels and input_ids have different shapes"
        raise ShapeError(what, got=tuple(labels.shape), allowed=tuple(input_ids.shape))
    for name, x in token_inputs.items():
        check_tensor(name, x)
        if x.shape[:2] != input_ids.shape:
            got, allowed = tuple(x.shape), f"{tuple(input_ids.shape)}, and perhaps more dimensions"
            raise ShapeError(f"{name} has no value for each token", got=got, allowed=allowed)


def _shifted_labels(local: Tensor, labels: Tensor, cu_seqlens: Sequence[int] | None) -> dict[str, Any]:
    """Return this rank's shifted labels, and the number of all `labels` but those of first tokens of documents."""
    has_label = labels != -100
    first = on_device((0,) if cu_seqlens is None else cu_seqlens[:-1], has_label.device)  # no token precedes them
    count = has_label.sum() - has_label[:, first].sum()
    return {"labels": local, "shift_labels": local, "num_items_in_batch": count}


def token_inputs_of(model: Any) -> tuple[str, ...]:
    """Return the names of a model's inputs with values for each token ``[B, N, ...]``, apart from ids and masks."""
    return tuple(name for name in _TOKEN_INPUTS if name in parameters_of(model))


def batch_arguments(
    batch: Mapping[str, Any],
    given: Mapping[str, Any],
    token_inputs: Sequence[str] = (),
    padding_idx: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of `BatchDivider.divide`.

    Args:
        batch: Tensors of a tokenizer or collator.
        given: Arguments that were passed with it.
        token_inputs: Names of the model's other inputs. Default: none.
        padding_idx: Id of the padding token, if positions count from it. Default: they count from 0.

    Raises:
        InputError: If an argument is missing, was passed twice, or cannot be divided.
    """
    if "input_ids" not in batch:
        raise InputError("the batch has no input_ids", got=", ".join(map(shown, batch)) or "an empty batch")
    if twice := [name for name, value in given.items() if value is not None and name in batch]:
        raise InputError(f"{twice[0]} is in the batch and was passed as an argument", next_step="pass it once")
    arguments, allowed = {**given, **batch}, ("input_ids", *given, *token_inputs)
    if padding_idx is not None:
        take_positions(arguments, padding_idx)
    if (position_ids := arguments.pop("position_ids", None)) is not None:
        documents = documents_of(position_ids)
        remove_packing(arguments, documents)
        check_mask(arguments["attention_mask"], documents)
        is_packed = max(map(len, documents)) > 2
        arguments["cu_seqlens"] = documents if is_packed else None
        arguments["predicts_first"] = is_packed and arguments["labels"] is not None
    if unknown := sorted(set(arguments) - {*allowed, "predicts_first"}):
        raise InputError(
            "not every tensor of this batch can be divided",
            got=", ".join(map(shown, unknown)),
            allowed=", ".join((*allowed, *_OF_POSITIONS)),
            next_step="remove these tensors from the batch; if the model needs one that has values for each token "
            "[B, N, ...], and full_batches=False, divide it by burst_portable.shard(x, mesh, "
            "layout=sharded.layout_of(N)), and pass it to the model next to the result of sharded.shard",
        )
    return arguments


def on_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return int64 numbers ``[len(numbers)]`` on a device. The host does not wait for it."""
    return torch.tensor(numbers).to(device, non_blocking=True)
