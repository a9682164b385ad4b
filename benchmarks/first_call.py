"""Time the first attention call of a process on one GPU: cold, from the cache, and after compiling ahead.

    python -m benchmarks.first_call [--head-dim 96] [--kernel hopper] [--seq-len 4096]

Each row is a fresh process. Imports count, since a process has them once; `imports` is the part before the call. The
row "in turn" is cold without `Config.compile_ahead`. The exit code is 1 if a call after compiling ahead, or from the
cache, compiles a kernel. Prints a table, and writes its numbers as JSON to --out. --profile adds the functions that
take the most time from the cache.
"""

from __future__ import annotations

import argparse
import compileall
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import burst_portable
from benchmarks.report import setting
from benchmarks.script import accelerator, count, end
from burst_portable.cli.machine_limits import cores
from burst_portable.config import environment_of_children, triton_cache

HEADS, KV_HEADS = 32, 8


def ahead(kernel: str, head_dim: int, seq_len: int) -> dict[str, object]:
    """Compile the kernels of the call without using the device."""
    from burst_portable.backends.selection import kernels_of, load
    from burst_portable.kernels.triton.compile_only import compile_call
    from burst_portable.mask import Mask
    from burst_portable.planning.call import AttentionCall

    q, k = (
        torch.empty(1, seq_len, heads, head_dim, dtype=torch.bfloat16, device="meta") for heads in (HEADS, KV_HEADS)
    )
    call = AttentionCall.of(q, k, k, mask=Mask.causal(), deterministic=False)
    chosen = next(one for one in kernels_of(load("cuda")) if one.name == kernel).load()
    chosen.save_compiled_in(triton_cache())
    started = time.perf_counter()
    made = compile_call("sm_90", chosen, call, jobs=cores())
    return {
        "imports": 0.0,
        "forward": time.perf_counter() - started,
        "backward": 0.0,
        "compiled": sum(not one.cached for one in made),
    }


def first(kernel: str, head_dim: int, seq_len: int) -> dict[str, object]:
    """Time the first forward and backward call of this process.

    torch's own first backward comes before: given a gradient, it imports sympy, which takes longer than our backward.
    A backward from a loss does not.
    """
    device = accelerator()
    q, k, v = (
        torch.randn(1, seq_len, heads, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dout, before = torch.randn_like(q), cached_kernels()
    other = torch.ones(2, device=device, requires_grad=True)
    (other * other).backward(torch.ones_like(other))
    torch.cuda.synchronize()

    started = imported = time.perf_counter()
    if kernel == "torch":
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
    else:
        from burst_portable import attention

        imported = time.perf_counter()
        out = attention(q, k, v, mask="causal", kernel=kernel, deterministic=False)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    out.backward(dout)
    torch.cuda.synchronize()
    return {
        "imports": imported - started,
        "forward": middle - started,
        "backward": time.perf_counter() - middle,
        "compiled": cached_kernels() - before,
    }


def cached_kernels() -> int:
    """Return the number of kernels in Triton's cache. Triton is not imported: a call from the cache may need none."""
    folder = triton_cache()
    assert folder is not None, "no variable configures Triton's compiler"
    return sum(1 for _ in folder.glob("*/*.cubin"))


def profile(kernel: str, head_dim: int, seq_len: int) -> dict[str, object]:
    """Run `first` and print the functions that take the most time, with all that they call."""
    profiler = cProfile.Profile()
    found = profiler.runcall(first, kernel, head_dim, seq_len)
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(60)
    return found


CHILDREN = {"ahead": ahead, "first": first, "profile": profile, "torch": first}


def main() -> int:
    """Run each row in a process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="hopper", choices=("hopper", "triton"), help="Default: hopper.")
    parser.add_argument("--head-dim", type=count, default=96, help="Elements per head. Default: 96.")
    parser.add_argument("--seq-len", type=count, default=4096, help="Tokens. Default: 4096.")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="Folder of the file.")
    parser.add_argument("--profile", action="store_true", help="Profile a process with a full cache too.")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        kernel = "torch" if given.child == "torch" else given.kernel
        print(json.dumps(CHILDREN[given.child](kernel, given.head_dim, given.seq_len)))
        return 0
    accelerator()
    compileall.compile_dir(Path(burst_portable.__file__).parent, quiet=1)  # as pip does when it installs the package
    print(f"{given.kernel}, bf16, {HEADS} heads of {given.head_dim}, {KV_HEADS} K/V heads, {given.seq_len} tokens")
    print(f"{'process':<14}{'imports s':>10}{'forward s':>10}{'backward s':>11}{'compiled':>9}")
    failed, measured = False, {}
    rows = {"cold": "a", "cached": "a", "in turn": "b", "ahead": "c", "after ahead": "c", "torch": "a"}
    if given.profile:
        rows["profile"] = "a"
    with tempfile.TemporaryDirectory() as folder:
        for row, name in rows.items():
            child = row if row in CHILDREN else "first"
            command = [sys.executable, "-m", "benchmarks.first_call", *sys.argv[1:], "--child", child]
            changes = {"TRITON_CACHE_DIR": f"{folder}/{name}", "BURST_COMPILE_AHEAD": str(int(row != "in turn"))}
            environment = environment_of_children(**changes)
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            *lines, last = done.stdout.splitlines()
            found = measured[row] = json.loads(last)
            times = f"{found['imports']:>10.2f}{found['forward']:>10.2f}{found['backward']:>11.2f}"
            print(f"{row:<14}{times}{found['compiled']:>9}", *lines, sep="\n", flush=True)
            failed |= row in ("cached", "after ahead") and found["compiled"] > 0
    given.out.mkdir(parents=True, exist_ok=True)
    facts = {"kernel": given.kernel, "head_dim": given.head_dim, "seq_len": given.seq_len}
    data = {"setting": setting(), **facts, "rows": measured}
    (given.out / f"first-call-{given.kernel}-{given.head_dim}.json").write_text(json.dumps(data, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    end(main)
