"""Test cuDNN, torch's flash attention and flash-attn-4 with emulated operators on the CPU: calls, splits and merges.

The real operators are not tested here; see tests/support/emulated_operators.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.backends.cuda import library_kernels
from burst_portable.conformance import check_backend
from burst_portable.kernels.base import BackwardInputs, LazyKernel
from burst_portable.kernels.packed_documents import pack_documents
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.tiles import Tile, Tiles
from tests.support import emulated_operators
from tests.support.calls import kernel_call, settings
from tests.support.flash4_cases import OPTIONS, compare_whole, inputs
from tests.support.hopper_cases import tiles_of


@pytest.fixture
def on_hopper(monkeypatch):
    """Simulate an H100 with emulated operators."""
    real = library_kernels.declined
    monkeypatch.setattr(
        library_kernels, "declined", lambda *a, **named: real(*a, **named).replace(f"{NOT_HERE}, not on cpu", "")
    )
    monkeypatch.setattr(library_kernels, "capabilities", lambda: ((9, 0),))
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)


NOT_HERE = "it runs on NVIDIA GPUs"


@pytest.fixture
def aten():
    """Register the emulation under the real schemas of torch's operators. cuDNN's causal mask is top-left."""
    called, plans = [], {}

    def steps(x):
        return tuple((size, stride) for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1)

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **more):
        called.append("flash")
        assert (cum_q, cum_k, dropout, debug, more) == (None, None, 0.0, False, {})
        out, lse = emulated_operators.attend(q, k, v, causal, scale)
        nothing = torch.zeros((), dtype=torch.int64)
        return out, lse, nothing, nothing, q.new_empty(0)

    def backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale, **more):
        called.append("flash backward")
        return emulated_operators.attend_backward(dout, q, k, v, out, lse, causal, scale)

    def cudnn_forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
        called.append("cudnn")
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        assert min(q.shape[2], k.shape[2]) > 1, "cuDNN knows no sequence of one row"
        assert not causal or q.shape[2] == k.shape[2]
        out, lse = emulated_operators.attend(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale)
        nothing = torch.zeros((), dtype=torch.int64)
        return out.transpose(1, 2), lse.unsqueeze(-1), nothing, nothing, 0, 0, nothing, nothing, nothing

    def cudnn_backward(
        dout, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *, scale=None
    ):
        called.append("cudnn backward")
        assert lse.shape == (*q.shape[:3], 1)
        assert (max_q, max_k, dropout) == (q.shape[2], k.shape[2], 0.0)
        # As in torch: a plan is cached by q, k and v, and reads dout and out with the strides of the first call.
        key = (causal, *((x.shape, steps(x)) for x in (q, k, v)))
        read = (steps(dout), steps(out))
        assert plans.setdefault(key, read) == read, "cuDNN would read dout or out with another call's strides"
        rows = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        parts = emulated_operators.attend_backward(*rows, lse[..., 0].contiguous(), causal, scale)
        return tuple(x.transpose(1, 2) for x in parts)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention", cudnn_forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", cudnn_backward, "CPU")
    yield called
    library._destroy()


@pytest.fixture
def flash_4(monkeypatch):
    emulated_operators.flash_4_package(monkeypatch)
    return library_kernels.Flash4Kernel()


class Subject(CpuBackend):
    """The CPU backend with the tested kernel."""

    def __init__(self, kernel):
        self._kernels = kernel, ReferenceKernel()


CASES = [
    *(f"mask={mask},heads=gqa,memory=padded" for mask in ("full", "causal", "window", "documents", "prefix")),
    "layout=contiguous,mask=causal,memory=heads",
    "layout=zigzag,mask=causal,memory=odd",
    "layout=striped,mask=window,ranks=3,heads=mqa,dtype=float16",
    "layout=contiguous,mask=causal,ranks=1,length=129,heads=6x2x64x64",
]


CASES_OF_32 = [
    *(f"mask={mask},heads=4x2x32x32,memory=padded" for mask in ("full", "causal", "window", "documents", "prefix")),
    "layout=contiguous,mask=causal,heads=4x4x32x32,memory=heads",
    "layout=zigzag,mask=causal,heads=4x4x96x96,memory=odd",
    "layout=striped,mask=window,ranks=3,heads=4x1x32x32,dtype=float16",
    "layout=contiguous,mask=documents,ranks=1,heads=4x2x32x32,memory=odd",
    "layout=contiguous,mask=causal,ranks=1,length=129,heads=6x2x64x64",
]


def examined(kernel, cases=CASES):
    named = [f"kernels:{kernel.name}:dtype=bfloat16,deterministic=False,{case}" for case in cases]
    report = check_backend(Subject(kernel), ranks=3, cases=named, kernel=kernel.name)
    assert not report.failures, report.failures[0]
    assert len([r for r in report.results if not r.skipped]) >= len(cases)


@pytest.mark.parametrize(
    "kernel", [library_kernels.CudaFlashKernel(), library_kernels.CudnnKernel()], ids=lambda k: k.name
)
def test_torch_operators_match_float64(on_hopper, aten, kernel):
    examined(kernel)
    assert kernel.name in aten
    assert f"{kernel.name} backward" in aten


def test_flash_attention_4_matches_float64(on_hopper, flash_4):
    examined(flash_4, CASES_OF_32)


def problem(**changes):
    usual = {"dtype": torch.bfloat16, "device": "cuda", "heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    return kernel_call(**{**usual, "deterministic": False, **changes})


def test_flash_attention_4_gets_rows_aligned_to_16_bytes(on_hopper, flash_4):
    """It would read others at assumed strides; the simulated package rejects them."""
    odd = torch.randn(2, 20, 2, 65).bfloat16()[..., :64]
    tiles, options = Tiles([Tile(0, 20, 0, 20, 0, 19)]), settings(scale=0.125, deterministic=False)
    for q in (odd, odd[:, :1].expand(2, 20, 2, 64), torch.randn(20 * 64 + 1).bfloat16()[1:].view(1, 20, 1, 64)):
        out, lse = flash_4.attend(q, q, q, tiles, options)
        exact = ReferenceKernel().attend(*(q.double(),) * 3, tiles, options)
        torch.testing.assert_close(out.double(), exact[0], rtol=0, atol=2e-2)
        flash_4.backward_single_call(BackwardInputs(q, q, q, q, lse, out), tiles, options)


WINDOWS = [(heads, left) for heads in ((2, 2), (4, 1)) for left in (0, 1, 30, 68)]


@pytest.mark.parametrize(("heads", "left"), WINDOWS)
def test_flash_attention_4_computes_causal_window_in_one_call(monkeypatch, heads, left):
    called = emulated_operators.flash_4_package(monkeypatch)
    dout, q, k, v = inputs(70, 70, heads, 64, "cpu")
    across = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dout, q, k, v))
    odd = tuple(torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in (dout, q, k, v))
    for tensors in ((dout, q, k, v), across, odd):
        compare_whole(library_kernels.Flash4Kernel(), *tensors, Tiles([Tile(0, 70, 0, 70, 0, left)]))
    assert called == [f"forward ({left}, 0)", f"backward ({left}, 0)"] * 3


def test_flash_attention_4_avoids_window_calls_that_need_merging(monkeypatch):
    called = emulated_operators.flash_4_package(monkeypatch)
    kernel, tiles = library_kernels.Flash4Kernel(), Tiles([Tile(0, 70, 0, 70, 0, 30)])
    dout, q, k, v = inputs(70, 70, (2, 2), 64, "cpu")
    out, lse = kernel.attend(q, k, v, tiles, OPTIONS)
    into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), tiles, OPTIONS, into=into)
    assert set(called) == {"forward", "backward"}
    compare_whole(kernel, dout, q, k, v, Tiles([Tile(0, 70, 0, 70, -5, 30)]), merged=True)
    assert set(called) == {"forward", "backward"}


DOCUMENTS = {
    "causal": ("documents:0,1,100,131,259,260", 260, 5),
    "full": ("full_documents:0,129,130,200", 200, 3),
    "causal, then padding": ("documents:0,31,90", 101, 2),
    "full, then padding": ("full_documents:0,64,90", 91, 2),
    "one, then padding": ("documents:0,70", 90, 1),
}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "dim", "v_dim"), [((2, 2), 32, 32), ((4, 1), 64, 64), ((2, 2), 192, 128)])
@pytest.mark.parametrize("case", DOCUMENTS)
def test_flash_attention_4_computes_documents_in_one_call(monkeypatch, case, heads, dim, v_dim, batch):
    called = emulated_operators.flash_4_package(monkeypatch)
    text, length, count = DOCUMENTS[case]
    tensors = inputs(length, length, heads, dim, "cpu", batch=batch, v_dim=v_dim)
    compare_whole(library_kernels.Flash4Kernel(), *tensors, tiles_of(text, length))
    assert called == [f"forward of {count * batch}", f"backward of {count * batch}"]


@pytest.mark.parametrize("batch", [1, 2])
def test_flash_attention_4_documents_accept_all_strides(monkeypatch, batch):
    """Covers heads before rows, slices of a packed tensor, and rows not aligned to 16 bytes."""
    called = emulated_operators.flash_4_package(monkeypatch)
    tensors = inputs(90, 90, (2, 2), 64, "cpu", batch=batch)
    across = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    odd = tuple(torch.nn.functional.pad(x, (1, 0))[..., 1:] for x in tensors)
    for made in (across, torch.cat(tensors, 2).split(2, 2), odd):
        compare_whole(library_kernels.Flash4Kernel(), *made, tiles_of("documents:0,31,80", 90))
    assert called == [f"forward of {2 * batch}", f"backward of {2 * batch}"] * 3


def test_flash_attention_4_documents_ignore_padding(monkeypatch):
    """Tokens in no document are not read: out and gradients are 0, and LSE is -inf."""
    emulated_operators.flash_4_package(monkeypatch)
    kernel, tiles = library_kernels.Flash4Kernel(), tiles_of("documents:0,31,80", 90)
    dout, q, k, v = inputs(90, 90, (2, 1), 64, "cpu")
    for x in (dout, q, k, v):
        x[:, 80:] = torch.nan
    out, lse = kernel.forward_single_call(q, k, v, tiles, OPTIONS)
    made = kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, OPTIONS)
    for x in (out, *made):
        assert torch.isfinite(x).all()
        assert not x[:, 80:].any()
    assert (lse[:, :, 80:] == -torch.inf).all()
    assert torch.isfinite(lse[:, :, :80]).all()


@pytest.mark.parametrize("wrong", ["bounds", "batch rows"])
def test_wrong_cu_seqlens_are_detected(monkeypatch, wrong):
    """A document begins a token too late, or the second batch row has the documents of the first."""
    emulated_operators.flash_4_package(monkeypatch)

    def pack(*arguments):
        documents = pack_documents(*arguments)
        bounds = documents.cu_seqlens.clone()
        if wrong == "bounds":
            bounds[1] += 1
        else:
            bounds[2:] = torch.tensor([100, 131, 200])
        longest = int(bounds.diff().max())
        return replace(documents, cu_seqlens=bounds, longest=longest)

    monkeypatch.setattr(library_kernels, "pack_documents", pack)
    with pytest.raises(AssertionError, match="out"):
        compare_whole(
            library_kernels.Flash4Kernel(), *inputs(100, 100, (2, 1), 64, "cpu"), tiles_of("documents:0,40,100", 100)
        )


def test_flash_attention_4_makes_cu_seqlens_once(monkeypatch):
    """Both passes of all layers use one tensor on the device for equal tiles and sizes."""
    emulated_operators.flash_4_package(monkeypatch)
    made = []

    def pack(*arguments):
        made.append(arguments)
        return pack_documents(*arguments)

    monkeypatch.setattr(library_kernels, "pack_documents", pack)
    kernel = library_kernels.Flash4Kernel()
    for batch in (1, 2, 1):
        for text in ("documents:0,31,90", "documents:0,32,90"):
            compare_whole(kernel, *inputs(90, 90, (2, 2), 64, "cpu", batch=batch), tiles_of(text, 90))
    assert len(made) == 4


def test_flash_attention_4_splits_documents_of_unknown_version(monkeypatch):
    called = emulated_operators.flash_4_package(monkeypatch, "4.0.0b35")
    kernel = library_kernels.Flash4Kernel()
    assert not kernel.traits.supports_documents
    compare_whole(kernel, *inputs(90, 90, (2, 2), 64, "cpu"), tiles_of("documents:0,31,90", 90), merged=True)
    assert set(called) == {"forward", "backward"}


def test_flash_attention_4_of_unknown_version_has_no_softcap(on_hopper, monkeypatch):
    for installed, known in (("4.0.0b36", True), ("4.0.0b35", False)):
        emulated_operators.flash_4_package(monkeypatch, installed)
        support = library_kernels.Flash4Kernel().supports(problem(softcap=30.0))
        assert (support.ok, support.reason) == (known, "" if known else "it has no softcap")


VERSIONS = {
    "4.0.0b36": True, "4.0.0b37": True, "4.0.0b100": True, "4.0.0rc1": True, "4.0.0": True, "4.0.0.post1": True,
    "4.0.1a1": True, "4.1.0b2": True, "4.1": True, "5.0.0": True, "10.0.0": True, "4.0.0b36+cu130": True,
    "4.0.0b35": False, "4.0.0b4": False, "4.0.0b9": False, "4.0.0a40": False, "3.9.9": False, "2.8.3": False,
    "4.0.0b36.dev1": False, "4.0.0.dev40": False, "0.0.0": False, "unknown": False, "": False, None: False,
}  # fmt: skip


@pytest.mark.parametrize(("installed", "known"), VERSIONS.items())
def test_flash_attention_4_windows_need_known_version(monkeypatch, installed, known):
    """The windows of other versions are split into tiles, even if the version ignores windows."""
    called = emulated_operators.flash_4_package(monkeypatch, installed, obeys=known)
    kernel = library_kernels.Flash4Kernel()
    assert kernel.traits.supports_causal_window == known
    tiles = Tiles([Tile(0, 40, 0, 40, 0, 15)])
    compare_whole(kernel, *inputs(40, 40, (2, 1), 64, "cpu"), tiles, merged=not known)
    assert ("backward (15, 0)" in called) == ("forward (15, 0)" in called) == known


def test_ignored_window_of_flash_attention_4_is_detected(monkeypatch):
    emulated_operators.flash_4_package(monkeypatch, obeys=False)
    with pytest.raises(AssertionError, match="out"):
        compare_whole(
            library_kernels.Flash4Kernel(), *inputs(40, 40, (2, 1), 64, "cpu"), Tiles([Tile(0, 40, 0, 40, 0, 15)])
        )


def test_lazy_kernel_has_traits_of_loaded_kernel(monkeypatch):
    for installed, known in (("4.0.0b36", True), ("4.0.0b35", False)):
        emulated_operators.flash_4_package(monkeypatch, installed)
        lazy = LazyKernel("flash-attn-4", f"{library_kernels.__name__}:Flash4Kernel", needs="flash_attn")
        assert lazy.load().traits.supports_causal_window == known
    hopper = LazyKernel("hopper", "burst_portable.backends.cuda.hopper.kernel:HopperKernel", needs="triton")
    assert hopper.load() is hopper.load()
    expected = KernelTraits(writes_gradients=True, writes_into=True, compiles_ahead=True, target="sm_90")
    assert hopper.load().traits == expected
    reference = LazyKernel("reference", "burst_portable.kernels.reference:ReferenceKernel", needs="torch")
    assert reference.load().traits == KernelTraits(supports_dropout=True)


REASONS = [
    ({"dtype": torch.float32}, "float32"),
    ({"v_head_dim": 32}, "differ from heads"),
    ({"head_dim": 68, "v_head_dim": 68}, "multiples of 8"),
    ({"head_dim": 264, "v_head_dim": 264}, "up to"),
    ({"heads": 3}, "not a multiple"),
    ({"softcap": 30.0}, "softcap"),
    ({"scale": -1.0}, "only positive scales"),
    ({"deterministic": True}, "any order"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS)
def test_library_kernels_decline_with_reason(on_hopper, flash_4, change, reason):
    for kernel in (library_kernels.CudaFlashKernel(), library_kernels.CudnnKernel(), flash_4):
        assert kernel.supports(problem()).ok
        if kernel is flash_4 and "softcap" in change:
            continue
        support = kernel.supports(problem(**change))
        assert not support.ok
        assert reason in support.reason


def test_library_kernels_decline_old_gpus_and_libraries(on_hopper, flash_4, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 8907)
    assert "cuDNN 9 or later, not 8907" in library_kernels.CudnnKernel().supports(problem()).reason
    monkeypatch.setattr(library_kernels, "capabilities", lambda: ((9, 0), (8, 0)))
    assert library_kernels.CudaFlashKernel().supports(problem()).ok
    assert "no backward for sm_80" in flash_4.supports(problem()).reason
    monkeypatch.setattr(library_kernels, "capabilities", lambda: ((7, 5),))
    assert "sm_80 or later, not sm_75" in library_kernels.CudaFlashKernel().supports(problem()).reason


def test_flash_4_kernel_declines_other_flash_attn_package(on_hopper, monkeypatch):
    """FlashAttention-2 is imported as flash_attn, too."""
    module = ModuleType("flash_attn")
    module.__path__, module.__spec__ = [], ModuleSpec("flash_attn", None)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert "not flash-attn-4" in library_kernels.Flash4Kernel().supports(problem()).reason
