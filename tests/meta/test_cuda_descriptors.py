"""Test the search for matrix descriptors of paths that did not run, on a real case and variants of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")

from backends.cuda.descriptors import check, suspicious
from burst_portable.kernels.triton.machine_code import compiled_kernel
from burst_portable.kernels.triton.tuning import Blocks

WRONG = Path(__file__).with_name("wrong_descriptor.sass").read_text(encoding="utf-8")
BRANCH = "        /*2f70*/              @!P0 BRA `(.L_x_7) ;\n"  # around the first loop and the code before it
READY = "        /*2ff0*/                   UMOV UR4, UR6 ;\n"  # UR4 and UR5 are Q's descriptor
LOOP_2 = ".L_x_16:\n"
PRODUCT_2 = "        /*5790*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;\n"
GOOD = WRONG.replace(BRANCH, "").replace(READY, READY + BRANCH)


def line(text: str) -> str:
    return f"        /*fff0*/                   {text} ;\n"


def test_suspicious_finds_known_compiler_fault():
    found = suspicious(WRONG)
    assert [text.partition(" comes from ")[0] for text in found] == [
        "UR4 of 5790 (HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24)",
        "UR5 of 5790 (HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24)",
    ]
    assert "00b0 (ULEA UR4, UR5, UR4, 0x18) or 2f80 (UIADD3 UR6, UP0, UR16, 0x2, URZ)" in found[0]
    assert "0020 (S2UR UR5, SR_CgaCtaId)" in found[1]


def test_suspicious_accepts_descriptor_set_before_branch():
    assert suspicious(GOOD) == []


def test_suspicious_follows_sums():
    """No product of the second loop reads UR4; UR24 is computed from it."""
    (low, high) = suspicious(WRONG.replace(PRODUCT_2, ""))
    assert low.startswith("UR4 of 52a0 (UIADD3 UR24,")
    assert high.startswith("UR5 of 5370 (UIADD3.X UR25,")


@pytest.mark.parametrize(
    ("away", "back"),
    [
        (["IMAD.U32 R2, RZ, RZ, UR4"], ["R2UR UR4, R2"]),
        (["MOV R2, UR4"], ["R2UR UR4, R2"]),
        (["MOV R2, UR4", "IMAD.MOV.U32 R6, RZ, RZ, R2.reuse"], ["R2UR UR4, R6"]),
        (["MOV R2, UR4", "MOV R3, UR5", "STL.64 [R1+0x50], R2"], ["LDL.LU.64 R6, [R1+0x50]", "R2UR UR4, R6"]),
    ],
)
def test_suspicious_accepts_restored_descriptor(away, back):
    """The second loop uses UR4 for another value and then restores the descriptor."""
    used = PRODUCT_2 + "".join(map(line, [*away, "UIMAD UR4, UR48, UR48, URZ", *back]))
    assert suspicious(GOOD.replace(PRODUCT_2, used)) == []
    assert len(suspicious(WRONG.replace(PRODUCT_2, used))) == 2
    never_back = PRODUCT_2 + line("UIMAD UR4, UR48, UR48, URZ")
    assert len(suspicious(GOOD.replace(PRODUCT_2, never_back))) == 1


def test_suspicious_finds_other_restored_value():
    used = PRODUCT_2 + line("MOV R2, UR4") + line("LDS.128 R0, [R9]") + line("R2UR UR4, R2")
    (found,) = suspicious(GOOD.replace(PRODUCT_2, used))
    assert "LDS.128 R0, [R9]" in found


@pytest.mark.parametrize(("guard", "count"), [("@UP1 ", 1), ("", 0)])
def test_suspicious_treats_guarded_write_as_optional(guard, count):
    """UR4 is written once more before the second loop, on all paths or on some."""
    again = line(f"{guard}USGXT.U32 UR4, UR16, 0xe")
    assert len(suspicious(GOOD.replace(LOOP_2, again + LOOP_2))) == count


def test_suspicious_accepts_equal_constants():
    again = line("UMOV UR17, 0x40000040")
    assert suspicious(GOOD.replace(PRODUCT_2, PRODUCT_2 + again)) == []


def test_suspicious_finds_register_without_writer():
    (found,) = suspicious(GOOD.replace("UMOV UR19, 0x40000040", "NOP"))
    assert found.endswith("comes from nowhere")


def test_suspicious_reports_unread_code():
    assert suspicious("") == ["matrix descriptors were not checked: no HGMMA instruction was read"]
    (found,) = suspicious(GOOD + line("CALL.REL.NOINC `(.L_x_16)"))
    assert found.startswith("matrix descriptors were not checked beyond fff0 (CALL.REL.NOINC")


def test_check_reports_missing_disassembler(monkeypatch, tmp_path):
    triton = ModuleType("triton")
    triton.__file__ = str(tmp_path / "__init__.py")
    monkeypatch.setitem(sys.modules, "triton", triton)
    (found,) = check(b"")
    assert found.startswith("matrix descriptors were not checked: there is no ")
    assert found.endswith("nvdisasm")


def test_two_warps_use_no_descriptors():
    """ptxas 12.8 makes the fault for values smaller than heads; on a GPU it reads invalid addresses."""
    four, two = (compiled_kernel("sm_90", "forward", 24, Blocks(128, 64, warps, 3), value=12) for warps in (4, 2))
    assert check(four.asm["cubin"]) or "release 12.8" not in assembler()
    assert "wgmma" in four.asm["ptx"]
    assert "wgmma" not in two.asm["ptx"]
    assert "mma.sync" in two.asm["ptx"]


def assembler():
    """Return the version text of Triton's ptxas."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
