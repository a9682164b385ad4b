"""Test which batch norms count each sequence once. tests/integration/test_lightning.py runs them under FSDP2."""

from __future__ import annotations

from typing import Any
from unittest.mock import sentinel

import torch.distributed as dist
from torch import nn

from burst_portable.integrations.batch_norms import synchronize_sequences


def test_synchronize_sequences_keeps_groups_of_the_program():
    usual, own = nn.SyncBatchNorm(2), nn.SyncBatchNorm(2, process_group=sentinel.own)
    everywhere = nn.SyncBatchNorm(2, process_group=dist.group.WORLD)
    module = nn.Sequential(usual, nn.BatchNorm1d(2), nn.Sequential(own, everywhere))
    group: Any = sentinel.sequences
    assert synchronize_sequences(module, group) == [usual, everywhere]
    assert [part.process_group for part in (usual, own, everywhere)] == [group, sentinel.own, group]
