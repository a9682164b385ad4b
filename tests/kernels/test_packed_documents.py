"""Test how documents are found in tiles, and how their tokens are packed."""

from __future__ import annotations

import pytest
import torch

from burst_portable.kernels.packed_documents import Documents, find_documents, pack_documents
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.planning.tiles import Tile, Tiles, find_tiles

CPU = torch.device("cpu")


def tiles_of(mask, length):
    return find_tiles(mask, (Segment(0, length),), (Segment(0, length),))


FOUND = {
    "causal": (Mask.documents([0, 3, 4, 9]), Documents((0, 3, 4, 9), True)),
    "full": (Mask.documents([0, 3, 4, 9], causal=False), Documents((0, 3, 4, 9), False)),
    "padding": (Mask.documents([0, 2, 7]), Documents((0, 2, 7), True)),
    "one and padding": (Mask.documents([0, 7], causal=False), Documents((0, 7), False)),
    "a wide window": (Mask.documents([0, 3, 9], window=5), Documents((0, 3, 9), True)),
    "of one token": (Mask.documents([0, 1, 2, 3, 9]), Documents((0, 1, 2, 3, 9), True)),
    "full, of one token": (Mask.documents([0, 1, 2, 9], causal=False), Documents((0, 1, 2, 9), False)),
}


@pytest.mark.parametrize("case", FOUND)
def test_find_documents_returns_bounds_and_kind(case):
    mask, expected = FOUND[case]
    assert find_documents(tiles_of(mask, 9), 9, 9) == expected


def test_find_documents_takes_tiles_in_any_order():
    tiles = Tiles([Tile(4, 9, 4, 9, 0, 4), Tile(0, 1, 0, 1, -4, 4), Tile(1, 4, 1, 4, 0, 9)])
    assert find_documents(tiles, 9, 9) == Documents((0, 1, 4, 9), True)


NONE = {
    "causal": [Tile(0, 9, 0, 9, 0, 8)],
    "a window of one token": [Tile(0, 9, 0, 9, 0, 0)],
    "a box": [Tile(0, 9, 0, 9, -8, 8)],
    "documents with a window": [Tile(0, 4, 0, 4, 0, 2), Tile(4, 9, 4, 9, 0, 2)],
    "a gap": [Tile(0, 4, 0, 4, 0, 4), Tile(5, 9, 5, 9, 0, 4)],
    "other keys": [Tile(0, 4, 4, 8, -9, 9), Tile(4, 8, 0, 4, -9, 9)],
    "more keys": [Tile(0, 4, 0, 4, 0, 4), Tile(4, 8, 4, 9, -9, 9)],
    "a causal and a full one": [Tile(0, 4, 0, 4, 0, 4), Tile(4, 9, 4, 9, -9, 9)],
    "the mirror of causal": [Tile(0, 4, 0, 4, -4, 0), Tile(4, 9, 4, 9, -4, 0)],
    "a document below another": [Tile(0, 4, 0, 4, 0, 4), Tile(4, 9, 0, 4, -9, 9), Tile(4, 9, 4, 9, 0, 9)],
    "nothing": [],
}


@pytest.mark.parametrize("case", NONE)
def test_find_documents_returns_none_for_other_tiles(case):
    tiles = Tiles(NONE[case])
    assert find_documents(tiles, 9, 9) is None
    assert pack_documents(tiles, 2, 9, 9, CPU) is None


def test_documents_need_as_many_keys_as_queries():
    tiles = tiles_of(Mask.documents([0, 3, 7]), 9)
    assert find_documents(tiles, 9, 9)
    assert find_documents(tiles, 9, 10) is None
    assert find_documents(tiles, 10, 9) is None
    assert pack_documents(tiles, 0, 9, 9, CPU) is None, "no batch rows"


def test_pack_documents_repeats_documents_for_each_batch_row():
    packed = pack_documents(tiles_of(Mask.documents([0, 3, 7]), 9), 3, 9, 9, CPU)
    assert packed.cu_seqlens.tolist() == [0, 3, 7, 10, 14, 17, 21]
    assert packed.cu_seqlens.dtype == torch.int32
    assert (packed.longest, packed.causal, packed.tokens) == (4, True, slice(0, 7))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("first", "last"), [(0, 9), (0, 7), (2, 9), (2, 7)])
def test_unpack_inverts_pack(batch, first, last):
    tiles = Tiles([Tile(first, 4, first, 4, 0, 9), Tile(4, last, 4, last, 0, 9)])
    packed = pack_documents(tiles, batch, 9, 9, CPU)
    x, lse = torch.randn(batch, 9, 2, 8), torch.randn(batch, 2, 9)
    inside = packed.pack(x)
    assert inside.shape == (batch * (last - first), 2, 8)
    assert (inside.data_ptr() == x[:, first].data_ptr()) == (batch == 1 or last - first == 9), "a view is no copy"
    expected, of_lse = torch.zeros_like(x), torch.full_like(lse, -torch.inf)
    expected[:, first:last], of_lse[:, :, first:last] = x[:, first:last], lse[:, :, first:last]
    assert torch.equal(packed.unpack(inside), expected)
    assert packed.pack_lse(lse).is_contiguous()
    assert packed.unpack_lse(packed.pack_lse(lse)).is_contiguous()
    assert torch.equal(packed.unpack_lse(packed.pack_lse(lse)), of_lse)
