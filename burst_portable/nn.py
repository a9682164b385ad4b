"""Attention modules for custom models whose sequence is sharded over ranks.

A module processes only its rank's tokens. Rotary positions and the mask follow from the layout, so the same model runs
on one rank and on many.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from burst_portable.api import attention
from burst_portable.errors import DtypeError, InputError, ShapeError, UnsupportedError, shown, unknown_name
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import MeshLike, as_mesh
from burst_portable.mesh import position_ids as position_ids_of
from burst_portable.runtime.validation import broadcast_error, check_rows, check_tensor, global_length
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import layout_of, mask_of, no_mask
from burst_portable.strategies.registry import strategy_of
from burst_portable.utils.torch_modes import outside_graphs
from burst_portable.utils.values import as_float, size


def apply_rotary_embedding(x: Tensor, position_ids: Tensor, theta: float = 10000.0) -> Tensor:
    """Apply rotary position embedding (RoFormer, arXiv 2104.09864), with halves paired as in Llama.

    Args:
        x: Queries or keys of shape ``[B, S, H, D]`` in a floating dtype. D must be even.
        position_ids: Global positions of shape ``[S]``, ``[1, S]`` or ``[B, S]``.
        theta: Base of the frequencies, above 0.

    Returns:
        A tensor like x. Angles and products are computed in float32, or float64 for float64.

    Raises:
        InputError: If shapes do not match, or theta is invalid.
        DtypeError: If x is not floating, or position_ids are complex or boolean.
    """
    check_tensor("x", x)
    check_tensor("position_ids", position_ids)
    if not x.is_floating_point() or position_ids.is_complex() or position_ids.dtype is torch.bool:
        got = f"{x.dtype} by {position_ids.dtype}"
        raise DtypeError("rotary embedding needs floating x and real position_ids", got=got)
    _check_head_size(x.shape[-1] if x.dim() == 4 else 0, tuple(x.shape))
    # Each size by itself: torch.compile does not find sizes in tuples.
    batches = position_ids.shape[0] if position_ids.dim() == 2 else 1
    fits = position_ids.dim() in (1, 2) and position_ids.shape[-1] == x.shape[1]
    if not fits or (batches != 1 and batches != x.shape[0]):
        allowed = f"({x.shape[1]},) or {tuple(x.shape[:2])}"
        raise ShapeError("position_ids and x have different shapes", got=tuple(position_ids.shape), allowed=allowed)
    half, dtype = x.shape[-1] // 2, torch.float64 if x.dtype is torch.float64 else torch.float32
    frequency = _checked_theta(theta) ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = position_ids.to(device=x.device, dtype=dtype).unsqueeze(-1) * frequency  # [S, D / 2]
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)  # one for all heads
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _checked_theta(theta: float) -> float:
    if isinstance(theta, Tensor) and theta.requires_grad:
        what = "theta is a tensor that requires a gradient, but gets none"
        raise InputError(what, next_step="pass theta.item()")
    number = as_float(theta)
    if number is None or not (math.isfinite(number) and number > 0):
        raise InputError("theta must be a finite number", got=shown(theta), allowed="above 0")
    return number


def _check_head_size(head_dim: int, got: object) -> None:
    if head_dim < 2 or head_dim % 2:
        allowed = "[batch, rows, heads, head size], the last even"
        raise ShapeError("rotary embedding needs an even head size", got=got, allowed=allowed)


def _check_rows_of_weights(*weights: Tensor) -> None:
    """Raise `UnsupportedError` for rows that tensor parallelism sharded: a part of `kv` has other rows of K and of V.

    With fewer heads, the shapes of the parts would fit, and the result would be wrong.
    """
    for weight in weights:
        if not isinstance(weight, DTensor):
            continue
        if any(one.is_shard(0) and weight.device_mesh.size(i) > 1 for i, one in enumerate(weight.placements)):
            raise UnsupportedError(
                "tensor parallelism cannot shard the projections of SelfAttention: those of K and V are one weight",
                got=f"a weight of shape {tuple(weight.shape)} with {weight.placements}",
                next_step="shard separate projections of your module by heads, and pass the local heads to attention()",
            )


class SelfAttention(nn.Module):
    """Self-attention with grouped K/V heads and rotary embedding, over a sequence that is sharded over a mesh.

    Weights do not depend on the mesh: a `state_dict` fits the same module on any other mesh. A deep copy has the same
    mesh. The module can be pickled if its mesh has one rank. Tensor parallelism cannot shard it by heads: a call raises
    `UnsupportedError`.

    Args:
        dim: Size of a row of the input and the output.
        heads: Number of query heads. The head size is dim / heads.
        kv_heads: Number of K/V heads. Default: `heads`.
        mesh: The ranks, as in `burst_portable.attention`.
        mask: Mask or short form, as in `burst_portable.attention`.
        strategy: Strategy or name, as in `burst_portable.attention`.
        layout: Layout or name, as in `burst_portable.attention`.
        theta: Base of the rotary frequencies. None: no rotary embedding.

    Raises:
        InputError: If heads do not divide `dim`, or K/V heads do not divide heads. If the head size is odd with rotary
            embedding. If the mesh, mask, strategy or layout is invalid.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        mesh: MeshLike = None,
        mask: Mask | str = "causal",
        strategy: Strategy | str = "auto",
        layout: Layout | str = "zigzag",
        theta: float | None = 10000.0,
    ) -> None:
        super().__init__()
        dim, heads = size("dim", dim), size("heads", heads)
        kv_heads = heads if kv_heads is None else size("kv_heads", kv_heads)
        if dim % heads or heads % kv_heads:
            got, allowed = f"dim {dim}, {heads} heads, {kv_heads} K/V heads", "heads divide dim, K/V heads divide heads"
            raise InputError("these numbers of heads do not match", got=got, allowed=allowed)
        if isinstance(mask, str):
            Mask.parse(mask, 1)
        elif not isinstance(mask, Mask):
            raise no_mask(mask)
        strategy_of(strategy)
        if not isinstance(layout, Layout) and not (isinstance(layout, str) and layout in LAYOUTS):
            raise unknown_name("layout", layout, LAYOUTS)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        if theta is not None:
            theta = _checked_theta(theta)
            _check_head_size(self.head_dim, f"{dim} / {heads} = {self.head_dim}; theta=None disables it")
        self.mesh, self.mask, self.strategy, self.layout, self.theta = as_mesh(mesh), mask, strategy, layout, theta
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.kv = nn.Linear(dim, 2 * kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(
        self,
        x: Tensor,
        *,
        seq_len: int | None = None,
        position_ids: Tensor | None = None,
        mask: Mask | str | None = None,
    ) -> Tensor:
        """Compute attention over the sequence from this rank's tokens.

        Args:
            x: This rank's tokens, ``[B, S, dim]``.
            seq_len: Tokens of the unsharded sequence. Default: the length of a `Layout`, else S * ranks. By default, x
                must not be the same on all ranks.
            position_ids: Shape ``[S]`` or ``[B, S]``. Default: global positions. Pass them for packed documents.
            mask: Mask of this call, for example of the batch's documents. Default: the module's.

        Returns:
            Output of shape ``[B, S, dim]``.
        """
        mask = self.mask if mask is None else mask
        try:
            position_ids = self._locate(x, seq_len, mask, position_ids)
            q, k, v = self._project(x, position_ids)
        except Exception as error:
            broadcast_error(self.mesh, error, x)
            raise
        # Not the length that follows from x: without one, attention compares the ranks' tokens.
        out = attention(q, k, v, mask=mask, mesh=self.mesh, strategy=self.strategy, layout=self.layout, seq_len=seq_len)
        projected: Tensor = self.out(out.flatten(-2))
        return projected

    if TYPE_CHECKING:
        __call__ = forward  # torch's own has no types

    def _locate(self, x: Tensor, seq_len: int | None, mask: Mask | str, position_ids: Tensor | None) -> Tensor | None:
        """Return the positions of x. None: no rotary embedding. Raise an error for other tokens than this rank's."""
        needs_positions = self.theta is not None and position_ids is None
        if torch.compiler.is_compiling() and isinstance(x, Tensor) and self._accepts(x):
            # The import registers operators of torch.
            from burst_portable.runtime.graph_ops import as_text, can_trace, positions_in_graph
            from burst_portable.runtime.request import Request

            request = as_text(Request(mask, self.strategy, self.layout, seq_len))
            if can_trace(self.mesh, request):  # the operators check the rest, when all ranks run
                rows = x.shape[1]
                length = rows * self.mesh.size if seq_len is None else seq_len
                if needs_positions:
                    named = str(self.layout), str(request.mask)
                    position_ids = positions_in_graph(rows, length, self.mesh, *named, x.device)
                return position_ids
        positions = self._locate_in_layout(x, seq_len, mask, needs_positions)
        return positions if needs_positions else position_ids

    def _accepts(self, x: Tensor) -> bool:
        return x.dim() == 3 and x.shape[-1] == self.q.in_features

    @partial(
        outside_graphs,
        reason="burst_portable runs SelfAttention between graphs if its mask lists positions, its strategy or layout "
        "is not a string, or its input is invalid",
    )
    def _locate_in_layout(
        self, x: Tensor, seq_len: int | None, mask: Mask | str, needs_positions: bool
    ) -> Tensor | None:
        """Return the positions of x if needed. Raise if x does not have this rank's number of tokens."""
        check_tensor("x", x)
        if not self._accepts(x):
            allowed = f"[batch, rows, {self.q.in_features}]"
            raise ShapeError("x has the wrong shape for this module", got=tuple(x.shape), allowed=allowed)
        seq_len = None if seq_len is None else size("seq_len", seq_len)
        length = global_length(self.layout, seq_len, x.shape[1], self.mesh)
        layout = layout_of(self.layout, length, self.mesh.size, mask_of(mask, length))
        check_rows(layout, x.shape[1], self.mesh)
        # Not `local_position_ids`: it would remember this layout as one by which tensors were sharded.
        return position_ids_of(layout, self.mesh.rank, x.device) if needs_positions else None

    def _project(self, x: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K and V, with rotary embedding in Q and K."""
        _check_rows_of_weights(self.q.weight, self.kv.weight)
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(-3)
        if self.theta is not None and position_ids is not None:
            q = apply_rotary_embedding(q, position_ids, self.theta)
            k = apply_rotary_embedding(k, position_ids, self.theta)
        return q, k, v
