"""Time the block sizes of the portable kernels: the numbers behind `burst_portable/kernels/triton/tuning.py`.

    python -m benchmarks.tune --head 128 --length 16384 --masks "causal;window:1024;sink:64:1024" --json tuned.json

Compiles every variant in parallel processes, checks each against float64, then times them in random order, one mask
after the other. Prints one line per variant, fastest first. Out and gradients are in 16 bits. With --adding, gradients
are added to float32 buffers. "resumed" merges into a running state.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from benchmarks.report import setting
from benchmarks.script import accelerator, count, end, file, names
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.numerics import row_delta
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles, find_tiles

KERNELS = ("forward", "keys", "queries", "resumed")
FLOPS = {"forward": 4, "resumed": 4, "keys": 8, "queries": 6}  # of a pair and head, times D
SIZES = {
    "forward": [(128, 64), (128, 128), (64, 64), (64, 128)],
    "keys": [(64, 64), (128, 64), (64, 128), (128, 32), (128, 128)],
    "queries": [(128, 64), (64, 64), (128, 128), (64, 128), (128, 32)],
}
SIZES["resumed"] = SIZES["forward"]
LOADS = {"descriptors": True, "pointers": False}  # how columns are read: by hardware descriptors or not
LIMIT = 1.2e-2
SHORT = 1024  # tokens that variants are compiled with and checked on


def variants(kernel: str, loads: list[bool]) -> list[dict[str, object]]:
    """Return all variants to try. Those that do not compile are left out later."""
    return [
        {"rows": rows, "columns": columns, "warps": warps, "stages": stages, "tma": by_tma, "together": 4}
        for rows, columns in SIZES[kernel]
        for warps in (4, 8)
        for stages in (2, 3, 4)
        for by_tma in loads
        if not (rows * columns >= 128 * 128 and warps == 4) and not (rows * columns > 64 * 64 and stages == 4)
    ]


class Trial:
    """One kernel in one variant on one problem."""

    def __init__(
        self, kernel: str, blocks: dict[str, object], problem: dict[str, Tensor], tiles: Tiles, *, adding: bool
    ) -> None:
        from burst_portable.kernels.triton.triton_kernel import TritonKernel
        from burst_portable.kernels.triton.tuning import Blocks, Tuning

        self.kernel, self.blocks, self.problem, self.tiles, self.adding = kernel, blocks, problem, tiles, adding
        chosen = (Blocks(**blocks),)  # type: ignore[arg-type]
        table = {"*": {256: Tuning(chosen, chosen, chosen)}}
        self.provider, self.call = TritonKernel(table), AttentionCall.of(problem["q"], problem["k"], problem["v"])
        self.times: list[float] = []
        self.state: tuple[Tensor, Tensor] | None = None  # merging it with itself leaves out as it is

    def __call__(self) -> None:
        p, own = self.problem, self.provider
        if self.kernel == "forward":
            p["out"], _ = own.forward_single_call(p["q"], p["k"], p["v"], self.tiles, self.call)
        elif self.kernel == "resumed":
            state = self.state = self.state or own.attend(p["q"], p["k"], p["v"], self.tiles, self.call)
            p["out"], _ = own.attend(p["q"], p["k"], p["v"], self.tiles, self.call, state=state)
        else:
            wanted = own.only_keys if self.kernel == "keys" else own.only_queries
            inputs = tuple(p[x] for x in ("q", "k", "v", "dout", "lse", "delta"))
            wanted(inputs, self.tiles, self.call, (p["dq"], p["dk"], p["dv"]), add=self.adding)

    def outputs(self) -> dict[str, Tensor]:
        names = {"forward": ("out",), "resumed": ("out",), "keys": ("dk", "dv"), "queries": ("dq",)}[self.kernel]
        return {name: self.problem[name] for name in names}


Shape = tuple[int, int, int, torch.dtype, bool]
"""Heads, K/V heads, head size, dtype, and whether gradients are added up."""


def make_problem(length: int, shape: Shape) -> dict[str, Tensor]:
    heads, kv_heads, head, dtype, adding = shape
    device = accelerator()
    shapes = {"q": heads, "dout": heads, "k": kv_heads, "v": kv_heads}
    made = {n: torch.randn(1, length, h, head, device=device, dtype=dtype) for n, h in shapes.items()}
    for name, like in (("dq", "q"), ("dk", "k"), ("dv", "v")):
        made[name] = torch.zeros_like(made[like], dtype=torch.float32 if adding else dtype)
    made["lse"] = torch.zeros(1, heads, length, device=device)
    made["delta"] = torch.zeros(1, heads, length, device=device)
    return made


def compile_one(job: tuple[str, dict[str, object], Shape]) -> str | None:
    """Fill the compile cache, in a separate process. Return the reason if it fails."""
    kernel, blocks, shape = job
    try:
        Trial(kernel, blocks, make_problem(SHORT, shape), whole("causal", SHORT), adding=shape[-1])()
        torch.accelerator.synchronize()
    except (UnsupportedError, RuntimeError) as error:
        return str(error)[:300]
    return None


def whole(mask: str, length: int) -> Tiles:
    segment = (Segment(0, length),)
    return find_tiles(Mask.parse(mask, length), segment, segment)


def error_of(trial: Trial, expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of one run against the reference."""
    if trial.kernel in ("keys", "queries"):  # with `add=False` it writes; otherwise it adds
        for x in trial.outputs().values():
            x.zero_()
    trial()
    return max(
        float((x.double() - expected[name]).norm() / expected[name].norm()) for name, x in trial.outputs().items()
    )


def references(problem: dict[str, Tensor], tiles: Tiles) -> dict[str, Tensor]:
    """Return the results of the reference kernel in float64; fill the problem's lse and delta."""
    from burst_portable.kernels.reference import ReferenceKernel
    from burst_portable.numerics import finished

    q, k, v, dout = (problem[n].double() for n in ("q", "k", "v", "dout"))
    call = AttentionCall.of(q, k, v)
    out, lse = finished(ReferenceKernel().attend(q, k, v, tiles, call), torch.float64)
    into = tuple(torch.zeros_like(x) for x in (q, k, v))
    ReferenceKernel().attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), tiles, call, into=into)
    problem["lse"], problem["delta"] = lse.float(), row_delta(dout, out).float()
    return {"out": out, **dict(zip(("dq", "dk", "dv"), into, strict=True))}


def compiled(arguments: argparse.Namespace, shape: Shape) -> list[tuple[str, dict]]:
    """Return the variants that compile."""
    jobs = [
        (kernel, blocks, shape)
        for kernel in arguments.kernels
        for blocks in variants(kernel, [LOADS[name] for name in arguments.loads])
    ]
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as pool:
        reasons = list(pool.map(compile_one, jobs))
    for (kernel, blocks, *_), reason in zip(jobs, reasons, strict=True):
        if reason:
            print("left out", kernel, *blocks.values(), reason[:120].replace("\n", " "))
    return [(kernel, blocks) for (kernel, blocks, *_), reason in zip(jobs, reasons, strict=True) if not reason]


def pair(text: str) -> tuple[int, int]:
    """Parse two numbers."""
    first, second = map(count, text.split(","))
    return first, second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=count, default=128, help="Head size. Default: 128.")
    parser.add_argument("--heads", type=pair, default="32,32", help="Query heads and K/V heads. Default: 32,32.")
    parser.add_argument("--length", type=count, default=16384, help="Tokens. Default: 16384.")
    parser.add_argument(
        "--masks",
        type=lambda text: text.split(";"),
        default="causal",
        help="Masks, separated by semicolons. Default: causal.",
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument(
        "--kernels", type=names(KERNELS), default=",".join(KERNELS), help=f"Kernels: {', '.join(KERNELS)}."
    )
    parser.add_argument(
        "--loads", type=names(LOADS), default=",".join(LOADS), help="How columns are loaded: descriptors, pointers."
    )
    parser.add_argument("--adding", action="store_true", help="Add gradients to float32 buffers.")
    parser.add_argument("--processes", type=count, default=12, help="Processes that compile. Default: 12.")
    parser.add_argument("--seconds", type=float, default=40, help="Seconds of measuring per mask. Default: 40.")
    parser.add_argument("--json", type=file, help="Write the results to this JSON file.")
    arguments = parser.parse_args()
    shape = (*arguments.heads, arguments.head, getattr(torch, arguments.dtype), arguments.adding)
    masks = {
        mask: whole(mask, arguments.length) for mask in arguments.masks
    }  # raises for an unknown mask before the long part
    started = time.time()
    kept = compiled(arguments, shape)
    print(f"{len(kept)} variants compiled in {time.time() - started:.0f} s", flush=True)
    right = checked(kept, shape)
    problem, found = make_problem(arguments.length, shape), {}
    for mask, tiles in masks.items():
        trials = [Trial(kernel, blocks, problem, tiles, adding=arguments.adding) for kernel, blocks in right]
        found[mask] = speeds(time_all(trials, arguments.seconds), mask, arguments)
        print_best(mask, found[mask])
    if arguments.json:
        written = {"setting": {**setting(), **vars(arguments)}, "variants": found}
        arguments.json.write_text(json.dumps(written, indent=1, default=str) + "\n", encoding="utf-8")


def checked(kept: list[tuple[str, dict]], shape: Shape) -> list[tuple[str, dict]]:
    """Return the variants whose results are correct."""
    tiles, small, right = whole("causal", SHORT), make_problem(SHORT, shape), []
    expected = references(small, tiles)
    for kernel, blocks in kept:
        error = error_of(Trial(kernel, blocks, small, tiles, adding=shape[-1]), expected)
        if error < LIMIT:
            right.append((kernel, blocks))
        else:
            print("WRONG", kernel, *blocks.values(), f"error {error:.1e}")
    return right


def time_all(trials: list[Trial], seconds: float) -> list[Trial]:
    """Time all in rounds of random order, until the time is up."""
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


def speeds(trials: list[Trial], mask: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Print one line per variant, the fastest of each kernel first."""
    num_pairs = Mask.parse(mask, arguments.length).num_pairs(arguments.length, arguments.length)
    lines: list[dict[str, object]] = []
    for trial in sorted(trials, key=lambda trial: (trial.kernel, statistics.median(trial.times[1:]))):
        flops = FLOPS[trial.kernel] * num_pairs * arguments.head * arguments.heads[0]
        speed = flops / statistics.median(trial.times[1:]) / 1e9
        lines.append({"kernel": trial.kernel, **trial.blocks, "tflops": round(speed, 1)})
    return lines


def print_best(mask: str, lines: list[dict[str, object]]) -> None:
    for kernel in KERNELS:
        for line in [x for x in lines if x["kernel"] == kernel][:14]:
            print(mask, *line.values(), flush=True)


if __name__ == "__main__":
    end(main)
