"""The one place for numerics: merging partial attention, log-sum-exp, delta, sinks, accumulation, empty rows.

Conventions, everywhere in this library:

- LSE is the natural logarithm of the sum of exp(scores), float32 (float64 for float64), ``[B, H, S]``.
- A row that sees nothing has out 0 and LSE -inf, and gets and gives gradient 0. No other value is ever merged:
  kernels of others that answer 0 or +inf there are mended before they come here.
- Partial outs and gradients are accumulated in float32 (float64 for float64), never in 16 bits.

Shapes: B batch, S rows, H heads, D head size. out ``[B, S, H, D]``, LSE and delta ``[B, H, S]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

State = tuple[Tensor, Tensor]
"""A partial result (out, LSE). While it is merged into, its dtypes are its kernel's business; see `finished`."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def running_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of an out that is merged into again and again: one step wider than the parts.

    float32 for 16-bit tensors, float64 for float32: otherwise the rounding of every merge adds up, and the error
    of float32 attention doubles from 2 to 64 ranks. Kernels of devices where float64 is dear may keep float32.
    """
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def empty_state(q: Tensor, value_dim: int) -> State:
    """The running state of having seen nothing yet: out 0, LSE -inf. Its LSE, one number a row, is float64."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, value_dim, dtype=running_dtype(q.dtype), device=q.device)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float64, device=q.device)
    return out, lse


def per_row(x: Tensor) -> Tensor:
    """``[B, H, S]`` as a factor of ``[B, S, H, D]``."""
    return x.transpose(1, 2).unsqueeze(-1)


def merge_into(state: State, out: Tensor, lse: Tensor) -> None:
    """Merge one partial result into a running state, in place.

    With L = log(exp(a) + exp(b)): out = exp(a - L)·out_a + exp(b - L)·out_b (FlashAttention, arXiv 2205.14135,
    section 3.1). The partial may be in 16 bits; the state never is.
    """
    state_out, state_lse = state
    lse = lse.to(state_lse.dtype)
    merged = torch.logaddexp(state_lse, lse)
    # A row that saw nothing on either side: -inf - -inf would be NaN, and its weights must be 0.
    anchor = torch.where(merged == -torch.inf, 0.0, merged)
    state_out.mul_(per_row(torch.exp(state_lse - anchor)).to(state_out.dtype))
    state_out.addcmul_(out.to(state_out.dtype), per_row(torch.exp(lse - anchor)).to(state_out.dtype))
    state_lse.copy_(merged)


def widened(state: State, dtype: torch.dtype) -> State:
    """A state of tensors of `dtype` that is about to be merged into, in the dtypes of `empty_state`."""
    return state[0].to(running_dtype(dtype)), state[1].double()


def finished(state: State, dtype: torch.dtype) -> State:
    """A running state of tensors of `dtype`, in the dtypes of a result: the accumulation dtype for both."""
    wide = accumulation_dtype(dtype)
    return state[0].to(wide), state[1].to(wide)


def merge(parts: Sequence[State]) -> State:
    """Exact attention over the union of disjoint key sets, from partial results (out, LSE) over each.

    Args:
        parts: (out ``[B, S, H, D]`` any floating dtype, LSE ``[B, H, S]``), at least one.

    Returns:
        (out, LSE) in the accumulation dtype. Rows that saw nothing: 0 and -inf.

    Raises:
        ValueError: no part was given.
    """
    if not parts:
        raise ValueError("merge needs at least one partial result")
    out, lse = parts[0]
    state = (out.to(running_dtype(out.dtype), copy=True), lse.to(torch.float64, copy=True))
    for part_out, part_lse in parts[1:]:
        merge_into(state, part_out, part_lse)
    return finished(state, out.dtype)


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO * O), the accumulation dtype, ``[B, H, S]`` (FlashAttention-2, section 3.1.2)."""
    dtype = accumulation_dtype(dout.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """An out* whose rowsum with dO is delta, for kernels of others that insist on `out` where only delta travels.

    out* = dO·delta/|dO|², 0 where dO is 0 (there delta is 0 as well).
    """
    dtype = accumulation_dtype(dout.dtype)
    square = dout.to(dtype).square().sum(-1).transpose(1, 2)
    factor = torch.where(square > 0, delta / torch.where(square > 0, square, 1.0), 0.0)
    return (dout.to(dtype) * per_row(factor)).to(dout.dtype)


def add_sinks(state: State, sinks: Tensor) -> None:
    """Merge attention sinks, one logit a head ``[H]``, into a finished state: (out 0, LSE sink), in place.

    Once and last: in a ring a kernel would count them once a hop.
    """
    out, lse = state
    sink = sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse)
    merged = torch.logaddexp(lse, sink)
    out.mul_(per_row(torch.exp(lse - merged)))
    lse.copy_(merged)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = -sum over rows of exp(sink - LSE)·delta, ``[H]``, where LSE includes the sink."""
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)
