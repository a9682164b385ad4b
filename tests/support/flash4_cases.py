"""Compare the Hopper kernel with flash-attn-4, on a device or emulated, with the float64 reference."""

from __future__ import annotations

import torch

from burst_portable.backends.cuda.hopper import flash4, flash4_speeds
from burst_portable.kernels.base import BackwardInputs
from burst_portable.numerics import row_delta
from burst_portable.planning.tiles import Tile, Tiles
from tests.support.calls import settings
from tests.support.hopper_cases import ORACLE, TOLERANCE, gap, randn, wide

OPTIONS = settings(scale=0.1, deterministic=False)
CAPPED = settings(scale=0.1, deterministic=False, softcap=1.0)


def call_package_always(monkeypatch):
    """Let flash-attn-4 compute calls of all kinds and sizes that were measured, however small or slow."""
    monkeypatch.setattr(flash4, "LEAST", {flash4_speeds.FORWARD: 0, flash4_speeds.BACKWARD: 0})
    monkeypatch.setattr(flash4_speeds, "PAIRS", dict.fromkeys(flash4_speeds.PAIRS, (0.5, 1.0)))
    faster = {kind: dict.fromkeys(sizes, ((2.0, 2.0),) * 2) for kind, sizes in flash4_speeds.SPEEDS.items()}
    monkeypatch.setattr(flash4_speeds, "SPEEDS", faster)


def box(rows, columns):
    return Tiles([Tile(0, rows, 0, columns, -columns, rows)])


def causal(length):
    return Tiles([Tile(0, length, 0, length, 0, length)])


def inputs(rows, columns, heads, dim, device, dtype=torch.bfloat16, batch=2, v_dim=None):
    """Return (dout, q, k, v)."""
    v_dim = v_dim or dim
    sizes = ((rows, heads[0], v_dim), (rows, heads[0], dim), (columns, heads[1], dim), (columns, heads[1], v_dim))
    return tuple(randn(batch, *size, device=device, dtype=dtype, seed=i) for i, size in enumerate(sizes))


def compare_whole(kernel, dout, q, k, v, tiles, merged=False, options=OPTIONS):
    """Compare the forward pass, and a backward pass from its results, in single calls.

    `merged`: the results of merged parts, in wider dtypes.
    """
    tolerance = TOLERANCE[q.dtype]
    out, lse = kernel.forward_single_call(q, k, v, tiles, options)
    if merged:
        out, lse = out.to(q.dtype), lse.float()
    exact_out, exact_lse = ORACLE.attend(*wide(q, k, v), tiles, options)
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert gap(out, exact_out) < 1.5 * tolerance[0], "out"
    seen = exact_lse > -torch.inf
    assert (lse[~seen] == -torch.inf).all()
    assert gap(lse[seen], exact_lse[seen]) < tolerance[1]
    made = kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, options)
    exact = tuple(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    delta = row_delta(dout.double(), exact_out)
    ORACLE.attend_backward(BackwardInputs(*wide(dout, q, k, v), exact_lse, delta=delta), tiles, options, into=exact)
    for name, mine, good in zip("qkv", made, exact, strict=True):
        assert mine.shape == good.shape
        assert gap(mine, good) < 1.5 * tolerance[2], f"d{name}"
