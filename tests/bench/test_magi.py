"""Test the slices that MagiAttention gets."""

from __future__ import annotations

import pytest
import torch

from burst_portable.bench.magi import mask_slices
from burst_portable.bench.masks import MASKS
from burst_portable.conformance.oracle import dense_mask


@pytest.mark.parametrize("name", MASKS)
def test_mask_slices_cover_each_visible_pair_once(name):
    for length in (64, 301):
        mask, seen = MASKS[name](length), torch.zeros(length, length, dtype=torch.int)
        for one in mask_slices(mask, length):
            rows = torch.arange(one.q_start, one.q_stop).unsqueeze(1)
            columns = torch.arange(one.k_start, one.k_stop)
            box = torch.ones(len(rows), len(columns), dtype=torch.bool)
            if one.kind in ("CAUSAL", "BICAUSAL"):
                box &= rows - columns >= one.q_stop - one.k_stop
            if one.kind in ("INVCAUSAL", "BICAUSAL"):
                box &= rows - columns <= one.q_start - one.k_start
            seen[one.q_start : one.q_stop, one.k_start : one.k_stop] += box
        assert torch.equal(seen, dense_mask(mask, length).int())
