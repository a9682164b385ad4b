"""Test which batch norms count each sequence once. tests/integration/test_lightning.py runs them under FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import sentinel

import pytest
import torch
import torch.distributed as dist
from torch import nn

from burst_portable.integrations.batch_norms import synchronize_sequences
from tests.support.fork_server import run_program


def test_synchronize_sequences_keeps_groups_of_the_program():
    usual, own = nn.SyncBatchNorm(2), nn.SyncBatchNorm(2, process_group=sentinel.own)
    everywhere = nn.SyncBatchNorm(2, process_group=dist.group.WORLD)
    module = nn.Sequential(usual, nn.BatchNorm1d(2), nn.Sequential(own, everywhere))
    group: Any = sentinel.sequences
    assert synchronize_sequences(module, group) == [usual, everywhere]
    assert [part.process_group for part in (usual, own, everywhere)] == [group, sentinel.own, group]


@pytest.mark.parametrize("ranks", [2, 4])
def test_accelerate_counts_rows_of_each_sequence_once(tmp_path: Path, ranks: int):
    """Compare with a batch norm on one device in float64. A group of all ranks counts each row twice."""
    done = run_program("tests.support.batch_norm_ranks", tmp_path, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = 18 * ranks // 2
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        expected = found["expected"]
        assert found["trainers"] == [ranks // 2, ranks, ranks]
        torch.testing.assert_close(found["shared"], expected, rtol=1e-9, atol=1e-12)
        once = (expected["running_var"] - 0.9) * (1 - 1 / rows)
        expected["running_var"] = 0.9 + once / (1 - 1 / (2 * rows))
        torch.testing.assert_close(found["own group"], expected, rtol=1e-9, atol=1e-12)
