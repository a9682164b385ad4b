"""Check that gradients of one rank, which are parts of a sum, are not differentiated."""

from __future__ import annotations

import torch

from burst_portable.errors import UnsupportedError


def check_differentiated_once() -> None:
    """Raise `UnsupportedError` in a backward pass with create_graph=True, for example of a gradient penalty.

    The gradient of a parameter is a sum over ranks, and only this rank's part is known. Attention raises an error for
    such a pass, but none runs for the gradient of the head alone.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a gradient on one rank is a part of the gradient, so a function of it is not that of one device",
            got="a backward pass with create_graph=True",
            next_step="leave create_graph out; for norms of gradients, sum them first (all_reduce_gradients)",
        )
