"""Attention that one kernel call computes as a whole: there is no state to merge into, no sum to add gradients to.

A kernel that can save passes over memory in that case has methods with the names of the functions here, which call
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_portable.kernels.contract import Gradients, Kernel, Options
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.tiles import Tiles


def attend_whole(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
    """`attend` without a state: (out, LSE). out may be in q's dtype instead of the accumulation dtype."""
    own = getattr(kernel, "attend_whole", None)
    state: State = own(q, k, v, tiles, options) if own else kernel.attend(q, k, v, tiles, options)
    return state


def parts_rows(kernel: Kernel) -> bool:
    """Whether a kernel has `attend_into`, and so `attend_first` here."""
    return hasattr(kernel, "attend_into")


def attend_first(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    options: Options,
    merged: tuple[int, int],
    out: Tensor,
) -> State:
    """`attend` on the first of several computations, of which later ones merge into rows [start, stop) alone.

    Args:
        merged: these rows.
        out: ``[B, Sq, Hq, Dv]`` in q's dtype; all other rows are written there.

    Returns:
        the state that later computations are given: LSE of all rows, out of the merged ones; the rest of it is not set.
    """
    start, stop = merged
    batch, rows, heads, _ = q.shape
    wide = torch.empty(out.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=wide.dtype, device=q.device)
    for first, past, into in ((0, start, out), (start, stop, wide), (stop, rows, out)):
        if first < past:
            part = slice(first, past)
            kernel.attend_into(q[:, part], k, v, tiles.in_rows(first, past), options, into[:, part], lse[:, :, part])
    return wide, lse


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
    """(dq, dk, dv) of all tiles' pairs, in new tensors of q's dtype or of the accumulation dtype."""
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
    """The same for any kernel: `attend_backward` adds to zeros, allocated at once."""
    sizes = [x.numel() for x in (q, k, v)]
    zeros = torch.zeros(sum(sizes), dtype=accumulation_dtype(q.dtype), device=q.device)
    dq, dk, dv = (part.view(x.shape) for part, x in zip(torch.split(zeros, sizes), (q, k, v), strict=True))
    kernel.attend_backward(dout, q, k, v, lse, tiles, options, out=out, into=(dq, dk, dv))
    return dq, dk, dv
