"""What watching costs: off, light, session and deep in turns, in one process; CPU time, so neighbours do not count.

    python benchmarks/profiler.py [--rounds 40] [--out benchmarks/results/profiler-cpu.json]

A call is one attention, forward and backward, over four ranks as threads; tokens are few, so that what is measured is
the bookkeeping. Divide by what a call of yours takes. Opening and closing a session is not in it, nor is the report.
On devices, `profile_ring.py --what cost` measures whole steps.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from contextlib import nullcontext
from statistics import median, quantiles

import torch

import burst_portable as bp
from benchmarks.script import count, end, file
from burst_portable.runtime.prepared_call import installed

RANKS, CALLS = 4, 10
LEVELS = (None, "light", "session", "deep")


def one_round(level: str | None) -> tuple[float, int]:
    """CPU seconds of one call of one rank, and the rows that a rank wrote in it."""

    def work(mesh: bp.Mesh) -> None:
        q, k, v = (torch.ones(1, 32, 2, 16, requires_grad=True) for _ in range(3))
        for _ in range(CALLS):
            bp.attention(q, k, v, mesh=mesh, strategy="ring", mask="full").sum().backward()

    session = bp.profile(level) if level else None  # type: ignore[arg-type]  # LEVELS are names of levels
    with session or nullcontext():
        began = time.process_time()
        bp.run_threads(RANKS, work)
        took = time.process_time() - began
    rows = sum(len(table) for one in session.records() for table in one.tables.values()) if session else 0
    return took / RANKS / CALLS, rows // (RANKS * CALLS)


def asking() -> float:
    """Seconds of the question whether anything is installed: all that a call pays when nothing is."""
    count = 1_000_000
    began = time.process_time()
    for _ in range(count):
        installed.get()
    return (time.process_time() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=40)
    parser.add_argument("--out", type=file, help="a JSON file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for level in LEVELS:
        one_round(level)
    seen: dict[str | None, list[tuple[float, int]]] = {level: [] for level in LEVELS}
    for index in range(arguments.rounds):
        for level in LEVELS if index % 2 else LEVELS[::-1]:
            seen[level].append(one_round(level))
    off = [took for took, _ in seen[None]]
    found = {
        "ranks": RANKS, "rounds": arguments.rounds, "torch": torch.__version__, "python": platform.python_version(),
        "asking_seconds": asking(), "off_seconds": median(off), "levels": {},
    }  # fmt: skip
    print(f"asking whether anything is installed: {found['asking_seconds'] * 1e9:.0f} ns a call")
    print(f"off      {median(off) * 1e6:8.1f} µs a call of a rank")
    for level in LEVELS[1:]:
        more = [took - without for (took, _), without in zip(seen[level], off, strict=True)]
        low, middle, high = quantiles(more, n=4)
        rows = seen[level][0][1]
        found["levels"][level] = {"seconds": middle, "quartiles": [low, high], "rows": rows}
        spread = f"quartiles {low * 1e6:.0f} to {high * 1e6:.0f}"
        print(f"{level:8} {middle * 1e6:+8.1f} µs a call ({spread}), {rows} rows of a rank: "
              f"{middle * 1e6 / rows:.2f} µs a row")  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    end(main)
