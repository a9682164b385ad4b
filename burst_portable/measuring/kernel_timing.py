"""Time the kernels of a backend side by side, on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import kernels_of
from burst_portable.errors import BurstError, in_a_line
from burst_portable.kernels.base import BackwardInputs, Kernel, torch_dtype
from burst_portable.kernels.checked_kernel import support_of
from burst_portable.layout import Segment, make_layout
from burst_portable.mask import Mask
from burst_portable.measuring.timing import Clock
from burst_portable.numerics import finished
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import PASSES, PassName
from burst_portable.planning.tiles import find_tiles

DOCUMENTS = 16
"""Documents of the mask "documents", if the sequence has so many tokens; their lengths are random."""
_DIFFERS = 2e-2  # relative: the largest error of 16-bit results is about 8e-3
_BATCH_SECONDS, _MAX_CALLS = 0.05, 10


class KernelRow(NamedTuple):
    """The times of one attention.

    Attributes:
        call: The attention.
        mask: Kind of its mask: "full", "causal" or "documents".
        seconds: Seconds by kernel and pass.
        reasons: Why other kernels have no times, by kernel.
    """

    call: AttentionCall
    mask: str
    seconds: dict[str, dict[PassName, float]]
    reasons: dict[str, str]


class DeviceClock(Clock):
    """Clock of one rank without other ranks."""

    def meet(self) -> None:
        """Return at once: there is no other rank."""

    def slowest(self, value: float) -> float:
        """Return the value."""
        return value


def documents(length: int) -> Mask:
    """Return the mask of causal documents that represents all masks that are neither full nor causal."""
    count = max(1, min(DOCUMENTS, length // 8))
    cuts = sorted(random.Random(0).sample(range(1, length), count - 1))
    return Mask.documents([0, *cuts, length])


def mask_of_kind(kind: str, length: int) -> Mask:
    """Return the mask of a kind: "full", "causal" or "documents"."""
    return documents(length) if kind == "documents" else Mask.parse(kind, length)


def time_kernels(
    backend: Backend, calls: Sequence[tuple[str, AttentionCall]], device: torch.device, names: Sequence[str] = ()
) -> Iterator[KernelRow]:
    """Yield the times of all kernels of a backend for each attention, as soon as they are measured.

    Kernels are timed in turn, round after round, so that a slower device affects all of them. Each computes the whole
    attention in one call. A kernel whose results differ from those of most kernels has no time.

    Args:
        backend: The backend.
        calls: Kind of mask and attention, as `timed_call` returns them.
        device: The device.
        names: Names of the kernels. Default: all.
    """
    clock = DeviceClock(device, streams=backend.capabilities.streams)
    for kind, call in calls:
        reasons: dict[str, str] = {}
        passes: dict[str, dict[PassName, Callable[[], object]]] = {}
        results: dict[str, tuple[Tensor, ...]] = {}
        for lazy in kernels_of(backend):
            if names and lazy.name not in names:
                continue
            try:
                support = support_of(lazy, call)
                if not support.ok:
                    reasons[lazy.name] = support.reason
                    continue
                passes[lazy.name], results[lazy.name] = _passes(lazy.load(), call, device)
            except (BurstError, RuntimeError) as error:  # a failing kernel must not end the comparison
                reasons[lazy.name] = f"failed: {in_a_line(error)}"
        for name, reason in _different(results).items():
            reasons[name] = reason
            del passes[name]
        yield KernelRow(call, kind, _medians(clock, passes), reasons)


def timed_call(
    kind: str, length: int, heads: int, kv_heads: int, head_dim: int, dtype: str, device: str, **settings: object
) -> AttentionCall:
    """Return an attention of one rank over `length` tokens. `settings`: further fields of `AttentionCall`."""
    call = AttentionCall(
        mask_of_kind(kind, length), make_layout("contiguous", length, 1), heads, kv_heads, head_dim, head_dim,
        itemsize=getattr(torch, dtype).itemsize, dtype=dtype, device=device, scale=head_dim**-0.5, deterministic=False,
    )  # fmt: skip
    return replace(call, **settings)  # type: ignore[arg-type]


def _passes(
    kernel: Kernel, call: AttentionCall, device: torch.device
) -> tuple[dict[PassName, Callable[[], object]], tuple[Tensor, ...]]:
    """Return both passes of a kernel, and its results (out, dq, dk, dv)."""
    length = call.layout.length
    generator, dtype = torch.Generator(device).manual_seed(0), torch_dtype(call)
    query, key = (call.heads, call.head_dim), (call.kv_heads, call.head_dim)
    value, output = (call.kv_heads, call.v_head_dim), (call.heads, call.v_head_dim)
    sizes = (query, key, value, output)
    q, k, v, dout = (torch.randn(1, length, *s, device=device, generator=generator).to(dtype) for s in sizes)
    segment = (Segment(0, length),)
    tiles = find_tiles(call.mask, segment, segment)
    out, lse = finished(kernel.forward_single_call(q, k, v, tiles, call), dtype)
    x = BackwardInputs(dout, q, k, v, lse, out=out.to(dtype))
    gradients = kernel.backward_single_call(x, tiles, call)

    def forward() -> object:
        return kernel.forward_single_call(q, k, v, tiles, call)

    def backward() -> object:
        return kernel.backward_single_call(x, tiles, call)

    return {"forward": forward, "backward": backward}, (out, *gradients)


def _different(results: dict[str, tuple[Tensor, ...]]) -> dict[str, str]:
    """Return the kernels whose results differ from those of most others, with the reason.

    With two kernels, the later one of the backend's list is kept: it is the simpler one.
    """

    def distance(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> float:
        pairs = zip(one, other, strict=True)
        return max(float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-30)) for a, b in pairs)

    names = list(results)
    agree = {n: [o for o in names if distance(results[n], results[o]) <= _DIFFERS] for n in names}
    best = max(reversed(names), key=lambda name: len(agree[name]), default="")
    return {
        name: f"its results differ from those of {best}, by {distance(results[name], results[best]):.2g}"
        for name in names
        if name not in agree[best]
    }


def _medians(clock: Clock, passes: dict[str, dict[PassName, Callable[[], object]]]) -> dict[str, dict[PassName, float]]:
    """Return the median seconds of all kernels, by kernel and pass."""
    found: dict[str, dict[PassName, float]] = {name: {} for name in passes}
    for which in PASSES:
        calls = [passes[name][which] for name in passes]
        if not calls:
            continue
        fastest = min(clock.time(call, 1) for call in calls)
        number = max(1, min(_MAX_CALLS, round(_BATCH_SECONDS / fastest)))
        for name, seconds in zip(passes, clock.medians(calls, number), strict=True):
            found[name][which] = seconds
    return found
