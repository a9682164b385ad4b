"""The plans of `all_gather`, and its trials: attention over ranks as threads, against attention in float64."""

from __future__ import annotations

import burst_portable as bp
from burst_portable.conformance import check_backend
from burst_portable.planning.verify import verify


def test_all_gather_computes_once_per_rank():
    plan = bp.plan(seq_len=1000, ranks=4, heads=4, strategy="all_gather", mask="full")
    assert verify(plan) == []
    for _, pass_plan in plan.passes():
        (compute,) = (step.compute for step in pass_plan.steps_of(1) if step.compute)
        assert compute.k_owners == (0, 2, 3, 1)  # its own block is the last


def test_all_gather_conforms():
    report = check_backend("cpu", strategy="all_gather", coverage="quick", ranks=4)
    assert report.ok, [result.message for result in report.failures]
