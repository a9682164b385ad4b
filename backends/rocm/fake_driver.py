"""Define a driver for Triton that compiles kernels for an absent chip and records launches instead of running them.

Everything before the launch is Triton's real code: specialization on types, strides and alignment, the compiler, and
the check of shared memory against the device's. It does not show what a kernel computes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton

from burst_portable.kernels.triton.compile_only import CompileOnlyDriver
from burst_portable.kernels.triton.machine_code import TARGETS


class Launched:
    """One launch: its kernel and its arguments by name."""

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        self.launcher, self.grid = launcher, grid
        self.kernel: str = launcher.source.fn.__name__
        self.given = dict(zip(launcher.names, values, strict=True))

    def wrong(self) -> list[str]:
        """Return the arguments that do not fit the compiled kernel."""
        found = []
        for index, (name, value) in enumerate(self.given.items()):
            kind = self.launcher.source.signature[name]
            if kind == "constexpr":
                compiled = self.launcher.constants[name]
                if value != compiled:
                    found.append(f"{name} is {value}, and was compiled as {compiled}")
            elif not _fits(value, kind):
                text = value.dtype if isinstance(value, torch.Tensor) else repr(value)
                found.append(f"{name} is {text}, and was compiled as {kind}")
            elif ["tt.divisibility", 16] in self.launcher.source.attrs.get((index,), ()) and _number(value) % 16:
                found.append(f"{name} is no multiple of 16, and was compiled as one")
        return found


class Launcher:
    """Launcher of a compiled kernel. Triton creates one per kernel and calls it once per launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata
        self.names = source.fn.arg_names
        self.constants = {self.names[path[0]]: value for path, value in source.constants.items()}

    def __call__(self, x: int, y: int, z: int, stream: int, function: list[Launched], *rest: Any) -> None:
        # packed metadata, launch metadata and two hooks precede the kernel's arguments
        function.append(Launched(self, (x, y, z), rest[4:]))


class FakeDriver(CompileOnlyDriver):
    """Driver of one chip of `kernels.triton.machine_code.TARGETS`. Tensors are on the CPU.

    Attributes:
        launched: the launches so far.
        listings: each compiled kernel's assembly, by its metadata's hash.
    """

    launcher_cls = Launcher

    def __init__(self, chip: str) -> None:
        super().__init__(TARGETS[chip])
        self.launched: list[Launched] = []
        self.listings: dict[str, str] = {}
        triton.knobs.runtime.kernel_load_start_hook.add(self._loaded)

    def _loaded(self, module: Any, function: Any, name: str, files: dict[str, str], digest: str) -> None:
        listing = next(path for file, path in files.items() if file.endswith(".amdgcn"))
        self.listings[digest] = Path(listing).read_text()

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return (module, function, registers, spills, threads). The function is the list of launches."""
        assert kernel.startswith(b"\x7fELF")
        return object(), self.launched, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties that Triton queries. It rejects kernels that need more shared memory."""
        return super().get_device_properties(device) | {"multiprocessor_count": 100, "warpSize": 64}


_POINTERS = {
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp32": torch.float32,
    "*fp64": torch.float64,
    "*i32": torch.int32,
}


def _number(value: Any) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _fits(value: Any, kind: str) -> bool:
    """Return whether a value has a type of Triton."""
    if kind in _POINTERS:
        return isinstance(value, torch.Tensor) and value.dtype == _POINTERS[kind]
    if kind in ("i32", "i64"):
        return isinstance(value, int) and abs(value) < 1 << (int(kind[1:]) - 1)
    return kind == "fp32" and isinstance(value, float)
