"""Predicted times: curves of links, rates by pass, and what `auto` makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

import burst_portable as bp
from burst_portable.backends.cuda.machines import rates_of_machine
from burst_portable.cost import Rates, plan_cost, rank_cost
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.registry import make_strategy

MIB = 1 << 20


def plan(strategy, ranks=8, **changes):
    usual = {"seq_len": 32768, "heads": 32, "kv_heads": 8, "layout": "zigzag"}
    return bp.plan(ranks=ranks, strategy=strategy, **{**usual, **changes})


def test_a_curve_is_read_by_size():
    rates = Rates(1.0, 1.0, hop_latency=1e-6, link=((MIB, 100.0), (4 * MIB, 200.0)), direct=((MIB, 400.0),))
    assert rates.transfer(MIB) == pytest.approx(MIB / 100e9)
    assert rates.transfer(2 * MIB) == pytest.approx(2 * MIB / 150e9)  # halfway by logarithm
    assert rates.transfer(64 * MIB) == pytest.approx(64 * MIB / 200e9)
    assert rates.transfer(4 * MIB, messages=4) == pytest.approx(4 * MIB / 100e9)
    assert rates.transfer(MIB, direct=True) == pytest.approx(MIB / 400e9)
    assert rates.transfer(1) == 1e-6


def test_what_leaves_a_node_takes_the_other_link():
    rates = Rates(1.0, 100.0, hop_latency=0.0, node=4, outer_gbps=10.0)
    assert [rates.apart(3, other) for other in (0, 2, 4, 7)] == [False, False, True, True]
    assert rates.transfer(MIB, outer=True) == pytest.approx(MIB / 10e9)
    # A rank of Ulysses sends four of seven parts to the other node, while three go round its own.
    made = bp.plan(seq_len=64, ranks=8, heads=8, kv_heads=8, head_dim=64, strategy="ulysses")
    forward = rank_cost(made, "forward", 0, rates)
    assert forward.link_seconds == pytest.approx(forward.sent * 4 / 7 / 10e9)
    # Two ranks a node: all that comes to rank 0 of the ring comes over the network, and half of it to rank 1 would.
    ring = bp.plan(
        seq_len=64, ranks=4, heads=8, kv_heads=8, head_dim=64, mask="full", layout="contiguous", strategy="ring"
    )
    two = replace(rates, node=2)
    first, second = (rank_cost(ring, "forward", rank, two) for rank in (0, 1))
    assert first.link_seconds == pytest.approx(first.received / 10e9)
    assert second.link_seconds == pytest.approx(second.received / 100e9)


def test_the_double_ring_hides_the_network():
    """32 ranks in nodes of 8: on one ring the network is asked by one rank a node, at every step."""
    rates = Rates(600.0, 300.0, node=8)
    usual = {"ranks": 32, "seq_len": 131072}
    seconds = {
        name: plan_cost(plan(make_strategy(name, **options), **usual), rates).seconds
        for name, options in (("ring", {}), ("burst", {}), ("double_ring", {"inner": 8, "travels": "kv"}))
    }
    assert seconds["double_ring"] < 0.8 * seconds["ring"] < seconds["burst"]
    reason = plan(AutoStrategy(inner=8, rates=replace(rates, node=0)), **usual).reason
    assert reason.startswith("chose double_ring+kv by predicted time, 50 GB/s between nodes of 8")


def test_passes_have_rates_of_their_own():
    rates = Rates(100.0, 1.0, launch_latency=1.0, backward=50.0, backward_launch_latency=2.0)
    assert rates.compute(1e14, "forward") == pytest.approx(2.0)
    assert rates.compute(1e14, "backward") == pytest.approx(4.0)
    assert Rates(100.0, 1.0, launch_latency=1.0).compute(1e14, "backward") == pytest.approx(2.0)


def test_more_ahead_is_never_predicted_slower_and_costs_memory():
    rates = rates_of_machine("NVIDIA H200", 8)
    for name in ("ring", "burst"):
        one, more = (plan_cost(plan(make_strategy(name, moves="fetch", ahead=n)), rates) for n in (1, 7))
        assert more.seconds <= one.seconds
        assert more.sent == one.sent
        assert more.per_rank["forward"][0].blocks_held > one.per_rank["forward"][0].blocks_held


def test_auto_on_a_known_machine():
    """Short sequences over many ranks: few launches win. Where peer copies cannot be had, nothing counts on them."""
    assert rates_of_machine("NVIDIA GeForce RTX 9090", 8) is None
    rates = rates_of_machine("NVIDIA H200", 8)
    reason = plan(AutoStrategy(rates=rates)).reason
    assert reason.startswith("chose ulysses by predicted time at rates of an H100's kernels and links of H200")
    assert "all ahead" in reason
    assert "all ahead" not in plan(AutoStrategy(rates=rates_of_machine("NVIDIA H100 80GB HBM3", 8))).reason
    window = plan(AutoStrategy(rates=rates), seq_len=131072, mask="window:4096", layout="contiguous").reason
    assert window.startswith("chose ring+fetch")
    few_heads = plan(AutoStrategy(rates=rates), seq_len=524288, heads=12, kv_heads=3).reason
    assert "not ulysses: " in few_heads
