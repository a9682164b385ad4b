"""Run one rank of tests/device/test_wire_bytes.py: count the bytes that cross the links of its device.

python -m tests.support.device_wire_bytes RANKS FOLDER RANK
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import Links, connect
from benchmarks.ring_rows import Row
from benchmarks.wire_bytes import Wire, prepared
from benchmarks.wire_report import Measured, planned
from burst_portable.backends.selection import for_device, open_or_reason
from burst_portable.comm.base import Transport
from burst_portable.planning.plans import PASSES
from tests.support.device_trouble import join

DEADLINE, CALLS = 30.0, 10
LENGTH = 32768  # messages of several MiB with two to eight ranks, much larger than flags
CUTS = "0,5000,14000,14800,25000,32768"  # ranks need much of some blocks, little of others, and nothing of the rest
ROWS = {
    "full": Row(LENGTH, (8, 8), mask="full", layout="contiguous"),
    "window": Row(LENGTH, (8, 8), mask="window:2048", layout="contiguous"),
    "documents": Row(LENGTH, (8, 8), mask=f"documents:{CUTS}", layout="contiguous"),
}
STRATEGIES = ("ring(transfer=direct)", "burst(transfer=direct)", "ulysses")


def measure_case(wire: Wire, links: Links, name: str, strategy: str, transport: str) -> list[Measured]:
    """Measure both passes of a case."""
    plan, calls = prepared(links, ROWS[name], strategy, transport, "triton")
    for call in calls:
        call()
    found = []
    for which, call in zip(PASSES, calls, strict=True):
        crossed = wire.during(call, CALLS)
        plans = [planned(plan, which, rank) for rank in range(links.size)]
        found.append(Measured(name, strategy, transport, which, CALLS, crossed, plans))
    return found


def measure_all(links: Links, wire: Wire, name: str) -> dict[str, Any]:
    """Measure all cases, and one that sends each message twice, which changes no result."""
    said: dict[str, Any] = {"idle": wire.during(lambda: time.sleep(0.5), 1)}
    cases = [(row, strategy) for row in ROWS for strategy in STRATEGIES]
    said["cases"] = [asdict(one) for case in cases for one in measure_case(wire, links, *case, name)]
    memory: Any = links.transports[name].memory  # type: ignore[union-attr]
    once = memory.copy

    def twice(*what: Any, **how: Any) -> None:
        once(*what, **how)
        once(*what, **how)

    memory.copy = twice
    said["twice"] = [asdict(one) for one in measure_case(wire, links, "full", "ring(transfer=direct)", name)]
    memory.copy = once
    return said


def main(ranks: int, folder: Path, rank: int) -> None:
    device = join(ranks, folder, rank)
    backend = for_device(device.type)
    links = Links(dist.group.WORLD, rank, ranks, device, DEADLINE)
    name = backend.capabilities.direct_transport
    connect(links, [name])
    counters, transport = open_or_reason(backend.link_counters, rank), links.transports[name]
    if isinstance(counters, str) or not isinstance(transport, Transport):
        said: dict[str, Any] = {"absent": counters if isinstance(counters, str) else transport}
    else:
        meeting = backend.transport(links.group, DEADLINE)
        said = measure_all(links, Wire(counters, meeting, torch.accelerator.synchronize), name)
        counters.close()
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
