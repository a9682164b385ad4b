"""Define numerics: merging partial attention, log-sum-exp, delta, sinks, accumulation, empty rows.

docs/numerics.md explains the conventions. Kernels may implement these operations themselves, as Triton kernels merge
in their epilogue. Shapes: out ``[B, S, H, D]``, LSE and delta ``[B, H, S]`` for batch B, rows S, heads H, head size D.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_portable.errors import DtypeError, InputError, ShapeError, shown

State = tuple[Tensor, Tensor]
"""A partial result (out, LSE). While parts are merged into it, its kernel determines its dtypes; see `finished`."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, float32 for all other dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to a dtype. `Tensor.to` takes time even if x has the dtype."""
    return x if x.dtype is dtype else x.to(dtype)


def running_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of an out into which parts are merged: one step wider than the parts.

    float32 for 16-bit tensors, float64 for float32: otherwise the rounding of every merge adds up, and the error
    of float32 attention doubles from 2 to 64 ranks. For devices where float64 is slow, see `Compensated`.
    """
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def empty_state(q: Tensor, v_head_dim: int) -> State:
    """Return the running state before any part: out 0, LSE -inf. LSE, one number per row, is float64."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, v_head_dim, dtype=running_dtype(q.dtype), device=q.device)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float64, device=q.device)
    return out, lse


def per_row(x: Tensor) -> Tensor:
    """Reshape ``[B, H, S]`` to a factor of ``[B, S, H, D]``."""
    return x.transpose(1, 2).unsqueeze(-1)


def anchored(lse: Tensor) -> Tensor:
    """Return the number to subtract in exponents: LSE, or 0 for an empty row, where -inf - -inf would be NaN."""
    return torch.where(lse == -torch.inf, 0.0, lse)


def merge_into(state: State, out: Tensor, lse: Tensor) -> None:
    """Merge one partial result into a running state, in place.

    With L = log(exp(a) + exp(b)): out = exp(a - L)·out_a + exp(b - L)·out_b (FlashAttention, arXiv 2205.14135,
    section 3.1). The partial may be in 16 bits; the state never is.
    """
    state_out, state_lse = state
    lse = lse.to(state_lse.dtype)
    merged = torch.logaddexp(state_lse, lse)
    anchor = anchored(merged)
    state_out.mul_(per_row(torch.exp(state_lse - anchor)).to(state_out.dtype))
    state_out.addcmul_(out.to(state_out.dtype), per_row(torch.exp(lse - anchor)).to(state_out.dtype))
    state_lse.copy_(merged)


def widened(state: State, dtype: torch.dtype) -> State:
    """Convert a state for tensors of `dtype` to the dtypes of `empty_state`, before parts are merged into it."""
    return state[0].to(running_dtype(dtype)), state[1].double()


class Compensated(tuple[Tensor, Tensor]):
    """A running state in float32, for devices with slow float64: (out, LSE), and their rounding errors in `lost`.

    The errors are compensated (Kahan summation), so that the total error does not grow with the number of parts.
    """

    lost: State

    def __new__(cls, out: Tensor, lse: Tensor, lost: State) -> Compensated:
        self = super().__new__(cls, (out, lse))
        self.lost = lost
        return self

    @classmethod
    def empty(cls, q: Tensor, v_head_dim: int) -> Compensated:
        """Return the state before any part."""
        batch, rows, heads, _ = q.shape
        out = torch.zeros(batch, rows, heads, v_head_dim, dtype=torch.float32, device=q.device)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        return cls(out, lse, (torch.zeros_like(out), torch.zeros_like(lse)))

    def merge(self, out: Tensor, lse: Tensor, lost: Tensor | None = None) -> None:
        """Merge one partial result, in place. `lost` is the rounding error of its LSE.

        Equal to `merge_into`, written as a step towards the part: with d = LSE' - LSE,
        out += sigmoid(d)·(out' - out) and LSE += log(1 + exp(d)).
        """
        is_empty = self[1] == -torch.inf  # such a row becomes the part
        lost = torch.zeros_like(lse) if lost is None else lost
        distance = lse - anchored(self[1]) + (lost - self.lost[1])
        weight = torch.where(is_empty, 1.0, torch.sigmoid(distance))
        _add_compensated(self[0], self.lost[0], (out - self[0]) * per_row(weight))
        _add_compensated(self[1], self.lost[1], torch.where(is_empty, 0.0, torch.nn.functional.softplus(distance)))
        self[1].copy_(torch.where(is_empty, lse, self[1]))
        self.lost[1].copy_(torch.where(is_empty, lost, self.lost[1]))


def _add_compensated(total: Tensor, lost: Tensor, part: Tensor) -> None:
    """Add `part` to `total`. `lost` is the rounding error of `total` so far."""
    part = part + lost
    summed = total + part
    lost.copy_(torch.where(summed.isfinite(), part - (summed - total), 0.0))
    total.copy_(summed)


def merge_rows(state: State, rows: slice, out: Tensor, lse: Tensor) -> None:
    """Merge a partial result of some rows into a running state of a kernel, in place."""
    every = (state[0][:, rows], state[1][:, :, rows])
    if isinstance(state, Compensated):
        lost_out, lost_lse = state.lost
        Compensated(*every, (lost_out[:, rows], lost_lse[:, :, rows])).merge(out, lse)
    else:
        merge_into(every, out, lse)


def finished(state: State, dtype: torch.dtype) -> State:
    """Convert a running state for tensors of `dtype` to a result, in the accumulation dtype."""
    wide = accumulation_dtype(dtype)
    return as_dtype(state[0], wide), as_dtype(state[1], wide)


def merge_attention_states(parts: Sequence[State]) -> State:
    """Merge partial results (out, LSE) over disjoint key sets into the exact attention over their union.

    Args:
        parts: At least one pair (out, LSE): out of shape ``[B, S, H, D]`` in any floating dtype, LSE ``[B, H, S]``.

    Returns:
        (out, LSE) in the accumulation dtype. Fully masked rows are 0 and -inf, whatever their out was.

    Raises:
        InputError: If there is no part, a part is not a pair of tensors, devices differ, or a tensor requires
            gradients.
        ShapeError: If shapes do not match.
        DtypeError: If dtypes differ or are not floating.
    """
    _check_parts(parts)
    out, lse = parts[0]
    state = (_clear_empty_rows(out, lse).to(running_dtype(out.dtype), copy=True), lse.to(torch.float64, copy=True))
    for part_out, part_lse in parts[1:]:
        merge_into(state, _clear_empty_rows(part_out, part_lse), part_lse)
    return finished(state, out.dtype)


def _clear_empty_rows(out: Tensor, lse: Tensor) -> Tensor:
    """Set fully masked rows of `out` to 0: other libraries leave NaN there, which a weight of 0 does not remove."""
    return out.masked_fill(per_row(lse == -torch.inf), 0.0)


def _check_parts(parts: Sequence[State]) -> None:
    """Raise an error if a part is not a partial result, or parts do not match."""
    if not isinstance(parts, list | tuple) or not parts:
        raise InputError("merge_attention_states needs a list of at least one pair (out, LSE)", got=shown(parts))
    for part in parts:
        if not (isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)):
            raise InputError("merge_attention_states needs pairs (out, LSE)", got=type(part).__name__)
        if torch.is_grad_enabled() and any(x.requires_grad for x in part):
            raise InputError("merge_attention_states has no gradient; detach the parts, or call attention()")
    first = parts[0][0]
    for out, lse in parts:
        if out.dim() != 4 or out.shape != first.shape or lse.shape != (out.shape[0], out.shape[2], out.shape[1]):
            got = f"out {tuple(out.shape)} with LSE {tuple(lse.shape)}; the first out has {tuple(first.shape)}"
            allowed = "out [B, S, H, D] and LSE [B, H, S], the same for all"
            raise ShapeError("shapes of partial results do not match", got=got, allowed=allowed)
        if not (out.is_floating_point() and lse.is_floating_point()) or out.dtype != first.dtype:
            got = f"out {out.dtype} with LSE {lse.dtype}; the first out has {first.dtype}"
            raise DtypeError("dtypes of partial results differ or are not floating", got=got, next_step="cast them")
        if not out.device == lse.device == first.device:
            got = f"out on {out.device}, LSE on {lse.device}, the first out on {first.device}"
            raise InputError("partial results are on different devices", got=got, next_step="move them to one")


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """Return delta = rowsum(dO * O) ``[B, H, S]`` in the accumulation dtype (FlashAttention-2, section 3.1.2)."""
    dtype = accumulation_dtype(dout.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """Return an out* whose rowsum with dO is delta, for kernels that require `out` if only delta was sent.

    out* = dO·delta/|dO|², and 0 where dO is 0 (delta is 0 there). Rows are scaled to a largest entry of 1 before they
    are squared: gradients of mean losses over long sequences are so small that their squares underflow.
    """
    wide = dout.to(accumulation_dtype(dout.dtype))
    largest = wide.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    unit = wide / largest
    square = unit.square().sum(-1, keepdim=True).clamp_min(1.0)  # at least 1, except in rows of zeros
    return (unit * (per_row(delta) / largest / square)).to(dout.dtype)


def add_sinks(state: State, sinks: Tensor) -> None:
    """Merge attention sinks ``[H]`` into a finished state in place, as a part (out 0, LSE sink); once, at the end."""
    out, lse = state
    sink = sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse)
    merged = torch.logaddexp(lse, sink)
    out.mul_(per_row(torch.exp(lse - anchored(merged))))
    lse.copy_(merged)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Return dsink = -sum over rows of exp(sink - LSE)·delta, ``[H]``. LSE includes the sink."""
    weight = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - anchored(lse))
    return -(weight * delta).sum(dim=(0, 2)).to(sinks.dtype)


def copy(source: Tensor, target: Tensor) -> None:
    """Copy source to target, broadcasting it to the shape of target.

    torch copies strided tensors element by element: on a GPU, elements of 8 bytes take half as long as elements of 2.
    """
    if source.dtype == target.dtype and _is_wide(source) and _is_wide(target):
        source, target = source.view(torch.int64), target.view(torch.int64)
    target.copy_(source)


def _is_wide(x: Tensor) -> bool:
    """Return whether x can be viewed as elements of 8 bytes."""
    # Memory of other packages may not be aligned to 8 bytes, which a GPU requires for such elements.
    if x.dim() == 0 or x.stride(-1) != 1 or x.data_ptr() % 8:
        return False
    count = 8 // x.itemsize
    for number in (*x.stride()[:-1], x.shape[-1], x.storage_offset()):  # noqa: SIM110  (a generator is slower)
        if number % count:
            return False
    return True
