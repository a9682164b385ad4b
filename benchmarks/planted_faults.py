"""Profile one attention with four planted faults, and compare the bottleneck that the profile names with the fault.

    torchrun --nproc-per-node 4 benchmarks/planted_faults.py
    torchrun --nproc-per-node 2 benchmarks/planted_faults.py --seq-len 2048 --heads 4 --head-dim 32

Each fault runs for some steps of `ring`, after some without a fault:

    late rank      rank 1 sleeps before each step
    slow rank      rank 1 runs matrix products next to its kernels
    slow link      rank 0 copies other data to the device of rank 1; the sequence is short, so transfers matter
    uneven plan    the layout is contiguous under a causal mask

The products of a slow rank and the copies of a slow link go on between steps, and steps do not wait for them.
Otherwise, that rank would enter the next step late, which is another fault.

Prints a line per fault and writes JSON. The exit code is 1 if a fault is not named, or if a cause is named without a
fault. A slow link that is not slower than the other links in the profile is TOO WEAK instead: then nothing was planted
that a profile could name. Two ranks have one link, which the copies slow in both directions. Then a profile must say
that communication is exposed. On CPUs, slow ranks and links are left out: ranks share cores and memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[1]))

import burst_portable as bp
from benchmarks.ranks import join, leave
from benchmarks.report import setting
from benchmarks.script import count, end, file
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.strategies.registry import make_strategy

DELAY = 0.5  # of a step, which the late rank sleeps
COPIED = 1 << 28  # bytes per copy of the slow link: about 1 ms over NVLink
COPIES = 4  # copies at a time, so that they take most of the link
WEAK = 1.5  # times the speed of a slow link: other links must be faster than this, or the copies did not slow it
AHEAD = 2  # products or copies that wait in a stream, so that it never lacks them
FIRST = -1  # priority of products whose programs start before those of attention


@dataclass(frozen=True)
class Fault:
    """A fault, and the kind, rank and peer that a profile must name (-1: none).

    `layout` is that of the attention, and its sequence is `shorter` times shorter than that of other faults.
    """

    name: str
    kind: str
    rank: int = -1
    peer: int = -1
    layout: str = "zigzag"
    shorter: int = 1


FAULTS = (
    Fault("none", "none"),
    Fault("late rank", "late rank", 1),
    Fault("slow rank", "slow rank", 1),
    Fault("slow link", "slow link", 0, 1, shorter=8),
    Fault("uneven plan", "uneven plan", -1, -1, "contiguous"),
)
ON_DEVICES = ("slow rank", "slow link")


def step_of(arguments: argparse.Namespace, mesh: bp.Mesh, device: torch.device, fault: Fault) -> Callable[[], None]:
    """Return forward and backward of one causal attention."""
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    placed = bp.make_layout(fault.layout, arguments.seq_len // fault.shorter, mesh.size)
    shape = (1, placed.count(mesh.rank), arguments.heads, arguments.head_dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    strategy = make_strategy("ring")

    def step() -> None:
        out = bp.attention(*leaves, mask="causal", mesh=mesh, layout=placed, strategy=strategy)
        torch.autograd.grad(out, leaves, dout)

    return step


@contextmanager
def beside(work: Callable[[], object], device: torch.device, streams: int, priority: int) -> Iterator[None]:
    """Let a thread keep some work running on separate streams. The first work, which takes longer, is done before."""
    every = [torch.Stream(device, priority=priority) for _ in range(streams)]
    ended = threading.Event()

    def repeat() -> None:
        torch.accelerator.set_device_index(device.index)
        started: deque[torch.Event] = deque()
        for stream in cycle(every):
            if ended.is_set():
                break
            with stream:
                work()
                started.append(stream.record_event())
            if len(started) > AHEAD * streams:
                started.popleft().synchronize()

    work()
    torch.accelerator.synchronize()
    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        torch.accelerator.synchronize()


@contextmanager
def planted(fault: Fault, rank: int, device: torch.device, seconds: float) -> Iterator[Callable[[], None]]:
    """Run a fault on its rank. Yields what the rank does before each step."""
    if fault.name == "late rank" and rank == fault.rank:
        yield lambda: time.sleep(DELAY * seconds)
    elif fault.name == "slow rank" and rank == fault.rank:
        x = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
        with beside(lambda: torch.mm(x, x), device, 1, FIRST):
            yield lambda: None
    elif fault.name == "slow link" and rank == fault.rank:
        source = torch.empty(COPIED, dtype=torch.uint8, device=device)
        target = torch.empty(COPIED, dtype=torch.uint8, device=torch.device(device.type, fault.peer))
        with beside(copies(source, target), device, COPIES, 0):
            yield lambda: None
    else:
        yield lambda: None


def copies(source: torch.Tensor, target: torch.Tensor) -> Callable[[], object]:
    """Return a function that copies between devices on the current stream.

    torch lets a copy wait for the current stream of the target's device, and that stream for the copy. So each of the
    copies that run at the same time has its own stream there.
    """
    there = cycle([torch.Stream(target.device) for _ in range(COPIES)])

    def copy() -> None:
        here = torch.accelerator.current_stream(source.device)
        with next(there), here:
            target.copy_(source, non_blocking=True)

    return copy


def slowed(links: list[dict[str, Any]], fault: Fault) -> float | None:
    """Return the median speed of the other links over that of the planted one; None without a planted link."""
    speeds = {(link["source"], link["target"]): link["bytes_per_second"] for link in links}
    mine = speeds.pop((fault.rank, fault.peer), None)
    known = [speed for speed in speeds.values() if speed]
    return statistics.median(known) / mine if mine and known else None


def is_named(fault: Fault, kind: str, rank: int, peer: int, ranks: int) -> bool:
    """Return whether a profile names this fault.

    With two ranks, no other link shows that one is slow. On two H200, the copies took both directions from 351 to 128
    GB/s. So the profile must say that communication is exposed.
    """
    if fault.kind == "slow link" and ranks == 2:
        return kind == "communication"
    return kind == fault.kind and (fault.rank < 0 or rank == fault.rank) and fault.peer in (-1, peer)


def run(fault: Fault, arguments: argparse.Namespace, mesh: bp.Mesh, device: torch.device) -> dict[str, Any] | None:
    """Profile some steps with a fault. Returns the results on rank 0."""
    step = step_of(arguments, mesh, device, fault)
    for _ in range(3):
        step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    dist.barrier()
    started = time.perf_counter()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    usual = time.perf_counter() - started
    with planted(fault, mesh.rank, device, usual) as before:
        dist.barrier()
        with bp.profile("standard", mesh=mesh) as session:
            for _ in range(arguments.steps):
                before()
                step()
                if device.type != "cpu":
                    torch.accelerator.current_stream(device).synchronize()  # not the planted work
                session.mark()
        dist.barrier()
    gathered = session.gather()
    if gathered is None:
        return None
    found = analyze(gathered)
    summary = found["summary"]
    named = [summary["kind"], summary["rank"], summary.get("peer", -1)]
    right = is_named(fault, *named, mesh.size)
    most = [{key: one[key] for key in ("kind", "rank", "peer", "share")} for one in found["bottlenecks"][:3]]
    facts = {key: found[key] for key in ("causes", "links", "ranks", "ring_steps")}
    how_much = slowed(found["links"], fault)
    weak = not right and how_much is not None and how_much < WEAK
    about = {"fault": fault.name, "right": right, "too_weak": weak, "slowed": how_much, "named": named}
    return {**about, "text": summary["text"], "largest": most, **facts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=count, default=65536, help="Tokens of the sequence. Default: 65536.")
    parser.add_argument("--heads", type=count, default=32, help="Query heads, and K/V heads. Default: 32.")
    parser.add_argument("--head-dim", type=count, default=128, help="Size of a head. Default: 128.")
    parser.add_argument("--steps", type=count, default=8, help="Steps with each fault. Default: 8.")
    parser.add_argument("--out", type=file, help="Write the results to this JSON file.")
    arguments = parser.parse_args()
    links = join(120.0)
    mesh = bp.Mesh.from_group(links.group)
    faults = [fault for fault in FAULTS if links.device.type != "cpu" or fault.name not in ON_DEVICES]
    found = [run(fault, arguments, mesh, links.device) for fault in faults]
    results = [one for one in found if one is not None]
    code = 0
    if links.rank == 0:
        for one in results:
            said = "named" if one["right"] else "TOO WEAK" if one["too_weak"] else "NOT NAMED"
            print(f"{one['fault']:12} {said}: {one['text'][:150]}")
            code |= not one["right"]
        if arguments.out is not None:
            facts = {"setting": {**setting(), "ranks": links.size}, "results": results}
            arguments.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
    leave()
    return int(code)


if __name__ == "__main__":
    end(main)
