"""Run other libraries' attention over several devices, each with the same local kernel as ours; see `rings`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.providers import Absent
from benchmarks.ranks import Links
from benchmarks.rings import Calls, Contestant, Gradients, Task, through_autograd
from burst_portable.backends.selection import choose_kernel, for_device
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.operator_kernel import CausalOperatorKernel
from burst_portable.layout import Segment
from burst_portable.numerics import accumulation_dtype, as_dtype
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, Tiles, find_tiles

Seen = bool | Tiles
"""What a local call sees: all keys (False), a causal square (True), or the pairs of tiles."""


class Local:
    """A kernel as other libraries call theirs: one call for all that it is given, results in 16 bits.

    Args:
        name: Name of the kernel.
        q: Queries of this rank.
        k: Keys of this rank.
        yields_to_comm: Whether the kernel makes room for messages, as it does for ours.
    """

    def __init__(self, name: str, q: Tensor, k: Tensor, *, yields_to_comm: bool = False) -> None:
        self._call = AttentionCall.of(q, k, k, deterministic=False)
        self.kernel, _ = choose_kernel(for_device(q.device.type), self._call, name)
        self.operator = self.kernel if isinstance(self.kernel, CausalOperatorKernel) else None
        self._yields_to_comm = yields_to_comm

    def forward(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, scale: float) -> tuple[Tensor, Tensor]:
        if self.operator is not None and isinstance(seen, bool):
            return self.operator.operate(q, k, v, seen, scale)
        tiles = _tiles(q, k, seen)
        out, lse = self.kernel.forward_single_call(
            q, k, v, tiles, self._scaled(scale), yields_to_comm=self._yields_to_comm
        )
        return as_dtype(out, q.dtype), as_dtype(lse, accumulation_dtype(q.dtype))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Seen, scale: float
    ) -> Gradients:
        if self.operator is not None and isinstance(seen, bool):
            return self.operator.operate_backward(dout, q, k, v, out, lse, seen, scale)
        x = BackwardInputs(dout, q, k, v, lse, out)
        parts = self.kernel.backward_single_call(x, _tiles(q, k, seen), self._scaled(scale))
        return tuple(as_dtype(x, q.dtype) for x in parts)

    def _scaled(self, scale: float) -> AttentionCall:
        """Return the call with this scale; it is the same in every step."""
        if self._call.scale != scale:
            self._call = replace(self._call, scale=scale)
        return self._call


def _tiles(q: Tensor, k: Tensor, seen: Seen) -> Tiles:
    if not isinstance(seen, bool):
        return seen
    rows, columns = q.shape[1], k.shape[1]
    return Tiles([Tile(0, rows, 0, columns, 0 if seen else -columns, rows)])


def plain(task: Task) -> Calls:
    """Run one kernel call on this rank's share of the work: all rows of its share of the heads."""
    ranks, device = task.links.size, task.q.device
    sizes = [(task.q.shape[2], task.q), (task.k.shape[2], task.k), (task.v.shape[2], task.v)]
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, task.length, max(1, heads // ranks), x.shape[3], device=device, generator=generator).to(x.dtype)
        for heads, x in (*sizes, (task.q.shape[2], task.v))
    )
    local, tiles = Local(task.kernel, q, k), _whole(task)
    out, lse = local.forward(q, k, v, tiles, task.scale)
    return (
        lambda: local.forward(q, k, v, tiles, task.scale)[0],
        lambda: local.backward(dout, q, k, v, out, lse, tiles, task.scale),
    )


def _whole(task: Task) -> Seen:
    """Return the tiles of a call over the unsharded sequence."""
    if task.mask.name in ("causal", "full"):
        return task.mask.name == "causal"
    rows = (Segment(0, task.length),)
    return find_tiles(task.mask, rows, rows)


# ------------------------------------------------------------------------------------------------ others


class _Ulysses(torch.autograd.Function):
    """DeepSpeed-Ulysses by the book: all-to-all, attention on whole sequences of some heads, all-to-all."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, local: Local, scale: float, seen: Seen, group: Any) -> Any:
        ranks = dist.get_world_size(group)
        ctx.repeats = max(1, ranks // k.shape[2])
        kv = (x.repeat_interleave(ctx.repeats, 2) if ctx.repeats > 1 else x for x in (k, v))
        qh, kh, vh = (_to_heads(x, group) for x in (q, *kv))
        out, lse = local.forward(qh, kh, vh, seen, scale)
        ctx.save_for_backward(qh, kh, vh, out, lse)
        ctx.local, ctx.scale, ctx.seen, ctx.group = local, scale, seen, group
        return _to_rows(out, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        qh, kh, vh, out, lse = ctx.saved_tensors
        parts = ctx.local.backward(_to_heads(dout, ctx.group), qh, kh, vh, out, lse, ctx.seen, ctx.scale)
        dq, dk, dv = (_to_rows(x, ctx.group) for x in parts)
        if ctx.repeats > 1:
            dk, dv = (x.unflatten(2, (-1, ctx.repeats)).sum(3) for x in (dk, dv))
        return dq, dk, dv, None, None, None, None


def _to_heads(x: Tensor, group: Any) -> Tensor:
    """Exchange [1, S / W, H, D] for [1, S, H / W, D]."""
    ranks = dist.get_world_size(group)
    sent = x[0].unflatten(1, (ranks, -1)).transpose(0, 1).contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    return came.flatten(0, 1).unsqueeze(0)


def _to_rows(x: Tensor, group: Any) -> Tensor:
    """Exchange [1, S, H / W, D] for [1, S / W, H, D]."""
    ranks = dist.get_world_size(group)
    sent = x[0].unflatten(0, (ranks, -1)).contiguous()
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    return came.transpose(0, 1).flatten(1, 2).unsqueeze(0)


def plain_ulysses(task: Task) -> Calls:
    ranks, heads, kv_heads = task.links.size, task.q.shape[2], task.k.shape[2]
    if heads % ranks or task.length % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise Absent(f"{heads}/{kv_heads} heads and {task.length} tokens cannot be shared by {ranks}")
    q, k, v = (x.detach().requires_grad_() for x in (task.q, task.k, task.v))
    few = task.k[:, :, : max(1, kv_heads // ranks)]
    local, seen = Local(task.kernel, task.q[:, :, : heads // ranks], few), _whole(task)
    if local.operator is not None and not isinstance(seen, bool):
        raise Absent(f"the operator {task.kernel} knows no mask {task.mask}")
    call = partial(_Ulysses.apply, q, k, v, local, task.scale, seen, task.links.group)
    return through_autograd(call, (q, k, v), task.dout)


def zigzag_ring(task: Task) -> Calls:
    """Run ring-flash-attn's own code, with our local kernel instead of flash_attn."""
    if not _causal(task):
        raise Absent("its zigzag ring is causal")
    local = Local(task.kernel, task.q, task.k, yields_to_comm=task.links.high_priority)
    module = _with_kernel("zigzag_ring_flash_attn", _flash_attn(local))
    q, k, v = (x.detach().requires_grad_() for x in (task.q, task.k, task.v))
    call = partial(module.zigzag_ring_flash_attn_func, q, k, v, causal=True, group=task.links.group)
    return through_autograd(call, (q, k, v), task.dout)


def _flash_attn(local: Local) -> dict[str, Callable[..., Any]]:
    """Return the two functions of flash_attn that ring-flash-attn's zigzag ring calls. They copy gradients."""

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        return *local.forward(q, k, v, causal, softmax_scale), None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        parts = local.backward(dout, q, k, v, out, softmax_lse, causal, softmax_scale)
        for buffer, part in zip((dq, dk, dv), parts, strict=True):
            buffer.copy_(part)

    return {"_flash_attn_forward": _flash_attn_forward, "_flash_attn_backward": _flash_attn_backward}


def llama3(task: Task, *, at_once: bool = False) -> Calls:
    """Run ring-flash-attn's llama3 for packed documents: it gathers all K and V, head by head.

    at_once: Gather all heads at once, for one kernel call: more memory, fewer launches.
    """
    if task.length % task.links.size:
        raise Absent("it wants equally many rows on each rank")
    kv_heads = task.k.shape[2] if at_once else 1
    heads = kv_heads * (task.q.shape[2] // task.k.shape[2])
    local = Local(task.kernel, task.q[:, :, :heads], task.k[:, :, :kv_heads], yields_to_comm=task.links.high_priority)
    if local.operator is not None:
        raise Absent(f"the operator {task.kernel} takes no documents here")
    module = _with_kernel("llama3_flash_attn_varlen", _flash_attn_varlen(local))
    causal, left, starts = _as_flash_attn_knows(task)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    *told, keys = module.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, task.links.rank, task.links.size)
    q, k, v = (x[0].detach().requires_grad_() for x in (task.q, task.k, task.v))
    call = partial(
        module.llama3_flash_attn_varlen_func, q, k, v, *told, heads_k_stride=kv_heads, local_k_slice=keys,
        causal=causal, window_size=(left, -1), group=task.links.group,
    )  # fmt: skip
    forward, backward = through_autograd(call, (q, k, v), task.dout[0])
    return lambda: forward().unsqueeze(0), lambda: tuple(x.unsqueeze(0) for x in backward())


def _as_flash_attn_knows(task: Task) -> tuple[bool, int, list[int]]:
    """Return (causal, visible keys to the left or -1, cu_seqlens)."""
    mask, regions = task.mask, task.mask.regions
    if mask.name.startswith("documents"):
        return True, -1, [0, *sorted(region.q_stop for region in regions)]
    if mask.name.startswith("window"):
        return True, regions[0].hi, [0, task.length]
    return _causal(task), -1, [0, task.length]


@lru_cache(maxsize=16)
def varlen_tiles(starts_q: tuple[int, ...], starts_k: tuple[int, ...], causal: bool, left: int) -> Tiles:
    """Return the tiles of documents given as cu_seqlens: the last query of each is aligned to its last key."""
    tiles = []
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_k), strict=True):
        own = q1 - k1  # row - column of a row and the key at its place
        tiles.append(Tile(q0, q1, k0, k1, own if causal else q0 - k1, own + left if left >= 0 else q1 - k0))
    return Tiles(tiles)


def _flash_attn_varlen(local: Local) -> dict[str, Callable[..., Any]]:
    """Return the two functions of flash_attn that llama3 calls. They copy gradients."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left, window_size_right, alibi_slopes, return_softmax,
    ):  # fmt: skip
        tiles = varlen_tiles(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), causal, window_size_left)
        out, lse = local.forward(*(x.unsqueeze(0) for x in (q, k, v)), tiles, softmax_scale)
        return out[0], lse[0], None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, alibi_slopes, deterministic,
    ):  # fmt: skip
        tiles = varlen_tiles(tuple(cu_seqlens_q.tolist()), tuple(cu_seqlens_k.tolist()), causal, window_size_left)
        given = (x.unsqueeze(0) for x in (dout, q, k, v, out, softmax_lse))
        for buffer, part in zip((dq, dk, dv), local.backward(*given, tiles, softmax_scale), strict=True):
            buffer.copy_(part[0])

    return {
        "_flash_attn_varlen_forward": _flash_attn_varlen_forward,
        "_flash_attn_varlen_backward": _flash_attn_varlen_backward,
    }


def _with_kernel(name: str, functions: dict[str, Any]) -> Any:
    """Import a module of ring_flash_attn with other functions instead of flash_attn's.

    The package's `__init__` is not run: it imports transformers and more of flash_attn.
    """
    spec = find_spec("ring_flash_attn")
    if spec is None:
        raise Absent("the package ring_flash_attn is not installed")
    interface = ModuleType("flash_attn.flash_attn_interface")
    vars(interface).update(functions)
    package = ModuleType("ring_flash_attn")
    package.__path__ = list(spec.submodule_search_locations or ())
    known = {"flash_attn.flash_attn_interface": interface, "ring_flash_attn": package}
    if "flash_attn" not in sys.modules:
        known["flash_attn"] = import_module("flash_attn") if find_spec("flash_attn") else ModuleType("flash_attn")
    before = {name: sys.modules.get(name) for name in known}
    sys.modules.update(known)
    try:
        sys.modules.pop(f"ring_flash_attn.{name}", None)
        return import_module(f"ring_flash_attn.{name}")
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})


def context_parallel(rotate: str) -> Callable[[Task], Calls]:
    """Run torch's context_parallel, which supports only cuDNN and flash."""

    def prepare(task: Task) -> Calls:
        backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
        if task.kernel not in backends:
            raise Absent(f"it cannot be given the kernel {task.kernel}; ask for cudnn or flash")
        if task.mask.name not in ("causal", "full"):
            raise Absent("knows other masks with FlexAttention alone, which is no kernel here")
        if not _causal(task):
            raise Absent("its zigzag is causal")
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        _enter_context_parallel(task.links, task.length)
        leaves = tuple(x.transpose(1, 2).contiguous().requires_grad_() for x in (task.q, task.k, task.v))
        shared = task.q.shape[2] != task.k.shape[2]

        def attention() -> Tensor:
            set_rotate_method(rotate)
            with sdpa_kernel(backends[task.kernel]):
                return functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=shared)

        forward, backward = through_autograd(attention, leaves, task.dout.transpose(1, 2))
        return lambda: forward().transpose(1, 2), lambda: tuple(x.transpose(1, 2) for x in backward())

    return prepare


def _enter_context_parallel(links: Links, length: int) -> None:
    """Enter torch's context_parallel for the rest of the process. It needs a buffer to shard."""
    if links.parallel:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel as entered

    mesh = init_device_mesh(links.device.type, (links.size,))
    some = torch.zeros(1, 1, length, 1, device=links.device)
    links.closing.enter_context(entered(mesh, buffers=[some], buffer_seq_dims=[2]))
    links.parallel = True


def _causal(task: Task) -> bool:
    """Return whether the mask is causal, not full. Raise `Absent` for other masks."""
    if task.mask.name not in ("causal", "full"):
        raise Absent(f"knows no mask {task.mask}")
    return task.mask.name == "causal"


PLAIN = "plain call"
LLAMA3_AT_ONCE = "ring-flash-attn llama3 at once"
OTHERS = {
    PLAIN: Contestant(PLAIN, plain),
    "ulysses by the book": Contestant("ulysses by the book", plain_ulysses, "contiguous"),
    "ring-flash-attn zigzag": Contestant("ring-flash-attn zigzag", zigzag_ring, "zigzag"),
    "ring-flash-attn llama3": Contestant("ring-flash-attn llama3", llama3, "contiguous"),
    LLAMA3_AT_ONCE: Contestant(LLAMA3_AT_ONCE, partial(llama3, at_once=True), "contiguous"),
    "context_parallel": Contestant("context_parallel", context_parallel("allgather"), "zigzag"),
    "context_parallel alltoall": Contestant("context_parallel alltoall", context_parallel("alltoall"), "zigzag"),
}
