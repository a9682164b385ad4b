"""Compile the Triton kernels ahead of time to machine code for devices that are not present."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Executor, Future

import pytest

pytest.importorskip("triton")

from burst_portable.errors import UnknownNameError
from burst_portable.kernels.triton.machine_code import HEADS, TARGETS, Record, kernel_table, launched_kernels, problems

# tests/cli/test_kernels.py compiles one of the other vendor; -m full compiles the rest, for a minute.
_USUAL = [("sm_90", 128)]
ALL = [
    pytest.param(target, head, marks=pytest.mark.full if (target, head) not in _USUAL else [])
    for target in TARGETS
    for head in HEADS
]


def of_one(target: str, head: int) -> list[Record]:
    return list(kernel_table([target], [head]))


@pytest.fixture(scope="module")
def compiled(compilers: Executor, request: pytest.FixtureRequest) -> dict[tuple[str, int], Future[list[Record]]]:
    """Compile all kernels for the targets and head sizes of the selected tests."""
    items = [
        item
        for item in request.session.items
        if getattr(item, "function", None) is test_kernels_compile_for_each_target
    ]
    asked = [(item.callspec.params["target"], item.callspec.params["head"]) for item in items]
    return {one: compilers.submit(of_one, *one) for one in asked}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "head"), ALL)
def test_kernels_compile_for_each_target(
    target: str, head: int, compiled: dict[tuple[str, int], Future[list[Record]]]
) -> None:
    records = compiled[target, head].result()
    assert [r.kernel for r in records] == launched_kernels(target, head)
    found = {f"{r.kernel}, {r.blocks}": problems(r) for r in records}
    assert not any(found.values()), found
    assert all(r.registers > 0 and r.occupancy > 0 and r.shared > 0 and r.seconds > 0 for r in records)


GOOD = Record("sm_90", "forward", 128, "128x64", 1.0, registers=200, shared=1024, occupancy=1, instruction="wgmma")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        (Record("sm_90", "forward", 128, "", error="no"), "does not compile"),
        (Record("sm_90", "forward", 128, "", shared=1), "no matrix instruction"),
        (Record("sm_90", "forward", 128, "", scratch=8, instruction="x"), "8 bytes of scratch memory, 0 allowed"),
        (Record("sm_90", "keys", 128, "", scratch=132, instruction="x"), "132 bytes of scratch memory, 128 allowed"),
        (Record("sm_90", "queries", 64, "", scratch=32, instruction="x"), "32 bytes of scratch memory, 24 allowed"),
        (Record("gfx90a", "forward", 128, "", shared=65 * 1024, instruction="x"), "shared memory"),
        (Record("sm_90", "keys", 64, "", warnings=("C7510 serialized",), instruction="x"), "C7510"),
    ],
)
def test_problems_finds_faults(record: Record, says: str) -> None:
    assert says in " ".join(problems(record))


def test_problems_accepts_good_record() -> None:
    assert problems(GOOD) == []


def test_kernel_table_rejects_unknown_names() -> None:
    with pytest.raises(UnknownNameError, match="sm_90"):
        list(kernel_table(["sm_9"]))
    with pytest.raises(UnknownNameError, match="forward"):
        list(kernel_table(["sm_90"], [64], ["forwards"]))


def test_compile_one_returns_record_of_failure() -> None:
    """The record of a kernel that fits no chip names target and configuration."""
    from burst_portable.kernels.triton.machine_code import compile_one
    from burst_portable.kernels.triton.tuning import Blocks

    record = compile_one("sm_90", "forward", 64, Blocks(96, 64, 4, 1))  # not a power of two
    assert "sm_90" in record.error
    assert "96x64" in record.error
    assert problems(record)


def test_package_import_does_not_load_triton() -> None:
    code = "import sys, burst_portable, burst_portable.kernels.reference; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
