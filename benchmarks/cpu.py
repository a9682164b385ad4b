"""Measure the cost of distribution on CPUs: CPU time of two ranks against one process with torch's SDPA.

    python -m benchmarks.cpu [--tokens 8192] [--rounds 3] [--out cpu.json]

float32, causal, forward and backward. Results are checked before they are timed. CPU time is summed over all processes
and threads, since elapsed time on a shared machine means little. Also measures the time of a cached call beyond its
kernel, and of planning one of 1,024 ranks. The exit code is 1 if a number exceeds its limit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

import burst_portable as bp
from benchmarks.ranks import leave
from benchmarks.script import count, end, file
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.strategies.registry import make_strategy

HEADS, KV_HEADS, DIM = 8, 8, 64
LIMIT_RATIO, LIMIT_MICROSECONDS, LIMIT_PLANNING = 1.25, 20.0, 1.0


def make_inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, tokens, heads, DIM, generator=generator) for heads in sizes]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """Run torch's SDPA in one process. Returns (out, dq, dk, dv)."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    out.backward(dout)
    return [out.detach(), q.grad, k.grad, v.grad]


def ours(mesh: bp.Mesh, strategy: str, shards: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = (x.detach().requires_grad_() for x in shards[:3])
    out = bp.attention(q, k, v, mask="causal", mesh=mesh, strategy=strategy)
    out.backward(shards[3])
    return [out.detach(), q.grad, k.grad, v.grad]


def cpu_time(work) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def rank_main(rank: int, ranks: int, folder: Path, tokens: int, rounds: int) -> None:
    """Run one rank of the ring. Rank 0 also times torch's SDPA in turn with it, while rank 1 waits."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    mesh = bp.Mesh.from_group()
    whole = make_inputs(tokens)
    shards = [bp.shard(x, mesh) for x in whole]
    expected = plain(*whole)
    times: dict[str, list[float]] = {"plain": [], "ring": [], "burst": []}
    for strategy in ("ring", "burst"):
        for mine, right in zip(ours(mesh, strategy, shards), expected, strict=True):
            torch.testing.assert_close(mine, bp.shard(right, mesh), rtol=1e-4, atol=2e-5)
    for _ in range(rounds):
        for strategy in ("ring", "burst"):
            dist.barrier()
            times[strategy].append(cpu_time(lambda s=strategy: ours(mesh, s, shards)))
        dist.barrier()
        if rank == 0:
            times["plain"].append(cpu_time(lambda: plain(*whole)))
        dist.barrier()
    (folder / f"rank{rank}.json").write_text(json.dumps(times))
    leave()


def distribution(tokens: int, rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        arguments = ["--folder", name, "--tokens", str(tokens), "--rounds", str(rounds)]
        ranks = [subprocess.Popen([sys.executable, __file__, "--rank", str(rank), *arguments]) for rank in range(2)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            sys.exit("a rank failed")
        first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    seconds = {"plain": statistics.median(first["plain"])}
    for strategy in ("ring", "burst"):
        both = [a + b for a, b in zip(first[strategy], second[strategy], strict=True)]
        seconds[strategy] = statistics.median(both)
    return seconds


def call_overhead() -> float:
    """Return the median microseconds of `attention` on one rank beyond the kernel that it calls."""
    torch.set_num_threads(1)
    mesh, mask = bp.Mesh.single(), bp.Mask.causal()
    q, k, v = (torch.randn(1, 16, 2, 16) for _ in range(3))
    tiles = Tiles([Tile(0, 16, 0, 16, 0, 15)])
    bp.attention(q, k, v, mask=mask, mesh=mesh)
    (prepared,) = mesh._calls.values()
    with torch.no_grad():
        call_it = partial(bp.attention, q, k, v, mask=mask, mesh=mesh)
        kernel_alone = partial(prepared.kernel.attend, q, k, v, tiles, prepared.kernel_call)
        pairs = [(timed(call_it), timed(kernel_alone)) for _ in range(3000)]
    call_time, kernel_time = (statistics.median(column) for column in zip(*pairs, strict=True))
    return (call_time - kernel_time) * 1e6


def timed(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def planning() -> dict[str, float]:
    """Return the seconds for planning one rank of 1,048,576 tokens, 1,024 ranks, 500 documents, zigzag."""
    tokens, ranks = 1 << 20, 1024
    found = {}
    for name in ("ring", "burst", "double_ring"):
        cumulative = [i * tokens // 500 for i in range(501)]
        started = time.process_time()
        mask, strategy = bp.Mask.documents(cumulative), make_strategy(name)
        plan = bp.plan(seq_len=tokens, ranks=ranks, heads=32, kv_heads=8, mask=mask, strategy=strategy)
        for _, part in plan.passes():
            part.steps_of(5)
        found[name] = time.process_time() - started
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=count, default=8192, help="Sequence length. Default: 8192.")
    parser.add_argument("--rounds", type=count, default=3, help="Rounds that are measured. Default: 3.")
    parser.add_argument("--out", type=file, help="Write the results to this JSON file.")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_main(arguments.rank, 2, arguments.folder, arguments.tokens, arguments.rounds)
        return
    seconds = distribution(arguments.tokens, arguments.rounds)
    overhead, plans = call_overhead(), planning()
    ratios = {name: seconds[name] / seconds["plain"] for name in ("ring", "burst")}
    print(f"{arguments.tokens} tokens, causal, float32, {HEADS} heads of {DIM}, forward and backward")
    print(f"  one process, plain SDPA      {seconds['plain']:7.2f} s of CPU time")
    for name, ratio in ratios.items():
        print(f"  two ranks, {name:<10}        {seconds[name]:7.2f} s   ratio {ratio:.3f}   (limit {LIMIT_RATIO})")
    print(f"a call with a cached plan: {overhead:.1f} microseconds over its kernel (limit {LIMIT_MICROSECONDS:g})")
    for name, value in plans.items():
        what = f"planning rank 5 of 1,024, 1,048,576 tokens, 500 documents, {name}"
        print(f"{what}: {value:.3f} s (limit {LIMIT_PLANNING:g})")
    result = {
        "date": datetime.date.today().isoformat(), "machine": platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "torch": torch.__version__, "tokens": arguments.tokens,
        "rounds": arguments.rounds, "cpu_seconds": seconds, "ratios": ratios,
        "call_overhead_microseconds": overhead, "planning_seconds": plans,
    }  # fmt: skip
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    met = (
        max(ratios.values()) <= LIMIT_RATIO and overhead <= LIMIT_MICROSECONDS and max(plans.values()) <= LIMIT_PLANNING
    )
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    end(main)
