"""Compute dense attention in float64 from its definition, and compare answers with it.

The computation shares no code with the tested code. It has no tiles, layouts or merging: positions are listed, the
mask is a matrix, and gradients come from autograd. Its memory grows with the square of the length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burst_portable.conformance.cases import Case
from burst_portable.mask import Mask
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.call import Dropout


@dataclass(frozen=True)
class Answer:
    """Outputs and gradients of an attention."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None

    def quantities(self) -> dict[str, Tensor]:
        """Return the quantities by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def differs(self, other: Answer) -> str:
        """Return the first quantity whose bits differ in the other answer; "" if none does."""
        theirs = other.quantities()
        return next((name for name, value in self.quantities().items() if not torch.equal(value, theirs[name])), "")


def dense_mask(mask: Mask, q_length: int, k_length: int | None = None) -> Tensor:
    """Return the mask as bool ``[Sq, Sk]``, from the definition of a region. No pair may be visible twice."""
    k_length = q_length if k_length is None else k_length
    q, k = torch.arange(q_length).unsqueeze(1), torch.arange(k_length)
    seen = torch.zeros(q_length, k_length, dtype=torch.int64)
    for r in mask.regions:
        box = (q >= r.q_start) & (q < r.q_stop) & (k >= r.k_start) & (k < r.k_stop)
        seen += (box & (q - k >= r.lo) & (q - k <= r.hi)).long()
    if int(seen.max()) > 1:
        raise AssertionError("the mask contains a pair twice")
    return seen.bool()


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Return Philox4x32-10 of counters and a key, as uint64 of shape ``[..., 4]`` (Random123, SC 2011)."""
    x, mask = counter.astype(np.uint64), np.uint64(0xFFFFFFFF)
    low, high = key
    for _ in range(10):
        left, right = x[..., 0] * np.uint64(0xD2511F53), x[..., 2] * np.uint64(0xCD9E8D57)
        words = right >> np.uint64(32), right & mask, left >> np.uint64(32), left & mask
        x = np.stack(
            (words[0] ^ x[..., 1] ^ np.uint64(low), words[1], words[2] ^ x[..., 3] ^ np.uint64(high), words[3]), -1
        )
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return x


def dropout_factors(dropout: Dropout, batch: int, heads: int, q_length: int, k_length: int) -> Tensor:
    """Return the factors of dropout, 0 or 1 / (1 - p), as float64 ``[B, Hq, Sq, Sk]``: see `kernels.dropout`."""
    index, head, row, column = np.indices((batch, heads, q_length, k_length))
    counter = np.stack((column // 4, row, head + dropout.first_head, index), -1)
    words = philox(counter, (dropout.seed % 2**32, dropout.seed // 2**32))
    kept = np.take_along_axis(words, (column % 4)[..., None], -1)[..., 0] >= dropout.p * 2**32
    return torch.from_numpy(kept / (1 - dropout.p))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: Dropout | None = None,
    dtype: torch.dtype = torch.float64,
) -> Answer:
    """Return out, LSE and all gradients for an upstream gradient `dout`; `mask` is bool ``[Sq, Sk]``.

    In a lower `dtype` this is *plain attention*. Tolerances are multiples of its errors.
    """
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    leaves, columns = [q, k, v], [scores]
    if sinks is not None:
        leaves.append(sinks.detach().to(dtype).requires_grad_())
        columns.append(leaves[-1].view(1, -1, 1, 1).expand(*scores.shape[:3], 1))
    every = torch.cat(columns, dim=-1)
    seen = (every > -torch.inf).any(-1, keepdim=True)
    p = (torch.softmax(torch.where(seen, every, 0.0), dim=-1) * seen)[..., : k.shape[1]]
    if dropout is not None:
        p = p * dropout_factors(dropout, *p.shape).to(dtype)
    out = torch.einsum("bhij,bjhd->bihd", p, values)
    lse = torch.logsumexp(every.detach().double(), dim=-1)
    return Answer(out.detach(), lse, *torch.autograd.grad(out, leaves, dout.to(dtype)))


_SHIFT = 90.0  # of scores, for "high" and "low": exp(90) overflows in float32, exp(-90) is subnormal
_SHIFT_WITH_SINKS = 60.0  # exp(-90) would be a weight here, and devices without subnormal numbers may round it to 0
_SPREAD = {"usual": 1.0, "large": 40.0, "small": 1e-3, "high": 1.0, "low": 1.0}


@dataclass(frozen=True)
class Inputs:
    """Unsharded tensors, ``[B, S, H, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """Return the tensors of a case; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, d, dv = case.sizes
    # Numbers that float32 represents would not show that float64 inputs were rounded to it, or sent in it.
    drawn = torch.float64 if case.dtype is torch.float64 else torch.float32

    def normal(count: int, dim: int) -> Tensor:
        return torch.randn(case.batch, case.length, count, dim, generator=generator, dtype=drawn)

    q, k, v, dout = normal(heads, d), normal(kv_heads, d), normal(kv_heads, dv), normal(heads, dv)
    q = q * _SPREAD[case.values]
    if case.values in ("high", "low"):
        # One coordinate is equal in all queries and in all keys, so every score shifts by the same value. It is 1 in
        # the keys: dq is a sum over keys, in which large values would cancel and magnify their rounding.
        q[..., 0] = (_SHIFT_WITH_SINKS if case.sinks else _SHIFT) * d**0.5
        k[..., 0] = 1.0 if case.values == "high" else -1.0
    sinks = torch.randn(heads, generator=generator, dtype=drawn).to(case.dtype) if case.sinks else None
    q, k, v, dout = (x.to(case.dtype) for x in (q, k, v, dout))
    return Inputs(q, k, v, dout, sinks)


def make_block_inputs(rows: int, columns: int, sizes: tuple[int, int, int, int], dtype: torch.dtype) -> Inputs:
    """Return `rows` queries and `columns` keys whose results and gradients are sums of numbers of the same sign.

    Such a sum loses most in a narrow dtype: bfloat16 has 8 bits, so a sum of 256 equal parts no longer grows.
    """
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, d, dv = sizes

    def normal(tokens: int, count: int, dim: int) -> Tensor:
        return torch.randn(1, tokens, count, dim, generator=generator)

    shift = normal(columns, 1, 1) / 4  # of a key and its value: their product does not cancel in dq
    q, k = normal(rows, heads, d) + 0.25, normal(columns, kv_heads, d) + shift
    v, dout = normal(columns, kv_heads, dv) + 1 + shift, normal(rows, heads, dv) + 1
    return Inputs(*(x.to(dtype) for x in (q, k, v, dout)))


def expected(case: Case, x: Inputs) -> tuple[Answer, Answer]:
    """Return the oracle's answer in float64, and that of plain attention in the case's dtype."""
    seen = dense_mask(case.make_strategy().computes(case.make_mask()), case.length)
    settings: dict[str, Any] = {
        "scale": case.factor, "softcap": case.softcap, "sinks": x.sinks, "dropout": case.dropout_settings
    }  # fmt: skip
    exact, plain = (
        attention(x.q, x.k, x.v, x.dout, seen, dtype=dtype, **settings) for dtype in (torch.float64, case.dtype)
    )
    return exact, plain


def in_memory(x: Tensor, how: str, device: torch.device) -> Tensor:
    """Return the same numbers on a device with other strides; the last stride is 1."""
    x = x.to(device)
    batch, rows, heads, dim = x.shape
    if how == "rows":
        return x.contiguous()
    if how == "heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "padded":  # like a slice of a fused projection
        view = x.new_full((batch, rows, heads, dim + 8), float("nan"))[..., :dim]
    elif how == "sliced":
        view = x.new_full((batch, 2 * rows, heads, dim), float("nan"))[:, ::2]
    else:
        view = x.new_full((batch, rows, heads, dim + 1), float("nan"))[..., 1:]
    return view.copy_(x)


# A few units of rounding: if plain attention happens to be exact, a sum in another order still rounds.
FLOOR = {torch.float64: 1e-14, torch.float32: 6e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}

_ROUNDINGS = 4

# Tolerances by the order of the norm: multiples of the error of plain attention, and of the floor. The largest of many
# rounding errors varies more than their 2-norm does.
_NORMS = {2: (1.5, 1.0), math.inf: (2.0, 2.0)}


def relative_error(x: Tensor, reference: Tensor, order: float = 2) -> float:
    """Return ``|x - reference| / |reference|`` in the norm of an order: 2, or infinity for the largest absolute value.

    The result is infinite if `x` contains a NaN, or an infinity that `reference` does not have. Infinities that both
    have (LSE of fully masked rows) must be equal, and count no further.
    """
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    if x.shape != reference.shape:
        return math.inf
    finite = reference.isfinite()
    if not finite.all():
        if not torch.equal(x[~finite], reference[~finite]):
            return math.inf
        x, reference = x[finite], reference[finite]
    difference, norm = (one.norm(order).item() if one.numel() else 0.0 for one in (x - reference, reference))
    error = difference / norm if norm else difference
    return error if error == error else math.inf


def error_of_weights(exact: Answer, dtype: torch.dtype, rounding: float = 0.0) -> float:
    """Return the relative error of a weight due to the rounding of the largest LSE.

    Gradients recompute each weight as exp(score - LSE), which saves memory (FlashAttention-2, section 3.1.2). An LSE
    of 100 is rounded by 4e-6, and so is every weight of its row. Plain attention keeps its weights.
    A kernel that rounds its operands by `rounding`, for example to TF32, changes a score of 100 by up to 0.1.
    """
    finite = exact.lse[exact.lse.isfinite()].abs()
    eps = torch.finfo(accumulation_dtype(dtype)).eps
    return float(finite.max()) * (eps + rounding) if finite.numel() else 0.0


def errors(
    answer: Answer, exact: Answer, plain: Answer, dtype: torch.dtype, extra: float = 0.0, rounding: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Return the errors of every quantity of an answer: name -> (error, tolerance).

    Each quantity is compared twice: `name` in the 2-norm, which averages over all elements, and `name (max)` by the
    largest absolute error, relative to the largest absolute value. One wrong element of many exceeds only the latter,
    and a small error of every element only the former. `extra` is a relative error that gradients may have in addition,
    `rounding` the relative rounding of the kernel's operands.
    """
    return errors_and(tolerances(exact, plain, dtype, extra, rounding), answer, exact)


def errors_and(allowed: Mapping[str, float], answer: Answer, exact: Answer) -> dict[str, tuple[float, float]]:
    """Return the errors of every quantity of an answer with the given tolerances: name -> (error, tolerance)."""
    expected = exact.quantities()
    titles = ((name, order, _title(name, order)) for name in answer.quantities() for order in _NORMS)
    return {
        title: (relative_error(getattr(answer, name), expected[name], order), allowed[title])
        for name, order, title in titles
    }


def tolerances(
    exact: Answer, plain: Answer, dtype: torch.dtype, extra: float = 0.0, rounding: float = 0.0
) -> dict[str, float]:
    """Return the tolerance of every quantity in both norms, by the names of `errors`."""
    expected, floor = exact.quantities(), FLOOR[dtype] + _ROUNDINGS * rounding
    return {
        _title(name, order): multiple * relative_error(value, expected[name], order)
        + floors * floor
        + (extra if name.startswith("d") else 0.0)
        for name, value in plain.quantities().items()
        for order, (multiple, floors) in _NORMS.items()
    }


def _title(name: str, order: float) -> str:
    return name if order == 2 else f"{name} (max)"


def find_violations(answer: Answer, exact: Answer, plain: Answer, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Return the quantities whose error exceeds the tolerance: name -> (error, tolerance)."""
    return find_too_large(errors(answer, exact, plain, dtype))


def find_too_large(errors: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Return the errors that exceed their tolerances, or are NaN."""
    return {name: pair for name, pair in errors.items() if not pair[0] <= pair[1]}
