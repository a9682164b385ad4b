"""Test every kernel of the backend by name through the contract of kernels, also kernels that are never chosen here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test
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
from burst_portable.conformance.checks.attention import HEAD_SIZES, compare, compare_growth
from burst_portable.conformance.oracle import Answer, Inputs, make_inputs
from burst_portable.conformance.running import OutOfBoundsWriteError, run_kernel, run_single_call, serves
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
"""Several blocks of 128 or 256 rows and keys, the last one ragged. Other cases rarely have a third block."""

LARGER_HEADS = ("2x2x64x64", "4x2x64x64", "4x1x128x128", "4x2x128x64", "4x2x64x128")
"""Heads for kernels that support only the sizes of models."""


def axes_of(kernel: Kernel | LazyKernel, device: str) -> Axes:
    """Return the choices that the kernel supports."""
    usual = plainest(kernel, device)
    axes = AXES if usual["heads"] in HEADS else {**AXES, "heads": LARGER_HEADS}
    return {
        axis: tuple(v for v in values if _serves(kernel, device, **{**usual, axis: v})) or values[:1]
        for axis, values in axes.items()
    }


def plainest(kernel: Kernel | LazyKernel, device: str) -> Choices:
    """Return the plainest heads, determinism and dtype that the kernel supports together."""
    bases: Iterator[Choices] = (
        {"heads": heads, "deterministic": deterministic, "dtype": dtype}
        for heads in ("mha", *LARGER_HEADS)
        for deterministic in (True, False)
        for dtype in DTYPES.values()
    )
    return next((base for base in bases if _serves(kernel, device, **base)), {"heads": "mha"})


def fitted(case: Case, kernel: Kernel | LazyKernel, device: str) -> Case:
    """Return a case of quick coverage, with the plainest choices if the kernel does not support those of the case."""
    if serves(kernel, case, device):
        return case
    return replace(case, **plainest(kernel, device))


def _serves(kernel: Kernel | LazyKernel, device: str, **choices: Any) -> bool:
    return serves(kernel, Case(**{"heads": "mha", **choices}), device)


def declined(kernel: Kernel | LazyKernel, device: str) -> Iterator[Case]:
    """Yield one case for every value that the kernel declines, so that its reason appears in the report."""
    supported = axes_of(kernel, device)
    for axis, values in AXES.items():
        yield from (Case(**{axis: v}) for v in values if v not in supported[axis])


def cases(coverage: str, axes: Axes) -> Iterator[Case]:
    """Yield every pair of choices, head sizes, and large and small scores; few cases for quick coverage."""
    if coverage == "quick":
        masks = ("causal", "window", "documents", "fully_masked_rows", "custom")
        yield from (
            Case(mask, layout="contiguous", ranks=2, memory=MEMORY[i % len(MEMORY)]) for i, mask in enumerate(masks)
        )
        yield Case("full", "striped", ranks=3, heads="wide_values", softcap=5.0)
        yield Case(
            "causal", "contiguous", ranks=3, length=48
        )  # equal shapes: stale data of one block would fit the next
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


def large(coverage: str) -> Iterator[Case]:
    """Yield cases of many blocks, some of them fully masked, and of more heads and batch rows than elsewhere."""
    case = Case("causal", "contiguous", ranks=1, heads="2x1x64x64", batch=1, length=LONG)
    yield case
    if coverage == "quick":
        return
    yield from (replace(case, mask=mask) for mask in ("window", "sink_window", "documents"))
    yield replace(case, layout="zigzag", ranks=2)
    yield replace(case, heads="40x8x64x64", length=LENGTH)
    yield replace(case, batch=9, length=LENGTH)


def list_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield `cases` and `large` for each kernel, and whether its error grows with the number of blocks."""
    for kernel in target.kernels:
        device = target.device.type
        usual = cases(target.coverage, axes_of(kernel, device))
        if target.coverage == "quick":
            usual = (fitted(case, kernel, device) for case in usual)
        many = [fitted(case, kernel, device) for case in large(target.coverage)]
        for case in dict.fromkeys([*usual, *many, *declined(kernel, device)]):
            if case.possible():
                yield _make_case_test(target, kernel, case)
        for dtype in (
            (torch.bfloat16,) if target.coverage == "quick" else (torch.float32, torch.bfloat16, torch.float16)
        ):
            short = str(dtype).removeprefix("torch.")
            yield make_plain_test(NAME, f"{kernel.name}:flat-error-{short}", _growth, target, kernel, dtype)


def make_test(target: BackendUnderTest, case: Case, kernel: str) -> TestCase:
    """Return the test of any case on the kernel of that name."""
    (found,) = (k for k in target.backend.kernels() if k.name == kernel)
    return _make_case_test(target, found, case)


def _make_case_test(target: BackendUnderTest, kernel: Kernel | LazyKernel, case: Case) -> TestCase:
    def run(other: Case) -> Outcome:
        return _run(target, kernel, other)

    return TestCase(NAME, f"{kernel.name}:{case.spec()}", run, case, kernel.name)


def _run(target: BackendUnderTest, kernel: Kernel | LazyKernel, case: Case) -> Outcome:
    """Compare results, with delta and with `out` and gradients added twice; one block also as a single call."""
    support = kernel.supports(case.make_call(target.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason, wrong="" if support.reason else "it declines without a reason")
    x, loaded = make_inputs(case), kernel.load()
    try:
        first = run_kernel(loaded, case, x, target.device)
        by_out = run_kernel(loaded, case, x, target.device, by_out=True, times=2)
    except OutOfBoundsWriteError as error:
        return Outcome(wrong=str(error))
    rounding = loaded.traits.rounding
    outcome = compare(case, x, first, rounding)
    if not outcome.ok:
        return outcome
    second = compare(case, x, by_out, rounding)
    if not second.ok:
        return Outcome(second.errors, f"with out instead of delta, gradients added twice: {second.wrong}".strip(": "))
    if case.ranks == 1:
        for parts in (False, True) if loaded.traits.writes_into else (False,):
            third = compare(case, x, run_single_call(loaded, case, x, target.device, parts=parts), rounding)
            if not third.ok:
                how = "writing into a given buffer" if parts else "as a single call"
                return Outcome(third.errors, f"{how}: {third.wrong}".strip(": "))
    if case.deterministic and not all(torch.equal(getattr(first, n), getattr(by_out, n)) for n in ("out", "lse")):
        return Outcome(outcome.errors, "other bits in a repeated run with deterministic=True")
    return outcome


def _growth(target: BackendUnderTest, kernel: Kernel | LazyKernel, dtype: torch.dtype) -> Outcome:
    case = Case(dtype=dtype, deterministic=False, heads="2x1x64x64")
    support = kernel.supports(case.make_call(target.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason)

    loaded = kernel.load()

    def run(case: Case, x: Inputs) -> Answer:
        return run_kernel(loaded, replace(case, deterministic=False), x, target.device)

    return compare_growth(target, dtype, "ring", run)


CHECK = Check(NAME, "every kernel by name: tiles, running state, gradients added into buffers", list_tests, make_test)
