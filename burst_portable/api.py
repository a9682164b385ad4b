"""`attention` and `partial_attention`: what users call.

Shapes: B batch, S rows of this rank, Hq query heads, Hkv key/value heads, D head size, Dv value size.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from burst_portable.backends.selection import choose_kernel, for_device
from burst_portable.errors import InputError, UnknownArgumentError, shown
from burst_portable.kernels.base import as_kernels_take
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import MeshLike, as_mesh
from burst_portable.numerics import State, finished
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, checked_tiles
from burst_portable.runtime.autograd import run
from burst_portable.runtime.prepare import AttentionOptions, Request, prepare
from burst_portable.runtime.validation import check_tensors, checked_scale, checked_softcap
from burst_portable.strategies.base import Strategy
from burst_portable.utils.torch_modes import as_autocast_would, outside_graphs, own_precision


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = ..., **options: Unpack[AttentionOptions]
) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[AttentionOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | str = "causal",
    mesh: MeshLike = None,
    strategy: Strategy | str = "auto",
    layout: Layout | str = "zigzag",
    seq_len: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kernel: str = "auto",
    deterministic: bool | None = None,
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention over a sequence whose rows are spread over the ranks of a mesh; differentiable once.

    Every rank makes the same call with its own rows, in the order of the layout (`positions` lists them, `shard`
    cuts them out).

    Args:
        q: ``[B, S, Hq, D]``, float32, bfloat16, float16 or float64; the last stride is 1. Under autocast, all
            three are cast to its dtype first, float64 excepted, as torch's scaled_dot_product_attention does.
        k, v: ``[B, S, Hkv, D]`` and ``[B, S, Hkv, Dv]``; Hq is a multiple of Hkv; they are never repeated.
        mask: a `Mask`, or its short form (see `Mask.parse`), in global positions.
        mesh: a `Mesh` (keep it: it remembers plans), a DeviceMesh of one axis, a process group, or None for the
            default group or, without one, this process alone.
        strategy: "auto" or one of the registry's names, or a strategy object with its options.
        layout: which rows a rank holds: "contiguous", "zigzag", "striped", or a `Layout`; for masks of documents also
            "whole_documents" and "document_zigzag". `plan_for_mesh` tells which is fastest.
        seq_len: tokens of the whole sequence. None takes the length of a `Layout`, or assumes that all ranks hold
            equally many rows.
        scale: factor of the scores; 1/sqrt(D) unless given.
        softcap: scores become softcap·tanh(scores / softcap).
        sinks: one logit per query head, ``[Hq]``, that takes part in every row's softmax without a value; -inf is
            no sink. As with q, k and v, numbers are not read, so none is refused: +inf and NaN have NaN gradients.
        kernel: "auto", or the name of one of the backend's kernels.
        deterministic: whether gradients must be bit-identical every time, which rules out the fastest kernels.
            None follows `torch.use_deterministic_algorithms`.
        return_lse: also return LSE ``[B, Hq, S]``, float32 (float64 for float64), with no gradient.

    Returns:
        ``[B, S, Hq, Dv]`` in q's dtype, or autocast's; rows that see nothing are 0 (and their LSE -inf).

    Raises:
        InputError: shapes, names, a mask or a layout that do not fit together (a ValueError).
        UnknownArgumentError: an argument of another library; the message names ours (a TypeError).
        DtypeError: dtypes that differ, or that no kernel takes (a TypeError).
        UnsupportedError: a strategy, kernel, backend or transport that was named cannot serve this call.
        CommunicationError: something went wrong between ranks.
    """
    if unknown:
        raise _unknown_argument(*next(iter(unknown.items())))
    request = Request(mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic, return_lse)
    if torch.compiler.is_compiling():
        return _while_compiling(q, k, v, sinks, mesh, request)
    mesh = as_mesh(mesh)
    prepared, q, k, v = prepare(q, k, v, sinks, mesh, request)
    out, lse = run(prepared, mesh, q, k, v, sinks)
    return out if lse is None or not return_lse else (out, lse)


_OTHER_NAMES = {
    "causal": 'pass mask="causal" (the default) or mask="full"',
    "is_causal": 'pass mask="causal" (the default) or mask="full"',
    "softmax_scale": "pass scale=",
    "sm_scale": "pass scale=",
    "scaling": "pass scale=",
    "attn_mask": "pass mask=, a burst_portable.Mask or its short form",
    "attention_mask": "pass mask=, a burst_portable.Mask or its short form",
    "block_mask": "pass mask=, a burst_portable.Mask or its short form",
    "window_size": 'pass mask="window:LEFT:RIGHT"; "window:LEFT" is causal',
    "sliding_window": 'pass mask="window:LEFT", where LEFT is sliding_window - 1',
    "cu_seqlens": "pass mask=Mask.documents(cu_seqlens)",
    "cu_seqlens_q": "pass mask=Mask.documents(cu_seqlens)",
    "cu_seqlens_k": "pass mask=Mask.documents(cu_seqlens)",
    "max_seqlen_q": "leave it out; mask=Mask.documents(cu_seqlens) is enough",
    "max_seqlen_k": "leave it out; mask=Mask.documents(cu_seqlens) is enough",
    "enable_gqa": "leave it out; k and v may have fewer heads than q",
    "s_aux": "pass sinks=",
    "learnable_sink": "pass sinks=",
    "logits_soft_cap": "pass softcap=",
    "return_attn_probs": "pass return_lse=True for the LSE",
    "return_softmax_lse": "pass return_lse=True",
    "group": "pass mesh=",
    "process_group": "pass mesh=",
    "device_mesh": "pass mesh=",
}
"""Arguments of other libraries' attention functions, and what to pass here."""


def _unknown_argument(name: str, value: object) -> UnknownArgumentError:
    if name in ("dropout_p", "dropout"):
        hint = "leave it out; attention has no dropout"
    elif not (hint := _OTHER_NAMES.get(name, "")):
        known = inspect.signature(attention).parameters
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"allowed: {', '.join(list(known)[3:-1])}"
    return UnknownArgumentError(f"attention() has no argument {name!r}", got=shown(value), next_step=hint)


def _while_compiling(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: MeshLike, request: Request
) -> Tensor | tuple[Tensor, Tensor]:
    """Put the call into the graph that is being made, or run it between two graphs."""
    # Importing it makes operators of torch.
    from burst_portable.runtime.graph_ops import as_text, attention_in_graph, can_trace

    request = as_text(request)
    if can_trace(mesh, request):
        made: Tensor | tuple[Tensor, Tensor] = attention_in_graph(q, k, v, sinks, mesh, request)
        return made
    return _between_graphs(q, k, v, sinks, mesh, request)


def _uncompiled(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: MeshLike, request: Request
) -> Tensor | tuple[Tensor, Tensor]:
    """Return what `attention` returns, without asking whether a compiler looks."""
    mesh = as_mesh(mesh)
    prepared, q, k, v = prepare(q, k, v, sinks, mesh, request)
    out, lse = run(prepared, mesh, q, k, v, sinks)
    return out if lse is None or not request.return_lse else (out, lse)


_between_graphs = outside_graphs(
    _uncompiled,
    "burst_portable runs attention outside of graphs where its mask lists positions, strategy or layout is no text, "
    "mesh is no Mesh, a number is in a tensor or an array, torch.func transforms the function, or torch.export makes "
    "the graph (which strict=False can without gradients)",
)


# ------------------------------------------------------------------------------------ parts of an attention


def partial_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Iterable[Tile],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    kernel: str = "auto",
) -> State:
    """Attention of q over the pairs of the given tiles alone: a partial result for `merge`. No gradients.

    Args:
        q: ``[B, Sq, Hq, D]``, dtypes and strides as in `attention`.
        k, v: ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``; Sk may differ from Sq.
        tiles: which rows see which columns, in local indices (see `planning.tiles.make_tile`); disjoint. Rows of a
            tile may see nothing.
        scale, softcap, kernel: as in `attention`.

    Returns:
        (out ``[B, Sq, Hq, Dv]``, LSE ``[B, Hq, Sq]``) in the accumulation dtype; rows outside every tile: 0, -inf.

    Raises:
        InputError, DtypeError, UnsupportedError: as `attention`; also for tiles that overlap or reach past their block,
            and for tensors that require gradients.
    """
    q, k, v = as_autocast_would(q, k, v)
    check_tensors(q, k, v, same_rows=False)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise InputError(
            "partial_attention has no gradient: detach its tensors first, or call attention(), which has one"
        )
    tiles = checked_tiles(tiles, q.shape[1], k.shape[1])
    backend = for_device(q.device.type)
    call = AttentionCall.of(q, k, v, scale=checked_scale(scale, q.shape[3]), softcap=checked_softcap(softcap))
    chosen, _ = choose_kernel(backend, call, kernel)
    q, k, v = map(as_kernels_take, (q, k, v))
    with torch.no_grad(), own_precision(q.device):
        return finished(chosen.attend(q, k, v, tiles, call), q.dtype)
