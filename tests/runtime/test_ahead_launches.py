"""Test that a rehearsal makes the launches of a real call, with every strategy, on ragged shards in batches."""

from __future__ import annotations

import pytest
import torch

from burst_portable.backends.selection import load
from burst_portable.comm.agreement import call_signature
from burst_portable.comm.local import run_transports
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs, WrappedKernel
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.runtime.ahead import AbsentTransport, rehearse
from burst_portable.runtime.prepare import plan_for_kernel, prepared_call
from burst_portable.strategies.planner import cached_plan
from burst_portable.strategies.registry import classes

RANKS, LENGTH, HEADS, KV_HEADS, HEAD, VALUES = 4, 203, 8, 4, 16, 8
TRIALS = {one.label: one for strategy in classes().values() for one in strategy.trials()}
USUAL = ("burst", "ulysses", "usp")


class Recorder(WrappedKernel):
    """Compute with torch, and record the tensors of each launch: shape, strides, dtype and alignment."""

    def __init__(self):
        super().__init__(ReferenceKernel())
        self.traits = KernelTraits(writes_into=True, compiles_ahead=True)
        self.launches = []

    def note(self, name, *tensors):
        facts = [x if x is None else (x.shape, x.stride(), x.dtype, x.data_ptr() % 16) for x in tensors]
        self.launches.append((name, facts))

    def attend(self, q, k, v, tiles, call, *, state=None, yields_to_comm=False):
        self.note("attend", q, k, v, *(state or ()))
        return super().attend(q, k, v, tiles, call, state=state)

    def attend_into(self, q, k, v, tiles, call, out, lse, *, yields_to_comm=False):
        self.note("attend_into", q, k, v, out, lse)
        for target, made in zip((out, lse), super().attend(q, k, v, tiles, call), strict=True):
            target.copy_(made)

    def forward_single_call(self, q, k, v, tiles, call, *, yields_to_comm=False):
        self.note("forward_single_call", q, k, v)
        return super().forward_single_call(q, k, v, tiles, call)

    def attend_backward(self, x: BackwardInputs, tiles, call, *, into):
        self.note("attend_backward", *x, *into)
        super().attend_backward(x, tiles, call, into=into)

    def backward_single_call(self, x, tiles, call):
        self.note("backward_single_call", *x)
        return super().backward_single_call(x, tiles, call)

    def row_delta(self, dout, out):
        self.note("row_delta", dout, out)
        return super().row_delta(dout, out)


def tensors(rows, device, *, sinks):
    shapes = ((HEADS, HEAD), (KV_HEADS, HEAD), (KV_HEADS, VALUES), (HEADS, VALUES))
    q, k, v, dout = (torch.zeros(2, rows, *shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return (q, k, v, torch.zeros(HEADS, device=device) if sinks else None), dout


@pytest.mark.parametrize("sinks", [False, pytest.param(True, marks=pytest.mark.full)], ids=["", "sinks"])
@pytest.mark.parametrize("label", [pytest.param(one, marks=[pytest.mark.full] * (one not in USUAL)) for one in TRIALS])
def test_rehearse_makes_launches_of_real_ranks(label, sinks):
    layout = make_layout("zigzag", LENGTH, RANKS)
    (q, k, v, _), _ = tensors(LENGTH, "meta", sinks=False)
    call = AttentionCall.of(q, k, v, mask=Mask.window(70), layout=layout, sinks=sinks, device="cpu")
    try:
        plan = plan_for_kernel(cached_plan(TRIALS[label], call), Recorder())
    except UnsupportedError as error:
        pytest.skip(str(error))
    if plan.score_rows:
        pytest.skip("it has no kernel")

    def prepared(transport):
        return prepared_call(plan, load("cpu"), Recorder(), transport, call_signature({}), with_lse=False)

    def rank(transport):
        made = prepared(transport)
        inputs, dout = tensors(layout.count(transport.rank), "cpu", sinks=sinks)
        _, _, saved = made.executor.forward(made, *inputs, keep=True)
        made.executor.backward(made, saved, inputs[-1], dout)
        return made.kernel.launches

    for number, launches in enumerate(run_transports(RANKS, rank)):
        made = prepared(AbsentTransport(number, RANKS))
        inputs, _ = tensors(layout.count(number), "meta", sinks=sinks)
        rehearse(made, *inputs, gradients=True)
        assert len(launches) >= 2
        assert made.kernel.launches == launches
