"""Test what `auto` compares: each label matches its strategy, bytes break ties, and few of many ranks are costed."""

from __future__ import annotations

import pytest

import burst_portable as bp
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.auto import AutoStrategy, sampled_ranks
from burst_portable.strategies.registry import make_strategy

COPIES = HardwareSpec(tflops=400.0, intra_node_bandwidth=100.0, peer_copy_bandwidth=((1, 100.0),))
ALWAYS = {"ring", "burst", "ring+fetch", "ring+fetch, own last", "burst+fetch", "ulysses"}
MEASURED = {
    "ring+fetch, all ahead", "ring+fetch, all ahead, own last", "ring+fetch, all together",
    "ring+fetch, all together, own last", "ring+fetch, all together, own divided", "burst+fetch, all ahead",
    "burst+fetch, all together", "ulysses, 2 groups", "ulysses, 4 groups",
}  # fmt: skip
TABLED = {"ring", "burst", "double_ring", "ulysses", "usp"}  # tests of further strategies are in their own files


def problem(
    ranks: int, heads: int = 96, kv_heads: int = 96, mask: Mask | None = None, length: int = 960
) -> AttentionCall:
    mask = mask or Mask.full()
    where = make_layout("contiguous", length, ranks, mask)
    return AttentionCall(mask, where, heads, kv_heads, 64, 64)


def called(label: str, ranks: int, node: int) -> object:
    """Return the strategy of a label, from its words."""
    words = {
        "fetch": {"transfer": "direct"},
        "all ahead": {"prefetch_steps": ranks},
        "all together": {"prefetch_steps": ranks, "blocks_per_launch": ranks},
        "own last": {"local_block_order": "last"},
        "own divided": {"local_block_order": "split"},
        "2 groups": {"head_groups": 2},
        "4 groups": {"head_groups": 4},
        "kv": {"backward_circulates": "kv"},
        "q": {"backward_circulates": "q"},
    }
    first, *more = label.split(", ")
    name, *how = first.split("+")
    name, _, part = name.partition(" in ")
    words["window"] = {"ring_window": node // int(part or node)} if node else {}
    ranks_per_node = {"ranks_per_node": int(part or node)} if name in ("double_ring", "usp") else {}
    return make_strategy(
        name, **ranks_per_node, **{key: value for word in (*how, *more) for key, value in words[word].items()}
    )


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "hardware", "heads", "expected"),
    [
        (8, None, HardwareSpec(400.0, 100.0), 96, ALWAYS),
        (8, None, COPIES, 96, ALWAYS | MEASURED),
        (24, None, COPIES, 96, ALWAYS | {"ulysses, 2 groups", "ulysses, 4 groups"}),  # too many blocks for the memory
        (8, 4, COPIES, 96, ALWAYS | {"double_ring", "double_ring+kv", "usp", "usp+q", "usp+fetch"}),
        (
            8,
            4,
            COPIES,
            6,
            ALWAYS | {"double_ring", "double_ring+kv", "usp in 2", "usp in 2+q", "usp in 2+fetch", "usp in 2+window"},
        ),
        (8, 8, HardwareSpec(400.0, 100.0), 96, ALWAYS | {"double_ring", "double_ring+kv"}),
    ],
)
def test_auto_candidates_have_matching_labels(ranks, ranks_per_node, hardware, heads, expected):
    candidates, _ = AutoStrategy(ranks_per_node=ranks_per_node, hardware=hardware).list_candidates(
        problem(ranks, heads, heads)
    )
    known = {label: strategy for label, strategy in candidates.items() if strategy.name in TABLED}
    assert known.keys() == expected
    for label, strategy in known.items():
        assert strategy == called(label, ranks, ranks_per_node or 0), label


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


def test_auto_circulates_the_smaller_side():
    """MHA: burst sends fewer bytes in backward. GQA: K and V do. Ulysses cannot use 7 ranks."""
    mha, gqa = (bp.plan(seq_len=7 * 4096, ranks=7, heads=8, kv_heads=kv_heads) for kv_heads in (8, 2))
    assert mha.strategy == "burst"
    assert gqa.strategy == "ring"
    assert "chose burst" in mha.reason
    assert "ulysses cannot divide" in mha.reason


def test_auto_fetches_blocks_for_narrow_window():
    made = bp.plan(seq_len=7 * 4096, ranks=7, heads=8, kv_heads=2, mask=Mask.window(64))
    assert "fetch" in made.reason.split(" by ")[0]
