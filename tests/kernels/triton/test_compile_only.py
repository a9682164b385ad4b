"""Test that `compile_call` fills Triton's cache with the keys of real launches, for sm_90 without a device."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from burst_portable.config import environment_of_children
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.planning.call import AttentionCall
from tests.support.fork_server import run_program

pytest.importorskip("triton")

# A process has one driver of Triton and one memory cache, so each of the two is a process.
SCRIPT = """
import json, sys
import torch
from burst_portable.backends.cuda.hopper import launcher
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.hopper.saved_kernels import find
from burst_portable.config import triton_cache
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.triton.compile_only import compile_call, compile_kernels
from burst_portable.kernels.triton.triton_kernel import TritonKernel
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import find_tiles

way, rows, jobs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
kernel = HopperKernel() if way.startswith("hopper") else TritonKernel()
device = "meta" if way.endswith("ahead") else "cpu"
q, k, v, dout = (torch.zeros(1, rows, h, 64, dtype=torch.bfloat16, device=device) for h in (8, 2, 2, 8))
call = AttentionCall.of(q, k, v, mask=Mask.causal(), deterministic=False, device="meta")

def launch():
    tiles = find_tiles(call.mask, call.layout.shards[0], call.layout.shards[0])
    out, lse = kernel.forward_single_call(q, k, v, tiles, call)
    kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, call)

saved, file_of = [], launcher.file_of

def note(*about):
    file = file_of(*about)
    saved.append(find(file) is not None)
    return file

launcher.file_of = note
kernel.save_compiled_in(triton_cache())
made = compile_call("sm_90", kernel, call, jobs=jobs) if device == "meta" else compile_kernels("sm_90", launch)
print(json.dumps([(one.name, one.digest, one.cached) for one in made]))
print(json.dumps(saved))
"""


def program(folder, **changes):
    """Return the script, and the environment in which it has an empty cache."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = environment_of_children(TRITON_CACHE_DIR=str(folder), **changes)
    environment.pop("TRITON_INTERPRET", None)  # with a variable of the compiler, no kernel is saved for later processes
    return script, environment


def run_python(*command, environment):
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, check=False
    )


def compiled(way, rows, folder, jobs=1, **changes):
    """Return (name, key, whether the cache had it) of the kernels that a fresh process compiles or loads."""
    script, environment = program(folder, **changes)
    # The loader reads LD_LIBRARY_PATH when an interpreter starts.
    run = run_python if "LD_LIBRARY_PATH" in changes else run_program
    done = run(script, way, rows, jobs, environment=environment)
    assert done.returncode == 0, done.stderr
    kernels, saved = map(json.loads, done.stdout.splitlines()[-2:])
    assert saved == [way == "hopper"] * (3 if way.startswith("hopper") else 0), "launches need no Triton"
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["hopper", pytest.param("triton", marks=pytest.mark.full)])
def test_compile_call_fills_cache_of_launch(kernel, tmp_path):
    """Launches read the addresses and strides of real memory. They find all kernels, those of hopper without Triton."""
    ahead = compiled(f"{kernel} ahead", 512, tmp_path)
    assert len(ahead) == {"hopper": 3, "triton": 4}[kernel]
    assert not any(cached for *_, cached in ahead)
    launched = compiled(kernel, 512, tmp_path)
    assert launched == [[name, key, True] for name, key, _ in ahead]


@pytest.mark.full
def test_compile_call_of_other_length_misses(tmp_path):
    """A planted difference: with 500 tokens, strides of LSE are no multiples of 16, so other kernels are launched."""
    compiled("triton ahead", 512, tmp_path)
    assert not all(cached for *_, cached in compiled("triton", 500, tmp_path))


@pytest.mark.parametrize(("kernel", "head", "reason"), [("reference", 64, "another package"), ("triton", 512, "512")])
def test_compile_call_refuses_what_it_cannot_compile(kernel, head, reason):
    from burst_portable.kernels.triton.compile_only import compile_call
    from burst_portable.kernels.triton.triton_kernel import TritonKernel

    q = torch.empty(1, 64, 2, head, dtype=torch.bfloat16, device="meta")
    with pytest.raises(UnsupportedError, match=f"cannot be compiled ahead.*{reason}"):
        compile_call(
            "sm_90", {"reference": ReferenceKernel, "triton": TritonKernel}[kernel](), AttentionCall.of(q, q, q)
        )


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["hopper", "triton"])
def test_compile_call_with_threads_makes_equal_code(kernel, tmp_path):
    """Triton's code generator has state; threads that shared it would make other code under the same key.

    PTX is compared: of 20 runs with equal PTX, ptxas once allocated other registers.
    """
    one, four = tmp_path / "one", tmp_path / "four"
    assert sorted(compiled(f"{kernel} ahead", 512, one)) == sorted(compiled(f"{kernel} ahead", 512, four, jobs=4))
    texts = [path.relative_to(one) for path in one.glob("*/*.ptx")]
    assert len(texts) >= 3
    assert all((one / path).read_bytes() == (four / path).read_bytes() for path in texts)


@pytest.mark.full
@pytest.mark.skipif(shutil.which("gcc") is None, reason="Triton's driver is compiled with a C compiler")
def test_compile_call_builds_driver_if_libcuda_exists(tmp_path):
    """A planted libcuda has the functions that the driver names, and none is called."""
    source = Path(find_spec("triton").origin).parent / "backends" / "nvidia" / "driver.c"
    names = sorted(set(re.findall(r"\bcu[A-Z]\w+\b", source.read_text())))
    (tmp_path / "stub.c").write_text(
        "".join(f"int {name}{end}(void) {{return 1;}}\n" for name in names for end in ENDS)
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-w", "-o", library, tmp_path / "stub.c"], check=True)
    compiled("triton ahead", 512, tmp_path / "cache", LD_LIBRARY_PATH=str(tmp_path), TRITON_LIBCUDA_PATH=str(tmp_path))
    assert list((tmp_path / "cache").glob("*/cuda_utils*.so"))


ENDS = ("", "_v2")  # cuda.h renames some functions
TOO_LARGE = """
import torch
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.triton.compile_only import compile_call
from burst_portable.kernels.triton.triton_kernel import TritonKernel
from burst_portable.kernels.triton.tuning import Blocks, Tuning
from burst_portable.planning.call import AttentionCall

small, large = Blocks(16, 16, 4, 1), Blocks(16, 256, 4, 4)
kernel = TritonKernel({"*": {64: Tuning((small,), (small,), (large,))}})
q = torch.empty(1, 256, 2, 64, dtype=torch.float16, device="meta")
try:
    compile_call("sm_80", kernel, AttentionCall.of(q, q, q), jobs=2)
except UnsupportedError as error:
    print(error)
"""


@pytest.mark.full
def test_compile_call_names_kernel_of_other_thread(tmp_path):
    """A planted configuration that needs more shared memory than sm_80 has."""
    environment = environment_of_children(TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0")
    command = [sys.executable, "-c", TOO_LARGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "the Triton kernel queries_kernel does not compile for sm_80, torch.float16" in done.stdout
    assert "shared memory" in done.stdout
