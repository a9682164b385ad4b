"""Measure the cost of profiling on CPUs: off, basic, standard and kernels in turns, in one process.

    python -m benchmarks.profiler [--rounds 40] [--out profiler.json]

A call is one attention, forward and backward, over four ranks as threads. It has few tokens, so the measured time is
bookkeeping. CPU time is measured, so other processes do not count. Opening and closing a session and writing the
report are not included. On devices, `profile_ring.py --what cost` measures complete steps.
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
from burst_portable.runtime.prepared_call import call_wrapper

RANKS, CALLS = 4, 10
LEVELS = (None, "basic", "standard", "kernels")


def one_round(level: str | None) -> tuple[float, int]:
    """Return the CPU seconds of one call per rank, and the rows that a rank recorded in it."""

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


def check_time() -> float:
    """Return the seconds of the check whether a profiler is installed: the cost of a call without one."""
    count = 1_000_000
    began = time.process_time()
    for _ in range(count):
        call_wrapper.get()
    return (time.process_time() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=count, default=40, help="Rounds that are measured. Default: 40.")
    parser.add_argument("--out", type=file, help="Write the results to this JSON file.")
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
        "check_seconds": check_time(), "off_seconds": median(off), "levels": {},
    }  # fmt: skip
    print(f"check whether a profiler is installed: {found['check_seconds'] * 1e9:.0f} ns per call")
    print(f"off      {median(off) * 1e6:8.1f} µs per call and rank")
    for level in LEVELS[1:]:
        more = [took - without for (took, _), without in zip(seen[level], off, strict=True)]
        low, middle, high = quantiles(more, n=4)
        rows = seen[level][0][1]
        found["levels"][level] = {"seconds": middle, "quartiles": [low, high], "rows": rows}
        spread = f"quartiles {low * 1e6:.0f} to {high * 1e6:.0f}"
        print(f"{level:8} {middle * 1e6:+8.1f} µs per call ({spread}), {rows} rows per rank: "
              f"{middle * 1e6 / rows:.2f} µs a row")  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    end(main)
