"""Shard tensors over the ranks of a mesh, and gather them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from burst_portable.comm.agreement import Facts, agree, call_signature, hashed_value
from burst_portable.errors import DtypeError, InputError, MaskError, ShapeError, shown
from burst_portable.layout import Layout
from burst_portable.mask import Mask, checked_cu_seqlens
from burst_portable.mesh import Mesh, MeshLike, as_mesh, position_ids
from burst_portable.runtime.validation import (
    broadcast_error,
    check_rows,
    check_tensor,
    usable_device,
    warn_of_other_layout,
)
from burst_portable.strategies.planner import layout_of, mask_of
from burst_portable.utils.torch_modes import outside_graphs
from burst_portable.utils.values import as_int, size


@outside_graphs
def local_position_ids(
    mesh: MeshLike = None,
    *,
    seq_len: int,
    layout: Layout | str = "zigzag",
    mask: Mask | str | None = None,
    device: torch.device | str | int | None = None,
) -> Tensor:
    """Return the global positions of this rank's tokens, in order: int64 ``[S]``.

    Args:
        mesh: The ranks, as in `attention`.
        seq_len: Tokens of the unsharded sequence.
        layout: A `Layout` or its name, as in `attention`.
        mask: Mask of the attention, for layouts that depend on it. Other layouts ignore it.
        device: Device of the result. Default: torch's default device.

    Raises:
        InputError: If arguments are invalid or contradict each other, or the device does not exist.
    """
    mesh = as_mesh(mesh)
    layout, device = _layout(layout, size("seq_len", seq_len), mesh, mask), usable_device(device)
    mesh.note_sharded(layout)
    return position_ids(layout, mesh.rank, device)


def shard(
    x: Tensor, mesh: MeshLike = None, *, dim: int = 1, layout: Layout | str = "zigzag", mask: Mask | str | None = None
) -> Tensor:
    """Return this rank's tokens of an unsharded tensor that every rank has. Differentiable; sends nothing.

    Args:
        x: Any tensor, unsharded along `dim`.
        mesh: The ranks, as in `attention`.
        dim: Sequence dimension of x.
        layout: A `Layout` or its name, as in `attention`.
        mask: Mask of the attention, for layouts that depend on it.

    Returns:
        A copy with this rank's S tokens along `dim`, in the order of the layout.

    Raises:
        InputError: If x is not a tensor or has no such dimension; and as `local_position_ids`.
    """
    dim = _dimension(x, dim)
    index = local_position_ids(mesh, seq_len=x.shape[dim], layout=layout, mask=mask, device=x.device)
    return x.index_select(dim, index)


def _layout(layout: Layout | str, seq_len: int, mesh: Mesh, mask: Mask | str | None) -> Layout:
    return layout_of(layout, seq_len, mesh.size, mask if mask is None else mask_of(mask, seq_len))


def _dimension(x: Tensor, dim: int) -> int:
    """Return the dimension as a number. Raise `ShapeError` if x does not have it."""
    check_tensor("x", x)
    number = as_int(dim)
    if number is None or not -x.dim() <= number < x.dim():
        allowed = f"{-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor that has dimensions"
        raise ShapeError("x has no such dimension", got=shown(dim), allowed=allowed)
    return number


def unshard(
    x: Tensor,
    mesh: MeshLike = None,
    *,
    seq_len: int,
    dim: int = 1,
    layout: Layout | str = "zigzag",
    mask: Mask | str | None = None,
) -> Tensor:
    """Gather the unsharded tensor on every rank. Every rank must call it.

    Args:
        x: This rank's S tokens along `dim`, as `shard` returns them.
        mesh: The ranks, as in `attention`.
        seq_len: Tokens of the unsharded sequence.
        dim: Sequence dimension of x.
        layout: A `Layout` or its name, as in `attention`.
        mask: Mask of the attention, for layouts that depend on it.

    Returns:
        A new tensor with `seq_len` tokens along `dim`.

    Raises:
        InputError: If x requires gradients (their meaning would depend on the loss); and as `shard`.
        LayoutError: If x has another number of tokens than this rank has in the layout.
        MismatchError: If ranks differ in dtype, shape, dim or layout; on every rank, if the transport can compare them.
        CommunicationError: If the communication fails otherwise.
    """
    mesh = as_mesh(mesh)
    try:
        dim, seq_len = _dimension(x, dim), size("seq_len", seq_len)
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError("unshard has no gradient; detach the tensor, or compute the loss on shards")
        layout = _layout(layout, seq_len, mesh, mask)
        check_rows(layout, x.shape[dim], mesh)
        transport = mesh.transport(x.device.type)
        # Lazy conjugation and negation are not in the bytes that are sent.
        local = x.resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
    except Exception as error:
        broadcast_error(mesh, error, x)
        raise
    facts: Facts = {
        "pass": "unshard",
        "dtype": str(local.dtype).removeprefix("torch."),
        "shape of a row": str(tuple(local.shape[1:])),
        "dim": str(dim % x.dim()),
        "tokens": hashed_value(str(seq_len), seq_len),
        "layout": hashed_value(layout.name, layout.shards),
    }
    agree(transport, call_signature(facts))
    warn_of_other_layout(layout, mesh, "unshard")
    with transport.between_passes():
        parts = [local.new_empty(layout.count(r), *local.shape[1:]) for r in range(mesh.size)]
        flat = [part.view(-1).view(torch.uint8) for part in parts]
        transport.all_gather(local.view(-1).view(torch.uint8), flat, "unshard")
    full = local.new_empty([seq_len if i == dim % x.dim() else n for i, n in enumerate(x.shape)])
    first = full.movedim(dim, 0)  # the result itself is no view: FSDP2 warns about views that a model returns
    for part, segments in zip(parts, layout.shards, strict=True):
        for s, rows in zip(segments, part.split([s.count for s in segments]), strict=True):
            first[s.start : s.last + 1 : s.step] = rows
    return full


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    *,
    mesh: MeshLike = None,
    layout: Layout | str = "zigzag",
    mask: Mask | str | None = None,
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """Return this rank's part of a batch of a causal language model.

    Labels are shifted *before* sharding, so that the last token of a shard predicts the first token of the next one.

    Args:
        input_ids: Token ids of shape ``[B, N]``, equal on every rank.
        labels: Unshifted labels of shape ``[B, N]``, as Transformers takes them. Default: `input_ids`.
        position_ids: Shape ``[B, N]`` or ``[1, N]``. Default: they count up, from 0 in each document.
        cu_seqlens: Cumulative lengths of packed documents, (0, ..., N). No token predicts one of the next document.
        mesh: The ranks, as in `attention`.
        layout: A `Layout` or its name, as in `attention`.
        mask: Mask of the attention, for layouts that depend on it, such as "dispatched". Labels and position ids do
            not depend on it. Default: the causal documents of `cu_seqlens`.
        ignore_index: Label of tokens without a label.

    Returns:
        input_ids, position_ids and the shifted labels, each of shape ``[B, S]``.

    Raises:
        InputError: If shapes differ or documents do not fill the sequence; and as `attention`.
        DtypeError: If ids are not integers.
    """
    _check_ids("input_ids", input_ids)
    length = input_ids.shape[1]
    labels = input_ids if labels is None else _check_ids("labels", labels, input_ids)
    offsets = [0, length] if cu_seqlens is None else checked_cu_seqlens("cu_seqlens", cu_seqlens)
    if offsets[-1] != length:
        got = f"documents up to {offsets[-1]}, and {length} tokens"
        next_step = "add one document for the remaining tokens, including padding"
        raise MaskError("the documents do not fill the sequence", got=got, next_step=next_step)
    missing = as_int(ignore_index)
    limits = torch.iinfo(labels.dtype)
    if missing is None or not limits.min <= missing <= limits.max:
        allowed = f"a value of {labels.dtype}"
        raise InputError("ignore_index cannot be a label", got=shown(ignore_index), allowed=allowed)
    shifted = torch.full_like(labels, missing)
    shifted[:, :-1] = labels[:, 1:]
    count = torch.arange(length, device=input_ids.device)
    for start, stop in pairwise(offsets):
        count[start:stop] -= start
        shifted[:, stop - 1] = missing
    positions = count.unsqueeze(0) if position_ids is None else _check_ids("position_ids", position_ids, input_ids)
    batch = {"input_ids": input_ids, "position_ids": positions.expand_as(input_ids), "labels": shifted}
    if mask is None and cu_seqlens is not None:
        mask = Mask.documents(offsets)
    return {name: shard(x, mesh, layout=layout, mask=mask) for name, x in batch.items()}


def _check_ids(name: str, ids: Tensor, like: Tensor | None = None) -> Tensor:
    """Raise an error if `ids` are not integers of shape ``[B, N]``, equal to that of `like`."""
    check_tensor(name, ids)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise DtypeError(f"{name} must be integers", got=ids.dtype, next_step="pass token ids, not embeddings")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ShapeError(f"{name} must be [batch, tokens] and not empty", got=tuple(ids.shape))
    is_shared = name == "position_ids" and ids.shape[0] == 1
    if like is not None and ids.shape != like.shape and not (is_shared and ids.shape[1] == like.shape[1]):
        raise ShapeError(f"{name} and input_ids have different shapes", got=tuple(ids.shape), allowed=tuple(like.shape))
    return ids
