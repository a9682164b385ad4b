"""Sums over ranks, for parameters that every rank has whole: with any transport, added in rank order.

The order makes the sum the same bits on every rank, so that optimizers that start equal stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_portable.checks import check_tensor
from burst_portable.compiling import outside_graphs
from burst_portable.errors import InputError, explain, shown
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.numerics import accumulation_dtype

_BUCKET = 1 << 28
"""Bytes of gradients that are exchanged together: an exchange holds three more copies of them."""


@outside_graphs
def sum_over_ranks(x: Tensor, mesh: MeshLike = None) -> Tensor:
    """The sum of the ranks' tensors of one shape and dtype, on every rank: scattered, added, gathered.

    It is added in float32 or float64 and has the shape and dtype of `x`. The mesh is as `attention` takes it.
    """
    check_tensor("x", x)
    mesh = as_mesh(mesh)
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


@outside_graphs
def sum_gradients(parameters: Iterable[Tensor], mesh: MeshLike = None) -> None:
    """Add up every parameter's gradient over the ranks, in place; one exchange a dtype, device and 256 MiB.

    Once a step: after the last batch whose gradients are accumulated, before they are unscaled, clipped and used.

    A parameter without a gradient counts as zeros where another rank has one, and stays without one where none has, so
    that optimizers leave it alone; all ranks pass the same parameters. One that is passed twice (tied weights of two
    lists) is summed once.
    Of a parameter that is sharded over other ranks (FSDP2 over data alone), this rank's part is summed.

    Args:
        parameters: as an optimizer takes them, ``model.parameters()``.
        mesh: the ranks that share the sequence, as `attention` takes it.

    Raises `InputError` for what is not a list of parameters, for parameters that are sharded over these ranks (FSDP has
    reduced their gradients already), and for sparse gradients.
    """
    mesh = as_mesh(mesh)
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    missing = set[Tensor]()
    for parameter in _listed(parameters):
        if not parameter.requires_grad:
            continue
        _check_whole(parameter, mesh)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            missing.add(parameter)
        gradient = _gradient(parameter)
        groups.setdefault((gradient.dtype, gradient.device), []).append(parameter)
    for members in groups.values():
        for bucket in _buckets(members):
            _sum_bucket(bucket, missing, mesh)


def _listed(parameters: Any) -> list[Tensor]:
    """Each parameter once. A tensor by itself would be gone through row by row, and its gradient left as it is."""
    advice = "pass model.parameters(), or a list of tensors"
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise InputError(explain("these are not parameters", got=type(parameters).__name__, next_step=advice))
    listed = list(parameters)
    if other := next((one for one in listed if not isinstance(one, Tensor)), None):
        raise InputError(explain("not all of these are parameters", got=shown(other), next_step=advice))
    return list(dict.fromkeys(listed))


def _sum_bucket(bucket: list[Tensor], missing: set[Tensor], mesh: Mesh) -> None:
    """The gradients of some parameters, and with them how many ranks have one; this rank has none of the `missing`."""
    gradients = [_gradient(parameter) for parameter in bucket]
    here = gradients[0].new_tensor([float(parameter not in missing) for parameter in bucket])
    total = sum_over_ranks(torch.cat([*(g.reshape(-1) for g in gradients), here]), mesh)
    *sums, holders = total.split([*(g.numel() for g in gradients), len(bucket)])
    for gradient, part in zip(gradients, sums, strict=True):
        gradient.copy_(part.view(gradient.shape))
    if missing.isdisjoint(bucket):
        return  # holders are on a device, and nobody waits for them unasked
    for parameter, count in zip(bucket, holders.tolist(), strict=True):
        if not count:
            parameter.grad = None


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """In order, as many together as their gradients come to `_BUCKET` bytes; a larger one alone."""
    bucket, held = list[Tensor](), 0
    for parameter in parameters:
        size = _gradient(parameter).nbytes
        if bucket and held + size > _BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += size
    if bucket:
        yield bucket


def _gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None, "it was made where there was none"
    if gradient.layout is not torch.strided:
        next_step = "make the module that gives it without sparse=True"
        raise InputError(explain("sparse gradients are not summed", got=gradient.layout, next_step=next_step))
    return _local(gradient)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _check_whole(parameter: Tensor, mesh: Mesh) -> None:
    if mesh.group is None or not isinstance(parameter, DTensor):
        return
    holders = set(parameter.device_mesh.mesh.flatten().tolist())
    if len(holders.intersection(dist.get_process_group_ranks(mesh.group))) > 1:
        raise InputError(
            explain(
                "gradients are summed already over the ranks that share the sequence",
                got=f"a parameter that FSDP shards over ranks {sorted(holders)}",
                next_step="leave sum_gradients out",
            )
        )


def _pieces(x: Tensor, count: int) -> list[Tensor]:
    """So many equal parts of a flat tensor, as bytes."""
    return list(x.view(torch.uint8).chunk(count))
