"""Test Ascend's Triton kernels in Triton's interpreter against dense attention in float64, and that their tiles fit.

`make conform-ascend` checks what triton-ascend compiles from them.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest
import torch

from tests.support.calls import kernel_call
from tests.support.triton_cases import SHAPES, Case, cases
from tests.support.triton_interpreter import Ask, as_request

pytest.importorskip("triton")

FLOAT32 = [c for c in cases(45, torch.float32, heads=1) if c.layout != "striped" or c.mask in ("causal", "full")][::4]
FLOAT16 = [replace(c, dtype=torch.float16, scale=0.2) for c in SHAPES[:4]]


@pytest.mark.parametrize("case", [*FLOAT32, *FLOAT16], ids=str)
def test_ascend_launch_small_cases(ask: Ask, case: Case) -> None:
    ask({**as_request(case), "loads": "ascend"})


def test_ascend_launch_leaves_untouched_rows_unchanged(ask: Ask) -> None:
    ask({"check": "untouched", "loads": "ascend"})


def test_ascend_launch_merging_keeps_float32_error_flat(ask: Ask) -> None:
    ask({"check": "flat", "loads": "ascend"})


@pytest.mark.full
@pytest.mark.parametrize("case", [*cases(150, torch.float32), *cases(97, torch.float16, scale=0.2)], ids=str)
def test_ascend_launch_longer_cases(ask: Ask, case: Case) -> None:
    ask({**as_request(case), "loads": "ascend"})


BUFFER = 192 * 1024  # bytes of a core's unified buffer
MARGIN = 0.85  # usable share of the buffer; the compiler needs the rest


def buffer_bytes(cut, head: int, itemsize: int, *, sums: int) -> int:
    """Return the bytes of a step: the block's tiles, `sums` float32 sums, two tiles twice, scores three times."""
    block, step, scores = cut.rows * head, cut.columns * head, cut.rows * cut.columns
    return block * (sums * itemsize + sums * 4) + 2 * 2 * step * itemsize + scores * (4 + 4 + itemsize)


def test_ascend_block_shapes_fit_buffer() -> None:
    from burst_portable.backends.ascend.triton_launch import HALF, SINGLE

    for table, itemsize in ((HALF, 2), (SINGLE, 4)):
        for head, (queries, keys) in table.items():
            assert buffer_bytes(queries, head, itemsize, sums=1) <= MARGIN * BUFFER, (head, itemsize, queries)
            assert buffer_bytes(keys, head, itemsize, sums=2) <= MARGIN * BUFFER, (head, itemsize, keys)


def test_ascend_triton_kernel_declines_with_reason() -> None:
    from burst_portable.backends.ascend.triton_launch import AscendTritonKernel

    kernel, problem = AscendTritonKernel(), kernel_call(torch.bfloat16, "npu", 8, 2, 128, 128)
    assert "does not support NPUs" in kernel.supports(problem).reason
    assert "it takes NPU tensors, not cpu" in kernel.supports(replace(problem, device="cpu")).reason
    assert "float64 is not among" in kernel.supports(replace(problem, dtype="float64")).reason
    assert "at most 256" in kernel.supports(replace(problem, head_dim=320)).reason


def test_ascend_import_avoids_newer_triton_launcher(forked_python):
    """Triton for Ascend is Triton 3.2, which lacks imports of `kernels.triton.prepared`."""
    program = (
        "import sys, burst_portable.backends.ascend.triton_launch; "
        "sys.exit('burst_portable.kernels.triton.prepared' in sys.modules)"
    )
    done = subprocess.run([forked_python, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
