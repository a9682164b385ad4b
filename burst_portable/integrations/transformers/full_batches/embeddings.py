"""Complete the gradients of embeddings that a program passes to a call with a full batch.

The backward pass of such a call computes the gradient of this rank's tokens; those of all others are 0. Embeddings may
be computed from gathered outputs of a sharded model. Its backward pass takes the gradient of the tokens that this rank
has there, so it needs the full gradient on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from burst_portable.errors import UnsupportedError
from burst_portable.gradients import all_reduce
from burst_portable.integrations.transformers.full_batches.outputs import depends_on_gathered
from burst_portable.integrations.transformers.training.gradient_parts import check_differentiated_once
from burst_portable.mesh import Mesh


def with_full_gradient(embeddings: Tensor, mesh: Mesh, *, averaged: bool) -> Tensor:
    """Return the embeddings of a full batch ``[B, N, H]``, whose gradient will be one device's on every rank.

    If gradients are summed, it stays this rank's part, so that parameters outside the model have their parts as well.

    Args:
        embeddings: Embeddings of all tokens.
        mesh: The ranks of the sequence.
        averaged: Whether gradients will be averaged over the ranks.

    Raises:
        UnsupportedError: If gradients are summed, and embeddings depend on gathered outputs.
    """
    if mesh.size == 1 or not (torch.is_grad_enabled() and embeddings.requires_grad):
        return embeddings
    if averaged:
        full: Tensor = _FullGradient.apply(embeddings, mesh)  # type: ignore[no-untyped-call]  # of torch
        return full
    if depends_on_gathered(embeddings):
        raise UnsupportedError(
            "inputs_embeds depend on gathered outputs of a sharded model, and each rank has a part of their gradient",
            got="averaged_gradients=False",
            allowed="averaged_gradients=True",
            next_step="average the gradients of both models over the ranks, as DDP does; or detach the outputs",
        )
    return embeddings


class _FullGradient(torch.autograd.Function):
    """Identity. Its gradient is the sum of the ranks' parts, which calls with averaged gradients multiply by ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        check_differentiated_once()
        return all_reduce(grad.contiguous(), ctx.mesh) / ctx.mesh.size, None
