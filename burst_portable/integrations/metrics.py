"""Let metrics of torchmetrics count each sequence once under Lightning.

They gather their states from all ranks. The ranks of a sequence have the same states, so that sums and lists would
contain each sequence once per rank.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from burst_portable.integrations.versions import importing

with importing("torchmetrics", "burst-portable[lightning]"):
    from torchmetrics import Metric
    from torchmetrics.utilities.distributed import gather_all_tensors


def gather_from_sequences(module: nn.Module, sequences: dist.ProcessGroup) -> list[Any]:
    """Let the metrics within a module gather from one rank of each sequence, and return them.

    Metrics whose program set a `process_group` or a `dist_sync_fn` stay as they are. A copy of a metric gathers alike.

    Args:
        module: The LightningModule.
        sequences: The group of ranks that have the same part of different sequences.
    """

    def gather(state: Tensor, group: Any = None) -> list[Tensor]:
        found: list[Tensor] = gather_all_tensors(state, sequences if group is None else group)
        return found

    metrics = [part for part in module.modules() if isinstance(part, Metric)]
    changed = [metric for metric in metrics if metric.dist_sync_fn is None and metric.process_group is None]
    for metric in changed:
        metric.dist_sync_fn = gather
    return changed
