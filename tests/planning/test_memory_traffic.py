"""Compare bytes read and written between kernels with hand-computed values, for uneven ranks, blocks and rows."""

from __future__ import annotations

import pytest

import burst_portable as bp
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory_traffic import reshard_traffic
from burst_portable.strategies.registry import make_strategy

PIECES = KernelTraits(splits_tiles=True)
USUAL = {"heads": 6, "kv_heads": 6, "head_dim": 64, "mask": "full", "layout": "contiguous"}


def seconds(made, pass_name, rank=0, **changes):
    """Return the seconds at one byte per second of memory bandwidth, all else instantaneous."""
    return rank_cost(made, pass_name, rank, HardwareSpec(1e9, 1e9, 0.0, 0.0, memory_bandwidth=1e-9, **changes)).seconds


@pytest.mark.parametrize("moves", ["ring", "direct"])
def test_block_is_packed_once_by_its_owner(moves):
    """Rank 2 of three forwards a larger block unchanged; for fetches two ranks read the same rows."""
    made = bp.plan(seq_len=50, ranks=3, **USUAL, strategy=make_strategy("ring", transfer=moves))
    assert [made.layout.count(rank) for rank in range(3)] == [17, 17, 16]
    row = 16 * 6 * 64  # elements of a tensor of rank 2; out is merged twice
    assert seconds(made, "forward", 2) == pytest.approx(2 * (2 * row * 2) + 2 * 8 * row, rel=1e-6)


def test_merge_counts_every_row_that_a_launch_changes():
    """One launch over two blocks changes the first four rows of both chunks of a rank: two tiles of four rows."""
    strategy = make_strategy("ring", transfer="direct", prefetch_steps=4, blocks_per_launch=4)
    made = bp.plan(seq_len=64, ranks=4, **USUAL | {"mask": "window:4", "layout": "zigzag"}, strategy=strategy)
    for rank in (1, 2):  # ranks 0 and 3 have one neighbor
        sent = rank_cost(made, "forward", rank, HardwareSpec(1, 1)).sent
        assert sent == 2 * 4 * 6 * 64 * 2 * 2
        assert seconds(made, "forward", rank) == pytest.approx(2 * sent + 8 * (4 + 4) * 6 * 64, rel=1e-6)


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("pass_name", ["forward", "backward"])
@pytest.mark.parametrize("strategy", ["ring", "burst", "ulysses"])
def test_memory_traffic_is_proportional_to_batch(strategy, pass_name, in_pieces):
    """LSE and delta of a row are padded to 16 bytes, which eight heads fill."""
    once, thrice = (
        bp.plan(seq_len=64, ranks=2, batch=batch, strategy=strategy, **USUAL | {"heads": 8, "kv_heads": 8})
        for batch in (1, 3)
    )
    more, less = (seconds(made, pass_name, kernel=KernelTraits(splits_tiles=in_pieces)) for made in (thrice, once))
    assert more == pytest.approx(3 * less, rel=1e-6)


def test_resharded_bytes_of_uneven_ranks():
    """Rows 18, 18 and 17; two of six heads of 64 per rank."""
    plan = bp.plan(seq_len=53, ranks=3, **USUAL, strategy="ulysses")
    row = 2 * 64 * 2  # bytes of one tensor
    for rank, rows in enumerate((18, 18, 17)):
        # Q, K and V are sent and out is received; each is read and written. Received data is in order and may stay.
        home = 2 * 3 * rows * row
        (told,) = reshard_traffic(plan, "forward", rank, PIECES, sends_strided=False)
        assert told == (2 * 3 * rows * 3 * row, 0, 0, home)
        (told,) = reshard_traffic(plan, "forward", rank, PIECES, sends_strided=True)
        assert told == (0, 0, 2 * 53 * 3 * row, home)
        (told,) = reshard_traffic(plan, "backward", rank, PIECES, sends_strided=False)
        assert told == (2 * 3 * rows * row, 0, 0, 3 * home)
        # Inputs are put into natural order, and out into rank order. This makes a copy, which may stay.
        mixed = bp.plan(seq_len=53, ranks=3, **USUAL | {"layout": "zigzag"}, strategy="ulysses")
        (told,) = reshard_traffic(mixed, "forward", rank, PIECES, sends_strided=True)
        assert told == (0, 2 * 53 * 4 * row, 0, 2 * 3 * mixed.layout.count(rank) * row)
