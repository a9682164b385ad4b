"""Print and write the results of the strategy benchmark: a table, JSON, and a picture."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from benchmarks import picture
from benchmarks.other_rings import OTHERS, PLAIN
from benchmarks.report import setting

KINDS = ("forward", "backward", "forward, cold", "backward, cold")


@dataclass
class Measured:
    """One contestant on one row with one local kernel."""

    row: str
    contestant: str
    kernel: str
    reason: str = ""
    chose: str = ""  # by `auto`; and why
    why: str = ""
    layout: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    rounds: dict[str, list[float]] = field(default_factory=dict)  # milliseconds of each round
    seconds_to_start: float = 0.0


def print_tables(results: list[Measured], links: list[dict[str, object]]) -> None:
    """Print all rows. For ours, also the speed relative to the same strategy with nothing sent."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    print(f"{ranks} ranks; " + " ".join(f"{name} {value};" for name, value in setting().items()))
    print("TFLOP/s a GPU: forward, backward, back to back; in brackets single calls; kept of nothing sent")
    for row, kernel in dict.fromkeys((r.row, r.kernel) for r in results):
        print(f"-- {row}, {kernel}")
        here = {r.contestant: r for r in results if (r.row, r.kernel) == (row, kernel)}
        for name, result in here.items():
            if result.reason:
                print(f"  {name:38} - {result.reason[:100]}")
                continue
            forward, backward, cold_forward, cold_backward = (result.tflops[kind] for kind in KINDS)
            line = f"  {name:38} {forward:7.4g} {backward:7.4g}  ({cold_forward:.4g} {cold_backward:.4g})"
            still = here.get(f"{name}, nothing sent")
            if still and still.milliseconds:
                kept = (still.milliseconds[kind] / result.milliseconds[kind] for kind in KINDS[:2])
                line += "  kept " + " / ".join(f"{x:.2f}" for x in kept)
            if result.chose and "nothing sent" not in name:
                line += f"  [{result.chose}; {result.layout}]"
            print(line)
        for line in comparisons(here):
            print(f"  {line}")
    for link in links:
        print(f"links, {link['transport']}: {link['bytes']} bytes to the next rank, {link['gbps']} GB/s")


def comparisons(here: dict[str, Measured]) -> Iterator[str]:
    """Yield the ratio of `auto` to each other library: both passes together, round by round."""
    for name, ours in here.items():
        for other, theirs in here.items():
            peer = other in OTHERS and other != PLAIN
            if ours.chose and ours.rounds and theirs.rounds and peer and "nothing sent" not in name:
                yield f"{name} beside {other}: {compared(ours.rounds, theirs.rounds)}"


def compared(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> str:
    """Return the median gain over rounds, and the number of rounds with a gain."""
    one, other = (
        [sum(passes) for passes in zip(*(x[kind] for kind in KINDS[:2]), strict=True)] for x in (ours, theirs)
    )
    gains = [b / a - 1 for a, b in zip(one, other, strict=True)]
    return f"{statistics.median(gains):+.1%}, faster in {sum(gain > 0 for gain in gains)} of {len(gains)} rounds"


def write(results: list[Measured], links: list[dict[str, object]], folder: Path, label: str) -> None:
    """Write all results so far."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    data = {"setting": {**setting(), "ranks": ranks}, "links": links, "results": [asdict(r) for r in results]}
    (folder / f"{label}.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / f"{label}.svg").write_text(picture.draw_file(data))
