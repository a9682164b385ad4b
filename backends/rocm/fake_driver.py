"""A driver of Triton's that has a chip's name and no chip: kernels are compiled for it as for a real one, and
launches are written down instead of made.

Test equipment. Everything before the launch is the real thing: specialisation on types, strides and alignment, the
compiler, the check of shared memory against the device's. What a kernel computes is not shown by it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.driver import DriverBase

from burst_portable.kernels.triton.machine_code import TARGETS


class Launched:
    """One launch: its kernel and what was handed to it, by name."""

    def __init__(self, launcher: Launcher, grid: tuple[int, int, int], values: tuple[Any, ...]) -> None:
        self.launcher, self.grid = launcher, grid
        self.kernel: str = launcher.source.fn.__name__
        self.given = dict(zip(launcher.names, values, strict=True))

    def wrong(self) -> list[str]:
        """What was handed over and does not fit what was compiled."""
        found = []
        for index, (name, value) in enumerate(self.given.items()):
            kind = self.launcher.source.signature[name]
            if kind == "constexpr":
                compiled = self.launcher.constants[name]
                if value != compiled:
                    found.append(f"{name} is {value}, and was compiled as {compiled}")
            elif not _fits(value, kind):
                told = value.dtype if isinstance(value, torch.Tensor) else repr(value)
                found.append(f"{name} is {told}, and was compiled as {kind}")
            elif ["tt.divisibility", 16] in self.launcher.source.attrs.get((index,), ()) and _number(value) % 16:
                found.append(f"{name} is no multiple of 16, and was compiled as one")
        return found


class Launcher:
    """What Triton makes once a kernel and calls once a launch."""

    def __init__(self, source: Any, metadata: Any) -> None:
        self.source, self.metadata = source, metadata
        self.names = source.fn.arg_names
        self.constants = {self.names[path[0]]: value for path, value in source.constants.items()}

    def __call__(self, x: int, y: int, z: int, stream: int, function: list[Launched], *rest: Any) -> None:
        # packed metadata, launch metadata and two hooks come before the kernel's own
        function.append(Launched(self, (x, y, z), rest[4:]))


class FakeDriver(DriverBase):
    """Of one chip of `kernels.triton.machine_code.TARGETS`; tensors are on the CPU.

    Attributes:
        launched: the launches so far.
        listings: each compiled kernel's assembly, by its metadata's hash.
    """

    launcher_cls = Launcher

    def __init__(self, chip: str) -> None:
        self.chip = TARGETS[chip]
        self.utils = self
        self.launched: list[Launched] = []
        self.listings: dict[str, str] = {}
        triton.knobs.runtime.kernel_load_start_hook.add(self._loaded)

    def _loaded(self, module: Any, function: Any, name: str, files: dict[str, str], digest: str) -> None:
        listing = next(path for file, path in files.items() if file.endswith(".amdgcn"))
        self.listings[digest] = Path(listing).read_text()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return self.chip.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing is measured without a device")

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """(module, function, registers, spills, threads): the launches stand for the function."""
        assert kernel.startswith(b"\x7fELF")
        return object(), self.launched, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """What Triton asks: it refuses kernels that want more shared memory than this."""
        return {"max_shared_mem": self.chip.shared, "multiprocessor_count": 100, "warpSize": 64}


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
    """Whether a value is of the type that Triton calls so."""
    if kind in _POINTERS:
        return isinstance(value, torch.Tensor) and value.dtype == _POINTERS[kind]
    if kind in ("i32", "i64"):
        return isinstance(value, int) and abs(value) < 1 << (int(kind[1:]) - 1)
    return kind == "fp32" and isinstance(value, float)
