"""Test that float32 is exact unless TF32 is requested."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from triton.compiler import compile as triton_compile

from burst_portable.backends.cuda.backend import CudaBackend
from burst_portable.kernels.triton import machine_code, triton_kernel
from burst_portable.kernels.triton.machine_code import TARGETS
from burst_portable.kernels.triton.triton_kernel import Tf32Kernel, TritonKernel
from burst_portable.kernels.triton.tuning import SINGLE, choose
from burst_portable.planning.tiles import Tile, Tiles
from tests.support.calls import kernel_call, settings


@pytest.mark.parametrize(("asked", "precision"), [({}, "ieee"), ({"float32_precision": "tf32"}, "tf32")])
def test_triton_kernels_compile_with_given_precision(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], precision: str
) -> None:
    made: list[str] = []

    class Recording:
        programs = 0

        def __init__(self, *arguments: object, **options: object) -> None:
            constants = arguments[4]
            assert isinstance(constants, dict)
            made.append(constants["PRECISION"])

    monkeypatch.setattr(triton_kernel, "Launch", Recording)
    monkeypatch.setattr(triton_kernel, "architecture", lambda: "sm_90")
    x = torch.zeros(1, 32, 1, 16)
    kernel, tiles, options = TritonKernel(**asked), Tiles([Tile(0, 32, 0, 32, 0, 31)]), settings(0.25)
    _, lse = kernel.attend(x, x, x, tiles, options)
    lse = lse.float()
    kernel.only_keys((x, x, x, x, lse, lse), tiles, options, (x, x, x))
    kernel.only_queries((x, x, x, x, lse, lse), tiles, options, (x, x, x))
    assert made == [precision] * 3


def test_tf32_kernel_is_used_only_if_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It declines other dtypes, and its backend lists it after the exact kernel."""
    kernel = Tf32Kernel()
    monkeypatch.setattr(triton_kernel, "interpreted", lambda: True)
    single, half = (kernel_call(dtype, "cuda", 2, 1, 64, 64) for dtype in (torch.float32, torch.bfloat16))
    assert kernel._precision == "tf32"
    assert kernel.supports(single).ok
    assert "the kernel triton takes that" in kernel.supports(half).reason
    assert not kernel.supports(replace(single, head_dim=512)).ok
    names = [one.name for one in CudaBackend().kernels()]
    assert names.index("triton") < names.index("triton-tf32")


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("kernel", ["forward", "keys", "queries"])
def test_sm_80_code_uses_tf32_instruction_only_if_asked(kernel: str, precision: str) -> None:
    tuning = choose(SINGLE, "sm_80", 64)
    # Products of 16 elements compile in a fifth of the time of 64.
    source = machine_code._source(kernel, 16, 16, (getattr(tuning, kernel) or tuning.forward)[0])
    source.signature = {name: kind.replace("bf16", "fp32") for name, kind in source.signature.items()}
    at = source.fn.arg_names.index("PRECISION")
    source.constants[(at,)] = precision
    ptx = triton_compile(source, target=TARGETS["sm_80"].target, options={"num_warps": 4}).asm["ptx"]
    assert ("mma.sync.aligned.m16n8k8.row.col.f32.tf32" in ptx) == (precision == "tf32")
