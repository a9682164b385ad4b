"""Define kernels on libraries for NVIDIA GPUs: torch's flash and cuDNN operators, and flash-attn-4 if installed.

All three support boxes and causal masks. They are called only for boxes and causal squares (`operator_kernel`). So it
does not matter that flash aligns a causal rectangle bottom-right and cuDNN top-left, nor that flash returns +inf for a
fully masked row. Their 16-bit results, out and gradients, are summed in float32. One exception: known versions of
flash-attn-4 are called for a causal window or for packed documents if one call computes everything.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from burst_portable.kernels.base import BackwardInputs, Gradients, Support
from burst_portable.kernels.operator_kernel import AcceleratorKernel, AtenFlashKernel, causal_window, declined_by_flash
from burst_portable.kernels.packed_documents import PackedDocuments, pack_documents
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tiles

_CUDNN_FROM = 90000
_FLASH_4 = ((9, 0), (10, 0), (10, 3), (11, 0))
"""Devices for which flash-attn-4 has a forward and a backward with heads of 128."""
_LARGEST = {(9, 0): 256}
"""Largest head size for which results on a device were compared with float32, if it is not 128."""
_MULTIPLE = 32
"""Of which the head sizes of flash-attn-4 are multiples.

With heads of 16, 80 and 112, dQ of version 4.0.0b36 was wrong by more than its own size, and so were dK and dV with
fewer K/V heads than query heads. Sizes of 32, 64, 96, 128, 160, 192 and 256, and 192 with values of 128, were right
(benchmarks/attention.py, one H100, 2026-11-25).
"""
_UNEQUAL = ((192, 128),)
"""Sizes of heads and values that differ and that it supports: those of multi-head latent attention."""
_KNOWN_FROM = "4.0.0b36"
"""The first version of flash-attn-4 whose windows (H100), documents and softcaps (H200) equaled the reference."""
_STAGES = ("a", "b", "rc", "")


def declined(
    call: AttentionCall, largest_head: int, *, unequal: Container[tuple[int, int]] = (), softcap: bool = False
) -> str:
    """Return why none of these kernels can serve a call; "" if one may. See `declined_by_flash`."""
    if reason := declined_by_flash(call, largest_head, unequal=unequal, softcap=softcap):
        return reason
    if call.deterministic:
        return "its backward adds dq in any order; it serves deterministic=False only"
    if torch.version.hip is not None or call.device != "cuda":
        return f"it runs on NVIDIA GPUs, not on {call.device}"
    return ""


@lru_cache(maxsize=1)
def capabilities() -> tuple[tuple[int, int], ...]:
    """Return the compute capabilities of all visible GPUs."""
    return tuple(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))


class CudaFlashKernel(AtenFlashKernel):
    """Call torch's flash attention (FlashAttention-2)."""

    def supports(self, call: AttentionCall) -> Support:
        reason = declined(call, 256)
        if not reason and (old := [f"sm_{major}{minor}" for major, minor in capabilities() if major < 8]):
            reason = f"it needs sm_80 or later, not {old[0]}"
        if not reason and not torch.backends.cuda.is_flash_attention_available():
            reason = "this torch is built without flash attention"
        return Support(not reason, reason)


class CudnnKernel(CudaFlashKernel):
    """Call cuDNN's attention through torch. It cannot take sequences of one row: flash attention computes those."""

    name = "cudnn"

    def supports(self, call: AttentionCall) -> Support:
        version = torch.backends.cudnn.version() or 0
        if version < _CUDNN_FROM:
            return Support(False, f"it needs cuDNN 9 or later, not {version}")
        if reason := declined(call, 128):
            return Support(False, reason)
        return super().supports(call)

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> State:
        if _one_row(q, k):
            return super().operate(q, k, v, causal, scale)
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        out, lse, *_ = operator(*heads_first, None, True, 0.0, causal, False, scale=scale)
        return out.transpose(1, 2), lse.view(lse.shape[:3])  # [B, H, S, 1]

    def operate_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
    ) -> Gradients:
        if _one_row(q, k):
            return super().operate_backward(dout, q, k, v, out, lse, causal, scale)
        operator = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is off
        # torch keys cuDNN's plans by the sizes and strides of q, k and v only. It would read other strides of dout and
        # out as those of the call that made the plan.
        dout, out = dout.contiguous(), out.contiguous()
        heads_first = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        sizes = (None, None, q.shape[1], k.shape[1])  # no bias, and lengths of one sequence
        dq, dk, dv = operator(
            *heads_first, lse.unsqueeze(-1), seed, seed, None, *sizes, 0.0, causal, scale=scale
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _one_row(q: Tensor, k: Tensor) -> bool:
    return q.shape[1] == 1 or k.shape[1] == 1


class Flash4Kernel(AcceleratorKernel):
    """flash-attn-4 (CuTe). Make it through `kernels.base.LazyKernel`, which imports the package on first use."""

    name = "flash-attn-4"

    def __init__(self) -> None:
        # FlashAttention-2 has a package of the same name, without this module.
        found = find_spec("flash_attn.cute") is not None
        self._interface: Any = import_module("flash_attn.cute.interface") if found else None
        self._known = _is_known()
        self._pack_documents = lru_cache(maxsize=256)(pack_documents)

    @cached_property
    def traits(self) -> KernelTraits:  # type: ignore[override]  # see `AcceleratorKernel`
        return replace(super().traits, supports_causal_window=self._known, supports_documents=self._known)

    def supports(self, call: AttentionCall) -> Support:
        if self._interface is None:
            return Support(False, "the package flash_attn that is installed is not flash-attn-4")
        # Its backward of unequal sizes has one K/V head per query head.
        largest = min((_LARGEST.get(one, 128) for one in capabilities()), default=128)
        unequal = _UNEQUAL if call.heads == call.kv_heads else ()
        reason = declined(call, largest, unequal=unequal, softcap=self._known)
        if not reason and call.head_dim % _MULTIPLE:
            reason = f"its gradients were wrong with heads of {call.head_dim}; they must be multiples of {_MULTIPLE}"
        if not reason and (unsupported := sorted(set(capabilities()).difference(_FLASH_4))):
            reason = f"it has no backward for sm_{unsupported[0][0]}{unsupported[0][1]}"
        return Support(not reason, reason)

    def options(self, call: AttentionCall) -> Mapping[str, Any]:
        return {} if call.softcap is None else {"softcap": call.softcap}

    def operate(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, **options: Any) -> State:
        forward = self._interface._flash_attn_fwd
        out, lse, *_ = forward(q, k, v, softmax_scale=scale, causal=causal, return_lse=True, **options)
        return out, lse

    def operate_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
        **options: Any,
    ) -> Gradients:
        backward = self._interface._flash_attn_bwd
        dq, dk, dv = backward(q, k, v, out, dout, lse, scale, causal, **options)
        return dq, dk, dv

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Compute a causal window or packed documents in one call."""
        window, documents = self._window(q, k, tiles), self._documents(q, k, tiles)
        if not window and documents is None:
            return self.attend(q, k, v, tiles, call)
        q, k, v = self.prepare_operands(q.dtype, q, k, v)
        options = self.options(call)
        if documents is None:
            out, lse = self.operate(q, k, v, True, call.scale, **window, **options)
            return out, lse.contiguous()
        q, k, v = (documents.pack(x) for x in (q, k, v))
        out, lse = self.operate(q, k, v, documents.causal, call.scale, **_lengths(documents), **options)
        return documents.unpack(out), documents.unpack_lse(lse)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Compute the gradients of a causal window or of packed documents in one call."""
        window, documents = self._window(x.q, x.k, tiles), self._documents(x.q, x.k, tiles)
        if not window and documents is None:
            return super().backward_single_call(x, tiles, call)
        assert x.out is not None, "a backward pass in a single call has out"
        dout, q, k, v, out = self.prepare_operands(x.q.dtype, x.dout, x.q, x.k, x.v, x.out)
        lse, options = x.lse.to(accumulation_dtype(q.dtype)), self.options(call)
        if documents is None:
            return self.operate_backward(dout, q, k, v, out, lse.contiguous(), True, call.scale, **window, **options)
        dout, q, k, v, out = (documents.pack(x) for x in (dout, q, k, v, out))
        options = {**_lengths(documents), **options}
        made = self.operate_backward(
            dout, q, k, v, out, documents.pack_lse(lse), documents.causal, call.scale, **options
        )
        dq, dk, dv = map(documents.unpack, made)
        return dq, dk, dv

    def _window(self, q: Tensor, k: Tensor, tiles: Tiles) -> dict[str, int]:
        """Return the window arguments if the tiles are a causal window that the package computes, else no arguments."""
        left = causal_window(tiles, q.shape[1], k.shape[1]) if self._known else None
        return {} if left is None else {"window_size_left": left, "window_size_right": 0}

    def _documents(self, q: Tensor, k: Tensor, tiles: Tiles) -> PackedDocuments | None:
        """Return the packed documents if the tiles are documents that the package computes, else None."""
        batch, rows, columns = q.shape[0], q.shape[1], k.shape[1]
        return self._pack_documents(tiles, batch, rows, columns, q.device) if self._known else None


def _lengths(documents: PackedDocuments) -> dict[str, Any]:
    """Return the arguments of the package for documents. Queries and keys have the same ones."""
    ends, longest = documents.cu_seqlens, documents.longest
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _is_known() -> bool:
    """Return whether the installed flash-attn-4 is known to compute windows and documents correctly."""
    try:
        return _rank(version("flash-attn-4")) >= _rank(_KNOWN_FROM)
    except PackageNotFoundError:  # on the path, but not installed: the version is unknown
        return False


def _rank(text: str) -> tuple[int, ...]:
    """Return a key that orders versions: 4.0.0b9 < 4.0.0b36 < 4.0.0rc1 < 4.0.0. Unknown forms come first.

    So do development builds, which are numbered by the release after them.
    """
    found = re.fullmatch(r"(\d+)\.(\d+)(?:\.(\d+))?(?:(a|b|rc)(\d+))?(?:\.post\d+)?(?:\+.*)?", text)
    if found is None:
        return ()
    *release, stage, number = found.groups("")
    return (*(int(n or 0) for n in release), _STAGES.index(stage), int(number or 0))
