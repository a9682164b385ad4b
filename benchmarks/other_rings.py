"""Run other libraries' attention over several devices, each with the same local kernel as ours; see `rings`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.providers import Absent
from benchmarks.rings import Calls, Contestant, Task, through_autograd
from burst_portable.bench.flash_attn_stand_in import LocalKernel, Visible
from burst_portable.bench.peers import Peer, Shards, make_peer
from burst_portable.errors import UnsupportedError
from burst_portable.layout import Segment
from burst_portable.planning.tiles import find_tiles


def plain(task: Task) -> Calls:
    """Run one kernel call on this rank's share of the work: all rows of its share of the heads."""
    ranks, device = task.links.size, task.q.device
    sizes = [(task.q.shape[2], task.q), (task.k.shape[2], task.k), (task.v.shape[2], task.v)]
    generator = torch.Generator(device).manual_seed(1)
    q, k, v, dout = (
        torch.randn(1, task.length, max(1, heads // ranks), x.shape[3], device=device, generator=generator).to(x.dtype)
        for heads, x in (*sizes, (task.q.shape[2], task.v))
    )
    local, tiles = LocalKernel(task.kernel, q, k), _whole(task)
    out, lse = local.forward(q, k, v, tiles, task.scale)
    return (
        lambda: local.forward(q, k, v, tiles, task.scale)[0],
        lambda: local.backward(dout, q, k, v, out, lse, tiles, task.scale),
    )


def _whole(task: Task) -> Visible:
    """Return the tiles of a call over the unsharded sequence."""
    if task.mask.name in ("causal", "full"):
        return task.mask.name == "causal"
    rows = (Segment(0, task.length),)
    return find_tiles(task.mask, rows, rows)


# ------------------------------------------------------------------------------------------------ others


class _Ulysses(torch.autograd.Function):
    """DeepSpeed-Ulysses by the book: all-to-all, attention on whole sequences of some heads, all-to-all."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, local: LocalKernel, scale: float, visible: Visible, group: Any
    ) -> Any:
        ranks = dist.get_world_size(group)
        ctx.repeats = max(1, ranks // k.shape[2])
        kv = (x.repeat_interleave(ctx.repeats, 2) if ctx.repeats > 1 else x for x in (k, v))
        qh, kh, vh = (_to_heads(x, group) for x in (q, *kv))
        out, lse = local.forward(qh, kh, vh, visible, scale)
        ctx.save_for_backward(qh, kh, vh, out, lse)
        ctx.local, ctx.scale, ctx.visible, ctx.group = local, scale, visible, group
        return _to_rows(out, group)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        qh, kh, vh, out, lse = ctx.saved_tensors
        parts = ctx.local.backward(_to_heads(dout, ctx.group), qh, kh, vh, out, lse, ctx.visible, ctx.scale)
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


def ulysses_by_the_book(
    q: Tensor, k: Tensor, v: Tensor, local: LocalKernel, scale: float, visible: Visible, group: Any
) -> Tensor:
    """Return the attention of contiguous shards [1, S / W, H, D], with gradients."""
    out: Tensor = _Ulysses.apply(q, k, v, local, scale, visible, group)
    return out


def plain_ulysses(task: Task) -> Calls:
    ranks, heads, kv_heads = task.links.size, task.q.shape[2], task.k.shape[2]
    if heads % ranks or task.length % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise Absent(f"{heads}/{kv_heads} heads and {task.length} tokens cannot be shared by {ranks}")
    q, k, v = (x.detach().requires_grad_() for x in (task.q, task.k, task.v))
    few = task.k[:, :, : max(1, kv_heads // ranks)]
    local, visible = LocalKernel(task.kernel, task.q[:, :, : heads // ranks], few), _whole(task)
    if local.operator is not None and not isinstance(visible, bool):
        raise Absent(f"the operator {task.kernel} knows no mask {task.mask}")
    call = partial(ulysses_by_the_book, q, k, v, local, task.scale, visible, task.links.group)
    return through_autograd(call, (q, k, v), task.dout)


def peer(entry: str) -> Callable[[Task], Calls]:
    """Return the calls of an entry of `burst-portable bench`."""
    made = make_peer(entry)
    assert isinstance(made, Peer), "it takes shards"

    def prepare(task: Task) -> Calls:
        links = task.links
        shards = Shards(
            task.q, task.k, task.v, task.dout, task.mask, task.length, task.kernel, links.group, links.rank,
            links.size, links.high_priority,
        )  # fmt: skip
        if task.length % (2 * links.size):
            raise Absent("it needs equal shards")
        try:
            call, leaves, dout, to_bshd = made.bind(shards)
        except UnsupportedError as error:
            raise Absent(str(error)) from error
        forward, backward = through_autograd(call, leaves, dout)
        return lambda: to_bshd(forward()), lambda: tuple(map(to_bshd, backward()))

    return prepare


PLAIN = "plain call"
LLAMA3_AT_ONCE = "ring-flash-attn llama3 at once"
OTHERS = {
    PLAIN: Contestant(PLAIN, plain),
    "ulysses by the book": Contestant("ulysses by the book", plain_ulysses, "contiguous"),
    "ring-flash-attn zigzag": Contestant("ring-flash-attn zigzag", peer("ring_flash_attn"), "zigzag"),
    "ring-flash-attn llama3": Contestant("ring-flash-attn llama3", peer("ring_flash_attn_llama3"), "contiguous"),
    LLAMA3_AT_ONCE: Contestant(LLAMA3_AT_ONCE, peer("ring_flash_attn_llama3_at_once"), "contiguous"),
    "context_parallel": Contestant("context_parallel", peer("context_parallel"), "zigzag"),
    "context_parallel alltoall": Contestant("context_parallel alltoall", peer("context_parallel_alltoall"), "zigzag"),
}
