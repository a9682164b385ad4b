"""A kernel whose code is imported when it is first needed.

A package that is absent or too old is a reason to decline; one that is installed and fails to import is an error.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec

from torch import Tensor

from burst_portable.errors import BackendUnavailableError, explain, in_a_line
from burst_portable.kernels import whole
from burst_portable.kernels.contract import (
    Gradients,
    Kernel,
    KernelProblem,
    Options,
    Support,
    faster_on_squares,
    merges_once,
    rounding_of,
    row_delta_of,
    takes_pieces,
    takes_windows,
    writes_gradients,
)
from burst_portable.numerics import State
from burst_portable.tiles import Tiles


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
        """See `kernels.contract.Kernel`; asked of a kernel that serves."""
        return takes_pieces(self._real())

    @property
    def merged_once(self) -> bool:
        """See `kernels.contract.Kernel`; asked of a kernel that serves."""
        return merges_once(self._real())

    @property
    def writes_gradients(self) -> bool:
        """See `kernels.contract.Kernel`; asked of a kernel that serves."""
        return writes_gradients(self._real())

    @property
    def faster_squares(self) -> bool:
        """See `kernels.contract.Kernel`; asked of a kernel that serves."""
        return faster_on_squares(self._real())

    @property
    def obeys_windows(self) -> bool:
        """See `kernels.contract.Kernel`; asked of a kernel that serves."""
        return takes_windows(self._real())

    @property
    def rounding(self) -> float:
        """See `kernels.contract.Kernel`; asked of a kernel that serves."""
        return rounding_of(self._real())

    def supports(self, problem: KernelProblem) -> Support:
        """Raises `BackendUnavailableError` for a broken package: it is installed, so somebody counts on it."""
        if self._kernel is None:
            if find_spec(self._needs) is None:
                return Support(False, explain(f"the package {self._needs} is not installed", next_step=self._install))
            try:
                found = str(getattr(import_module(self._needs), "__version__", ""))
                if self._at_least and tuple(map(int, re.findall(r"\d+", found)[:3])) < self._at_least:
                    allowed = f"{'.'.join(map(str, self._at_least))} or later"
                    what = f"the package {self._needs} is too old"
                    return Support(False, explain(what, got=found, allowed=allowed, next_step=self._install))
                self._real()
            # A vendor's package may raise anything on import; the user must hear which package it was.
            except Exception as error:
                what = f"the package {self._needs} is broken: it fails to import"
                next_step = "reinstall or remove it, or name another kernel"
                raise BackendUnavailableError(explain(what, got=in_a_line(error), next_step=next_step)) from error
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
        return whole.attend_whole(self._real(), q, k, v, tiles, options)

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
        return whole.gradients(self._real(), dout, q, k, v, out, lse, tiles, options)

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """The kernel's own where it has one."""
        return row_delta_of(self._real())(dout, out)
