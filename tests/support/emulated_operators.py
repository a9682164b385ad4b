"""Emulate third-party flash attention operators on the CPU, following their sources. The numbers are computed here.

The operators reject what the real ones reject and follow their silent conventions. A kernel that misuses them fails:
causal is aligned bottom-right, a row without keys has LSE +inf, a backward with a causal rectangle raises, and out
and gradients have 16 bits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

from burst_portable.backends.cuda import library_kernels
from burst_portable.numerics import State

Window = tuple[int | None, int | None]
"""How many keys before and after its own a row sees; None is no bound."""
NO_WINDOW: Window = (None, None)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float, window: Window, softcap: float) -> Tensor:
    """Return scores of shape [B, Hq, Sq, Sk] in float64; a softcap of 0 is none."""
    keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: Window = NO_WINDOW,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    _check(q, k, v)
    scores = _scores(q, k, causal, scale, window, softcap)
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
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    _check(dout, q, k, v, out)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert not causal or q.shape[1] == k.shape[1], "a causal rectangle is refused"
    scores = _scores(q, k, causal, scale, window, softcap)
    weights = torch.exp(scores - lse.double()[..., None])
    heads = k.shape[2]
    shared = q.shape[2] // heads
    assert v.shape[3] == k.shape[3] or shared == 1, "unequal sizes need a K/V head per query head"
    values, keys = (x.double().repeat_interleave(shared, 2) for x in (v, k))
    wide = dout.double()
    delta = (wide * out.double()).sum(-1).transpose(1, 2)
    ds = weights * (torch.einsum("bqhd,bkhd->bhqk", wide, values) - delta[..., None]) * scale
    if softcap:
        ds = ds * (1 - (scores.masked_fill(weights == 0, 0.0) / softcap) ** 2)
    dq = torch.einsum("bhqk,bkhd->bqhd", ds, keys)
    dk, dv = (torch.einsum("bhqk,bqhd->bkhd", a, b) for a, b in ((ds, q.double()), (weights, wide)))
    summed = (x.unflatten(2, (heads, shared)).sum(3) for x in (dk, dv))
    return dq.to(q.dtype), *(x.to(q.dtype) for x in summed)


@dataclass(frozen=True)
class Lengths:
    """The arguments for sequences of several lengths: tensors [tokens, H, D] instead of [B, S, H, D]."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def sequences(self, q: Tensor, k: Tensor) -> list[tuple[slice, slice]] | None:
        """Check the arguments, and return the tokens of q and k of each sequence; None without lengths."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            assert self.cu_seqlens_q is self.cu_seqlens_k, "a call has both or none"
            assert (q.dim(), k.dim()) == (4, 4)
            return None
        assert (q.dim(), k.dim()) == (3, 3)
        sides = (q, self.cu_seqlens_q, self.max_seqlen_q), (k, self.cu_seqlens_k, self.max_seqlen_k)
        found = []
        for x, bounds, longest in sides:
            assert (bounds.dtype, bounds.device, bounds.is_contiguous()) == (torch.int32, x.device, True)
            ends = bounds.tolist()
            assert 0 <= ends[0] <= ends[-1] <= x.shape[0], "it would read other memory"
            lengths = [stop - start for start, stop in pairwise(ends)]
            assert min(lengths) > 0, "on sm_90, rows of a sequence without keys attend to keys of the one before"
            assert longest == max(lengths), "it selects the kernel"
            found.append([slice(start, stop) for start, stop in pairwise(ends)])
        return list(zip(*found, strict=True))


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, lengths: Lengths, softcap: float = 0.0
) -> State:
    """Return (out [tokens, H, D], LSE [H, tokens]). Tokens outside all sequences keep what the memory had."""
    sequences = lengths.sequences(q, k)
    if sequences is None:
        return attend(q, k, v, causal, scale, softcap=softcap)
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
    for rows, columns in sequences:
        one = attend(q[None, rows], k[None, columns], v[None, columns], causal, scale, softcap=softcap)
        out[rows], lse[:, rows] = one[0][0], one[1][0]
    return out, lse


def attend_packed_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    lengths: Lengths,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv) [tokens, H, D]. Tokens outside all sequences keep what the memory had."""
    sequences = lengths.sequences(q, k)
    if sequences is None:
        return attend_backward(dout, q, k, v, out, lse, causal, scale, softcap=softcap)
    assert lse.shape == (q.shape[1], q.shape[0])
    assert lse.is_contiguous()
    made = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for rows, columns in sequences:
        inputs = (x[None, at] for x, at in ((dout, rows), (q, rows), (k, columns), (v, columns), (out, rows)))
        one = attend_backward(*inputs, lse[None, :, rows].contiguous(), causal, scale, softcap=softcap)
        for whole, at, part in zip(made, (rows, columns, columns), one, strict=True):
            whole[at] = part[0]
    return made


def flash_4_package(
    monkeypatch: pytest.MonkeyPatch, installed: str | None = "4.0.0b36", obeys: bool = True
) -> list[str]:
    """Install an emulated flash-attn-4 with the interface of 4.0.0b36, and return the list of its calls.

    As in 4.0.0b36, dQ is wrong for head sizes that are no multiples of 32.

    installed: The version that it reports; None if it is on the path but not installed. obeys: Whether it applies
    windows.
    """
    called: list[str] = []

    def record(name: str, window: Window, lengths: Lengths) -> None:
        packed = "" if lengths.cu_seqlens_q is None else f" of {len(lengths.cu_seqlens_q) - 1}"
        assert not packed or window == NO_WINDOW, "no window of packed documents was compared"
        called.append(f"{name}{packed}" if window == NO_WINDOW else f"{name} {window}")

    def forward(
        q, k, v, *, softmax_scale, causal, softcap=0.0, window_size_left=None, window_size_right=None, return_lse,
        **lengths,
    ):  # fmt: skip
        window, sequences = (window_size_left, window_size_right), Lengths(**lengths)
        record("forward", window, sequences)
        assert return_lse
        if window != NO_WINDOW and obeys:
            return *attend(q, k, v, causal, softmax_scale, window, softcap), None, None, None
        return *attend_packed(q, k, v, causal, softmax_scale, sequences, softcap), None, None, None

    def backward(
        q, k, v, out, dout, lse, softmax_scale, causal, softcap=0.0, window_size_left=None, window_size_right=None,
        **lengths,
    ):  # fmt: skip
        window, sequences = (window_size_left, window_size_right), Lengths(**lengths)
        record("backward", window, sequences)
        if window != NO_WINDOW and obeys:
            dq, dk, dv = attend_backward(dout, q, k, v, out, lse, causal, softmax_scale, window, softcap)
        else:
            dq, dk, dv = attend_packed_backward(dout, q, k, v, out, lse, causal, softmax_scale, sequences, softcap)
        return dq if q.shape[-1] % 32 == 0 else dq.flip(-3), dk, dv

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
