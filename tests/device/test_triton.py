"""Test the Triton kernels on an accelerator with the cases of the interpreter and bfloat16: `pytest -m device`."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch

from burst_portable.kernels.base import BackwardInputs
from burst_portable.layout import Segment
from burst_portable.planning.tiles import find_tiles
from tests.support.calls import kernel_call, settings
from tests.support.triton_cases import SHAPES, WITH_DROPOUT, Case, cases, check, inputs, layouts, masks
from tests.support.triton_checks import CHECKS

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator here"),
]


@pytest.fixture(scope="module")
def device() -> str:
    device = torch.accelerator.current_accelerator().type
    with warnings.catch_warnings():  # the first product on a device may warn that it creates a context
        warnings.simplefilter("ignore")
        x = torch.ones(16, 16, device=device, dtype=torch.float64, requires_grad=True)
        torch.autograd.grad((x @ x).sum(), x)
    return device


@pytest.fixture(scope="module")
def kernel():
    from burst_portable.kernels.triton.triton_kernel import TritonKernel

    return TritonKernel()


SMALL = [*cases(53, torch.float32), *cases(64, torch.float16, scale=0.2), *cases(61, torch.bfloat16, scale=0.2)]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_triton_small_cases(kernel, device: str, case: Case) -> None:
    check(kernel, case, device)


# Long enough for full blocks of every configuration, at aligned and unaligned positions.
LONG = [
    Case(mask, length, layout, ranks, heads=4, kv_heads=2, head_dim=d, v_head_dim=d, dtype=torch.bfloat16, scale=0.1)
    for length, d in ((1024, 128), (1003, 64))
    for mask in masks(length)
    for layout, ranks in layouts(mask)
]  # fmt: skip
HEADS = [
    Case("causal", 515, heads=2, head_dim=d, v_head_dim=v, dtype=dtype, scale=d**-0.5, softcap=cap, poison=poison)
    for dtype in (torch.bfloat16, torch.float32)
    for d, v, cap, poison in ((16, 16, None, True), (40, 72, None, True), (80, 80, 3.0, False), (96, 128, None, False),
                              (128, 128, 2.0, True), (192, 128, None, False), (256, 256, None, True))
]  # fmt: skip


DROPOUT = [replace(case, dtype=dtype) for case in WITH_DROPOUT for dtype in (torch.float32, torch.bfloat16)]
DROPOUT += [replace(case, dropout=0.1) for case in LONG[::5]]


@pytest.mark.parametrize("case", [*LONG, *HEADS, *DROPOUT], ids=str)
def test_triton_long_cases(kernel, device: str, case: Case) -> None:
    check(kernel, case, device)


@pytest.mark.parametrize("name", CHECKS)
def test_triton_kernel_contract(kernel, device: str, name: str) -> None:
    CHECKS[name](kernel, device)


def test_triton_deterministic_results_are_bitwise_equal(kernel, device: str) -> None:
    case = replace(SHAPES[0], length=700, dtype=torch.bfloat16)
    dout, q, k, v = inputs(case, device)
    tiles = find_tiles(case.parsed, (Segment(0, 700),), (Segment(0, 700),))
    results = []
    for _ in range(2):
        out, lse = kernel.attend(q, k, v, tiles, settings(0.2))
        into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), tiles, settings(0.2), into=into)
        results.append((out, lse, *into))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_triton_supports_gives_reason(kernel, device: str) -> None:
    problem = kernel_call(torch.float64, device, 2, 2, 64, 64)
    assert "float64" in kernel.supports(problem).reason
    assert "512" in kernel.supports(replace(problem, dtype="float16", head_dim=512)).reason
    assert kernel.supports(replace(problem, dtype="float16"))
