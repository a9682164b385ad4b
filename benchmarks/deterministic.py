"""Compare the deterministic backward pass of a kernel with the other one, side by side on one device.

    python -m benchmarks.deterministic --out build/deterministic.json
    python -m benchmarks.deterministic --tokens 16384 --head-dims 128 --masks causal,sink:64:1024

Gradients of both must agree, and those of two deterministic calls must be equal bits. Then rounds of several calls
alternate. "docs" are documents of 1,024 tokens, "ragged" have unequal lengths of 1,024 tokens on average. Prints the
share of the speed for each row, and writes JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import setting
from benchmarks.script import count, current_device, end, file
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import find_tiles

HEADS = ((16, 16), (16, 4))
MASKS = ("causal", "full", "docs", "ragged", "window:1024", "sink:64:1024")
DIFFERENCE = 1e-2  # relative to the other backward pass: both round to 16 bits


def mask_of(name: str, tokens: int) -> Mask:
    if name == "docs":
        return Mask.documents(list(range(0, tokens + 1, min(1024, tokens))))
    if name == "ragged":
        cuts = sorted(random.Random(0).sample(range(64, tokens), max(1, tokens // 1024 - 1)))
        return Mask.documents([0, *cuts, tokens])
    return Mask.parse(name)


def gap(x: Tensor, y: Tensor) -> float:
    """Return the 2-norm of the difference, relative to that of y."""
    return float((x.double() - y.double()).norm() / y.double().norm())


def inputs(tokens: int, heads: tuple[int, int], size: int, device: torch.device) -> tuple[Tensor, ...]:
    shapes = [(1, tokens, n, size) for n in (heads[0], heads[0], heads[1], heads[1])]
    dtype = torch.float64 if device.type == "cpu" else torch.bfloat16
    return tuple(torch.randn(shape, device=device, dtype=dtype) for shape in shapes)


def seconds(run: Callable[[], Gradients], calls: int, device: torch.device) -> float:
    """Return the seconds of one of some calls in a row."""
    if device.type != "cpu":
        torch.accelerator.synchronize()
    started = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return (time.perf_counter() - started) / calls


def measure(kernel: Kernel, tokens: int, heads: tuple[int, int], size: int, name: str, rounds: int) -> dict[str, Any]:
    """Check and time one row."""
    device = current_device()
    dout, q, k, v = inputs(tokens, heads, size, device)
    mask = mask_of(name, tokens)
    everything = (Segment(0, tokens),)
    tiles = find_tiles(mask, everything, everything)
    usual, ordered = (AttentionCall.of(q, k, v, mask=mask, deterministic=which) for which in (False, True))
    out, lse = kernel.forward_single_call(q, k, v, tiles, usual)
    given = BackwardInputs(dout, q, k, v, lse, out)
    runs = [lambda call=call: kernel.backward_single_call(given, tiles, call) for call in (usual, ordered)]
    first, second, other = runs[1](), runs[1](), runs[0]()
    equal = all(map(torch.equal, first, second))
    difference = max(gap(x, y) for x, y in zip(first, other, strict=True))
    calls = max(1, round(0.01 / seconds(runs[0], 2, device)))
    times = [[seconds(run, calls, device) for run in runs] for _ in range(rounds)]
    milliseconds = [1e3 * statistics.median(one[i] for one in times) for i in range(2)]
    share = statistics.median(one[0] / one[1] for one in times)
    return {
        "tokens": tokens,
        "head_dim": size,
        "heads": "/".join(map(str, heads)),
        "mask": name,
        "milliseconds": milliseconds[0],
        "deterministic_milliseconds": milliseconds[1],
        "share": share,
        "equal_in_two_calls": equal,
        "difference": difference,
    }


def counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def kernel_named(name: str) -> Kernel:
    if name == "reference":
        return ReferenceKernel()
    from burst_portable.backends.cuda.hopper.kernel import HopperKernel

    return HopperKernel()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=counts, default=[16384, 4096], help="Default: 16384,4096.")
    parser.add_argument("--head-dims", type=counts, default=[64, 80, 128], help="Default: 64,80,128.")
    parser.add_argument("--masks", default=list(MASKS), type=lambda text: text.split(","), help="Default: all.")
    parser.add_argument("--kernel", choices=("hopper", "reference"), default="hopper", help="Default: hopper.")
    parser.add_argument("--rounds", type=count, default=7, help="Rounds of both. Default: 7.")
    parser.add_argument("--out", type=file, help="Write the results to this JSON file.")
    arguments = parser.parse_args()
    kernel, results = kernel_named(arguments.kernel), []
    for tokens in arguments.tokens:
        for size in arguments.head_dims:
            for heads in HEADS:
                for name in arguments.masks:
                    one = measure(kernel, tokens, heads, size, name, arguments.rounds)
                    results.append(one)
                    wrong = "" if one["equal_in_two_calls"] and one["difference"] < DIFFERENCE else "  WRONG"
                    row = f"{tokens} {size} {one['heads']} {name}"
                    print(f"{row:36} {one['share']:.2f}  {one['difference']:.1e}{wrong}", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"setting": setting(), "results": results}, indent=1) + "\n")
    return 0 if all(one["equal_in_two_calls"] and one["difference"] < DIFFERENCE for one in results) else 1


if __name__ == "__main__":
    end(main)
