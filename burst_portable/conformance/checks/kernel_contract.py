"""Every kernel of the backend by name, through the contract alone: also those that are never chosen here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from burst_portable.conformance.cases import (
    DTYPES,
    HEADS,
    LENGTH,
    MASKS,
    MEMORY,
    SCALES,
    VALUES,
    Axes,
    Case,
    Choices,
    covering,
)
from burst_portable.conformance.checks.attention import HEAD_SIZES, grown, judged
from burst_portable.conformance.oracle import Answer, Inputs, make_inputs
from burst_portable.conformance.running import Trespass, run_kernel, run_whole, serves
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.layout import NAMES as LAYOUTS

NAME = "kernels"
AXES: Axes = {
    "mask": tuple(MASKS),
    "layout": LAYOUTS,
    "ranks": (1, 2, 3),
    "heads": tuple(HEADS),
    "dtype": tuple(DTYPES.values()),
    "softcap": (None, 5.0),
    "deterministic": (True, False),
    "memory": MEMORY,
    "scale": SCALES,
}


LONG = 777
"""Several blocks of 128 or 256 rows and keys, and the last one ragged: elsewhere a kernel hardly sees a third block."""

LARGER_HEADS = ("2x2x64x64", "4x2x64x64", "4x1x128x128", "4x2x128x64", "4x2x64x128")
"""For kernels that are built for sizes which models have."""


def axes_of(kernel: Kernel | LazyKernel, device: str) -> Axes:
    """The choices that the kernel serves: values that it declines are left out of their axis."""
    usual = plainest(kernel, device)
    axes = AXES if usual["heads"] in HEADS else {**AXES, "heads": LARGER_HEADS}
    return {
        axis: tuple(v for v in values if _serves(kernel, device, **{**usual, axis: v})) or values[:1]
        for axis, values in axes.items()
    }


def plainest(kernel: Kernel | LazyKernel, device: str) -> Choices:
    """The plainest heads, order of sums and dtype that it serves together."""
    bases: Iterator[Choices] = (
        {"heads": heads, "deterministic": deterministic, "dtype": dtype}
        for heads in ("mha", *LARGER_HEADS)
        for deterministic in (True, False)
        for dtype in DTYPES.values()
    )
    return next((base for base in bases if _serves(kernel, device, **base)), {"heads": "mha"})


def fitted(case: Case, kernel: Kernel | LazyKernel, device: str) -> Case:
    """A case of the quick look; with the plainest choices where the kernel does not serve those of the case."""
    if serves(kernel, case, device):
        return case
    return replace(case, **plainest(kernel, device))


def _serves(kernel: Kernel | LazyKernel, device: str, **choices: Any) -> bool:
    return serves(kernel, Case(**{"heads": "mha", **choices}), device)


def declined(kernel: Kernel | LazyKernel, device: str) -> Iterator[Case]:
    """One case for every value that it declines: its reason goes into the report."""
    kept = axes_of(kernel, device)
    for axis, values in AXES.items():
        yield from (Case(**{axis: v}) for v in values if v not in kept[axis])


def cases(effort: str, axes: Axes) -> Iterator[Case]:
    """Every pair of choices; head sizes; large and small scores. For a quick look a handful."""
    if effort == "quick":
        masks = ("causal", "window", "documents", "rows_see_nothing", "custom")
        yield from (
            Case(mask, layout="contiguous", ranks=2, memory=MEMORY[i % len(MEMORY)]) for i, mask in enumerate(masks)
        )
        yield Case("full", "striped", ranks=3, heads="wide_values", softcap=5.0)
        yield Case("causal", "contiguous", ranks=3, length=48)  # blocks of one shape: what is kept of one fits the next
        yield Case("causal", "zigzag", ranks=2, heads="mha", dtype=torch.bfloat16, deterministic=False)
        yield Case("causal", "contiguous", ranks=1)
        yield from (Case("causal", "contiguous", scale=scale) for scale in SCALES[1:])
        return
    yield from covering(axes)
    for size in HEAD_SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(heads=f"4x2x{size}x{size}", dtype=dtype, batch=1, length=67, deterministic=False)
    dtypes, usual = axes["dtype"], {axis: axes[axis][0] for axis in ("heads", "deterministic")}
    usual["heads"] = "gqa" if "gqa" in axes["heads"] else usual["heads"]
    yield from (Case(**{**usual, "values": v, "dtype": dtype}) for v in VALUES[1:] for dtype in dtypes)
    yield Case(heads="2x1x1x1", deterministic=False)
    for length in (2, 15, 16, 17, 63, 64, 65, 129):
        yield Case(**{**usual, "length": length, "ranks": 1, "layout": "contiguous", "dtype": dtypes[0]})


def large(effort: str) -> Iterator[Case]:
    """Many blocks of rows and keys, some of which a mask hides whole; more heads and sequences than elsewhere."""
    case = Case("causal", "contiguous", ranks=1, heads="2x1x64x64", batch=1, length=LONG)
    yield case
    if effort == "quick":
        return
    yield from (replace(case, mask=mask) for mask in ("window", "sink_window", "documents"))
    yield replace(case, layout="zigzag", ranks=2)
    yield replace(case, heads="40x8x64x64", length=LENGTH)
    yield replace(case, batch=9, length=LENGTH)


def trials(subject: Subject) -> Iterator[Trial]:
    """See `cases` and `large`, for each kernel; and for each, whether its error grows with the number of blocks."""
    for kernel in subject.kernels:
        device = subject.device.type
        tried = cases(subject.effort, axes_of(kernel, device))
        if subject.effort == "quick":
            tried = (fitted(case, kernel, device) for case in tried)
        many = [fitted(case, kernel, device) for case in large(subject.effort)]
        for case in dict.fromkeys([*tried, *many, *declined(kernel, device)]):
            if case.possible():
                yield _case_trial(subject, kernel, case)
        for dtype in (torch.bfloat16,) if subject.effort == "quick" else (torch.float32, torch.bfloat16, torch.float16):
            short = str(dtype).removeprefix("torch.")
            yield plain(NAME, f"{kernel.name}:flat-error-{short}", _growth, subject, kernel, dtype)


def of_case(subject: Subject, case: Case, kernel: str) -> Trial:
    """Any case on the kernel of that name."""
    (found,) = (k for k in subject.backend.kernels() if k.name == kernel)
    return _case_trial(subject, found, case)


def _case_trial(subject: Subject, kernel: Kernel | LazyKernel, case: Case) -> Trial:
    def attempt(tried: Case) -> Outcome:
        return _attempt(subject, kernel, tried)

    return Trial(NAME, f"{kernel.name}:{case.spec()}", attempt, case, kernel.name)


def _attempt(subject: Subject, kernel: Kernel | LazyKernel, case: Case) -> Outcome:
    """Compare the numbers; again with `out` for delta and gradients added twice; one block also in a single call."""
    support = kernel.supports(case.make_call(subject.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason, wrong="" if support.reason else "it declines and gives no reason")
    x, loaded = make_inputs(case), kernel.load()
    try:
        first = run_kernel(loaded, case, x, subject.device)
        by_out = run_kernel(loaded, case, x, subject.device, by_out=True, times=2)
    except Trespass as trespass:
        return Outcome(wrong=str(trespass))
    rounding = loaded.traits.rounding
    outcome = judged(case, x, first, rounding)
    if not outcome.ok:
        return outcome
    second = judged(case, x, by_out, rounding)
    if not second.ok:
        return Outcome(second.errors, f"with out in place of delta, gradients added twice: {second.wrong}".strip(": "))
    if case.ranks == 1:
        for parts in (False, True) if loaded.traits.writes_into else (False,):
            third = judged(case, x, run_whole(loaded, case, x, subject.device, parts=parts), rounding)
            if not third.ok:
                how = "told where to write" if parts else "asked for all at once"
                return Outcome(third.errors, f"{how}: {third.wrong}".strip(": "))
    if case.deterministic and not all(torch.equal(getattr(first, n), getattr(by_out, n)) for n in ("out", "lse")):
        return Outcome(outcome.errors, "other bits the second time, though deterministic was asked for")
    return outcome


def _growth(subject: Subject, kernel: Kernel | LazyKernel, dtype: torch.dtype) -> Outcome:
    case = Case(dtype=dtype, deterministic=False, heads="2x1x64x64")
    support = kernel.supports(case.make_call(subject.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason)

    loaded = kernel.load()

    def run(tried: Case, x: Inputs) -> Answer:
        return run_kernel(loaded, replace(tried, deterministic=False), x, subject.device)

    return grown(subject, dtype, "ring", run)


CHECK = Check(NAME, "every kernel by name: tiles, running state, gradients added into buffers", trials, of_case)
