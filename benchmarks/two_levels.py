"""Measure slow links between hosts on one host: groups of its GPUs simulate hosts.

    torchrun --nproc-per-node 8 benchmarks/two_levels.py --ranks-per-node 4 --inter-node-bandwidth 10
    torchrun --nproc-per-node 8 benchmarks/two_levels.py --ranks-per-node 4 --sockets
    python -m benchmarks.two_levels --simulate

The first form delays messages between groups to the speed of a slow link. With --sockets, NCCL treats the groups as
hosts. --simulate needs no GPU: it predicts 64 and 1,024 GPUs from plans.

The double ring runs next to rings over all ranks. Messages inside a group are not delayed; messages between groups have
their own process group. Results are checked before they are timed. "Kept" is the speed relative to the same strategy
with nothing sent, and "predicted" is the time of the plan with the hardware numbers of this machine. The slowest rank
counts. On CPUs, use --row tiny.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[1]))

import burst_portable as bp
from benchmarks.ranks import Clock, Guard, join, leave
from benchmarks.report import setting
from benchmarks.ring import ERROR_LIMIT, errors, expected
from benchmarks.ring_rows import ROWS
from benchmarks.rings import Calls, Still, Task, through_autograd
from benchmarks.script import count, end, names
from burst_portable.backends.selection import choose_kernel, for_device, group_options_of, hardware_of
from burst_portable.comm.base import Handle, Message, Transport
from burst_portable.comm.two_levels import TwoLevelTransport, with_two_levels
from burst_portable.errors import InputError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.registry import strategy_of

PASSES = ("forward", "backward")
STRATEGIES = (
    "double_ring(backward_circulates=kv)",
    "double_ring",
    "usp",
    "usp(backward_circulates=q)",
    "ring",
    "ring(transfer=direct)",
    "ring(transfer=direct, prefetch_steps=64)",
)
QUICK = ("double_ring(backward_circulates=kv)", "ring", "ring(transfer=direct)")
SIMULATED = ((262144, 64), (1048576, 64), (1048576, 1024), (8388608, 1024))  # tokens, ranks


# ------------------------------------------------------------------------------------------ the slow link


class Slowed(Transport):
    """Another transport whose messages are delayed to the speed of a slower link."""

    def __init__(self, wrapped: Transport, link_bandwidth: float, device: torch.device) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size)
        self._wrapped, self._bytes_a_second, self.host = wrapped, link_bandwidth * 1e9, wrapped.host
        self._free = 0.0  # when the link has done what it was given so far; host time
        self._device = device
        if not wrapped.host:
            self._stream = torch.Stream(device)
            self._cycles = _cycles_a_second(device)

    def post(self, sends: list[Message], receives: list[Message], label: str = "") -> tuple[list[Handle], list[Handle]]:
        if self._wrapped.host:
            leaving, arriving = self._wrapped.post(sends, receives, label)
            self._free = max(self._free, time.perf_counter()) + self._seconds(sends, receives)
            return leaving, [_Late(handle, self._free) for handle in arriving]
        current = torch.accelerator.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._stream:
            torch.cuda._sleep(int(self._seconds(sends, receives) * self._cycles))
            return self._wrapped.post(sends, receives, label)

    def _seconds(self, *ways: list[Message]) -> float:
        """Return the seconds of the messages, delayed at both ends so that no kernel spins while it waits."""
        return max(sum(m.buffer.numel() for m in messages) for messages in ways) / self._bytes_a_second


@dataclass
class _Late:
    handle: Handle
    at: float

    def wait(self) -> None:
        self.handle.wait()
        time.sleep(max(0.0, self.at - time.perf_counter()))


def _cycles_a_second(device: torch.device) -> float:
    """Return the frequency of the clock that `_sleep` counts, on an idle device."""
    cycles, before, after = 20_000_000, torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
    torch.cuda._sleep(5 * cycles)
    before.record()
    torch.cuda._sleep(cycles)
    after.record()
    after.synchronize()
    return float(cycles / before.elapsed_time(after) * 1e3)


def look_like_nodes(node: int) -> None:
    """Make NCCL treat groups of ranks as hosts that are connected by sockets. Call before NCCL starts."""
    told = {
        "NCCL_HOSTID": f"node{int(os.environ.get('LOCAL_RANK', '0')) // node}",
        "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0",
        "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4",
    }  # fmt: skip
    for name, value in told.items():
        os.environ.setdefault(name, value)


# --------------------------------------------------------------------------------------------- measuring


@dataclass
class Measured:
    """One strategy over one link. `link_bandwidth` is None if no link is slow, or if its speed is unknown."""

    strategy: str
    link: str
    link_bandwidth: float | None = None
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    milliseconds: dict[str, float] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)  # milliseconds too


@dataclass
class Entry:
    """A strategy over a link, ready to be measured."""

    calls: Calls
    result: Measured
    seconds: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PASSES})


class Run:
    """All strategies over all links, on one row."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        if arguments.sockets:
            look_like_nodes(arguments.ranks_per_node)
        self.arguments, self.started = arguments, time.monotonic()
        self.links = join(arguments.timeout)
        self.clock, self.guard = Clock(self.links), Guard(self.links.rank)
        if self.links.size % arguments.ranks_per_node or not 1 < arguments.ranks_per_node < self.links.size:
            raise InputError(
                f"--ranks-per-node {arguments.ranks_per_node} makes no two nodes or more of {self.links.size} ranks"
            )
        self.row, device = ROWS[arguments.row], self.links.device
        self.mask = bp.Mask.parse(self.row.mask, self.row.length)
        self.backend = for_device(device.type)
        transport = partial(self.backend.transport, timeout=arguments.timeout)
        options = partial(group_options_of, self.backend)
        plain = with_two_levels(transport, self.links.group, arguments.ranks_per_node, arguments.timeout, options)
        plain.begin()
        plain.end()
        near, far = plain.intra_node, plain.inter_node
        assert far is not None, "the first pass connects"
        self.transports: dict[str, tuple[Transport, float | None]] = {
            "sockets" if arguments.sockets else "no slow link": (plain, None)
        }
        for link_bandwidth in arguments.inter_node_bandwidth:
            slow = TwoLevelTransport(near, partial(Slowed, far, link_bandwidth, device), arguments.ranks_per_node)
            self.transports[f"{link_bandwidth:g} GB/s"] = slow, link_bandwidth
        self.results: list[Measured] = []

    def main(self) -> None:
        layout = bp.make_layout("zigzag", self.row.length, self.links.size, self.mask)
        mesh, (heads, kv_heads) = bp.Mesh.from_group(self.links.group), self.row.heads
        generator = torch.Generator(self.links.device).manual_seed(0)
        whole = [
            torch.randn(1, self.row.length, n, self.row.head, device=self.links.device, generator=generator).bfloat16()
            for n in (heads, kv_heads, kv_heads, heads)
        ]
        right = expected(self.row, self.mask, whole)
        shards = [bp.shard(x, mesh, layout=layout).contiguous() for x in whole]
        del whole
        task = Task(self.links, self.row.length, self.mask, layout, *shards, kernel=self.arguments.kernel)
        entries = []
        for name in self.arguments.strategies:
            for link in (*self.transports, "nothing sent"):
                timer = self.guard.watch(self.arguments.limit, f"preparing {name} over {link}")
                entries += self.prepare(name, link, task, lambda found: errors(found, task, right, self.clock, mesh))
                timer.cancel()
        timer = self.guard.watch(self.arguments.limit + self.arguments.seconds, "measuring")
        self.measure(entries)
        timer.cancel()
        if self.links.rank == 0:
            self.write()
            self.print_table()

    def prepare(
        self, name: str, link: str, task: Task, judge: Callable[[tuple[Tensor, ...]], dict[str, float]]
    ) -> list[Entry]:
        transport, link_bandwidth = self.transports.get(link, (None, None))
        result = Measured(name, link, link_bandwidth)
        self.results.append(result)
        strategy = strategy_of(name, self.arguments.ranks_per_node)
        # With everything sent once, what came is kept, and nothing moves any more.
        still = Still(next(iter(self.transports.values()))[0]) if transport is None else None
        mesh = self.links.mesh(transport or still)  # type: ignore[arg-type]
        leaves = tuple(x.detach().requires_grad_() for x in (task.q, task.k, task.v))

        def attention() -> Tensor:
            return bp.attention(
                *leaves, mask=task.mask, mesh=mesh, strategy=strategy, layout=task.layout, seq_len=task.length,
                kernel=task.kernel, deterministic=False,
            )  # fmt: skip

        found = attention()
        found = found, *torch.autograd.grad(found, leaves, task.dout)
        self.clock.settle()
        if still is not None:
            still.moving = False
        else:
            result.errors = judge(found)
            if not all(error < ERROR_LIMIT for error in result.errors.values()):
                result.reason = f"WRONG: {result.errors}"
                return []
            if not self.arguments.sockets:
                result.predicted = self.predict(strategy, link_bandwidth)
        self.say(f"{name}, {link}: ready after {time.monotonic() - self.started:.0f} s")
        return [Entry(through_autograd(attention, leaves, task.dout), result)]

    def predict(self, strategy: Strategy, link_bandwidth: float | None) -> dict[str, float]:
        sizes = (*self.row.heads, self.row.head, self.row.head)
        layout, device = bp.make_layout("zigzag", self.row.length, self.links.size, self.mask), self.links.device.type
        call = AttentionCall(self.mask, layout, *sizes, dtype="bfloat16", device=device, deterministic=False)
        kernel, _ = choose_kernel(self.backend, call, self.arguments.kernel)
        first = next(iter(self.transports.values()))[0].high_priority
        hardware = hardware_of(self.backend, self.links.size, kernel, high_priority=first)
        hardware = replace(hardware, peer_copy_bandwidth=())  # NCCL alone reaches other nodes
        if link_bandwidth:
            hardware = replace(
                hardware, ranks_per_node=self.arguments.ranks_per_node, inter_node_bandwidth=link_bandwidth
            )
        return simulated(strategy, self.row.length, self.links.size, self.row.heads, self.row.head, hardware)

    def measure(self, entries: list[Entry]) -> None:
        """Time all calls in random order, round after round."""
        chance, started, rounds = random.Random(0), time.monotonic(), 0
        while rounds < 2 or self.clock.slowest(time.monotonic() - started) < self.arguments.seconds:
            order = [(entry, index) for entry in entries for index in range(2)]
            chance.shuffle(order)
            for entry, index in order:
                entry.seconds[PASSES[index]].append(self.clock.time(entry.calls[index], self.arguments.calls))
            rounds += 1
        for entry in entries:
            for name, seconds in entry.seconds.items():
                entry.result.milliseconds[name] = round(statistics.median(seconds) * 1e3, 4)

    def say(self, text: str) -> None:
        if self.links.rank == 0:
            print(text, flush=True)

    def write(self) -> None:
        a = self.arguments
        facts = {
            "setting": {**setting(), "ranks": self.links.size, "node": a.ranks_per_node},
            "row": {**asdict(self.row), "name": a.row, "kernel": a.kernel},
            "results": [asdict(result) for result in self.results],
        }
        save(a.out, f"two-levels-{a.label}", facts)

    def print_table(self) -> None:
        nodes = f"{self.links.size // self.arguments.ranks_per_node} groups of {self.arguments.ranks_per_node}"
        print(f"{nodes}; " + " ".join(f"{name} {value};" for name, value in setting().items()))
        print(f"{self.arguments.row}, {self.arguments.kernel}; milliseconds forward, backward; kept; predicted")
        still = {r.strategy: r.milliseconds for r in self.results if r.link == "nothing sent"}
        for one in self.results:
            if one.reason:
                print(f"{one.strategy:24} {one.link:14} - {one.reason[:100]}")
                continue
            line = f"{one.strategy:24} {one.link:14} {' '.join(f'{one.milliseconds[p]:9.4g}' for p in PASSES)}"
            if one.link != "nothing sent":
                kept = (still[one.strategy][p] / one.milliseconds[p] for p in PASSES)
                line += "   " + " / ".join(f"{x:.2f}" for x in kept)
            if one.predicted:
                line += "   " + " ".join(f"{one.predicted[p]:9.4g}" for p in PASSES)
            print(line)


# -------------------------------------------------------------------------------------------- simulating


def simulated(
    strategy: Strategy, length: int, ranks: int, heads: tuple[int, int], head: int, hardware: HardwareSpec
) -> dict[str, float]:
    """Return the predicted milliseconds of each pass: the slowest of eight ranks, or of all if they are few."""
    plan = bp.plan(
        seq_len=length, ranks=ranks, heads=heads[0], kv_heads=heads[1], head_dim=head, mask="causal",
        strategy=strategy, layout="zigzag",
    )  # fmt: skip
    some = range(ranks) if ranks <= 64 else sorted({i * (ranks - 1) // 7 for i in range(8)})
    costs = plan_cost(plan, hardware, some).per_rank
    return {name: round(max(cost.seconds for cost in costs[name]) * 1e3, 4) for name in PASSES}


def simulate(arguments: argparse.Namespace) -> None:
    """Print and write what plans predict for hosts of eight GPUs, with round numbers and those of H200."""
    from burst_portable.backends.cuda.machines import hardware_of_machine

    measured = hardware_of_machine("NVIDIA H200", 8)
    assert measured is not None, "the table has H200"
    plain = HardwareSpec(600.0, 300.0, source="600 TFLOP/s, 300 GB/s, and messages that hold no kernel up")
    nccl = replace(measured, peer_copy_bandwidth=())
    first = replace(nccl.with_high_priority(), source=f"{measured.source}, messages first")
    results = []
    for link_bandwidth in arguments.inter_node_bandwidth or [50.0]:
        for known in (plain, nccl, first):
            hardware = replace(known, ranks_per_node=8, inter_node_bandwidth=link_bandwidth)
            print(
                f"nodes of 8, {link_bandwidth:g} GB/s per GPU between nodes; {hardware.source}; "
                "32/8 heads of 128, causal, zigzag"
            )
            for length, ranks in SIMULATED:
                print(f"  {length:,} tokens, {ranks:,} GPUs: milliseconds forward, backward")
                for name in STRATEGIES:
                    times = simulated(strategy_of(name, 8), length, ranks, (32, 8), 128, hardware)
                    facts = {
                        "tokens": length,
                        "ranks": ranks,
                        "strategy": name,
                        "inter_node_bandwidth": link_bandwidth,
                        "hardware": hardware.source,
                    }
                    results.append({**facts, **times})
                    print(f"    {name:24} {times['forward']:9.4g} {times['backward']:9.4g}")
    save(arguments.out, f"two-levels-{arguments.label}", {"node": 8, "results": results})


def save(folder: Path, name: str, facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


def speeds(text: str) -> list[float]:
    """Parse numbers above 0, separated by commas."""
    found = [float(part) for part in filter(None, text.split(","))]
    if not all(0 < one < math.inf for one in found):
        raise ValueError(f"{text}: no speed of a link")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks-per-node", type=count, default=2, help="Ranks per simulated host. Default: 2.")
    parser.add_argument(
        "--inter-node-bandwidth", type=speeds, default=[], help="Slow links to simulate, GB/s per rank: 5,10,25."
    )
    parser.add_argument("--sockets", action="store_true", help="Let NCCL connect the groups through sockets.")
    parser.add_argument("--simulate", action="store_true", help="Predict clusters from plans, without ranks.")
    parser.add_argument("--row", default="128k-gqa", choices=ROWS, help="Row. Default: 128k-gqa.")
    parser.add_argument("--kernel", default="auto", help="Local kernel. Default: auto.")
    choices = f"Strategies, separated by commas: {', '.join(STRATEGIES)}."
    parser.add_argument("--strategies", type=names(STRATEGIES), default=",".join(QUICK), help=choices)
    parser.add_argument("--calls", type=count, default=2, help="Calls in a row. Default: 2.")
    parser.add_argument("--seconds", type=float, default=5.0, help="Least seconds of measuring. Default: 5.")
    parser.add_argument("--limit", type=float, default=60.0, help="Seconds after which a part counts as hung.")
    parser.add_argument("--timeout", type=float, default=30.0, help="Seconds to wait for one message. Default: 30.")
    parser.add_argument("--label", default="run", help="The file is two-levels-LABEL.json.")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="Folder of the file.")
    arguments = parser.parse_args()
    if arguments.simulate:
        simulate(arguments)
        return
    Run(arguments).main()
    leave()


if __name__ == "__main__":
    end(main)
