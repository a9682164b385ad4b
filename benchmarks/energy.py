"""Measure the energy of local attention kernels on one device, to see whether its power limits their speed.

    python -m benchmarks.energy
    python -m benchmarks.energy --rows causal-16k,window --providers hopper-whole,cudnn --rounds 3

Results are checked before they are measured. Then each call repeats for some seconds, in random order, round after
round, so the device stays as warm as in training. The sensors of the backend count the energy. Two calls of torch serve
as comparison: a product of two bf16 matrices, and a copy. Prints a table; writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from benchmarks.attention import ROWS, flops_of, prepare, reference, task_of
from benchmarks.providers import PROVIDERS
from benchmarks.report import setting
from benchmarks.script import accelerator, count, end, file, names
from burst_portable.backends.base import Meter
from burst_portable.backends.selection import for_device
from burst_portable.errors import BackendUnavailableError

DEFAULT_ROWS = ("causal-16k", "window", "documents", "sink", "causal-8k-d64")
DEFAULT_PROVIDERS = ("hopper-whole", "flash-attn-4", "cudnn")
BATCH = 0.03  # seconds of the calls between two readings of the clock
SIZE = 8192  # rows and columns of the matrices
COPIED = 1 << 30  # bytes


@dataclass
class Measured:
    """One pass of one provider on one row, or a call of torch.

    Attributes:
        row: Key of `attention.ROWS`, or the name of the call.
        provider: Key of `PROVIDERS`, or "torch".
        which: "forward" or "backward"; empty for a call of torch.
        work: FLOPs of a call, by the visible pairs of the mask. For a copy, the bytes that it reads and writes.
        seconds: Seconds of one call, by round.
        joules: Energy of one call, by round.
        megahertz: Clock of the device, by round.
    """

    row: str
    provider: str
    which: str
    work: int
    seconds: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    megahertz: list[float] = field(default_factory=list)

    @property
    def watts(self) -> float:
        return statistics.median(joules / spent for joules, spent in zip(self.joules, self.seconds, strict=True))

    @property
    def rate(self) -> float:
        """Work per second."""
        return self.work / statistics.median(self.seconds)

    @property
    def joules_of_work(self) -> float:
        """Energy of one FLOP or byte."""
        return statistics.median(self.joules) / self.work


def repeat(call: Callable[[], object], meter: Meter, seconds: float, synchronize: Callable[[], None]) -> list[float]:
    """Repeat a call for some seconds. Return seconds, joules and megahertz of one call."""
    call()
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    batch = max(1, round(BATCH / (time.perf_counter() - started)))
    calls, clocks = 0, []
    started, before = time.perf_counter(), meter.read()["joules"]
    while (spent := time.perf_counter() - started) < seconds:
        for _ in range(batch):
            call()
        clocks.append(meter.read()["megahertz"])  # while the device is busy
        synchronize()
        calls += batch
    return [spent / calls, (meter.read()["joules"] - before) / calls, statistics.median(clocks)]


def measure(
    calls: list[tuple[Measured, Callable[[], object]]],
    meter: Meter,
    seconds: float,
    rounds: int,
    synchronize: Callable[[], None],
) -> None:
    """Measure all calls in random order, round after round."""
    for _ in range(rounds):
        for one, call in random.sample(calls, len(calls)):
            for numbers, number in zip(
                (one.seconds, one.joules, one.megahertz), repeat(call, meter, seconds, synchronize), strict=True
            ):
                numbers.append(number)


def calls_of_torch(device: torch.device) -> list[tuple[Measured, Callable[[], object]]]:
    """Return the product of two matrices, and the copy."""
    x, y = (torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device) for _ in range(2))
    source = torch.randn(COPIED // 4, device=device)
    target = torch.empty_like(source)
    product = Measured("matrix product", "torch", "", 2 * SIZE**3)
    return [(product, lambda: x @ y), (Measured("copy", "torch", "", 2 * COPIED), lambda: target.copy_(source))]


def calls_of_row(name: str, providers: list[str]) -> list[tuple[Measured, Callable[[], object]]]:
    """Return both passes of the providers that run and are correct, and print why others are not measured."""
    row, task = ROWS[name], task_of(name, ROWS[name])
    entries, results = prepare(task, providers, reference(task))
    for result in results:
        if result.reason:
            print(f"{name:16} {result.provider:13} - {result.reason[:90]}", flush=True)
    return [
        (Measured(name, entry.name, which, flops_of(row, task, which)), call)
        for entry in entries
        for which, call in zip(("forward", "backward"), entry.calls, strict=True)
    ]


def open_meter(device: torch.device) -> Meter:
    """Return the sensors of a device. Raise `BackendUnavailableError` if they lack its energy or its clock."""
    meter = for_device(device.type).meter(device.index)
    if missing := {"joules", "megahertz"} - meter.read().keys():
        raise BackendUnavailableError(
            "the sensors do not report all that is measured", got=f"no {', '.join(sorted(missing))}"
        )
    return meter


def print_table(measured: list[Measured]) -> None:
    print(" ".join(f"{name} {value};" for name, value in setting().items()))
    print(f"{'row':16} {'provider':13} {'pass':9} {'ms':>8} {'TFLOP/s':>8} {'W':>5} {'MHz':>5} {'mJ':>8} pJ a FLOP")
    for one in measured:
        unit = " a byte" if one.row == "copy" else ""
        times = f"{statistics.median(one.seconds) * 1e3:8.3f} {one.rate / 1e12:8.1f}"
        power = f"{one.watts:5.0f} {statistics.median(one.megahertz):5.0f} {statistics.median(one.joules) * 1e3:8.1f}"
        print(f"{one.row:16} {one.provider:13} {one.which:9} {times} {power} {one.joules_of_work * 1e12:9.3f}{unit}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows", type=names(ROWS), default=list(DEFAULT_ROWS), help=f"Default: {','.join(DEFAULT_ROWS)}."
    )
    parser.add_argument(
        "--providers",
        type=names(PROVIDERS),
        default=list(DEFAULT_PROVIDERS),
        help=f"Default: {','.join(DEFAULT_PROVIDERS)}.",
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="Seconds of each call per round. Default: 1.5.")
    parser.add_argument("--rounds", type=count, default=3, help="Rounds per row. Default: 3.")
    parser.add_argument("--out", type=file, default=Path("build/energy.json"), help="Default: build/energy.json.")
    arguments = parser.parse_args()
    device = accelerator()
    meter = open_meter(device)
    measured: list[Measured] = []
    for name in ("torch", *arguments.rows):
        calls = calls_of_torch(device) if name == "torch" else calls_of_row(name, arguments.providers)
        measure(calls, meter, arguments.seconds, arguments.rounds, torch.accelerator.synchronize)
        measured += [one for one, _ in calls]
        data = {"setting": setting(), "results": [asdict(one) for one in measured]}
        arguments.out.write_text(json.dumps(data, indent=1) + "\n")  # after every row: a cut run keeps what it has
    meter.close()
    print_table(measured)


if __name__ == "__main__":
    end(main)
