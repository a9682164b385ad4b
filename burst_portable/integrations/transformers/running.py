"""Which call of a parallelized model runs now.

torch calls no hook where a call ends by Ctrl-C, or fails inside torch.compile. So a call counts as running while the
frame that called its first hook is on the stack, and no longer.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_BETWEEN = ("burst_portable.integrations.", "torch._dynamo.")
"""Modules whose frames stand between torch's call of a module and a hook's own, and end with the hook."""


class RunningCall:
    """A module's call, made in the hook before its forward."""

    def __init__(self, module: Any) -> None:
        self.module = module
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
            frame = frame.f_back
        self._frame = frame

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # frames cannot be pickled, and in a copy elsewhere nothing runs

    def has(self, module: Any) -> bool:
        """Whether a call of `module` that begins now is a part of this one, which still runs."""
        return module is not self.module and any(module is part for part in self.module.modules()) and self._runs()

    def _runs(self) -> bool:
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None
