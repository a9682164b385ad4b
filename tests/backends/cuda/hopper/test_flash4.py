"""Test which of the Hopper kernel and flash-attn-4 computes a call, and the results. Both are emulated on the CPU.

The real package is tested in tests/device/test_hopper_flash4.py.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from burst_portable.backends.cuda import library_kernels
from burst_portable.backends.cuda.backend import CudaBackend
from burst_portable.backends.cuda.hopper import flash4, flash4_speeds
from burst_portable.backends.cuda.hopper import support as hopper_support
from burst_portable.backends.cuda.hopper.flash4 import HopperFlash4Kernel
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.machines import hardware_of_machine
from burst_portable.backends.selection import choose_kernel
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs, LazyKernel
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.runtime.prepare import plan_for_kernel
from burst_portable.strategies.planner import plan
from tests.support.calls import kernel_call, settings
from tests.support.emulated_operators import flash_4_package
from tests.support.emulator.hopper import EmulatedKernels, emulate
from tests.support.emulator.machine import Machine
from tests.support.flash4_cases import CAPPED, OPTIONS, box, call_package_always, causal, compare_whole, inputs
from tests.support.hopper_cases import ORACLE, gap, tiles_of, wide

PAIR = "hopper+flash-attn-4"
LEAST, SPEEDS = flash4.LEAST, flash4_speeds.SPEEDS
PAIRS, RESULTS = flash4_speeds.PAIRS, Path(__file__).parents[4] / "benchmarks" / "results"
BOTH_30 = ["forward (30, 0)", "backward (30, 0)"]
USUAL = kernel_call(torch.bfloat16, "cuda", heads=4, kv_heads=2, head_dim=128, v_head_dim=128, deterministic=False)


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    """Simulate an H100 with emulated kernels."""
    emulate(monkeypatch, EmulatedKernels(Machine(1, 0.5)))
    monkeypatch.setattr(hopper_support, "triton_reason", lambda: "")
    monkeypatch.setattr(hopper_support, "device_reason", lambda device: "")
    monkeypatch.setattr(library_kernels, "capabilities", lambda: ((9, 0),))
    call_package_always(monkeypatch)


@pytest.fixture
def called(monkeypatch):
    """Install a simulated flash-attn-4 and return its record of calls."""
    return flash_4_package(monkeypatch)


def kernel_of(problem=USUAL, named="auto"):
    return choose_kernel(CudaBackend(), problem, named)


WHOLE = {
    "box": (70, 139, (2, 2), box(70, 139)),
    "box, fewer K/V heads": (139, 70, (4, 1), box(139, 70)),
    "causal": (131, 131, (2, 2), causal(131)),
    "causal, fewer K/V heads": (65, 65, (4, 2), causal(65)),
    "one row": (1, 37, (2, 1), box(1, 37)),
}


@pytest.mark.parametrize("case", WHOLE)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 192])
def test_package_computes_boxes_and_causal_squares(called, dim, case):
    rows, columns, heads, tiles = WHOLE[case]
    kernel, _ = kernel_of(replace(USUAL, heads=heads[0], kv_heads=heads[1], head_dim=dim, v_head_dim=dim))
    compare_whole(kernel, *inputs(rows, columns, heads, dim, "cpu"), tiles)
    assert called == ["forward", "backward"]


@pytest.mark.parametrize("dim", [40, 80, 112, 144])
def test_package_serves_no_heads_with_which_it_is_wrong(called, dim):
    """Version 4.0.0b36 returns a wrong dQ for sizes that are no multiples of 32."""
    problem = replace(USUAL, head_dim=dim, v_head_dim=dim)
    kernel, why = kernel_of(problem)
    assert kernel.name == "hopper"
    assert f"its gradients were wrong with heads of {dim}" in why
    for name in (PAIR, "flash-attn-4"):
        with pytest.raises(UnsupportedError, match="must be multiples of 32"):
            kernel_of(problem, name)
    with pytest.raises(AssertionError, match="dq"):  # what `supports` keeps out
        compare_whole(library_kernels.Flash4Kernel(), *inputs(65, 65, (2, 2), dim, "cpu"), causal(65))


@pytest.mark.parametrize("case", ["box", "causal"])
def test_package_computes_latent_heads(called, case):
    """Heads of 192 with values of 128."""
    rows, columns, heads, tiles = WHOLE[case]
    kernel, _ = kernel_of(replace(USUAL, kv_heads=4, head_dim=192))
    compare_whole(kernel, *inputs(rows, columns, heads, 192, "cpu", v_dim=128), tiles)
    assert called == ["forward", "backward"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 192}, "values of size 128 differ from heads of size 192"),
        ({"head_dim": 192, "kv_heads": 4, "v_head_dim": 96}, "values of size 96 differ"),
        ({"head_dim": 264, "v_head_dim": 264}, "up to 256, not 264"),
    ],
)
def test_package_serves_no_other_sizes(called, change, reason):
    assert reason in library_kernels.Flash4Kernel().supports(replace(USUAL, **change)).reason


def test_package_serves_large_heads_only_on_sm_90(called, monkeypatch):
    large = replace(USUAL, head_dim=192, v_head_dim=192)
    assert library_kernels.Flash4Kernel().supports(large).ok
    monkeypatch.setattr(library_kernels, "capabilities", lambda: ((9, 0), (10, 0)))
    assert "up to 128, not 192" in library_kernels.Flash4Kernel().supports(large).reason


def test_ulysses_plan_gives_pair_one_causal_square(called):
    """The rows of two ranks in unsorted order are four tiles."""
    made = plan(seq_len=64, ranks=2, heads=4, layout="zigzag", strategy="ulysses")
    kernel, _ = kernel_of()
    tiles = [plan_for_kernel(made, k).forward.steps_of(0)[0].compute.tiles for k in (kernel, HopperKernel())]
    assert [len(one) for one in tiles] == [1, 4]


@pytest.mark.parametrize(("more", "asked"), [((0, 0), ["forward", "backward"]), ((0, 1), ["forward"]), ((1, 1), [])])
@pytest.mark.parametrize("case", ["box, fewer K/V heads", "causal"])
def test_small_work_uses_own_kernel(called, monkeypatch, case, more, asked):
    """Below the threshold of a pass, the host code of the package takes longer than our kernel."""
    rows, columns, heads, tiles = WHOLE[case]
    pairs = 139 * 70 if case != "causal" else 131 * 132 // 2
    monkeypatch.setattr(flash4, "LEAST", dict(enumerate(2 * pairs * heads[0] * 64 + one for one in more)))
    compare_whole(kernel_of()[0], *inputs(rows, columns, heads, 64, "cpu", batch=2), tiles)
    assert called == asked


@pytest.mark.parametrize(
    ("mask", "tokens", "size", "passes"),
    [
        ("causal", 4096, 96, (False, True)),
        ("causal", 4096, 160, (True, True)),
        ("window:1024", 4096, 160, (False, True)),
        ("window:1024", 16384, 32, (True, True)),
        ("documents:0,1024,2048,3072,4096", 4096, 160, (False, False)),
        ("documents:0,1024,2048,3072,4096", 4096, 256, (False, True)),
    ],
)
def test_least_work_threshold_equals_measurement(mask, tokens, size, passes):
    """The table of measured speeds then decides."""
    work = Mask.parse(mask, tokens).num_pairs(tokens) * 16 * max(size, 64)
    assert tuple(work >= LEAST[which] for which in (0, 1)) == passes


@pytest.mark.parametrize("left", [0, 1, 30, 88])
def test_package_computes_causal_window(called, left):
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), 128, "cpu"), tiles_of(f"window:{left}", 90))
    assert called == [f"forward ({left}, 0)", f"backward ({left}, 0)"]


@pytest.mark.parametrize(("dim", "v_dim"), [(32, 32), (192, 192), (64, 64), (96, 96), (192, 128)])
@pytest.mark.parametrize("left", [1, 30])
def test_package_computes_windows_of_other_head_sizes(called, left, dim, v_dim):
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), dim, "cpu", v_dim=v_dim), tiles_of(f"window:{left}", 90))
    assert called == [f"{name} ({left}, 0)" for name in ("forward", "backward")]


@pytest.mark.parametrize("left", [89, 90, 1000])
def test_window_wider_than_sequence_is_causal(called, left):
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), 128, "cpu"), tiles_of(f"window:{left}", 90))
    assert called == ["forward", "backward"]


def test_window_gradients_accept_unaligned_inputs(called):
    """The package needs rows aligned to 16 bytes and contiguous LSE; the simulation rejects others."""
    dout, q, k, v = inputs(90, 90, (2, 2), 128, "cpu")
    kernel, tiles = kernel_of()[0], tiles_of("window:30", 90)
    out, lse = kernel.forward_single_call(q, k, v, tiles, OPTIONS)
    usual = kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, OPTIONS)
    odd = torch.nn.functional.pad(dout, (1, 0))[..., 1:]
    across = lse.transpose(1, 2).contiguous().transpose(1, 2)
    for mine, good in zip(
        kernel.backward_single_call(BackwardInputs(odd, q, k, v, across, out), tiles, OPTIONS), usual, strict=True
    ):
        assert torch.equal(mine, good)
    assert called == [*BOTH_30, BOTH_30[1]]


@pytest.mark.parametrize("installed", ["4.0.0b35", "4.0.0b4", "0.0.0", None])
def test_windows_of_unknown_package_version_use_own_kernel(monkeypatch, installed):
    called = flash_4_package(monkeypatch, installed, obeys=False)
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), 128, "cpu"), tiles_of("window:30", 90))
    assert called == []
    compare_whole(kernel_of()[0], *inputs(65, 65, (2, 2), 128, "cpu"), causal(65))
    assert called == ["forward", "backward"]


def test_ignored_window_of_package_is_detected(monkeypatch):
    called = flash_4_package(monkeypatch, obeys=False)
    with pytest.raises(AssertionError, match="out"):
        compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), 128, "cpu"), tiles_of("window:30", 90))
    assert called == BOTH_30[:1]


@pytest.mark.parametrize("text", ["documents:0,1,31,90", "full_documents:0,31,80,90", "documents:0,31,64,85"])
@pytest.mark.parametrize(("dim", "v_dim"), [*((dim, dim) for dim in (32, 64, 96, 128, 160, 192)), (192, 128)])
def test_package_computes_documents(called, dim, v_dim, text):
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), dim, "cpu", v_dim=v_dim), tiles_of(text, 90))
    assert called == ["forward of 6", "backward of 6"]


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 160, 192, 256])
def test_package_computes_documents_with_shared_heads(called, dim):
    compare_whole(kernel_of()[0], *inputs(90, 90, (4, 2), dim, "cpu"), tiles_of("documents:0,31,85", 90))
    assert called == ["forward of 4", "backward of 4"]


@pytest.mark.parametrize(("dim", "heads"), [(40, (2, 1)), (40, (2, 2))])
def test_documents_with_other_heads_use_own_kernel(called, dim, heads):
    compare_whole(kernel_of()[0], *inputs(90, 90, heads, dim, "cpu", batch=1), tiles_of("documents:0,31,90", 90))
    assert called == []


def test_documents_of_unknown_package_version_use_own_kernel(monkeypatch):
    called = flash_4_package(monkeypatch, "4.0.0b35")
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), 32, "cpu", batch=1), tiles_of("documents:0,31,90", 90))
    assert called == []


@pytest.mark.parametrize(("more", "asked"), [(0, ["forward of 2", "backward of 2"]), (1, [])])
def test_small_documents_use_own_kernel(called, monkeypatch, more, asked):
    work = (31 * 32 + 59 * 60) // 2 * 2 * 64
    monkeypatch.setattr(flash4, "LEAST", {0: work + more, 1: work + more})
    compare_whole(kernel_of()[0], *inputs(90, 90, (2, 2), 32, "cpu", batch=1), tiles_of("documents:0,31,90", 90))
    assert called == asked


def measured():
    """Return the milliseconds of each row and provider from which `SPEEDS` was taken."""
    results = json.loads((RESULTS / "flash-attn-4-h200-2026-11-29.json").read_text())["results"]
    return {(one["row"], one["provider"]): one.get("milliseconds") for one in results}


def later_gains():
    """Return by how much our backward pass with 4 K/V heads became faster since, by kind, head size and tokens."""
    kinds = {"causal": "shared heads", "ragged": "documents, shared heads"}
    results = json.loads((RESULTS / "few-kv-heads-h200-2026-11-29.json").read_text())["results"]
    gains = {
        (kinds[one["mask"]], one["head_dim"], one["tokens"]): one["before"] / one[one["takes"]]
        for one in results
        if one["heads"] == "16/4" and one["mask"] in kinds
    }
    return {key: gain for key, gain in gains.items() if gain > 1.02}  # others launch the same kernels


@pytest.mark.parametrize("kind", SPEEDS)
def test_speeds_equal_measurement(kind):
    times, found, gains = measured(), {}, later_gains()
    for size, sizes in {**{f"d{n}": (n, n) for n in (32, 64, 96, 128, 160, 192, 256)}, "mla": (192, 128)}.items():
        mask = {"shared heads": "gqa", "documents, shared heads": "documents-gqa"}.get(kind, kind)
        rows = [f"{size}-{mask}-{length}" for length in ("4k", "16k", "32k")]
        pairs = [(times.get((row, "hopper-whole")), times.get((row, "flash-attn-4"))) for row in rows]
        if all(theirs for _, theirs in pairs):
            later = [gains.get((kind, sizes[0], tokens), 1.0) for tokens in (4096, 16384, 32768)]
            factors = {"forward": [1.0] * len(rows), "backward": later}
            found[sizes] = tuple(
                tuple(
                    math.floor(100 * own[name] / theirs[name] / gain) / 100
                    for (own, theirs), gain in zip(pairs, gains_of_pass, strict=True)
                )
                for name, gains_of_pass in factors.items()
            )
    assert found == SPEEDS[kind]


@pytest.mark.parametrize(("kind", "mask"), [("full", "full"), ("causal", "causal"), ("window", "window:1024")])
def test_pairs_equal_measurement(kind, mask):
    exact = [Mask.parse(mask).num_pairs(length) * 16 for length in (4096, 16384, 32768)]
    assert PAIRS[kind] == pytest.approx(exact, rel=5e-3)
    assert all(least <= pairs for least, pairs in zip(PAIRS[kind], exact, strict=True))


@pytest.mark.parametrize(
    ("kind", "size", "tokens", "passes"),
    [
        ("causal", 128, 4096, (False, False)),  # 0.97 and 0.87 of our speed
        ("causal", 128, 16384, (False, True)),  # 0.96 and 1.04
        ("causal", 64, 4096, (False, False)),
        ("causal", 64, 32768, (True, True)),
        ("causal", 160, 4096, (True, False)),  # 1.06 and 0.91
        ("causal", 160, 8192, (True, False)),  # between 1.06 and 0.99, and between 0.91 and 0.98
        ("causal", 160, 24576, (False, False)),  # between 0.99 and 1.01, and between 0.98 and 0.89
        ("causal", 192, 2048, (False, False)),  # not measured
        ("causal", 80, 16384, (False, False)),  # wrong
        ("full", 128, 4096, (False, True)),
        ("full", 64, 4096, (True, True)),
    ],
)
def test_faster_kernel_is_chosen(monkeypatch, kind, size, tokens, passes):
    monkeypatch.setattr(flash4_speeds, "SPEEDS", SPEEDS)
    monkeypatch.setattr(flash4_speeds, "PAIRS", PAIRS)
    pairs = Mask.parse(kind).num_pairs(tokens) * 16
    assert tuple(flash4_speeds.is_faster(kind, (size, size), which, pairs) for which in (0, 1)) == passes


def test_pair_asks_package_only_where_it_is_faster(called, monkeypatch):
    monkeypatch.setattr(flash4_speeds, "SPEEDS", {"causal": {(64, 64): ((1.5, 1.5), (0.9, 0.9))}})
    compare_whole(kernel_of()[0], *inputs(65, 65, (2, 2), 64, "cpu"), causal(65))
    assert called == ["forward"]


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)], ids=["mha", "gqa"])
@pytest.mark.parametrize(("case", "passes"), [("causal", ["forward", "backward"]), ("box", [])])
def test_package_computes_causal_squares_with_softcap(called, case, passes, heads):
    """Only causal squares with equal heads were measured."""
    rows, columns, _, tiles = WHOLE[case]
    kernel, _ = kernel_of(replace(USUAL, softcap=CAPPED.softcap))
    assert kernel.name == PAIR
    compare_whole(kernel, *inputs(rows, columns, heads, 128, "cpu"), tiles, options=CAPPED)
    assert called == (passes if heads == (2, 2) else [])


@pytest.mark.parametrize("mask", ["window:30", "documents:0,20,61,90", "full", "prefix:20"])
def test_package_kernel_computes_softcap(called, mask):
    """All calls of the package get the softcap: the derivative of a window's scores has it too."""
    kernel = library_kernels.Flash4Kernel()
    compare_whole(kernel, *inputs(90, 90, (4, 2), 64, "cpu"), tiles_of(mask, 90), merged=True, options=CAPPED)
    assert called
    with pytest.raises(AssertionError, match="out"):
        compare_whole(DropsSoftcap(), *inputs(90, 90, (4, 2), 64, "cpu"), tiles_of(mask, 90), True, CAPPED)


class DropsSoftcap(library_kernels.Flash4Kernel):
    def options(self, call):
        return {}


def test_package_computes_float16(called):
    compare_whole(kernel_of()[0], *inputs(67, 67, (2, 1), 64, "cpu", torch.float16), causal(67))
    assert called == ["forward", "backward"]


OWN = {
    "documents with a gap": (90, 90, Tiles([Tile(0, 40, 0, 40, 0, 40), Tile(50, 90, 50, 90, 0, 40)])),
    "a window of both sides": (90, 90, tiles_of("window:30:5", 90)),
    "documents with a window": (90, 90, Tiles([Tile(0, 40, 0, 40, 0, 30), Tile(40, 90, 40, 90, 0, 30)])),
    "a window of some keys": (90, 90, Tiles([Tile(0, 60, 0, 60, 0, 30)])),
    "a window and sinks": (90, 90, Tiles([Tile(0, 90, 0, 90, 0, 30), Tile(31, 90, 0, 5, 31, 90)])),
    "half a window": (90, 90, Tiles([Tile(0, 90, 0, 90, -1, 90)])),
    "the mirror of a causal square": (70, 70, Tiles([Tile(0, 70, 0, 70, -70, 0)])),
    "a causal rectangle": (70, 100, Tiles([Tile(0, 70, 0, 100, -30, 70)])),
    "a box of some columns": (60, 90, Tiles([Tile(0, 60, 0, 80, -90, 60)])),
    "a causal square of some rows": (90, 60, Tiles([Tile(30, 90, 0, 60, 30, 90)])),
    "two boxes": (60, 90, Tiles([Tile(0, 60, 0, 40, -90, 60), Tile(0, 60, 40, 90, -90, 60)])),
}


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("case", OWN)
def test_other_tiles_use_own_kernel(called, dim, case):
    rows, columns, tiles = OWN[case]
    compare_whole(kernel_of()[0], *inputs(rows, columns, (2, 2), dim, "cpu", batch=1), tiles)
    assert called == []


@pytest.mark.parametrize(("dim", "heads"), [(32, (2, 1)), (64, (2, 1)), (128, (2, 1)), (128, (4, 2))])
def test_windows_with_other_heads_use_own_kernel(called, dim, heads):
    compare_whole(kernel_of()[0], *inputs(90, 90, heads, dim, "cpu", batch=1), tiles_of("window:30", 90))
    assert called == []


@pytest.mark.parametrize("dim", [64, 128])
def test_ring_steps_use_own_kernel(called, dim):
    kernel = kernel_of()[0]
    dout, q, k, v = inputs(70, 70, (2, 1), dim, "cpu", batch=1)
    out, lse = kernel.attend(q, k[:, :40], v[:, :40], box(70, 40), OPTIONS)
    assert out.dtype == torch.float32
    out, lse = kernel.attend(q, k[:, 40:], v[:, 40:], box(70, 30), OPTIONS, state=(out, lse))
    assert gap(out, ORACLE.attend(*wide(q, k, v), box(70, 70), OPTIONS)[0]) < 6e-3
    into = tuple(torch.full_like(x, 0.25, dtype=torch.float32) for x in (q, k, v))
    kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), box(70, 70), OPTIONS, into=into)
    exact = tuple(torch.full_like(x, 0.25, dtype=torch.float64) for x in (q, k, v))
    ORACLE.attend_backward(
        BackwardInputs(*wide(dout, q, k, v, lse), out=out.double()), box(70, 70), OPTIONS, into=exact
    )
    for mine, good in zip(into, exact, strict=True):
        assert gap(mine - 0.25, good - 0.25) < 1e-2
    assert called == []


def test_ring_steps_with_window_use_own_kernel(called):
    kernel, tiles = kernel_of()[0], tiles_of("window:30", 70)
    dout, q, k, v = inputs(70, 70, (2, 2), 128, "cpu", batch=1)
    out, lse = kernel.attend(q, k, v, tiles, OPTIONS)
    into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), tiles, OPTIONS, into=into)
    assert called == []


def test_hopper_by_name_uses_own_kernel_only(called):
    for dim, tiles in ((64, causal(65)), (128, causal(65)), (128, tiles_of("window:30", 65))):
        compare_whole(kernel_of(named="hopper")[0], *inputs(65, 65, (2, 2), dim, "cpu", batch=1), tiles)
    assert called == []


def test_auto_chooses_pair_if_package_is_installed(called):
    assert [kernel.name for kernel in CudaBackend().kernels()][:2] == [PAIR, "hopper"]
    assert kernel_of()[0].name == kernel_of(named=PAIR)[0].name == PAIR
    refused = replace(USUAL, deterministic=True)
    assert kernel_of(refused)[0].name == "hopper"
    with pytest.raises(UnsupportedError, match="deterministic"):
        kernel_of(refused, PAIR)


@pytest.mark.parametrize("package", ["present", "absent"])
def test_auto_prefers_portable_kernels_for_small_heads(called, monkeypatch, package):
    """They were measured to be faster. Without them, the slower kernel still serves the call."""
    if package == "absent":
        monkeypatch.setitem(sys.modules, "flash_attn", None)
    small = replace(USUAL, head_dim=16, v_head_dim=16)
    assert kernel_of(small)[0].name == "hopper", "few keys per query"
    small = replace(small, layout=make_layout("contiguous", 6000, 1))
    chosen, why = kernel_of(small)
    assert chosen.name not in (PAIR, "hopper")
    assert "not hopper: the portable kernels were faster with heads of up to 16 and long rows" in why
    window = replace(small, mask=Mask.parse("window:1024"))
    assert kernel_of(window)[0].name == "hopper", "few keys per query"
    assert kernel_of(small, "hopper")[1] == "named"

    class OnlyHopper(CudaBackend):
        def make_kernels(self):
            yield HopperKernel()

    assert choose_kernel(OnlyHopper(), small)[0].name == "hopper"
    assert choose_kernel(OnlyHopper(), small)[1].startswith("no other of the backend's serves it; not hopper: ")


def test_auto_chooses_hopper_without_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    chosen, why = kernel_of()
    assert chosen.name == "hopper"
    assert f"not {PAIR}: the package flash_attn is not installed" in why
    assert "pip install flash-attn-4" in why


def test_pair_declines_broken_package(tmp_path, monkeypatch):
    (tmp_path / "broken_package.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = LazyKernel("flash-attn-4", "nowhere:Kernel", needs="broken_package")
    support = HopperFlash4Kernel(broken).supports(USUAL)
    assert not support.ok
    assert "broken_package is broken: it fails to import" in support.reason


def test_pair_declines_without_importing_package(monkeypatch):
    """The import takes seconds and may fail."""
    monkeypatch.setattr(hopper_support, "device_reason", lambda device: "it runs on sm_90, not on sm_80")
    assert "sm_80" in HopperFlash4Kernel(None).supports(USUAL).reason


@pytest.mark.parametrize(("dim", "tiles"), [(64, causal(9)), (128, tiles_of("window:3", 9))], ids=["causal", "window"])
def test_pair_rejects_negative_scale_as_hopper_kernel(called, dim, tiles):
    options = settings(scale=-1.0, deterministic=False)
    dout, q, k, v = inputs(9, 9, (1, 1), dim, "cpu")
    with pytest.raises(UnsupportedError, match="hopper kernel"):
        kernel_of()[0].forward_single_call(q, k, v, tiles, options)
    with pytest.raises(UnsupportedError, match="hopper kernel"):
        kernel_of()[0].backward_single_call(BackwardInputs(dout, q, k, v, torch.zeros(2, 1, 9), q), tiles, options)
    assert called == []


def test_pair_accepts_empty_batch(called):
    dout, q, k, v = (x[:0] for x in inputs(9, 9, (1, 1), 64, "cpu"))
    out, lse = kernel_of()[0].forward_single_call(q, k, v, causal(9), OPTIONS)
    assert (out.shape, lse.shape) == ((0, 9, 1, 64), (0, 1, 9))
    made = kernel_of()[0].backward_single_call(BackwardInputs(dout, q, k, v, lse, out), causal(9), OPTIONS)
    assert [x.shape for x in made] == [q.shape] * 3
    assert called == []


def test_pair_has_hardware_spec_of_hopper():
    for machine in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        assert hardware_of_machine(machine, 4, PAIR) == hardware_of_machine(machine, 4, "hopper")


@pytest.mark.parametrize("tiles", [box(64, 64), causal(64)], ids=["box", "causal"])
def test_call_without_memory_leaves_flash_attn_4_alone(called, tiles):
    """A rehearsal compiles only the Hopper kernel; flash-attn-4 compiles its kernels when it is called."""
    kernel, _ = kernel_of(USUAL, PAIR)
    assert kernel.traits.compiles_ahead
    q, k, v, dout = (torch.empty(1, 64, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (4, 2, 2, 4))
    out, lse = kernel.forward_single_call(q, k, v, tiles, USUAL)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (1, 4, 64), torch.float32)
    gradients = kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, USUAL)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    assert not called
