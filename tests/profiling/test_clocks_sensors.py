"""Test device sensors with simulated libraries: a session reads them, and reports show them."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest

import burst_portable as bp
from burst_portable.backends.cuda.nvml import NvmlMeter
from burst_portable.backends.rocm.device import AmdsmiMeter
from burst_portable.backends.selection import load, open_or_reason
from burst_portable.errors import BackendUnavailableError
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.profiling.clocks import Sensors, sensor_text
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.html import page
from burst_portable.profiling.report.schema import find_error
from tests.support.synthetic_records import Maker


class Meter:
    def __init__(self) -> None:
        self.reads, self.closed = 0, False

    def read(self):
        self.reads += 1
        return {"watts": 100.0 + self.reads, "megahertz": 1500.0}

    def close(self):
        self.closed = True


def test_sensors_thread_reads_until_stopped():
    meter = Meter()
    sensors = Sensors(meter)
    until = time.monotonic() + 10
    while meter.reads < 2 and time.monotonic() < until:
        time.sleep(0.01)
    sensors.stop()
    assert meter.closed
    facts = sensors.facts()
    assert facts["reason"] == ""
    assert facts["watts"] == [101.0 + i for i in range(meter.reads)]
    assert facts["time_ns"] == sorted(facts["time_ns"])
    assert "celsius" not in facts
    assert sensor_text(facts).startswith("10")
    sensors.stop()


def test_sensors_give_reason_without_meter():
    sensors = Sensors(open_or_reason(load("cpu").meter, 0))
    sensors.stop()
    assert sensors.facts() == {"reason": "the backend 'cpu' reads no sensors", "time_ns": []}
    assert sensor_text(sensors.facts()) == ""


@pytest.fixture
def nvml(monkeypatch):
    module = ModuleType("pynvml")
    module.NVMLError = type("NVMLError", (Exception,), {})
    module.NVML_CLOCK_SM, module.NVML_TEMPERATURE_GPU = 1, 0
    module.open = 0

    def handle(uuid):
        if uuid != "GPU-1234":
            raise module.NVMLError("Not Found")
        return "device"

    def temperature(device, sensor):
        raise module.NVMLError("Not Supported")

    def opened(by):
        module.open += by

    module.nvmlInit, module.nvmlShutdown = (lambda: opened(1)), (lambda: opened(-1))
    module.nvmlDeviceGetHandleByUUID = handle
    module.nvmlDeviceGetPowerUsage = lambda device: 512_345
    module.nvmlDeviceGetClockInfo = lambda device, clock: 1755
    module.nvmlDeviceGetTemperature = temperature
    module.nvmlDeviceGetTotalEnergyConsumption = lambda device: 12_345_678
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


def test_nvml_meter_reads_available_sensors(nvml):
    meter = NvmlMeter("1234")
    assert meter.read() == {"watts": 512.345, "megahertz": 1755.0, "joules": 12345.678}, (
        "a sensor that is not there is left out"
    )
    meter.close()
    assert nvml.open == 0
    with pytest.raises(BackendUnavailableError, match="NVML does not find GPU-other: Not Found"):
        NvmlMeter("other")
    assert nvml.open == 0


@pytest.mark.parametrize(("power", "watts", "energy"), [
    ({"current_socket_power": 600, "average_socket_power": "N/A"}, 600.0, "energy_accumulator"),
    ({"current_socket_power": "N/A", "average_socket_power": 300}, 300.0, "power"),
])  # fmt: skip
def test_amdsmi_meter_reads_available_sensors(monkeypatch, power, watts, energy):
    module = ModuleType("amdsmi")
    module.__spec__ = SimpleNamespace()
    module.AmdSmiException = type("AmdSmiException", (Exception,), {})
    module.AmdSmiTemperatureType = SimpleNamespace(HOTSPOT=1)
    module.AmdSmiTemperatureMetric = SimpleNamespace(CURRENT=0)
    module.AmdSmiClkType = SimpleNamespace(GFX=0)
    module.amdsmi_init = module.amdsmi_shut_down = lambda: None
    module.amdsmi_get_processor_handle_from_bdf = lambda address: {"0000:c1:00.0": "device"}[address]
    module.amdsmi_get_power_info = lambda device: power
    module.amdsmi_get_clock_info = lambda device, clock: {"clk": 2100}
    module.amdsmi_get_temp_metric = lambda device, sensor, metric: "N/A"
    module.amdsmi_get_energy_count = lambda device: {energy: 4_000_000, "counter_resolution": 15.25, "timestamp": 1}
    monkeypatch.setitem(sys.modules, "amdsmi", module)
    meter = AmdsmiMeter("0000:c1:00.0")
    assert meter.read() == {"watts": watts, "megahertz": 2100.0, "joules": 61.0}
    meter.close()


def with_clocks(clocks):
    """Return records of three ranks, with three sensor samples each. The second rank takes four times as long."""
    makers = [Maker(rank) for rank in range(3)]
    for one, took in zip(makers, (100, 400, 100), strict=True):
        one.compute(0, 0, took)
        one.collective(0, took, 401, backward=1)
    plan = bp.plan(seq_len=96, ranks=3, heads=2, head_dim=16, itemsize=4, strategy="ring")
    records = [one.records(plan) for one in makers]
    samples = {"reason": "", "time_ns": [0, 10**8, 2 * 10**8], "watts": [400.0, 650.0, 600.0]}
    samples["joules"] = [5000.0, 5050.0, 5110.0]
    return [
        replace(one, facts={**one.facts, "sensors": {**samples, "megahertz": [clock] * 3}})
        for one, clock in zip(records, clocks, strict=True)
    ]


def test_report_names_clock_of_slow_rank(capsys):
    data = analyze(with_clocks((1755.0, 900.0, 1755.0)))
    assert (data["summary"]["kind"], data["summary"]["rank"]) == ("slow rank", 1)
    assert "(its device runs at 900 MHz, others at 1755)" in data["summary"]["text"]
    assert find_error(data) == ""
    Report(data).print()
    assert "rank 1: 550 W, up to 650; 900 to 900 MHz; 110 J in 0.2 s" in capsys.readouterr().out
    html = page(data)
    assert html.count("<polyline") == 6
    assert 'points="0,95 500,5 1000,23"' in html
    data["sensors"][0]["watts"].pop()
    assert "sensors[0].watts" in find_error(data)


def test_similar_clocks_are_not_named():
    data = analyze(with_clocks((1755.0, 1750.0, 1755.0)))
    assert "MHz" not in data["summary"]["text"]


def test_report_without_samples_has_no_chart():
    a = Maker(0)
    a.compute(0, 0, 10)
    data = analyze([a.records()])
    assert data["sensors"] == [{"rank": 0, "reason": "not read", "time_ns": []}]
    assert "<polyline" not in page(data)
