"""Modules for models that you write yourself: attention whose sequence lies on several ranks.

A module sees its rank's rows alone. What depends on where a row stands in the sequence, rotary positions and the
mask, is taken from the layout, so the same model runs on one rank and on many.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.api import attention
from burst_portable.errors import InputError, ShapeError, explain
from burst_portable.layout import Layout
from burst_portable.mask import Mask
from burst_portable.mesh import as_mesh
from burst_portable.sharding import positions
from burst_portable.strategies.base import Strategy


def rotate(x: Tensor, where: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv 2104.09864), halves paired as in Llama.

    Args:
        x: ``[B, S, H, D]``, D even.
        where: the rows' positions in the whole sequence, ``[S]`` or ``[B, S]``.
        theta: base of the frequencies.

    Returns:
        As x; angles are computed in float32.
    """
    half = x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise ShapeError(explain("rotary positions need an even head size", got=x.shape[-1]))
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = where.to(device=x.device, dtype=torch.float32).unsqueeze(-1) * frequency  # [S, D / 2]
    cos, sin = angle.cos().unsqueeze(-2), angle.sin().unsqueeze(-2)  # one for all heads
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Self-attention with grouped K/V heads and rotary positions, over a sequence that is spread over a mesh.

    Args:
        dim: size of a row of the input and the output.
        heads, kv_heads: query heads and K/V heads; the head size is dim / heads.
        mesh, mask, strategy, layout: as `burst_portable.attention` takes them.
        theta: base of the rotary frequencies; None leaves queries and keys as they are.

    Raises:
        InputError: heads that do not divide `dim`, or K/V heads that do not divide heads.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        mesh: Any = None,
        mask: Mask | str = "causal",
        strategy: Strategy | str = "auto",
        layout: Layout | str = "zigzag",
        theta: float | None = 10000.0,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(dim, heads, kv_heads) < 1 or dim % heads or heads % kv_heads:
            raise InputError(
                explain(
                    "these heads do not go together",
                    got=f"dim {dim}, {heads} heads, {kv_heads} K/V heads",
                    allowed="heads divide dim, K/V heads divide heads",
                )
            )
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.mesh, self.mask, self.strategy, self.layout, self.theta = as_mesh(mesh), mask, strategy, layout, theta
        self.q = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.kv = nn.Linear(dim, 2 * kv_heads * self.head_dim, bias=False)
        self.out = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, *, seq_len: int | None = None, position_ids: Tensor | None = None) -> Tensor:
        """``[B, S, dim]`` -> ``[B, S, dim]``, S the rows of this rank.

        Args:
            seq_len: tokens of the whole sequence; None means that all ranks hold equally many.
            position_ids: ``[S]`` or ``[B, S]``, for rotary positions that count otherwise (packed documents).
        """
        length = x.shape[1] * self.mesh.size if seq_len is None else seq_len
        q = self.q(x).unflatten(-1, (self.heads, self.head_dim))
        k, v = self.kv(x).unflatten(-1, (2, self.kv_heads, self.head_dim)).unbind(-3)
        if self.theta is not None:
            if position_ids is None:
                documents = self.mask if isinstance(self.mask, Mask) else None
                position_ids = positions(self.mesh, seq_len=length, layout=self.layout, mask=documents, device=x.device)
            q, k = rotate(q, position_ids, self.theta), rotate(k, position_ids, self.theta)
        out = attention(
            q, k, v, mask=self.mask, mesh=self.mesh, strategy=self.strategy, layout=self.layout, seq_len=length
        )
        return self.out(out.flatten(-2))
