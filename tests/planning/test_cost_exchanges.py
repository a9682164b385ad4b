"""Test predicted times of exchanges between head shards and sequence shards against hand-computed values."""

from __future__ import annotations

from dataclasses import replace

import pytest

import burst_portable as bp
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.registry import make_strategy

MIB = 1 << 20


def ulysses(ranks, seq_len, heads=8, kv_heads=8, head_dim=64, groups=1):
    strategy = make_strategy("ulysses", head_groups=groups)
    return bp.plan(
        seq_len=seq_len, ranks=ranks, heads=heads, kv_heads=kv_heads, head_dim=head_dim, mask="full",
        layout="contiguous", strategy=strategy,
    )  # fmt: skip


@pytest.mark.parametrize("rank", range(8))
def test_exchange_cost_separates_parts_between_nodes(rank):
    """Three of seven parts stay in a node of four; with one rank per node all of them cross."""
    made, hardware = (
        ulysses(8, 64),
        HardwareSpec(1.0, 100.0, message_latency=0.0, ranks_per_node=4, inter_node_bandwidth=10.0),
    )
    for changes, share, intra_node_bandwidth in (
        ({}, 4 / 7, 10),
        ({"inter_node_bandwidth": 1e3}, 3 / 7, 100),
        ({"ranks_per_node": 1}, 1, 10),
    ):
        for link in ((), ((1, 100.0),)):
            found = rank_cost(made, "forward", rank, replace(hardware, p2p_bandwidth=link, **changes))
            assert found.link_seconds == pytest.approx(found.sent * share / (intra_node_bandwidth * 1e9))


def test_exchange_cost_of_sequential_or_concurrent_parts():
    """Four ranks of 1,024 rows: 1 MiB of Q, K and V to each of three others, half as much back."""
    made = ulysses(4, 4096, kv_heads=4, head_dim=128)
    link, spread = ((MIB, 100.0), (3 * MIB, 200.0)), ((MIB * 3 // 2, 100.0), (3 * MIB, 300.0))
    one = HardwareSpec(1.0, 1.0, message_latency=0.0, p2p_bandwidth=link)
    assert rank_cost(made, "forward", 0, one).link_seconds == pytest.approx(4.5 * MIB / 100e9)
    several = rank_cost(made, "forward", 0, replace(one, all_to_all_bandwidth=spread))
    assert several.link_seconds == pytest.approx(3 * MIB / 300e9 + 1.5 * MIB / 100e9)


def test_head_groups_overlap_exchanges_with_kernels():
    """Two ranks with four query heads and one K/V head each have two groups that compute for three seconds each.

    Two heads of Q take one second. K and V also take one second and arrive with the first group. The first group
    arrives at 2 and the second one at 3. Kernels run from 2 to 8. The output of the second group takes one more second,
    so the pass ends at 9.
    """
    made = ulysses(2, 64, kv_heads=2, groups=2)
    flops, size = 4 * 64 * 64 * 2 * 64, 32 * 2 * 64 * 2
    hardware = HardwareSpec(flops / 3e12, size / 1e9, 0.0, 0.0)
    forward = rank_cost(made, "forward", 0, hardware)
    assert forward.seconds == pytest.approx(9.0)
    assert (forward.compute_seconds, forward.link_seconds) == (pytest.approx(6.0), pytest.approx(5.0))
    assert (forward.launches, forward.tiles, forward.messages, forward.flops) == (2, 2, 4, 2 * flops)
    quick = replace(hardware, tflops=1.0)  # no compute hides the exchanges, which run in sequence
    assert rank_cost(made, "forward", 0, quick).seconds == pytest.approx(5.0, rel=1e-3)
    rows, numbers = 64 * 2, 64 * 2 * 64  # of a group: its LSE; its Q or out, each as large as K and V
    assert forward.memory == 2 * (2 * 2 * numbers + 4 * (numbers + rows))


def test_comm_slowdown_delays_kernels_of_head_groups():
    """Backward: dO arrives at 1 and at 2. Two kernels of 7.5 s each lose half a second to concurrent transfers.

    These are dO of the second group, and then dQ of the first. The dQ, dK and dV after the last kernel take two more
    seconds.
    """
    made = ulysses(2, 64, kv_heads=2, groups=2)
    flops, size = 4 * 64 * 64 * 2 * 64, 32 * 2 * 64 * 2
    hardware = HardwareSpec(flops / 3e12, size / 1e9, 0.0, 0.0, comm_slowdown=(0.0, 0.5))
    assert rank_cost(made, "backward", 0, hardware).seconds == pytest.approx(1 + 8 + 8 + 2)


def test_exchange_cost_includes_copy_of_results():
    """Packing Q, K and V takes 3 s and sending them 3 s; out takes 1 s, and its copy 1 s."""
    made, tensor = ulysses(2, 64), 32 * 8 * 64 * 2
    hardware = HardwareSpec(1e9, tensor / 2e9, 0.0, 0.0, memory_bandwidth=2 * tensor / 1e9)
    assert rank_cost(made, "forward", 0, hardware).seconds == pytest.approx(3 + 3 + 1 + 1, rel=1e-6)


def test_direct_exchange_skips_packing_if_all_is_direct():
    """In backward on two nodes of two, dO is read in place if blocks between nodes are direct too."""
    hardware = HardwareSpec(1e9, 1e9, 0.0, 0.0, memory_bandwidth=1e-9)
    packed = 2 * 32 * 4 * 64 * 2
    for moves, saved in (("ring", 0), ("direct", packed)):
        made = bp.plan(
            seq_len=64 * 2, ranks=4, heads=8, kv_heads=8, head_dim=64, mask="full", layout="contiguous",
            strategy=make_strategy("usp", ranks_per_node=2, transfer=moves),
        )  # fmt: skip
        plain, direct = (
            rank_cost(made, "backward", 0, replace(hardware, peer_copy_bandwidth=curve)).seconds
            for curve in ((), ((1, 1e9),))
        )
        assert plain - direct == pytest.approx(2 * saved, rel=1e-6)


def test_one_rank_exchanges_nothing():
    alone = rank_cost(ulysses(1, 64), "forward", 0, HardwareSpec(1.0, 1.0))
    assert (alone.sent, alone.received, alone.link_seconds) == (0, 0, 0.0)
