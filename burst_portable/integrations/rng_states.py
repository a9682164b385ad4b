"""Give the ranks of a sequence equal states of their random number generators.

Frameworks save one state per rank in a checkpoint. On another number of ranks, some find none, or that of another
sequence. The ranks of a sequence would then draw different masks, dropout or attention seeds.
"""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist

from burst_portable.integrations.versions import importing
from burst_portable.mesh import Mesh

with importing("numpy", "burst-portable[transformers]"):
    import numpy as np


def take_state_of_first_rank(mesh: Mesh, device: torch.device) -> None:
    """Set the generators of Python, numpy and torch on each rank to the states of the first rank of its sequence.

    Args:
        mesh: The ranks of the sequence.
        device: This rank's device, whose generator is set as well.
    """
    if mesh.size == 1:
        return
    module: Any = torch.get_device_module(device)
    has_own = hasattr(module, "get_rng_state")  # the host has torch's default generator only
    of_device = module.get_rng_state(device) if has_own else None
    states: list[Any] = [random.getstate(), np.random.get_state(), torch.get_rng_state(), of_device]
    dist.broadcast_object_list(states, mesh.global_ranks[0], group=mesh.group)
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    if has_own:
        module.set_rng_state(states[3], device)
