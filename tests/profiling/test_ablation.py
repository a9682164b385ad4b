"""A step with communication off, and with computing off: each takes away what it should."""

from __future__ import annotations

import time

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.comm.local import LocalTransport
from burst_portable.profiling.ablation import ablate

DELAY = 0.03


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("slow", ["kernel", "transport"])
def test_what_is_slow_goes_away_with_its_half(slow, strategy, monkeypatch):
    owner, name = (CpuFlashKernel, "attend") if slow == "kernel" else (LocalTransport, "post")
    fast = getattr(owner, name)

    def late(self, *arguments, **options):
        label = str(arguments[-1])
        if slow == "kernel" or label.startswith(("forward", "to heads")):
            time.sleep(DELAY)
        return fast(self, *arguments, **options)

    monkeypatch.setattr(owner, name, late)

    def work(mesh):
        q, k, v = (torch.ones(1, 16, 4, 8) for _ in range(3))

        def step():
            bp.attention(q, k, v, mesh=mesh, strategy=strategy, mask="full")

        found = ablate(step, mesh=mesh, repeat=2)
        after = bp.attention(q, k, v, mesh=mesh, strategy=strategy, mask="full")
        return found, after

    for found, after in bp.run_local(2, work):
        assert found.whole >= DELAY
        gone = found.without_computing if slow == "kernel" else found.without_communication
        assert gone < found.whole - 0.7 * DELAY
        if slow == "transport":
            assert found.exposed_communication >= 0.7 * DELAY
        assert torch.isfinite(after).all(), "nothing stays switched off"


def test_it_must_run():
    with pytest.raises(bp.BurstError, match="at least once"):
        ablate(lambda: None, repeat=0)
