"""Sums over ranks, for parameters that every rank has whole: with any transport, added in rank order.

The order makes the sum the same bits on every rank, so that optimizers that start equal stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from burst_portable.comm.agreement import HashedValue, agree, call_signature, hashed_value
from burst_portable.errors import InputError, shown
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.numerics import accumulation_dtype
from burst_portable.runtime.validation import broadcast_error, check_tensor
from burst_portable.utils.torch_modes import outside_graphs
from burst_portable.utils.values import size

Groups: TypeAlias = dict[tuple[torch.dtype, torch.device], list[Tensor]]
_VALUES = "values of the parameters"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of a number."""
BUCKET_BYTES = 1 << 28
"""Default number of bytes of gradients per exchange, which holds three more copies of them."""


@outside_graphs
def all_reduce(x: Tensor, mesh: MeshLike = None) -> Tensor:
    """The sum of the ranks' tensors of one shape and dtype, on every rank: scattered, added, gathered.

    It has the shape and dtype of `x`; 16-bit floats are added in float32, integers in int64. The mesh is as `attention`
    takes it.

    Raises:
        InputError: x is not a dense tensor.
        MismatchError: ranks that differ in shape or dtype, or make another call; on every rank, where the transport can
            tell.
        CommunicationError: something else went wrong between ranks.
    """
    mesh = as_mesh(mesh)
    try:
        check_tensor("x", x)
        transport = mesh.transport(x.device.type)
    except Exception as refusal:
        broadcast_error(mesh, refusal, x)
        raise
    dtype = str(x.dtype).removeprefix("torch.")
    agree(transport, call_signature({"pass": "all_reduce", "dtype": dtype, "shape": str(tuple(x.shape))}))
    with transport.between_passes():
        return _summed(x, mesh)


def _summed(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum, where the ranks are known to have tensors of one shape and dtype."""
    if mesh.size == 1:
        return x.clone()
    transport = mesh.transport(x.device.type)
    flat = x.reshape(-1)
    part_size = -(-flat.numel() // mesh.size)
    padded = flat.new_zeros(part_size * mesh.size)
    padded[: flat.numel()] = flat
    mine = torch.empty_like(padded)
    transport.all_to_all(_pieces(padded, mesh.size), _pieces(mine, mesh.size), "summing gradients")
    total = torch.zeros(part_size, dtype=_summed_in(x.dtype), device=x.device)
    for part in mine.view(mesh.size, part_size):
        total += part if x.is_floating_point() else part.to(total.dtype)  # torch adds few unsigned integers to others
    transport.all_gather(total.to(x.dtype).view(torch.uint8), _pieces(padded, mesh.size), "gathering gradients")
    return padded[: flat.numel()].view(x.shape)


def _summed_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of this one are summed: float32 would lose digits of integers above 2**24."""
    if dtype.is_complex:
        return torch.complex128 if dtype is torch.complex128 else torch.complex64
    return accumulation_dtype(dtype) if dtype.is_floating_point else torch.int64


@outside_graphs
def all_reduce_gradients(
    parameters: Iterable[Tensor], mesh: MeshLike = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Add up every parameter's gradient over the ranks, in place; one exchange a dtype, device and bucket.

    Once a step: after the last batch whose gradients are accumulated, before they are unscaled, clipped and used.

    A parameter without a gradient counts as zeros where another rank has one, and stays without one where none has, so
    that optimizers leave it alone; all ranks pass the same parameters. One that is passed twice (tied weights of two
    lists) is summed once.
    Of a parameter that is sharded over other ranks (FSDP2 over data alone), this rank's part is summed.

    Args:
        parameters: as an optimizer takes them, ``model.parameters()``.
        mesh: the ranks that share the sequence, as `attention` takes it.
        bucket_bytes: Gradients are exchanged together up to this many bytes; the same on all ranks. A larger gradient
            has an exchange for itself. Default: 256 MiB.

    Raises:
        InputError: what is not a list of parameters, parameters that are sharded over these ranks (FSDP has reduced
            their gradients already), and sparse gradients.
        MismatchError: ranks that differ in their parameters, or make another call; on every rank, where the transport
            can tell. The first time, ranks whose parameters hold other values, too. Gradients are then as they were.
        CommunicationError: something else went wrong between ranks.
    """
    mesh = as_mesh(mesh)
    listed, missing = list[Tensor](), set[Tensor]()
    try:
        listed = _listed(parameters)
        bucket_bytes = size("bucket_bytes", bucket_bytes)
        groups = _grouped(listed, mesh, missing)
        _agree_on(groups, listed, mesh, bucket_bytes)
    except Exception as refusal:
        for parameter in missing:
            parameter.grad = None
        broadcast_error(mesh, refusal, *listed[:1])
        raise
    for (_, device), members in groups.items():
        with mesh.transport(device.type).between_passes():
            for bucket in _buckets(members, bucket_bytes):
                _sum_bucket(bucket, missing, mesh)


def _grouped(parameters: list[Tensor], mesh: Mesh, missing: set[Tensor]) -> Groups:
    """Parameters whose gradients are summed; those that had none get zeros, and are added to `missing`."""
    groups: Groups = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        _check_whole(parameter, mesh)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            missing.add(parameter)
        gradient = _gradient(parameter)
        groups.setdefault((gradient.dtype, gradient.device), []).append(parameter)
    return groups


def _agree_on(groups: Groups, listed: list[Tensor], mesh: Mesh, bucket_bytes: int) -> None:
    """Ask whether all ranks sum the same: buffers of other sizes would end a process, or leave it waiting.

    The first time, also whether their parameters hold the same values: ranks with models of their own would each train
    another one, with the gradients of all.
    """
    transport = mesh.transport(next(iter(groups))[1].type) if groups else mesh.connected()
    if transport is None:
        return
    shapes = [(str(dtype), [tuple(_gradient(p).shape) for p in members]) for (dtype, _), members in groups.items()]
    numbers = sum(_gradient(p).numel() for members in groups.values() for p in members)
    told = f"{sum(map(len, groups.values())):,} tensors of {numbers:,} numbers"
    facts: dict[str, str | HashedValue] = {
        "pass": "all_reduce_gradients",
        "parameters": hashed_value(told, shapes),
        "bucket_bytes": str(bucket_bytes),
    }
    agree(transport, call_signature(facts))
    compared = call_signature({**facts, _VALUES: "compared"}).digest
    if transport.size > 1 and compared not in transport.agreed:
        agree(transport, call_signature({**facts, _VALUES: _checksum(listed)}))
        transport.agreed.add(compared)


def _checksum(parameters: list[Tensor]) -> HashedValue:
    """Of the numbers of all parameters, by their bits: the same on any device. Read once, on the device."""
    sums: dict[torch.device, list[Tensor]] = {}
    for x in map(_local, parameters):
        bits = _INTEGERS.get(x.dtype.itemsize)
        if bits is not None and not x.is_meta and x.layout is torch.strided:
            sums.setdefault(x.device, []).append(x.detach().view(bits).sum(dtype=torch.int64))
    told = [torch.stack(there).tolist() for there in sums.values()]
    made = hashed_value("", told)
    return made._replace(name=f"checksum {made.digest[:8]}")


def _listed(parameters: Any) -> list[Tensor]:
    """Each parameter once. A tensor by itself would be gone through row by row, and its gradient left as it is."""
    advice = "pass model.parameters(), or a list of tensors"
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise InputError("these are not parameters", got=type(parameters).__name__, next_step=advice)
    listed = list(parameters)
    if others := [one for one in listed if not isinstance(one, Tensor)]:
        raise InputError("not all of these are parameters", got=shown(others[0]), next_step=advice)
    return list(dict.fromkeys(listed))


def _sum_bucket(bucket: list[Tensor], missing: set[Tensor], mesh: Mesh) -> None:
    """The gradients of some parameters, and with them how many ranks have one; this rank has none of the `missing`."""
    gradients = [_gradient(parameter) for parameter in bucket]
    here = gradients[0].new_tensor([float(parameter not in missing) for parameter in bucket])
    total = _summed(torch.cat([*(g.reshape(-1) for g in gradients), here]), mesh)
    *sums, holders = total.split([*(g.numel() for g in gradients), len(bucket)])
    for gradient, part in zip(gradients, sums, strict=True):
        gradient.copy_(part.view(gradient.shape))
    if missing.isdisjoint(bucket):
        return  # holders are on a device, and nobody waits for them unasked
    for parameter, count in zip(bucket, holders.tolist(), strict=True):
        if not count:
            parameter.grad = None


def _buckets(parameters: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield parameters in order, as many together as their gradients fit in a bucket; a larger one alone."""
    bucket, held = list[Tensor](), 0
    for parameter in parameters:
        nbytes = _gradient(parameter).nbytes
        if bucket and held + nbytes > bucket_bytes:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += nbytes
    yield bucket


def _gradient(parameter: Tensor) -> Tensor:
    """This rank's part of a parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None, "it was made where there was none"
    if gradient.layout is not torch.strided:
        next_step = "make the module that gives it without sparse=True"
        raise InputError("sparse gradients are not summed", got=gradient.layout, next_step=next_step)
    return _local(gradient)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _check_whole(parameter: Tensor, mesh: Mesh) -> None:
    if mesh.group is None or not isinstance(parameter, DTensor):
        return
    holders = set(parameter.device_mesh.mesh.flatten().tolist())
    if len(holders.intersection(dist.get_process_group_ranks(mesh.group))) > 1:
        raise InputError(
            "gradients are summed already over the ranks that share the sequence",
            got=f"a parameter that FSDP shards over ranks {sorted(holders)}",
            next_step="leave all_reduce_gradients out",
        )


def _pieces(x: Tensor, count: int) -> list[Tensor]:
    """So many equal parts of a flat tensor, as bytes."""
    return list(x.view(torch.uint8).chunk(count))
