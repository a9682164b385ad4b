"""The tensors of a case, and what the oracle says about them. Always made on the CPU, the same for every backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from burst_portable.conformance import oracle
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import Answer

_SHIFT = 90.0  # of scores, in "high" and "low": beyond where exp overflows, or underflows, in float32
_SHIFT_BESIDE_SINKS = 60.0  # exp(-90) would be a weight, which devices without subnormal numbers may round to 0
_SPREAD = {"usual": 1.0, "large": 40.0, "small": 1e-3, "high": 1.0, "low": 1.0}


@dataclass(frozen=True)
class Inputs:
    """Whole tensors, ``[B, S, H, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None


def make_inputs(case: Case, seed: int = 0) -> Inputs:
    """The tensors of a case; the same every time."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, d, dv = case.sizes

    def normal(count: int, dim: int) -> Tensor:
        return torch.randn(case.batch, case.length, count, dim, generator=generator)

    q, k, v, dout = normal(heads, d), normal(kv_heads, d), normal(kv_heads, dv), normal(heads, dv)
    q = q * _SPREAD[case.values]
    if case.values in ("high", "low"):
        # One coordinate is the same for all queries and for all keys, so every score moves alike. The keys' is 1:
        # dq is a sum over keys in which a large one would cancel, and magnify rounding that nobody can help.
        q[..., 0] = (_SHIFT_BESIDE_SINKS if case.sinks else _SHIFT) * d**0.5
        k[..., 0] = 1.0 if case.values == "high" else -1.0
    sinks = torch.randn(heads, generator=generator).to(case.dtype) if case.sinks else None
    q, k, v, dout = (x.to(case.dtype) for x in (q, k, v, dout))
    return Inputs(q, k, v, dout, sinks)


def expected(case: Case, x: Inputs) -> tuple[Answer, Answer]:
    """The oracle's answer in float64, and plain attention's in the case's dtype."""
    seen = oracle.dense_mask(case.make_mask(), case.length)
    exact, plain = (
        oracle.attention(
            x.q, x.k, x.v, x.dout, seen, scale=case.factor, softcap=case.softcap, sinks=x.sinks, dtype=dtype
        )
        for dtype in (torch.float64, case.dtype)
    )
    return exact, plain


def in_memory(x: Tensor, how: str, device: torch.device) -> Tensor:
    """The same numbers on a device, laid out in another way; the last stride stays 1."""
    x = x.to(device)
    if how == "heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    batch, rows, heads, dim = x.shape
    if how == "padded":  # as slices of a fused projection lie
        wide = x.new_full((batch, rows, heads, dim + 8), float("nan"))
        wide[..., :dim] = x
        return wide[..., :dim]
    if how == "sliced":
        wide = x.new_full((batch, 2 * rows, heads, dim), float("nan"))
        wide[:, ::2] = x
        return wide[:, ::2]
    if how == "odd":
        wide = x.new_full((batch, rows, heads, dim + 1), float("nan"))
        wide[..., 1:] = x
        return wide[..., 1:]
    return x.contiguous()
