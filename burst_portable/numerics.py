"""Define numerics: merging partial attention, log-sum-exp, delta, sinks, accumulation, empty rows.

Kernels may implement these operations themselves, as Triton kernels merge in their epilogue.

Conventions, everywhere in this library:

- LSE is the natural logarithm of the sum of exp(scores), float32 (float64 for float64), ``[B, H, S]``.
- A row that sees nothing has out 0, LSE -inf and gradient 0, and contributes gradient 0. No other value is ever merged:
  results of foreign kernels that answer 0 or +inf there are corrected before they come here.
- Nothing is summed in 16 bits: partial outs are merged one step wider than their parts (see `running_dtype`), and
  gradients in the accumulation dtype (see `accumulation_dtype`).

Shapes: B batch, S rows, H heads, D head size. out ``[B, S, H, D]``, LSE and delta ``[B, H, S]``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_portable.errors import DtypeError, InputError, ShapeError, shown

State = tuple[Tensor, Tensor]
"""A partial result (out, LSE). While parts are merged into it, its kernel decides on its dtypes; see `finished`."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for all other dtypes."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype. torch's own `to` takes time even if there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def running_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of an out that many parts are merged into: one step wider than the parts.

    float32 for 16-bit tensors, float64 for float32: otherwise the rounding of every merge adds up, and the error
    of float32 attention doubles from 2 to 64 ranks. For devices where float64 is slow, see `Compensated`.
    """
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def empty_state(q: Tensor, v_head_dim: int) -> State:
    """The running state before any part: out 0, LSE -inf. LSE, one number per row, is float64."""
    batch, rows, heads, _ = q.shape
    out = torch.zeros(batch, rows, heads, v_head_dim, dtype=running_dtype(q.dtype), device=q.device)
    lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float64, device=q.device)
    return out, lse


def per_row(x: Tensor) -> Tensor:
    """``[B, H, S]`` as a factor of ``[B, S, H, D]``."""
    return x.transpose(1, 2).unsqueeze(-1)


def anchored(lse: Tensor) -> Tensor:
    """What to subtract in exponents: LSE, or 0 for a row that saw nothing, where -inf - -inf would be NaN."""
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
    """A state for tensors of `dtype`, in the dtypes of `empty_state`, before parts are merged into it."""
    return state[0].to(running_dtype(dtype)), state[1].double()


class Compensated(tuple[Tensor, Tensor]):
    """A running state in float32, for devices where float64 is slow: (out, LSE), and what rounding took from them.

    Two tensors of rounding errors are carried along (Kahan summation), so here, too, the error does not grow with the
    number of parts.
    """

    lost: State

    def __new__(cls, out: Tensor, lse: Tensor, lost: State) -> Compensated:
        self = super().__new__(cls, (out, lse))
        self.lost = lost
        return self

    @classmethod
    def empty(cls, q: Tensor, v_head_dim: int) -> Compensated:
        """Nothing seen yet."""
        batch, rows, heads, _ = q.shape
        out = torch.zeros(batch, rows, heads, v_head_dim, dtype=torch.float32, device=q.device)
        lse = torch.full((batch, heads, rows), -torch.inf, dtype=torch.float32, device=q.device)
        return cls(out, lse, (torch.zeros_like(out), torch.zeros_like(lse)))

    def merge(self, out: Tensor, lse: Tensor, lost: Tensor | None = None) -> None:
        """Merge one partial result, in place; `lost` is what rounding took from its LSE.

        The same as `merge_into`, as a step towards the part: with d = LSE' - LSE,
        out += sigmoid(d)·(out' - out) and LSE += log(1 + exp(d)).
        """
        blind = self[1] == -torch.inf  # takes the part as it is: there is nothing to step from
        lost = torch.zeros_like(lse) if lost is None else lost
        distance = lse - anchored(self[1]) + (lost - self.lost[1])
        weight = torch.where(blind, 1.0, torch.sigmoid(distance))
        _add_compensated(self[0], self.lost[0], (out - self[0]) * per_row(weight))
        _add_compensated(self[1], self.lost[1], torch.where(blind, 0.0, torch.nn.functional.softplus(distance)))
        self[1].copy_(torch.where(blind, lse, self[1]))
        self.lost[1].copy_(torch.where(blind, lost, self.lost[1]))


def _add_compensated(total: Tensor, lost: Tensor, part: Tensor) -> None:
    """total += part; `lost` is what rounding has taken from total so far."""
    part = part + lost
    summed = total + part
    lost.copy_(torch.where(summed.isfinite(), part - (summed - total), 0.0))
    total.copy_(summed)


def finished(state: State, dtype: torch.dtype) -> State:
    """A running state for tensors of `dtype` as a result: both tensors in the accumulation dtype."""
    wide = accumulation_dtype(dtype)
    return as_dtype(state[0], wide), as_dtype(state[1], wide)


def merge_attention_states(parts: Sequence[State]) -> State:
    """Exact attention over the union of disjoint key sets, from partial results (out, LSE) over each.

    Args:
        parts: (out ``[B, S, H, D]`` any floating dtype, LSE ``[B, H, S]``), at least one.

    Returns:
        (out, LSE) in the accumulation dtype. Rows that saw nothing: 0 and -inf, whatever their out was.

    Raises:
        InputError: no part, or one that is not a pair of tensors; parts on different devices, or requiring gradients.
        ShapeError, DtypeError: parts whose shapes or dtypes do not fit together.
    """
    _check_parts(parts)
    out, lse = parts[0]
    state = (_seen(out, lse).to(running_dtype(out.dtype), copy=True), lse.to(torch.float64, copy=True))
    for part_out, part_lse in parts[1:]:
        merge_into(state, _seen(part_out, part_lse), part_lse)
    return finished(state, out.dtype)


def _seen(out: Tensor, lse: Tensor) -> Tensor:
    """`out`, with 0 in rows that saw nothing: other libraries leave NaN there, which a weight of 0 would not remove."""
    return out.masked_fill(per_row(lse == -torch.inf), 0.0)


def _check_parts(parts: Sequence[State]) -> None:
    """Refuse what is not a partial result, and parts that do not fit together."""
    if not isinstance(parts, list | tuple) or not parts:
        raise InputError("merge needs a list of at least one partial result (out, LSE)", got=shown(parts))
    for part in parts:
        if not (isinstance(part, tuple | list) and len(part) == 2 and all(isinstance(x, Tensor) for x in part)):
            raise InputError("merge takes pairs (out, LSE)", got=type(part).__name__)
        if torch.is_grad_enabled() and any(x.requires_grad for x in part):
            raise InputError("merge has no gradient: detach the parts first, or let attention() do the whole")
    first = parts[0][0]
    for out, lse in parts:
        if out.dim() != 4 or out.shape != first.shape or lse.shape != (out.shape[0], out.shape[2], out.shape[1]):
            raise ShapeError(
                "partial results do not go together",
                got=f"out {tuple(out.shape)} with LSE {tuple(lse.shape)}; the first out has {tuple(first.shape)}",
                allowed="out [B, S, H, D] and LSE [B, H, S], the same for all",
            )
        if not (out.is_floating_point() and lse.is_floating_point()) or out.dtype != first.dtype:
            raise DtypeError(
                "partial results have other dtypes than floating ones, or different ones",
                got=f"out {out.dtype} with LSE {lse.dtype}; the first out has {first.dtype}",
                next_step="cast them",
            )
        if not out.device == lse.device == first.device:
            got = f"out on {out.device}, LSE on {lse.device}, the first out on {first.device}"
            raise InputError("partial results lie on different devices", got=got, next_step="move them to one")


def row_delta(dout: Tensor, out: Tensor) -> Tensor:
    """delta = rowsum(dO * O), the accumulation dtype, ``[B, H, S]`` (FlashAttention-2, section 3.1.2)."""
    dtype = accumulation_dtype(dout.dtype)
    return (dout.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2).contiguous()


def surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """An out* whose rowsum with dO is delta, for foreign kernels that require `out` where only delta travels.

    out* = dO·delta/|dO|², 0 where dO is 0 (there delta is 0 as well). Rows are scaled to a largest entry of 1 before
    they are squared: gradients of mean losses over long sequences are so small that their squares underflow.
    """
    wide = dout.to(accumulation_dtype(dout.dtype))
    largest = wide.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    unit = wide / largest
    square = unit.square().sum(-1, keepdim=True).clamp_min(1.0)  # at least 1, except in rows of zeros
    return (unit * (per_row(delta) / largest / square)).to(dout.dtype)


def add_sinks(state: State, sinks: Tensor) -> None:
    """Merge attention sinks, one logit per head ``[H]``, into a finished state: (out 0, LSE sink), in place.

    Call it once, last: in a ring, a kernel would count them once per hop. -inf is no sink. Beside +inf nothing else
    counts: out is 0, LSE +inf, and the sink's gradient NaN.
    """
    out, lse = state
    sink = sinks.to(lse.dtype).view(1, -1, 1).expand_as(lse)
    merged = torch.logaddexp(lse, sink)
    out.mul_(per_row(torch.exp(lse - anchored(merged))))
    lse.copy_(merged)


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """dsink = -sum over rows of exp(sink - LSE)·delta, ``[H]``, where LSE includes the sink."""
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
    """Whether it can be viewed as elements of 8 bytes."""
    if x.dim() == 0 or x.stride(-1) != 1:
        return False
    # Memory of other packages need not be aligned to 8 bytes, which a GPU requires of such elements.
    if x.data_ptr() % 8:
        return False
    count = 8 // x.itemsize
    for number in (*x.stride()[:-1], x.shape[-1], x.storage_offset()):  # noqa: SIM110  (a generator takes thrice as long)
        if number % count:
            return False
    return True
