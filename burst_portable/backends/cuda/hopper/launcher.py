"""Define `Launcher`, which compiles a kernel once and launches it with little host time.

Triton binds and specializes the arguments of each launch, and then looks up the compiled kernel. On the host this takes
longer than a short kernel takes on the device. Our kernels specialize only on the key that the caller passes. So the
compiled kernel is called directly, without Triton if the driver can be called (`backends.cuda.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from burst_portable.backends.cuda.driver import Bound, Described, kernel_driver, ready
from burst_portable.backends.cuda.hopper.saved_kernels import file_of, find, save
from burst_portable.kernels.triton.arguments import ALWAYS, compiled_kernel, name_compile_errors, unfinished


class Launcher:
    """Launcher of one kernel.

    Triton compiles the kernel of a key, once for all processes (`saved_kernels`). Launches go through the driver if it
    can be called, else through Triton.

    Args:
        name: Name of the jitted function.
        load: Returns that function. This imports Triton.
    """

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self.folder: Path | None = None  # below which compiled kernels are saved; None: nowhere
        self._name, self._load = name, load
        self._launches: dict[Hashable, Callable[..., Bound | None]] = {}

    def __call__(
        self,
        key: tuple[Hashable, ...],
        grid: tuple[int, int, int],
        args: Sequence[Any],
        constants: Sequence[Any],
        options: dict[str, int],
        stream: int,
        renewed: Tensor | None = None,
    ) -> Bound | None:
        """Launch the kernel on the current device.

        Args:
            key: The index of the device, and everything on which `constants` and the types of `args` depend.
            grid: Number of programs along x, y and z.
            args: Arguments at run time, in the order of the kernel's signature.
            constants: Compile-time constants, which follow `args` in the signature.
            options: Launch options of Triton.
            stream: Current stream of the device.
            renewed: The one of `args` that is another tensor in each launch, if there is one: each key has one or none.

        Returns:
            The launch, for tensors with the same addresses, shapes, strides and dtypes; None if Triton launched it.
        """
        launch = self._launches.get(key)
        if launch is not None:
            return launch(grid, args, stream, renewed)
        driver, options = kernel_driver(), {**options, **ALWAYS}
        file = file_of(self.folder, self._name, "sm_90", key[1:], constants, options) if self.folder else None
        fills_cache = unfinished.get() is not None  # of Triton too, so a saved kernel is compiled again
        if file is not None and driver is not None and not fills_cache:
            if any(isinstance(a, Tensor) and a.is_meta for a in args):
                if file.is_file():  # the real launch reads it
                    return None
            elif (saved := find(file)) and (launch := ready(driver, saved, args, renewed)):
                self._launches[key] = launch
                return launch(grid, args, stream, renewed)
        configuration, next_step = f"{key}, {tuple(constants)}, {options}", "name another kernel, such as 'triton'"
        kernel = self._load()
        every = (*_for_triton(args), *constants)
        on_compiled = partial(save, file) if fills_cache and file is not None and not file.is_file() else None
        compiled = compiled_kernel(kernel, every, options, "sm_90", configuration, next_step, on_compiled)
        if compiled is None:
            self._launches[key] = _launch_nothing
            return None

        def by_triton(grid: tuple[int, int, int], args: Sequence[Any], stream: int, _: Tensor | None) -> None:
            compiled[grid](*_for_triton(args), *constants, stream=stream)

        packed = ready(driver, compiled, args, renewed)
        if packed is not None and file is not None:
            save(file, compiled)
        launch = packed or by_triton
        with name_compile_errors(kernel, "sm_90", configuration, next_step):  # Triton may compile a launcher
            bound = launch(grid, args, stream, renewed)
        self._launches[key] = launch
        return bound


def _launch_nothing(*_: object) -> None:
    """Launch a kernel whose tensors have no memory."""


def _for_triton(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with each descriptor replaced by that of Triton."""
    return [a.triton() if isinstance(a, Described) else a for a in args]
