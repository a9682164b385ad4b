"""Test the use of two warps on sm_90, where ptxas 12.8 gives matrix products wrong addresses.

See backends/cuda/descriptors.py.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

from burst_portable.kernels.triton import triton_kernel
from burst_portable.kernels.triton.triton_kernel import Tf32Kernel, TritonKernel
from burst_portable.planning.tiles import Tile, Tiles
from tests.support.calls import settings

TWO = 2 if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8) else 4
"""Warps where values are smaller than heads: ptxas 12.9 of Triton 3.8 was not seen to make the fault."""


@pytest.mark.parametrize(
    ("architecture", "dtype", "sizes", "odd", "warps"),
    [
        ("sm_90", torch.bfloat16, (24, 12), False, TWO),  # rows of 24 bytes are read by pointers
        ("sm_90", torch.bfloat16, (64, 32), True, TWO),
        ("sm_90", torch.bfloat16, (64, 32), False, 4),  # read by hardware descriptors
        ("sm_90", torch.bfloat16, (64, 64), True, 4),
        ("sm_90", torch.bfloat16, (32, 64), True, 4),
        ("sm_90", torch.bfloat16, (192, 128), True, 8),  # one stage: no pipelined loop
        ("sm_80", torch.bfloat16, (64, 32), True, 8),
        ("sm_90", torch.float32, (64, 64), False, 2),  # TF32 with float64 results
        ("sm_90", torch.float32, (128, 128), False, 4),  # blocks too small for wgmma
    ],
    ids=str,
)
def test_triton_forward_uses_tuned_number_of_warps(monkeypatch, architecture, dtype, sizes, odd, warps):
    made: list[int] = []

    class Recording:
        programs = 0

        def __init__(self, *arguments: object, **options: object) -> None:
            constants = arguments[4]
            assert isinstance(constants, dict)
            made.append(constants["num_warps"])

    monkeypatch.setattr(triton_kernel, "Launch", Recording)
    monkeypatch.setattr(triton_kernel, "architecture", lambda: architecture)
    q, v = (torch.zeros(1, 256, 1, size + odd, dtype=dtype)[..., :size] for size in sizes)
    kernel = Tf32Kernel() if dtype == torch.float32 else TritonKernel()
    kernel.attend(q, q, v, Tiles([Tile(0, 256, 0, 256, 0, 255)]), settings(0.25))
    assert made == [warps]
