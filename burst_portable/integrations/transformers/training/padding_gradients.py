"""Find losses that depend on outputs of padding, which are not those of one device, by their gradients.

On one device, padding attends to the tokens of its row. In a sharded model it does not, or it attends to padding as
well. A head or a loss that leaves padding out gives its outputs the gradient 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from burst_portable.errors import UnsupportedError
from burst_portable.integrations.transformers.training.batch_check import HostCopy
from burst_portable.mesh import Mesh


class PaddingGradients:
    """Watches the gradients of outputs of padding, call after call.

    Over a host transport, the backward pass raises the error. Otherwise the end of the next call does.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pending: list[HostCopy] = []

    def watch(self, output: Mapping[str, Any], is_padding: Tensor | None) -> None:
        """Check the last call, and watch the backward pass of this one.

        Args:
            output: Logits or states of all tokens ``[B, N, ...]``, router logits ``[B * N, experts]``, and others.
                Those of TRL's fused head ``[B, N - 1]`` are 0 for padding and do not depend on it, so they are not
                watched.
            is_padding: Which tokens are padding ``[B, N]``. None: there is none.

        Raises:
            UnsupportedError: If the loss of the last call depends on outputs of padding.
        """
        pending, self._pending = self._pending, []
        if any(copied.read() for copied in pending):
            raise _depends_on_padding()
        if is_padding is None:
            return
        for value in output.values():
            for x in value if isinstance(value, tuple) else (value,):
                if not isinstance(x, Tensor) or not x.requires_grad:
                    continue
                if x.dim() == 3 and x.shape[:2] == is_padding.shape:
                    self._watch(x, is_padding)
                elif x.dim() == 2 and len(x) == is_padding.numel():  # router logits
                    self._watch(x, is_padding.flatten())

    def _watch(self, x: Tensor, is_padding: Tensor) -> None:
        def check(gradient: Tensor | None) -> None:
            if gradient is None:  # DDP passes all outputs on together, also those that a loss does not use
                return
            # Infinite ones, of which a gradient scaler skips the step, give padding NaN instead of 0.
            is_used = (gradient.detach() != 0) & gradient.detach().isfinite()
            found = (is_used.reshape(*is_padding.shape, -1).any(dim=-1) & is_padding.to(gradient.device)).any()
            if self._mesh.transport(gradient.device.type).host:
                if bool(found):
                    raise _depends_on_padding()
            else:
                self._pending.append(HostCopy(found, self._mesh))

        x.register_hook(check)


def _depends_on_padding() -> UnsupportedError:
    return UnsupportedError(
        "the loss depends on outputs of padding, which are not those of one device",
        got="a gradient of them that is not 0",
        next_step="leave padding out of the head and the loss (attention_mask == 0), or pass rows of one length",
    )
