"""Compare the CPU kernels, including the reference, with the float64 oracle, one tile list at a time."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable import numerics
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.conformance.oracle import find_violations
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.layout import make_layout
from burst_portable.planning.tiles import Tile, Tiles, find_tiles
from tests.support.calls import settings
from tests.support.local_kernels import expected, inputs

KERNELS = [ReferenceKernel(), CpuFlashKernel()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def run(kernel, q, k, v, dout, parts, options, with_out=False):
    """Compute all parts (k range, tiles) into one state of the kernel, and then their gradients."""
    state = None
    for columns, tiles in parts:
        state = kernel.attend(q, k[:, columns], v[:, columns], tiles, options, state=state)
    out, lse = numerics.finished(state, q.dtype)
    into = tuple(torch.zeros(x.shape, dtype=numerics.accumulation_dtype(x.dtype)) for x in (q, k, v))
    delta = numerics.row_delta(dout, out)
    for columns, tiles in parts:
        given = {"out": out} if with_out else {"delta": delta}
        block = (into[0], into[1][:, columns], into[2][:, columns])
        kernel.attend_backward(
            BackwardInputs(dout, q, k[:, columns], v[:, columns], lse, **given), tiles, options, into=block
        )
    return oracle.Answer(out, lse, *into)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_kernel_matches_oracle_for_each_mask_and_split(kernel, name, pieces):
    """One `attend` call per part of the keys; the running state merges the parts."""
    q, k, v, dout = inputs(torch.float32)
    shards = make_layout("contiguous", LENGTH, pieces).shards
    whole = make_layout("contiguous", LENGTH, 1).shards[0]
    parts = [(slice(s.start, s.last + 1), find_tiles(MASKS[name], whole, (s,))) for shard in shards for s in shard]
    answer = run(kernel, q, k, v, dout, parts, settings(0.3), with_out=pieces == 1)
    exact, plain = expected(q, k, v, dout, MASKS[name], torch.float32, scale=0.3)
    assert find_violations(answer, exact, plain, torch.float32) == {}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernel_matches_oracle_for_each_dtype(kernel, dtype):
    q, k, v, dout = inputs(dtype)
    tiles = find_tiles(MASKS["sink_window"], *[make_layout("contiguous", LENGTH, 1).shards[0]] * 2)
    answer = run(kernel, q, k, v, dout, [(slice(None), tiles)], settings(0.3))
    exact, plain = expected(q, k, v, dout, MASKS["sink_window"], dtype, scale=0.3)
    assert find_violations(answer, exact, plain, dtype) == {}


def test_reference_kernel_supports_value_size_and_softcap():
    q, k, v, dout = inputs(torch.float32, dv=5)
    tiles = Tiles([Tile(0, LENGTH, 0, LENGTH, 0, LENGTH - 1)])
    answer = run(ReferenceKernel(), q, k, v, dout, [(slice(None), tiles)], settings(0.7, softcap=2.0))
    exact, plain = expected(q, k, v, dout, MASKS["causal"], torch.float32, scale=0.7, softcap=2.0)
    assert find_violations(answer, exact, plain, torch.float32) == {}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_kernel_ignores_rows_and_columns_outside_tiles(kernel):
    """NaN outside the tiles must not spread, and results there stay unchanged."""
    q, k, v, dout = inputs(torch.float32)
    for x in (q, k, v, dout):
        x[:, :10] = torch.nan
        x[:, 40:] = torch.nan
    tiles = Tiles([Tile(10, 40, 10, 40, 0, 29)])
    state = kernel.attend(q, k, v, tiles, settings(0.3))
    assert bool((state[0][:, :10] == 0).all())
    assert bool((state[1][:, :, 40:] == -torch.inf).all())
    assert bool(state[0][:, 10:40].isfinite().all())
    into = tuple(torch.full(x.shape, 7.0) for x in (q, k, v))
    lse = state[1].float()
    kernel.attend_backward(
        BackwardInputs(dout, q, k, v, lse, delta=torch.zeros_like(lse)), tiles, settings(0.3), into=into
    )
    for gradient in into:
        assert bool((gradient[:, :10] == 7).all())
        assert bool((gradient[:, 40:] == 7).all())
        assert bool(gradient.isfinite().all())
        assert bool((gradient[:, 10:40] != 7).any())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("columns", [1, 7, 15, 16, 33])
def test_kernel_propagates_nan_with_few_columns(kernel, columns):
    """torch's CPU operator treats a NaN row of fewer than 16 scores as a row without keys."""
    q, k, v, _ = inputs(torch.float32, rows=40)
    q[0, 3, 1, 0] = torch.nan
    k, v = (x[:, :columns] for x in (k, v))
    out, lse = bp.partial_attention(q, k, v, [Tile(0, 40, 0, columns, -columns, 40)], kernel=kernel.name)
    wrong = torch.zeros(lse.shape, dtype=torch.bool)
    wrong[0, 1, 3] = True
    assert torch.equal(lse.isnan(), wrong)
    assert torch.equal(out.isnan().all(-1), wrong.transpose(1, 2))
    assert torch.equal(out.isnan().any(-1), wrong.transpose(1, 2))
