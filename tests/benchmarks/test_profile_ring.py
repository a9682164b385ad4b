"""Test the script that compares the profiler with known durations and with the tracer, on CPUs and tiny sizes."""

from __future__ import annotations

import json
import time

import pytest
import torch

from benchmarks.known_lengths import Device, beside
from benchmarks.profile_ring import COMPARED
from tests.support.fork_server import run_program

SLACK = 0.01  # seconds by which this process may pause between two marks


class Timed(Device):
    """Record how long kernels and copies took. On a busy machine, a sleep takes longer than requested."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.kernels: list[tuple[float, float]] = []
        self.over = 0.0  # time at which the rank saw the end of the copy

    def kernel(self, amount):
        began = time.perf_counter()
        super().kernel(amount)
        self.kernels.append((began, time.perf_counter()))

    def copy(self, amount):
        wait = super().copy(amount)

        def waited():
            wait()
            self.over = time.perf_counter()

        return waited


@pytest.mark.alone
@pytest.mark.parametrize(("kernel", "copy"), [(30, 90), (60, 20)])
def test_profile_ring_measures_known_kernel_and_copy(kernel, copy):
    device = Timed()
    found = beside(device, kernel, copy)
    (start, end), (_, last) = device.kernels
    assert found["compute"] == pytest.approx(sum(stop - begin for begin, stop in device.kernels), abs=SLACK)
    assert found["exposed_comm"] == pytest.approx(device.over - end, abs=SLACK)
    assert found["span"] == pytest.approx(last - start, abs=SLACK)
    if copy > kernel:
        assert found["overlap"] == pytest.approx(end - start, abs=SLACK)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["ring", "cost"])
def test_profile_ring_runs_on_two_cpus(tmp_path, what):
    told = ["--what", what, "--rows", "tiny", "--rounds", "2", "--steps", "2", "--out", str(tmp_path / "found.json")]
    done = run_program("tests.support.ranks_of", 2, "benchmarks.profile_ring", *told, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["ranks"] == 2
    (run,) = found["runs"]
    if what == "cost":
        assert run["share"].keys() == run["seconds"].keys() == {"basic", "standard", "kernels"}
        assert [len(times) for one in run["seconds"].values() for times in one.values()] == [2] * 6
        return
    assert not run["on_device"]
    for rank in run["ranks"]:
        for name in COMPARED:
            assert rank["marks"][name] > 0
        assert 0 < rank["trace"]["compute"] <= rank["marks"]["compute"], "operators lie in the kernels that were marked"
        assert rank["trace"]["span"] <= rank["marks"]["span"]
