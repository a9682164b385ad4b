"""Test which calls of torch's operator the kernel of the cpu backend makes, and which problems it declines."""

from __future__ import annotations

import pytest
import torch

from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.layout import make_layout
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
