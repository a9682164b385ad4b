"""What lies apart is copied to the bit, and a block's rows that leave are packed once."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable import numerics as wide_copy
from burst_portable.runtime import executor
from tests.spmd.thread_peers import World, run_peers


@pytest.mark.parametrize(
    ("dtype", "dim", "first", "wide"),
    [(torch.bfloat16, 8, 0, True), (torch.bfloat16, 8, 2, False), (torch.bfloat16, 6, 0, False),
     (torch.float32, 6, 0, True), (torch.float32, 1, 0, False), (torch.float64, 1, 3, True)],
)  # fmt: skip
def test_to_the_bit(dtype, dim, first, wide):
    """In elements of 8 bytes where rows begin and end with such; a NaN's own bits stay, and what lies between too."""
    memory = torch.randn(first + 2 * 3 * 4 * dim).to(dtype)
    memory[first] = torch.nan
    source = memory[first:].view(2, 3, 4, dim)
    room = torch.full((3, 2, 5, dim), 7.0, dtype=dtype)
    target = room.transpose(0, 1)[:, :, 1:]
    assert (wide_copy._is_wide(source), wide_copy._is_wide(target)) == (wide, wide or (first > 0))
    wide_copy.copy(source, target)
    assert torch.equal(room[:, :, 1:].transpose(0, 1).reshape(-1).view(torch.uint8), memory[first:].view(torch.uint8))
    assert (room[:, :, 0] == 7).all()


def test_memory_that_begins_anywhere():
    """As another package may hand it over."""
    memory = bytearray(128)
    base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    for odd in (0, 4):
        source = torch.frombuffer(memory, dtype=torch.float32, offset=-base % 8 + odd, count=24).view(3, 8)
        assert (wide_copy._is_wide(source), source.storage_offset()) == (not odd, 0)


def test_other_dtypes_are_converted():
    target = torch.zeros(4, 8, dtype=torch.bfloat16)
    wide_copy.copy(torch.full((4, 8), 1.5), target)
    assert (target == 1.5).all()


@pytest.mark.parametrize("moves", ["fetch", "neighbour"])
def test_rows_are_packed_once(moves, monkeypatch):
    """Of a causal zigzag some ranks need a whole block and others half of it: that is a part of the same message."""
    copied = []
    real = wide_copy.copy
    monkeypatch.setattr(
        executor.wide_copy, "copy", lambda source, target: (copied.append(source), real(source, target))
    )
    x = torch.randn(1, 64, 2, 8, generator=torch.Generator().manual_seed(0))
    right = bp.attention(x, x, x, mask="causal")
    strategy = bp.make_strategy("ring", moves=moves, **({"ahead": 4} if moves == "fetch" else {}))

    def work(mesh):
        mine = bp.shard(x, mesh, layout="zigzag")
        out = bp.attention(mine, mine, mine, mask="causal", mesh=mesh, strategy=strategy, layout="zigzag")
        return bp.unshard(out, mesh, layout="zigzag", seq_len=64)

    for found in run_peers(World(4), work):
        torch.testing.assert_close(found, right)
    assert len(copied) == 2 * 4, "K and V of each rank"
