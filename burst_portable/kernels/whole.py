"""Attention of which one call computes all: nothing was merged before it, nothing will be added to what it gives.

A kernel that can save passes over memory then has methods of its own for it, named as these functions, which ask it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.kernels.contract import Gradients, Kernel, Options
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.tiles import Tiles


def attend_whole(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
    """`attend` without a state; out may be in q's dtype already."""
    own = getattr(kernel, "attend_whole", None)
    state: State = own(q, k, v, tiles, options) if own else kernel.attend(q, k, v, tiles, options)
    return state


def gradients(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    options: Options,
) -> Gradients:
    """(dq, dk, dv) of all tiles' pairs in memory of their own, in q's dtype or the accumulation dtype."""
    own = getattr(kernel, "gradients", None)
    if own:
        made: Gradients = own(dout, q, k, v, out, lse, tiles, options)
        return made
    return added_up(kernel, dout, q, k, v, out, lse, tiles, options)


def added_up(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    options: Options,
) -> Gradients:
    """The same of any kernel: what `attend_backward` adds to zeros, which are one piece of memory."""
    sizes = [x.numel() for x in (q, k, v)]
    zeros = torch.zeros(sum(sizes), dtype=accumulation_dtype(q.dtype), device=q.device)
    dq, dk, dv = (part.view(x.shape) for part, x in zip(torch.split(zeros, sizes), (q, k, v), strict=True))
    kernel.attend_backward(dout, q, k, v, lse, tiles, options, out=out, into=(dq, dk, dv))
    return dq, dk, dv
