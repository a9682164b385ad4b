"""Compare bytes on the links between devices, counted by the devices, with the bytes of the plan.

    torchrun --nproc-per-node 4 benchmarks/wire_bytes.py --json wire.json
    torchrun --nproc-per-node 8 benchmarks/wire_bytes.py --rows 32k-gqa --strategies ring,ulysses --calls 50

Each strategy runs on each row over each transport that serves it: several calls forward, then backward. Counters are
read when no rank has anything under way. Ranks meet through the store of the process group, so only the calls use the
links. Counters include more than the plan: flags, signals that a receiver is ready, and protocols of NCCL. The idle
links are counted too. Nothing else may use the devices.

The exit code is 1 if peer copies differ from the plan by more than flags and rounding explain, and 2 if the device has
no counters. The file is written after every row.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[1]))

import burst_portable as bp
from benchmarks.providers import Absent
from benchmarks.ranks import Clock, Guard, Links, connect, join, leave
from benchmarks.report import setting
from benchmarks.ring import STRATEGIES
from benchmarks.ring_rows import ROWS, Row
from benchmarks.rings import Calls, Task, ours
from benchmarks.script import count, end, file, names
from benchmarks.wire_report import Measured, Ways, planned, summary, table
from burst_portable.backends.base import LinkCounters
from burst_portable.backends.selection import for_device, open_or_reason
from burst_portable.comm.base import Transport
from burst_portable.errors import BackendUnavailableError, BurstError, DeviceError
from burst_portable.planning.plans import PASSES, Plan
from burst_portable.strategies.registry import make_strategy

QUICK_ROWS = ("32k-gqa", "128k-documents", "128k-window")
QUICK = ("ring", "ring(transfer=direct)", "burst(transfer=direct)", "ulysses", "double_ring")
NAMED = tuple(name for name in STRATEGIES if name != "auto")
IDLE = 1.0  # seconds
_PAUSE, _AT_REST = 0.05, 1.0  # seconds between two readings that must be alike; and until they are, at most


class Wire:
    """Count bytes on the links of this rank's device.

    Args:
        counters: Link counters of the device.
        meeting: Transport on which the ranks synchronize; its messages must not use these links.
        settle: Waits until the device is idle.
    """

    def __init__(self, counters: LinkCounters, meeting: Transport, settle: Callable[[], None]) -> None:
        self._counters, self._meeting, self._settle = counters, meeting, settle

    def during(self, work: Callable[[], object], times: int) -> list[Ways]:
        """Count the bytes that each rank sends and receives while all ranks run the work `times` times.

        Collective. Raises `DeviceError` if a counter decreased.
        """
        self._meet()
        before = self._at_rest()
        self._meet()
        for _ in range(times):
            work()
        self._meet()
        after = self._at_rest()
        crossed = [now - then for now, then in zip(after, before, strict=True)]
        if min(crossed) < 0:
            raise DeviceError(f"counters of links went backwards, from {before} to {after}: somebody reset them")
        told = self._meeting.share(struct.pack("<qq", *crossed), "telling what crossed")
        return [struct.unpack("<qq", one) for one in told]  # type: ignore[misc]

    def _meet(self) -> None:
        """Wait until no rank has anything under way."""
        self._settle()
        self._meeting.share(b"\0", "meeting to count")

    def _at_rest(self) -> Ways:
        """Return the counters once they stop changing, or after a time limit."""
        until, before = time.monotonic() + _AT_REST, self._counters.read()
        while True:
            time.sleep(_PAUSE)
            now = self._counters.read()
            if now == before or time.monotonic() > until:
                return now
            before = now


def prepared(links: Links, row: Row, strategy: str, transport: str, kernel: str = "auto") -> tuple[Plan, Calls]:
    """Return the plan of a call, and its two passes on this rank's shard of random tensors.

    Raises `Absent` if the transport cannot serve it, `BurstError` if no plan can be made.
    """
    mask = bp.Mask.parse(row.mask, row.length)
    layout = bp.make_layout(row.layout, row.length, links.size, mask)
    heads, kv_heads = row.heads
    plan = bp.plan(
        seq_len=row.length, ranks=links.size, heads=heads, kv_heads=kv_heads, head_dim=row.head, mask=mask,
        strategy=make_strategy(strategy), layout=layout,
    )  # fmt: skip
    found = links.transports[transport]
    if isinstance(found, Transport) and found.direct and not plan.direct:
        raise Absent("serves only messages that go straight to where they are used")
    shards = [
        torch.randn(1, layout.count(links.rank), n, row.head, dtype=torch.bfloat16, device=links.device)
        for n in (heads, kv_heads, kv_heads, heads)
    ]
    return plan, ours(strategy, transport).prepare(Task(links, row.length, mask, layout, *shards, kernel=kernel))


class Run:
    """All rows of one run. `counters`: of the device of this rank; default: what the backend reads."""

    def __init__(self, arguments: argparse.Namespace, counters: LinkCounters | None = None) -> None:
        self.arguments, self.started = arguments, time.monotonic()
        self.links = join(arguments.timeout)
        self.clock, self.guard = Clock(self.links), Guard(self.links.rank)
        backend = for_device(self.links.device.type)
        found = counters or open_or_reason(backend.link_counters, self.links.device.index or 0)
        if isinstance(found, str):
            raise BackendUnavailableError(f"rank {self.links.rank} cannot count what crosses links: {found}")
        self.wire = Wire(found, backend.transport(self.links.group, arguments.timeout), self.clock.settle)
        connect(self.links, arguments.transports)
        for name, why in self.links.transports.items():
            if isinstance(why, str):
                self.say(f"no {name}: {why}")
        self.results: list[Measured] = []
        self.idle: list[Ways] = []

    def main(self) -> int:
        for row in self.arguments.rows:
            for strategy in self.arguments.strategies:
                for transport in (name for name, one in self.links.transports.items() if not isinstance(one, str)):
                    timer = self.guard.watch(self.arguments.limit, f"{row}, {strategy} over {transport}")
                    self.case(row, strategy, transport)
                    timer.cancel()
            if not self.idle:  # by now all is connected: what goes on by itself would go on now
                self.idle = self.wire.during(lambda: time.sleep(IDLE), 1)
            self.save()
        for line in (*table(self.results), *summary(self.results, self.idle, IDLE)):
            self.say(line)
        direct = {n for n, one in self.links.transports.items() if isinstance(one, Transport) and one.direct}
        return int(any(one.transport in direct and one.unexplained() for one in self.results))

    def case(self, row: str, strategy: str, transport: str) -> None:
        """Run both passes of one strategy, or record the reason why it cannot run, which is the same on all ranks."""
        try:
            plan, calls = prepared(self.links, ROWS[row], strategy, transport, self.arguments.kernel)
        except (Absent, BurstError) as reason:
            self.results.append(Measured(row, strategy, transport, reason=str(reason)))
            self.say(f"{row}, {strategy} over {transport}: {reason}")
            return
        for call in calls:  # connects, compiles, makes room: what happens once
            call()
        for which, call in zip(PASSES, calls, strict=True):
            counted = self.wire.during(call, self.arguments.calls)
            plans = [planned(plan, which, rank) for rank in range(self.links.size)]
            self.results.append(Measured(row, strategy, transport, which, self.arguments.calls, counted, plans))
        self.say(f"{row}, {strategy} over {transport}: done after {time.monotonic() - self.started:.0f} s")

    def say(self, text: str) -> None:
        if self.links.rank == 0:
            print(text, flush=True)

    def save(self) -> None:
        if self.links.rank == 0 and self.arguments.json is not None:
            facts = {
                "setting": {**setting(), "ranks": self.links.size, "kernel": self.arguments.kernel},
                "idle": {"seconds": IDLE, "counted": self.idle},
                "results": [{**asdict(one), "unexplained": one.unexplained()} for one in self.results],
            }
            self.arguments.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=names(ROWS), default=",".join(QUICK_ROWS), help=f"Rows: {', '.join(ROWS)}.")
    parser.add_argument(
        "--strategies", type=names(NAMED), default=",".join(QUICK), help=f"Strategies: {', '.join(NAMED)}."
    )
    parser.add_argument("--transports", default="peer_copy,nccl", type=lambda text: text.split(","), help="Transports.")
    parser.add_argument("--kernel", default="auto", help="Local kernel; it does not change the messages.")
    parser.add_argument("--calls", type=count, default=20, help="Calls per pass. Default: 20.")
    parser.add_argument("--limit", type=float, default=90.0, help="Seconds after which a case counts as hung.")
    parser.add_argument("--timeout", type=float, default=30.0, help="Seconds to wait for one message. Default: 30.")
    parser.add_argument("--json", type=file, help="Write the results to this JSON file.")
    return parser


def main() -> int:
    code = Run(options().parse_args()).main()
    leave()
    return code


if __name__ == "__main__":
    end(main)
