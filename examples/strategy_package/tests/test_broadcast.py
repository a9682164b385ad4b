"""The plans of `broadcast`, and its trials: attention over ranks as threads, against attention in float64."""

from __future__ import annotations

import burst_portable as bp
from burst_portable.conformance import check_backend
from burst_portable.planning.cost import rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.verify import verify


def test_one_rank_sends_at_each_step():
    plan = bp.plan(seq_len=1000, ranks=4, heads=4, strategy="broadcast", mask="full")
    assert verify(plan) == []
    for _, pass_plan in plan.passes():
        for rank in range(4):
            steps = pass_plan.steps_of(rank)
            assert [step.index for step in steps if step.sends] == [rank]
            assert [step.compute.k_owners for step in steps if step.compute] == [(0,), (1,), (2,), (3,)]


def test_a_rank_sends_the_bytes_of_a_ring():
    hardware = HardwareSpec(tflops=1.0, intra_node_bandwidth=1.0)
    plans = [bp.plan(seq_len=1000, ranks=4, heads=4, strategy=name, mask="full") for name in ("broadcast", "ring")]
    for name, _ in plans[0].passes():
        ours, ring = ([rank_cost(plan, name, rank, hardware).sent for rank in range(4)] for plan in plans)
        assert ours == ring


def test_broadcast_conforms():
    report = check_backend("cpu", strategy="broadcast", coverage="quick", ranks=4)
    assert report.ok, [result.message for result in report.failures]
