"""What a local attention kernel is: `attend` and `attend_backward` over one tensor pair and a list of tiles.

Shapes (the last stride is 1, all others are free):

======  ===================  ====================================================================
q       [B, Sq, Hq, D]       queries of one block
k, v    [B, Sk, Hkv, D|Dv]   keys and values; Hq = g·Hkv, head h reads K/V head h // g; Dv may differ from D
out     [B, Sq, Hq, Dv]      in the accumulation dtype unless asked otherwise
lse     [B, Hq, Sq]          natural logarithm, accumulation dtype; -inf where nothing is seen
delta   [B, Hq, Sq]          rowsum(dO * O), accumulation dtype
======  ===================  ====================================================================

In the backward pass lse, delta and out are *global*: those of the row over every key of the sequence.
The accumulation dtype is float32 (float64 for float64); see `numerics`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.numerics import State
from burst_portable.tiles import Tiles

Gradients = tuple[Tensor, Tensor, Tensor]
"""(dq, dk, dv)."""

LEAST_SCALE = 1e-30
"""Kernels that need a positive scale are asked for none below.

Some multiply weights by the scale, or divide by it, and would leave float32's range. `reference` and `triton` do not.
"""


@dataclass(frozen=True, slots=True)
class Options:
    """How an attention is computed, apart from its tensors and its mask.

    Attributes:
        scale, softcap: as `api.attention` takes them.
        deterministic: whether gradients must be bit-identical every time.
        makes_way: whether kernels that move messages may be waiting for room on the device, so that a kernel whose
            programs stay until all work is done should end them sooner (`comm.base.Transport.goes_first`). No number
            changes.
    """

    scale: float
    softcap: float | None = None
    deterministic: bool = True
    makes_way: bool = False

    @property
    def positive_scale(self) -> bool:
        """Whether the scale is positive, and at least `LEAST_SCALE`."""
        return self.scale >= LEAST_SCALE


@dataclass(frozen=True, slots=True)
class KernelProblem:
    """What a kernel needs to know to say whether it can serve a call."""

    dtype: torch.dtype
    device: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    softcap: bool = False
    deterministic: bool = True
    positive_scale: bool = True

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, options: Options, device: str) -> KernelProblem:
        """The problem of a call with these tensors, on a device of this type."""
        return cls(
            q.dtype,
            device,
            heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            value_dim=v.shape[3],
            softcap=options.softcap is not None,
            deterministic=options.deterministic,
            positive_scale=options.positive_scale,
        )


class Support(NamedTuple):
    """Whether a kernel serves a problem, and if not, why."""

    ok: bool
    reason: str = ""


class Kernel(Protocol):
    """One provider of local attention.

    It may have more methods and attributes, which save time and change no result. Each is read only by the function in
    parentheses:

    - `row_delta`: `numerics.row_delta`, but faster (`row_delta_of`);
    - `attend_whole` and `gradients`: for attention that one call computes as a whole (`kernels.whole`);
    - `attend_into`: writes what `attend` without a state returns into tensors with a last stride of 1: `attend_into(q,
      k, v, tiles, options, out, lse)`, with out in q's dtype or the accumulation dtype (`kernels.whole`);
    - `in_pieces`: true if it cuts tiles into pieces, calls an operator on each and merges their results. `auto`
      prices that, and rows of several ranks are put in order first, so that there are few pieces (`takes_pieces`);
    - `merged_once`: true if each of these merges is one pass over memory (`merges_once`);
    - `writes_gradients`: true if its `gradients` writes dK and dV of large problems in 16 bits; others add them up in
      float32 and round them, which `auto` prices (`writes_gradients`);
    - `faster_squares`: true if it is faster where all of a call is a box or a causal square; rows of several ranks are
      put in order first where that makes one (`faster_on_squares`);
    - `obeys_windows`: true if its operator computes a causal window over a whole square in one call, and is known to
      do so correctly (`takes_windows`);
    - `rounding`: the relative error to which it rounds factors that have a wider dtype: 2**-10 with TF32. The
      conformance suite allows for it (`rounding_of`).
    """

    @property
    def name(self) -> str:
        """Registry key, command-line value, and label in traces."""

    def supports(self, problem: KernelProblem) -> Support:
        """Whether it serves this problem. Does not raise."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        options: Options,
        *,
        state: State | None = None,
    ) -> State:
        """Attention of q over the pairs of all tiles.

        Without `state`: a new (out, lse); rows outside every tile are 0 and -inf.
        With `state`, one that this kernel returned before: merges into it, in place where it can, and returns it.
        Its dtypes are the accumulation dtype or wider; see `numerics.finished`.
        """

    def attend_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
        *,
        delta: Tensor | None = None,
        out: Tensor | None = None,
        into: Gradients,
    ) -> None:
        """Adds the gradients of all tiles' pairs into the buffers `into` (accumulation dtype, shapes of q, k, v).

        Exactly one of `delta` and `out` is given; lse, delta and out are global.
        """


def takes_pieces(kernel: Kernel | None) -> bool:
    """Whether it calls an operator on pieces: its `in_pieces`, or False."""
    return bool(getattr(kernel, "in_pieces", False))


def merges_once(kernel: Kernel | None) -> bool:
    """Whether it merges the results of pieces in one pass over memory: its `merged_once`, or False."""
    return bool(getattr(kernel, "merged_once", False))


def writes_gradients(kernel: Kernel | None) -> bool:
    """Whether it adds up no dK and dV where one call makes them: its `writes_gradients`, or False."""
    return bool(getattr(kernel, "writes_gradients", False))


def faster_on_squares(kernel: Kernel | None) -> bool:
    """Whether it is faster where a box or a causal square is all: its `faster_squares`, or False."""
    return bool(getattr(kernel, "faster_squares", False))


def traits(kernel: Kernel | None) -> dict[str, Any]:
    """What a kernel says of itself and plans are priced by, under the names in `rates.Rates`."""
    return {
        "in_pieces": takes_pieces(kernel),
        "merged_once": merges_once(kernel),
        "writes_gradients": writes_gradients(kernel),
        "faster_squares": faster_on_squares(kernel),
    }


def takes_windows(kernel: Kernel) -> bool:
    """Whether a causal window over a whole square is one call of its operator: its `obeys_windows`, or False."""
    return bool(getattr(kernel, "obeys_windows", False))


def rounding_of(kernel: Kernel) -> float:
    """By how much it rounds what it multiplies: its `rounding`, or 0."""
    return float(getattr(kernel, "rounding", 0.0))


def row_delta_of(kernel: Kernel) -> Callable[[Tensor, Tensor], Tensor]:
    """The kernel's own `row_delta`, or that of `numerics`: (dO, out) -> delta ``[B, H, S]``."""
    found: Callable[[Tensor, Tensor], Tensor] = getattr(kernel, "row_delta", numerics.row_delta)
    return found


def arrived(x: Tensor) -> Tensor:
    """The tensor, once it has arrived: an AsyncCollectiveTensor has no memory yet, and its address is 0."""
    return x.clone() if type(x).__name__ == "AsyncCollectiveTensor" else x


def as_kernels_take(x: Tensor) -> Tensor:
    """The same numbers, arrived and with a last stride of 1."""
    x = arrived(x)
    return x if x.stride(-1) == 1 else x.contiguous()
