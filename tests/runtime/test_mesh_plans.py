"""Test `plan_for_mesh`: it returns the layout of sharding and attention, equal on every rank, without tensors."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance import oracle
from burst_portable.errors import InputError, UnknownNameError
from burst_portable.runtime import prepare

LENGTH = 53
SIZES = {"seq_len": LENGTH, "heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("mask", ["causal", "window:9", bp.Mask.documents((0, 6, 30, 31, 53))], ids=str)
def test_plan_for_mesh_layout_works_in_shard_and_attention(mask):
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, LENGTH, n, 16, generator=generator, dtype=torch.float64) for n in (4, 2, 2, 4))
    made = bp.Mask.parse(mask, LENGTH) if isinstance(mask, str) else mask
    seen = oracle.dense_mask(made, LENGTH)
    exact = oracle.attention(q, k, v, dout, seen, scale=0.25, dtype=torch.float64)

    def work(mesh):
        plan = bp.plan_for_mesh(mesh, mask=mask, dtype=torch.float64, device="cpu", **SIZES)
        where = plan.layout
        mine = [bp.shard(x, mesh, layout=where).requires_grad_() for x in (q, k, v)]
        out = bp.attention(*mine, mask=mask, mesh=mesh, layout=where)
        out.backward(bp.shard(dout, mesh, layout=where))
        ran = bp.explain(*mine, mask=mask, mesh=mesh, layout=where)
        assert plan.reason.endswith(ran.strategy.why)  # the call makes the same choice
        results = (out, *(x.grad for x in mine))
        return plan, [bp.unshard(x.detach(), mesh, seq_len=LENGTH, layout=where) for x in results]

    plans, answers = zip(*bp.run_threads(3, work), strict=True)
    assert len(set(plans)) == 1
    for answer in answers:
        for found, right in zip(answer, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
            torch.testing.assert_close(found, right, atol=1e-10, rtol=1e-10)


def test_plan_for_mesh_equals_plan_of_call(monkeypatch):
    """All sizes differ; the hardware spec is that of the same kernel, dtype and head size."""
    asked, hardware_of = [], prepare.hardware_of

    def noted(backend, ranks, kernel, *given, **more):
        asked.append((ranks, kernel.name, *given))
        return hardware_of(backend, ranks, kernel, *given, **more)

    monkeypatch.setattr(prepare, "hardware_of", noted)

    def work(mesh):
        q, k, v = (torch.ones(3, 10, heads, dim) for heads, dim in ((8, 16), (2, 16), (2, 12)))
        bp.attention(q, k, v, mask="full", mesh=mesh, layout="striped")
        (call,) = mesh._calls.values()
        made = bp.plan_for_mesh(
            mesh, seq_len=20, heads=8, kv_heads=2, head_dim=16, v_head_dim=12, mask="full", layout="striped", batch=3,
            dtype=torch.float32, device="cpu",
        )  # fmt: skip
        return made == call.plan

    assert bp.run_threads(2, work) == [True, True]
    assert len(asked) == 4
    assert set(asked) == {(2, asked[0][1], "", "float32", 16)}


def test_plan_for_mesh_keeps_named_layout_and_strategy():
    def work(mesh):
        plan = bp.plan_for_mesh(mesh, layout="striped", strategy="burst", **SIZES)
        return plan.layout.name, plan.strategy

    assert bp.run_threads(2, work) == [("striped", "burst")] * 2


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"layout": "zigzig"}, UnknownNameError, "did you mean 'zigzag'"),
        ({"kernel": "none"}, UnknownNameError, "kernel"),
        ({"kernel": "none", "strategy": "ring"}, UnknownNameError, "kernel"),
        ({"deterministic": "no"}, InputError, "deterministic must be a bool or None; got 'no'"),
        ({"dtype": 2}, InputError, "dtype"),
        ({"device": "cpus"}, InputError, "device"),
        ({"kv_heads": 3}, InputError, "multiple"),
    ],
)
def test_plan_for_mesh_rejects_invalid_arguments(change, error, told):
    with pytest.raises(error, match=told):
        bp.plan_for_mesh(**{**SIZES, **change})


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ring", marks=pytest.mark.full),
        pytest.param("ulysses", marks=pytest.mark.full),
        bp.make_strategy("ring", transfer="direct", prefetch_steps=4, blocks_per_launch=4),
    ],
)
def test_whole_documents_layout_matches_oracle(strategy):
    """One document is split into whole blocks and a rest; ranks hold different numbers of rows."""
    ends = (0, 7, 663, 664, 760, 800, 843)
    mask, generator = bp.Mask.documents(ends), torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, ends[-1], n, 8, generator=generator) for n in (4, 2, 2, 4))
    seen = oracle.dense_mask(mask, ends[-1])
    exact = oracle.attention(q, k, v, dout, seen, scale=8**-0.5, dtype=torch.float64)
    where = bp.make_layout("whole_documents", ends[-1], 2, mask)
    assert where.shards[0][:2] == (bp.Segment(7, 256), bp.Segment(519, 128))
    assert where.shards[1][:2] == (bp.Segment(263, 256), bp.Segment(647, 16))
    assert where.count(0) != where.count(1)

    def work(mesh):
        mine = [bp.shard(x, mesh, layout=where).requires_grad_() for x in (q, k, v)]
        out = bp.attention(*mine, mask=mask, mesh=mesh, strategy=strategy, layout=where)
        out.backward(bp.shard(dout, mesh, layout=where))
        return [bp.unshard(x.detach(), mesh, seq_len=ends[-1], layout=where) for x in (out, *(x.grad for x in mine))]

    for answer in bp.run_threads(2, work):
        for found, right in zip(answer, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
            torch.testing.assert_close(found.double(), right, atol=2e-5, rtol=2e-5)
