"""Test how energy and time of calls are counted, with sensors that count calls."""

from __future__ import annotations

import json
import statistics
import sys

import pytest
import torch

from benchmarks import energy
from benchmarks.energy import Measured
from burst_portable.errors import BackendUnavailableError


class CountingMeter:
    """Sensors of a device on which each call takes a fixed energy."""

    def __init__(self, **more):
        self.readings = {"joules": 100.0, "megahertz": 1500.0, **more}

    def call(self, joules):
        self.readings["joules"] += joules

    def read(self):
        return dict(self.readings)

    def close(self):
        pass


def test_repeat_divides_energy_by_counted_calls():
    meter = CountingMeter()
    waits = []
    spent, joules, megahertz = energy.repeat(lambda: meter.call(0.25), meter, 0.05, lambda: waits.append(1))
    assert joules == 0.25  # calls before the first reading do not count
    assert megahertz == 1500
    calls = (meter.readings["joules"] - 100) / 0.25 - 2
    assert 0.05 <= spent * calls < 1
    assert len(waits) >= 3


def test_measure_keeps_one_number_per_round():
    meter = CountingMeter()
    calls = [(Measured("a", "x", "forward", 10), lambda: meter.call(1.0)), (Measured("b", "y", "", 20), lambda: None)]
    energy.measure(calls, meter, 0.01, 3, lambda: None)
    assert [one.joules for one, _ in calls] == [[1.0] * 3, [0.0] * 3]
    assert all(len(one.seconds) == len(one.megahertz) == 3 for one, _ in calls)


def test_watts_and_energy_of_work_are_medians():
    one = Measured("a", "x", "forward", 4 * 10**12, [0.010, 0.008, 0.020], [6.0, 5.6, 14.0], [1500.0] * 3)
    assert one.watts == pytest.approx(700)
    assert one.rate == pytest.approx(400e12)
    assert one.joules_of_work == pytest.approx(6.0 / 4e12)


@pytest.mark.parametrize("missing", ["joules", "megahertz"])
def test_meter_without_a_sensor_is_refused_by_name(missing, monkeypatch):
    meter = CountingMeter()
    del meter.readings[missing]
    monkeypatch.setattr(energy, "for_device", lambda kind: type("Backend", (), {"meter": lambda self, index: meter})())
    with pytest.raises(BackendUnavailableError, match=missing):
        energy.open_meter(torch.device("cuda", 0))


def test_rows_are_checked_measured_and_written(tmp_path, monkeypatch, capsys):
    meter, out = CountingMeter(), tmp_path / "energy.json"

    def calls_of_row(name, providers):
        made = [
            Measured(name, provider, which, 8 * 10**9) for provider in providers for which in ("forward", "backward")
        ]
        return [(one, lambda: meter.call(0.5)) for one in made]

    for name, value in {
        "accelerator": lambda: torch.device("cpu"),
        "open_meter": lambda device: meter,
        "calls_of_torch": lambda device: [(Measured("copy", "torch", "", 2**31), lambda: meter.call(0.1))],
        "calls_of_row": calls_of_row,
    }.items():
        monkeypatch.setattr(energy, name, value)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    options = ["--rows", "window", "--providers", "cudnn", "--seconds", "0.01", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["energy.py", *options])
    energy.main()
    written = json.loads(out.read_text())["results"]
    assert [(one["row"], one["provider"], one["which"]) for one in written] == [
        ("copy", "torch", ""),
        ("window", "cudnn", "forward"),
        ("window", "cudnn", "backward"),
    ]
    assert [statistics.median(one["joules"]) for one in written] == pytest.approx([0.1, 0.5, 0.5])
    printed = capsys.readouterr().out
    assert "62.500" in printed.splitlines()[-1]  # 0.5 J for 8 GFLOP
    assert printed.count("a byte") == 1
