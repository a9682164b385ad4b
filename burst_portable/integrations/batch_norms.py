"""Let synchronized batch normalization count each sequence once.

`torch.nn.SyncBatchNorm` adds the counts of all ranks. The ranks of a sequence have the same rows, so the mean is right,
but the running variance is divided by a count that contains each row once per rank.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


def synchronize_sequences(module: nn.Module, sequences: dist.ProcessGroup) -> list[nn.SyncBatchNorm]:
    """Let synchronized batch norms within a module use one rank of each sequence, and return them.

    Those for which the program set another group than that of all ranks stay as they are.

    Args:
        module: The module.
        sequences: The group of ranks that have the same part of different sequences.
    """
    found = [part for part in module.modules() if isinstance(part, nn.SyncBatchNorm)]
    changed = [part for part in found if part.process_group in (None, dist.group.WORLD)]
    for part in changed:
        part.process_group = sequences
    return changed
