"""Make inputs of a local kernel, and compute the results of the oracle."""

from __future__ import annotations

import torch

from burst_portable.conformance import oracle
from burst_portable.conformance.cases import LENGTH


def inputs(dtype, heads=6, kv_heads=2, d=8, dv=8, rows=LENGTH):
    shapes = [(2, rows, heads, d), (2, rows, kv_heads, d), (2, rows, kv_heads, dv), (2, rows, heads, dv)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def expected(q, k, v, dout, mask, dtype, **options):
    seen = oracle.dense_mask(mask, LENGTH)
    return [oracle.attention(q, k, v, dout, seen, **options, dtype=t) for t in (torch.float64, dtype)]
