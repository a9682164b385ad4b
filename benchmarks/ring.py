"""Compare strategies on the GPUs of one host: ours, torch's context_parallel, ring-flash-attn, and Ulysses over NCCL.

    torchrun --nproc-per-node 8 benchmarks/ring.py
    torchrun --nproc-per-node 8 benchmarks/ring.py --rows 32k,128k-gqa --kernels hopper,cudnn --contestants all

Every contestant uses the same local kernel. Results are checked before they are timed. Calls run in random order, ten
in a row (fewer if one takes longer than 20 ms, one if it takes a second) and single ones; the slowest rank counts.
TFLOP/s are per GPU and count the visible pairs: forward 4·pairs·H·D, backward 2.5 times that. "Nothing sent" has the
same tiles and merges, with blocks that arrived before. "Plain call" is one kernel call with a rank's share of the work.
JSON and a picture are written after every row, so a run that stops early keeps its rows. On CPUs, use --rows tiny
--kernels auto --transports gloo.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[1]))

import burst_portable as bp
from benchmarks.other_rings import OTHERS, PLAIN
from benchmarks.providers import Absent, checked_heads
from benchmarks.ranks import Clock, Guard, connect, join, leave
from benchmarks.ring_report import Measured, print_tables, write
from benchmarks.ring_rows import QUICK_ROWS, ROWS, Row
from benchmarks.rings import Calls, Contestant, Task, ours
from benchmarks.script import current_device, end, names
from burst_portable.backends.selection import choose_kernel, for_device
from burst_portable.conformance.oracle import attention as dense_attention
from burst_portable.conformance.oracle import dense_mask
from burst_portable.errors import BurstError
from burst_portable.kernels.base import BackwardInputs
from burst_portable.layout import Segment
from burst_portable.measuring.timing import Peers, lap
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import find_tiles

ERROR_LIMIT = 1.2e-2  # relative, against attention of one device; both lose 2e-3 to 4e-3 in bf16
CALLS, AT_ONCE = 10, 0.2  # calls back to back, at most; seconds that they should take together
LONG = 1.0  # seconds of a call whose pause before the next one has no share in its time
COLD = 4  # rounds with single calls; where they take longer than calls back to back may, the first alone
LINK_SIZES = (8 << 20, 64 << 20, 256 << 20)
STRATEGIES = (
    "auto",
    "ring",
    "burst",
    "ring(transfer=direct)",
    "burst(transfer=direct)",
    "ring(transfer=direct, prefetch_steps=64)",
    "burst(transfer=direct, prefetch_steps=64)",
    "ring(transfer=direct, prefetch_steps=64, blocks_per_launch=64)",
    "burst(transfer=direct, prefetch_steps=64, blocks_per_launch=64)",
    "ring(transfer=direct, prefetch_steps=64, local_block_order=last)",
    "ring(transfer=direct, prefetch_steps=64, blocks_per_launch=64, local_block_order=last)",
    "ring(transfer=direct, prefetch_steps=64, blocks_per_launch=64, local_block_order=split)",
    "ring(transfer=direct, prefetch_steps=64, local_block_order=last, gradient_comm_dtype=input)",
    "ulysses",
    "ulysses(head_groups=2)",
    "ulysses(head_groups=4)",
    "double_ring",
)
CONTESTANTS = (*STRATEGIES, *OTHERS)
QUICK_STRATEGIES = (
    "auto",
    "ring(transfer=direct, prefetch_steps=64)",
    "ring(transfer=direct, prefetch_steps=64, blocks_per_launch=64)",
    "ulysses",
    "ulysses(head_groups=2)",
    "ulysses(head_groups=4)",
    "ring",
)


# ----------------------------------------------------------------------------------------- correctness


@dataclass
class Expected:
    """Results of one device for some K/V heads and the query heads that read them, for the unsharded sequence."""

    parts: dict[str, Tensor]
    by: str


def expected(row: Row, mask: bp.Mask, whole: list[Tensor]) -> Expected:
    """Compute short sequences in float32 with a dense mask, and long ones with one call of a checked kernel."""
    q, k, v, dout = (checked_heads(x, row.heads[1]) for x in whole)
    if row.length <= 4096:
        return Expected(_dense(mask, q, k, v, dout), "float32")
    call = AttentionCall.of(q, k, v, deterministic=False)
    kernel, _ = choose_kernel(for_device(q.device.type), call, "triton")
    segment = (Segment(0, row.length),)
    tiles = find_tiles(mask, segment, segment)
    q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    out, lse = kernel.attend(q, k, v, tiles, call)
    into = tuple(torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), tiles, call, into=into)
    return Expected(dict(zip(("out", "dq", "dk", "dv"), (out, *into), strict=True)), kernel.name)


def _dense(mask: bp.Mask, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    seen, scale = dense_mask(mask, q.shape[1]).to(q.device), q.shape[-1] ** -0.5
    answer = dense_attention(q, k, v, dout, seen, scale=scale, dtype=torch.float32)
    return {name: getattr(answer, name) for name in ("out", "dq", "dk", "dv")}


def errors(found: tuple[Tensor, ...], task: Task, right: Expected, clock: Clock, mesh: bp.Mesh) -> dict[str, float]:
    """Return the relative errors of (out, dq, dk, dv) on the worst rank."""
    worst, kv_heads = {}, task.k.shape[2]
    for (name, target), result in zip(right.parts.items(), found, strict=True):
        mine = bp.shard(target, mesh, layout=task.layout).float()
        gap = (checked_heads(result.detach(), kv_heads).float() - mine).norm() / mine.norm()
        worst[name] = clock.slowest(float(gap) if torch.isfinite(gap) else float("inf"))
    return worst


# -------------------------------------------------------------------------------------------- measuring


@dataclass
class Entry:
    """A contestant on a row, ready to be measured."""

    calls: Calls
    result: Measured
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def due(self, which: str, rounds: int) -> tuple[tuple[str, int], ...]:
        """Return what is measured in this round, and in how many calls in a row; the same on all ranks."""
        single = f"{which}, cold"
        if not rounds:
            return ((single, 1),)
        one = self.seconds[single][0]
        several = max(2, min(CALLS, round(AT_ONCE / one))) if one < LONG else 1
        return ((which, several), (single, 1)) if several == CALLS and rounds < COLD else ((which, several),)


class Run:
    """All rows of one run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.started = arguments, time.monotonic()
        self.links = join(arguments.timeout)
        self.clock, self.guard = Clock(self.links), Guard(self.links.rank)
        connect(self.links, arguments.transports)
        for name, found in self.links.transports.items():
            if isinstance(found, str):
                self.say(f"no {name}: {found}")
        self.results: list[Measured] = []
        self.links_measured: list[dict[str, object]] = []

    def main(self) -> None:
        for row in self.arguments.rows:
            for kernel in self.arguments.kernels:
                if not self.left():
                    break
                timer = self.guard.watch(self.arguments.row_limit, f"{row} with {kernel}")
                self.row(row, kernel)
                timer.cancel()
                self.say(f"{row} with {kernel} done, {time.monotonic() - self.started:.0f} s")
                self.save()
        if self.arguments.links and self.left():
            self.measure_links()
            self.save()
        if self.links.rank == 0:
            print_tables(self.results, self.links_measured)

    def left(self) -> bool:
        """Return whether there is time for another row; the same on all ranks."""
        return self.clock.slowest(time.monotonic() - self.started) < self.arguments.budget

    def say(self, text: str) -> None:
        if self.links.rank == 0:
            print(text, flush=True)

    def save(self) -> None:
        if self.links.rank == 0:
            write(self.results, self.links_measured, self.arguments.out, f"ring-{self.arguments.label}")

    def contestants(self) -> list[Contestant]:
        """Return the requested contestants; ours also with nothing sent."""
        asked, made = self.arguments.contestants, []
        for strategy in STRATEGIES:
            if strategy in asked:
                for transport in (n for n, found in self.links.transports.items() if not isinstance(found, str)):
                    made.append(ours(strategy, transport))
                    if not self.arguments.all_sent:
                        made.append(ours(strategy, transport, sent=False))
        return made + [one for name, one in OTHERS.items() if name in asked]

    def row(self, name: str, kernel: str) -> None:
        row = ROWS[name]
        mask, mesh = bp.Mask.parse(row.mask, row.length), bp.Mesh.from_group(self.links.group)
        generator = torch.Generator(self.links.device).manual_seed(0)
        counts = (row.heads[0], row.heads[1], row.heads[1], row.heads[0])
        whole = [
            torch.randn(1, row.length, n, row.head, device=self.links.device, generator=generator).bfloat16()
            for n in counts
        ]
        right = expected(row, mask, whole)
        entries = []
        for contestant in self.contestants():
            layout = contestant.settle(self.links, row, mask, kernel)
            shards = [bp.shard(x, mesh, layout=layout).contiguous() for x in whole]
            task = Task(self.links, row.length, mask, layout, *shards, kernel=kernel)
            timer = self.guard.watch(self.arguments.contestant_limit, f"preparing {contestant.name} on {name}")
            entries += self.prepare(name, kernel, contestant, task, right, mesh)
            timer.cancel()
        del whole, right
        self.measure(entries, mask.num_pairs(row.length, row.length), row)

    def prepare(
        self, row: str, kernel: str, contestant: Contestant, task: Task, right: Expected, mesh: bp.Mesh
    ) -> list[Entry]:
        result = Measured(row, contestant.name, kernel, layout=task.layout.name)
        self.results.append(result)
        started = time.monotonic()
        try:
            calls = contestant.prepare(task)
            found = calls[0](), *calls[1]()
            self.clock.settle()
            result.chose, result.why = task.chose
            if result.chose:
                self.say(f"  {row}, {kernel}: {contestant.name} chose {result.chose}, layout {result.layout}")
        except Absent as reason:
            result.reason = str(reason)
        except (BurstError, RuntimeError, ImportError, AttributeError, AssertionError, TypeError) as error:
            # A row without this contestant is worth more than no rows.
            result.reason = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        failed = self.clock.slowest(float(bool(result.reason)))
        if failed and not result.reason:
            result.reason = "FAILED on another rank"
        elif not failed and contestant.name != PLAIN and "nothing sent" not in contestant.name:
            result.errors = errors(found, task, right, self.clock, mesh)
            if not all(error < ERROR_LIMIT for error in result.errors.values()):
                result.reason = f"WRONG: {result.errors}"
        result.seconds_to_start = round(time.monotonic() - started, 1)
        if result.reason:
            self.say(f"  {row}: {contestant.name}: {result.reason[:160]}")
            return []
        return [Entry(calls, result)]

    def measure(self, entries: list[Entry], num_pairs: int, row: Row) -> None:
        """Time all calls in random order, round after round.

        The order differs by row and kernel, because earlier calls leave the device warm or cool.
        """
        chance = random.Random(f"{row}, {entries[0].result.kernel if entries else ''}")
        started, rounds = time.monotonic(), 0
        while rounds < 2 or self.clock.slowest(time.monotonic() - started) < self.arguments.seconds:
            passes = [(entry, which) for entry in entries for which in ("forward", "backward")]
            order = [(entry, which, *due) for entry, which in passes for due in entry.due(which, rounds)]
            chance.shuffle(order)
            for entry, which, kind, calls in order:
                seconds = self.clock.time(entry.calls[which == "backward"], calls)
                entry.seconds.setdefault(kind, []).append(seconds)
            rounds += 1
        flops = 4 * num_pairs * row.heads[0] * row.head / self.links.size
        for entry in entries:
            for which, times in entry.seconds.items():
                seconds = statistics.median(times)
                entry.result.milliseconds[which] = round(seconds * 1e3, 4)
                entry.result.rounds[which] = [round(one * 1e3, 4) for one in times]
                entry.result.tflops[which] = round(flops * (2.5 if "backward" in which else 1) / seconds / 1e12, 4)

    def measure_links(self) -> None:
        """Measure GB/s per rank, each sending ten messages in a row to the next rank."""
        sizes = LINK_SIZES if self.clock.streams else (1 << 16,)
        peers = Peers.next(self.links.rank, self.links.size)
        for name, transport in self.links.transports.items():
            for count in sizes if not isinstance(transport, str) else ():
                run = lap(transport, torch.ones(count, dtype=torch.uint8, device=self.links.device), peers, CALLS)
                run()
                seconds = statistics.median(self.clock.time(run, 1) for _ in range(5))
                self.links_measured.append(
                    {"transport": name, "bytes": count, "gbps": round(CALLS * count / seconds / 1e9, 1)}
                )


def contestants(text: str) -> list[str]:
    """Parse names of contestants, or the name of a selection."""
    chosen = {"all": CONTESTANTS, "quick": (*QUICK_STRATEGIES, *OTHERS), "peers": ("auto", *OTHERS)}
    return list(chosen[text]) if text in chosen else names(CONTESTANTS)(text)


def kernels(text: str) -> list[str]:
    """Parse names of kernels for the current device."""
    return names(["auto", *(kernel.name for kernel in for_device(current_device().type).kernels())])(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=names(ROWS), default=",".join(QUICK_ROWS), help=f"Rows: {', '.join(ROWS)}.")
    parser.add_argument("--kernels", type=kernels, default="hopper,cudnn", help="Local kernels, one after the other.")
    parser.add_argument("--transports", default="nccl,peer_copy", help="Transports of our strategies.")
    selections = f"quick, all, peers (auto and other libraries), or names: {', '.join(CONTESTANTS)}."
    parser.add_argument("--contestants", type=contestants, default="quick", help=selections)
    parser.add_argument("--all-sent", action="store_true", help="Leave out 'nothing sent'.")
    parser.add_argument("--seconds", type=float, default=4.0, help="Least seconds of measuring per row and kernel.")
    parser.add_argument("--budget", type=float, default=400.0, help="Seconds after which no row begins.")
    parser.add_argument("--row-limit", type=float, default=240.0, help="Seconds after which a row counts as hung.")
    parser.add_argument(
        "--contestant-limit",
        type=float,
        default=90.0,
        help="Seconds after which preparing a contestant counts as hung.",
    )
    parser.add_argument("--timeout", type=float, default=30.0, help="Seconds to wait for one message. Default: 30.")
    parser.add_argument("--no-links", dest="links", action="store_false", help="Do not measure the links.")
    parser.add_argument("--label", default="run", help="The files are ring-LABEL.json and .svg.")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="Folder of the files.")
    arguments = parser.parse_args()
    arguments.transports = arguments.transports.split(",")
    run = Run(arguments)
    run.main()
    run.links.closing.close()
    leave()


if __name__ == "__main__":
    end(main)
