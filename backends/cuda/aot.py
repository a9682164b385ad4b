"""Compile the Hopper kernels ahead of time, on any machine, and report registers, spills and shared memory."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from backends.cuda import descriptors as matrix_descriptors
from burst_portable.backends.cuda.hopper.configs import (
    TALL,
    ForwardConfig,
    SplitConfig,
    backward_config,
    forward_config,
    forward_value_panels,
    panels,
    split_configs,
)
from burst_portable.kernels.triton.arguments import ALWAYS

SHARED_LIMIT = 227 * 1024
_NAMES = {"bf16": 16, "fp16": 16, "fp32": 32}


@dataclass(frozen=True, slots=True)
class Build:
    """One kernel in one configuration: what Triton compiles it from."""

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, float]
    maxnreg: int


@dataclass(frozen=True, slots=True)
class Report:
    """Compiler output of one build."""

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


HEADS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
"""(size of heads, size of value heads): one for each cut and number of panels, and those of most models."""


def builds(heads: Sequence[tuple[int, int]] = HEADS, dtype: str = "bf16") -> Iterator[Build]:
    """Yield the forward in its three modes and cuts, and the backward that adds and that writes, for each head size.

    A softcap, and the deterministic backward of heads up to 128, are compiled for the modes that a single device uses:
    results in 16 bits or, of each query head, in float32.
    """
    from burst_portable.backends.cuda.hopper import forward

    for head in heads:
        for config in forward_cuts(head):
            for mode in (forward.OUT_16, forward.OUT_32, forward.MERGE_32):
                yield forward_build(head, mode, dtype, config)
        yield forward_build(head, forward.OUT_16, dtype, cap=True)
        for store in (False, True):
            yield from backward_builds(head, dtype, store=store)
        yield from backward_builds(head, dtype, store=True, cap=True)
        if split_configs(*head) is None:
            yield from backward_builds(head, dtype, store=True, ordered=True)
            yield from backward_builds(head, dtype, store=True, ordered=True, apart=True)


def forward_cuts(head: tuple[int, int]) -> list[ForwardConfig]:
    """Return the cuts of the forward for a head size."""
    return [forward_config(*head), *([TALL[max(head)]] if max(head) in TALL else [])]


def forward_build(
    head: tuple[int, int], mode: int, dtype: str = "bf16", config: ForwardConfig | None = None, *, cap: bool = False
) -> Build:
    from burst_portable.backends.cuda.hopper import forward

    config = config or forward_config(*head)
    made = dtype if mode == forward.OUT_16 else "fp32"
    columns, values = panels(head[0]), forward_value_panels(head[1])
    types = {
        **_panels("q", 64, columns, dtype),
        **_panels("k", config.BN, columns, dtype),
        **_panels("v", config.BN, values, dtype),
        **_panels("o", 64, values, made),
        "out": f"*{made}",
        "lse": "*fp32",
        "table": "*i32",
        "counter": "*i32",
        "qk_scale": "fp32",
        **dict.fromkeys(("o_sb", "o_ss", "o_sh", "lse_sb", "lse_sh"), "i64"),
    }
    constants = {
        "BN": config.BN, **_sizes(columns, values), "DV": head[1], "NS": config.NS, "MODE": mode,
        "SHARE": int(config.share), "CAP": 50.0 * cap, "W": config.W, "REGS": config.REGS,
    }  # fmt: skip
    way = f"mode {mode}{', tall' if config in TALL.values() else ''}{', softcap' * cap}"
    return _build(f"forward {_named(head)} {dtype} {way}", forward.forward_kernel, types, constants, config.maxnreg)


def backward_builds(
    head: tuple[int, int],
    dtype: str = "bf16",
    *,
    store: bool = False,
    cap: bool = False,
    ordered: bool = False,
    apart: bool = False,
) -> Iterator[Build]:
    """Yield the launches of a backward: one, or one for each of dQ, dK and dV if the head is large.

    If `apart`, dK and dV of each query head are stored in float32.
    """
    split = split_configs(*head)
    if split is None:
        yield _backward_build(head, dtype, store, cap, ordered, apart)
    else:
        for gradient, config in enumerate(split):
            yield _split_build(head, dtype, store, cap, gradient, config)


def _backward_build(head: tuple[int, int], dtype: str, store: bool, cap: bool, ordered: bool, apart: bool) -> Build:
    from burst_portable.backends.cuda.hopper import backward

    config, made = backward_config(*head), dtype if store and not apart else "fp32"
    columns, values = panels(head[0]), panels(head[1])
    types = {
        **_panels("q", config.BM, columns, dtype),
        **_panels("k", 64, columns, dtype),
        **_panels("v", 64, values, dtype),
        **_panels("do", config.BM, values, dtype),
        "term_desc": _vector(config.BM),
        **_panels("dq", 64, (64, columns[1]), "fp32"),
        **_panels("dk", 64, columns, made),
        **_panels("dv", 64, values, made),
        "dk_out": f"*{made}",
        "dv_out": f"*{made}",
        "table": "*i32",
        "order": "*i32",
        **dict.fromkeys(("scale", "qk_scale"), "fp32"),
    }
    constants = {
        "BM": config.BM, **_sizes(columns, values), "D": head[0], "DV": head[1], "NQ": config.NQ,
        "FOLD": int(dtype == "bf16"), "STORE": int(store), "CAP": 50.0 * cap, "EARLY": config.early,
        "ORDERED": int(ordered), "FRESH": int(ordered and store), "REGS": config.REGS,
    }  # fmt: skip
    way = f"{', stores' * store}{' apart' * apart}{', softcap' * cap}{', ordered' * ordered}"
    name = f"backward {_named(head)} {dtype}{way}"
    return _build(name, backward.backward_kernel, types, constants, config.maxnreg)


def _split_build(
    head: tuple[int, int], dtype: str, store: bool, cap: bool, gradient: int, config: SplitConfig
) -> Build:
    from burst_portable.backends.cuda.hopper import split_backward

    made = dtype if store else "fp32"
    columns, values = panels(head[0]), panels(head[1])
    types = {
        **_panels("own", 64, columns, dtype),
        **_panels("ownv", 64, values, dtype),
        **_panels("x", config.BN, columns, dtype),
        **_panels("y", config.BN, values, dtype),
        "term_desc": _vector(config.BN),
        **_panels("out", 64, values if gradient == split_backward.DV else columns, made),
        "out": f"*{made}",
        "terms": "*fp32",
        "table": "*i32",
        **dict.fromkeys(("scale", "qk_scale"), "fp32"),
        **dict.fromkeys(("out_sb", "out_ss", "out_sh"), "i64"),
    }
    constants = {
        "GRADIENT": gradient, "BN": config.BN, **_sizes(columns, values), "D": head[0], "DV": head[1],
        "NX": config.NX, "NY": config.NY, "FOLD": int(dtype == "bf16"), "STORE": int(store), "CAP": 50.0 * cap,
        "EARLY": config.early, "REGS": config.REGS,
    }  # fmt: skip
    name = f"{('dQ', 'dK', 'dV')[gradient]} {_named(head)} {dtype}{', stores' * store}{', softcap' * cap}"
    return _build(name, split_backward.split_kernel, types, constants, config.maxnreg)


def _named(head: tuple[int, int]) -> str:
    return f"D={head[0]}" if head[0] == head[1] else f"D={head[0]}/{head[1]}"


def _sizes(columns: tuple[int, int], values: tuple[int, int]) -> dict[str, int]:
    return dict(zip(("A", "B", "VA", "VB"), (*columns, *values), strict=True))


def _panels(name: str, rows: int, columns: tuple[int, int], dtype: str) -> dict[str, str]:
    """Return the types of both descriptors of a tensor, as `Descriptors.panels` makes them."""
    first, second = columns
    return {f"{name}_desc": _rows(rows, first, dtype), f"{name}2_desc": _rows(rows, second or first, dtype)}


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
    Triton inserts a barrier of the warpgroup before an arrival if there is none since the last use of shared memory.
    But it takes the start of an asynchronous product for its end.
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


def _build(name: str, kernel: Any, types: dict[str, str], constants: dict[str, float], maxnreg: int) -> Build:
    """Return a build. Parameters that are not in `types` are int32."""
    signature = {p: "constexpr" if p in constants else types.get(p, "i32") for p in kernel.arg_names}
    return Build(name, kernel, signature, constants, maxnreg)


def _rows(rows: int, columns: int, dtype: str) -> str:
    return _descriptor([1, rows, 1, columns], dtype, min(128, columns * _NAMES[dtype] // 8))


def _vector(rows: int) -> str:
    return _descriptor([1, rows], "fp32", 0)


def _descriptor(block: list[int], dtype: str, swizzle: int) -> str:
    from triton.experimental.gluon import language as gl

    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=_NAMES[dtype], rank=len(block))
    return f"tensordesc<{dtype}{block},{layout!r}>"
