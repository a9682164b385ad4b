"""The local kernel on one causal block, forward and backward, and passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from burst_portable.kernels.contract import Kernel, KernelProblem, Options, row_delta_of, takes_pieces
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.measuring.arithmetic import gigabytes_a_second
from burst_portable.measuring.clock import Clock
from burst_portable.numerics import accumulation_dtype, finished
from burst_portable.plans import PASSES, PassName
from burst_portable.tiles import find_tiles

_AT_ONCE, _CALLS = 0.1, 10  # seconds that calls back to back should take together; the most calls

Passes = dict[PassName, Callable[[], object]]


class Block:
    """One sequence on one rank, causal: its kernel calls are those of a plan's own block.

    Attributes:
        passes: a kernel call each.
        beside: the same as called beside messages.
        flops: of each, by exact mask area.
        varied: of each, what `Clock.varied` told when it was timed.
    """

    def __init__(
        self, kernel: Kernel, problem: KernelProblem, length: int, device: torch.device, *, makes_way: bool = False
    ) -> None:
        p, generator = problem, torch.Generator(device).manual_seed(0)
        q, k, v, dout = (
            torch.randn(1, length, heads, dim, device=device, generator=generator).to(p.dtype)
            for heads, dim in (
                (p.heads, p.head_dim), (p.kv_heads, p.head_dim), (p.kv_heads, p.value_dim), (p.heads, p.value_dim),
            )
        )  # fmt: skip
        mask, segment = Mask.causal(), (Segment(0, length),)
        tiles, options = find_tiles(mask, segment, segment), Options(p.head_dim**-0.5, deterministic=p.deterministic)
        beside = replace(options, makes_way=makes_way)
        wide, lse = finished(kernel.attend(q, k, v, tiles, options), p.dtype)
        out = wide.to(p.dtype)
        delta = None if takes_pieces(kernel) else row_delta_of(kernel)(dout, out)
        dq, dk, dv = (torch.zeros(x.shape, dtype=accumulation_dtype(x.dtype), device=device) for x in (q, k, v))

        def backward() -> None:
            kernel.attend_backward(
                dout, q, k, v, lse, tiles, options,
                delta=delta, out=out if delta is None else None, into=(dq, dk, dv),
            )  # fmt: skip

        self.passes: Passes = {"forward": lambda: kernel.attend(q, k, v, tiles, options), "backward": backward}
        self.beside: Passes = {"forward": lambda: kernel.attend(q, k, v, tiles, beside), "backward": backward}
        self.varied: dict[PassName, float] = {}
        pairs = 2 * mask.area(length, length) * p.heads
        self.flops: dict[PassName, int] = {
            "forward": pairs * (p.head_dim + p.value_dim),
            "backward": pairs * (3 * p.head_dim + 2 * p.value_dim),
        }

    def seconds(self, clock: Clock) -> dict[PassName, float]:
        """Seconds of a call of each pass; short calls are timed back to back."""
        found: dict[PassName, float] = {}
        for name in PASSES:
            call = self.passes[name]
            call()
            one = clock.time(call, 1)
            clock.varied()
            found[name] = clock.median(call, max(1, min(_CALLS, round(_AT_ONCE / one))))
            self.varied[name] = clock.varied()
        return found


def memory_rate(clock: Clock, size: int) -> float:
    """GB/s of an elementwise add: two tensors of `size` bytes are read, and one is written."""
    a, b, out = (torch.ones(size // 4, device=clock.device) for _ in range(3))

    def add() -> None:
        torch.add(a, b, out=out)

    add()
    return gigabytes_a_second(3 * size, clock.median(add, _CALLS))
