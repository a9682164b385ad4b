"""Test the Triton kernels in Triton's interpreter against dense attention in float64: all masks, layouts and shapes.

Only float32 and float16 are used. The interpreter's bfloat16 is wrong without an error (seen in 3.7.1 and 3.9.0).
"""

from __future__ import annotations

import pytest
import torch

from tests.support.triton_cases import WITH_DROPOUT, Case, cases, layouts, masks
from tests.support.triton_checks import CHECKS
from tests.support.triton_interpreter import Ask, as_request

triton = pytest.importorskip("triton")


def every(step: int, every_case: list[Case]) -> list[object]:
    """Return all cases, of which each `step`-th one runs by default."""
    return [pytest.param(c, marks=[pytest.mark.full] * (i % step > 0)) for i, c in enumerate(every_case)]


# Each mask runs in one layout: on one rank, or in one of its other layouts in turn. Contiguous shards of several ranks
# differ from one rank in full and empty tiles only.
IN_TURN = {
    (mask, some[i % len(some)]) for i, mask in enumerate(masks(45)) for some in [layouts(mask)[:1] + layouts(mask)[2:]]
}  # fmt: skip
COMMON = [
    c if c.length != 45 or (c.mask, (c.layout, c.ranks)) in IN_TURN else pytest.param(c, marks=pytest.mark.full)
    for c in cases(45, torch.float32, heads=1)
]


@pytest.mark.parametrize("case", COMMON, ids=str)
def test_interpreted_kernel_float32(ask: Ask, case: Case) -> None:
    ask(as_request(case))


@pytest.mark.parametrize(
    "case", every(2, [c for c in cases(41, torch.float16, heads=1, scale=0.2) if c.ranks == 1][::3]), ids=str
)
def test_interpreted_kernel_float16(ask: Ask, case: Case) -> None:
    ask(as_request(case))


@pytest.mark.parametrize(
    "case",
    every(2, [c for c in cases(48, torch.float32, heads=1) if c.layout != "striped" and c.ranks < 3][::4]),
    ids=str,
)
def test_interpreted_kernel_with_descriptors(ask: Ask, case: Case) -> None:
    """The loads are those of hardware descriptors, as far as the interpreter supports them."""
    ask({**as_request(case), "loads": "descriptors"})


# Each case has one kind of loads by default. The sizes of the first one are in other cases too.
LOADS = [("pointers", WITH_DROPOUT[3]), ("descriptors", WITH_DROPOUT[1]), ("separate", WITH_DROPOUT[2])]
LOADS += [pytest.param("pointers", case, marks=pytest.mark.full) for case in WITH_DROPOUT[:3]]


@pytest.mark.parametrize(("loads", "case"), LOADS, ids=str)
def test_interpreted_kernel_with_dropout(ask: Ask, loads: str, case: Case) -> None:
    ask({**as_request(case), "loads": loads})


# Each mask meets one pair of sizes by default.
SEPARATE = [
    pytest.param(mask, sizes, dtype, marks=[] if i == j and k == i % 2 else pytest.mark.full)
    for i, mask in enumerate(["causal", "window:9", "full"])
    for j, sizes in enumerate([(16, 16), (40, 24), (24, 48)])
    for k, dtype in enumerate([torch.float32, torch.float16])
]


@pytest.mark.parametrize(("mask", "sizes", "dtype"), SEPARATE, ids=str)
def test_dk_and_dv_in_separate_launches(ask: Ask, mask: str, sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Large heads use these launches. Block sizes differ, and values are smaller or larger than heads."""
    case = Case(mask, heads=2, kv_heads=1, head_dim=sizes[0], v_head_dim=sizes[1], dtype=dtype, scale=0.2)
    ask({**as_request(case), "loads": "separate"})


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted_kernel_contract(ask: Ask, name: str) -> None:
    ask({"check": name})


@pytest.mark.full
@pytest.mark.parametrize("loads", ["pointers", "descriptors"])
@pytest.mark.parametrize("case", [*cases(150, torch.float32), *cases(97, torch.float16, scale=0.2)], ids=str)
def test_interpreted_kernel_longer_inputs(ask: Ask, case: Case, loads: str) -> None:
    ask({**as_request(case), "loads": loads})
