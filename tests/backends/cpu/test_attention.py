"""Test which calls of torch's operator the kernel of the cpu backend makes, and which problems it declines."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.tiles import find_tiles
from tests.support.calls import kernel_call


@pytest.mark.parametrize("name", MASKS)
def test_split_tile_covers_each_cell_once(name):
    """The calls of torch's operator contain exactly the cells of the tile, and no empty row."""
    whole = make_layout("contiguous", LENGTH, 1).shards[0]
    covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    for tile in find_tiles(MASKS[name], whole, whole):
        for piece in CpuFlashKernel().split_tile(tile):
            box = torch.ones(piece.rows.stop - piece.rows.start, piece.columns.stop - piece.columns.start).long()
            if piece.causal:
                box = box.tril()
            if (mask := piece.mask(torch.float32)) is not None:
                box = (mask == 0).long()
            assert bool(box.any(1).all())
            covered[piece.rows, piece.columns] += box
    assert torch.equal(covered, oracle.dense_mask(MASKS[name], LENGTH).long())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cuda"}, "CPU tensors"),
        ({"v_head_dim": 5}, "differ from heads"),
        ({"softcap": 30.0}, "no softcap"),
        ({"scale": -1.0}, "must be positive"),
        ({"dtype": torch.int32}, "int32"),
    ],
)
def test_cpu_flash_declines_with_reason(change, reason):
    facts = {"dtype": torch.float32, "device": "cpu", "heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    support = CpuFlashKernel().supports(kernel_call(**{**facts, **change}))
    assert not support.ok
    assert reason in support.reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("strides", [(1, 8), (3, 1), (1, 1), (2, 12)], ids=str)
def test_attention_of_overlapping_rows_or_heads_is_exact(strides: tuple[int, int], dtype: torch.dtype):
    """Frames of a signal, as `unfold` makes them, share memory. Another stride than the last may then be 1.

    torch's operator returned rows of its results in the wrong places, without an error.
    """
    rows, heads, size = 5, 2, 8
    generator = torch.Generator().manual_seed(0)
    signal = torch.randn(2, 64, generator=generator).to(dtype)
    dout = torch.randn(2, rows, heads, size, generator=generator).to(dtype)
    frames = signal.as_strided((2, rows, heads, size), (64, *strides, 1))
    seen = oracle.dense_mask(Mask.causal(), rows)

    def work(mesh: bp.Mesh) -> tuple[torch.Tensor, ...]:
        local = bp.shard(torch.arange(rows), mesh, dim=0, layout="contiguous")
        x = frames[:, local[0] : local[-1] + 1].detach()
        q, k, v = (x.detach().requires_grad_() for _ in range(3))
        out = bp.attention(q, k, v, mesh=mesh, layout="contiguous", seq_len=rows, kernel="cpu_flash")
        out.backward(dout[:, local])
        found = (out, q.grad, k.grad, v.grad)
        return tuple(bp.unshard(y.detach(), mesh, seq_len=rows, layout="contiguous") for y in found)

    x = frames.clone(memory_format=torch.contiguous_format)
    exact = oracle.attention(x, x, x, dout, seen, scale=size**-0.5)
    allowed = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    for ranks in (1, 2):
        for found, name in zip(bp.run_threads(ranks, work)[0], ("out", "dq", "dk", "dv"), strict=True):
            assert oracle.relative_error(found, getattr(exact, name)) < allowed, name
