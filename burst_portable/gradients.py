"""Sum tensors and gradients over ranks. Every rank adds in rank order, with any transport.

The fixed order gives the same bits on every rank, so that optimizers with equal states stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter

from burst_portable.comm.agreement import Facts, HashedValue, agree, call_signature, hashed_value
from burst_portable.errors import InputError, shown
from burst_portable.mesh import Mesh, MeshLike, as_mesh
from burst_portable.numerics import accumulation_dtype
from burst_portable.runtime.validation import broadcast_error, check_tensor
from burst_portable.utils.checksum import INTEGERS
from burst_portable.utils.gradient_records import GradientRecords
from burst_portable.utils.torch_modes import outside_graphs
from burst_portable.utils.values import size

Groups: TypeAlias = dict[tuple[torch.dtype, torch.device], list[Tensor]]
BUCKET_BYTES = 1 << 28
"""Default bytes of gradients per exchange, which needs memory for three more copies of them."""


@outside_graphs
def all_reduce(x: Tensor, mesh: MeshLike = None) -> Tensor:
    """Return the sum of the ranks' tensors on every rank, by a reduce-scatter and an all-gather.

    Args:
        x: Tensor of equal shape and dtype on all ranks. 16-bit floats are added in float32, integers in int64. An
            integer sum beyond the range of its dtype wraps, as in torch; that of bools is True if one of them is.
        mesh: The ranks, as in `attention`.

    Returns:
        A tensor with the shape and dtype of `x`.

    Raises:
        InputError: If x is not a dense tensor, or requires gradients (their meaning would depend on the loss).
        MismatchError: If ranks differ in shape or dtype, or make another call; on every rank, if the transport can
            compare them.
        CommunicationError: If the communication fails otherwise.
    """
    mesh = as_mesh(mesh)
    try:
        check_tensor("x", x)
        if x.requires_grad and torch.is_grad_enabled():
            next_step = "detach the tensor; leave each rank's loss a part of the sum, and call all_reduce_gradients"
            raise InputError("all_reduce has no gradient", got="a tensor that requires gradients", next_step=next_step)
        transport = mesh.transport(x.device.type)
    except Exception as error:
        broadcast_error(mesh, error, x)
        raise
    dtype = str(x.dtype).removeprefix("torch.")
    agree(transport, call_signature({"pass": "all_reduce", "dtype": dtype, "shape": str(tuple(x.shape))}))
    with transport.between_passes():
        return _sum(x, mesh)


def _sum(x: Tensor, mesh: Mesh) -> Tensor:
    """Return the sum over ranks, which must have tensors of one shape and dtype."""
    if mesh.size == 1:
        return x.clone()
    transport = mesh.transport(x.device.type)
    part_size = -(-x.numel() // mesh.size)
    padded = x.new_zeros(mesh.size, part_size)  # one part per rank
    padded.view(-1)[: x.numel()] = x.reshape(-1)
    received = torch.empty_like(padded)
    parts = [*padded.view(torch.uint8)]
    transport.all_to_all(parts, [*received.view(torch.uint8)], "summing gradients")
    total = torch.zeros(part_size, dtype=_sum_dtype(x.dtype), device=x.device)
    for part in received:  # torch adds neither most unsigned dtypes nor those of 8 bits to wider ones
        total += part if x.is_floating_point() and x.itemsize > 1 else part.to(total.dtype)
    transport.all_gather(total.to(x.dtype).view(torch.uint8), parts, "gathering gradients")
    return padded.view(-1)[: x.numel()].view(x.shape)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums. Integers use int64: float32 is inexact above 2**24."""
    if dtype.is_complex:
        return torch.complex128 if dtype is torch.complex128 else torch.complex64
    return accumulation_dtype(dtype) if dtype.is_floating_point else torch.int64


@outside_graphs
def all_reduce_gradients(
    parameters: Iterable[Tensor], mesh: MeshLike = None, *, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Sum every parameter's gradient over the ranks, in place.

    Call it once per step: after the last backward pass of the last micro-batch, and before gradients are unscaled,
    clipped and used.

    All ranks must pass the same parameters. A parameter without a gradient counts as zeros if another rank has one;
    otherwise it stays without one, so that optimizers skip it. A parameter that is passed twice (tied weights) is
    summed once. Of a parameter that is sharded over other ranks (FSDP2 over data), this rank's shard is summed.

    Args:
        parameters: Parameters as an optimizer takes them: ``model.parameters()``.
        mesh: The ranks that share the sequence, as in `attention`.
        bucket_bytes: Largest number of bytes of gradients per exchange, equal on all ranks. A larger gradient has its
            own exchange. Default: 256 MiB.

    Raises:
        InputError: If `parameters` are not tensors, are sharded over these ranks (FSDP has reduced their gradients
            already), or have sparse gradients. If the gradients are sums already, because of a second call. If they are
            sums to which a backward pass added, as after a call per micro-batch; without `parallelize` one parameter
            of the last call is watched, and none under FSDP2. If those of a parallelized model were changed in place
            since the backward pass, for example clipped. If they belong to a model that was parallelized with
            averaged_gradients=True, or to one whose gradients DDP has averaged over these ranks.
        MismatchError: If ranks have different parameters, or make another call; on every rank, if the transport can
            compare them. The first call also compares the values of parameters. Gradients are unchanged then.
        CommunicationError: If the communication fails otherwise.
    """
    mesh = as_mesh(mesh)
    unique, missing = list[Tensor](), set[Tensor]()
    try:
        unique = _unique(parameters)
        bucket_bytes = size("bucket_bytes", bucket_bytes)
        groups = _group(unique, mesh, missing)
        _compare(groups, unique, mesh, bucket_bytes)
    except Exception as error:
        for parameter in missing:
            parameter.grad = None
        broadcast_error(mesh, error, *unique[:1])
        raise
    for (_, device), members in groups.items():
        with mesh.transport(device.type).between_passes():
            for bucket in _buckets(members, bucket_bytes):
                _sum_bucket(bucket, missing, mesh)
        mesh.gradient_records.summed.update(
            (p.grad, versions(p)) for p in members if p.grad is not None and mesh.size > 1
        )
    _watch_smallest([p for p in unique if p.requires_grad and p.grad is not None], mesh)


def _group(parameters: list[Tensor], mesh: Mesh, missing: set[Tensor]) -> Groups:
    """Return the parameters by dtype and device. Those without a gradient get zeros, and are added to `missing`."""
    groups: Groups = {}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    _check_not_averaged(trained, mesh.gradient_records)
    for parameter in trained:
        _check_unsharded(parameter, mesh)
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
            missing.add(parameter)
        gradient = _gradient(parameter)
        if 0 in gradient.stride():  # expanded, as autograd.grad returns that of a sum; sums are written in place
            parameter.grad = parameter.grad.clone(memory_format=torch.contiguous_format)
            gradient = _gradient(parameter)
        _check_is_part(parameter, tuple(gradient.shape), mesh.gradient_records)
        groups.setdefault((gradient.dtype, gradient.device), []).append(parameter)
    return groups


def _check_not_averaged(parameters: list[Tensor], records: GradientRecords) -> None:
    """Raise `InputError` if gradients are, or will be, averages over the ranks."""
    found = set(map(id, parameters))
    if not found.isdisjoint(_parameters_of(records.averaged)):
        raise InputError(
            "these gradients are multiplied by the number of ranks, so that their average is one device's gradient",
            got="all_reduce_gradients after parallelize(averaged_gradients=True)",
            next_step="leave out averaged_gradients=True, or do not call all_reduce_gradients under DDP and FSDP2",
        )
    if not found.isdisjoint(_parameters_of(records.averaged_by_ddp)):
        raise InputError(
            "DDP already averages these gradients over the ranks that share the sequence",
            got="all_reduce_gradients after a backward pass of DDP",
            next_step="do not call all_reduce_gradients, or run the backward pass and its call in no_sync() of DDP",
        )


def _parameters_of(modules: Iterable[Module]) -> Iterator[int]:
    """Yield the identities of the parameters of modules."""
    return (id(parameter) for module in modules for parameter in module.parameters())


def _check_is_part(parameter: Tensor, shape: tuple[int, ...], records: GradientRecords) -> None:
    """Raise `InputError` unless a gradient is this rank's part of a sum, as its backward passes left it.

    `shape`: shape of this rank's shard, for the error.
    """
    if records.summed.get(parameter.grad) == versions(parameter):
        raise InputError(
            "the gradients are sums over the ranks already; a second call would multiply them by the ranks",
            got=f"a gradient of shape {shape} that did not change since the last call",
            next_step="call all_reduce_gradients once per step, and zero_grad() after the optimizer's step",
        )
    added, was_zeroed = records.added.get(parameter.grad, (None, None))
    if added == versions(parameter) and not was_zeroed:
        raise InputError(
            "a backward pass added to gradients that are sums over the ranks already; a second sum would add the "
            "first once per rank",
            got=f"a gradient of shape {shape} that was summed before the last backward pass",
            next_step="call all_reduce_gradients once per step, after the last micro-batch, and zero_grad() after "
            "the optimizer's step",
        )
    if records.accumulated.get(parameter.grad, versions(parameter)) != versions(parameter):
        raise InputError(
            "gradients were changed between the backward pass and their sum over the ranks; a norm by which they "
            "were clipped is that of one rank's part",
            got=f"a gradient of shape {shape} that was changed in place",
            next_step="call all_reduce_gradients right after the last backward pass; clip and unscale afterwards",
        )


def _compare(groups: Groups, parameters: list[Tensor], mesh: Mesh, bucket_bytes: int) -> None:
    """Check that all ranks sum the same tensors: buffers of other sizes would end a process, or leave it waiting.

    The first call also compares the values of parameters: different models would train with the gradients of all.
    """
    transport = mesh.transport(next(iter(groups))[1].type) if groups else mesh.connected()
    if transport is None:
        return
    shapes = [(str(dtype), [tuple(_gradient(p).shape) for p in members]) for (dtype, _), members in groups.items()]
    numbers = sum(_gradient(p).numel() for members in groups.values() for p in members)
    named = hashed_value(f"{sum(map(len, groups.values())):,} tensors of {numbers:,} numbers", shapes)
    facts: Facts = {"pass": "all_reduce_gradients", "parameters": named, "bucket_bytes": str(bucket_bytes)}
    agree(transport, call_signature(facts))
    values = "values of the parameters"
    compared = call_signature({**facts, values: "compared"}).digest
    if transport.size > 1 and compared not in transport.agreed:
        agree(transport, call_signature({**facts, values: _checksum(parameters)}))
        transport.agreed.add(compared)


def _checksum(parameters: list[Tensor]) -> HashedValue:
    """Return a checksum of the bits of all parameters. It is equal on any device, and reads them once."""
    sums: dict[torch.device, list[Tensor]] = {}
    for x in map(_local, parameters):
        bits = INTEGERS.get(x.dtype.itemsize)
        if bits is not None and not x.is_meta and x.layout is torch.strided:
            sums.setdefault(x.device, []).append(x.detach().view(bits).sum(dtype=torch.int64))
    value = hashed_value("", [torch.stack(on_device).tolist() for on_device in sums.values()])
    return value._replace(name=f"checksum {value.digest[:8]}")


def _unique(parameters: Any) -> list[Tensor]:
    """Return each parameter once. Raise for a single tensor: iteration would yield its rows, without gradients."""
    advice = "pass model.parameters(), or a list of tensors"
    if isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        raise InputError("parameters must be an iterable of tensors", got=type(parameters).__name__, next_step=advice)
    listed = list(parameters)
    if wrong := [one for one in listed if not isinstance(one, Tensor)]:
        raise InputError("not all parameters are tensors", got=shown(wrong[0]), next_step=advice)
    return list(dict.fromkeys(listed))


def _sum_bucket(bucket: list[Tensor], missing: set[Tensor], mesh: Mesh) -> None:
    """Sum the gradients of some parameters, and the number of ranks that have one. This rank has no `missing` ones."""
    gradients = [_gradient(parameter) for parameter in bucket]
    has_gradient = gradients[0].new_ones(len(bucket))
    for number, parameter in enumerate(bucket):
        if parameter in missing:
            has_gradient[number].zero_()  # `has_gradient[number] = 0` would copy a number from the host and wait
    total = _sum(torch.cat([*(g.reshape(-1) for g in gradients), has_gradient]), mesh)
    *sums, counts = total.split([*(g.numel() for g in gradients), len(bucket)])
    for gradient, part in zip(gradients, sums, strict=True):
        gradient.copy_(part.view(gradient.shape))
    if missing.isdisjoint(bucket):
        return  # without reading `counts`, which would wait for the device
    for parameter, count in zip(bucket, counts.tolist(), strict=True):
        if not count:
            parameter.grad = None


def _buckets(parameters: list[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield lists of parameters, in order, whose gradients fit in a bucket. A larger gradient has its own list."""
    bucket, total = list[Tensor](), 0
    for parameter in parameters:
        nbytes = _gradient(parameter).nbytes
        if bucket and total + nbytes > bucket_bytes:
            yield bucket
            bucket, total = [], 0
        bucket.append(parameter)
        total += nbytes
    yield bucket


def _gradient(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter's gradient."""
    gradient = parameter.grad
    assert gradient is not None, "`_group` created missing ones"
    if gradient.layout is not torch.strided:
        next_step = "create the module without sparse=True"
        raise InputError("sparse gradients are not supported", got=gradient.layout, next_step=next_step)
    return _local(gradient)


def watch_additions(parameter: Tensor, mesh: Mesh) -> list[Any]:
    """Record in `GradientRecords.added` that a backward pass added to a sum over ranks. Return handles of the hooks.

    The version of the gradient is then one more than the version of the sum. `p.grad.data.zero_()` does not change the
    version, so another hook looks at the values of the sum before the addition, without waiting for the device.
    """
    records, is_zero = mesh.gradient_records, Tensor()  # hooks keep no mesh: it has connections

    @outside_graphs
    def before_addition(_: Tensor) -> None:
        nonlocal is_zero
        if (gradient := parameter.grad) is None:
            return
        known, was_zeroed = records.added.get(gradient, (None, None))
        if (now := versions(parameter)) in (records.summed.get(gradient), known):
            is_zero = (gradient.detach() == 0).all()
            if now == known:
                is_zero = is_zero | was_zeroed

    @outside_graphs
    def record(parameter: Tensor) -> None:
        if (gradient := parameter.grad) is None:
            return
        after = versions(parameter)
        before = tuple(version - 1 for version in after)
        if before in (records.summed.get(gradient), records.added.get(gradient, (None, None))[0]):
            records.added[gradient] = after, is_zero

    return [parameter.register_hook(before_addition), parameter.register_post_accumulate_grad_hook(record)]


def _watch_smallest(summed: list[Tensor], mesh: Mesh) -> None:
    """Watch the smallest of the parameters that were summed, until the next call. Looking at its values is fast.

    FSDP2 adds to gradients after the backward pass. torch warns if a tensor with hooks is saved, but not a parameter.
    """
    for hook in mesh.gradient_records.hooks:
        hook.remove()
    mesh.gradient_records.hooks.clear()
    # All values of an empty one are always zero, as if the caller had zeroed the sums.
    watchable = [p for p in summed if isinstance(p, Parameter) and not isinstance(p, DTensor) and p.numel()]
    if mesh.size > 1 and watchable:
        mesh.gradient_records.hooks.extend(watch_additions(min(watchable, key=Tensor.numel), mesh))


def versions(parameter: Tensor) -> tuple[int, int]:
    """Return numbers that change with the gradient: FSDP2 adds to the shard of a DTensor, which counts separately."""
    assert parameter.grad is not None, "`_group` created missing ones"
    return parameter.grad._version, _local(parameter.grad)._version


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _check_unsharded(parameter: Tensor, mesh: Mesh) -> None:
    if mesh.group is None or not isinstance(parameter, DTensor):
        return
    ranks = set(parameter.device_mesh.mesh.flatten().tolist())
    if len(ranks.intersection(mesh.global_ranks)) > 1:
        what = "FSDP already sums these gradients over the ranks that share the sequence"
        got = f"a parameter that is sharded over ranks {sorted(ranks)}"
        raise InputError(what, got=got, next_step="do not call all_reduce_gradients")
