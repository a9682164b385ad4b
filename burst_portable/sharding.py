"""From whole tensors to this rank's rows, and back."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from burst_portable.comm.agreement import CallSignature, agree, call_signature, hashed_value
from burst_portable.errors import DtypeError, InputError, MaskError, ShapeError, shown
from burst_portable.layout import Layout
from burst_portable.mask import Mask, checked_cu_seqlens
from burst_portable.mesh import Mesh, MeshLike, as_mesh, position_ids
from burst_portable.runtime.validation import broadcast_error, check_rows, check_tensor, usable_device
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
    """The global positions of this rank's rows, in order: int64 ``[S]``.

    Args:
        mesh: as `attention` takes it.
        seq_len: tokens of the whole sequence.
        layout: as `attention` takes it.
        mask: the mask of the attention, for layouts that read documents from it; other layouts ignore it.
        device: where the result lies; None for torch's default.

    Raises `InputError` for sizes, names, masks and layouts that do not go together, and for a device that is not here.
    """
    mesh = as_mesh(mesh)
    where, device = _layout(layout, size("seq_len", seq_len), mesh, mask), usable_device(device)
    return position_ids(where, mesh.rank, device)


def shard(
    x: Tensor, mesh: MeshLike = None, *, dim: int = 1, layout: Layout | str = "zigzag", mask: Mask | str | None = None
) -> Tensor:
    """This rank's rows of a tensor that every rank holds as a whole. Differentiable; nothing is sent.

    Args:
        x: any tensor, the whole sequence along `dim`.
        mesh, layout, mask: as `local_position_ids` takes them.

    Returns:
        A copy with this rank's S rows along `dim`, in the layout's order.

    Raises `InputError`: for an x that is not a tensor or has no such dimension, and as `local_position_ids`.
    """
    dim = _dimension(x, dim)
    index = local_position_ids(mesh, seq_len=x.shape[dim], layout=layout, mask=mask, device=x.device)
    return x.index_select(dim, index)


def _layout(layout: Layout | str, seq_len: int, mesh: Mesh, mask: Mask | str | None) -> Layout:
    return layout_of(layout, seq_len, mesh.size, mask if mask is None else mask_of(mask, seq_len))


def _dimension(x: Tensor, dim: int) -> int:
    """Which dimension of x is cut."""
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
    """The whole tensor on every rank, from the ranks' shards; every rank must call it.

    Args:
        x: this rank's S rows along `dim`, as `shard` cuts them.
        mesh, seq_len, layout, mask: as `local_position_ids` takes them.

    Returns:
        A new tensor with `seq_len` rows along `dim`.

    Raises:
        InputError: a tensor that requires gradients (whose meaning would depend on the loss), or as `shard`.
        LayoutError: a different number of rows than the layout gives this rank.
        MismatchError: ranks that differ in dtype, shape, dim or layout; on every rank, if the transport can tell.
        CommunicationError: something else went wrong between ranks.
    """
    mesh = as_mesh(mesh)
    try:
        dim, seq_len = _dimension(x, dim), size("seq_len", seq_len)
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError("unshard has no gradient: detach the tensor first, or compute the loss on shards")
        where = _layout(layout, seq_len, mesh, mask)
        check_rows(where, x.shape[dim], mesh)
        transport = mesh.transport(x.device.type)
        # Lazy conjugation and negation are not in the bytes that are sent.
        mine = x.resolve_conj().resolve_neg().movedim(dim, 0).contiguous()
    except Exception as refusal:
        broadcast_error(mesh, refusal, x)
        raise
    agree(transport, _call_signature(mine, dim % x.dim(), where))
    with transport.between_passes():
        parts = [mine.new_empty(where.count(r), *mine.shape[1:]) for r in range(mesh.size)]
        flat = [part.view(-1).view(torch.uint8) for part in parts]
        transport.all_gather(mine.view(-1).view(torch.uint8), flat, "unshard")
    whole = mine.new_empty(seq_len, *mine.shape[1:])
    for part, segments in zip(parts, where.shards, strict=True):
        row = 0
        for s in segments:
            whole[s.start : s.last + 1 : s.step] = part[row : row + s.count]
            row += s.count
    return whole.movedim(0, dim)


def _call_signature(mine: Tensor, dim: int, where: Layout) -> CallSignature:
    """What ranks must state alike before they unshard; `mine` has its rows first."""
    return call_signature(
        {
            "pass": "unshard",
            "dtype": str(mine.dtype).removeprefix("torch."),
            "shape of a row": str(tuple(mine.shape[1:])),
            "dim": str(dim),
            "tokens": str(where.length),
            "layout": hashed_value(where.name, where.shards),
        }
    )


def shard_batch(
    input_ids: Tensor,
    labels: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    *,
    mesh: MeshLike = None,
    layout: Layout | str = "zigzag",
    ignore_index: int = -100,
) -> dict[str, Tensor]:
    """This rank's part of a batch of a causal language model.

    Labels are shifted *before* they are cut, so that the last token of a shard predicts the first of the next.

    Args:
        input_ids: ``[B, N]``, the same on every rank.
        labels: ``[B, N]`` unshifted, as transformers takes them; None uses `input_ids`.
        position_ids: ``[B, N]`` or ``[1, N]``; None counts up, from 0 at each document.
        cu_seqlens: cumulative lengths of packed documents, (0, ..., N); no token predicts one of the next document.

    Returns:
        input_ids, position_ids and labels (already shifted, `ignore_index` where there is none), each ``[B, S]``.

    Raises:
        InputError: tensors whose shapes differ, documents that do not fill the sequence, and as `attention`.
        DtypeError: ids that are not integers.
    """
    _check_ids("input_ids", input_ids)
    length = input_ids.shape[1]
    labels = input_ids if labels is None else _check_ids("labels", labels, input_ids)
    ends = [0, length] if cu_seqlens is None else checked_cu_seqlens("cu_seqlens", cu_seqlens)
    if ends[-1] != length:
        raise MaskError(
            "the documents do not fill the sequence",
            got=f"documents up to {ends[-1]}, and {length} tokens",
            next_step="make what is left over, padding too, a document of its own",
        )
    missing = as_int(ignore_index)
    held = torch.iinfo(labels.dtype)
    if missing is None or not held.min <= missing <= held.max:
        allowed = f"an int that {labels.dtype} holds"
        raise InputError("ignore_index cannot be a label", got=shown(ignore_index), allowed=allowed)
    shifted = torch.full_like(labels, missing)
    shifted[:, :-1] = labels[:, 1:]
    count = torch.arange(length, device=input_ids.device)
    for start, stop in pairwise(ends):
        count[start:stop] -= start
        shifted[:, stop - 1] = missing
    where = count.unsqueeze(0) if position_ids is None else _check_ids("position_ids", position_ids, input_ids)
    whole = {"input_ids": input_ids, "position_ids": where.expand_as(input_ids), "labels": shifted}
    mask = None if cu_seqlens is None else Mask.documents(ends)
    return {name: shard(x, mesh, layout=layout, mask=mask) for name, x in whole.items()}


def _check_ids(name: str, ids: Tensor, like: Tensor | None = None) -> Tensor:
    """Refuse anything but integers ``[B, N]`` of the same shape as `like`."""
    check_tensor(name, ids)
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        raise DtypeError(f"{name} are integers", got=ids.dtype, next_step="pass token ids, not embeddings")
    if ids.dim() != 2 or 0 in ids.shape:
        raise ShapeError(f"{name} must be [batch, tokens], none 0", got=tuple(ids.shape))
    one_for_all = name == "position_ids" and ids.shape[0] == 1
    if like is not None and ids.shape != like.shape and not (one_for_all and ids.shape[1] == like.shape[1]):
        raise ShapeError(f"{name} differ from input_ids", got=tuple(ids.shape), allowed=tuple(like.shape))
    return ids
