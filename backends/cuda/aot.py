"""Compile the Hopper kernels ahead of time, on any machine, and report registers, spills and shared memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from backends.cuda import descriptors as matrix_descriptors
from burst_portable.backends.cuda.hopper.configs import BACKWARD, FORWARD, TALL, ForwardConfig
from burst_portable.kernels.triton.arguments import ALWAYS

SHARED_LIMIT = 227 * 1024
_NAMES = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel in one configuration: what Triton compiles it from."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, int]
    maxnreg: int


@dataclass(frozen=True, slots=True)
class Report:
    """What the compiler says of one build."""

    name: str
    registers: int
    scratch_bytes: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    early_releases: int
    """Barriers that one warp arrives at while others may still wait for the product before: see `_early_releases`."""
    warnings: tuple[str, ...]
    descriptors: tuple[str, ...]
    """Matrix descriptors that may come from a path that did not run: see `matrix_descriptors`."""
    seconds: float


def builds(head_dims: tuple[int, ...] = (64, 128), dtype: str = "bf16") -> Iterator[Build]:
    """Forward in its three modes, in each cut, and backward in its two, for each head size."""
    from burst_portable.backends.cuda.hopper import forward

    for dim in head_dims:
        for config in [FORWARD[dim], *([TALL[dim]] if dim in TALL else [])]:
            for mode in (forward.OUT_16, forward.OUT_32, forward.MERGE_32):
                yield forward_build(dim, mode, dtype, config)
        for store in (False, True):
            yield backward_build(dim, dtype, store=store)


def forward_build(dim: int, mode: int, dtype: str = "bf16", config: ForwardConfig | None = None) -> Build:
    from burst_portable.backends.cuda.hopper import forward

    config = config or FORWARD[dim]
    keys = _rows(config.BN, dim, dtype)
    types = {
        "q_desc": _rows(64, dim, dtype),
        "k_desc": keys,
        "v_desc": keys,
        "o_desc": _rows(64, dim, dtype if mode == forward.OUT_16 else "fp32"),
        "out": f"*{dtype if mode == forward.OUT_16 else 'fp32'}",
        "lse": "*fp32",
        "table": "*i32",
        "counter": "*i32",
        "qk_scale": "fp32",
        "o_sb": "i64",
        "o_ss": "i64",
        "o_sh": "i64",
        "lse_sb": "i64",
        "lse_sh": "i64",
    }
    constants = {"BN": config.BN, "D": dim, "NS": config.NS, "MODE": mode, "W": config.W, "REGS": config.REGS}
    name = f"forward D={dim} {dtype} mode {mode}{', tall' if config == TALL.get(dim) else ''}"
    return _build(name, forward.forward_kernel, types, constants, config.maxnreg)


def backward_build(dim: int, dtype: str = "bf16", *, store: bool = False) -> Build:
    from burst_portable.backends.cuda.hopper import backward

    config = BACKWARD[dim]
    queries, keys, made = (
        _rows(config.BM, dim, dtype),
        _rows(64, dim, dtype),
        _rows(64, dim, dtype if store else "fp32"),
    )
    types = {
        "q_desc": queries,
        "k_desc": keys,
        "v_desc": keys,
        "do_desc": queries,
        "term_desc": _vector(config.BM),
        "dq_desc": _rows(64, 64, "fp32"),
        "dk_desc": made,
        "dv_desc": made,
        "dk_out": f"*{dtype if store else 'fp32'}",
        "dv_out": f"*{dtype if store else 'fp32'}",
        "table": "*i32",
        "scale": "fp32",
        "qk_scale": "fp32",
    }
    fold = int(dtype == "bf16")
    constants = {"BM": config.BM, "D": dim, "NQ": config.NQ, "FOLD": fold, "STORE": int(store), "REGS": config.REGS}
    name = f"backward D={dim} {dtype}{', stores' if store else ''}"
    return _build(name, backward.backward_kernel, types, constants, config.maxnreg)


def compiled(build: Build) -> tuple[Any, str]:
    """Return Triton's kernel with machine code for sm_90, and ptxas's log. Raise what Triton raises."""
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon._runtime import GluonASTSource

    from burst_portable.kernels.triton.machine_code import assembled

    source = GluonASTSource(build.kernel, dict(build.signature), constexprs=dict(build.constants))
    options = {"num_warps": 4, "maxnreg": build.maxnreg, **ALWAYS}
    return assembled(source, GPUTarget("cuda", 90, 32), options)


def compile_build(build: Build) -> Report:
    """Compile a kernel and return the compiler's report. Raise what Triton raises."""
    started = time.perf_counter()
    kernel, said = compiled(build)
    seconds = time.perf_counter() - started
    usage = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert usage is not None, said
    assert registers is not None, said
    return Report(
        name=build.name,
        registers=int(registers[1]),
        scratch_bytes=int(usage[1]),
        spill_bytes=int(usage[2]) + int(usage[3]),
        shared_bytes=kernel.metadata.shared,
        wgmma=kernel.asm["ptx"].count("wgmma.mma_async"),
        early_releases=_early_releases(kernel.asm["ptx"]),
        warnings=tuple(sorted(set(re.findall(r"C75\d\d[^\n]*", said)))),
        descriptors=matrix_descriptors.check(kernel.asm["cubin"]),
        seconds=seconds,
    )


def _early_releases(ptx: str) -> int:
    """Count arrivals at a barrier without a barrier of the warpgroup since its last wait for a product.

    One thread arrives for its warpgroup and lets a slot be filled again, while the three other warps may still read it.
    Triton inserts a barrier of the warpgroup before an arrival if there is none since the last use of shared memory,
    but takes the start of an asynchronous product for its end.
    """
    waited, early = False, 0
    for line in ptx.splitlines():
        if "wgmma.wait_group" in line:
            waited = True
        elif "bar.sync" in line or "barrier.sync" in line:
            waited = False
        elif "mbarrier.arrive.shared" in line:
            early += waited
    return early


def _build(name: str, kernel: Any, types: dict[str, str], constants: dict[str, int], maxnreg: int) -> Build:
    """Return a build. Parameters that are not in `types` are int32."""
    signature = {p: "constexpr" if p in constants else types.get(p, "i32") for p in kernel.arg_names}
    return Build(name, kernel, signature, constants, maxnreg)


def _rows(rows: int, columns: int, dtype: str) -> str:
    return _descriptor([1, rows, 1, columns], dtype, 128)


def _vector(rows: int) -> str:
    return _descriptor([1, rows], "fp32", 0)


def _descriptor(block: list[int], dtype: str, swizzle: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=_NAMES[dtype], rank=len(block))
    return f"tensordesc<{dtype}{block},{layout!r}>"
