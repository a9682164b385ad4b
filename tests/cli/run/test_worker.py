"""Test a rank's process: which device it takes, and how it reports why it failed."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from burst_portable.cli.run.worker import device_of
from burst_portable.errors import InputError


def test_device_of_rejects_more_ranks_than_devices(monkeypatch):
    used = []
    for count, local_rank, device in ((0, 3, "cpu"), (1, 3, "cpu"), (4, 3, "cpu:3")):
        module = SimpleNamespace(device_count=lambda count=count: count, set_device=used.append)
        monkeypatch.setattr(torch, "get_device_module", lambda device_type, module=module: module)
        assert str(device_of("cpu", local_rank)) == device
    assert used == [3]
    with pytest.raises(InputError, match="local rank 4; allowed: 0 to 3"):
        device_of("cpu", 4)


def test_failed_worker_prints_reason_last(tmp_path):
    """The thread that watches the parent's pipe must not abort the process."""
    command = [sys.executable, "-m", "burst_portable.cli.run.worker", str(tmp_path / "no job"), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as rank:
        assert rank.wait(60) == 1
        said = rank.stderr.read().decode().splitlines()
    assert "FileNotFoundError" in said[-1], said
