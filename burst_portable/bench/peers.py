"""Run the distributed attention of other libraries as entries of a benchmark.

A peer that imports flash_attn gets our local kernel instead (see `flash_attn_stand_in`), so that only the distribution
differs. torch's context_parallel and MagiAttention have their own kernels.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from burst_portable.backends.selection import for_device
from burst_portable.bench.entries import Entry, PreparedEntry, Sent, sent_by_passes
from burst_portable.bench.flash_attn_stand_in import FlashAttn
from burst_portable.bench.magi import MagiCall
from burst_portable.bench.peer_names import check_installed
from burst_portable.bench.task import Task
from burst_portable.errors import UnsupportedError
from burst_portable.layout import Layout, Segment, make_layout
from burst_portable.mask import Mask
from burst_portable.mesh import Mesh
from burst_portable.sharding import shard


@dataclass(frozen=True)
class Shards:
    """A call as one rank has it: its shards, and what all ranks share.

    Attributes:
        q, k, v, dout: [1, S, H, D], in the layout of the peer.
        length: Tokens of the unsharded sequence.
        group: Process group of the ranks.
        yields_to_comm: Whether local kernels leave room for messages.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: Mask
    length: int
    kernel: str
    group: Any
    rank: int
    ranks: int
    yields_to_comm: bool = False

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Copies of q, k and v that need gradients."""
        return tuple(x.detach().clone().requires_grad_() for x in (self.q, self.k, self.v))

    @property
    def is_causal(self) -> bool:
        """Return whether the mask is causal, not full. Other masks raise `UnsupportedError`."""
        if self.mask.name not in ("full", "causal"):
            raise UnsupportedError("it supports only full and causal masks")
        return self.mask.name == "causal"


Calls = tuple[Callable[[], Tensor], tuple[Tensor, ...], Tensor, Callable[[Tensor], Tensor]]
"""Forward, leaves, dO, and the view [1, S, H, D] of a result: fields of `PreparedEntry`."""


class Peer(Entry):
    """The implementation of another library."""

    errors = (Exception, SystemExit)  # whatever other code raises; a package may exit where it cannot run

    def checked_plan(self, task: Task, mesh: Mesh) -> None:
        """Return None: other libraries have no plan. Raise `UnsupportedError` with dropout."""
        if task.dropout:
            raise UnsupportedError("its dropout depends on the ranks, so no result is right")

    def prepare(self, task: Task, mesh: Mesh) -> PreparedEntry:
        check_group(mesh)
        length = task.layout.length
        layout = self.layout(task.mask, length, mesh.size, task.tensors[1].shape[2])
        q, k, v, dout = (shard(x, mesh, layout=layout) for x in task.tensors)
        transport = mesh.transport(q.device.type)
        shards = Shards(
            q, k, v, dout, task.mask, length, task.kernel, mesh.group, mesh.rank, mesh.size, transport.high_priority
        )  # fmt: skip
        forward, leaves, dout, to_bshd = self.bind(shards)
        return PreparedEntry(forward, leaves, dout, lambda x: shard(x, mesh, layout=layout), to_bshd)

    def layout(self, mask: Mask, length: int, ranks: int, kv_heads: int) -> Layout:
        """Return the layout that the implementation assumes: equal zigzag shards."""
        return even_layout("zigzag", length, ranks, 2 * ranks)

    def bind(self, shards: Shards) -> Calls:
        """Return the calls of this rank. Raise `UnsupportedError` if the implementation does not support the call."""
        raise NotImplementedError

    def count(self, prepared: PreparedEntry, task: Task, mesh: Mesh) -> list[Sent]:
        with CountingCollectives() as counting:
            return sent_by_passes(prepared, lambda: Sent(counting.sent, counting.messages))


def check_group(mesh: Mesh) -> None:
    """Raise `UnsupportedError` if ranks are threads."""
    if mesh.group is None:
        raise UnsupportedError("it needs a process group of torch.distributed")


def even_layout(name: str, length: int, ranks: int, multiple: int) -> Layout:
    """Return a layout. Raise `UnsupportedError` if the length is no multiple of a number, so that shards differ."""
    if length % multiple:
        raise UnsupportedError(
            "it needs equal shards", got=f"{length:,} tokens", allowed=f"a multiple of {multiple} for {ranks} ranks"
        )
    return make_layout(name, length, ranks)


def as_varlen(mask: Mask, length: int) -> tuple[bool, int, list[int]]:
    """Return a mask as flash_attn's varlen functions take it: (causal, visible keys to the left or -1, cu_seqlens).

    Raises:
        UnsupportedError: If it has another form.
    """
    ends, forms = [0], set()
    for r in mask.regions_of_rows(0, length):
        stop, columns = min(r.q_stop, length), (r.k_start, min(r.k_stop, length))
        rows = stop - ends[-1]
        if (r.q_start, *columns) != (ends[-1], ends[-1], stop) or r.lo > 0 or (r.lo > -rows and r.lo != 0):
            break
        ends.append(stop)
        forms.add((r.lo == 0, r.hi if r.hi < length else -1))
    else:
        causal, left = forms.pop() if len(forms) == 1 else (False, 0)
        if ends[-1] == length and (causal or left < 0):
            return causal, left, ends
    raise UnsupportedError("it supports only full and causal masks, such documents, and causal windows")


class CountingCollectives(TorchDispatchMode):
    """Count what this rank sends with torch.distributed. A ring algorithm is assumed for collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = self.messages = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one is not Tensor for one in types):
            return NotImplemented  # a DTensor: its local operators follow
        if func.namespace in ("c10d", "_c10d_functional"):
            self._add(func.name().partition("::")[2].partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _add(self, name: str, args: Any) -> None:
        tensors = [x for one in args for x in (one if isinstance(one, list) else [one]) if isinstance(x, Tensor)]
        sizes = [x.numel() * x.element_size() for x in tensors]  # of the output, if it is an argument, and of the input
        if name == "send":
            size = sizes[0]
        elif "gather" in name:  # _allgather_base_, all_gather_into_tensor
            size = sizes[-1] * (self._group(args).size() - 1)
        elif "reduce_scatter" in name:
            size = sizes[-1] - sizes[-1] // self._group(args).size()
        elif "all_to_all" in name or "alltoall" in name:
            size = sizes[-1] - self._kept(sizes[-1], args)
        else:
            return  # receiving, waiting
        self.sent += size
        self.messages += 1

    def _kept(self, size: int, args: Any) -> int:
        """Return the bytes of an all-to-all that stay on this rank. The last list has the sizes of the parts."""
        group = self._group(args)
        parts = next((one for one in reversed(args) if isinstance(one, list) and all(type(x) is int for x in one)), [])
        return int(size * parts[group.rank()] // sum(parts) if parts else size // group.size())

    def _group(self, args: Any) -> Any:
        """Return the process group, which is an argument or named by the last one."""
        for one in args:
            if isinstance(one, torch.ScriptObject):
                return dist.ProcessGroup.unbox(one)
        return dist.distributed_c10d._resolve_process_group(args[-1])


def _shared_buffer(package: str, task: Task) -> str:
    """Return the fault of the backward pass of zhuzilin/ring-flash-attention, which yunchang has copied.

    It keeps ``dq_buffer.to(torch.float32)`` as its sum. In float32 that is the buffer itself, which the next block
    overwrites.
    """
    if task.tensors[0].dtype != torch.float32:
        return ""
    return f"a fault of the package {package}: its ring adds gradients in a buffer of one block; use --dtype bfloat16"


class RingFlashAttn(Peer):
    """zhuzilin/ring-flash-attention: its zigzag ring if causal, its plain ring if full."""

    def known_fault(self, task: Task) -> str:
        return _shared_buffer("ring_flash_attn", task)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._flash_attn = FlashAttn()
        self._modules: dict[str, Any] = {}

    def bind(self, shards: Shards) -> Calls:
        causal, leaves = shards.is_causal, shards.leaves
        name = "zigzag_ring_flash_attn" if causal else "ring_flash_attn"
        function = getattr(self.module(name, shards), f"{name}_func")
        return partial(function, *leaves, causal=causal, group=shards.group), leaves, shards.dout, _same

    def module(self, name: str, shards: Shards) -> Any:
        """Return a module of the package, with the kernel of the call."""
        self._flash_attn.use(shards.kernel, yields_to_comm=shards.yields_to_comm)
        if name not in self._modules:
            self._modules[name] = self._flash_attn.import_module("ring_flash_attn", name)
        return self._modules[name]


class RingFlashAttnLlama3(RingFlashAttn):
    """Its llama3 for packed documents: all K and V are gathered, head by head.

    Args:
        at_once: Gather all heads at once, for one kernel call: more memory, fewer launches.
    """

    def __init__(self, name: str, *, at_once: bool = False) -> None:
        super().__init__(name)
        self._at_once = at_once

    def known_fault(self, task: Task) -> str:
        return ""

    def layout(self, mask: Mask, length: int, ranks: int, kv_heads: int) -> Layout:
        return even_layout("contiguous", length, ranks, ranks)

    def bind(self, shards: Shards) -> Calls:
        causal, left, cu_seqlens = as_varlen(shards.mask, shards.length)
        module = self.module("llama3_flash_attn_varlen", shards)
        heads = shards.k.shape[2] if self._at_once else 1
        group = shards.q.shape[2] // shards.k.shape[2]
        if self._flash_attn.local(shards.q[:, :, : heads * group], shards.k[:, :, :heads]).operator is not None:
            raise UnsupportedError(f"the kernel {shards.kernel} supports no documents in one call")
        *prepared, keys = module.llama3_flash_attn_prepare_cu_seqlens(
            torch.tensor(cu_seqlens, dtype=torch.int32), causal, shards.rank, shards.ranks
        )
        leaves = tuple(x[0].detach().requires_grad_() for x in shards.leaves)
        call = partial(
            module.llama3_flash_attn_varlen_func, *leaves, *prepared, heads_k_stride=heads, local_k_slice=keys,
            causal=causal, window_size=(left, -1), group=shards.group,
        )  # fmt: skip
        return call, leaves, shards.dout[0], _batched


class Yunchang(Peer):
    """USP of feifeibear/long-context-attention. As many ranks exchange heads as K/V heads allow; rings join them.

    Its rings are zigzag if causal, and plain if full. Without rings, it is the package's Ulysses layer.
    """

    def known_fault(self, task: Task) -> str:
        return _shared_buffer(self.name, task)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._flash_attn = FlashAttn()
        self._layers: dict[tuple[int, bool], Any] = {}

    def layout(self, mask: Mask, length: int, ranks: int, kv_heads: int) -> Layout:
        even_layout("zigzag", length, ranks, 2 * ranks)
        exchanging = gcd(ranks, kv_heads)
        rings = ranks // exchanging
        shards = []
        for chunks in make_layout("zigzag", length, rings).shards:  # of two chunks; one if there is one ring
            rows = [i for chunk in chunks for i in chunk.positions()]
            each = length // ranks
            parts = [rows[i * each : (i + 1) * each] for i in range(exchanging)]
            shards += [_segments(part) for part in parts]
        return Layout(f"zigzag of {rings}, contiguous of {exchanging}", length, tuple(shards))

    def bind(self, shards: Shards) -> Calls:
        if shards.ranks != dist.get_world_size():
            raise UnsupportedError("it needs the group of all processes")
        causal, leaves = shards.is_causal, shards.leaves
        self._flash_attn.use(shards.kernel, yields_to_comm=shards.yields_to_comm)
        key = shards.k.shape[2], causal
        if key not in self._layers:
            package = self._flash_attn.import_module("yunchang")
            exchanging = gcd(shards.ranks, shards.k.shape[2])
            rings = shards.ranks // exchanging
            if rings == 1:
                self._layers[key] = package.UlyssesAttention(shards.group)
            else:
                package.set_seq_parallel_pg(exchanging, rings, shards.rank, shards.ranks)
                self._layers[key] = package.LongContextAttention(ring_impl_type="zigzag" if causal else "basic")
        return partial(self._layers[key], *leaves, causal=causal), leaves, shards.dout, _same


def _segments(positions: list[int]) -> tuple[Segment, ...]:
    """Return ascending runs of positions, in their order."""
    starts = [i for i, p in enumerate(positions) if not i or p != positions[i - 1] + 1]
    return tuple(Segment(positions[a], b - a) for a, b in zip(starts, [*starts[1:], len(positions)], strict=True))


class ContextParallel(Peer):
    """torch's context_parallel, with the operators of torch that it supports. It balances causal masks only.

    Args:
        rotate: How K and V move, "allgather" or "alltoall".
    """

    def __init__(self, name: str, rotate: str) -> None:
        super().__init__(name)
        self._rotate = rotate
        self._entered = ExitStack()  # left when the process ends; the function that it replaces is restored at once
        self._call: Callable[..., Tensor] | None = None

    def bind(self, shards: Shards) -> Calls:
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        streams = for_device(shards.q.device.type).capabilities.streams
        if not streams and on_cpu not in _attention.custom_ops:
            raise UnsupportedError("torch's context_parallel supports no operator for CPUs")
        causal, kernels = shards.is_causal, _operators(shards)
        leaves = tuple(x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (shards.q, shards.k, shards.v))
        shared = shards.q.shape[2] != shards.k.shape[2]
        call = self._enter(shards)

        def choose(_: Tensor | None = None) -> None:  # before each pass, since other entries run between them
            _attention.set_rotate_method(self._rotate)
            _attention._cp_options.enable_load_balance = causal

        def forward() -> Tensor:
            choose()
            with sdpa_kernel(kernels, set_priority=True):
                out: Tensor = call(*leaves, is_causal=causal, enable_gqa=shared)
            out.register_hook(choose)
            return out

        return forward, leaves, shards.dout.transpose(1, 2), _heads_second

    def _enter(self, shards: Shards) -> Callable[..., Tensor]:
        """Return torch's function as context_parallel replaces it. Other callers keep torch's own function."""
        if self._call is None:
            mesh = DeviceMesh.from_group(shards.group, shards.q.device.type)
            some = torch.zeros(1, 1, shards.length, 1, device=shards.q.device)
            own = functional.scaled_dot_product_attention
            try:
                self._entered.enter_context(context_parallel(mesh, buffers=[some], buffer_seq_dims=[2]))
                self._call = functional.scaled_dot_product_attention
                atexit.register(self._entered.close)
            finally:
                functional.scaled_dot_product_attention = own
        return self._call


def _operators(shards: Shards) -> list[SDPBackend]:
    """Return the operators of torch for a kernel, preferred first."""
    named = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if shards.kernel == "auto":
        return list(named.values())
    if shards.kernel not in named:
        raise UnsupportedError(f"it cannot use the kernel {shards.kernel}", allowed="auto, cudnn, flash")
    return [named[shards.kernel]]


class MagiAttention(Peer):
    """MagiAttention, with its own kernel and its own placement of chunks."""

    def prepare(self, task: Task, mesh: Mesh) -> PreparedEntry:
        check_group(mesh)
        check_installed(self.name)
        if task.kernel != "auto":
            raise UnsupportedError(f"it cannot use the kernel {task.kernel}", allowed="auto")
        q, k, v, dout = (x[0] for x in task.tensors)
        call = MagiCall(task.mask, q, k, mesh.group)
        leaves = tuple(call.shard(x).detach().requires_grad_() for x in (q, k, v))
        return PreparedEntry(
            partial(call.attend, *leaves), leaves, call.shard(dout), lambda x: call.shard(x[0]).unsqueeze(0), _batched
        )


def make_peer(name: str) -> Entry:
    """Return the entry of a name in `PEERS`."""
    if name == "context_parallel":
        return ContextParallel(name, "allgather")
    if name == "context_parallel_alltoall":
        return ContextParallel(name, "alltoall")
    if name == "ring_flash_attn_llama3_at_once":
        return RingFlashAttnLlama3(name, at_once=True)
    return {"ring_flash_attn": RingFlashAttn, "ring_flash_attn_llama3": RingFlashAttnLlama3, "yunchang": Yunchang,
            "magi_attention": MagiAttention}[name](name)  # fmt: skip


def _same(x: Tensor) -> Tensor:
    return x


def _batched(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def _heads_second(x: Tensor) -> Tensor:
    return x.transpose(1, 2)
