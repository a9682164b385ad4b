"""Compare the host time of a call like the previous one with that of torch's SDPA, on one device.

    python -m benchmarks.host_time --out build/host-time.json
    python -m benchmarks.host_time --tokens 512 --heads 8/8,8/2 --profile

Calls are causal. "Both passes" includes autograd. Results are compared with SDPA before they are timed. All calls of a
row alternate in random order, and the device is idle before each. Prints the least time of all rounds, in microseconds,
and writes JSON to --out. --profile adds the functions in which our calls of both passes spend the most time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import burst_portable
from benchmarks.deterministic import counts, gap
from benchmarks.report import setting
from benchmarks.script import accelerator, count, end, file
from burst_portable.errors import UnsupportedError

REPEATS = 20  # calls per time: the device cannot fall behind by more than this
DIFFERENCE = 2e-2  # relative to SDPA, both with results of 16 bits

Call = Callable[[], Any]


def calls_of(tokens: int, heads: tuple[int, int], dim: int, device: torch.device) -> dict[str, Call]:
    """Return the calls of one row by name, after comparing results and gradients.

    Raises:
        UnsupportedError: A result of ours differs from that of SDPA.
    """
    shapes = [(1, tokens, n, dim) for n in (heads[0], heads[1], heads[1], heads[0])]
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    rows = [x.transpose(1, 2) for x in (q, k, v)]  # SDPA takes [B, H, S, D]; the view is not a part of its time
    mesh, mask, shares = burst_portable.Mesh.single(), burst_portable.Mask.causal(), heads[0] != heads[1]
    named: dict[str, tuple[Callable[..., Tensor], list[Tensor], Tensor]] = {
        "attention": (lambda *x: burst_portable.attention(*x, mask=mask, mesh=mesh), [q, k, v], dout),
        "attention without a mesh": (lambda *x: burst_portable.attention(*x, mask=mask), [q, k, v], dout),
        "SDPA": (partial(scaled_dot_product_attention, is_causal=True, enable_gqa=shares), rows, dout.transpose(1, 2)),
    }
    calls: dict[str, Call] = {}
    results: dict[str, list[Tensor]] = {}
    for name, (call, inputs, gradient) in named.items():
        leaves = [x.detach().requires_grad_() for x in inputs]
        calls[f"{name}, forward"] = partial(call, *inputs)
        calls[f"{name}, both passes"] = lambda call=call, x=leaves, g=gradient: torch.autograd.grad(call(*x), x, g)
        results[name] = [call(*inputs), *calls[f"{name}, both passes"]()]
    theirs = [x.transpose(1, 2) for x in results.pop("SDPA")]
    for name, mine in results.items():
        found = [gap(x, y) for x, y in zip(mine, theirs, strict=True)]
        if not max(found) < DIFFERENCE:
            raise UnsupportedError(f"{name} differs from SDPA", got=found, allowed=f"less than {DIFFERENCE}")
    return calls


def least_times(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Return the least host time of each call, in microseconds."""
    found = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name in random.sample(list(calls), len(calls)):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            for _ in range(REPEATS):
                calls[name]()
            found[name] = min(found[name], (time.perf_counter() - started) / REPEATS * 1e6)
    torch.accelerator.synchronize()
    return {name: round(least, 1) for name, least in found.items()}


def print_profile(call: Call) -> None:
    """Print the functions in which 1,000 calls spend the most time."""
    with cProfile.Profile() as profile:
        for _ in range(1000):
            call()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def pairs(text: str) -> list[tuple[int, int]]:
    """Parse query heads and K/V heads, as in "8/8,8/2"."""
    return [(count(q), count(kv)) for q, _, kv in (one.partition("/") for one in text.split(","))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=counts, default=[128, 512, 2048], help="Default: 128,512,2048.")
    parser.add_argument("--heads", type=pairs, default=[(8, 8), (8, 2)], help="Query / K/V heads. Default: 8/8,8/2.")
    parser.add_argument("--head-dim", type=count, default=128, help="Default: 128.")
    parser.add_argument("--rounds", type=count, default=120, help="Rounds of all calls. Default: 120.")
    parser.add_argument("--profile", action="store_true", help="Print where the time of both passes goes.")
    parser.add_argument("--out", type=file, help="Write the results to this JSON file.")
    arguments = parser.parse_args()
    device, results = accelerator(), []
    for heads in arguments.heads:
        for tokens in arguments.tokens:
            calls = calls_of(tokens, heads, arguments.head_dim, device)
            found, name = least_times(calls, arguments.rounds), f"{heads[0]}/{heads[1]}"
            results.append({"tokens": tokens, "heads": name, "head_dim": arguments.head_dim, "microseconds": found})
            cells = [
                f"{which} {found[f'attention, {which}']:.1f} / {found[f'SDPA, {which}']:.1f} = "
                f"{found[f'attention, {which}'] / found[f'SDPA, {which}']:.2f}"
                for which in ("forward", "both passes")
            ]
            print(f"{tokens:6} {name:6} {'   '.join(cells)}", flush=True)
            if arguments.profile:
                print_profile(calls["attention, both passes"])
    if arguments.out is not None:
        one_line = ",\n".join(json.dumps(one) for one in results)
        text = f'{{"setting": {json.dumps(setting())},\n "results": [\n{one_line}\n]}}\n'
        Path(arguments.out).write_text(text)


if __name__ == "__main__":
    end(main)
