"""Shard a model's sequence with other libraries' attention, for `end_to_end`: torch's context_parallel, and Ulysses.

Each class has the part of `ShardedModel` that the training loop uses: `shard`, which returns a rank's inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

import burst_portable as bp
from benchmarks.other_rings import ulysses_by_the_book
from burst_portable.bench.flash_attn_stand_in import LocalKernel
from burst_portable.errors import InputError
from burst_portable.integrations.transformers.loss import ShardedLoss, loss_of

NAME = "context_parallel"
BOOK = "ulysses by the book"
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
ROTATIONS = ("allgather", "alltoall")


def _set_attention(model: Any, name: str, attention: Any) -> None:
    """Let a model call an attention function without a mask: positions that jump are no packed documents."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, lambda *_, **__: None)
    model.set_attn_implementation(name)
    model.loss_function = ShardedLoss(loss_of(model))


def _rows(ids: Tensor) -> list[Tensor]:
    """Return new tensors of the ids, of the next tokens as labels, and of the positions."""
    next_ones = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    return [ids.clone(), next_ones, torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)]


def _inputs(ids: Tensor, parts: list[Tensor]) -> dict[str, Any]:
    """Return the arguments of a model for this rank's parts of the rows."""
    return {
        "input_ids": parts[0], "labels": parts[1], "shift_labels": parts[1], "position_ids": parts[2],
        "num_items_in_batch": torch.tensor(ids.numel() - ids.shape[0], device=ids.device), "use_cache": False,
    }  # fmt: skip


class ContextParallel:
    """torch's context_parallel. It shards tokens, labels and positions."""

    def __init__(self, model: Any, device: torch.device, backend: str, rotate: str) -> None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        _set_attention(model, NAME, sdpa_attention_forward)
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._backend, self._rotate = BACKENDS[backend], rotate
        self._inputs: dict[str, Any] = {}

    @contextmanager
    def around(self, ids: Tensor) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        set_rotate_method(self._rotate)
        cut = _rows(ids)
        with sdpa_kernel(self._backend), context_parallel(
            self._mesh, buffers=cut, buffer_seq_dims=[1, 1, 1], no_restore_buffers=set(cut)
        ):  # fmt: skip
            self._inputs = _inputs(ids, cut)
            yield

    def shard(self, ids: Tensor) -> dict[str, Any]:
        return self._inputs


class Ulysses:
    """DeepSpeed-Ulysses by the book over contiguous shards, with one of our local kernels. The mask is causal."""

    def __init__(self, model: Any, mesh: bp.Mesh, kernel: str) -> None:
        _set_attention(model, BOOK, self._attend)
        heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads
        if heads % mesh.size or (kv_heads % mesh.size and mesh.size % kv_heads):
            raise InputError("the ranks cannot share the heads", got=f"{heads}/{kv_heads} heads, {mesh.size} ranks")
        self._mesh, self._kernel = mesh, kernel
        self._local: LocalKernel | None = None

    def shard(self, ids: Tensor) -> dict[str, Any]:
        if ids.shape[1] % self._mesh.size:
            raise InputError("shards must be equal", got=f"{ids.shape[1]} tokens, {self._mesh.size} ranks")
        return _inputs(ids, [x.chunk(self._mesh.size, 1)[self._mesh.rank].contiguous() for x in _rows(ids)])

    def _attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """Return out [B, S, H, D] of q, k and v [B, H, S, D]."""
        # Under autocast, rotary embeddings turn Q and K into float32.
        q, k, v = (x.transpose(1, 2).to(v.dtype) for x in (q, k, v))
        if self._local is None:
            heads, kv_heads = (max(1, x.shape[2] // self._mesh.size) for x in (q, k))
            self._local = LocalKernel(self._kernel, q[:, :, :heads], k[:, :, :kv_heads])
        scale = q.shape[3] ** -0.5 if scaling is None else scaling
        return ulysses_by_the_book(q, k, v, self._local, scale, True, self._mesh.group), None
