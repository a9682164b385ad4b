"""Make the `AttentionCall` that a kernel gets, from settings or sizes only."""

from __future__ import annotations

import torch

from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall, Dropout


def settings(
    scale: float = 1.0, softcap: float | None = None, deterministic: bool = True, dropout: Dropout | None = None
) -> AttentionCall:
    """Return a call with these settings. A kernel reads sizes from its tensors, so here they are all 1."""
    layout = make_layout("contiguous", 1, 1)
    given = {"scale": scale, "softcap": softcap, "deterministic": deterministic, "dropout": dropout}
    return AttentionCall(Mask.full(), layout, 1, 1, 1, 1, **given)


def kernel_call(
    dtype: torch.dtype,
    device: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    deterministic: bool = True,
) -> AttentionCall:
    """Return a call with the sizes of one rank, as `Kernel.supports` gets it."""
    return AttentionCall(
        Mask.full(),
        make_layout("contiguous", 1, 1),
        heads,
        kv_heads,
        head_dim,
        v_head_dim,
        itemsize=dtype.itemsize,
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        scale=scale,
        softcap=softcap,
        deterministic=deterministic,
    )
