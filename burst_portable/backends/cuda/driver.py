"""The few calls of NVIDIA's driver that torch has no function for: flags that streams set and wait for, raw copies.

Addresses and streams are plain ints, so that a call costs the host a microsecond.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from burst_portable.comm.base import Strip
from burst_portable.errors import CommunicationError, UnsupportedError, explain

_WAIT_EQUAL = 0x1
_WAIT_FLUSH = 1 << 30
_CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_WAIT, _WRITE = 1, 2  # CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_OPERATION = struct.Struct("=I4xQI4xI20x")  # CUstreamBatchMemOpParams: what, address, value, flags; 48 bytes
# CUDA_MEMCPY2D, of the source and of the target: x, y, kind, host, address, array, pitch; then width and height.
_LINES = struct.Struct("=16xI12xQ8xQ16xI12xQ8xQQQ")


class Driver:
    """libcuda, for one device.

    Raises `UnsupportedError` where the library or one of the functions is missing.
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
                explain("the driver has no stream flags", got=error, next_step="update the driver")
            ) from error
        self._set.argtypes = self._wait.argtypes = (stream, address, number, ctypes.c_uint)
        self._operate.argtypes = (stream, ctypes.c_uint, ctypes.c_char_p, ctypes.c_uint)
        self._copy.argtypes = (address, address, ctypes.c_size_t, stream)
        self._copy_lines.argtypes = (ctypes.c_char_p, stream)
        can = ctypes.c_int(0)
        self._checked(library.cuDeviceGetAttribute(ctypes.byref(can), _CAN_FLUSH, device))
        self._how = _WAIT_EQUAL | (_WAIT_FLUSH if can.value else 0)

    def set_flags(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """Write 32 bits at each address once all before it on the stream is done and seen by every device."""
        if len(addresses) == 1:
            self._checked(self._set(stream, addresses[0], value, 0))
        else:
            self._batch(stream, _WRITE, addresses, value, 0)

    def wait_flags(self, stream: int, addresses: Sequence[int], value: int) -> None:
        """The stream goes on when these 32 bits all have the value."""
        if len(addresses) == 1:
            self._checked(self._wait(stream, addresses[0], value, self._how))
        else:
            self._batch(stream, _WAIT, addresses, value, self._how)

    def _batch(self, stream: int, operation: int, addresses: Sequence[int], value: int, how: int) -> None:
        """One call for all of them."""
        if not addresses:
            return
        packed = b"".join([_OPERATION.pack(operation, address, value, how) for address in addresses])
        self._checked(self._operate(stream, len(addresses), packed, 0))

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Bytes between devices, by a copy engine."""
        self._checked(self._copy(target, source, size, stream))

    def copy_lines(self, stream: int, target: int, source: int, strip: Strip) -> None:
        """The same of lines that lie apart."""
        _, _, _, lines, width, step, jump = strip
        packed = _LINES.pack(_ON_DEVICE, source, step, _ON_DEVICE, target, jump, width, lines)
        self._checked(self._copy_lines(packed, stream))

    def leave_captures_alone(self) -> None:
        """What the calling thread does no longer breaks a graph that another thread captures."""
        mode = ctypes.c_int(_RELAXED)
        self._checked(self._exchange(ctypes.byref(mode)))

    def _checked(self, code: int) -> None:
        if code:
            raise CommunicationError(explain("a call of the CUDA driver failed", got=error_text(self._library, code)))


def error_text(library: ctypes.CDLL, code: int) -> str:
    """What libcuda says of an error."""
    text = ctypes.c_char_p()
    library.cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else f"code {code}"


@cache
def driver(device: int) -> Driver:
    """The driver of a device; made once."""
    return Driver(device)


def on(device: torch.device) -> AbstractContextManager[Any]:
    """The device made the current one; where it is already, without what torch's own way of it costs."""
    return nullcontext() if torch.cuda.current_device() == device.index else torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """torch's, by its handle: a `torch.cuda.Stream` made for it alone costs more than a launch."""
    stream: int = torch._C._cuda_getCurrentRawStream(device.index)
    return stream


def leave_captures_alone() -> None:
    """See `Driver.leave_captures_alone`; for threads that only look at events."""
    driver(0).leave_captures_alone()
