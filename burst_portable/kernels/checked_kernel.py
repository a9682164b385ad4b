"""Check the tiles that a kernel gets, and shapes, dtypes and devices of its results. No number is read.

The first call of each kind runs through `CheckedKernel`, and so does the conformance suite. Remembered calls do not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_portable.errors import BackendUnavailableError, ShapeError, shown
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, LazyKernel, Support, WrappedKernel
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

_RESULT = "a pair (out, lse)"


class CheckedKernel(WrappedKernel):
    """A kernel whose tiles and results are checked: see `Kernel` for the rules.

    Raises:
        ShapeError: A tile is empty or exceeds its tensors, as a wrong plan makes it. Operators of vendors and of torch
            read beyond their tensors, or end the process.
        BackendUnavailableError: A method returned something else, such as None, or a tensor with another shape, dtype
            or device.
    """

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        *,
        state: State | None = None,
        yields_to_comm: bool = False,
    ) -> State:
        _check_tiles(tiles, q, k)
        found = self.wrapped.attend(q, k, v, tiles, call, state=state, yields_to_comm=yields_to_comm)
        # The first result may be the only one, so it may have the dtype of q. A merged one may not.
        self._check_state("attend", found, q, v, (*_wide(q), q.dtype) if state is None else _wide(q))
        return found

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        if type(self.wrapped).forward_single_call is Kernel.forward_single_call:  # errors name the method of its author
            return self.attend(q, k, v, tiles, call, yields_to_comm=yields_to_comm)
        _check_tiles(tiles, q, k)
        found = self.wrapped.forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)
        self._check_state("forward_single_call", found, q, v, (q.dtype, *_wide(q)))
        return found

    def attend_into(self, *args: Any, **options: Any) -> None:
        q, k, _, tiles, *_ = args
        _check_tiles(tiles, q, k)
        found: object = self.wrapped.attend_into(*args, **options)  # type: ignore[func-returns-value]
        self._check_nothing("attend_into", found, "it writes into out and lse")

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        _check_tiles(tiles, x.q, x.k)
        found: object = self.wrapped.attend_backward(x, tiles, call, into=into)
        self._check_nothing("attend_backward", found, "it adds the gradients to the tensors of `into`")

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        if type(self.wrapped).backward_single_call is Kernel.backward_single_call:
            return Kernel.backward_single_call(self, x, tiles, call)
        _check_tiles(tiles, x.q, x.k)
        found = self.wrapped.backward_single_call(x, tiles, call)
        method, allowed = "backward_single_call", (x.q.dtype, accumulation_dtype(x.q.dtype))
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise self._error(method, "no gradients", got=shown(found), allowed="(dq, dk, dv)")
        for name, gradient, like in zip(("dq", "dk", "dv"), found, (x.q, x.k, x.v), strict=True):
            self._check_tensor(method, name, gradient, tuple(like.shape), allowed, x.q)
        return found

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        found = self.wrapped.row_delta(dout, out)
        batch, rows, heads, _ = dout.shape
        wide = (accumulation_dtype(dout.dtype),)
        self._check_tensor("row_delta", "delta", found, (batch, heads, rows), wide, dout)
        return found

    def _check_state(self, method: str, state: object, q: Tensor, v: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        """Check (out, lse) of q. `dtypes`: Those that out may have."""
        if state is None:
            raise self._error(method, "None", allowed=f"{_RESULT}; `state` itself if it was changed")
        if not isinstance(state, tuple | list) or len(state) != 2:
            raise self._error(method, "no result", got=shown(state), allowed=_RESULT)
        batch, rows, heads, _ = q.shape
        self._check_tensor(method, "out", state[0], (batch, rows, heads, v.shape[-1]), dtypes, q)
        self._check_tensor(method, "lse", state[1], (batch, heads, rows), _wide(q), q)

    def _check_nothing(self, method: str, found: object, instead: str) -> None:
        if found is not None:
            raise self._error(method, "a result", got=shown(found), allowed=f"None: {instead}")

    def _check_tensor(
        self, method: str, name: str, x: object, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], like: Tensor
    ) -> None:
        if not isinstance(x, Tensor):
            raise self._error(method, f"an invalid {name}", got=shown(x), allowed="a tensor")
        if tuple(x.shape) != shape:
            raise self._error(method, f"{name} of a wrong shape", got=tuple(x.shape), allowed=shape)
        if x.dtype not in dtypes:
            names = " or ".join(dict.fromkeys(map(str, dtypes)))
            raise self._error(method, f"{name} of a wrong dtype", got=x.dtype, allowed=names)
        if x.device != like.device:
            raise self._error(method, f"{name} on a wrong device", got=x.device, allowed=like.device)

    def _error(
        self, method: str, returned: str, *, got: object = None, allowed: object = None
    ) -> BackendUnavailableError:
        """Return the error for a method that returned something wrong."""
        kind = type(self.wrapped)
        what = f"the kernel {self.name!r} is broken: {method} returned {returned}"
        next_step = f"fix {kind.__module__}.{kind.__qualname__}.{method}"
        return BackendUnavailableError(what, got=got, allowed=allowed, next_step=next_step)


def _check_tiles(tiles: Tiles, q: Tensor, k: Tensor) -> None:
    """Raise `ShapeError` if a tile of a launch is empty or exceeds its tensors."""
    rows, columns = q.shape[1], k.shape[1]
    for t in tiles:
        if not (0 <= t.q_start < t.q_stop <= rows and 0 <= t.k_start < t.k_stop <= columns and t.lo <= t.hi):
            raise ShapeError(
                "a tile of this launch is empty or exceeds its tensors",
                got=t,
                allowed=f"starts below stops, within {rows} rows and {columns} columns; lo <= hi",
                next_step="check the plan of the strategy with planning.verify.verify",
            )


def support_of(kernel: Kernel | LazyKernel, call: AttentionCall) -> Support:
    """Return whether a kernel serves a call.

    Raises:
        BackendUnavailableError: `supports` returned something else, such as a bool.
    """
    found: object = kernel.supports(call)
    if not isinstance(found, Support):
        raise BackendUnavailableError(
            f"the kernel {kernel.name!r} is broken: supports returned no Support",
            got=shown(found),
            allowed='Support(True), or Support(False, "the reason")',
            next_step=f"fix {type(kernel).__module__}.{type(kernel).__qualname__}.supports",
        )
    if found.ok and call.dropout is not None and not kernel.load().traits.supports_dropout:
        return Support(False, "it does not drop weights by global position")
    return found


def _wide(q: Tensor) -> tuple[torch.dtype, ...]:
    """Return the dtypes of a running state: the accumulation dtype, or wider."""
    return accumulation_dtype(q.dtype), torch.float64
