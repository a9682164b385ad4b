"""What attention costs in energy: joules per TFLOP of every provider on every row, and what moving bytes costs.

    python benchmarks/energy.py                                          causal rows, documents, a window
    python benchmarks/energy.py --rows causal-16k,window --providers hopper-whole,cudnn

A device at its power limit is as fast as its work is cheap, so that joules say why one mask runs slower than another:
what a mask hides of its blocks is computed all the same, and short rows use each byte that they load less often.
Numbers of zeros show what the toggling of bits costs. Correctness first, as `attention.py` has it. Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.attention import ROWS, Row, flops_of, prepare, reference
from benchmarks.providers import PROVIDERS, Calls, Task, make_task
from benchmarks.report import Result, setting
from benchmarks.script import accelerator, end, names
from burst_portable.backends.base import Meter
from burst_portable.backends.selection import for_device, open_or_reason
from burst_portable.errors import BackendUnavailableError

WARM = 0.4  # seconds under load before anything is counted: clocks settle
AHEAD = 0.05  # seconds of work that the host gives the device at once
COPIED = 1 << 30  # bytes


@dataclass(frozen=True)
class Spent:
    """Of one call: seconds, and joules of the whole board; its clock meanwhile, 0 where it tells none."""

    seconds: float
    joules: float
    megahertz: float

    @property
    def watts(self) -> float:
        return self.joules / self.seconds


@dataclass(frozen=True)
class Line:
    """One provider's pass over one row, with random numbers or zeros."""

    row: str
    provider: str
    which: str
    numbers: str
    spent: Spent
    flops: int

    def told(self) -> str:
        spent = self.spent
        rate, cost = self.flops / spent.seconds / 1e12, spent.joules / self.flops * 1e12
        name = f"{self.row:16} {self.provider:13} {self.which:8} {self.numbers:6}"
        return f"{name} {rate:6.0f} TFLOP/s {spent.watts:5.0f} W {spent.megahertz:5.0f} MHz {cost:6.2f} J/TFLOP"


def spend(meter: Meter, call: Callable[[], object], seconds: float) -> Spent:
    """One call's share of so many seconds of them back to back, the host never far ahead of the device."""
    repeats = max(1, int(AHEAD / _seconds_of(call)))
    before, started, calls, clocks = meter.read()["joules"], time.perf_counter(), 0, []
    while time.perf_counter() - started < seconds:
        for _ in range(repeats):
            call()
        calls += repeats
        clocks.append(meter.read().get("megahertz", 0.0))
        torch.accelerator.synchronize()
    took = time.perf_counter() - started
    return Spent(took / calls, (meter.read()["joules"] - before) / calls, statistics.median(clocks))


def _seconds_of(call: Callable[[], object]) -> float:
    """Of a call, once clocks have settled."""
    started, calls = time.perf_counter(), 0
    while time.perf_counter() - started < WARM:
        call()
        torch.accelerator.synchronize()
        calls += 1
    return (time.perf_counter() - started) / calls


def checked_meter(device: torch.device) -> Meter:
    """Raises `BackendUnavailableError` where the device does not count its energy."""
    meter = open_or_reason(for_device(device.type).meter, device.index)
    if isinstance(meter, str):
        raise BackendUnavailableError(f"the sensors of {device} cannot be read: {meter}")
    if "joules" not in meter.read():
        meter.close()
        raise BackendUnavailableError(f"{device} does not count its energy")
    return meter


def copying(meter: Meter, device: torch.device, seconds: float) -> Spent:
    """A GiB from memory to memory: as many bytes are read, and as many written."""
    source = torch.randint(-128, 127, (COPIED,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return spend(meter, lambda: target.copy_(source), seconds)


def lines_of(meter: Meter, name: str, providers: list[str], seconds: float) -> Iterator[Line | Result]:
    """Both passes of every provider, or the result of one that is absent or wrong."""
    row = ROWS[name]
    task = make_task(name, row.length, row.heads, row.head, row.mask)
    entries, results = prepare(task, providers, reference(task))
    yield from (result for result in results if result.reason)
    calls = {entry.name: entry.calls for entry in entries}
    yield from _measured(meter, row, task, "random", calls, seconds)
    zeros = replace(task, extra={}, **{n: torch.zeros_like(getattr(task, n)) for n in ("q", "k", "v", "dout")})
    calls = {entry.name: PROVIDERS[entry.name](zeros) for entry in entries}
    yield from _measured(meter, row, zeros, "zeros", calls, seconds)


def _measured(
    meter: Meter, row: Row, task: Task, numbers: str, calls: dict[str, Calls], seconds: float
) -> Iterator[Line]:
    for provider, both in calls.items():
        for which, call in zip(("forward", "backward"), both, strict=True):
            yield Line(task.name, provider, which, numbers, spend(meter, call, seconds), flops_of(row, task, which))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = "causal-16k,full-16k,documents,window"
    parser.add_argument("--rows", type=names(ROWS), default=default.split(","), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--providers", type=names(PROVIDERS), default=["auto"], help=f"of {', '.join(PROVIDERS)}")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement")
    parser.add_argument("--label", default="energy", help="name of the file in --out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    device = accelerator()
    meter = checked_meter(device)
    started, before = time.perf_counter(), meter.read()["joules"]
    time.sleep(max(1.0, arguments.seconds))
    idle = (meter.read()["joules"] - before) / (time.perf_counter() - started)
    copy = copying(meter, device, arguments.seconds)
    moved = 2 * COPIED / 1e12
    print(" ".join(f"{name} {value};" for name, value in setting().items()))
    print(f"idle: {idle:.0f} W")
    print(f"copying: {moved / copy.seconds:.2f} TB/s, {copy.watts:.0f} W, {copy.joules / moved:.0f} J/TB")
    found: list[Line | Result] = []
    for name in arguments.rows:
        for line in lines_of(meter, name, arguments.providers, arguments.seconds):
            found.append(line)
            print(
                line.told() if isinstance(line, Line) else f"{name:16} {line.provider:13} - {line.reason}", flush=True
            )
    meter.close()
    board = {"idle_watts": idle, "copy": {**asdict(copy), "bytes_read_and_written": 2 * COPIED}}
    data = {"setting": setting(), "board": board, "results": [asdict(line) for line in found]}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{arguments.label}.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    end(main)
