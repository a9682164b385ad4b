"""Compare the predicted peak memory of each strategy with the peak of live tensors, counted by operation."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import STRATEGIES
from burst_portable.kernels.base import Kernel, Support
from burst_portable.kernels.score_kernel import ScoreRowKernel
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.memory import peak_memory, plan_memory
from burst_portable.planning.plans import PASSES
from tests.support.live_memory import LiveMemory
from tests.support.seams import calls_with

RANKS, LENGTH, DIM = 4, 1024, 32


@dataclass(frozen=True)
class Call:
    heads: int
    kv_heads: int
    dtype: torch.dtype
    batch: int
    mask: str
    layout: str


CALLS = (
    Call(8, 8, torch.float32, 1, "causal", "zigzag"),
    Call(8, 2, torch.bfloat16, 1, "causal", "zigzag"),
    Call(8, 4, torch.bfloat16, 2, "window:300", "striped"),
    Call(8, 8, torch.float32, 2, "full", "contiguous"),
)


class ResultsOnly(Kernel):
    """Allocate results and nothing else, as kernels do that compute in registers. The numbers are undefined."""

    name = "results_only"

    def supports(self, call):
        return Support(True)

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        return self._results(q, v, accumulation_dtype(q.dtype)) if state is None else state

    def forward_single_call(self, q, k, v, tiles, call, *, yields_to_comm=False):
        return self._results(q, v, q.dtype)

    def attend_backward(self, x, tiles, call, *, into):
        pass

    def row_delta(self, dout, out):
        return self._results(out, out, out.dtype)[1]

    def _results(self, q, v, dtype):
        batch, rows, heads, _ = q.shape
        wide = accumulation_dtype(q.dtype)
        return q.new_empty((batch, rows, heads, v.shape[-1]), dtype=dtype), q.new_empty(
            (batch, heads, rows), dtype=wide
        )


def measured(strategy, call, ranks=RANKS):
    """Return (forward peak, backward peak) in bytes of each rank, with q, k, v and dO."""
    sizes = (call.heads, call.kv_heads, call.kv_heads, call.heads)
    whole = [torch.ones(call.batch, LENGTH, heads, DIM, dtype=call.dtype) for heads in sizes]

    def work(mesh):
        q, k, v, dout = (bp.shard(x, mesh, layout=call.layout).clone() for x in whole)
        inputs = sum(x.nbytes for x in (q, k, v))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        options = {"mask": call.mask, "layout": call.layout, "seq_len": LENGTH, "strategy": strategy}
        if strategy.name != "ring_self_attention":
            options["kernel"] = "reference"
        with LiveMemory() as memory:
            out = bp.attention(q, k, v, mesh=mesh, **options)
            forward, memory.peak = memory.peak, 0
            torch.autograd.backward(out, dout)
        return forward + inputs, memory.peak + inputs + dout.nbytes

    with calls_with(kernel=lambda kernel: kernel if isinstance(kernel, ScoreRowKernel) else ResultsOnly()):
        return bp.run_threads(ranks, work)


def planned(strategy, call, ranks=RANKS):
    sizes = {"heads": call.heads, "kv_heads": call.kv_heads, "head_dim": DIM, "batch": call.batch}
    options = {"mask": call.mask, "layout": call.layout, "itemsize": call.dtype.itemsize, "strategy": strategy}
    return bp.plan(seq_len=LENGTH, ranks=ranks, **sizes, **options)


NAMED = {label: one for label, one in STRATEGIES.items() if one.name != "auto"}  # it makes the plan of another one


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)], ids=["in turn", "every"])
@pytest.mark.parametrize("label", NAMED)
def test_planned_peak_is_the_measured_one(label, every):
    """It is never below, and at most a tenth above. Memory inside a kernel is not counted."""
    strategy, turn = NAMED[label], list(NAMED).index(label) % 2
    for call in CALLS if every else CALLS[turn::2]:
        plan = planned(strategy, call)
        for rank, peaks in enumerate(measured(strategy, call)):
            for name, peak in zip(PASSES, peaks, strict=True):
                assert 0.9 * peak_memory(plan, name, rank) <= peak <= peak_memory(plan, name, rank), (call, rank, name)


ON_ONE_RANK = [label for label, one in NAMED.items() if getattr(one, "ranks_per_node", None) is None]


@pytest.mark.parametrize("label", ON_ONE_RANK)
def test_one_rank_needs_no_memory_for_messages(label):
    """Nothing is sent, so every strategy but the one that stores scores has the peak of `ring`."""
    strategy, call = NAMED[label], CALLS[1]
    plan = planned(strategy, call, ranks=1)
    ((forward, backward),) = measured(strategy, call, ranks=1)
    for name, peak in (("forward", forward), ("backward", backward)):
        assert 0.9 * peak_memory(plan, name, 0) <= peak <= peak_memory(plan, name, 0), name
        if not plan.score_rows:
            assert peak_memory(plan, name, 0) == peak_memory(planned(NAMED["ring"], call, ranks=1), name, 0)


def test_plan_memory_is_the_largest_peak():
    plan = planned(NAMED["burst"], CALLS[0])
    peaks = [peak_memory(plan, name, rank) for name, rank in itertools.product(PASSES, range(RANKS))]
    assert plan_memory(plan, range(RANKS)) == max(peaks) > min(peaks)
