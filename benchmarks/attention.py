"""Compare local attention kernels on one GPU: every provider on every row, forward and backward.

    python -m benchmarks.attention                         all rows and providers
    python -m benchmarks.attention --quick                 the rows that fit a short run
    python -m benchmarks.attention --rows causal-16k,window --providers triton,cudnn,flex
    python -m benchmarks.attention --matrix 16k,4k         every head size with six masks, at these lengths

Results are checked before they are timed. Calls run in random order, round after round. TFLOP/s count the visible
(query, key) pairs: forward 2·pairs·H·(D + Dv), backward 2·pairs·H·(3·D + 2·Dv). Prints a table; writes JSON and a
picture to --out.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch import Tensor

from benchmarks.providers import PROVIDERS, Absent, Calls, Task, checked_heads, make_task, the_call_of_users
from benchmarks.report import HostTimes, Result, print_matrix, print_tables, write
from benchmarks.script import count, end, names, share

ERROR_LIMIT = 1.2e-2  # relative, against float32 on the same bf16 inputs; plain bf16 attention loses 2e-3 to 4e-3
LSE_LIMIT = 1e-4
LONG_TO_START = ("flex-max", "flex-flash")  # left out of --quick


@dataclass(frozen=True)
class Row:
    """Length, (query heads, K/V heads), head size, mask; size of the values if it differs, and softcap."""

    length: int
    heads: tuple[int, int]
    head: int
    mask: str
    quick: bool = False
    v_head: int | None = None
    softcap: float | None = None


def _documents(length: int, count: int) -> str:
    generator = random.Random(0)
    cuts = sorted(generator.sample(range(64, length), count - 1))
    return "documents:" + ",".join(map(str, [0, *cuts, length]))


ROWS: dict[str, Row] = {
    "causal-16k": Row(16384, (32, 32), 128, "causal", quick=True),
    "full-16k": Row(16384, (32, 32), 128, "full", quick=True),
    "causal-16k-gqa": Row(16384, (32, 8), 128, "causal", quick=True),
    "causal-8k-d64": Row(8192, (32, 32), 64, "causal", quick=True),
    "full-32k": Row(32768, (16, 16), 128, "full"),
    "causal-32k": Row(32768, (16, 16), 128, "causal"),
    "causal-32k-gqa": Row(32768, (32, 8), 128, "causal"),
    "causal-4k": Row(4096, (32, 32), 128, "causal", quick=True),
    "full-4k": Row(4096, (32, 32), 128, "full", quick=True),
    "documents": Row(16384, (32, 32), 128, _documents(16384, 16), quick=True),
    "window": Row(16384, (32, 32), 128, "window:1024", quick=True),
    "documents-gqa": Row(16384, (32, 8), 128, _documents(16384, 16)),
    "window-gqa": Row(16384, (32, 8), 128, "window:1024"),
    "prefix": Row(16384, (32, 32), 128, "prefix:8192"),
    "sink": Row(16384, (32, 32), 128, "sink:64:1024"),
    "striped": Row(16384, (32, 32), 128, "striped"),
    "share-question": Row(16384, (32, 32), 128, "share_question:4096,3000,3000,3000,3288"),
    **{f"d{head}": Row(16384, (16, 16), head, "causal") for head in (16, 32, 64, 80, 96, 112, 160, 192, 256)},
    **{f"d{head}-gqa": Row(16384, (32, 8), head, "causal") for head in (64, 96, 256)},
    "mla": Row(16384, (16, 16), 192, "causal", v_head=128),
    "mla-gqa": Row(16384, (32, 8), 192, "causal", v_head=128),
    "softcap": Row(16384, (16, 16), 128, "causal", softcap=50.0),
    "d256-softcap": Row(16384, (16, 8), 256, "causal", softcap=50.0),
}

LENGTHS = {"4k": 4096, "16k": 16384, "32k": 32768}
HEADS: dict[str, tuple[int, int | None]] = {
    **{f"d{head}": (head, None) for head in (16, 32, 64, 80, 96, 112, 128, 160, 192, 256)},
    "mla": (192, 128),
}
MATRIX_MASKS = ("causal", "full", "gqa", "documents", "documents-gqa", "window", "softcap")


def matrix(length: str, chosen: Sequence[str] = MATRIX_MASKS) -> dict[str, Row]:
    """Return a row for each head size and mask at one length; 16 query heads, and 4 K/V heads in rows with "gqa".

    Documents have 1,024 tokens on average, windows have 1,024 tokens, and the softcap is 50.
    """
    tokens, rows = LENGTHS[length], {}
    documents = _documents(tokens, tokens // 1024)
    masks = {"documents": documents, "documents-gqa": documents, "window": "window:1024", "full": "full"}
    for mask in chosen:
        for name, (head, v_head) in HEADS.items():
            heads, softcap = (16, 4 if mask.endswith("gqa") else 16), 50.0 if mask == "softcap" else None
            found = Row(tokens, heads, head, masks.get(mask, "causal"), v_head=v_head, softcap=softcap)
            rows[f"{name}-{mask}-{length}"] = found
    return rows


@dataclass
class Entry:
    """One provider on one row: its calls and their times."""

    name: str
    calls: Calls
    result: Result
    times: dict[str, list[float]] = field(default_factory=lambda: {"forward": [], "backward": []})


# ----------------------------------------------------------------------------------------- correctness


def reference(task: Task) -> dict[str, Tensor]:
    """Compute dense attention of `checked_heads` in float32, with tf32 off.

    Returns out, dq, dk, dv of shape [B, S, H, D] of these heads, and lse of shape [B, H, S].
    """
    wide = (checked_heads(x, task.k.shape[2]).float().transpose(1, 2) for x in (task.q, task.k, task.v, task.dout))
    q, k, v, dout = wide
    length, result = q.shape[2], {}
    keep = _visible(task, length)
    out, lse, dq = torch.zeros_like(dout), q.new_zeros(q.shape[:3]), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for h in range(q.shape[1]):
        at = h // task.group
        s = (q[:, h] @ k[:, at].mT) * task.call.scale
        cap = task.call.softcap
        slope = None if cap is None else 1 - (s := (s / cap).tanh_()) ** 2
        s = s if cap is None else s * cap
        s.masked_fill_(~keep, -torch.inf)
        lse[:, h] = torch.logsumexp(s, -1)
        p = s.sub_(lse[:, h].unsqueeze(-1)).exp_().nan_to_num_(0.0)  # a row that sees nothing
        out[:, h] = p @ v[:, at]
        dv[:, at] += p.mT @ dout[:, h]
        ds = dout[:, h] @ v[:, at].mT
        ds.sub_((dout[:, h] * out[:, h]).sum(-1, keepdim=True)).mul_(p)
        ds = ds if slope is None else ds.mul_(slope)
        del s, p, slope
        dq[:, h] = ds @ k[:, at] * task.call.scale
        dk[:, at] += ds.mT @ q[:, h] * task.call.scale
        del ds
    for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        result[name] = x.transpose(1, 2)
    return {**result, "lse": lse}


def _visible(task: Task, length: int) -> Tensor:
    device = task.q.device
    i, j = torch.arange(length, device=device).unsqueeze(1), torch.arange(length, device=device).unsqueeze(0)
    keep = torch.zeros(length, length, dtype=torch.bool, device=device)
    for r in task.mask.regions:
        rows, columns = (i >= r.q_start) & (i < r.q_stop), (j >= r.k_start) & (j < r.k_stop)
        keep |= rows & columns & (i - j >= r.lo) & (i - j <= r.hi)
    return keep


def errors(calls: Calls, task: Task, expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative errors of one forward and one backward pass."""
    for buffer in task.extra.get("zero", ()):
        buffer.zero_()
    out, lse = calls[0]()
    dq, dk, dv = calls[1]()
    torch.accelerator.synchronize()
    found = {}
    for name, x in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv)):
        target = expected[name]
        mine = in_all_rows(checked_heads(x, task.k.shape[2]).float(), name, target.shape[1])
        difference = mine - target
        found[name] = float(difference.norm() / target.norm())
    if lse is not None:
        mine = checked_heads(lse.unsqueeze(1), task.k.shape[2]).squeeze(1)
        found["lse"] = float((mine - expected["lse"]).abs().masked_fill(mine == expected["lse"], 0.0).max())  # -inf too
    return found


def in_all_rows(x: Tensor, name: str, rows: int) -> Tensor:
    """Add zeros for the first query and the last key if a provider left them out; see `as_causal_square`."""
    if x.shape[1] != rows - 1:
        return x
    return functional.pad(x, (0, 0, 0, 0, 1, 0) if name in ("out", "dq") else (0, 0, 0, 0, 0, 1))


def wrong(found: dict[str, float]) -> bool:
    return any(not error < (LSE_LIMIT if name == "lse" else ERROR_LIMIT) for name, error in found.items())


# -------------------------------------------------------------------------------------------- measuring


def prepare(task: Task, providers: list[str], expected: dict[str, Tensor]) -> tuple[list[Entry], list[Result]]:
    """Return the providers that run and are correct, and the results of all."""
    entries, results = [], []
    for name in providers:
        task.extra["zero"] = []
        result = Result(task.name, name)
        results.append(result)
        started = time.time()
        try:
            calls = PROVIDERS[name](task)
            result.kernel = task.extra.pop("kernel", "")
            result.errors = errors(calls, task, expected)
        except Absent as reason:
            result.reason = str(reason)
            continue
        except Exception as error:  # noqa: BLE001  a package may raise anything; the next provider still runs
            result.reason = f"FAILED: {type(error).__name__}: {str(error)[:300]}"
            continue
        result.seconds_to_start = round(time.time() - started, 1)
        if wrong(result.errors):
            result.reason = f"WRONG: {result.errors}"
            continue
        result.peak_bytes = {"forward": peak(calls[0]), "backward": peak(calls[1])}
        entries.append(Entry(name, calls, result))
    return entries, results


def peak(call: Callable[[], object]) -> int:
    """Return the bytes that a call allocates."""
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    call()
    torch.accelerator.synchronize()
    return torch.accelerator.max_memory_allocated() - before


def measure(entries: list[Entry], seconds: float, least: int) -> None:
    """Time all calls in random order, round after round. The device is never idle within a round."""
    started, rounds = time.time(), 0
    while rounds < least or time.time() - started < seconds:
        order = [(entry, which) for entry in entries for which in ("forward", "backward")]
        random.shuffle(order)
        events = [(torch.Event(enable_timing=True), torch.Event(enable_timing=True)) for _ in order]
        for (entry, which), (before, after) in zip(order, events, strict=True):
            before.record()
            entry.calls[which == "backward"]()
            after.record()
        torch.accelerator.synchronize()
        for (entry, which), (before, after) in zip(order, events, strict=True):
            entry.times[which].append(before.elapsed_time(after))
        rounds += 1


def host_time(call: Callable[[], object], rounds: int = 20, repeats: int = 50) -> dict[str, float]:
    """Return the least and median host time of a call in microseconds; the device has nothing to wait for."""
    spent = []
    for _ in range(rounds + 1):
        torch.accelerator.synchronize()
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        spent.append((time.perf_counter() - started) / repeats * 1e6)
    torch.accelerator.synchronize()
    return {"least": round(min(spent[1:]), 1), "median": round(statistics.median(spent[1:]), 1)}


def flops_of(row: Row, task: Task, which: str) -> int:
    """Return the FLOPs of a pass, by the visible pairs of the mask."""
    head, v_head = row.head, row.v_head or row.head
    per_pair = 2 * (head + v_head) if which == "forward" else 2 * (3 * head + 2 * v_head)
    return per_pair * task.mask.num_pairs(row.length, row.length) * row.heads[0]


def finish(entry: Entry, row: Row, task: Task) -> None:
    for which, times in entry.times.items():
        entry.result.rounds[which] = [round(one, 4) for one in times[1:]]
        milliseconds = statistics.median(times[1:])
        entry.result.milliseconds[which] = round(milliseconds, 4)
        entry.result.tflops[which] = round(flops_of(row, task, which) / milliseconds / 1e9, 1)


def worth_compiling(row: Row, providers: list[str]) -> list[str]:
    """Return the providers without FlexAttention, which compiles for each row, if the row has no softcap."""
    return providers if row.softcap is not None else [name for name in providers if not name.startswith("flex")]


def task_of(name: str, row: Row) -> Task:
    return make_task(name, row.length, row.heads, row.head, row.mask, v_head=row.v_head, softcap=row.softcap)


def compile_row(name: str, row: Row, providers: list[str]) -> None:
    """Run each provider once, so that its kernels are in the caches on disk; results are neither checked nor timed."""
    task = task_of(name, row)
    for provider in providers:
        with suppress(Exception):  # the run that measures reports it
            PROVIDERS[provider](task)[1]()
    torch.accelerator.synchronize()


def run_row(name: str, row: Row, providers: list[str], seconds: float, least: int) -> list[Result]:
    task = task_of(name, row)
    expected = reference(task)
    entries, results = prepare(task, providers, expected)
    del expected
    measure(entries, seconds, least)
    for entry in entries:
        finish(entry, row, task)
    return results


def host_times(providers: list[str]) -> HostTimes:
    """Measure the host time of each provider and of `burst_portable.attention` on a tiny problem."""
    found = {}
    for name, make in [*((p, PROVIDERS[p]) for p in providers), ("attention()", the_call_of_users)]:
        task = make_task("host", 256, (1, 1), 128, "causal")
        try:
            calls = make(task)
        except Absent:
            continue
        found[name] = {w: host_time(c) for w, c in zip(("forward", "backward"), calls, strict=True)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=names(ROWS), help=f"Rows, separated by commas: {', '.join(ROWS)}. Default: all.")
    parser.add_argument("--matrix", type=names(LENGTHS), help="Rows of every head size and mask at these lengths.")
    parser.add_argument("--masks", type=names(MATRIX_MASKS), help="Masks of --matrix. Default: all.")
    parser.add_argument(
        "--share", type=share, default="0/1", help="I/N: only row I, I + N, ... of those named. Default: 0/1."
    )
    parser.add_argument("--compile-only", action="store_true", help="Fill the kernel caches; measure nothing.")
    parser.add_argument("--quick", action="store_true", help="Only the rows and providers that fit a short run.")
    parser.add_argument("--providers", type=names(PROVIDERS), help=f"Providers: {', '.join(PROVIDERS)}. Default: all.")
    parser.add_argument("--seconds", type=float, default=6.0, help="Seconds of measuring per row. Default: 6.")
    parser.add_argument("--rounds", type=count, default=5, help="Least rounds per row. Default: 5.")
    parser.add_argument("--no-host", dest="host", action="store_false", help="Do not measure host times.")
    parser.add_argument("--label", default="attention", help="Name of the files in --out.")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="Folder of the files.")
    arguments = parser.parse_args()
    rows = {name: ROWS[name] for name in arguments.rows or ()}
    for length in arguments.matrix or ():
        rows |= matrix(length, arguments.masks or MATRIX_MASKS)
    rows = rows or {n: r for n, r in ROWS.items() if r.quick or not arguments.quick}
    serving = worth_compiling if arguments.matrix else (lambda _, named: named)
    first, step = arguments.share
    rows = dict(list(rows.items())[first::step])
    providers = arguments.providers or [p for p in PROVIDERS if not (arguments.quick and p in LONG_TO_START)]
    if arguments.compile_only:
        for name, row in rows.items():
            compile_row(name, row, serving(row, providers))
        return
    results: list[Result] = []
    hosts = host_times(providers) if arguments.host else {}
    for name, row in rows.items():
        results += run_row(name, row, serving(row, providers), arguments.seconds, arguments.rounds)
        print(f"{name} done", flush=True)
        write(results, hosts, arguments.out, arguments.label)  # after every row: a cut run keeps what it has
    if arguments.matrix:
        print_matrix(results)
    else:
        print_tables(results, hosts)


if __name__ == "__main__":
    end(main)
