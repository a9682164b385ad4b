"""Test a ring that computes the local block in two parts around the remote blocks, against float64, with late ranks."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from tests.support.attention_cases import expected, make_inputs, on_one_rank
from tests.support.thread_peers import World, run_peers

SPLIT = "ring(transfer=direct, prefetch_steps=64, blocks_per_launch=64, local_block_order=split)"
CASES = [
    Case(strategy=SPLIT, ranks=2, heads="gqa", length=701),
    pytest.param(
        Case(strategy=SPLIT, ranks=3, heads="mqa", length=907, layout="contiguous", batch=1), marks=pytest.mark.full
    ),
    pytest.param(
        Case(strategy=SPLIT, ranks=3, heads="mha", length=800, layout="striped", mask="full", batch=1),
        marks=pytest.mark.full,
    ),
    Case(strategy=SPLIT, ranks=2, heads="wide_values", length=641, dtype=torch.bfloat16, sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ring_with_split_local_block_matches_oracle(case):
    """Blocks are sent as messages and by peer copies."""
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)
    heads, kv_heads, dim, v_head_dim = case.sizes
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "v_head_dim": v_head_dim}
    made = bp.plan(
        seq_len=case.length, ranks=case.ranks, mask=case.make_mask(), layout=case.make_layout(),
        strategy=case.make_strategy(), **sizes,
    )  # fmt: skip
    computed = [s.compute.k_owners for s in made.backward.steps_of(case.ranks - 1) if s.compute]
    assert computed[0] == computed[-1] == (case.ranks - 1,), "the case is one where it is divided"

    def work(mesh):
        return on_one_rank(mesh, case, inputs)

    world = World(case.ranks, delay=2e-3, seed=1)
    for answer in [*run_peers(world, work), *bp.run_threads(case.ranks, work)]:
        assert find_violations(answer, exact, plain, case.dtype) == {}
