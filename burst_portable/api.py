"""What users call: `attention`, its parts, and what brings tensors to ranks and back.

Shapes: B batch, S rows of this rank, Hq query heads, Hkv key/value heads, D head size, Dv value size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from burst_portable.autograd import Call, apply
from burst_portable.backends.registry import choose_kernel, for_device
from burst_portable.errors import DtypeError, InputError, LayoutError, ShapeError, explain
from burst_portable.kernels import contract
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh, as_mesh
from burst_portable.numerics import State, finished
from burst_portable.planning import check_heads, named_layout, planned
from burst_portable.planning import plan as plan
from burst_portable.plans import Problem
from burst_portable.runtime import PlainRuntime
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import make_strategy
from burst_portable.tiles import Tiles

_MAX_HEAD_DIM = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = ...,
    mesh: Any = ...,
    strategy: Strategy | str = ...,
    layout: Layout | str = ...,
    seq_len: int | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    kernel: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = ...,
    mesh: Any = ...,
    strategy: Strategy | str = ...,
    layout: Layout | str = ...,
    seq_len: int | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    kernel: str = ...,
    deterministic: bool | None = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = "causal",
    mesh: Any = None,
    strategy: Strategy | str = "auto",
    layout: Layout | str = "zigzag",
    seq_len: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose rows are spread over the ranks of a mesh; differentiable once.

    Every rank makes the same call with its own rows, in the order of the layout (`positions` lists them, `shard`
    cuts them out).

    Args:
        q: ``[B, S, Hq, D]``, float32, bfloat16, float16 or float64; the last stride is 1.
        k, v: ``[B, S, Hkv, D]`` and ``[B, S, Hkv, Dv]``; Hq is a multiple of Hkv; they are never repeated.
        mask: a `Mask`, or its short form (see `Mask.parse`), in global positions.
        mesh: a `Mesh` (keep it: it remembers plans), a DeviceMesh of one axis, a process group, or None for the
            default group or, without one, this process alone.
        strategy: "auto" or one of the registry's names, or a strategy object with its options.
        layout: which rows a rank holds: a name (see `layout`) or a `Layout`.
        seq_len: tokens of the whole sequence. None means that all ranks hold equally many.
        scale: of the scores; 1/sqrt(D) unless given.
        softcap: scores become softcap·tanh(scores / softcap).
        sinks: one logit a query head, ``[Hq]``, that takes part in every row's softmax and has no value.
        kernel: "auto", or the name of one of the backend's kernels.
        deterministic: whether gradients must be the same bits every time, which rules the fastest kernels out.
            None follows `torch.use_deterministic_algorithms`.
        return_lse: also return LSE ``[B, Hq, S]``, float32 (float64 for float64), with no gradient.

    Returns:
        ``[B, S, Hq, Dv]`` in q's dtype; rows that see nothing are 0 (and their LSE -inf).

    Raises:
        InputError: shapes, names, mask, layout that do not go together (a ValueError).
        DtypeError: dtypes that disagree or that nothing takes (a TypeError).
        UnsupportedError: what was named cannot serve this call.
        CommunicationError: something went wrong between ranks.
    """
    mesh = as_mesh(mesh)
    ordered = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    key = (
        mask, strategy, layout, seq_len, scale, softcap, kernel, ordered,
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device,
    )  # fmt: skip
    call = mesh.remembered(
        key, lambda: _prepare(q, k, v, mask, mesh, strategy, layout, seq_len, scale, softcap, kernel, ordered)
    )
    if sinks is not None:
        _check_sinks(sinks, q)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    out, lse = apply(call, q, k, v, sinks)
    return (out, lse) if return_lse else out


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | str,
    mesh: Mesh,
    strategy: Strategy | str,
    layout: Layout | str,
    seq_len: int | None,
    scale: float | None,
    softcap: float | None,
    kernel: str,
    deterministic: bool,
) -> Call:
    """Everything that can be refused is refused here, before a byte moves."""
    _check_tensors(q, k, v)
    rows = q.shape[1]
    length = _length(layout, seq_len, rows, mesh)
    mask = Mask.parse(mask, length) if isinstance(mask, str) else mask
    if not isinstance(mask, Mask):
        raise InputError(explain("mask is no mask", got=type(mask).__name__, allowed="a Mask, or its short form"))
    where = layout if isinstance(layout, Layout) else named_layout(layout, length, mesh.size, mask)
    _check_layout(where, length, rows, mesh)
    mask.check_lengths(length, length)
    backend = for_device(q.device.type)
    problem = Problem(
        mask=mask,
        q_layout=where,
        k_layout=where,
        heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        batch=q.shape[0],
        itemsize=q.dtype.itemsize,
    )
    if strategy == "auto":
        strategy = AutoStrategy(inner=mesh.inner, rates=backend.capabilities.rates)
    made = planned(make_strategy(strategy) if isinstance(strategy, str) else strategy, problem)
    local = made.forward.problem
    wanted = contract.Problem(
        q.dtype,
        q.device.type,
        local.heads,
        local.kv_heads,
        local.head_dim,
        local.value_dim,
        softcap is not None,
        deterministic,
    )
    named = mesh.config.kernel if kernel == "auto" else kernel
    chosen, _ = choose_kernel(backend, wanted, named)
    options = contract.Options(_checked_scale(scale, q.shape[3]), _checked_softcap(softcap), deterministic)
    return Call(made, PlainRuntime(chosen, mesh.transport(q.device.type)), options)


# ------------------------------------------------------------------------------------ parts of an attention


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
) -> State:
    """Attention of q over the pairs of some tiles alone: the part that `merge` puts together. No gradients.

    Args:
        q, k, v: as in `attention`, but of one block each; k may be longer or shorter than q.
        tiles: which rows see which columns, in local indices (see `tiles.find_tiles`); disjoint.

    Returns:
        (out ``[B, Sq, Hq, Dv]``, LSE ``[B, Hq, Sq]``) in the accumulation dtype; rows outside every tile: 0, -inf.

    Raises:
        InputError, DtypeError, UnsupportedError: as `attention`; also tiles past the end of a block.
    """
    _check_tensors(q, k, v, same_rows=False)
    for tile in tiles:
        if tile.q_start < 0 or tile.k_start < 0 or tile.q_stop > q.shape[1] or tile.k_stop > k.shape[1]:
            raise ShapeError(
                explain(
                    "a tile reaches past its block",
                    got=tile,
                    allowed=f"{q.shape[1]} rows, {k.shape[1]} columns",
                )
            )
    backend = for_device(q.device.type)
    problem = contract.Problem(
        q.dtype, q.device.type, q.shape[2], k.shape[2], q.shape[3], v.shape[3], softcap is not None
    )
    chosen, _ = choose_kernel(backend, problem, kernel)
    options = contract.Options(_checked_scale(scale, q.shape[3]), _checked_softcap(softcap))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    with torch.no_grad():
        return finished(chosen.attend(q, k, v, Tiles(tiles), options), q.dtype)


# ------------------------------------------------------------------------------------------ shards and whole


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
    _check_layout(where, seq_len, None, mesh)
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
    _check_layout(where, seq_len, x.shape[dim], mesh)
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
    for start, stop in zip((documents or (0, length))[:-1], (documents or (0, length))[1:], strict=True):
        count[start:stop] -= start
        shifted[:, stop - 1] = ignore_index
    if position_ids is None:
        position_ids = count.expand_as(input_ids)
    whole = {"input_ids": input_ids, "position_ids": position_ids, "labels": shifted}
    return {name: shard(x, mesh, layout=layout, mask=mask) for name, x in whole.items()}


# ---------------------------------------------------------------------------------------------------- checks


def _length(layout: Layout | str, seq_len: int | None, rows: int, mesh: Mesh) -> int:
    if seq_len is not None:
        if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
            raise InputError(explain("seq_len is no length", got=repr(seq_len), allowed="an int of at least 1"))
        return seq_len
    return layout.length if isinstance(layout, Layout) else rows * mesh.size


def _check_layout(layout: Layout, length: int, rows: int | None, mesh: Mesh) -> None:
    if layout.ranks != mesh.size or layout.length != length:
        raise LayoutError(
            explain(
                "the layout is for another mesh or sequence",
                got=f"{layout.ranks} ranks and {layout.length} tokens",
                allowed=f"{mesh.size} ranks and {length} tokens",
            )
        )
    if rows is not None and layout.count(mesh.rank) != rows:
        raise LayoutError(
            explain(
                f"rank {mesh.rank} holds another number of rows than the layout {layout.name!r} gives it",
                got=f"{rows} rows",
                allowed=f"{layout.count(mesh.rank)} of {length} tokens on {mesh.size} ranks",
                next_step="cut tensors with shard(), or pass seq_len where ranks hold different lengths",
            )
        )


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, *, same_rows: bool = True) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ShapeError(explain(f"{name} is no tensor", got=type(x).__name__))
        if type(x).__name__ == "DTensor":
            raise InputError(f"{name} is a DTensor: pass its local tensor, x.to_local()")
        if x.dim() != 4 or 0 in x.shape:
            raise ShapeError(
                explain(
                    f"{name} has no usable shape",
                    got=tuple(x.shape),
                    allowed="[batch, rows, heads, head size], none 0",
                )
            )
    if q.dtype != k.dtype or q.dtype != v.dtype:
        raise DtypeError(
            explain(
                "q, k and v have different dtypes",
                got=f"{q.dtype}, {k.dtype}, {v.dtype}",
                next_step="cast them",
            )
        )
    if q.dtype not in _DTYPES:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in _DTYPES)
        raise DtypeError(explain("no attention in this dtype", got=q.dtype, allowed=allowed))
    if not q.device == k.device == v.device:
        raise InputError(explain("q, k and v lie on different devices", got=f"{q.device}, {k.device}, {v.device}"))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or (same_rows and q.shape[1] != k.shape[1]):
        raise ShapeError(explain("q, k and v do not go together", got=shapes, allowed="equal batch and rows"))
    if q.shape[3] != k.shape[3]:
        raise ShapeError(explain("q and k have different head sizes", got=shapes))
    if max(q.shape[3], v.shape[3]) > _MAX_HEAD_DIM:
        raise ShapeError(explain("unsupported head size", got=shapes, allowed=f"1 to {_MAX_HEAD_DIM}"))
    check_heads(q.shape[2], k.shape[2])


def _check_sinks(sinks: Tensor, q: Tensor) -> None:
    if sinks.shape != (q.shape[2],) or not sinks.is_floating_point() or sinks.device != q.device:
        raise ShapeError(
            explain(
                "sinks must be one logit a query head, on q's device",
                got=f"{tuple(sinks.shape)} {sinks.dtype} on {sinks.device}",
                allowed=f"({q.shape[2]},) floating on {q.device}",
            )
        )


def _checked_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if not math.isfinite(scale):
        raise InputError(explain("scale is no finite number", got=scale))
    return float(scale)


def _checked_softcap(softcap: float | None) -> float | None:
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise InputError(explain("softcap must be positive", got=softcap, next_step="pass None for none"))
    return softcap
