"""Define `Kernel`, the interface of local attention kernels, and `LazyKernel`, which imports a kernel on first use.

Shapes (the last stride is 1, all others are free):

    q       [B, Sq, Hq, D]       queries of one block
    k, v    [B, Sk, Hkv, D|Dv]   keys and values; Hq = g·Hkv, head h reads K/V head h // g; Dv may differ from D
    out     [B, Sq, Hq, Dv]      in the accumulation dtype, unless stated otherwise
    lse     [B, Hq, Sq]          natural logarithm, accumulation dtype; -inf for a fully masked row
    delta   [B, Hq, Sq]          rowsum(dO * O), accumulation dtype

In the backward pass lse, delta and out are *global*: those of the row over every key of the sequence.
The accumulation dtype is float32 (float64 for float64); see `numerics`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.errors import BackendUnavailableError, InputError, format_error, in_a_line, shown
from burst_portable.numerics import State, accumulation_dtype
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tiles

Gradients = tuple[Tensor, Tensor, Tensor]
"""(dq, dk, dv)."""


class Support(NamedTuple):
    """Result of `Kernel.supports`.

    Attributes:
        ok: Whether the kernel serves the call.
        reason: Why it does not; "" if it does.
        slower: Why `auto` prefers the next kernel that serves the call, such as a measurement; "" if it does not.
    """

    ok: bool
    reason: str = ""
    slower: str = ""


class BackwardInputs(NamedTuple):
    """The tensors of one backward launch. Exactly one of `out` and `delta` is given; both are global, as is `lse`."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    lse: Tensor
    out: Tensor | None = None
    delta: Tensor | None = None


class Kernel(ABC):
    """A local attention kernel.

    An implementation defines `name`, `supports`, `attend` and `attend_backward`. The other methods are correct for
    every kernel; override them to save passes over memory. A kernel takes head counts and lengths from the tensors, and
    only the settings from `call`: scale, softcap, determinism. The mask of a launch is in its tiles.

    Attributes:
        traits: What the kernel declares about itself.
    """

    traits: KernelTraits = KernelTraits()

    @property
    @abstractmethod
    def name(self) -> str:
        """Registry key, command-line value and trace label."""

    @abstractmethod
    def supports(self, call: AttentionCall) -> Support:
        """Return whether the kernel serves this call, with the heads of one rank. Do not raise."""

    @abstractmethod
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
        """Return (out, lse) of q over the pairs of all tiles.

        Args:
            q: Queries of shape [B, Sq, Hq, D].
            k: Keys of shape [B, Sk, Hkv, D].
            v: Values of shape [B, Sk, Hkv, Dv].
            tiles: Visible pairs, in local indices.
            call: The settings.
            state: Earlier result of this kernel for other keys. The new result is merged into it, in place if possible,
                and returned. The merged result is in the accumulation dtype or wider: see `numerics.finished`. Default:
                rows outside of every tile are 0 and -inf, and `out` may be in the dtype of q.
            yields_to_comm: Whether communication kernels may be waiting for multiprocessors. A kernel with persistent
                programs should then use shorter ones. The result must not change.
        """

    @abstractmethod
    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        """Add the gradients of all tiles' pairs to `into`.

        Args:
            x: The tensors.
            tiles: Visible pairs, in local indices.
            call: The settings.
            into: (dq, dk, dv), shaped as q, k and v, in the accumulation dtype.
        """

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return (out, lse) if one launch computes all keys. out may be in the dtype of q."""
        return self.attend(q, k, v, tiles, call, yields_to_comm=yields_to_comm)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return (dq, dk, dv) if one launch computes all keys, in new tensors of q's dtype or the accumulation dtype.

        Args:
            x: The tensors, with `out`.
            tiles: Visible pairs, in local indices.
            call: The settings.
        """
        sizes = [tensor.numel() for tensor in (x.q, x.k, x.v)]
        zeros = torch.zeros(sum(sizes), dtype=accumulation_dtype(x.q.dtype), device=x.q.device)
        parts = zip(torch.split(zeros, sizes), (x.q, x.k, x.v), strict=True)
        dq, dk, dv = (part.view(tensor.shape) for part, tensor in parts)
        self.attend_backward(x, tiles, call, into=(dq, dk, dv))
        return dq, dk, dv

    def attend_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        out: Tensor,
        lse: Tensor,
        *,
        yields_to_comm: bool = False,
    ) -> None:
        """Write the result of `attend` without a state into `out` and `lse`. Called only if `traits.writes_into`.

        Args:
            q: Queries of shape [B, Sq, Hq, D].
            k: Keys of shape [B, Sk, Hkv, D].
            v: Values of shape [B, Sk, Hkv, Dv].
            tiles: Visible pairs, in local indices.
            call: The settings.
            out: Result of shape [B, Sq, Hq, Dv], in the dtype of q or the accumulation dtype; last stride 1.
            lse: Result of shape [B, Hq, Sq], in the accumulation dtype; last stride 1.
            yields_to_comm: As for `attend`.
        """
        raise NotImplementedError(f"the kernel {self.name!r} does not write into given tensors")

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Return rowsum(dO * O), of shape [B, H, S]."""
        return numerics.row_delta(dout, out)

    def save_compiled_in(self, folder: Path | None) -> None:
        """Save machine code that this kernel compiles below a folder, and look for it there first. None: do neither.

        It is called when a call is prepared. Default: save nothing.
        """
        del folder

    def load(self) -> Kernel:
        """Return the kernel itself: see `LazyKernel.load`."""
        return self


class WrappedKernel(Kernel):
    """A kernel that passes every call to another kernel. Derive from it to change single methods."""

    name = ""

    def __init__(self, wrapped: Kernel) -> None:
        self.name, self.traits, self.wrapped = wrapped.name, wrapped.traits, wrapped

    def supports(self, call: AttentionCall) -> Support:
        return self.wrapped.supports(call)

    def attend(self, *args: Any, **options: Any) -> State:
        return self.wrapped.attend(*args, **options)

    def attend_backward(self, *args: Any, **options: Any) -> None:
        self.wrapped.attend_backward(*args, **options)

    def forward_single_call(self, *args: Any, **options: Any) -> State:
        return self.wrapped.forward_single_call(*args, **options)

    def backward_single_call(self, *args: Any, **options: Any) -> Gradients:
        return self.wrapped.backward_single_call(*args, **options)

    def attend_into(self, *args: Any, **options: Any) -> None:
        self.wrapped.attend_into(*args, **options)

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        return self.wrapped.row_delta(dout, out)

    def save_compiled_in(self, folder: Path | None) -> None:
        self.wrapped.save_compiled_in(folder)


_TARGET = '"module:Class", where the class can be imported and derives from burst_portable.kernels.base.Kernel'


class LazyKernel:
    """A kernel whose package is imported when `supports` or `load` is first called.

    Args:
        name: Name of the kernel.
        target: Its class, as "module:Class".
        needs: The package that it needs, as Python imports it.
        at_least: Lowest supported version of that package, such as (3, 6). Default: any.
        install: Next step for the user if the package is absent or too old.

    Raises:
        InputError: `target` is not of the form "module:Class".
    """

    def __init__(
        self, name: str, target: str, *, needs: str, at_least: tuple[int, ...] = (), install: str | None = None
    ) -> None:
        if not isinstance(target, str) or not re.fullmatch(r"[\w.]+:\w+", target):
            what = f"the kernel {name!r} has a target that names no class"
            raise InputError(what, got=shown(target), allowed=_TARGET, next_step="correct the target of the LazyKernel")
        self.name = name
        self._target, self._needs, self._at_least, self._install = target, needs, at_least, install
        self._kernel: Kernel | None = None

    def load(self) -> Kernel:
        """Return the kernel. The first call imports and creates it.

        Raises:
            BackendUnavailableError: The target does not exist, or is no class of a kernel.
        """
        if self._kernel is None:
            self._kernel = self._find_class()()
        return self._kernel

    def _find_class(self) -> type[Kernel]:
        module, _, attribute = self._target.partition(":")
        try:
            found = getattr(import_module(module), attribute, None)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module exists, and imports another one that does not
            raise self._wrong_target(in_a_line(error)) from error
        if not (isinstance(found, type) and issubclass(found, Kernel)):
            raise self._wrong_target(f"{attribute} = {shown(found)}" if found is not None else f"no {attribute} in it")
        return found

    def _wrong_target(self, got: str) -> BackendUnavailableError:
        what = f"the kernel {self.name!r} has a wrong target, {self._target!r}"
        next_step = "correct it in kernels() of the backend, or name another kernel"
        return BackendUnavailableError(what, got=got, allowed=_TARGET, next_step=next_step)

    def supports(self, call: AttentionCall) -> Support:
        """Return whether the kernel serves this call.

        Raises:
            BackendUnavailableError: The package is installed and fails to import, or as for `load`.
        """
        if self._kernel is None:
            if find_spec(self._needs) is None:
                what = f"the package {self._needs} is not installed"
                return Support(False, format_error(what, next_step=self._install))
            try:
                found = str(getattr(import_module(self._needs), "__version__", ""))
                if self._at_least and tuple(map(int, re.findall(r"\d+", found)[:3])) < self._at_least:
                    allowed = f"{'.'.join(map(str, self._at_least))} or later"
                    what = f"the package {self._needs} is too old"
                    return Support(False, format_error(what, got=found, allowed=allowed, next_step=self._install))
                self.load()
            except BackendUnavailableError:
                raise
            # A vendor's package may raise anything on import. The message must name the package.
            except Exception as error:
                what = f"the package {self._needs} is broken: it fails to import"
                next_step = "reinstall or remove it, or name another kernel"
                raise BackendUnavailableError(what, got=in_a_line(error), next_step=next_step) from error
        return self.load().supports(call)


def arrived(x: Tensor) -> Tensor:
    """Return a plain tensor. An AsyncCollectiveTensor, which has no memory and address 0, is waited for and copied."""
    return x.clone() if type(x).__name__ == "AsyncCollectiveTensor" else x


def as_kernels_take(x: Tensor) -> Tensor:
    """Return the same values as a plain tensor with a last stride of 1 and no pending negation.

    The imaginary part of a conjugate is a view whose memory has the opposite sign.
    """
    x = arrived(x)
    if x.is_neg():
        x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()


def torch_dtype(call: AttentionCall) -> torch.dtype:
    """Return the dtype of q, k and v."""
    found: torch.dtype = getattr(torch, call.dtype)
    return found


_ALIGNMENT = 16  # bytes that operators and descriptors load with one access


def align_rows(x: Tensor) -> Tensor:
    """Return x if all its rows start at multiples of 16 bytes, else a copy.

    Args:
        x: Tensor of shape [B, S, H, D], where D is a multiple of 16 bytes.
    """
    if x.data_ptr() % _ALIGNMENT == 0 and _are_aligned(x.stride(), _ALIGNMENT // x.element_size()):
        return x
    return x.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _are_aligned(strides: tuple[int, ...], each: int) -> bool:
    """Return whether every stride is a positive multiple of `each` elements, the last one 1."""
    *steps, last = strides
    return last == 1 and all(step > 0 and step % each == 0 for step in steps)
