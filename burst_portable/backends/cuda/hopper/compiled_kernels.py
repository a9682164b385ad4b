"""Define `CompiledKernels`: what a process keeps of the kernels, which are the launchers, descriptors and counters."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from burst_portable.backends.cuda.hopper.descriptors import Descriptors
from burst_portable.backends.cuda.hopper.launcher import Launcher

_COUNTERS = 1024  # counters per pool


class CompiledKernels(Descriptors):
    """Launchers of all kernels, and their descriptors and counters."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = _launcher("forward", "forward_kernel")
        self.backward = _launcher("backward", "backward_kernel")
        self.split_backward = _launcher("split_backward", "split_kernel")
        self.row_terms = _launcher("row_terms", "row_terms_kernel")
        self._counters: dict[Hashable, Iterator[Tensor]] = {}

    def save_in(self, folder: Path | None) -> None:
        """Save kernels that are compiled from now on below a folder, and look for them there. None: do neither."""
        for launcher in (self.forward, self.backward, self.split_backward, self.row_terms):
            launcher.folder = folder

    def counter(self, device: torch.device, stream: int) -> Tensor:
        """Return an int32 counter of value 0 that no launch has used, from the stream's pool, which is cleared at once.

        For "meta", and during graph capture, return a new counter, which each replay of the graph clears.
        """
        if device.index is None or torch.cuda.is_current_stream_capturing():
            return torch.zeros(1, dtype=torch.int32, device=device)
        key = (device.index, stream)
        found = next(self._counters.get(key, iter(())), None)
        if found is None:
            pool = self._counters[key] = iter(torch.zeros(_COUNTERS, dtype=torch.int32, device=device).unbind())
            found = next(pool)
        return found


def _launcher(module: str, name: str) -> Launcher:
    """Return the launcher of a jitted function of a module of this folder."""
    return Launcher(name, lambda: getattr(import_module(f"{__package__}.{module}"), name))


@cache
def compiled_kernels() -> CompiledKernels:
    """Return the only `CompiledKernels` of this process, so that each kernel is compiled once."""
    return CompiledKernels()
