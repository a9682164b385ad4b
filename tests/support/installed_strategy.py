"""Print results of the strategy of `examples/strategy_package` as JSON, in a process in which it is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import torch

import burst_portable as bp
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.auto import AutoStrategy
from tests.support.attention_cases import expected, make_inputs, on_one_rank

NAME = "broadcast"
MASKS = ("causal", "window", "documents", "custom")
LAYOUTS = ("zigzag", "contiguous", "striped")


def wrong_cases() -> list[str]:
    """Return the cases that differ from attention in float64; lengths are ragged, K and V have fewer heads than Q."""
    wrong = []
    base = Case(strategy=NAME, dtype=torch.float64, sinks=True)
    cases = [replace(base, mask=m, layout=x, ranks=n) for m, x, n in product(MASKS, LAYOUTS, (1, 2, 3, 4))]
    cases += [replace(base, ranks=3, heads=heads) for heads in ("mqa", "mha", "wide_values")]
    cases += [Case(strategy=NAME, ranks=3, dtype=torch.bfloat16, mask=mask) for mask in MASKS]
    for case in cases:
        inputs = make_inputs(case)
        answers = bp.run_threads(case.ranks, lambda mesh, c=case, x=inputs: on_one_rank(mesh, c, x))
        if find_violations(answers[0], *expected(case, inputs), case.dtype):
            wrong.append(str(case))
    return wrong


def attend(mesh: bp.Mesh) -> str:
    """Make a call and return the text of `explain`."""
    q = torch.randn(1, 16, 4, 8, requires_grad=True)
    call = {"mesh": mesh, "strategy": NAME, "seq_len": 16 * mesh.size}
    bp.attention(q, q, q, **call).sum().backward()
    return str(bp.explain(q, q, q, **call))


def main() -> None:
    hardware = HardwareSpec(tflops=100.0, intra_node_bandwidth=10.0, peer_copy_bandwidth=((1 << 20, 10.0),))
    size = {"seq_len": 4096, "ranks": 4, "heads": 8}
    with bp.profile() as session:
        explained = bp.run_threads(2, attend)[0]
    report = session.report()
    assert report is not None
    facts = {
        "reason": bp.plan(**size, strategy=AutoStrategy(hardware=hardware)).reason,
        "explained": explained,
        "profiled": [plan["strategy"] for plan in report.data["plans"]],
        "wrong": wrong_cases(),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
