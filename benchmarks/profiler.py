"""What watching costs: off, light and session in turns, in one process; CPU time, so that neighbours do not count.

    python benchmarks/profiler.py [--rounds 40]

A call is one attention, forward and backward, over four ranks as threads; tokens are few, so that what is measured is
the bookkeeping. Divide by what a call of yours takes.
"""

from __future__ import annotations

import argparse
import time
from contextlib import nullcontext
from statistics import median

import torch

import burst_portable as bp
from burst_portable.runtime import installed

RANKS, CALLS = 4, 10


def one_round(level: str | None) -> tuple[float, int]:
    """CPU seconds of one call of one rank, and the rows that a rank wrote in it."""

    def work(mesh: bp.Mesh) -> None:
        q, k, v = (torch.ones(1, 32, 2, 16, requires_grad=True) for _ in range(3))
        for _ in range(CALLS):
            bp.attention(q, k, v, mesh=mesh, strategy="ring", mask="full").sum().backward()

    session = bp.profile(level) if level else None
    began = time.process_time()
    with session or nullcontext():
        bp.run_local(RANKS, work)
    took = time.process_time() - began
    rows = sum(len(table) for one in session.records() for table in one.tables.values()) if session else 0
    return took / RANKS / CALLS, rows // (RANKS * CALLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    levels = (None, "light", "session")
    for level in levels:
        one_round(level)
    seen: dict[str | None, list[tuple[float, int]]] = {level: [] for level in levels}
    for _ in range(rounds):
        for level in levels:
            seen[level].append(one_round(level))
    off = median(took for took, _ in seen[None])
    print(f"off      {off * 1e6:8.1f} µs a call of a rank")
    for level in levels[1:]:
        more, rows = median(took for took, _ in seen[level]) - off, seen[level][0][1]
        print(f"{level:8} {more * 1e6:+8.1f} µs a call, {rows} rows of a rank: {more * 1e6 / rows:.2f} µs a row")
    count = 1_000_000
    began = time.process_time()
    for _ in range(count):
        installed.get()
    print(f"asking whether anything is installed: {(time.process_time() - began) / count * 1e9:.0f} ns a call")


if __name__ == "__main__":
    main()
