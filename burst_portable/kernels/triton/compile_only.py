"""Compile the kernels of a call for a chip, without launching them and without a device.

`compile_kernels` runs the launch code of kernels on tensors of torch's device "meta", which have shapes, strides and
dtypes but no memory. Triton specializes on these as in a real launch, so its cache gets the entries that a real launch
reads. Triton's driver is replaced for the whole process: call it in a process that launches nothing.

Triton also compiles code in C: a module that calls CUDA's driver and, before 3.7, a launcher for each kernel. They are
built too if this machine has libcuda, with which they are linked.

Threads compile several kernels at the same time: Triton holds Python's lock only while it parses a kernel. Of 2.6 s for
the four kernels of heads of 128 (triton 3.7.1, sm_90), it held the lock for 0.3 s, and two threads on two cores took
1.7 s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton import AsyncCompileMode, knobs
from triton.backends.driver import DriverBase
from triton.runtime.errors import OutOfResources

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.kernels.base import BackwardInputs, Kernel, torch_dtype
from burst_portable.kernels.triton.arguments import Unfinished, unfinished
from burst_portable.kernels.triton.machine_code import TARGETS, Chip
from burst_portable.kernels.triton.prepared import interpreted
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import find_tiles

_COMPILES_LAUNCHERS = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """One kernel of a call.

    Attributes:
        name: Name of the jitted function.
        digest: Key of the kernel in Triton's cache.
        seconds: Time that one thread took.
        cached: Whether the cache contained it.
    """

    name: str
    digest: str
    seconds: float
    cached: bool


class CompileOnlyDriver(DriverBase):  # type: ignore[misc]  # triton has no types
    """Driver of an absent chip, for Triton. Its launches do nothing."""

    def __init__(self, chip: Chip) -> None:
        self.utils, self._chip = self, chip

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        return self._chip.target

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        assert device == 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Any:
        raise AssertionError("nothing is timed without a device")

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return a launcher that launches nothing."""
        return lambda *_: None

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, ...]:
        """Return (module, function, registers, spills, threads)."""
        return object(), 0, 0, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the limit with which Triton compares the shared memory of a kernel."""
        return {"max_shared_mem": self._chip.shared}


def compile_kernels(
    target: str,
    run: Callable[[], object],
    *,
    jobs: int = 1,
    on_kernel: Callable[[CompiledKernel], None] = lambda _: None,
) -> list[CompiledKernel]:
    """Compile the kernels that `run` launches on tensors of the device "meta", each once.

    Args:
        target: A key of `machine_code.TARGETS`.
        run: Launches the kernels.
        jobs: Number of threads that compile.
        on_kernel: Called by one of these threads after each kernel.

    Raises:
        InputError: Triton's interpreter is on.
        UnsupportedError: A kernel does not compile.
    """
    if interpreted():
        raise InputError("the interpreter of Triton compiles nothing", next_step="unset TRITON_INTERPRET")
    chip = TARGETS[target]
    triton.runtime.driver.set_active(CompileOnlyDriver(chip))
    done: list[CompiledKernel] = []

    def note(*, src: Any, metadata: dict[str, Any], cache_hit: bool, times: Any, **_: object) -> None:
        if metadata["shared"] > chip.shared:  # a real launch raises this
            raise OutOfResources(metadata["shared"], chip.shared, "shared memory")
        if builds_host_code:
            _build_launcher(src, metadata)
        made = CompiledKernel(src.fn.__name__, metadata["hash"], round(times.total / 1e6, 3), cache_hit)
        done.append(made)
        on_kernel(made)

    builds_host_code = chip.compiles_launchers and _has_libcuda()
    if builds_host_code:
        from triton.backends.nvidia.driver import CudaUtils  # absent from builds for ROCm

        CudaUtils()
    started: list[Unfinished] = []
    token = unfinished.set(started)
    try:
        with knobs.compilation.scope(), ThreadPoolExecutor(jobs) as pool:
            knobs.compilation.listener = note  # called once for each kernel
            try:
                with AsyncCompileMode(pool):
                    run()
            except Exception as error:
                for one in started:
                    if one.compilation.done() and one.compilation.exception() is error:
                        one.raise_named(error)
                raise
    finally:
        unfinished.reset(token)
    return done


def _has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def _build_launcher(source: Any, metadata: dict[str, Any]) -> None:
    """Build the launcher that Triton 3.6 compiles in C for each kernel. Gluon kernels are launched without it."""
    if _COMPILES_LAUNCHERS and not source.fn.is_gluon():
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(source, SimpleNamespace(**metadata))


def compile_call(
    target: str, kernel: Kernel, call: AttentionCall, *, gradients: bool = True, jobs: int = 1
) -> list[CompiledKernel]:
    """Compile the kernels of a call on one device, with contiguous tensors.

    Args:
        target: A key of `machine_code.TARGETS`.
        kernel: A kernel with `traits.compiles_ahead`.
        call: The attention. Its device is "meta".
        gradients: Whether to compile the backward pass too.
        jobs: Number of threads that compile.

    Raises:
        UnsupportedError: The kernel does not compile ahead, or does not support the call.
    """
    support = kernel.supports(call)
    if not (kernel.traits.compiles_ahead and support.ok):
        reason = support.reason or "it launches operators of another package, which compile their own kernels"
        raise UnsupportedError(f"the kernel {kernel.name} cannot be compiled ahead", got=reason)

    def run() -> None:
        query, key = (call.heads, call.head_dim), (call.kv_heads, call.head_dim)
        value, output = (call.kv_heads, call.v_head_dim), (call.heads, call.v_head_dim)
        q, k, v, dout = (
            torch.empty(call.batch, rows, *size, dtype=torch_dtype(call), device="meta")
            for rows, size in (
                (call.layout.length, query),
                (call.k_layout.length, key),
                (call.k_layout.length, value),
                (call.layout.length, output),
            )
        )
        tiles = find_tiles(call.mask, call.layout.shards[0], call.k_layout.shards[0])
        out, lse = kernel.forward_single_call(q, k, v, tiles, call)
        if gradients:
            kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, call)

    return compile_kernels(target, run, jobs=jobs)
