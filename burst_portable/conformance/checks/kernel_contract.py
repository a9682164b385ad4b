"""Test every kernel of the backend by name through the contract of kernels, also kernels that are never chosen here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from burst_portable.conformance import oracle
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test
from burst_portable.conformance.cases import DTYPES, HEADS, LENGTH, MASKS, MEMORY, SCALES, VALUES, Axes, Case, covering
from burst_portable.conformance.checks.comparison import compare
from burst_portable.conformance.checks.determinism import compare_growth
from burst_portable.conformance.checks.repeated_calls import run_repeated
from burst_portable.conformance.checks.sizes import HEAD_SIZES
from burst_portable.conformance.kernel_runs import OutOfBoundsWriteError, run_block, run_kernel, run_single_call
from burst_portable.conformance.oracle import Answer, Inputs, make_inputs
from burst_portable.conformance.running import serves
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.kernels.checked_kernel import support_of
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
    "dropout": (0.0, 0.3),
}


LONG = 777
"""Several blocks of 128 or 256 rows and keys, the last one ragged. Other cases rarely have a third block."""

RAGGED = 265
"""Blocks of 64, 128 or 256 keys and a last one of 9, which has 3 % of the weight of a row that sees all keys."""

LARGER_HEADS = ("2x2x64x64", "4x2x64x64", "4x1x128x128", "4x2x128x64", "4x2x64x128")
"""Heads for kernels that support only the sizes of models."""


WIDER_VALUES = "4x2x16x40"
"""Values wider than keys, which no choice of `HEADS` has. The check "sizes" has them for chosen kernels only."""

LONG_BLOCKS = (("long-keys", 4, 16384, ("out", "dq")), ("long-queries", 16384, 4, ("dk", "dv")))
"""Name, queries, keys, and the results that are sums over the long side: 64 blocks of 256 tokens."""


def axes_of(kernel: Kernel | LazyKernel, device: str) -> Axes:
    """Return the choices that the kernel supports."""
    usual = plainest(kernel, device)
    axes = AXES if usual["heads"] in HEADS else {**AXES, "heads": LARGER_HEADS}
    return {
        axis: tuple(v for v in values if _serves(kernel, device, **{**usual, axis: v})) or values[:1]
        for axis, values in axes.items()
    }


def plainest(kernel: Kernel | LazyKernel, device: str) -> dict[str, Any]:
    """Return the plainest heads, determinism and dtype that the kernel supports together."""
    return next((base for base in _plain_choices() if _serves(kernel, device, **base)), {"heads": "mha"})


def _plain_choices() -> Iterator[dict[str, Any]]:
    """Yield plain heads, determinism and dtypes, the plainest first."""
    for heads in ("mha", *LARGER_HEADS):
        for deterministic in (True, False):
            for dtype in DTYPES.values():
                yield {"heads": heads, "deterministic": deterministic, "dtype": dtype}


def unsupported_reason(kernel: Kernel | LazyKernel, device: str) -> str:
    """Return why a kernel declines even the plainest call, or "" if it supports one of these calls."""
    if any(_serves(kernel, device, **base) for base in _plain_choices()):
        return ""
    return support_of(kernel, Case(heads="mha").make_call(device)).reason or "it gives no reason"


def fitted(case: Case, kernel: Kernel | LazyKernel, device: str) -> Case:
    """Return a case of quick coverage, with the plainest choices if the kernel does not support those of the case."""
    return case if serves(kernel, case, device) else replace(case, **plainest(kernel, device))


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
        masks = ("causal", "window", "documents", "fully_masked_rows", "custom", "causal_block_sparse")
        yield from (
            Case(mask, layout="contiguous", ranks=2, memory=MEMORY[i % len(MEMORY)]) for i, mask in enumerate(masks)
        )
        yield Case("full", "striped", ranks=3, heads="wide_values", softcap=5.0)
        yield Case("causal", "contiguous", ranks=3, length=48)  # equal shapes: stale data of a block would fit the next
        yield Case("causal", "zigzag", ranks=2, heads="mha", dtype=torch.bfloat16, deterministic=False)
        yield Case("documents", "striped", ranks=2, dropout=0.3)
        yield Case("causal", "contiguous", ranks=1)
        yield Case("causal", "contiguous", heads=WIDER_VALUES)
        yield from (Case(length=3, layout="contiguous", ranks=3, dtype=dtype) for dtype in DTYPES.values())
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
    yield Case(heads=WIDER_VALUES, deterministic=False)
    yield from (Case(**{**usual, "length": 3, "ranks": 3, "layout": "contiguous", "dtype": dtype}) for dtype in dtypes)
    for length in (2, 15, 16, 17, 63, 64, 65, 129):
        yield Case(**{**usual, "length": length, "ranks": 1, "layout": "contiguous", "dtype": dtypes[0]})


def large(coverage: str) -> Iterator[Case]:
    """Yield cases of many blocks, some fully masked, and of more heads, grouped heads and sequences than elsewhere."""
    case = Case("causal", "contiguous", ranks=1, heads="2x1x64x64", batch=1, length=LONG)
    yield case
    yield replace(case, mask="full", length=RAGGED)
    yield replace(case, heads="17x1x64x64", length=LENGTH)
    if coverage == "quick":
        return
    yield from (replace(case, mask=mask) for mask in ("window", "sink_window", "documents"))
    yield replace(case, layout="zigzag", ranks=2)
    yield replace(case, heads="40x8x64x64", batch=3, length=LENGTH)
    yield replace(case, batch=9, length=LENGTH)


def list_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield `cases` and `large` for each kernel, and whether its error grows with the number of blocks or tokens."""
    for kernel in target.kernels:
        device = target.device.type
        usual = cases(target.coverage, axes_of(kernel, device))
        if target.coverage == "quick":
            usual = (fitted(case, kernel, device) for case in usual)
        many = [fitted(case, kernel, device) for case in large(target.coverage)]
        for case in dict.fromkeys([*usual, *many, *declined(kernel, device)]):
            if case.possible():
                yield _make_case_test(target, kernel, case)
        for dtype in ("bfloat16",) if target.coverage == "quick" else ("float32", "bfloat16", "float16"):
            title = f"{kernel.name}:flat-error-{dtype}"
            yield make_plain_test(NAME, title, _growth, target, kernel, DTYPES[dtype])
        for name, *block in LONG_BLOCKS:
            yield make_plain_test(NAME, f"{kernel.name}:{name}", _sum_long, target, kernel, *block)
        title = f"{kernel.name}:repeated-calls"
        yield make_plain_test(NAME, title, run_repeated, target, kernel, plainest(kernel, device))


def make_test(target: BackendUnderTest, case: Case, kernel: str) -> TestCase:
    """Return the test of any case on the kernel of that name."""
    (found,) = (k for k in target.backend.kernels() if k.name == kernel)
    return _make_case_test(target, found, case)


def _make_case_test(target: BackendUnderTest, kernel: Kernel | LazyKernel, case: Case) -> TestCase:
    name = f"{kernel.name}:{case.spec()}"
    return TestCase(NAME, name, lambda other: _run(target, kernel, other), case, kernel.name)


def _run(target: BackendUnderTest, kernel: Kernel | LazyKernel, case: Case) -> Outcome:
    """Compare the results of every way to run the kernel."""
    support = support_of(kernel, case.make_call(target.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason, wrong="" if support.reason else "it declines without a reason")
    x, loaded = make_inputs(case), kernel.load()
    passed = []
    try:
        for how, answer in _answers(loaded, case, x, target.device):
            outcome = compare(case, x, answer, loaded.traits.rounding)
            if not outcome.ok:
                return Outcome(outcome.errors, f"{how}: {outcome.wrong}".strip(": "))
            passed.append((answer, outcome))
    except OutOfBoundsWriteError as error:
        return Outcome(wrong=str(error))
    (first, outcome), (again, _) = passed[:2]
    if case.deterministic and not all(torch.equal(getattr(first, n), getattr(again, n)) for n in ("out", "lse")):
        return Outcome(outcome.errors, "other bits in a repeated run with deterministic=True")
    return outcome


def _answers(kernel: Kernel, case: Case, x: Inputs, device: torch.device) -> Iterator[tuple[str, Answer]]:
    """Run the kernel in every way, and yield the way and its answer."""
    yield "", run_kernel(kernel, case, x, device)
    way = "in the run that passes x.out, not x.delta, and calls attend_backward twice on the same buffers"
    yield way, run_kernel(kernel, case, x, device, by_out=True, times=2)
    if case.ranks == 1:
        yield "as a single call", run_single_call(kernel, case, x, device)
        if kernel.traits.writes_into:
            yield "writing into a given buffer", run_single_call(kernel, case, x, device, parts=True)


def _growth(target: BackendUnderTest, kernel: Kernel | LazyKernel, dtype: torch.dtype) -> Outcome:
    case = Case(dtype=dtype, deterministic=False, heads="2x1x64x64")
    support = support_of(kernel, case.make_call(target.device.type))
    if not support.ok:
        return Outcome(skipped=support.reason)

    loaded = kernel.load()

    def run(case: Case, x: Inputs) -> Answer:
        return run_kernel(loaded, replace(case, deterministic=False), x, target.device)

    return compare_growth(target, dtype, "ring", run)


def _sum_long(
    target: BackendUnderTest, kernel: Kernel | LazyKernel, rows: int, columns: int, sums: Sequence[str]
) -> Outcome:
    """Check that long sums of 16-bit inputs are accumulated in a wide dtype: they may err by one rounding of a result.

    Sums in 16 bits pass all other tests if the kernel adds few blocks in each of them.
    """
    base = Case("full", "contiguous", heads="1x1x64x64", batch=1, length=max(rows, columns), deterministic=False)
    cases = [replace(base, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    case = next((case for case in cases if serves(kernel, case, target.device.type)), cases[0])
    call = case.make_call(target.device.type)
    if not (support := support_of(kernel, call)).ok:
        return Outcome(skipped=support.reason)
    x, exact = _long_block(rows, columns, case)
    errors = {}
    for how, answer in run_block(kernel.load(), call, x, target.device):
        for name in sums:
            error = oracle.relative_error(answer.quantities()[name], exact.quantities()[name])
            errors[f"{name}{how}"] = error, torch.finfo(case.dtype).eps / 2
    title = f"sums over {base.length:,} tokens are wrong; if only such tests fail, accumulate in float32"
    wrong = title if Outcome(errors).too_large else ""
    return Outcome(errors, wrong)


@lru_cache(maxsize=4)
def _long_block(rows: int, columns: int, case: Case) -> tuple[Inputs, Answer]:
    """Return a long block and its exact answer."""
    x, seen = oracle.make_block_inputs(rows, columns, case.sizes, case.dtype), torch.ones(rows, columns).bool()
    return x, oracle.attention(x.q, x.k, x.v, x.dout, seen, scale=case.factor)


CHECK = Check(NAME, "every kernel by name: tiles, running state, gradients added into buffers", list_tests, make_test)
