"""The few calls of NVIDIA's driver that torch has no function for: flags that streams set and wait for, raw copies.

Addresses and streams are plain ints, so that a call costs the host a microsecond.
"""

from __future__ import annotations

import ctypes
from functools import cache

from burst_portable.errors import CommunicationError, UnsupportedError, explain

_WAIT_EQUAL = 0x1
_WAIT_FLUSH = 1 << 30
_CAN_FLUSH = 98  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class Driver:
    """libcuda, for one device.

    Raises `UnsupportedError` where the library or one of the functions is missing.
    """

    def __init__(self, device: int) -> None:
        address, stream, number = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint32
        try:
            self._library = library = ctypes.CDLL("libcuda.so.1")
            self._set, self._wait = library.cuStreamWriteValue32_v2, library.cuStreamWaitValue32_v2
            self._copy = library.cuMemcpyDtoDAsync_v2
            self._exchange = library.cuThreadExchangeStreamCaptureMode
        except (OSError, AttributeError) as error:
            raise UnsupportedError(
                explain("the driver has no stream flags", got=error, next_step="update the driver")
            ) from error
        self._set.argtypes = self._wait.argtypes = (stream, address, number, ctypes.c_uint)
        self._copy.argtypes = (address, address, ctypes.c_size_t, stream)
        can = ctypes.c_int(0)
        self._checked(library.cuDeviceGetAttribute(ctypes.byref(can), _CAN_FLUSH, device))
        self._how = _WAIT_EQUAL | (_WAIT_FLUSH if can.value else 0)

    def set_flag(self, stream: int, address: int, value: int) -> None:
        """Write 32 bits once all before it on the stream is done and seen by every device."""
        self._checked(self._set(stream, address, value, 0))

    def wait_flag(self, stream: int, address: int, value: int) -> None:
        """The stream goes on when these 32 bits have the value."""
        self._checked(self._wait(stream, address, value, self._how))

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Bytes between devices, by a copy engine."""
        self._checked(self._copy(target, source, size, stream))

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


def leave_captures_alone() -> None:
    """See `Driver.leave_captures_alone`; for threads that only look at events."""
    driver(0).leave_captures_alone()
