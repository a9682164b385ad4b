"""Modules for models that you write yourself: attention whose sequence lies on several ranks.

A module sees its rank's rows alone. What depends on where a row stands in the sequence, rotary positions and the
mask, is taken from the layout, so the same model runs on one rank and on many.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from burst_portable.api import attention
from burst_portable.errors import DtypeError, InputError, ShapeError, shown, unknown_name
from burst_portable.layout import NAMES as LAYOUTS
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import MeshLike, as_mesh
from burst_portable.runtime.validation import broadcast_error, check_rows, check_tensor, global_length
from burst_portable.sharding import local_position_ids
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import layout_of, mask_of, no_mask
from burst_portable.strategies.registry import strategy_of
from burst_portable.utils.torch_modes import outside_graphs
from burst_portable.utils.values import as_float, size

_BETWEEN_GRAPHS = (
    "burst_portable runs SelfAttention between graphs where its mask lists positions, its strategy or layout is no "
    "text, or it refuses its input"
)


def apply_rotary_embedding(x: Tensor, position_ids: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864), halves paired as in Llama.

    Args:
        x: ``[B, S, H, D]``, D even, floating.
        where: the rows' positions in the whole sequence, ``[S]``, ``[1, S]`` or ``[B, S]``.
        theta: base of the frequencies, above 0.

    Returns:
        As x; angles and products are computed in float32, for float64 in float64.

    Raises:
        InputError: shapes that do not go together, a base that is none.
        DtypeError: x is not floating, or positions are complex or booleans.
    """
    check_tensor("x", x)
    check_tensor("position_ids", position_ids)
    if not x.is_floating_point() or position_ids.is_complex() or position_ids.dtype is torch.bool:
        raise DtypeError("rotary positions turn floats by numbers", got=f"{x.dtype} by {position_ids.dtype}")
    _check_head_size(x.shape[-1] if x.dim() == 4 else 0, tuple(x.shape))
    # Each size by itself: torch.compile does not find sizes in tuples.
    batches = position_ids.shape[0] if position_ids.dim() == 2 else 1
    if (
        position_ids.dim() not in (1, 2)
        or position_ids.shape[-1] != x.shape[1]
        or (batches != 1 and batches != x.shape[0])
    ):
        allowed = f"({x.shape[1]},) or {tuple(x.shape[:2])}"
        raise ShapeError("positions do not fit the rows", got=tuple(position_ids.shape), allowed=allowed)
    half, dtype = x.shape[-1] // 2, torch.float64 if x.dtype is torch.float64 else torch.float32
    frequency = _checked_theta(theta) ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = position_ids.to(device=x.device, dtype=dtype).unsqueeze(-1) * frequency  # [S, D / 2]
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)  # one for all heads
    first, second = x.to(dtype).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _checked_theta(theta: float) -> float:
    number = as_float(theta)
    if number is None or not (math.isfinite(number) and number > 0):
        raise InputError("theta cannot be the base of frequencies", got=shown(theta), allowed="above 0")
    return number


def _check_head_size(head_dim: int, got: object) -> None:
    if head_dim < 2 or head_dim % 2:
        allowed = "[batch, rows, heads, head size], the last even"
        raise ShapeError("rotary positions need an even head size", got=got, allowed=allowed)


class SelfAttention(nn.Module):
    """Self-attention with grouped K/V heads and rotary positions, over a sequence that is spread over a mesh.

    Its weights do not depend on the mesh: a `state_dict` fits the same module on any other. A deep copy stands on the
    same mesh; the whole module can be pickled where its mesh is one rank.

    Args:
        dim: size of a row of the input and the output.
        heads, kv_heads: query heads and K/V heads; the head size is dim / heads.
        mesh, mask, strategy, layout: as `burst_portable.attention` takes them.
        theta: base of the rotary frequencies; None leaves queries and keys as they are.

    Raises:
        InputError: heads that do not divide `dim`, K/V heads that do not divide heads, an odd head size with rotary
            positions, and a mesh, mask, strategy or layout that is none.
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
            raise InputError(
                "these heads do not go together",
                got=f"dim {dim}, {heads} heads, {kv_heads} K/V heads",
                allowed="heads divide dim, K/V heads divide heads",
            )
        _check_names(mask, strategy, layout)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        if theta is not None:
            theta = _checked_theta(theta)
            _check_head_size(self.head_dim, f"{dim} / {heads} = {self.head_dim}; theta=None turns nothing")
        self.mesh, self.mask, self.strategy, self.layout, self.theta = as_mesh(mesh), mask, strategy, layout, theta
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.kv = nn.Linear(dim, 2 * kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    if TYPE_CHECKING:  # torch's own takes and gives anything

        def __call__(
            self,
            x: Tensor,
            *,
            seq_len: int | None = None,
            position_ids: Tensor | None = None,
            mask: Mask | str | None = None,
        ) -> Tensor: ...

    def forward(
        self,
        x: Tensor,
        *,
        seq_len: int | None = None,
        position_ids: Tensor | None = None,
        mask: Mask | str | None = None,
    ) -> Tensor:
        """``[B, S, dim]`` -> ``[B, S, dim]``, S the rows of this rank.

        Args:
            seq_len: tokens of the whole sequence; None means those of a `Layout`, or that all ranks hold equally many.
            position_ids: ``[S]`` or ``[B, S]``, for rotary positions that count otherwise (packed documents).
            mask: of this call, as of a batch's own documents; None is the module's.
        """
        mask = self.mask if mask is None else mask
        try:
            length, position_ids = self._placed(x, seq_len, mask, position_ids)
            q, k, v = self._projected(x, position_ids)
        except Exception as refusal:
            broadcast_error(self.mesh, refusal, x)
            raise
        out = attention(q, k, v, mask=mask, mesh=self.mesh, strategy=self.strategy, layout=self.layout, seq_len=length)
        projected: Tensor = self.out(out.flatten(-2))
        return projected

    def _placed(
        self, x: Tensor, seq_len: int | None, mask: Mask | str, position_ids: Tensor | None
    ) -> tuple[int, Tensor | None]:
        """Tokens of the whole sequence, and where the rows of x stand in it; None where nothing is turned."""
        wanted = self.theta is not None and position_ids is None
        if torch.compiler.is_compiling() and isinstance(x, Tensor) and self._takes(x):
            # Importing them makes operators of torch.
            from burst_portable.runtime.graph_ops import as_text, can_trace, positions_in_graph
            from burst_portable.runtime.prepare import Request

            request = as_text(Request(mask, self.strategy, self.layout, seq_len))
            if can_trace(self.mesh, request):  # the operators check the rest, when all ranks run
                length = x.shape[1] * self.mesh.size if seq_len is None else seq_len
                if wanted:
                    position_ids = positions_in_graph(
                        x.shape[1], length, self.mesh, str(self.layout), str(request.mask), x.device
                    )
                return length, position_ids
        length = self._whole_length(x, seq_len, mask)
        if wanted:
            position_ids = local_position_ids(self.mesh, seq_len=length, layout=self.layout, mask=mask, device=x.device)
        return length, position_ids

    def _takes(self, x: Tensor) -> bool:
        return x.dim() == 3 and x.shape[-1] == self.q.in_features

    @partial(outside_graphs, reason=_BETWEEN_GRAPHS)
    def _whole_length(self, x: Tensor, seq_len: int | None, mask: Mask | str) -> int:
        """Tokens of the whole sequence, of which x holds as many as the layout gives to this rank."""
        check_tensor("x", x)
        if not self._takes(x):
            allowed = f"[batch, rows, {self.q.in_features}]"
            raise ShapeError("x cannot be an input of this module", got=tuple(x.shape), allowed=allowed)
        said = None if seq_len is None else size("seq_len", seq_len)
        length = global_length(self.layout, said, x.shape[1], self.mesh)
        check_rows(layout_of(self.layout, length, self.mesh.size, mask_of(mask, length)), x.shape[1], self.mesh)
        return length

    def _projected(self, x: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Q, K and V, with their positions in Q and K."""
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(-3)
        if self.theta is None or position_ids is None:
            return q, k, v
        return (
            apply_rotary_embedding(q, position_ids, self.theta),
            apply_rotary_embedding(k, position_ids, self.theta),
            v,
        )


def _check_names(mask: object, strategy: Any, layout: object) -> None:
    """What can be refused before there is a sequence: short forms are read once for nothing."""
    if isinstance(mask, str):
        Mask.parse(mask, 1)
    elif not isinstance(mask, Mask):
        raise no_mask(mask)
    strategy_of(strategy)
    if not isinstance(layout, Layout) and not (isinstance(layout, str) and layout in LAYOUTS):
        raise unknown_name("layout", layout, LAYOUTS)
