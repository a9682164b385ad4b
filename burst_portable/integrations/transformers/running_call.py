"""Keep what a running call of a sharded model needs at its end, and find out whether another call is part of it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import Tensor

from burst_portable.integrations.transformers.loss import ShardedLoss

_HOOK_MODULES = ("burst_portable.integrations.", "torch._dynamo.")
"""Modules of frames between torch's call of a module and our hook. They end with the hook."""


class RunningCall:
    """A running call of a module, created in the hook before its forward.

    Attributes:
        module: The called module.
        padding: Which of this rank's tokens are padding, ``[B, S]``. None: there is none.
        masked_labels: Labels of the loss that is computed after the call, and their number on all ranks. None: none is.
        loss: The loss function of the module when the call began. None: it has none.
        router_logits: Those of the inner model ``[tokens, experts]`` per layer, if it returned any.
    """

    def __init__(
        self,
        module: Any,
        padding: Tensor | None = None,
        masked_labels: tuple[Tensor, Tensor] | None = None,
        loss: ShardedLoss | None = None,
    ) -> None:
        self.module, self.padding, self.masked_labels, self.loss = module, padding, masked_labels, loss
        self.router_logits: Any = None
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_globals.get("__name__", "").startswith(_HOOK_MODULES):
            frame = frame.f_back
        self._frame = frame

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # frames cannot be pickled, and no call runs in a copy

    def contains(self, module: Any) -> bool:
        """Return whether a call of `module` that begins now is part of this call, which still runs."""
        if module is self.module or all(module is not part for part in self.module.modules()):
            return False
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None
