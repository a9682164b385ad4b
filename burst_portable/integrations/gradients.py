"""Sums over ranks, for parameters that every rank has whole: with any transport, added in rank order.

The order makes the sum the same bits on every rank, so that optimizers that start equal stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from burst_portable.mesh import Mesh
from burst_portable.numerics import accumulation_dtype


def sum_over_ranks(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum of the ranks' tensors of one shape and dtype, on every rank: scattered, added, gathered.

    It is added in float32 or float64 and has the shape and dtype of `x`.
    """
    if mesh.size == 1:
        return x.clone()
    transport = mesh.transport(x.device.type)
    flat = x.reshape(-1)
    size = -(-flat.numel() // mesh.size)
    padded = flat.new_zeros(size * mesh.size)
    padded[: flat.numel()] = flat
    mine = torch.empty_like(padded)
    transport.all_to_all(_pieces(padded, mesh.size), _pieces(mine, mesh.size), "summing gradients")
    total = torch.zeros(size, dtype=accumulation_dtype(x.dtype), device=x.device)
    for part in mine.view(mesh.size, size):
        total += part
    transport.all_gather(total.to(x.dtype).view(torch.uint8), _pieces(padded, mesh.size), "gathering gradients")
    return padded[: flat.numel()].view(x.shape)


def sum_gradients(parameters: Iterable[Tensor], mesh: Mesh) -> None:
    """Add up every parameter's gradient over the ranks, in place; one exchange a dtype and device.

    A parameter without a gradient counts as zeros where another rank has one; all ranks pass the same parameters.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for members in groups.values():
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in members])
        start = 0
        total = sum_over_ranks(flat, mesh)
        for p in members:
            part = total[start : start + p.numel()].view(p.shape)
            start += p.numel()
            p.grad = part.clone() if p.grad is None else p.grad.copy_(part)


def _pieces(x: Tensor, count: int) -> list[Tensor]:
    """So many equal parts of a flat tensor, as bytes."""
    return list(x.view(torch.uint8).chunk(count))
