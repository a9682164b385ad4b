"""Emulate third-party flash attention operators on the CPU, following their sources. The numbers are computed here.

The operators reject what the real ones reject and follow their silent conventions. A kernel that misuses them fails:
causal is aligned bottom-right, a row without keys has LSE +inf, a backward with a causal rectangle raises, and out
and gradients have 16 bits.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from types import ModuleType

import pytest
import torch
from torch import Tensor

from burst_portable.backends.cuda import library_kernels

Window = tuple[int | None, int | None]
"""How many keys before and after its own a row sees; None is no bound."""
NO_WINDOW: Window = (None, None)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, window: Window) -> Tensor:
    """Return scores of shape [B, Hq, Sq, Sk] in float64."""
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * scale
    left, right = window[0], 0 if causal else window[1]
    rows, columns = scores.shape[2:]
    before = torch.arange(rows)[:, None] - torch.arange(columns) + columns - rows
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    if left is not None:
        hidden |= before > left
    if right is not None:
        hidden |= before < -right
    return scores.masked_fill(hidden, -torch.inf)


def _check(*tensors: Tensor) -> None:
    assert {x.shape[-1] for x in tensors} in ({192, 128}, {tensors[0].shape[-1]})
    for x in tensors:
        assert x.dtype == tensors[0].dtype
        assert x.dtype in (torch.float16, torch.bfloat16)
        assert x.stride(-1) == 1
        assert x.shape[-1] % 8 == 0
        assert x.shape[1] > 0
        assert x.data_ptr() % 16 == 0, "rows are loaded 16 bytes at once"
        assert all(step > 0 and step % 8 == 0 for step in x.stride()[:3]), "rows are loaded 16 bytes at once"


def attend(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: Window = NO_WINDOW
) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    scores = _scores(q, k, causal, scale, window)
    lse = scores.logsumexp(-1)
    empty = lse == -torch.inf
    weights = torch.exp(scores - lse.masked_fill(empty, 0.0)[..., None])
    values = v.double().repeat_interleave(q.shape[2] // v.shape[2], 2)
    out = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    return out.to(q.dtype), lse.masked_fill(empty, torch.inf).float()


def attend_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: Window = NO_WINDOW,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, q, k, v, out)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert not causal or q.shape[1] == k.shape[1], "a causal rectangle is refused"
    weights = torch.exp(_scores(q, k, causal, scale, window) - lse.double()[..., None])
    heads = k.shape[2]
    shared = q.shape[2] // heads
    assert v.shape[3] == k.shape[3] or shared == 1, "unequal sizes need a K/V head per query head"
    values, keys = (x.double().repeat_interleave(shared, 2) for x in (v, k))
    wide = dout.double()
    delta = (wide * out.double()).sum(-1).transpose(1, 2)
    ds = weights * (torch.einsum("bqhd,bkhd->bhqk", wide, values) - delta[..., None]) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, keys)
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", a, b) for a, b in ((ds, q.double()), (weights, wide)))
    summed = (x.unflatten(2, (heads, shared)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), *(x.to(q.dtype) for x in summed)


def flash_4_package(
    monkeypatch: pytest.MonkeyPatch, installed: str | None = "4.0.0b36", obeys: bool = True
) -> list[str]:
    """Install an emulated flash-attn-4 with the interface of 4.0.0b36, and return the list of its calls.

    As in 4.0.0b36, dQ is wrong for head sizes that are no multiples of 32.

    installed: The version that it reports; None if it is on the path but not installed. obeys: Whether it applies
    windows.
    """
    called: list[str] = []

    def forward(q, k, v, *, softmax_scale, causal, window_size_left=None, window_size_right=None, return_lse):
        window = window_size_left, window_size_right
        called.append("forward" if window == NO_WINDOW else f"forward {window}")
        assert return_lse
        return *attend(q, k, v, causal, softmax_scale, window if obeys else NO_WINDOW), None, None, None

    def backward(
        q, k, v, out, dout, lse, softmax_scale, causal, softcap=0.0, window_size_left=None, window_size_right=None
    ):
        window = window_size_left, window_size_right
        called.append("backward" if window == NO_WINDOW else f"backward {window}")
        assert softcap == 0.0
        dq, dk, dv = attend_backward(dout, q, k, v, out, lse, causal, softmax_scale, window if obeys else NO_WINDOW)
        return dq if q.shape[-1] % 32 == 0 else dq.flip(1), dk, dv

    def version(package: str) -> str:
        if package != "flash-attn-4" or installed is None:
            raise PackageNotFoundError(package)
        return installed

    monkeypatch.setattr(library_kernels, "version", version)
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    return called
