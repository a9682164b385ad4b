"""Check the profiler against known lengths and against torch.profiler's trace, and measure its cost.

    python -m benchmarks.profile_ring --what overlap
    torchrun --nproc-per-node 8 benchmarks/profile_ring.py --what ring --rows 32k,512k-gqa
    torchrun --nproc-per-node 8 benchmarks/profile_ring.py --what cost --rows 128k

`overlap` runs a kernel and a copy of known lengths at the same time on one device, and compares the partition with the
expected one. The device is held until the host has queued everything, so that both begin together.

`ring` profiles a few steps at level "kernels", and compares exposed communication and span with the tracer's events,
from a rank's first attention kernel to its last.

`cost` runs steps at each of the three levels and without a profiler, in turns.

JSON goes to --out. The exit code is 1 if a part differs by more than 2 % of the span.

On CPUs it runs with --rows tiny. A trace then has host operators only, which are not compared. A copy that ends before
the rank waits for it is not seen either.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

if not __package__:  # started as a script by torchrun
    sys.path.insert(0, str(Path(__file__).parents[1]))

import burst_portable as bp
from benchmarks.known_lengths import Found, apart_of, overlap
from benchmarks.ranks import Clock, join, leave
from benchmarks.ring import STRATEGIES
from benchmarks.ring_rows import ROWS
from benchmarks.script import count, current_device, end, file, names
from burst_portable.backends.selection import for_device
from burst_portable.profiling.analysis.analyze import analyze
from burst_portable.profiling.analysis.matching import match
from burst_portable.profiling.event_tables import KernelTrace, RankRecords
from burst_portable.profiling.intervals import Timeline
from burst_portable.runtime.prepared_call import call_wrapper

WITHIN = 0.02  # of the span
_SETTLING, _MAX_SETTLING = 2, 50  # steps before those that are timed, at least and at most
_SETTLING_SECONDS = 0.3  # of steps before those that are timed: after a pause, a device has higher clocks
_PAUSE = 0.5  # seconds before the steps of a turn that starts a tracer, and before those without it
_CALLS = 3  # steps that are timed together
COMPARED = ("span", "compute", "exposed_comm")


# ----------------------------------------------------------------------------------------- a ring, and its trace


def steps_of(row_name: str, mesh: bp.Mesh, device: torch.device, strategy: Any) -> Callable[[], None]:
    """Return one training step's attention of a row: forward and backward on this rank's shards."""
    row = ROWS[row_name]
    mask = bp.Mask.parse(row.mask, row.length)
    layout = bp.make_layout(row.layout, row.length, mesh.size, mask)
    rows = layout.count(mesh.rank)
    dtype = torch.bfloat16 if for_device(device.type).capabilities.streams else torch.float32
    counts = row.heads[0], row.heads[1], row.heads[1], row.heads[0]
    q, k, v, dout = (torch.randn(1, rows, n, row.head, device=device, dtype=dtype) for n in counts)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        out = bp.attention(*leaves, mask=mask, mesh=mesh, layout=layout, strategy=strategy, deterministic=False)
        torch.autograd.grad(out, leaves, dout)

    return step


def by_marks(one: RankRecords, every: list[RankRecords]) -> Found:
    """Return the partition from the first to the last kernel, by the profiler. Host-only waits are left out."""
    messages = match(every)
    compute, message, collective = (one.tables[kind] for kind in ("compute", "message", "collective"))
    mine = (messages.target == one.rank) & messages.is_observed
    waits = np.concatenate((message.waits(), collective.select(collective["agreement"] == 0).spans()))
    return _between(Timeline.of(compute.spans(), np.concatenate((waits, messages.transfers()[mine]))))


def by_trace(traced: KernelTrace) -> Found:
    """Return the same partition by the tracer's events."""
    rows = traced.rows
    compute, comm, wait, _ = (rows[rows[:, 4] == kind, 6:] for kind in range(len(KernelTrace.KINDS)))
    return _between(Timeline.of(compute, np.concatenate((comm, wait))))


def _between(timeline: Timeline) -> Found:
    window = np.array([[timeline.compute[0, 0], timeline.compute[-1, 1]]])
    return {name: int(timeline.measure(window)[name][0]) for name in COMPARED}


def ring(row: str, mesh: bp.Mesh, device: torch.device, strategy: Any, steps: int) -> Found | None:
    """Profile some steps at level "kernels". Returns the numbers of profiler and trace on rank 0."""
    step = steps_of(row, mesh, device, strategy)
    for _ in range(2):
        step()
    with bp.profile("kernels", mesh=mesh):  # its first start takes long, and not equally long everywhere
        step()
    with bp.profile("kernels", mesh=mesh) as session:
        dist.barrier()
        for _ in range(steps):
            step()
            session.mark()
    gathered = session.gather()
    if gathered is None:
        return None
    ranks = []
    for one in gathered:
        assert one.kernel_trace is not None, "this level records a trace"
        marks, trace = by_marks(one, gathered), by_trace(one.kernel_trace)
        apart = {name: apart_of(marks[name], trace[name], trace["span"]) for name in COMPARED}
        ranks.append({"rank": one.rank, "marks": marks, "trace": trace, "apart": apart})
    data = analyze(gathered)
    on_device = all(one.kernel_trace.on_device for one in gathered if one.kernel_trace)
    told = {"row": row, "steps": steps, "on_device": on_device, "verdict": data["summary"]["text"], "ranks": ranks}
    traced = [one["contention"] for one in data["kernel_trace"]]
    return {**told, "achieved": data["efficiency"], "contention": {"traced": traced, "marked": data["contention"]}}


# ----------------------------------------------------------------------------------------- what watching costs


def cost(row: str, mesh: bp.Mesh, device: torch.device, strategy: Any, clock: Clock, rounds: int) -> Found:
    """Return the seconds of a step at each level and without it, in turns, on the slowest rank.

    A session of "basic" or "standard" is open for all of its rounds, as in a training that is profiled. Its start and
    its end make pauses, after which a device has other clocks. A tracer has to start and end, so both turns of
    "kernels" begin after the same pause. The extra of a level is the median of paired differences.
    """
    step = steps_of(row, mesh, device, strategy)
    settling = _steps_to_settle(step, clock)
    seen: dict[str, dict[str, list[float]]] = {}
    for level in ("basic", "standard"):
        with bp.profile(level, mesh=mesh) as session:
            observe = call_wrapper.get()

            def turn(recorded: bool, session: Any = session, observe: Any = observe) -> float:
                token = call_wrapper.set(observe if recorded else None)
                try:
                    return _timed(step, clock, settling)
                finally:
                    call_wrapper.reset(token)
                    if recorded:
                        session.mark()

            seen[level] = _in_turns(turn, rounds)

    def traced(recorded: bool) -> float:
        with bp.profile("kernels", mesh=mesh) if recorded else nullcontext():
            time.sleep(_PAUSE)
            return _timed(step, clock, settling)

    seen["kernels"] = _in_turns(traced, rounds)
    off = statistics.median(took for one in seen.values() for took in one["off"])
    extra = {
        level: statistics.median(on - off for off, on in zip(one["off"], one["on"], strict=True))
        for level, one in seen.items()
    }
    return {"row": row, "rounds": rounds, "settling": settling, "seconds": seen, "off": off,
            "share": {level: one / off for level, one in extra.items()}}  # fmt: skip


def _steps_to_settle(step: Callable[[], None], clock: Clock) -> int:
    """Return the number of steps, equal on all ranks, after which the clocks of a device have settled."""
    for _ in range(_SETTLING):
        step()
    return max(_SETTLING, min(_MAX_SETTLING, round(_SETTLING_SECONDS / clock.time(step, _CALLS))))


def _in_turns(turn: Callable[[bool], float], rounds: int) -> dict[str, list[float]]:
    """Return the seconds with and without a profile. The first of a round alternates, and two rounds warm up."""
    seen: dict[str, list[float]] = {"off": [], "on": []}
    for index in range(-2, rounds):
        for recorded in (False, True) if index % 2 else (True, False):
            took = turn(recorded)
            if index >= 0:
                seen["on" if recorded else "off"].append(took)
    return seen


def _timed(step: Callable[[], None], clock: Clock, settling: int) -> float:
    for _ in range(settling):
        step()
    return clock.time(step, _CALLS)


# ----------------------------------------------------------------------------------------- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--what", choices=("overlap", "ring", "cost"), required=True, help="What to measure: see above."
    )
    parser.add_argument("--rows", type=names(ROWS), default=["tiny"], help=f"Rows: {', '.join(ROWS)}.")
    parser.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="ring",
        metavar="NAME",
        help="Label of a strategy, as in ring.py. Default: ring.",
    )
    parser.add_argument("--steps", type=count, default=5, help="Profiled steps. Default: 5.")
    parser.add_argument("--rounds", type=count, default=20, help="Rounds of `cost`. Default: 20.")
    parser.add_argument("--out", type=file, help="Write the results to this JSON file.")
    arguments = parser.parse_args()
    found: Found = {"what": arguments.what, "torch": torch.__version__, "strategy": arguments.strategy}
    if arguments.what == "overlap":
        device = current_device()
        found |= {"device": _name(device), "runs": overlap(device)}
        return _told(found, arguments.out)
    links = join(120.0)
    mesh, clock, strategy = bp.Mesh.from_group(links.group), Clock(links), arguments.strategy
    found |= {"device": _name(links.device), "ranks": links.size}
    if arguments.what == "ring":
        runs = [ring(row, mesh, links.device, strategy, arguments.steps) for row in arguments.rows]
    else:
        runs = [cost(row, mesh, links.device, strategy, clock, arguments.rounds) for row in arguments.rows]
    found["runs"] = runs
    code = _told(found, arguments.out) if links.rank == 0 else 0
    dist.barrier()
    leave()
    return code


def _name(device: torch.device) -> str:
    module = torch.get_device_module(device)
    return str(module.get_device_name()) if hasattr(module, "get_device_name") else device.type


def _told(found: Found, out: Path | None) -> int:
    """Print and write the results. Return 1 if profiler and reference differ by more than 2 % of the span."""
    wrong, compared = 0, False
    for run in found["runs"]:
        compared |= run.get("on_device", found["what"] == "overlap")
        if found["what"] == "cost":
            shares = ", ".join(f"{level} {100 * share:+.2f} %" for level, share in run["share"].items())
            print(f"{run['row']}: a step takes {run['off'] * 1e3:.3f} ms without a profiler; {shares}")
        elif found["what"] == "overlap":
            for name, expected in run["expected"].items():
                apart = run["apart"][name]
                wrong += apart["of_span"] > WITHIN
                print(f"{name:13} expected {expected * 1e3:8.3f} ms, measured {run['measured'][name] * 1e3:8.3f} ms: "
                      f"{_in_words(apart)} apart")  # fmt: skip
        else:
            print(f"{run['row']}: {run['verdict']}")
            for rank in run["ranks"]:
                note = "" if run["on_device"] else " (host: not compared)"
                print(f"  rank {rank['rank']}, marks / trace{note}")
                for name in COMPARED:
                    apart = rank["apart"][name]
                    wrong += run["on_device"] and name != "compute" and apart["of_span"] > WITHIN
                    print(f"    {name:13} {rank['marks'][name] / 1e6:9.3f} / {rank['trace'][name] / 1e6:9.3f} ms: "
                          f"{_in_words(apart)} apart")  # fmt: skip
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if compared:
        print("within 2 % of the span" if not wrong else f"{wrong} are more than 2 % of the span apart")
    return 1 if wrong else 0


def _in_words(apart: dict[str, float | None]) -> str:
    of_span, of_itself = apart["of_span"], apart["of_itself"]
    assert of_span is not None, "a span is more than 0"
    return f"{100 * of_span:.2f} % of the span" + (f", {100 * of_itself:.2f} % of itself" if of_itself else "")


if __name__ == "__main__":
    end(main)
