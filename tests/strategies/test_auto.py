"""Test what `auto` compares: each label matches its strategy, bytes break ties, and few of many ranks are costed."""

from __future__ import annotations

from math import ceil

import pytest

import burst_portable as bp
from burst_portable.errors import UnsupportedError
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory import plan_memory
from burst_portable.strategies.auto import AutoStrategy, sampled_ranks
from burst_portable.strategies.registry import make_strategy

COPIES = HardwareSpec(tflops=400.0, intra_node_bandwidth=100.0, peer_copy_bandwidth=((1, 100.0),))
ALWAYS = {
    "ring", "burst", "ring(transfer=direct)", "ring(transfer=direct, local_block_order=last)",
    "burst(transfer=direct)", "ulysses",
}  # fmt: skip
GROUPS = {"ulysses(head_groups=2)", "ulysses(head_groups=4)"}
EIGHT_AHEAD = {
    "ring(transfer=direct, prefetch_steps=8)",
    "ring(transfer=direct, prefetch_steps=8, local_block_order=last)",
    "ring(transfer=direct, prefetch_steps=8, blocks_per_launch=8)",
    "ring(transfer=direct, prefetch_steps=8, blocks_per_launch=8, local_block_order=last)",
    "ring(transfer=direct, prefetch_steps=8, blocks_per_launch=8, local_block_order=split)",
    "burst(transfer=direct, prefetch_steps=8)",
    "burst(transfer=direct, prefetch_steps=8, blocks_per_launch=8)",
}
TABLED = {"ring", "burst", "double_ring", "ulysses", "usp"}  # tests of further strategies are in their own files


def problem(
    ranks: int, heads: int = 96, kv_heads: int = 96, mask: Mask | None = None, length: int = 960
) -> AttentionCall:
    mask = mask or Mask.full()
    where = make_layout("contiguous", length, ranks, mask)
    return AttentionCall(mask, where, heads, kv_heads, 64, 64)


def two_rings(ranks_per_node: int) -> set[str]:
    """Return the labels of the double ring in nodes of this many ranks."""
    double_ring = f"double_ring(ranks_per_node={ranks_per_node}"
    return {f"{double_ring})", f"{double_ring}, backward_circulates=kv)"}


def usp(ranks_per_node: int) -> set[str]:
    """Return the labels of usp in nodes, or parts of nodes, of this many ranks."""
    name = f"usp(ranks_per_node={ranks_per_node}"
    return {f"{name})", f"{name}, backward_circulates=q)", f"{name}, transfer=direct)"}


def across(ranks_per_node: int) -> set[str]:
    """Return the labels of usp with rings inside nodes of this many ranks."""
    name = f"usp(ranks_per_node={ranks_per_node}"
    return {f"{name}, placement=context_first)", f"{name}, transfer=direct, placement=context_first)"}


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "hardware", "heads", "expected"),
    [
        (8, None, HardwareSpec(400.0, 100.0), 96, ALWAYS),
        (8, None, COPIES, 96, ALWAYS | GROUPS | EIGHT_AHEAD),
        (24, None, COPIES, 96, ALWAYS | GROUPS),  # too many blocks for the memory
        (8, 4, COPIES, 96, ALWAYS | two_rings(4) | usp(4) | across(4)),
        (8, 4, COPIES, 6, ALWAYS | two_rings(4) | usp(2) | across(4) | {"usp(ranks_per_node=2, inner_ring_size=2)"}),
        (12, 4, COPIES, 4, ALWAYS | two_rings(4) | usp(4)),  # three nodes cannot divide four heads
        (8, 8, HardwareSpec(400.0, 100.0), 96, ALWAYS | two_rings(8)),
    ],
)
def test_auto_candidates_can_be_made_from_labels(ranks, ranks_per_node, hardware, heads, expected):
    candidates, _ = AutoStrategy(ranks_per_node=ranks_per_node, hardware=hardware).list_candidates(
        problem(ranks, heads, heads)
    )
    assert {label for label, strategy in candidates.items() if strategy.name in TABLED} == expected
    assert {label: make_strategy(label) for label in candidates} == candidates


def test_auto_breaks_ties_by_bytes_sent():
    """Messages take no time and all ranks compute equally; few K/V heads should be sent."""
    hardware = HardwareSpec(tflops=1e-6, intra_node_bandwidth=1e9, message_latency=0.0, launch_latency=0.0)
    auto, given = AutoStrategy(hardware=hardware), problem(7, heads=8, kv_heads=2)
    made = auto.plan(given)
    assert "then by bytes sent" in made.reason
    sent = {name: plan_cost(make_strategy(name).plan(given), hardware).sent for name in ("ring", "burst")}
    assert sent["ring"] < sent["burst"]
    assert plan_cost(made, hardware).sent == sent["ring"]


@pytest.mark.parametrize(
    ("mask", "ranks", "priced"),
    [
        (Mask.full(), 4, (0, 1, 2, 3)),
        (Mask.full(), 7, (0, 2, 4, 6)),
        (Mask.full(), 12, (0, 3, 7, 11)),
        # the ranks from 6 on have most pairs
        (Mask.documents((0, 80, 400, 480, 960), causal=False), 12, (0, 3, 6, 7, 11)),
        (Mask.documents((0, 80, 400, 960)), 12, (0, 3, 5, 7, 11)),  # the keys of rank 5 are visible to most queries
    ],
    ids=str,
)
def test_sampled_ranks_include_busiest_ranks(mask, ranks, priced):
    """Samples ranks at equal distances, that with most visible pairs of its queries, and that with most of its keys."""
    assert sampled_ranks(problem(ranks, mask=mask)) == priced


FASTEST = "ring(transfer=direct, prefetch_steps=4, blocks_per_launch=4, local_block_order=split)"


def test_auto_leaves_out_what_exceeds_the_memory_limit():
    """Eight blocks at once are predicted to be the fastest, and do not fit; with a lower limit only burst does."""
    given = problem(4, heads=8, kv_heads=8, length=1 << 16)
    labels = (FASTEST, "dispatch", "burst(transfer=direct)")
    sizes = {label: plan_memory(make_strategy(label).plan(given), range(4), COPIES.kernel) / 2**20 for label in labels}
    free = AutoStrategy(hardware=COPIES)
    limits = {label: AutoStrategy(hardware=COPIES, max_memory_mib=ceil(size)) for label, size in sizes.items()}
    assert limits[FASTEST].plan(given).label == free.plan(given).label == FASTEST
    for label in labels[1:]:
        made = limits[label].plan(given)
        assert made.label == label
        assert f"within max_memory_mib={limits[label].max_memory_mib}" in made.reason
        assert f"not {FASTEST}: it needs {sizes[FASTEST]:.3g} MiB" in made.reason
    label = limits["dispatch"].label
    assert make_strategy(label) == AutoStrategy(max_memory_mib=ceil(sizes["dispatch"]))


@pytest.mark.parametrize("ranks", [1, 4])
def test_auto_raises_if_nothing_fits_into_the_memory(ranks):
    given, auto = problem(ranks, heads=8, kv_heads=8, length=1 << 14), AutoStrategy(max_memory_mib=1)
    with pytest.raises(UnsupportedError, match=r"more memory than the limit.* per rank.*max_memory_mib=1; use"):
        auto.plan(given)
    with pytest.raises(UnsupportedError, match="max_memory_mib=1"):
        auto.check(given)


def test_auto_circulates_the_smaller_side():
    """MHA: burst sends fewer bytes in backward. GQA: K and V do. Ulysses cannot use 7 ranks."""
    mha, gqa = (bp.plan(seq_len=7 * 4096, ranks=7, heads=8, kv_heads=kv_heads) for kv_heads in (8, 2))
    assert mha.strategy == "burst"
    assert gqa.strategy == "ring"
    assert "chose burst" in mha.reason
    assert "ulysses cannot divide" in mha.reason


def test_auto_fetches_blocks_for_narrow_window():
    made = bp.plan(seq_len=7 * 4096, ranks=7, heads=8, kv_heads=2, mask=Mask.window(64))
    assert "transfer=direct" in made.label
