"""Test that rehearsals on the device "meta" compile the kernels of real calls, for sm_90 without a device."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from burst_portable.config import environment_of_children

pytest.importorskip("triton")

# A process has one driver of Triton and one memory cache, so each way is a process.
SCRIPT = """
import json, sys
import torch
from burst_portable.backends.selection import load
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.comm.local import run_transports
from burst_portable.comm.agreement import call_signature
from burst_portable.kernels.triton.compile_only import compile_kernels
from burst_portable.kernels.triton.triton_kernel import TritonKernel
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.cli.warm import absent_call
from burst_portable.runtime.ahead import rehearse
from burst_portable.runtime.prepare import plan_for_kernel, prepared_call
from burst_portable.strategies.planner import cached_plan
from burst_portable.strategies.registry import strategy_of

way, name, strategy, rows = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
kernel, backend = (HopperKernel() if name == "hopper" else TritonKernel()), load("cpu")

def tensors(device):
    return (torch.zeros(1, rows, h, 64, dtype=torch.bfloat16, device=device) for h in (8, 4, 4, 8))

q, k, v, _ = tensors("meta")
layout = make_layout("zigzag", 2 * rows, 2)
call = AttentionCall.of(q, k, v, mask=Mask.window(200), layout=layout, deterministic=False)
plan = plan_for_kernel(cached_plan(strategy_of(strategy), call), kernel)

def rank(transport):
    q, k, v, dout = tensors("cpu")
    prepared = prepared_call(plan, backend, kernel, transport, call_signature({}))
    out, _, saved = prepared.executor.forward(prepared, q, k, v, None, keep=True)
    prepared.executor.backward(prepared, saved, None, dout)

def ahead():
    for number in range(2):
        q, k, v, _ = tensors("meta")
        rehearse(absent_call(plan, backend, kernel, number), q, k, v, gradients=True)

made = compile_kernels("sm_90", ahead if way == "ahead" else lambda: run_transports(2, rank))
print(json.dumps(sorted({(one.name, one.digest, one.cached) for one in made})))  # both ranks may load a kernel
"""


# Both passes of a call, after `_compile`, which `attention` calls before its first launch.
BOTH_PASSES = """
import json, threading
import torch, triton
from burst_portable.backends.selection import load
from burst_portable.cli.warm import absent_call
from burst_portable.kernels.triton.compile_only import TARGETS, CompileOnlyDriver
from burst_portable.kernels.triton.triton_kernel import TritonKernel
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.runtime.ahead import _compile
from burst_portable.strategies.planner import cached_plan
from burst_portable.strategies.registry import strategy_of

class Driver(CompileOnlyDriver):
    def launcher_cls(self, source, metadata):
        launchers.append((source.fn.__name__, threading.get_ident()))
        return super().launcher_cls(source, metadata)

triton.runtime.driver.set_active(Driver(TARGETS["sm_90"]))
made, launchers = [], []
triton.knobs.compilation.listener = lambda *, src, **_: made.append((src.fn.__name__, threading.get_ident()))
q, k, v, dout = (torch.zeros(1, 512, h, 64, dtype=torch.bfloat16) for h in (8, 4, 4, 8))
call = AttentionCall.of(q, k, v, mask=Mask.causal(), deterministic=False)
prepared = absent_call(cached_plan(strategy_of("ring"), call), load("cpu"), TritonKernel(), 0)
_compile(prepared, [q, k, v], gradients=True)
ahead, built = len(made), dict(launchers)
out, _, saved = prepared.executor.forward(prepared, q, k, v, None, keep=True)
prepared.executor.backward(prepared, saved, None, dout)
names, threads = zip(*made)
print(json.dumps([sorted(names), len({*threads} - {threading.get_ident()}), len(made) - ahead, sorted(built)]))
"""


def compiled(folder, *arguments, script=SCRIPT):
    """Return what a fresh process prints: (name, key, whether the cache had it) of the kernels of `SCRIPT`."""
    environment = environment_of_children(TRITON_CACHE_DIR=str(folder), TRITON_INTERPRET="0")
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["hopper", "triton"])
@pytest.mark.parametrize("strategy", ["ring", "burst", "ulysses"])
@pytest.mark.parametrize("rows", [512, 250])
def test_rehearse_compiles_kernels_of_real_ranks(kernel, strategy, rows, tmp_path):
    """The ranks of two threads exchange real messages; nothing is left to compile for them."""
    ahead = compiled(tmp_path, "ahead", kernel, strategy, rows)
    assert not any(cached for *_, cached in ahead)
    launched = compiled(tmp_path, "launched", kernel, strategy, rows)
    assert launched == [[name, key, True] for name, key, _ in ahead]


@pytest.mark.full
def test_compile_ahead_leaves_nothing_to_launches(tmp_path):
    """Threads compile the kernels of both passes; the launches find them in the memory of the process."""
    names, threads, by_launches, launchers = compiled(tmp_path, script=BOTH_PASSES)
    assert names == launchers == ["attend_kernel", "delta_kernel", "keys_kernel", "queries_kernel"]
    assert threads == 4
    assert by_launches == 0
