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

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.errors import BackendUnavailableError, format_error, in_a_line
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.planning.tiles import Tiles

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
            programs stay until all work is done should end them sooner (`comm.base.Transport.high_priority`). No number
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
    - `attend_whole` and `gradients`: for attention that one call computes as a whole (`kernels.base`);
    - `attend_into`: writes what `attend` without a state returns into tensors with a last stride of 1: `attend_into(q,
      k, v, tiles, options, out, lse)`, with out in q's dtype or the accumulation dtype (`kernels.base`);
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
    """What a kernel says of itself and plans are priced by, under the names in `planning.rates.Rates`."""
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


def attend_whole(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
    """`attend` without a state: (out, LSE). out may be in q's dtype instead of the accumulation dtype."""
    own = getattr(kernel, "attend_whole", None)
    state: State = own(q, k, v, tiles, options) if own else kernel.attend(q, k, v, tiles, options)
    return state


def parts_rows(kernel: Kernel) -> bool:
    """Whether a kernel has `attend_into`, and so `attend_first` here."""
    return hasattr(kernel, "attend_into")


def attend_first(
    kernel: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    options: Options,
    merged: tuple[int, int],
    out: Tensor,
) -> State:
    """`attend` on the first of several computations, of which later ones merge into rows [start, stop) alone.

    Args:
        merged: these rows.
        out: ``[B, Sq, Hq, Dv]`` in q's dtype; all other rows are written there.

    Returns:
        the state that later computations are given: LSE of all rows, out of the merged ones; the rest of it is not set.
    """
    start, stop = merged
    batch, rows, heads, _ = q.shape
    wide = torch.empty(out.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=wide.dtype, device=q.device)
    for first, past, into in ((0, start, out), (start, stop, wide), (stop, rows, out)):
        if first < past:
            part = slice(first, past)
            kernel.attend_into(q[:, part], k, v, tiles.in_rows(first, past), options, into[:, part], lse[:, :, part])
    return wide, lse


def gradients(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    options: Options,
) -> Gradients:
    """(dq, dk, dv) of all tiles' pairs, in new tensors of q's dtype or of the accumulation dtype."""
    own = getattr(kernel, "gradients", None)
    if own:
        made: Gradients = own(dout, q, k, v, out, lse, tiles, options)
        return made
    return added_up(kernel, dout, q, k, v, out, lse, tiles, options)


def added_up(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tiles: Tiles,
    options: Options,
) -> Gradients:
    """The same for any kernel: `attend_backward` adds to zeros, allocated at once."""
    sizes = [x.numel() for x in (q, k, v)]
    zeros = torch.zeros(sum(sizes), dtype=accumulation_dtype(q.dtype), device=q.device)
    dq, dk, dv = (part.view(x.shape) for part, x in zip(torch.split(zeros, sizes), (q, k, v), strict=True))
    kernel.attend_backward(dout, q, k, v, lse, tiles, options, out=out, into=(dq, dk, dv))
    return dq, dk, dv


class LazyKernel:
    """Stands for ``module.attribute()`` until it is called.

    Args:
        name: the kernel's name.
        module, attribute: where its class is.
        needs: the package that it needs, as Python imports it.
        at_least: the first version of that package that will do, such as (3, 6).
        install: what to do if the package is absent or too old.
    """

    def __init__(
        self,
        name: str,
        module: str,
        attribute: str,
        *,
        needs: str,
        at_least: tuple[int, ...] = (),
        install: str | None = None,
    ) -> None:
        self.name = name
        self._module, self._attribute, self._needs, self._at_least = module, attribute, needs, at_least
        self._install = install
        self._kernel: Kernel | None = None

    def _real(self) -> Kernel:
        if self._kernel is None:
            self._kernel = getattr(import_module(self._module), self._attribute)()
        return self._kernel

    @property
    def in_pieces(self) -> bool:
        """See `kernels.base.Kernel`; asked of a kernel that serves."""
        return takes_pieces(self._real())

    @property
    def merged_once(self) -> bool:
        """See `kernels.base.Kernel`; asked of a kernel that serves."""
        return merges_once(self._real())

    @property
    def writes_gradients(self) -> bool:
        """See `kernels.base.Kernel`; asked of a kernel that serves."""
        return writes_gradients(self._real())

    @property
    def faster_squares(self) -> bool:
        """See `kernels.base.Kernel`; asked of a kernel that serves."""
        return faster_on_squares(self._real())

    @property
    def obeys_windows(self) -> bool:
        """See `kernels.base.Kernel`; asked of a kernel that serves."""
        return takes_windows(self._real())

    @property
    def rounding(self) -> float:
        """See `kernels.base.Kernel`; asked of a kernel that serves."""
        return rounding_of(self._real())

    def supports(self, problem: KernelProblem) -> Support:
        """Raises `BackendUnavailableError` for a broken package: it is installed, so somebody counts on it."""
        if self._kernel is None:
            if find_spec(self._needs) is None:
                return Support(
                    False, format_error(f"the package {self._needs} is not installed", next_step=self._install)
                )
            try:
                found = str(getattr(import_module(self._needs), "__version__", ""))
                if self._at_least and tuple(map(int, re.findall(r"\d+", found)[:3])) < self._at_least:
                    allowed = f"{'.'.join(map(str, self._at_least))} or later"
                    what = f"the package {self._needs} is too old"
                    return Support(False, format_error(what, got=found, allowed=allowed, next_step=self._install))
                self._real()
            # A vendor's package may raise anything on import; the user must hear which package it was.
            except Exception as error:
                what = f"the package {self._needs} is broken: it fails to import"
                next_step = "reinstall or remove it, or name another kernel"
                raise BackendUnavailableError(what, got=in_a_line(error), next_step=next_step) from error
        return self._real().supports(problem)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options, *, state: State | None = None
    ) -> State:
        return self._real().attend(q, k, v, tiles, options, state=state)

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
        self._real().attend_backward(dout, q, k, v, lse, tiles, options, delta=delta, out=out, into=into)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
        """The kernel's own where it has one."""
        return attend_whole(self._real(), q, k, v, tiles, options)

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
    ) -> Gradients:
        """The kernel's own where it has them."""
        return gradients(self._real(), dout, q, k, v, out, lse, tiles, options)

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """The kernel's own where it has one."""
        return row_delta_of(self._real())(dout, out)
