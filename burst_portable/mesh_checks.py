"""What a mesh is made of, as users pass it: checked, or refused."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from burst_portable.backends.registry import known, runnable
from burst_portable.config import Config, from_environment
from burst_portable.errors import InputError, explain, shown, unknown_name
from burst_portable.values import as_int, check_divides, size


def checked_rank(rank: object, ranks: object) -> tuple[int, int]:
    """A rank and how many there are."""
    number, count = as_int(rank), size("the size of a mesh", ranks)
    if number is None or not 0 <= number < count:
        raise InputError(explain("no such rank", got=shown(rank), allowed=f"0 to {count - 1}"))
    return number, count


def checked_inner(inner: object, ranks: int) -> int | None:
    """Ranks a node, which divide all; None for a single node."""
    if inner is None:
        return None
    number = size("inner", inner)
    check_divides(number, ranks)
    return number


def checked_backend(name: object) -> str:
    """The name of a backend that can run here, or "auto"."""
    if not isinstance(name, str):
        raise unknown_name("backend", name, ("auto", *known()))
    if name != "auto":
        runnable(name)
    return name


def checked_config(config: object) -> Config:
    """The settings; None for those of the environment."""
    if config is None:
        return from_environment()
    if not isinstance(config, Config):
        raise InputError(explain("config is not a Config", got=shown(config), allowed="burst_portable.config.Config"))
    return config


def place_in(group: Any) -> tuple[int, int]:
    """(rank, ranks) of this process in a process group."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to those that it leaves out
        raise _no_member()
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(explain("this is not a process group", got=shown(group), next_step="dist.new_group makes one"))
    try:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    except ValueError as error:  # made by hand, or destroyed
        raise InputError(
            explain(
                "torch.distributed does not know this process group", got=error, next_step="dist.new_group makes one"
            )
        ) from error
    if rank < 0:
        raise _no_member()
    return rank, ranks


def _no_member() -> InputError:
    return InputError(
        explain(
            "this rank is not a member of the group",
            got=f"global rank {dist.get_rank()}",
            next_step="let the members alone make the call",
        )
    )


def axis_group(device_mesh: Any, axis: object) -> Any:
    """The process group of one axis of a DeviceMesh."""
    if not hasattr(device_mesh, "get_group"):
        raise InputError(
            explain("this is not a DeviceMesh", got=shown(device_mesh), next_step="init_device_mesh makes one")
        )
    names, axes = device_mesh.mesh_dim_names or (), device_mesh.ndim
    told = f"a DeviceMesh of {axes} axes ({', '.join(names) or 'without names'})"
    if axis is None and axes > 1:
        example = f"mesh[{names[-1]!r}]" if names else "Mesh.from_device_mesh(mesh, axis)"
        raise InputError(
            explain("the sequence lies along one axis, and none is named", got=told, next_step=f"pass one: {example}")
        )
    if isinstance(axis, str):
        if axis not in names:
            raise unknown_name("axis of the DeviceMesh", axis, names)
        return device_mesh.get_group(axis)
    number = 0 if axis is None else as_int(axis)
    if number is None or not 0 <= number < axes:
        raise InputError(explain("no such axis", got=shown(axis), allowed=f"one of {told}"))
    return device_mesh.get_group(number)
