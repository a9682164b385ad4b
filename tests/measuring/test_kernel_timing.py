"""Test `time-kernels`: only kernels with right results have times, and `auto` reads the file that it writes."""

from __future__ import annotations

import json

import pytest
import torch

from burst_portable.backends.cpu import CpuBackend
from burst_portable.backends.selection import choose_kernel, kernels_of, load
from burst_portable.cli import main
from burst_portable.measuring.kernel_timing import time_kernels, timed_call
from tests.support.planted_bugs import KernelWrapper, SwappedGradients, WrongScale

CPU = torch.device("cpu")


class Named(KernelWrapper):
    """Rename a kernel."""

    def __init__(self, kernel, name):
        super().__init__(kernel)
        self.name = name


class Fails(Named):
    def attend(self, *args, **options):
        raise RuntimeError("out of beads")


def backend_with(*kernels):
    class Planted(CpuBackend):
        def kernels(self):
            return (*kernels, *super().kernels())

    return Planted()


@pytest.mark.parametrize("kind", ["full", "causal", "documents"])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_kernels_have_positive_times(kind, kv_heads):
    call = timed_call(kind, 67, 4, kv_heads, 16, "float32", "cpu", v_head_dim=8)
    (row,) = time_kernels(load("cpu"), [(kind, call)], CPU)
    assert set(row.seconds) | set(row.reasons) == {kernel.name for kernel in kernels_of(load("cpu"))}
    assert "reference" in row.seconds
    assert all(seconds > 0 for passes in row.seconds.values() for seconds in passes.values())
    assert all(set(passes) == {"forward", "backward"} for passes in row.seconds.values())


@pytest.mark.parametrize("bug", [WrongScale, SwappedGradients])
def test_wrong_kernel_has_no_time(bug):
    planted = bug(Named(CpuBackend().kernels()[-1], "planted"))
    call = timed_call("causal", 67, 2, 2, 16, "float32", "cpu")
    (row,) = time_kernels(backend_with(planted), [("causal", call)], CPU)
    assert set(row.seconds) == {"cpu_flash", "reference"}
    assert row.reasons["planted"].startswith("its results differ from those of reference, by ")


def test_failing_kernel_does_not_end_the_others():
    planted = Fails(CpuBackend().kernels()[-1], "planted")
    calls = [("full", timed_call("full", 33, 2, 2, 8, "float32", "cpu"))]
    (row,) = time_kernels(backend_with(planted), calls, CPU)
    assert set(row.seconds) == {"cpu_flash", "reference"}
    assert row.reasons["planted"] == "failed: RuntimeError: out of beads"


def test_named_kernels_only():
    calls = [("full", timed_call("full", 33, 2, 2, 8, "float32", "cpu"))]
    (row,) = time_kernels(load("cpu"), calls, CPU, ["reference"])
    assert set(row.seconds) == {"reference"}


def test_command_writes_file_that_auto_reads(tmp_path, capsys):
    path = tmp_path / "times.json"
    options = ["--head-dim", "16", "--heads", "2", "--seq-len", "64", "--mask", "causal", "--json", str(path)]
    assert main(["time-kernels", *options]) == 0
    assert f"BURST_KERNEL_TIMES={path}" in " ".join(capsys.readouterr().out.split())
    (row,) = json.loads(path.read_text())["rows"]
    fastest = min(row["seconds"], key=row["seconds"].__getitem__)
    call = timed_call("causal", 64, 2, 2, 16, "float32", "cpu")
    kernel, why = choose_kernel(load("cpu"), call, times=str(path))
    assert kernel.name == fastest
    assert why.startswith("the fastest of 2 with 64 tokens on the CPU")


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--kernel", "hopper"], "hopper"),
        (["--mask", "window"], "window"),
        (["--seq-len", "1g"], "not a number of tokens"),
        (["--head-dim", "0"], "--head-dim"),
        (["--heads", "3", "--kv-heads", "2"], "multiple"),
    ],
)
def test_command_rejects_options(options, told, capsys):
    assert main(["time-kernels", *options]) != 0
    assert told in capsys.readouterr().err
