"""Test in machine code that all warps read a state before one of them overwrites it in place.

The LSE of a row is one number, and there are fewer rows than threads. Each warp that has the row reads it. Without a
barrier, a late warp reads the new value of another warp, and weights its part of the row with it.
"""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")
import triton
from triton.compiler import ASTSource

from burst_portable.kernels.triton.machine_code import TARGETS, compiled_kernel, tuned
from burst_portable.kernels.triton.merging import merge_kernel

_MEANS = {"ld.global": "read", "st.global": "written", "bar.sync": "barrier"}


def merge(target: str) -> str:
    """Return the machine code of the merge of 16-bit parts, whose tensors are all dense."""
    constants = {"R": 32, "DV": 128, "PADDED_DV": 128, "lse_row": 1, "part_lse_row": 1}
    types = {"total": "*fp32", "total_lse": "*fp64", "part": "*bf16", "part_lse": "*fp32"}
    names = merge_kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    uneven = {*constants, "rows", "heads", "blocks"}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in uneven}
    source = ASTSource(merge_kernel, signature, constants, even)
    return triton.compile(source, target=TARGETS[target].target, options={"num_warps": 4}).asm["ptx"]


def resumed(target: str) -> str:
    """Return the machine code of a forward pass into a running state."""
    return compiled_kernel(target, "resumed", 128, tuned(target, "resumed", 128)).asm["ptx"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("code", [merge, resumed])
def test_barrier_separates_reads_of_all_warps_from_first_write(code, target: str) -> None:
    steps = [_MEANS[found] for found in re.findall("|".join(map(re.escape, _MEANS)), code(target))]
    before = steps[: steps.index("written")]
    last_read = len(before) - before[::-1].index("read")
    assert "barrier" in before[last_read:], before[-8:]
