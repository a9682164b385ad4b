"""Let synchronized batch normalization count each sequence once.

`torch.nn.SyncBatchNorm` adds the counts of all ranks. The ranks of a sequence have the same rows, so the mean is right,
but the running variance is divided by a count that contains each row once per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn

from burst_portable.utils.torch_modes import never_compiled


def synchronize_sequences(module: nn.Module, sequences: dist.ProcessGroup) -> list[nn.SyncBatchNorm]:
    """Let synchronized batch norms within a module use one rank of each sequence, and return them.

    Those for which the program set another group than that of all ranks stay as they are.

    Args:
        module: The module.
        sequences: The group of ranks that have the same part of different sequences.
    """
    changed = batch_norms(module)
    for part in changed:
        part.process_group = sequences
    return changed


def synchronize_calls(module: nn.Module, sequences: dist.ProcessGroup, is_sharded: Callable[[], bool]) -> None:
    """Let the `batch_norms` of a module use one rank of each sequence in calls, while the model is sharded.

    Hooks set the group for a call. Between calls the module can be copied, for example for an average of its weights,
    and after `undo` the norms use all ranks again.

    Args:
        module: The module.
        sequences: The group of ranks that have the same part of different sequences.
        is_sharded: Returns whether the ranks of a sequence have the same rows in this call.
    """

    @never_compiled("hooks are not graphs")
    def enter(part: Any, inputs: Any) -> None:
        if is_sharded() and _uses_all_ranks(part):
            part.process_group = sequences

    @never_compiled("hooks are not graphs")
    def leave(part: Any, inputs: Any, output: Any) -> None:
        if part.process_group is sequences:
            part.process_group = None

    for part in batch_norms(module):
        part.register_forward_pre_hook(enter)
        part.register_forward_hook(leave, always_call=True)


def batch_norms(module: nn.Module) -> list[nn.SyncBatchNorm]:
    """Return the synchronized batch norms within a module for which the program set no group but that of all ranks."""
    return [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm) and _uses_all_ranks(part)]


def _uses_all_ranks(part: nn.SyncBatchNorm) -> bool:
    return part.process_group in (None, dist.group.WORLD)
