"""From whole tensors to this rank's rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from burst_portable.checks import check_layout
from burst_portable.errors import InputError, ShapeError, explain
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import as_mesh
from burst_portable.planning import named_layout


def positions(
    mesh: Any = None,
    *,
    seq_len: int,
    layout: Layout | str = "zigzag",
    mask: Mask | None = None,
    device: Any = None,
) -> Tensor:
    """The global positions of this rank's rows, in order: int64 ``[S]``. `mask` is for `document_zigzag`."""
    mesh = as_mesh(mesh)
    where = layout if isinstance(layout, Layout) else named_layout(layout, seq_len, mesh.size, mask)
    check_layout(where, seq_len, None, mesh)
    return torch.cat([torch.arange(s.start, s.last + 1, s.step, device=device) for s in where.shards[mesh.rank]])


def shard(
    x: Tensor, mesh: Any = None, *, dim: int = 1, layout: Layout | str = "zigzag", mask: Mask | None = None
) -> Tensor:
    """This rank's rows of a tensor that every rank has whole, along `dim`. Differentiable; nothing is sent."""
    index = positions(mesh, seq_len=x.shape[dim], layout=layout, mask=mask, device=x.device)
    return x.index_select(dim, index)


def unshard(
    x: Tensor,
    mesh: Any = None,
    *,
    seq_len: int,
    dim: int = 1,
    layout: Layout | str = "zigzag",
    mask: Mask | None = None,
) -> Tensor:
    """The whole tensor on every rank, from the ranks' shards along `dim`.

    Raises `InputError` for a tensor that wants gradients: what they would mean depends on the loss.
    """
    if x.requires_grad and torch.is_grad_enabled():
        raise InputError("unshard has no gradient: detach the tensor first, or compute the loss on shards")
    mesh = as_mesh(mesh)
    where = layout if isinstance(layout, Layout) else named_layout(layout, seq_len, mesh.size, mask)
    check_layout(where, seq_len, x.shape[dim], mesh)
    mine = x.movedim(dim, 0).contiguous()
    parts = [mine.new_empty(where.count(r), *mine.shape[1:]) for r in range(mesh.size)]
    flat = [part.view(-1).view(torch.uint8) for part in parts]
    mesh.transport(x.device.type).all_gather(mine.view(-1).view(torch.uint8), flat, "unshard")
    whole = mine.new_empty(seq_len, *mine.shape[1:])
    for part, segments in zip(parts, where.shards, strict=True):
        row = 0
        for s in segments:
            whole[s.start : s.last + 1 : s.step] = part[row : row + s.count]
            row += s.count
    return whole.movedim(0, dim)


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    documents: Sequence[int] | None = None,
    *,
    mesh: Any = None,
    layout: Layout | str = "zigzag",
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """This rank's part of a batch of a causal language model.

    Labels are shifted *before* they are cut, so that the last token of a shard is held to the first of the next.

    Args:
        input_ids: ``[B, N]``, the same on every rank.
        labels: ``[B, N]`` unshifted, as transformers takes them; None uses `input_ids`.
        position_ids: ``[B, N]``; None counts up, from 0 at each document.
        documents: cumulative lengths of packed documents; no label crosses a document.

    Returns:
        input_ids, position_ids and labels (already shifted, `ignore_index` where there is none), each ``[B, S]``.
    """
    if input_ids.dim() != 2:
        raise ShapeError(explain("input_ids must be [batch, tokens]", got=tuple(input_ids.shape)))
    length = input_ids.shape[1]
    labels = input_ids if labels is None else labels
    if labels.shape != input_ids.shape:
        raise ShapeError(
            explain("labels differ from input_ids", got=tuple(labels.shape), allowed=tuple(input_ids.shape))
        )
    mask = Mask.documents(documents) if documents is not None else None
    if mask is not None:
        mask.check_lengths(length, length)
    shifted = torch.full_like(labels, ignore_index)
    shifted[:, :-1] = labels[:, 1:]
    count = torch.arange(length, device=input_ids.device)
    for start, stop in pairwise(documents or (0, length)):
        count[start:stop] -= start
        shifted[:, stop - 1] = ignore_index
    if position_ids is None:
        position_ids = count.expand_as(input_ids)
    whole = {"input_ids": input_ids, "position_ids": position_ids, "labels": shifted}
    return {name: shard(x, mesh, layout=layout, mask=mask) for name, x in whole.items()}
