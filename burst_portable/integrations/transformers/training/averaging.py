"""Find out whether DDP or FSDP2 averages gradients over the ranks of a sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from burst_portable.errors import InputError
from burst_portable.mesh import Mesh


def check_averaging(model: torch.nn.Module, mesh: Mesh, *, averaged: bool) -> None:
    """Raise `InputError` if DDP or FSDP2 averages gradients over the mesh, and `averaged_gradients` is False.

    Each rank has its part of the gradients, so their average is one device's gradient divided by the number of ranks.
    """
    if averaged or mesh.size == 1 or not torch.is_grad_enabled():
        return
    if set(mesh.global_ranks) <= averaging_ranks(model):
        raise InputError(
            "DDP or FSDP2 averages the gradients of full batches over the ranks of the sequence, which must be summed",
            got="averaged_gradients=False",
            next_step="pass averaged_gradients=True to parallelize",
        )


def averaging_ranks(model: torch.nn.Module) -> set[int]:
    """Return the global ranks over which the running DDP, or FSDP2 in a part of the model, averages gradients."""
    if (running := DistributedDataParallel._get_active_ddp_module()) is not None:
        return set(dist.get_process_group_ranks(running.process_group))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP2 replaces parameters during a call, so that they no longer show their mesh.
            for group in groups_of(module):
                if group.gradient_divide_factor is None:
                    return set(group.mesh_info.mesh.mesh.flatten().tolist())
    return set()


def groups_of(module: FSDPModule) -> list[Any]:
    """Return FSDP2's groups of the parameters of a module."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # older releases of torch have one group
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]
