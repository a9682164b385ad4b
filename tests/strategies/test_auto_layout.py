"""Test which layout a plan uses by default, and the criteria for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import burst_portable as bp
from benchmarks.ring_rows import ROWS
from burst_portable.backends.cuda.machines import hardware_of_machine
from burst_portable.errors import InputError
from burst_portable.mask import Mask
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.verify import verify
from burst_portable.strategies.auto import AutoStrategy, sampled_ranks

H200 = hardware_of_machine("NVIDIA H200", 4)
DOCUMENTS = (0, 9000, 9100, 12000, 12345, 16000, 20001, 22000, 32768)


def plan(hardware=H200, layout="auto", **changes):
    usual = {"seq_len": 32768, "ranks": 4, "heads": 32, "kv_heads": 8, "strategy": AutoStrategy(hardware=hardware)}
    return bp.plan(layout=layout, **{**usual, **changes})


def seconds(made, hardware=H200):
    return plan_cost(made, hardware).seconds


@pytest.mark.parametrize("ranks", [2, 4, 7])
@pytest.mark.parametrize("mask", ["causal", "full", "window:2000", Mask.documents(DOCUMENTS)], ids=str)
def test_auto_layout_is_fastest_predicted(mask, ranks):
    made = plan(mask=mask, ranks=ranks)
    assert made.reason.startswith(f"layout {made.layout.name} by predicted time (")
    assert "; chose " in made.reason
    names = ["zigzag", "contiguous"] + ["whole_documents", "document_zigzag", "dispatched"] * (
        not isinstance(mask, str)
    )
    for name in names:
        assert f"{name} " in made.reason.partition(")")[0]
        other = plan(layout=name, mask=mask, ranks=ranks)
        assert seconds(made) <= seconds(other) + 1e-7, name
    assert verify(made) == []


def test_auto_layout_suits_the_mask():
    assert plan().layout.name == "zigzag"  # all layouts take equal time
    assert plan(mask="window:2000").layout.name == "contiguous"  # exchanges with neighbors only
    # Operator kernels need natural order: the contiguous layout needs no extra pass over memory.
    pieces = plan(hardware=replace(H200, kernel=KernelTraits(splits_tiles=True)))
    assert (pieces.strategy, pieces.layout.name) == ("ulysses", "contiguous")
    row = ROWS["128k-documents"]
    assert plan(mask=row.mask, seq_len=row.length).layout.name == "whole_documents"
    assert plan(ranks=1).layout.name == "zigzag"
    with_strategy = plan(strategy="ring")  # a named strategy is kept
    assert (with_strategy.strategy, with_strategy.layout.name) == ("ring", "zigzag")
    assert with_strategy.reason.startswith("layout zigzag by predicted time (zigzag ")


def test_auto_keeps_named_layout():
    made = plan(layout="contiguous")
    assert made.layout.name == "contiguous"
    assert made.reason.startswith("chose ")
    with pytest.raises(InputError, match=r"plan_for_mesh\(mesh, .*\)\.layout"):
        bp.local_position_ids(seq_len=8, layout="auto")


def test_sampled_ranks_include_rank_of_long_document():
    """16 ranks; one long document is on the fourth rank alone."""
    ends = [*range(0, 3072, 64), 3072, *range(4096, 16385, 64)]
    made = plan(mask=Mask.documents(ends), layout="contiguous", ranks=16, seq_len=16384, strategy="ring")
    hardware = HardwareSpec(1.0, 100.0)
    priced = sampled_ranks(made.call)
    assert 3 in priced
    assert len(priced) < 8
    assert AutoStrategy(hardware=hardware).seconds(made) == pytest.approx(plan_cost(made, hardware).seconds)


def test_plan_cost_counts_visited_blocks_and_kernel_calls():
    """A kernel that splits tiles is called once per tile."""
    mask = Mask.documents((0, 96, 160, 1000, 1024))
    made = plan(mask=mask, ranks=1, seq_len=1024, strategy="ring", layout="contiguous")
    tiles = made.forward.steps_of(0)[0].compute.tiles
    hardware = HardwareSpec(1e-6, 1.0, launch_latency=3.0, backward_launch_latency=5.0)  # 1e6 FLOP/s
    flops = 4 * 32 * 128 / 1e6  # per pair
    assert len(tiles) == 4
    # Rows 0-95 are in one block and 96-159 in two. Rows 160-999 are in seven, of one to seven column blocks, and
    # 1000-1023 in one.
    visited = 128 * 128 * (1 + 2 + sum((1, 2, 3, 4, 5, 6, 7)) + 1)
    for block, pairs in ((1, mask.num_pairs(1024)), (128, visited)):
        for in_pieces, calls in ((False, 1), (True, 4)):
            cost = plan_cost(made, replace(hardware, block=block, kernel=KernelTraits(splits_tiles=in_pieces))).per_rank
            assert cost["forward"][0].seconds == pytest.approx(3 * calls + pairs * flops)
            assert cost["backward"][0].seconds == pytest.approx(5 * calls + 2.5 * pairs * flops)
            assert cost["forward"][0].flops == 4 * 32 * 128 * mask.num_pairs(1024)
