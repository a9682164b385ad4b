"""Call NVIDIA's driver where torch has no function: stream flags, raw copies, launches, tensor maps.

Addresses and streams are plain ints, so that a call takes little host time. Launches and tensor maps use cuda.bindings,
which takes 2 microseconds less per launch than ctypes. Flags and copies use ctypes: two flags in one call take 2.2 to
3.8 microseconds, and 7.7 to 12.6 with cuda.bindings, which needs an object for each (one H200, driver 580.159,
cuda-bindings 13.3.1, 2026-11-24).

Triton encodes every tensor map again at each launch. For the nine maps of a backward, that takes the host longer than
the rest of the call. Here a launch packs its parameters into one buffer::

    tensor map 128 | extents 4 each | strides 8 each | ... | pointer 8 | number 4 or 8 | ... | two pointers, unused

The driver reports the offset of each parameter (`cuFuncGetParamInfo`). If it cannot, or if a kernel has other
parameters, Triton launches the kernel; only the host time differs.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.comm.base import Strip
from burst_portable.errors import CommunicationError, DeviceError, UnsupportedError

_WAIT_EQUAL = 0x1
_WAIT_FLUSH = 1 << 30
_CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_OPERATION = struct.Struct("=I4xQI4xI20x")  # CUstreamBatchMemOpParams: operation, address, value, flags; 48 bytes
# CUDA_MEMCPY2D, of the source and of the target: x, y, kind, host, address, array, pitch; then width and height.
_LINES = struct.Struct("=16xI12xQ8xQ16xI12xQ8xQQQ")
_POINTER = struct.Struct("=Q")


class Driver:
    """The stream functions of libcuda for one device, by torch's index.

    Raises:
        UnsupportedError: the library or one of its functions is missing.
    """

    def __init__(self, device: int) -> None:
        address, stream, number = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
        try:
            self._library = library = ctypes.CDLL("libcuda.so.1")
            self._set, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
            self._operate = library.cuStreamBatchMemOp_v2
            self._copy, self._copy_lines = library.cuMemcpyDtoDAsync_v2, library.cuMemcpy2DAsync_v2
            self._exchange = library.cuThreadExchangeStreamCaptureMode
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                "the driver has no stream flags", got=error, next_step="update the driver"
            ) from error
        self._set.argtypes = self._wait.argtypes = (stream, address, number, ctypes.c_uint)
        self._operate.argtypes = (stream, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint)
        self._copy.argtypes = (address, address, ctypes.c_size_t, stream)
        self._copy_lines.argtypes = (ctypes.c_char_p, stream)
        can = ctypes.c_int(0)
        self._checked(library.cuDeviceGetAttribute(ctypes.byref(can), _CAN_FLUSH, device))
        self._wait_mode = _WAIT_EQUAL | (_WAIT_FLUSH if can.value else 0)

    def set_flags(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """Write 32 bits to each address when earlier work of the stream is complete and visible to every device."""
        self._flags(self._set, _WRITE, stream, addresses, value, 0)

    def wait_flags(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """Make the stream wait until the 32 bits at each address have the value."""
        self._flags(self._wait, _WAIT, stream, addresses, value, self._wait_mode)

    def _flags(self, single: Any, operation: int, stream: int, addresses: Sequence[int], value: int, mode: int) -> None:
        """Write or wait for flags: one by its own function, several in one call."""
        if len(addresses) == 1:
            self._checked(single(stream, addresses[0], value, mode))
        elif addresses:
            packed = b"".join([_OPERATION.pack(operation, address, value, mode) for address in addresses])
            self._checked(self._operate(stream, len(addresses), packed, 0))

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Copy bytes between devices with a copy engine."""
        self._checked(self._copy(target, source, size, stream))

    def copy_lines(self, stream: int, target: int, source: int, strip: Strip) -> None:
        """Copy the lines of a strip between devices with a copy engine."""
        _, _, _, lines, width, step, jump = strip
        packed = _LINES.pack(_ON_DEVICE, source, step, _ON_DEVICE, target, jump, width, lines)
        self._checked(self._copy_lines(packed, stream))

    def leave_captures_alone(self) -> None:
        """Keep calls of this thread from invalidating a graph capture of another thread."""
        mode = ctypes.c_int(_RELAXED)
        self._checked(self._exchange(ctypes.byref(mode)))

    def _checked(self, code: int) -> None:
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            got = text.value.decode() if text.value else f"code {code}"
            raise CommunicationError("a call of the CUDA driver failed", got=got)


driver = cache(Driver)
"""The driver of a device, which is created once."""


_NOTHING = nullcontext()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a device current. It takes no time if the device is current already."""
    if device.index is None or torch.cuda.current_device() == device.index:  # None: "meta"
        return _NOTHING
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Return the handle of torch's current stream. Creating a `torch.cuda.Stream` takes longer than a launch."""
    if device.index is None:  # "meta"
        return 0
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def leave_captures_alone() -> None:
    """See `Driver.leave_captures_alone`. For threads that only query events."""
    driver(0).leave_captures_alone()


MAP = 128
"""Bytes of a tensor map."""

_STATIC_SHARED = 48 << 10  # bytes of shared memory that a kernel has without an attribute
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes
_BUFFER, _SIZE = 1, 2  # CU_LAUNCH_PARAM_BUFFER_POINTER, CU_LAUNCH_PARAM_BUFFER_SIZE
# Up to this version, the driver sets a bit that must be 0 in the maps of tensors that are smaller than this size.
_WRONG_UNTIL, _WRONG_BELOW, _WRONG_BYTE, _WRONG_BIT = 13010, 128 << 10, 10, 1 << 5


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as an argument of a kernel that loads it with TMA."""

    triton: Callable[[], Any]
    """Return Triton's descriptor, from which a kernel is compiled. This imports Triton."""
    box: tuple[int, ...]
    swizzle: int
    packed: bytes
    """The tensor map, extents and strides; empty without a `KernelDriver`."""


class _Extra(ctypes.Structure):
    """The argument of cuLaunchKernel that replaces a pointer for each parameter."""

    _fields_ = (
        ("buffer", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("size", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("end", ctypes.c_void_p),
    )


class KernelDriver:
    """The functions of libcuda that a launch needs, from `cuda.bindings.driver`."""

    def __init__(self, library: Any) -> None:
        self._library, self._launch = library, library.cuLaunchKernel
        self._success, self._no_context = library.CUresult.CUDA_SUCCESS, library.CUresult.CUDA_ERROR_INVALID_CONTEXT
        (self._version,) = self._checked(library.cuDriverGetVersion())

    def load(self, kernel: Any) -> int:
        """Load the machine code of a kernel into torch's current device, and return its function.

        Triton also makes a launcher when it loads a kernel. Triton 3.6 compiles that in C, which takes 0.3 s.
        """
        cuda, shared = self._library, kernel.metadata.shared
        (context,) = self._checked(cuda.cuCtxGetCurrent())
        if not int(context):
            self._use_context()
        image = ctypes.create_string_buffer(kernel.kernel, len(kernel.kernel))
        (module,) = self._checked(cuda.cuModuleLoadData(ctypes.addressof(image)))
        (function,) = self._checked(cuda.cuModuleGetFunction(module, kernel.name.encode()))
        if shared > _STATIC_SHARED:
            most = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(cuda.cuFuncSetCacheConfig(function, cuda.CUfunc_cache.CU_FUNC_CACHE_PREFER_SHARED))
            self._checked(cuda.cuFuncSetAttribute(function, most, shared))
        return int(function)

    def _use_context(self) -> None:
        """Make the context of torch's current device that of this thread. torch uses it too."""
        (number,) = self._checked(self._library.cuDeviceGet(torch.cuda.current_device()))
        (context,) = self._checked(self._library.cuDevicePrimaryCtxRetain(number))
        self._checked(self._library.cuCtxSetCurrent(context))

    def parameters(self, function: int) -> list[tuple[int, int]]:
        """Return the offset and the size of each parameter of a kernel, in bytes."""
        found: list[tuple[int, int]] = []
        while True:
            code, offset, size = self._library.cuFuncGetParamInfo(function, len(found))
            if code is not self._success:
                return found
            found.append((offset, size))

    def launch(self, what: tuple[int, ...], stream: int, extra: int) -> None:
        """Launch `what` (function, grid, threads, shared memory) on torch's current device.

        `extra` is the address of an `_Extra`.
        """
        (code,) = self._launch(*what, stream, 0, extra)
        if code is self._success:
            return
        if code is self._no_context:  # this thread has not used the device yet
            self._use_context()
            (code,) = self._launch(*what, stream, 0, extra)
        self._checked((code,))

    def tensor_map(
        self, address: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], box: Sequence[int],
        swizzle: int,
    ) -> bytes:  # fmt: skip
        """Return a tensor map. Strides are in elements, and the last one is 1; the swizzle is in bytes."""
        cuda, rank, size = self._library, len(shape), dtype.itemsize
        kinds = cuda.CUtensorMapDataType
        kind = {
            torch.float16: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            torch.float32: kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            torch.bfloat16: kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        }[dtype]
        steps = [size * s for s in strides[:-1]]
        (made,) = self._checked(
            cuda.cuTensorMapEncodeTiled(
                kind,
                rank,
                address,
                [cuda.cuuint64_t(n) for n in reversed(shape)],
                [cuda.cuuint64_t(n) for n in (*reversed(steps), 0)],
                [cuda.cuuint32_t(n) for n in reversed(box)],
                [cuda.cuuint32_t(1)] * rank,
                cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                cuda.CUtensorMapSwizzle(_SWIZZLES[swizzle]),
                cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        )
        packed = bytearray(ctypes.string_at(made.getPtr(), MAP))
        last = sum((n - 1) * s for n, s in zip(shape, [*steps, size], strict=True))
        if self._version <= _WRONG_UNTIL and last + 1 < _WRONG_BELOW:
            packed[_WRONG_BYTE] &= ~_WRONG_BIT
        return bytes(packed)

    def _checked(self, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the results of a call, or raise if its code is an error."""
        code, *values = result
        if code is not self._success:
            raise DeviceError(
                "the CUDA driver rejected a kernel or a tensor map",
                got=code.name,
                next_step="an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to see which",
            )
        return tuple(values)


@cache
def kernel_driver() -> KernelDriver | None:
    """Return the driver for launches on all devices; None without libcuda or cuda-bindings (part of torch for CUDA)."""
    try:
        from cuda.bindings import driver as library

        library.cuDriverGetVersion()
    except (ImportError, RuntimeError):  # RuntimeError: no libcuda
        return None
    return KernelDriver(library)


class Bound:
    """A launch with fixed parameters, except the address of one tensor if it has a renewed argument (see `ready`).

    It keeps no tensor alive. Two threads must not launch the same one with a renewed argument at the same time. They do
    not if another parameter is the address of a result, into which one call writes at a time.
    """

    __slots__ = ("_address", "_count", "_driver", "_extra", "_packed", "_renewed", "_what")

    def __init__(
        self,
        driver: KernelDriver,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared: int,
        packed: bytes,
        renewed: int | None = None,
    ) -> None:
        """Keep the parameters. `renewed`: Offset in `packed` of the address that each launch sets."""
        self._driver, self._renewed = driver, renewed
        self._packed, self._count = ctypes.create_string_buffer(packed, len(packed)), ctypes.c_size_t(len(packed))
        parameters, count = ctypes.addressof(self._packed), ctypes.addressof(self._count)
        self._extra = _Extra(_BUFFER, parameters, _SIZE, count, None)
        self._address = ctypes.addressof(self._extra)
        self._what = (function, *grid, threads, 1, 1, shared)

    def __call__(self, stream: int, renewed: Tensor | None = None) -> None:
        """Launch. `renewed`: The tensor of the renewed argument, which must be given if there is one."""
        if self._renewed is not None:
            assert renewed is not None, "an old address would be used again"
            _POINTER.pack_into(self._packed, self._renewed, renewed.data_ptr())
        self._driver.launch(self._what, stream, self._address)


class Ready:
    """A compiled kernel whose parameters this module packs."""

    def __init__(
        self,
        driver: KernelDriver,
        function: int,
        metadata: Any,
        packing: Packing,
        args: Sequence[Any],
        renewed: int | None = None,
    ) -> None:
        """Keep what does not depend on the tensors. `renewed`: Index in `args` of the renewed argument."""
        self._driver, self._function, self._form = driver, function, packing.form
        self._threads: int = 32 * metadata.num_warps
        self._shared: int = metadata.shared
        self._described = [i for i, a in enumerate(args) if isinstance(a, Described)]
        self._tensors = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
        self._renewed = None if renewed is None else packing.offsets[renewed]

    def bound(self, grid: tuple[int, int, int], args: Sequence[Any]) -> Bound:
        """Return a launch with these numbers, addresses and packed descriptions."""
        packed = self._form.pack(*args, 0, 0)
        return Bound(self._driver, self._function, grid, self._threads, self._shared, packed, self._renewed)

    def __call__(
        self, grid: tuple[int, int, int], args: Sequence[Any], stream: int, renewed: Tensor | None = None
    ) -> Bound:
        """Launch with arguments of the types for which the kernel was compiled, without constants.

        Return the launch. It may be repeated for tensors with the same addresses, shapes, strides and dtypes.
        """
        values = list(args)
        for i in self._described:
            values[i] = values[i].packed
        for i in self._tensors:
            values[i] = values[i].data_ptr()
        bound = self.bound(grid, values)
        bound(stream, renewed)
        return bound


def ready(driver: KernelDriver | None, kernel: Any, args: Sequence[Any], renewed: Tensor | None = None) -> Ready | None:
    """Load a kernel that Triton compiled for these arguments; None if this module cannot pack its parameters.

    `renewed`: The one of `args` that is another tensor in each launch. Default: none.
    """
    metadata = kernel.metadata
    if driver is None or metadata.num_ctas != 1 or metadata.launch_pdl or metadata.launch_cooperative_grid:
        return None
    if metadata.global_scratch_size or metadata.profile_scratch_size:
        return None
    described = [a for a in args if isinstance(a, Described)]
    maps = getattr(metadata, "tensordesc_meta", None) or []
    if [(tuple(m["block_size"]), m["swizzle"]) for m in maps] != [(d.box, _SWIZZLES[d.swizzle]) for d in described]:
        return None
    function = driver.load(kernel)
    packed = packing(args, driver.parameters(function))
    if packed is None:
        return None
    index = None if renewed is None else next(i for i, a in enumerate(args) if a is renewed)
    return Ready(driver, function, metadata, packed, args, index)


class Packing(NamedTuple):
    """Layout of the buffer of a launch's parameters."""

    form: struct.Struct  # of all arguments, and of Triton's two last pointers
    offsets: tuple[int, ...]  # of each argument, in bytes


def packing(args: Sequence[Any], parameters: Sequence[tuple[int, int]]) -> Packing | None:
    """Return the layout of a launch's buffer; None if the parameters do not fit the arguments."""
    form, at, rest, offsets = "=", 0, list(parameters), []
    for arg in (*args, None, None):
        if not rest:
            return None
        start, size = rest[0]
        letter, parts = _parts(arg, size)
        if start < at or rest[: len(parts)] != [(start + offset, each) for offset, each in parts]:
            return None
        form += f"{start - at}x{letter}"
        offsets.append(start)
        at = start + struct.calcsize("=" + letter)
        del rest[: len(parts)]
    return None if rest else Packing(struct.Struct(form), tuple(offsets))


def _parts(arg: Any, size: int) -> tuple[str, list[tuple[int, int]]]:
    """Return the format of an argument for `struct`, and the offset and size of each parameter that it becomes."""
    if isinstance(arg, Described):
        rank = len(arg.box)
        strides = len(arg.packed) - 8 * rank
        extents = [(MAP + 4 * i, 4) for i in range(rank)]
        return f"{len(arg.packed)}s", [(0, MAP), *extents, *((strides + 8 * i, 8) for i in range(rank))]
    if isinstance(arg, float):
        return "f", [(0, 4)]
    if isinstance(arg, int):
        return ("i" if size == 4 else "q"), [(0, 4 if size == 4 else 8)]
    return "Q", [(0, 8)]


def pack_described(tensor_map: bytes, shape: Sequence[int], strides: Sequence[int]) -> bytes:
    """Return a tensor map, followed by the extents and strides, as a kernel's parameters contain them."""
    rank = len(shape)
    gap = -(MAP + 4 * rank) % 8
    return tensor_map + struct.pack(f"={rank}i{gap}x{rank}q", *shape, *strides)
