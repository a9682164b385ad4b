"""A kernel on pieces that merges their results in one pass over memory, if Triton makes code for the device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec

import torch
from torch import Tensor

from burst_portable.kernels.pieces import TriangleKernel
from burst_portable.kernels.steps import in_steps
from burst_portable.numerics import State, merge_into


class MergedOnceKernel(TriangleKernel):
    """A `TriangleKernel` for an accelerator. Without Triton, torch's operators merge."""

    def ready(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Its operators load 16 bytes at once, whatever the strides."""
        return in_steps(super().ready(x, dtype))

    @property
    def merged_once(self) -> bool:
        """See `kernels.contract.Kernel`."""
        return self._merge is not merge_into

    def merge(self, state: State, out: Tensor, lse: Tensor) -> None:
        self._merge(state, out, lse)

    @cached_property
    def _merge(self) -> Callable[[State, Tensor, Tensor], None]:
        if find_spec("triton") is None or not torch.accelerator.is_available():
            return merge_into
        from burst_portable.kernels.triton.merging import OnePass

        return OnePass()
