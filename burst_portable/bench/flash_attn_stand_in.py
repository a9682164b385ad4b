"""Give other libraries our local kernels as flash_attn's functions, so that a comparison has one local kernel.

ring_flash_attn and yunchang import flash_attn. `FlashAttn.import_module` imports such a package with this stand-in
instead, so that flash_attn need not be installed, and the package also runs on CPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from burst_portable.backends.selection import choose_kernel, for_device
from burst_portable.bench.peer_names import check_installed
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.operator_kernel import CausalOperatorKernel
from burst_portable.numerics import accumulation_dtype, as_dtype
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, Tiles

Visible: TypeAlias = bool | Tiles
"""What a local call sees: all keys (False), a causal square (True), or the pairs of tiles."""


class LocalKernel:
    """A kernel with the interface of other libraries: one call for all blocks, results in the dtype of the inputs.

    Args:
        name: Name of the kernel.
        q: Queries of this rank, [1, S, H, D].
        k: Keys of this rank.
        yields_to_comm: Whether the kernel leaves room for messages, as it does for our strategies.

    Raises:
        BurstError: If the kernel does not support the tensors.
    """

    def __init__(self, name: str, q: Tensor, k: Tensor, *, yields_to_comm: bool = False) -> None:
        self._call = AttentionCall.of(q, k, k, deterministic=False)
        self.kernel, _ = choose_kernel(for_device(q.device.type), self._call, name)
        self.operator = self.kernel if isinstance(self.kernel, CausalOperatorKernel) else None
        self._yields_to_comm = yields_to_comm

    def forward(self, q: Tensor, k: Tensor, v: Tensor, visible: Visible, scale: float) -> tuple[Tensor, Tensor]:
        """Return out [1, S, H, D] and the LSE [1, H, S]."""
        if self.operator is not None and isinstance(visible, bool):
            return self.operator.operate(q, k, v, visible, scale)
        out, lse = self.kernel.forward_single_call(
            q, k, v, _tiles(q, k, visible), self._scaled(scale), yields_to_comm=self._yields_to_comm
        )
        return as_dtype(out, q.dtype), as_dtype(lse, accumulation_dtype(q.dtype))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Visible, scale: float
    ) -> tuple[Tensor, ...]:
        """Return dq, dk and dv."""
        if self.operator is not None and isinstance(visible, bool):
            return self.operator.operate_backward(dout, q, k, v, out, lse, visible, scale)
        x = BackwardInputs(dout, q, k, v, lse, out)
        parts = self.kernel.backward_single_call(x, _tiles(q, k, visible), self._scaled(scale))
        return tuple(as_dtype(x, q.dtype) for x in parts)

    def _scaled(self, scale: float) -> AttentionCall:
        """Return the call with this scale; it is the same in every step."""
        if self._call.scale != scale:
            self._call = replace(self._call, scale=scale)
        return self._call


def _tiles(q: Tensor, k: Tensor, visible: Visible) -> Tiles:
    if not isinstance(visible, bool):
        return visible
    rows, columns = q.shape[1], k.shape[1]
    return Tiles([Tile(0, rows, 0, columns, 0 if visible else -columns, rows)])


@lru_cache(maxsize=16)
def varlen_tiles(starts_q: tuple[int, ...], starts_k: tuple[int, ...], causal: bool, left: int) -> Tiles:
    """Return the tiles of documents given as cu_seqlens: the last query of each is aligned to its last key."""
    tiles = []
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        own = q1 - k1  # row - column of a row and the key at its place
        tiles.append(Tile(q0, q1, k0, k1, own if causal else q0 - k1, own + left if left >= 0 else q1 - k0))
    return Tiles(tiles)


class FlashAttn:
    """Functions of flash_attn, computed by a kernel of this library."""

    def __init__(self) -> None:
        self._kernel, self._yields_to_comm = "auto", False
        self._locals: dict[tuple[int, int], LocalKernel] = {}

    def use(self, kernel: str, *, yields_to_comm: bool = False) -> None:
        """Choose the kernel of all calls from now on."""
        self._kernel, self._yields_to_comm = kernel, yields_to_comm
        self._locals = {}

    def local(self, q: Tensor, k: Tensor) -> LocalKernel:
        """Return the kernel for tensors [1, S, H, D] with these heads."""
        heads = q.shape[2], k.shape[2]
        if heads not in self._locals:
            self._locals[heads] = LocalKernel(self._kernel, q, k, yields_to_comm=self._yields_to_comm)
        return self._locals[heads]

    def attend(  # the interface of flash_attn_func
        self, q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool, **options: object
    ) -> Tensor:
        """Return the attention of unsharded tensors, differentiable, as flash_attn_func does."""
        out: Tensor = _Attend.apply(q, k, v, self.local(q, k), softmax_scale, causal)  # type: ignore[no-untyped-call]
        return out

    def import_module(self, package: str, module: str = "") -> Any:
        """Import a package, or one module of it without the package's `__init__`, with these functions.

        `ring_flash_attn.__init__` imports Transformers and more of flash_attn than its modules need. Modules in
        `sys.modules` are the same afterwards.
        """
        check_installed(package)
        spec = find_spec(package)
        assert spec is not None, "it is installed"
        interface, flash_attn = ModuleType("flash_attn.flash_attn_interface"), ModuleType("flash_attn")
        vars(interface).update(self._functions())
        vars(flash_attn).update(flash_attn_interface=interface, __version__="2.8.3", flash_attn_func=self.attend)
        before = {name: one for name, one in sys.modules.items() if _is_part_of(name, package, "flash_attn")}
        for name in before:
            del sys.modules[name]
        sys.modules |= {"flash_attn": flash_attn, "flash_attn.flash_attn_interface": interface}
        if module:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = list(spec.submodule_search_locations or ())
        try:
            return import_module(f"{package}.{module}" if module else package)
        finally:
            for name in [name for name in sys.modules if _is_part_of(name, package, "flash_attn")]:
                del sys.modules[name]
            sys.modules.update(before)

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """Return flash_attn's functions. Callers read the names of their parameters; gradients are copied."""

        def _flash_attn_forward(  # type: ignore[no-untyped-def]  # flash_attn's own interface
            q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
            return_softmax,
        ):  # fmt: skip
            return *self.local(q, k).forward(q, k, v, causal, softmax_scale), None, None

        def _flash_attn_backward(  # type: ignore[no-untyped-def]
            dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
            window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
        ):  # fmt: skip
            parts = self.local(q, k).backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
            for buffer, part in zip((dq, dk, dv), parts, strict=True):
                buffer.copy_(part)

        def _flash_attn_varlen_forward(  # type: ignore[no-untyped-def]
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size_left, window_size_right, alibi_slopes, return_softmax,
        ):  # fmt: skip
            tiles = varlen_tiles(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), causal, window_size_left)
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
            out, lse = self.local(q, k).forward(q, k, v, tiles, softmax_scale)
            return out[0], lse[0], None, None

        def _flash_attn_varlen_backward(  # type: ignore[no-untyped-def]
            dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
            dropout_p, softmax_scale, causal, window_size_left, window_size_right, alibi_slopes, deterministic,
        ):  # fmt: skip
            tiles = varlen_tiles(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), causal, window_size_left)
            dout, q, k, v, out, lse = (x.unsqueeze(0) for x in (dout, q, k, v, out, softmax_lse))
            parts = self.local(q, k).backward(dout, q, k, v, out, lse, tiles, softmax_scale)
            for buffer, part in zip((dq, dk, dv), parts, strict=True):
                buffer.copy_(part[0])

        functions = (_flash_attn_forward, _flash_attn_backward, _flash_attn_varlen_forward, _flash_attn_varlen_backward)
        return {function.__name__: function for function in functions}


class _Attend(torch.autograd.Function):
    """Attention by one call of a local kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, local: LocalKernel, scale: float, causal: bool) -> Tensor:
        out, lse = local.forward(q, k, v, causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.local, ctx.scale, ctx.causal = local, scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        return *ctx.local.backward(dout, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None


def _is_part_of(name: str, *packages: str) -> bool:
    return name.partition(".")[0] in packages
