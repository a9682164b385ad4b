"""Test the functions that other packages get instead of those of flash_attn."""

from __future__ import annotations

import sys

import pytest
import torch

from burst_portable.bench.flash_attn_stand_in import FlashAttn, varlen_tiles


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [-1, 0, 3, 100])
def test_varlen_tiles_match_flash_attn_cu_seqlens(causal, left):
    """By its documentation, query i is aligned to key i + keys - queries, and sees `left` keys before that one."""
    cu_q, cu_k, seen = (0, 4, 5, 12), (0, 9, 10, 17), torch.zeros(12, 17, dtype=torch.bool)
    for tile in varlen_tiles(cu_q, cu_k, causal, left):
        for row in range(tile.q_start, tile.q_stop):
            for column in range(tile.k_start, tile.k_stop):
                seen[row, column] |= tile.lo <= row - column <= tile.hi
    for row in range(12):
        which = sum(row >= stop for stop in cu_q[1:])
        rows, keys = cu_q[which + 1] - cu_q[which], cu_k[which + 1] - cu_k[which]
        at = row - cu_q[which] + keys - rows
        for column in range(17):
            key, right = column - cu_k[which], at if causal else keys
            assert seen[row, column] == (0 <= key < keys and key <= right and (left < 0 or key >= at - left))


def test_stand_in_leaves_modules_as_they_were(tmp_path, monkeypatch):
    (tmp_path / "some_peer.py").write_text("import flash_attn\nfrom flash_attn import flash_attn_func\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = dict(sys.modules)
    assert FlashAttn().import_module("some_peer").flash_attn.__version__
    assert "flash_attn" not in sys.modules
    assert sys.modules == before
