"""Define the public functions `attention` and `partial_attention`.

Shapes: B batch, S tokens of this rank, Hq query heads, Hkv key/value heads, D head size, Dv value size.
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
from burst_portable.kernels.checked_kernel import CheckedKernel
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import MeshLike, as_mesh
from burst_portable.numerics import State, finished
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, checked_tiles
from burst_portable.runtime.autograd import run
from burst_portable.runtime.prepare import prepare
from burst_portable.runtime.request import AttentionOptions, Request
from burst_portable.runtime.validation import check_tensors, checked_scale, checked_softcap
from burst_portable.strategies.base import Strategy
from burst_portable.utils.torch_modes import cast_for_autocast, disable_autocast, outside_graphs


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
    dropout_p: float = 0,  # an int: torch.compile makes default floats inputs of its graph
    dropout_seed: int | None = None,
    first_head: int = 0,
    return_lse: bool = False,
    **unknown: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact attention over a sequence that is sharded over the ranks of a mesh.

    Every rank makes the same call with its own tokens, in the order of the layout (see `local_position_ids` and
    `shard`). The result is differentiable once.

    Args:
        q: Queries of shape ``[B, S, Hq, D]`` in float32, bfloat16, float16 or float64, with a last stride of 1. Under
            autocast, q, k and v are cast to its dtype, except float64, as in torch's scaled_dot_product_attention.
        k: Keys of shape ``[B, S, Hkv, D]``. Hq is a multiple of Hkv; heads are never repeated in memory.
        v: Values of shape ``[B, S, Hkv, Dv]``.
        mask: A `Mask` in global positions, or its short form (see `Mask.parse`). Default: "causal".
        mesh: A `Mesh` (reuse it: it caches plans), a DeviceMesh of one dimension, a process group, or None for the
            default group. Without a default group, None is a mesh of one rank.
        strategy: "auto", the name of a strategy, or a strategy object with its options. "auto" selects the one with the
            shortest predicted time.
        layout: Order of tokens over ranks: "contiguous", "zigzag", "striped", "dispatched" (made from the mask) or a
            `Layout`; for masks of documents also "whole_documents" and "document_zigzag", for which full, causal and
            window are one document. `plan_for_mesh` predicts the fastest.
        seq_len: Tokens of the unsharded sequence. Default: the length of a `Layout`, else S * ranks. By default, v must
            not be the same on all ranks, which would be the full tensors in place of shards.
        scale: Factor of the scores. Default: 1 / sqrt(D).
        softcap: Scores become ``softcap * tanh(score / softcap)``. Default: no softcap.
        sinks: Attention sinks of shape ``[Hq]``: one logit per query head, which takes part in the softmax of every row
            without a value. -inf means no sink. Values are not checked: +inf and NaN give NaN gradients.
        kernel: Name of a kernel of the backend. "auto" selects one.
        deterministic: Whether gradients must be bitwise reproducible, which excludes the fastest kernels. Default:
            follow `torch.use_deterministic_algorithms`.
        dropout_p: Probability with which a weight of the softmax becomes 0; others are divided by ``1 - dropout_p``. A
            weight is dropped by its global position, so the result does not depend on strategy, layout and ranks.
            LSE does not depend on it. Default: no dropout.
        dropout_seed: Seed of dropout, below 2**63 and equal on all ranks. Default: drawn from torch's default generator
            on the CPU, which must have the same state on all ranks.
        first_head: Index of the first query head among those of the model, if tensor parallelism divides them. Only
            dropout depends on it.
        return_lse: Whether to return the LSE too, of shape ``[B, Hq, S]`` in float32 (float64 for float64). It has no
            gradient.

    Returns:
        Output of shape ``[B, S, Hq, Dv]`` in the dtype of q, or of autocast. Fully masked rows are 0, with LSE -inf.

    Raises:
        InputError: If shapes, names, the mask or the layout are invalid or contradict each other (a ValueError). If all
            ranks hold the same v, except equal tokens, and neither `seq_len` nor a `Layout` is given.
        UnknownArgumentError: For an argument of another library; the message names ours (a TypeError).
        DtypeError: If dtypes differ, or no kernel supports them (a TypeError).
        UnsupportedError: If the named strategy, kernel, backend or transport does not support this call.
        CommunicationError: If the communication between ranks fails.
    """
    if unknown:
        raise _unknown_argument(*next(iter(unknown.items())))
    request = Request(
        mask, strategy, layout, seq_len, scale, softcap, kernel, deterministic, return_lse, dropout_p, first_head
    )
    if torch.compiler.is_compiling():
        # The import registers operators of torch.
        from burst_portable.runtime.graph_ops import as_text, attention_in_graph, can_trace

        request = as_text(request)
        if can_trace(mesh, request):
            result: Tensor | tuple[Tensor, Tensor] = attention_in_graph(q, k, v, sinks, mesh, request)
            return result
        return _between_graphs(q, k, v, sinks, mesh, request, dropout_seed)
    return _uncompiled(q, k, v, sinks, mesh, request, dropout_seed)


_ADVICE = {
    'pass mask="causal" (the default) or mask="full"': ("causal", "is_causal"),
    "pass scale=": ("softmax_scale", "sm_scale", "scaling"),
    "pass mask=, a burst_portable.Mask or its short form": ("attn_mask", "attention_mask", "block_mask"),
    'pass mask="window:LEFT:RIGHT"; "window:LEFT" is causal': ("window_size",),
    'pass mask="window:LEFT", where LEFT is sliding_window - 1': ("sliding_window",),
    "pass mask=Mask.documents(cu_seqlens)": ("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"),
    "leave it out; mask=Mask.documents(cu_seqlens) is enough": ("max_seqlen_q", "max_seqlen_k"),
    "leave it out; k and v may have fewer heads than q": ("enable_gqa",),
    "pass dropout_p=": ("dropout", "attn_dropout", "attention_dropout"),
    "pass sinks=": ("s_aux", "learnable_sink"),
    "pass softcap=": ("logits_soft_cap",),
    "pass return_lse=True for the LSE": ("return_attn_probs",),
    "pass return_lse=True": ("return_softmax_lse",),
    "pass mesh=": ("group", "process_group", "device_mesh"),
}
"""What to pass instead of arguments of other libraries' attention functions."""


def _unknown_argument(name: str, value: object) -> UnknownArgumentError:
    """Return the error for an argument that `attention` does not have, with the name to use instead."""
    hint = next((advice for advice, names in _ADVICE.items() if name in names), "")
    if not hint:
        known = inspect.signature(attention).parameters
        similar = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"allowed: {', '.join(list(known)[3:-1])}"
    return UnknownArgumentError(f"attention() has no argument {name!r}", got=shown(value), next_step=hint)


def _uncompiled(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mesh: MeshLike, request: Request, dropout_seed: int | None
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the result of `attention`, outside of a graph."""
    mesh = as_mesh(mesh)
    prepared, q, k, v = prepare(q, k, v, sinks, mesh, request, dropout_seed)
    out, lse = run(prepared, mesh, q, k, v, sinks)
    return out if lse is None or not request.return_lse else (out, lse)


_between_graphs = outside_graphs(
    _uncompiled,
    "burst_portable runs attention outside of graphs if its mask lists positions, strategy or layout is not a string, "
    "it has dropout, mesh is not a Mesh, a number is in a tensor or an array, torch.func transforms the function, or "
    "torch.export traces the graph (without gradients, use strict=False)",
)


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
    """Compute attention of q over the pairs of the given tiles only: a partial result for `merge_attention_states`.

    It has no gradient.

    Args:
        q: Queries of shape ``[B, Sq, Hq, D]``, with the dtypes and strides of `attention`.
        k: Keys of shape ``[B, Sk, Hkv, D]``. Sk may differ from Sq.
        v: Values of shape ``[B, Sk, Hkv, Dv]``.
        tiles: Disjoint tiles in local indices, which define the visible pairs (see `planning.tiles.make_tile`).
        scale: Factor of the scores. Default: 1 / sqrt(D).
        softcap: Scores become ``softcap * tanh(score / softcap)``. Default: no softcap.
        kernel: Name of a kernel of the backend. "auto" selects one.

    Returns:
        (out, LSE) of shapes ``[B, Sq, Hq, Dv]`` and ``[B, Hq, Sq]``, in the accumulation dtype. Rows without visible
        keys have out 0 and LSE -inf.

    Raises:
        InputError: If tiles overlap or exceed their block, or if a tensor requires gradients; and as `attention`.
        DtypeError: As `attention`.
        UnsupportedError: If the named kernel does not support the call.
    """
    q, k, v = cast_for_autocast(q, k, v)
    check_tensors(q, k, v, same_rows=False)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise InputError("partial_attention has no gradient; detach its tensors, or call attention()")
    tiles = checked_tiles(tiles, q.shape[1], k.shape[1])
    backend = for_device(q.device.type)
    call = AttentionCall.of(q, k, v, scale=checked_scale(scale, q.shape[3]), softcap=checked_softcap(softcap))
    selected, _ = choose_kernel(backend, call, kernel)
    q, k, v = map(as_kernels_take, (q, k, v))
    with torch.no_grad(), disable_autocast(q.device):
        return finished(CheckedKernel(selected).attend(q, k, v, tiles, call), q.dtype)
