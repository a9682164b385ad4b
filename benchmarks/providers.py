"""Provide local attention kernels: ours, torch's cuDNN and flash, FlexAttention, flash-attn-4.

A provider takes a problem and returns two calls, forward and backward, or raises `Absent` with the reason. Results
are (out, lse or None) and (dq, dk, dv), in [B, S, H, D].
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import burst_portable
from benchmarks.script import accelerator
from burst_portable.backends.selection import choose_kernel, for_device
from burst_portable.kernels.base import BackwardInputs, Kernel
from burst_portable.layout import Segment
from burst_portable.mask import Mask, Region
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles, find_tiles


class Absent(Exception):
    """This provider cannot serve this row; its text is the reason."""


@dataclass
class Task:
    """One row of the benchmark, with its tensors."""

    name: str
    mask: Mask
    tiles: Tiles
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    softcap: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def call(self) -> AttentionCall:
        """The attention call that a kernel is given."""
        return AttentionCall.of(self.q, self.k, self.v, mask=self.mask, softcap=self.softcap, deterministic=False)

    @property
    def group(self) -> int:
        return self.q.shape[2] // self.k.shape[2]


Calls = tuple[Callable[[], tuple[Tensor, Tensor | None]], Callable[[], tuple[Tensor, Tensor, Tensor]]]


def make_task(
    name: str,
    length: int,
    heads: tuple[int, int],
    head: int,
    mask: str,
    *,
    v_head: int | None = None,
    softcap: float | None = None,
) -> Task:
    device = accelerator()
    generator = torch.Generator(device).manual_seed(0)
    v_head = v_head or head
    sizes = {"q": (heads[0], head), "k": (heads[1], head), "v": (heads[1], v_head), "dout": (heads[0], v_head)}
    made = {
        n: torch.randn(1, length, *size, device=device, generator=generator, dtype=torch.bfloat16)
        for n, size in sizes.items()
    }
    parsed = striped(length) if mask == "striped" else Mask.parse(mask, length)
    segment = (Segment(0, length),)
    return Task(name, parsed, find_tiles(parsed, segment, segment), **made, softcap=softcap)


def striped(length: int) -> Mask:
    """Return the mask between a rank's queries and the next rank's keys in a striped layout.

    Each query sees the keys before its own position. For its own keys and those of earlier ranks the mask is causal.
    """
    return Mask((Region(1, length, 0, length - 1, lo=1),), "striped")


def as_causal_square(task: Task) -> Task:
    """Return a striped mask without the first query and the last key, which see nothing: a causal square.

    Striped rings of other libraries call their operators like that.
    """
    if task.mask.name != "striped":
        return task
    causal, segment = Mask.causal(), (Segment(0, task.q.shape[1] - 1),)
    cut = {"q": task.q[:, 1:], "k": task.k[:, :-1], "v": task.v[:, :-1], "dout": task.dout[:, 1:]}
    return replace(task, mask=causal, tiles=find_tiles(causal, segment, segment), **cut)


def checked_heads(x: Tensor, kv_heads: int) -> Tensor:
    """Return the first and the last K/V head of [B, S, H, D], or the query heads that read them, for comparison.

    If ranks exchange tokens for heads, different ranks compute them.
    """
    each = x.shape[2] // kv_heads
    return x if kv_heads <= 2 else torch.cat([x[:, :, :each], x[:, :, -each:]], 2)


# ------------------------------------------------------------------------------------------ our kernels


def check(kernel: Kernel, task: Task) -> None:
    """Raise `Absent` if the kernel does not serve this row."""
    if not (support := kernel.supports(task.call)).ok:
        raise Absent(support.reason)


def own(kernel: Kernel, task: Task, *, resumed: bool = False) -> Calls:
    """Call a kernel of this library as the steps of a ring do; `resumed`: as the steps after the first.

    Out is float32, or merged into a running state whose LSE grows with every call. Gradients are added to float32
    buffers, which the checks clear.
    """
    q, k, v = task.q, task.k, task.v
    check(kernel, task)
    into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    task.extra.setdefault("zero", []).extend(into)
    state = kernel.attend(q, k, v, task.tiles, task.call)
    running = state[0].clone(), state[1].clone()

    def forward() -> tuple[Tensor, Tensor | None]:
        if resumed:
            return kernel.attend(q, k, v, task.tiles, task.call, state=running)[0], None
        return kernel.attend(q, k, v, task.tiles, task.call)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        kernel.attend_backward(
            BackwardInputs(task.dout, q, k, v, state[1], out=state[0]), task.tiles, task.call, into=into
        )
        return into

    return forward, backward


def triton_kernel(task: Task, *, resumed: bool = False) -> Calls:
    from burst_portable.kernels.triton.triton_kernel import TritonKernel

    return own(TritonKernel(), task, resumed=resumed)


def triton_whole(task: Task) -> Calls:
    """Call the portable kernels with all work in one call, as other libraries are called."""
    from burst_portable.kernels.triton.triton_kernel import TritonKernel

    kernel = TritonKernel()
    check(kernel, task)
    return in_16_bits(kernel, task)


def _hopper() -> Kernel:
    try:
        module = importlib.import_module("burst_portable.backends.cuda.hopper.kernel")
    except ImportError as error:
        raise Absent(f"cannot be imported: {error}") from error
    kernel: Kernel = module.HopperKernel()
    return kernel


def hopper_kernel(task: Task, *, resumed: bool = False) -> Calls:
    return own(_hopper(), task, resumed=resumed)


def hopper_whole(task: Task) -> Calls:
    """Call the Hopper kernels with all work in one call."""
    kernel = _hopper()
    check(kernel, task)
    return in_16_bits(kernel, task)


def auto(task: Task) -> Calls:
    """Call the kernel that `auto` chooses, with all work in one call."""
    kernel, _ = choose_kernel(for_device(task.q.device.type), task.call)
    task.extra["kernel"] = kernel.name
    return in_16_bits(kernel, task)


def auto_deterministic(task: Task) -> Calls:
    """Call the kernel that `auto` chooses for a call whose gradients must be the same in every run."""
    call = AttentionCall.of(task.q, task.k, task.v, mask=task.mask, softcap=task.softcap, deterministic=True)
    kernel, _ = choose_kernel(for_device(task.q.device.type), call)
    return in_16_bits(kernel, task, call)


def the_call_of_users(task: Task) -> Calls:
    """Call `burst_portable.attention` with a cached plan, and its backward pass through autograd."""
    leaves = tuple(x.detach().requires_grad_() for x in (task.q, task.k, task.v))
    mesh = burst_portable.Mesh.single()

    def forward() -> tuple[Tensor, None]:
        return burst_portable.attention(*leaves, mask=task.mask, mesh=mesh, softcap=task.softcap), None

    kept, _ = forward()
    return forward, lambda: torch.autograd.grad(kept, leaves, task.dout, retain_graph=True)


def in_16_bits(kernel: Kernel, task: Task, call: AttentionCall | None = None) -> Calls:
    """Call a kernel with all work in one call: out and gradients in 16 bits, as other libraries return them."""
    tensors, call = (task.q, task.k, task.v), call or task.call
    out, lse = kernel.forward_single_call(*tensors, task.tiles, call)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        made = kernel.backward_single_call(BackwardInputs(task.dout, *tensors, lse, out), task.tiles, call)
        return tuple(x.to(task.q.dtype) for x in made)  # type: ignore[return-value]  # they are three

    def forward() -> tuple[Tensor, Tensor | None]:
        out, lse = kernel.forward_single_call(*tensors, task.tiles, call)
        return out.to(task.q.dtype), lse

    return forward, backward


# --------------------------------------------------------------------------------------------- others


def _fused(task: Task, backend: SDPBackend) -> Calls:
    """Call torch's scaled_dot_product_attention with one of its backends."""
    if task.softcap is not None:
        raise Absent("has no softcap")
    task = as_causal_square(task)
    if task.mask.name not in ("full", "causal"):
        raise Absent(f"knows no mask {task.mask}")
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (task.q, task.k, task.v))

    def attention() -> Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                q, k, v, is_causal=task.mask.name == "causal", enable_gqa=task.group > 1
            )

    return _through_autograd(task, attention, (q, k, v))


def _through_autograd(task: Task, attention: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Calls:
    """Return a forward call without autograd and a backward call through autograd. Heads are dimension 1."""
    try:
        kept = attention()
    except RuntimeError as error:
        raise Absent(str(error).splitlines()[0][:200]) from error
    dout = task.dout.transpose(1, 2)

    def forward() -> tuple[Tensor, None]:
        with torch.no_grad():
            return attention().transpose(1, 2), None

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        gradients = torch.autograd.grad(kept, leaves, dout, retain_graph=True)
        return tuple(x.transpose(1, 2) for x in gradients)  # type: ignore[return-value]  # they are three

    return forward, backward


def cudnn(task: Task) -> Calls:
    return _fused(task, SDPBackend.CUDNN_ATTENTION)


def aten_flash(task: Task) -> Calls:
    return _fused(task, SDPBackend.FLASH_ATTENTION)


def flex(task: Task, mode: str, backend: str = "AUTO") -> Calls:
    """Call FlexAttention with a mask function and a block mask.

    backend: "FLASH" computes with flash-attn-4, "AUTO" with torch's own kernel.
    """
    from torch.nn.attention import flex_attention as module

    create_block_mask, flex_attention, options = module.create_block_mask, module.flex_attention, {}
    if backend != "AUTO":
        known = getattr(module, "FlexKernelOptions", None)  # older versions ignore the option
        if known is None or "BACKEND" not in known.__annotations__:
            raise Absent(f"the FlexAttention of torch {torch.__version__} has no backends")
        options = {"kernel_options": {"BACKEND": backend}}
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (task.q, task.k, task.v))
    length = q.shape[2]
    block = None
    if task.mask.name != "full":
        block = create_block_mask(mask_function(task.mask, q.device), None, None, length, length, device=q.device)
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    capped = None if task.softcap is None else partial(_softcap, task.softcap)
    call = partial(compiled, q, k, v, block_mask=block, score_mod=capped, enable_gqa=task.group > 1, **options)
    return _through_autograd(task, call, (q, k, v))


def _softcap(cap: float, score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Limit the scores of FlexAttention."""
    return cap * torch.tanh(score / cap)


def mask_function(mask: Mask, device: torch.device) -> Callable[..., Tensor]:
    """Return a mask function for FlexAttention, written as in its examples."""
    kind = mask.name.split(":")[0].split("(")[0]
    regions = mask.regions
    if kind == "causal":
        return lambda b, h, i, j: i >= j
    if kind == "striped":
        return lambda b, h, i, j: i > j
    if kind == "window":
        lo, hi = regions[0].lo, regions[0].hi
        return lambda b, h, i, j: (i - j >= lo) & (i - j <= hi)
    if kind == "documents":
        ends = torch.tensor([r.q_stop for r in regions], device=device)
        document = torch.bucketize(torch.arange(int(ends[-1]), device=device), ends, right=True)
        return lambda b, h, i, j: (i >= j) & (document[i] == document[j])
    if kind == "prefix":
        prefix = regions[0].k_stop
        return lambda b, h, i, j: (i >= j) | (j < prefix)
    if kind == "sink":
        sink, left = regions[0].k_stop, regions[1].hi
        return lambda b, h, i, j: (i >= j) & ((j < sink) | (i - j <= left))
    if kind == "share_question":
        ends = torch.tensor(sorted({r.q_stop for r in regions}), device=device)
        part = torch.bucketize(torch.arange(int(ends[-1]), device=device), ends, right=True)
        return lambda b, h, i, j: (i >= j) & ((part[i] == part[j]) | (part[j] == 0))
    raise Absent(f"no mask function was written for {mask}")


def flash_attn_4(task: Task) -> Calls:
    """Call flash-attn-4: documents by cu_seqlens, windows by window_size.

    It serves other masks through mask functions: see `flex` with "FLASH".
    """
    try:
        from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
    except ImportError as error:
        raise Absent(f"not installed: {error}") from error
    task = as_causal_square(task)
    kind, regions = task.mask.name.split(":")[0].split("(")[0], task.mask.regions
    packed = kind == "documents"  # without the batch dimension: autograd would fill and copy gradients to add it
    leaves = tuple((x[0] if packed else x).detach().requires_grad_() for x in (task.q, task.k, task.v))
    if kind in ("full", "causal"):
        call = partial(flash_attn_func, *leaves, causal=kind == "causal", softcap=task.softcap or 0.0)
    elif kind == "window":
        call = partial(flash_attn_func, *leaves, causal=True, window_size=(regions[0].hi, 0))
    elif kind == "documents":
        ends = torch.tensor([0, *(r.q_stop for r in regions)], dtype=torch.int32, device=task.q.device)
        longest = max(r.q_stop - r.q_start for r in regions)
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        call = partial(flash_attn_varlen_func, *leaves, causal=True, **lengths)
    else:
        raise Absent(f"has no argument for {task.mask}; flex-flash gives it a mask function")

    def attention() -> Tensor:
        made = call()
        out: Tensor = made[0] if isinstance(made, tuple) else made
        return out

    kept = attention()
    dout = task.dout.view(kept.shape)

    def forward() -> tuple[Tensor, None]:
        with torch.no_grad():
            return attention().view(task.dout.shape), None

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        gradients = torch.autograd.grad(kept, leaves, dout, retain_graph=True)
        return tuple(x.view(-1, *x.shape[-3:]) for x in gradients)  # type: ignore[return-value]  # they are three

    return forward, backward


PROVIDERS: dict[str, Callable[[Task], Calls]] = {
    "auto": auto,
    "auto-deterministic": auto_deterministic,
    "triton": triton_kernel,
    "triton-state": partial(triton_kernel, resumed=True),
    "triton-whole": triton_whole,
    "hopper": hopper_kernel,
    "hopper-state": partial(hopper_kernel, resumed=True),
    "hopper-whole": hopper_whole,
    "cudnn": cudnn,
    "flash": aten_flash,
    "flex": partial(flex, mode="default"),
    "flex-max": partial(flex, mode="max-autotune-no-cudagraphs"),
    "flex-flash": partial(flex, mode="default", backend="FLASH"),
    "flash-attn-4": flash_attn_4,
}
