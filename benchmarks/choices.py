"""Compare predicted times with measured ones: which of the measured strategies the cost model takes in each row.

    python -m benchmarks.choices

The regret of a row is the measured time of the strategy with the least predicted time over that of the fastest one,
less 1. Only strategies that were measured are compared, both passes together. A row of `auto` counts as the options
that it chose, if the file names them. No device is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import burst_portable as bp
from benchmarks.script import end
from burst_portable.backends.cuda.machines import hardware_of_machine
from burst_portable.bench.masks import MASKS
from burst_portable.bench.peer_names import PEERS
from burst_portable.bench.results import read_rows
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.cost import plan_seconds
from burst_portable.planning.hardware import HardwareSpec

RESULTS = Path(__file__).parent / "results"
_TRAITS = KernelTraits(writes_gradients=True, writes_into=True)  # of the Hopper kernels, which ran in all of them


@dataclass(frozen=True)
class Choice:
    """The strategies of one row that the cost model compares.

    Attributes:
        file: Name of the results file, without ".json".
        row: Name of the row.
        chosen: Label of the measured strategy with the least predicted time.
        fastest: Label of the fastest measured strategy.
        predicted: Predicted seconds by label.
        measured: Measured seconds by label.
    """

    file: str
    row: str
    chosen: str
    fastest: str
    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def regret(self) -> float:
        """Return the measured time of the choice over the least one, less 1."""
        return self.measured[self.chosen] / self.measured[self.fastest] - 1


def choices(adjust: Callable[[HardwareSpec], HardwareSpec] = lambda hardware: hardware) -> Iterator[Choice]:
    """Yield the choice in each row of each file in `results` that compares strategies of this package.

    `adjust` changes the rates of a machine, to see what a term contributes. Default: they are unchanged.
    """
    for path in sorted(RESULTS.glob("bench-*.json")):
        yield from _of_bench(path, adjust)


def _of_bench(path: Path, adjust: Callable[[HardwareSpec], HardwareSpec]) -> Iterator[Choice]:
    """Yield the choices in a file of `burst-portable bench`. Its row of `auto` is the candidate that it chose."""
    settings, rows = read_rows(path)
    by_mask: dict[tuple[str, int, int], dict[str, float]] = {}
    for row in rows:
        label = row.get("chose", "") if row["entry"] == "auto" else row["entry"]
        if row["status"] == "ok" and label and label not in PEERS:
            of_mask = by_mask.setdefault((row["mask"], row["seq_len"], row["ranks"]), {})
            seconds = row["forward_seconds"] + row["backward_seconds"]
            of_mask[label] = min(seconds, of_mask.get(label, seconds))
    sizes = {name: settings[name] for name in ("heads", "kv_heads", "head_dim", "layout")}
    for (mask, length, ranks), measured in by_mask.items():
        hardware = adjust(replace(_hardware(settings["device"], ranks), kernel=_TRAITS))
        call: dict[str, Any] = {**sizes, "seq_len": length, "ranks": ranks, "mask": MASKS[mask](length)}
        predicted = {one: plan_seconds(bp.plan(**call, strategy=one), hardware, range(ranks)) for one in measured}
        # Some strategies have the same plan, measured twice: the faster time counts.
        least = min(predicted.values()) * (1 + 1e-6)
        chosen = min((one for one in predicted if predicted[one] <= least), key=measured.__getitem__)
        yield Choice(path.stem, mask, chosen, min(measured, key=measured.__getitem__), predicted, measured)


def _hardware(device: str, ranks: int) -> HardwareSpec:
    hardware = hardware_of_machine(device, ranks)
    assert hardware is not None, f"no rates of {device}"
    return hardware


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"{'file, ms':26} {'row':22} {'chosen':46} {'predicted':>9} {'measured':>9}  {'fastest':46} measured  regret")
    for one in choices():
        milliseconds = (f"{1e3 * value:9.2f}" for value in (one.predicted[one.chosen], one.measured[one.chosen]))
        fastest = f"{one.fastest:46} {1e3 * one.measured[one.fastest]:8.2f}"
        print(f"{one.file:26} {one.row:22} {one.chosen:46} {' '.join(milliseconds)}  {fastest}  {one.regret:6.1%}")
    return 0


if __name__ == "__main__":
    end(main)
