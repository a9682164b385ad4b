"""Which block sizes are fastest here: the numbers behind `burst_portable/kernels/triton/tuning.py`.

    python benchmarks/tune.py --head 128 --length 16384 --mask causal --json tuned.json

Compiles every variant first, in parallel processes over one compile cache, checks each against float64, then times
them in random order. Prints one line a variant, best first, for each kernel.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.script import accelerator, count, end, names
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.contract import Options
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.numerics import row_delta
from burst_portable.tiles import Tiles, find_tiles

KERNELS = ("forward", "keys", "queries", "resumed")
FLOPS = {"forward": 4, "resumed": 4, "keys": 8, "queries": 6}  # products a pair and head, times 2·D
SIZES = {
    "forward": [(128, 64), (128, 128), (64, 64), (64, 128)],
    "keys": [(64, 64), (128, 64), (64, 128), (128, 32), (128, 128)],
    "queries": [(128, 64), (64, 64), (128, 128), (64, 128), (128, 32)],
}
SIZES["resumed"] = SIZES["forward"]
LIMIT = 1.2e-2


def variants(kernel: str, tma: bool) -> list[dict[str, object]]:
    """Everything worth a try; what does not compile is left out later."""
    return [
        {"rows": rows, "columns": columns, "warps": warps, "stages": stages, "tma": by_tma, "together": 4}
        for rows, columns in SIZES[kernel]
        for warps in (4, 8)
        for stages in (2, 3)
        for by_tma in ((True, False) if tma else (False,))
        if not (rows * columns >= 128 * 128 and warps == 4)
    ]


class Trial:
    """One kernel in one variant on one problem."""

    def __init__(self, kernel: str, blocks: dict[str, object], problem: dict[str, Tensor], tiles: Tiles) -> None:
        from burst_portable.kernels.triton.launch import TritonKernel
        from burst_portable.kernels.triton.tuning import Blocks, Tuning

        self.kernel, self.blocks, self.problem, self.tiles = kernel, blocks, problem, tiles
        chosen = (Blocks(**blocks),)  # type: ignore[arg-type]
        table = {"*": {256: Tuning(chosen, chosen, chosen)}}
        self.provider, self.options = TritonKernel(table), Options(problem["q"].shape[-1] ** -0.5)
        self.times: list[float] = []
        self.state: tuple[Tensor, Tensor] | None = None  # merging it with itself leaves out as it is

    def __call__(self) -> None:
        p, own = self.problem, self.provider
        if self.kernel == "forward":
            p["out"], _ = own.attend(p["q"], p["k"], p["v"], self.tiles, self.options)
        elif self.kernel == "resumed":
            state = self.state = self.state or own.attend(p["q"], p["k"], p["v"], self.tiles, self.options)
            p["out"], _ = own.attend(p["q"], p["k"], p["v"], self.tiles, self.options, state=state)
        else:
            wanted = own.only_keys if self.kernel == "keys" else own.only_queries
            arguments = (p[x] for x in ("dout", "q", "k", "v", "lse", "delta"))
            wanted(*arguments, self.tiles, self.options, (p["dq"], p["dk"], p["dv"]))

    def outputs(self) -> dict[str, Tensor]:
        names = {"forward": ("out",), "resumed": ("out",), "keys": ("dk", "dv"), "queries": ("dq",)}[self.kernel]
        return {name: self.problem[name] for name in names}


def make_problem(length: int, heads: int, kv_heads: int, head: int, dtype: torch.dtype) -> dict[str, Tensor]:
    device = accelerator()
    shapes = {"q": heads, "dout": heads, "k": kv_heads, "v": kv_heads}
    made = {n: torch.randn(1, length, h, head, device=device, dtype=dtype) for n, h in shapes.items()}
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        made[name] = torch.zeros_like(made[like], dtype=torch.float32)
    made["lse"] = torch.zeros(1, heads, length, device=device)
    made["delta"] = torch.zeros(1, heads, length, device=device)
    return made


def compile_one(job: tuple[str, dict[str, object], tuple[int, int, int, torch.dtype], str]) -> str | None:
    """In a process of its own: fill the compile cache. The reason if it cannot be."""
    kernel, blocks, (heads, kv_heads, head, dtype), mask = job
    tiles = whole(mask, 1024)
    try:
        Trial(kernel, blocks, make_problem(1024, heads, kv_heads, head, dtype), tiles)()
        torch.accelerator.synchronize()
    except (UnsupportedError, RuntimeError) as error:
        return str(error)[:300]
    return None


def whole(mask: str, length: int) -> Tiles:
    segment = (Segment(0, length),)
    return find_tiles(Mask.parse(mask, length), segment, segment)


def error_of(trial: Trial, expected: dict[str, Tensor]) -> float:
    """Largest relative error of what one run writes, against the reference."""
    if trial.kernel in ("keys", "queries"):  # which writes, where the others add
        for x in trial.outputs().values():
            x.zero_()
    trial()
    return max(
        float((x.double() - expected[name]).norm() / expected[name].norm()) for name, x in trial.outputs().items()
    )


def references(problem: dict[str, Tensor], tiles: Tiles) -> dict[str, Tensor]:
    """By the reference kernel in float64; fills the problem's lse and delta."""
    from burst_portable.kernels.reference import ReferenceKernel
    from burst_portable.numerics import finished

    options = Options(problem["q"].shape[-1] ** -0.5)
    q, k, v, dout = (problem[n].double() for n in ("q", "k", "v", "dout"))
    out, lse = finished(ReferenceKernel().attend(q, k, v, tiles, options), torch.float64)
    into = tuple(torch.zeros_like(x) for x in (q, k, v))
    ReferenceKernel().attend_backward(dout, q, k, v, lse, tiles, options, out=out, into=into)
    problem["lse"], problem["delta"] = lse.float(), row_delta(dout, out).float()
    return {"out": out, **dict(zip(("dq", "dk", "dv"), into, strict=True))}


def compiled(arguments: argparse.Namespace, shape: tuple[int, int, int, torch.dtype]) -> list[tuple[str, dict]]:
    """The variants that compile."""
    jobs = [
        (kernel, blocks, shape, arguments.mask)
        for kernel in arguments.kernels
        for blocks in variants(kernel, not arguments.pointers)
    ]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compile_one, jobs))
    for (kernel, blocks, *_), reason in zip(jobs, reasons, strict=True):
        if reason:
            print("left out", kernel, *blocks.values(), reason[:120].replace("\n", " "))
    return [(kernel, blocks) for (kernel, blocks, *_), reason in zip(jobs, reasons, strict=True) if not reason]


def pair(text: str) -> tuple[int, int]:
    """The type of an option: two numbers."""
    first, second = map(count, text.split(","))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=count, default=128)
    parser.add_argument("--heads", type=pair, default="32,32", help="heads, K/V heads")
    parser.add_argument("--length", type=count, default=16384)
    parser.add_argument("--mask", default="causal")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--kernels", type=names(KERNELS), default=",".join(KERNELS))
    parser.add_argument("--pointers", action="store_true", help="no hardware descriptors")
    parser.add_argument("--processes", type=count, default=12)
    parser.add_argument("--seconds", type=float, default=40, help="for the timing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    heads, kv_heads = arguments.heads
    dtype = getattr(torch, arguments.dtype)
    tiles, small = whole(arguments.mask, 1024), make_problem(1024, heads, kv_heads, arguments.head, dtype)
    started = time.time()
    kept = compiled(arguments, (heads, kv_heads, arguments.head, dtype))
    print(f"{len(kept)} variants compiled in {time.time() - started:.0f} s", flush=True)
    expected = references(small, tiles)
    right = []
    for kernel, blocks in kept:
        error = error_of(Trial(kernel, blocks, small, tiles), expected)
        if error < LIMIT:
            right.append((kernel, blocks))
        else:
            print("WRONG", kernel, *blocks.values(), f"error {error:.1e}")
    problem = make_problem(arguments.length, heads, kv_heads, arguments.head, dtype)
    tiles = whole(arguments.mask, arguments.length)
    report(time_all([Trial(kernel, blocks, problem, tiles) for kernel, blocks in right], arguments.seconds), arguments)


def time_all(trials: list[Trial], seconds: float) -> list[Trial]:
    """Rounds in random order until the time is up."""
    started, rounds = time.time(), 0
    while rounds < 3 or time.time() - started < seconds:
        order = random.sample(trials, len(trials))
        events = [(torch.Event(enable_timing=True), torch.Event(enable_timing=True)) for _ in order]
        for trial, (before, after) in zip(order, events, strict=True):
            before.record()
            trial()
            after.record()
        torch.accelerator.synchronize()
        for trial, (before, after) in zip(order, events, strict=True):
            trial.times.append(before.elapsed_time(after))
        rounds += 1
    return trials


def report(trials: list[Trial], arguments: argparse.Namespace) -> None:
    area = Mask.parse(arguments.mask, arguments.length).area(arguments.length, arguments.length)
    lines = []
    for trial in trials:
        flops = FLOPS[trial.kernel] * area * arguments.head * arguments.heads[0]
        speed = flops / statistics.median(trial.times[1:]) / 1e9
        lines.append({"kernel": trial.kernel, **trial.blocks, "tflops": round(speed, 1)})
    lines.sort(key=lambda line: (line["kernel"], -line["tflops"]))
    for kernel in KERNELS:
        for line in [x for x in lines if x["kernel"] == kernel][:14]:
            print(*line.values())
    if arguments.json:
        found = {"settings": vars(arguments), "variants": lines}
        arguments.json.write_text(json.dumps(found, indent=1, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    end(main)
