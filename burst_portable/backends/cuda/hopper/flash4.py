"""Define `HopperFlash4Kernel`, which calls flash-attn-4 for the calls on which it was measured to be faster.

The constants contain the measured limits. "Ours" is `HopperKernel`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import BackwardInputs, Gradients, LazyKernel, Support
from burst_portable.kernels.operator_kernel import CausalSquare, causal_squares, causal_window, single_operator_call
from burst_portable.kernels.packed_documents import find_documents
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

FORWARD = ((32, 32), (64, 64), (96, 96), (160, 160), (192, 192))
BACKWARD = ((32, 32), (64, 64), (128, 128), (192, 128), (192, 192))
"""Sizes of heads and values for which flash-attn-4 was faster on one H100.

Its speed divided by ours, with 16,384 tokens, a causal mask and 16 heads (benchmarks/attention.py, 2026-11-25)::

    sizes        32      64      96      128     160     192     192/128    256
    forward      1.37    1.09    1.11    0.98    1.01    1.14    1.02       0.97
    backward     1.33    1.05    1.03    1.05    0.93    1.05    1.07       0.68

With heads of 160 and 4,096 tokens, its forward was 1.17 of ours.
"""
OWN_HEADS_BACKWARD = ((96, 96),)
"""Sizes for which its backward was faster only if K and V have as many heads as Q.

With 8 K/V heads for 32 query heads of 96, it was 0.98 of ours (one H100, 2026-11-24).
"""
LONG, LONG_HEADS = 16384, ((128, 128),)
"""Number of queries and keys from which its forward was faster for heads and values of these sizes too.

The exception is a causal mask with as many K/V heads as query heads. The speed of ours divided by its speed, in 109 to
221 rounds (benchmarks/attention.py, 2026-11-23), was 0.985 and 0.979 in squares of 16,384 and 32,768 tokens without a
mask. In a causal square of 32,768 tokens it was 0.980 with 8 K/V heads for 32 query heads, but 1.012 with 16 for 16.
"""
LEAST = 1.5e10
"""Minimum of pairs times query heads times head size for which flash-attn-4 is called. Heads below 64 count as 64.

Below it, its host time is longer than its device time: on one H100, a forward took 107 to 180 us of the host. A window
of 1,024 in 16,384 tokens with 16 heads of 32 (1.7e10 as counted here) took 170 us of the device, and a causal square of
4,096 tokens with 16 heads of 160 (2.1e10) 150 us (benchmarks/attention.py, 2026-11-25).
"""
WINDOW_FORWARD = ((32, 32), (192, 192))
WINDOW_BACKWARD = ((32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (192, 192))
"""Sizes for which it was faster with a causal window, if K and V have as many heads as Q.

Its speed divided by ours, with 16,384 tokens, window:1024 and 16 heads (benchmarks/attention.py, 2026-11-25)::

    sizes        32      64      96      128     160     192     192/128    256
    forward      1.19    1.01    0.99    0.99    1.02    1.05    0.94       0.96
    backward     1.31    1.05    1.06    1.05    1.00    1.11    1.07       0.77

With 8 K/V heads for 32 query heads of 128, its backward was 0.86 of ours.
"""
DOCUMENTS_FORWARD = ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 192), (192, 128))
DOCUMENTS_BACKWARD = DOCUMENTS_FORWARD
DOCUMENTS_FORWARD_SHARED = ((32, 32), (64, 64), (96, 96), (160, 160))
DOCUMENTS_BACKWARD_SHARED = (*DOCUMENTS_FORWARD_SHARED, (128, 128))
"""Sizes for which it was faster with packed documents; "shared" if several query heads share a K/V head.

Its speed divided by ours on one H200, with 16,384 tokens in 16 documents and 16 heads (benchmarks/attention.py,
2026-11-28)::

    sizes             32      64              96      128     160     192     192/128
    forward           1.16    1.08            1.08    1.02    1.01    1.13    1.08
    backward          1.16    0.94 to 1.12    1.14    1.10    1.14    1.27    1.24
    4 K/V heads
    forward           1.24    1.10            1.06    0.95    1.02    -       -
    backward          1.17    1.10            1.03    1.03    1.27    -       -

The backward pass with heads of 64 was measured six times: 0.94, 1.00 and four times 1.10 or more. With 8 K/V heads for
32 query heads of 128, it was 0.94 forward and 1.03 backward.
"""
LEAST_DOCUMENTS = 8e9
"""As `LEAST`, for documents.

The device needs more time per pair for them. With heads of 32 in the table above (8.6e9), both passes took 575 us of
the device and 489 us of the host. With 4,096 tokens and heads of 192 and values of 128 (6.4e9), its host time made its
speed 0.56 of ours forward and 0.96 backward.
"""


class HopperFlash4Kernel(HopperKernel):
    """`HopperKernel` that lets flash-attn-4 compute large calls that are one box or one causal square.

    flash-attn-4 also computes a causal window and packed documents, if its version supports them. It supports no other
    masks, and its 16-bit results would have to be merged. So it is called only if one launch computes the whole
    attention. `HopperKernel` computes the steps of a ring.
    """

    name = "hopper+flash-attn-4"
    traits = replace(HopperKernel.traits, prefers_square=True)

    def __init__(self, flash: LazyKernel) -> None:
        super().__init__()
        self._flash = flash

    def supports(self, call: AttentionCall) -> Support:
        """Return whether both kernels support the call. If ours does not, flash-attn-4 is not imported."""
        own = super().supports(call)
        if not own.ok:
            return own
        try:
            return self._flash.supports(call)._replace(slower=own.slower)
        except BackendUnavailableError as error:  # `auto` then skips this kernel; a call that names it gets the reason
            return Support(False, str(error))

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return out in the dtype of q."""
        if _allowed(q, k, tiles, call) and self._faster_forward(q, k, v, tiles):
            if q.is_meta:  # flash-attn-4 compiles its kernels itself
                out = q.new_empty(*q.shape[:3], v.shape[3])
                return out, q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
            return self._flash.load().forward_single_call(q, k, v, tiles, call)
        return super().forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return gradients in 16 bits if flash-attn-4 computes them."""
        if _allowed(x.q, x.k, tiles, call) and self._faster_backward(x.q, x.k, x.v, tiles):
            if x.q.is_meta:
                return torch.empty_like(x.q), torch.empty_like(x.k), torch.empty_like(x.v)
            return self._flash.load().backward_single_call(x, tiles, call)
        return super().backward_single_call(x, tiles, call)

    def _faster_forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> bool:
        sizes = q.shape[3], v.shape[3]
        documents = DOCUMENTS_FORWARD if q.shape[2] == k.shape[2] else DOCUMENTS_FORWARD_SHARED
        if sizes in documents and self._computes_documents(q, k, tiles):
            return True
        long = sizes in LONG_HEADS and min(q.shape[1], k.shape[1]) >= LONG
        if not long and sizes not in FORWARD:  # each of WINDOW_FORWARD is in FORWARD
            return False
        if causal_window(tiles, q.shape[1], k.shape[1]) is not None:
            return sizes in WINDOW_FORWARD and self._computes_window(q, k)
        part = _single_call(q, k, tiles)
        if part is None:
            return False
        return sizes in FORWARD or not part.causal or q.shape[2] != k.shape[2]

    def _faster_backward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> bool:
        sizes, own_heads = (q.shape[3], v.shape[3]), q.shape[2] == k.shape[2]
        documents = DOCUMENTS_BACKWARD if own_heads else DOCUMENTS_BACKWARD_SHARED
        if sizes in documents and self._computes_documents(q, k, tiles):
            return True
        if causal_window(tiles, q.shape[1], k.shape[1]) is not None:
            return sizes in WINDOW_BACKWARD and self._computes_window(q, k)
        faster = sizes in BACKWARD or (own_heads and sizes in OWN_HEADS_BACKWARD)
        return faster and _single_call(q, k, tiles) is not None

    def _computes_window(self, q: Tensor, k: Tensor) -> bool:
        return q.shape[2] == k.shape[2] and self._flash.load().traits.supports_causal_window

    def _computes_documents(self, q: Tensor, k: Tensor, tiles: Tiles) -> bool:
        if find_documents(tiles, q.shape[1], k.shape[1]) is None:
            return False
        return self._flash.load().traits.supports_documents


def _allowed(q: Tensor, k: Tensor, tiles: Tiles, call: AttentionCall) -> bool:
    """Return whether the call is large enough, is not deterministic, and has no softcap and a positive scale."""
    if call.deterministic or call.softcap is not None or not call.positive_scale or not q.numel():
        return False
    batch, rows, heads, dim = q.shape
    work = tiles.num_pairs * batch * heads * max(dim, 64)
    # Documents are looked for last: small calls, whose host time counts, end before.
    return work >= LEAST or (work >= LEAST_DOCUMENTS and find_documents(tiles, rows, k.shape[1]) is not None)


def _single_call(q: Tensor, k: Tensor, tiles: Tiles) -> CausalSquare | None:
    """Return the box or the causal square that covers the whole call; None if there is none."""
    parts = (part for tile in tiles for part in causal_squares(tile))
    part = single_operator_call(list(islice(parts, 2)), q.shape[1], k.shape[1])  # two show that there is none
    return None if part is None or part.reversed else part
