"""A kernel whose code is imported when it is first needed; absent packages are a reason, broken ones an error."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from torch import Tensor

from burst_portable.kernels.contract import Gradients, Kernel, Options, Problem, Support
from burst_portable.numerics import State
from burst_portable.tiles import Tiles


class LazyKernel:
    """Stands for ``module.attribute()`` until it is called.

    Args:
        name: the kernel's name.
        module, attribute: where its class is.
        needs: a package without which it cannot run.
    """

    def __init__(self, name: str, module: str, attribute: str, *, needs: str) -> None:
        self.name = name
        self._module, self._attribute, self._needs = module, attribute, needs
        self._kernel: Kernel | None = None

    def _real(self) -> Kernel:
        if self._kernel is None:
            self._kernel = getattr(import_module(self._module), self._attribute)()
        return self._kernel

    def supports(self, problem: Problem) -> Support:
        if find_spec(self._needs) is None:
            return Support(False, f"the package {self._needs} is not installed")
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
