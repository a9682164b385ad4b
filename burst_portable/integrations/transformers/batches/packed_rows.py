"""Read the packed documents of a batch, and join rows whose documents differ.

A batch of ``[B, N]`` tokens has one list of documents if they are equal in all rows. Otherwise its rows become one row
of B * N tokens. No token attends to another document, so losses and gradients stay those of the batch, and the tokens
and the pairs of attention are as many as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.errors import InputError, ShapeError, UnsupportedError, shown
from burst_portable.mask import checked_cu_seqlens

Documents = tuple[int, ...]
"""Cumulative lengths ``(0, ..., N)`` of the documents of a row."""


class Rows(NamedTuple):
    """Token ids, labels and attention mask ``[B, N]``, other inputs ``[B, N, ...]``, and the documents of all rows."""

    input_ids: Tensor
    labels: Tensor | None
    attention_mask: Tensor | None
    token_inputs: dict[str, Tensor]
    cu_seqlens: Documents | None


def checked_documents(cu_seqlens: Any) -> tuple[Documents, ...]:
    """Return the documents of each row; of one row if all are equal, and of none for None.

    Raises:
        MaskError: If they are not cumulative lengths.
    """
    if cu_seqlens is None:
        return ()
    if not isinstance(cu_seqlens, Sequence | Tensor) or not len(cu_seqlens) or not _has_rows(cu_seqlens):
        return (tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens)),)
    rows = tuple(tuple(checked_cu_seqlens(f"cu_seqlens[{i}]", row)) for i, row in enumerate(cu_seqlens))
    return equal_once(rows)


def equal_once(rows: tuple[Documents, ...]) -> tuple[Documents, ...]:
    """Return the documents of each row, or those of one row if all are equal."""
    return rows[:1] if len(set(rows)) == 1 else rows


def _has_rows(cu_seqlens: Any) -> bool:
    first = cu_seqlens[0]
    return not isinstance(first, str) and (isinstance(first, Sequence) or getattr(first, "ndim", 0) > 0)


def join_rows(
    input_ids: Tensor,
    labels: Tensor | None,
    attention_mask: Tensor | None,
    token_inputs: dict[str, Tensor],
    documents: tuple[Documents, ...],
) -> Rows:
    """Return a batch ``[B, N]`` with different documents in each row as one row of B * N tokens.

    Raises:
        InputError: If there is not one list of documents per row, or a list does not end with its row.
        ShapeError: If the tensors have different shapes.
    """
    count, length = input_ids.shape
    for name, x in (("labels", labels), ("attention_mask", attention_mask)):
        if x is not None and x.shape != input_ids.shape:
            got, allowed = tuple(x.shape), tuple(input_ids.shape)
            raise ShapeError(f"{name} and input_ids have different shapes", got=got, allowed=allowed)
    if len(documents) != count:
        raise InputError("cu_seqlens must have one list per row", got=len(documents), allowed=count)
    for row in documents:
        if row[-1] != length:
            next_step = "make padding a document, too"
            raise InputError("cu_seqlens must end with their row", got=row[-1], allowed=length, next_step=next_step)
    ends = tuple(accumulate(b - a for row in documents for a, b in pairwise(row)))
    labels, attention_mask = (None if x is None else x.reshape(1, -1) for x in (labels, attention_mask))
    token_inputs = {name: x.reshape(1, -1, *x.shape[2:]) for name, x in token_inputs.items()}
    return Rows(input_ids.reshape(1, -1), labels, attention_mask, token_inputs, (0, *ends))


def documents_of(position_ids: Tensor) -> tuple[Documents, ...]:
    """Return the documents of each row of position ids ``[B, N]``, which count from 0; of one row if all are equal."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[0] == 0:
        got = tuple(position_ids.shape) if isinstance(position_ids, Tensor) else type(position_ids).__name__
        next_step = "leave them out for rows of one document"
        raise UnsupportedError("position_ids of a batch must be [batch, tokens]", got=got, next_step=next_step)
    rows = position_ids.cpu()
    is_first = rows == 0
    places = torch.arange(rows.shape[1], device="cpu").expand(rows.shape)
    last_start = torch.where(is_first, places, -1).cummax(dim=1).values
    if not rows.shape[1] or not torch.equal(rows.to(torch.int64), torch.where(last_start < 0, -1, places - last_start)):
        wrong = (rows != torch.where(last_start < 0, -1, places - last_start)).nonzero()
        row, place = wrong[0].tolist() if len(wrong) else (0, 0)
        raise UnsupportedError(
            "position_ids must count up from 0 in each document",
            got=f"{rows[row, place].item()} at token {place} of row {row}" if rows.numel() else "no tokens",
            allowed="numbers that continue, also on padding, or that begin at 0 again",
            next_step="leave out position_ids for rows of one document, also with padding; for packed documents, "
            "pass cu_seqlens=(0, end, ...) in their place",
        )
    found = tuple((*row.nonzero().flatten().tolist(), rows.shape[1]) for row in is_first)
    return equal_once(found)


def check_mask(attention_mask: Any, rows: tuple[Documents, ...]) -> None:
    """Raise `InputError` if an attention mask joins the documents of position ids.

    With a mask ``[B, N]``, Transformers' attention ignores that position ids restart: each row is one sequence. Only
    its flash attention drops a mask of ones, and reads documents. A mask that numbers documents (1, 1, 2, 2, ...), as
    axolotl's, is clear, and so is padding (0).

    Args:
        attention_mask: The mask of the batch, or None.
        rows: The documents of each row; of one row if all are equal.
    """
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2 or max(map(len, rows)) <= 2:
        return
    mask = attention_mask.cpu()
    for row, documents in zip(mask, rows if len(rows) > 1 else rows * len(mask), strict=False):
        starts = torch.tensor([start for start in documents[1:-1] if start < mask.shape[1]], dtype=torch.int64)
        if bool(((row[starts] != 0) & (row[starts] == row[starts - 1])).any()):
            raise InputError(
                "position_ids that restart are documents, and the attention mask joins them",
                got="the same nonzero number on both sides of a border",
                next_step="leave out attention_mask for packed documents; for one sequence per row, leave out "
                "position_ids",
            )


def next_labels(labels: Tensor, length: int) -> Tensor:
    """Return the label of each token's next one, -100 at the end of a row.

    Args:
        labels: Labels of rows of `length` tokens, ``[B, length]``; or of joined rows, ``[1, B * length]``.
        length: Tokens of a row.
    """
    shifted = torch.full_like(labels, -100)
    shifted.view(-1, length)[:, :-1] = labels.reshape(-1, length)[:, 1:]
    return shifted


def check_counted(labels: Tensor, predicted: Tensor) -> None:
    """Raise `InputError` if a count of labels that the caller made may have more than those that are predicted.

    Args:
        labels: Unshifted labels ``[B, N]`` of a batch with `cu_seqlens`.
        predicted: Number of those that are predicted, ``[]``.
    """
    counted, found = int((labels[:, 1:] != -100).sum()), int(predicted)
    if counted != found:
        raise InputError(
            "first tokens of documents have labels, which num_items_in_batch may count, and no token predicts them",
            got=f"{counted} labels, of which {found} are predicted",
            next_step="set the label of the first token of each document to -100, as DataCollatorWithFlattening does",
        )


def remove_packing(batch: dict[str, Any], rows: tuple[Documents, ...]) -> None:
    """Remove other descriptions of the documents from a batch, after checking that they match the position ids.

    `DataCollatorWithFlattening` adds them with return_flash_attn_kwargs and return_seq_idx.
    """
    lengths = [b - a for row in rows for a, b in pairwise(row)]
    cumulative = [0, *accumulate(lengths)]
    expected: dict[str, Any] = dict.fromkeys(("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"), cumulative)
    expected |= dict.fromkeys(("max_length_q", "max_length_k"), max(lengths))
    expected["seq_idx"] = [[i for i, (a, b) in enumerate(pairwise(row)) for _ in range(b - a)] for row in rows]
    for name, value in expected.items():
        given = batch.pop(name, None)
        given = given.tolist() if isinstance(given, Tensor) else list(given) if isinstance(given, tuple) else given
        if given not in (None, value):
            raise InputError(
                f"{name} and position_ids describe different documents", got=shown(given), allowed=shown(value)
            )
