"""Call a kernel several times with equal shapes: each call must use its own inputs and settings, and keep its results.

A kernel that keeps buffers or compiled settings by shape passes every test of a single call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.conformance import oracle
from burst_portable.conformance.base import BackendUnderTest, Outcome
from burst_portable.conformance.cases import SEED, Case
from burst_portable.conformance.checks.comparison import compare
from burst_portable.conformance.kernel_runs import run_kernel, run_single_call
from burst_portable.conformance.oracle import Inputs, make_inputs
from burst_portable.conformance.running import serves
from burst_portable.kernels.base import BackwardInputs, Kernel, LazyKernel, WrappedKernel
from burst_portable.kernels.checked_kernel import CheckedKernel, support_of
from burst_portable.numerics import State
from burst_portable.planning.call import Dropout
from burst_portable.planning.tiles import find_tiles


class _OtherDropout(Case):
    """A case whose dropout has another seed and another first head."""

    @property
    def dropout_settings(self) -> Dropout | None:
        return Dropout(self.dropout, first_head=11, seed=SEED ^ 0x7777_7777_7777) if self.dropout else None


class _Yielding(WrappedKernel):
    """A kernel that is called with `yields_to_comm=True`."""

    def attend(self, *args: Any, **options: Any) -> State:
        return super().attend(*args, **{**options, "yields_to_comm": True})

    def forward_single_call(self, *args: Any, **options: Any) -> State:
        return super().forward_single_call(*args, **{**options, "yields_to_comm": True})


def run_repeated(target: BackendUnderTest, kernel: Kernel | LazyKernel, choices: dict[str, Any]) -> Outcome:
    """Run a kernel repeatedly on one block. `choices`: the plainest that the kernel supports."""
    case, device = Case("causal", "contiguous", ranks=1, **choices), target.device
    if not (support := support_of(kernel, case.make_call(device.type))).ok:
        return Outcome(skipped=support.reason)
    loaded = kernel.load()
    outcome = Outcome()
    for how, other in _settings(case):
        if serves(kernel, other, device.type):
            outcome = _compare(loaded, other, how, device)
            if not outcome.ok:
                return outcome
    yielding = _compare(_Yielding(loaded), case, "with yields_to_comm=True", device)
    if not yielding.ok:
        return yielding
    inputs = [make_inputs(case, seed) for seed in (0, 1)]
    wrong = find_wrong_delta(loaded, case, inputs[0], device) or find_changed(loaded, case, inputs, device)
    return replace(outcome, wrong=wrong)


def _settings(case: Case) -> Iterator[tuple[str, Case]]:
    """Yield cases of equal shapes that differ in one setting, and the setting."""
    yield "", case
    yield from (("with another softcap", replace(case, softcap=softcap)) for softcap in (5.0, 50.0))
    yield from (("with another scale", replace(case, scale=scale)) for scale in (0.2, 0.1))
    yield from (("with another probability of dropout", replace(case, dropout=p)) for p in (0.3, 0.6))
    yield "with another seed and first head of dropout", _OtherDropout(**{**vars(case), "dropout": 0.6})
    yield "again without these settings", case


def _compare(kernel: Kernel, case: Case, how: str, device: torch.device) -> Outcome:
    """Compare the results of both ways to call a kernel."""
    x = make_inputs(case, seed=2)
    outcome = Outcome()
    ways: tuple[tuple[str, Callable[..., oracle.Answer]], ...] = (
        ("", run_kernel),
        ("as a single call", run_single_call),
    )
    for way, run in ways:
        outcome = compare(case, x, run(kernel, case, x, device), kernel.traits.rounding)
        if not outcome.ok:
            place = " ".join(filter(None, ("after other calls of the same shapes,", how, way)))
            return Outcome(outcome.errors, f"{place}: {outcome.wrong}".strip(": "))
    return outcome


def find_wrong_delta(kernel: Kernel, case: Case, x: Inputs, device: torch.device) -> str:
    """Return what is wrong with `row_delta`; "" if nothing is."""
    values = x.dout * 2 + x.dout.flip(1)  # positive products mostly, so that sums do not cancel
    found = CheckedKernel(kernel).row_delta(x.dout.to(device), values.to(device))
    exact = (x.dout.double() * values.double()).sum(-1).transpose(1, 2)
    error, allowed = oracle.relative_error(found, exact), oracle.FLOOR[numerics.accumulation_dtype(case.dtype)]
    return "" if error <= allowed else f"error of row_delta is {error:.2g}; allowed: {allowed:.2g}"


def find_changed(kernel: Kernel, case: Case, inputs: Sequence[Inputs], device: torch.device) -> str:
    """Return which result of a call was changed by the next call of the same shapes; "" if none was."""
    layout, call = case.make_layout(), case.make_call(device.type)
    tiles = find_tiles(case.make_mask(), layout.shards[0], layout.shards[0])
    kernel = CheckedKernel(kernel)
    before: dict[str, tuple[Tensor, Tensor]] = {}
    for x in inputs:
        q, k, v, dout = (t.to(device) for t in (x.q, x.k, x.v, x.dout))
        found = dict(zip(("out of attend", "lse of attend"), kernel.attend(q, k, v, tiles, call), strict=True))
        state = kernel.forward_single_call(q, k, v, tiles, call)
        found |= zip(("out of forward_single_call", "lse of forward_single_call"), state, strict=True)
        out, lse = numerics.finished((state[0].clone(), state[1].clone()), case.dtype)
        backward = BackwardInputs(dout, q, k, v, lse, out.to(case.dtype))
        names = [f"{name} of backward_single_call" for name in ("dq", "dk", "dv")]
        found |= zip(names, kernel.backward_single_call(backward, tiles, call), strict=True)
        found["delta of row_delta"] = kernel.row_delta(dout, out.to(case.dtype))
        for name, (result, copy) in before.items():
            if not torch.equal(result, copy):
                return f"{name} was changed by the next call of the same shapes; return new tensors"
        before = {name: (result, result.clone()) for name, result in found.items()}
    return ""
