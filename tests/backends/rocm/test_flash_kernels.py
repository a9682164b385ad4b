"""Test torch's flash attention and AITER on AMD GPUs with emulated operators on the CPU: calls, splits and merges.

The real operators are not tested here; see tests/support/emulated_operators.py.
"""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.backends.rocm import flash_kernels
from burst_portable.conformance import check_backend
from burst_portable.conformance.cases import MASKS
from burst_portable.kernels.reference import ReferenceKernel
from tests.support import emulated_operators
from tests.support.calls import kernel_call


@pytest.fixture
def on_a_chip(monkeypatch):
    """Simulate a gfx942 with emulated operators."""
    monkeypatch.setattr(flash_kernels, "device_reason", lambda device: "")
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)


@pytest.fixture
def aten():
    """Register the emulation under the real schemas of torch's operators."""

    def forward(q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale, **more):
        assert (cum_q, cum_k, dropout, debug, more) == (None, None, 0.0, False, {})
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        out, lse = emulated_operators.attend(q, k, v, causal, scale)
        nothing = torch.zeros((), dtype=torch.int64)
        return out, lse, nothing, nothing, q.new_empty(0)

    def backward(dout, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, offset, *, scale, **more):
        assert (cum_q, cum_k, dropout, more) == (None, None, 0.0, {}), "lengths would mean several sequences"
        assert (max_q, max_k) == (q.shape[1], k.shape[1])
        return emulated_operators.attend_backward(dout, q, k, v, out, lse, causal, scale)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


def old_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, alibi_slopes, return_lse,
    return_softmax,
):  # fmt: skip
    """Compute the forward with the signature of AITER's first releases."""
    assert (dropout_p, window_size_left, window_size_right, alibi_slopes) == (0.0, -1, -1, None)
    assert (return_lse, return_softmax) == (True, False)
    return *emulated_operators.attend(q, k, v, causal, softmax_scale), None, None


def new_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, bias, alibi_slopes, return_lse,
    return_softmax, how_v3_bf16_cvt=1, sink_ptr=None,
):  # fmt: skip
    """Compute the forward with the parameters of later releases."""
    assert (bias, how_v3_bf16_cvt, sink_ptr) == (None, 1, None)
    return old_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, alibi_slopes, return_lse,
        return_softmax,
    )  # fmt: skip


def backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dbias, dropout_p, softmax_scale, causal, window_size_left,
    window_size_right, bias, alibi_slopes, deterministic, rng_state=None, is_v3_atomic_fp32=True, how_v3_bf16_cvt=1,
):  # fmt: skip
    assert (dbias, dropout_p, window_size_left, window_size_right, bias) == (None, 0.0, -1, -1, None)
    assert (alibi_slopes, deterministic, rng_state) == (None, False, None)
    parts = emulated_operators.attend_backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
    for buffer, part in zip((dq, dk, dv), parts, strict=True):
        assert buffer.is_contiguous()
        buffer.copy_(part)


@pytest.fixture
def aiter(monkeypatch):
    """Return a function that installs a package `aiter` with two given functions and returns our kernel on it."""

    def install(forward, backward):
        modules = {name: ModuleType(name) for name in ("aiter", "aiter.ops", "aiter.ops.mha")}
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        if forward is not None:
            modules["aiter.ops.mha"]._flash_attn_forward = forward
        modules["aiter.ops.mha"]._flash_attn_backward = backward
        from burst_portable.backends.rocm.flash_kernels import AiterKernel

        return AiterKernel()

    return install


class Subject(CpuBackend):
    """The CPU backend with the tested kernel."""

    def __init__(self, kernel):
        self._kernels = kernel, ReferenceKernel()


CASES = [
    *(f"mask={mask},heads=gqa,memory=padded" for mask in MASKS),
    "layout=striped,mask=window,ranks=3,heads=mqa,dtype=float16",
    "layout=striped,mask=sink_window,ranks=3,memory=heads",
    "layout=zigzag,mask=causal,memory=odd",
    "layout=contiguous,mask=causal,ranks=1,length=129,heads=6x2x64x64",
]


def examined(kernel, cases=(), **how):
    named = [f"kernels:{kernel.name}:dtype=bfloat16,deterministic=False,{case}" for case in cases]
    report = check_backend(Subject(kernel), ranks=3, cases=named, kernel=kernel.name, **how)
    assert not report.failures, report.failures[0]
    assert len([r for r in report.results if not r.skipped]) >= max(3, len(cases))


def test_torch_flash_matches_float64(on_a_chip, aten):
    examined(flash_kernels.RocmFlashKernel(), CASES)


@pytest.mark.parametrize("forward", [old_forward, new_forward])
def test_aiter_matches_float64(on_a_chip, aiter, forward):
    examined(aiter(forward, backward), CASES[-3:])


@pytest.mark.full
def test_torch_flash_passes_conformance_checks(on_a_chip, aten):
    examined(flash_kernels.RocmFlashKernel(), only=["kernels", "fully_masked", "extremes", "sizes"])


def problem(**changes):
    usual = {"dtype": torch.bfloat16, "device": "cuda", "heads": 4, "kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    return kernel_call(**{**usual, "deterministic": False, **changes})


REASONS = [
    ({"dtype": torch.float32}, "float32"),
    ({"v_head_dim": 32}, "differ from heads"),
    ({"head_dim": 68, "v_head_dim": 68}, "multiples of 8"),
    ({"head_dim": 264, "v_head_dim": 264}, "up to 256"),
    ({"heads": 3}, "not a multiple"),
    ({"softcap": 30.0}, "has no softcap"),
    ({"scale": -1.0}, "only positive scales"),
    ({"deterministic": True}, "order of additions"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS)
def test_rocm_flash_kernels_decline_with_reason(on_a_chip, aiter, change, reason):
    for kernel in (flash_kernels.RocmFlashKernel(), aiter(old_forward, backward)):
        assert kernel.supports(problem()).ok
        support = kernel.supports(problem(**change))
        assert not support.ok
        assert reason in support.reason


def test_rocm_flash_kernels_decline_other_torch_builds(aiter):
    for kernel in (flash_kernels.RocmFlashKernel(), aiter(old_forward, backward)):
        assert "torch for ROCm" in kernel.supports(problem()).reason


def test_rocm_flash_kernels_decline_unsupported_chips(monkeypatch):
    chips = ["gfx942:sramecc+:xnack-", "gfx1100"]
    monkeypatch.setattr(torch.version, "hip", "7.2.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("", (), {"gcnArchName": chips[i]}))
    flash_kernels.device_reason.cache_clear()
    assert "not gfx1100" in flash_kernels.declined(problem())
    chips[1] = "gfx90a:sramecc+:xnack-"
    flash_kernels.device_reason.cache_clear()
    assert flash_kernels.declined(problem()) == ""
    flash_kernels.device_reason.cache_clear()


def test_torch_flash_declines_torch_without_flash_attention(on_a_chip, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: False)
    assert "without flash attention" in flash_kernels.RocmFlashKernel().supports(problem()).reason


def test_aiter_declines_unknown_signature(on_a_chip, aiter):
    def renamed(dout, q, k, v, out, lse, causal):
        raise AssertionError("never called")

    assert "_flash_attn_backward lacks alibi_slopes" in aiter(old_forward, renamed).supports(problem()).reason
    assert "_flash_attn_forward lacks the function" in aiter(None, backward).supports(problem()).reason
