"""Emulate `CompiledKernels` on a `Machine`, so that the host side of the Hopper kernel runs unchanged."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.cuda.hopper import backward as hopper_backward
from burst_portable.backends.cuda.hopper import backward_launches, prepared_launches
from burst_portable.backends.cuda.hopper import forward as hopper_forward
from burst_portable.backends.cuda.hopper import kernel as hopper_kernel
from burst_portable.backends.cuda.hopper import row_terms as hopper_row_terms
from burst_portable.backends.cuda.hopper import split_backward as hopper_split_backward
from burst_portable.backends.cuda.hopper.descriptors import tma_strides
from burst_portable.kernels.base import align_rows
from tests.support.emulator.machine import Machine
from tests.support.emulator.memory import Descriptor

_PROCESSORS = 3


class EmulatedKernels:
    """Run kernels on the machine immediately. Each launch creates its descriptors and counters."""

    def __init__(
        self,
        machine: Machine,
        forward: ModuleType = hopper_forward,
        backward: ModuleType = hopper_backward,
        split_backward: ModuleType = hopper_split_backward,
    ) -> None:
        self.forward = self._launcher(machine, forward.forward_kernel)
        self.backward = self._launcher(machine, backward.backward_kernel)
        self.split_backward = self._launcher(machine, split_backward.split_kernel)
        self.row_terms = self._launcher(machine, hopper_row_terms.row_terms_kernel)

    @staticmethod
    def _launcher(machine: Machine, kernel: Any) -> Callable[..., None]:
        def launch(key: Hashable, grid: Sequence[int], args: Sequence[Any], constants: Sequence[Any], *_: Any) -> None:
            machine.launch(kernel, grid, *args, *constants)

        return launch

    def rows(self, name: str, x: Tensor, rows: int, columns: int) -> Descriptor:
        tma_strides(name, x)
        return Descriptor(x, (1, rows, 1, columns))

    def panels(self, name: str, x: Tensor, rows: int, panels: tuple[int, int]) -> tuple[Descriptor, Descriptor]:
        first = self.rows(name, x, rows, panels[0])
        return first, self.rows(name, x, rows, panels[1]) if panels[1] else first

    def aligned_panels(
        self, name: str, x: Tensor, rows: int, panels: tuple[int, int]
    ) -> tuple[Tensor, tuple[Descriptor, Descriptor]]:
        x = align_rows(x)
        return x, self.panels(name, x, rows, panels)

    def vector(self, x: Tensor, rows: int) -> Descriptor:
        return Descriptor(x, (1, rows))

    def strides(self, name: str, x: Tensor, unit: int) -> tuple[int, ...]:
        return tuple(s // unit for s in tma_strides(name, x)[:3])

    def save_in(self, folder: object) -> None:
        """Save nothing: no kernel is compiled."""

    def counter(self, device: torch.device, stream: int) -> Tensor:
        return torch.zeros(1, dtype=torch.int32)


def replace_in_launches(monkeypatch: Any, name: str, value: Any) -> None:
    """Replace a function in both modules that run launches and import it."""
    for module in (hopper_kernel, backward_launches):
        monkeypatch.setattr(module, name, value)


def emulate(monkeypatch: Any, kernels: EmulatedKernels) -> None:
    """Replace the compiled Hopper kernels by the emulated ones until the test ends."""
    replace_in_launches(monkeypatch, "compiled_kernels", lambda: kernels)
    monkeypatch.setattr(prepared_launches, "processors", lambda device: _PROCESSORS)
    replace_in_launches(monkeypatch, "current_stream", lambda device: 0)
    monkeypatch.setattr(hopper_kernel, "on", lambda device: nullcontext())
