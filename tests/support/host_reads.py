"""Record where a program reads a value of a tensor on the host, which waits for a device."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PACKAGE = str(Path(__file__).parents[2] / "burst_portable")
TORCH = str(Path(torch.__file__).parent)
_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.unique_consecutive.default,
}
_INDEXED = {torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default}
_WARNING = "called a synchronizing CUDA operation"


def place() -> str:
    """Return the line of the package that called torch, as "file.py:function:line"; "" if other code called it."""
    skipped = (TORCH, __file__, warnings.__file__)
    frame = next((x for x in reversed(traceback.extract_stack()) if not x.filename.startswith(skipped)), None)
    if frame is None or not frame.filename.startswith(PACKAGE):
        return ""
    return f"{Path(frame.filename).name}:{frame.name}:{frame.lineno}"


class HostReads(TorchDispatchMode):
    """Records in `places` the lines of the package that read a value or the number of true values of a tensor.

    `x[0] = 1` is recorded as well: on a GPU it copies the number from the host, and waits for the copy.

    It works on CPUs, where such an operator does not wait. `Tensor.tolist` and `Tensor.cpu` are not recorded there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []
        self._number: torch.Tensor | None = None
        """The newest tensor that torch made of a number or a list of the program."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_masked = func in _INDEXED and any(_is_mask(x) for x in args[1])
        is_number = func is torch.ops.aten.copy_.default and args[1] is self._number
        if func in _READS or is_masked or is_number:
            self.places.append(place())
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            self._number = result
        return result


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


@contextmanager
def recorded_waits() -> Iterator[list[str]]:
    """Yield the places where operators of CUDA make the host wait for the device: "" outside of the package.

    Events do not count, and nor do messages between ranks.
    """
    places: list[str] = []

    def show(message: Any, *_: Any, **__: Any) -> None:
        if _WARNING in str(message):
            places.append(place())

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")
