"""Time the first attention call of a process on one GPU: cold, from the cache, and after compiling ahead.

    python -m benchmarks.first_call [--head-dim 96] [--kernel hopper] [--seq-len 4096]

Each row is a fresh process. The exit code is 1 if a call after compiling ahead, or from the cache, compiles a kernel.
Prints a table, and writes its numbers as JSON to --out.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.report import setting
from benchmarks.script import accelerator, count, end
from burst_portable.config import environment_of_children

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
    started = time.perf_counter()
    made = compile_call("sm_90", chosen, call)
    return {"forward": time.perf_counter() - started, "backward": 0.0, "compiled": sum(not one.cached for one in made)}


def first(kernel: str, head_dim: int, seq_len: int) -> dict[str, object]:
    """Time the first forward and backward call of this process."""
    device = accelerator()
    q, k, v = (
        torch.randn(1, seq_len, heads, head_dim, dtype=torch.bfloat16, device=device, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    dout, compiled = torch.randn_like(q), 0
    torch.cuda.synchronize()

    def note(*, cache_hit: bool, **_: object) -> None:
        nonlocal compiled
        compiled += not cache_hit

    started = time.perf_counter()
    if kernel == "torch":
        sdpa = torch.nn.functional.scaled_dot_product_attention
        out = sdpa(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True).transpose(1, 2)
    else:
        from triton import knobs

        from burst_portable import attention

        knobs.compilation.listener = note
        out = attention(q, k, v, mask="causal", kernel=kernel, deterministic=False)
    torch.cuda.synchronize()
    middle = time.perf_counter()
    out.backward(dout)
    torch.cuda.synchronize()
    return {"forward": middle - started, "backward": time.perf_counter() - middle, "compiled": compiled}


def main() -> int:
    """Run each row in a process and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", default="hopper", choices=("hopper", "triton"), help="Default: hopper.")
    parser.add_argument("--head-dim", type=count, default=96, help="Elements per head. Default: 96.")
    parser.add_argument("--seq-len", type=count, default=4096, help="Tokens. Default: 4096.")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"), help="Folder of the file.")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run = ahead if given.child == "ahead" else first
        kernel = "torch" if given.child == "torch" else given.kernel
        print(json.dumps(run(kernel, given.head_dim, given.seq_len)))
        return 0
    print(f"{given.kernel}, bf16, {HEADS} heads of {given.head_dim}, {KV_HEADS} K/V heads, {given.seq_len} tokens")
    print(f"{'process':<14}{'forward s':>10}{'backward s':>11}{'compiled':>9}")
    failed, measured = False, {}
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        rows = (("cold", one), ("cached", one), ("ahead", other), ("after ahead", other), ("torch", one))
        for row, folder in rows:
            child = "first" if row in ("cold", "cached", "after ahead") else row
            command = [sys.executable, "-m", "benchmarks.first_call", *sys.argv[1:], "--child", child]
            environment = environment_of_children(TRITON_CACHE_DIR=folder)
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found = measured[row] = json.loads(done.stdout.splitlines()[-1])
            print(f"{row:<14}{found['forward']:>10.2f}{found['backward']:>11.2f}{found['compiled']:>9}", flush=True)
            failed |= row in ("cached", "after ahead") and found["compiled"] > 0
    given.out.mkdir(parents=True, exist_ok=True)
    facts = {"kernel": given.kernel, "head_dim": given.head_dim, "seq_len": given.seq_len}
    data = {"setting": setting(), **facts, "rows": measured}
    (given.out / f"first-call-{given.kernel}-{given.head_dim}.json").write_text(json.dumps(data, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    end(main)
