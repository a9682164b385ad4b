"""Compile the Triton kernels ahead of time for other targets, and check the machine code.

A Triton wheel contains the compilers of several vendors. So a machine without accelerators can check for each target
that the code has matrix instructions, that it does not spill, and that its shared memory fits the chip. `kernel_table`
compiles the kernels, `problems` compares a record with the limits.
"""

from __future__ import annotations

import io
import re
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as triton_compile
from triton.compiler.compiler import make_backend

from burst_portable.errors import format_error, unknown_name
from burst_portable.kernels.triton import backward, forward
from burst_portable.kernels.triton.arguments import ALWAYS, DROPOUT_PARAMETERS, padded
from burst_portable.kernels.triton.tuning import BOTH, HALF, ONLY_DK, ONLY_DV, Blocks, Tuning, choose, mean_size


def assembled(source: Any, target: GPUTarget, options: dict[str, Any], *, use_cache: bool = True) -> tuple[Any, str]:
    """Return a compiled kernel and ptxas's log, which is empty for AMD's chips. Raise what Triton raises.

    A cached kernel is assembled again for the log, with Triton's function, since the flags depend on its release.
    """
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = not use_cache
        kernel = triton_compile(source, target=target, options=options)
        if "ptx" in kernel.asm and not log.getvalue():
            backend = make_backend(target)
            backend.make_cubin(kernel.asm["ptx"], {}, backend.parse_options(options), target.arch)
    return kernel, log.getvalue()


KIB = 1024


@dataclass(frozen=True, slots=True)
class Chip:
    """A target of Triton, and the limits of its kernels."""

    target: GPUTarget
    matrix: str  # pattern of its matrix instructions
    shared: int  # bytes of shared memory that a program may use
    shared_of_unit: int  # bytes of shared memory of a multiprocessor

    @property
    def backend(self) -> str:
        """Return the name of the backend that runs it."""
        return {"cuda": "cuda", "hip": "rocm"}[self.target.backend]

    @property
    def compiles_launchers(self) -> bool:
        """Return whether Triton compiles host code that launches a kernel, and this package can compile it ahead."""
        return {"cuda": True, "hip": False}[self.target.backend]


TARGETS = {
    "sm_80": Chip(GPUTarget("cuda", 80, 32), r"mma\.sync[.\w]*", 163 * KIB, 164 * KIB),
    "sm_90": Chip(GPUTarget("cuda", 90, 32), r"wgmma\.mma_async[.\w]*", 227 * KIB, 228 * KIB),
    "sm_100": Chip(GPUTarget("cuda", 100, 32), r"tcgen05\.mma[.\w]*", 227 * KIB, 228 * KIB),
    "gfx90a": Chip(GPUTarget("hip", "gfx90a", 64), r"v_mfma\w*", 64 * KIB, 64 * KIB),
    "gfx942": Chip(GPUTarget("hip", "gfx942", 64), r"v_mfma\w*", 64 * KIB, 64 * KIB),
    "gfx950": Chip(GPUTarget("hip", "gfx950", 64), r"v_mfma\w*", 160 * KIB, 160 * KIB),
}
HEADS = (64, 128)
_ADDING = {
    "forward": forward.attend_kernel,
    "keys": backward.keys_kernel,
    "dv": backward.keys_kernel,
    "dk": backward.keys_kernel,
    "queries": backward.queries_kernel,
}
# If one launch computes everything, results are written in the dtype of the inputs; otherwise in float32, or added.
_WHOLE = "whole "
KERNELS = (
    {"forward": forward.attend_kernel, "resumed": forward.attend_kernel}
    | _ADDING
    | {_WHOLE + name: kernel for name, kernel in _ADDING.items()}
)
_PARTS = {"keys": BOTH, "dv": ONLY_DV, "dk": ONLY_DK}
_OWN_ROWS = {"forward": ("q",), "resumed": ("q",), "queries": ("q", "dout"), **dict.fromkeys(_PARTS, ("k", "v"))}
_REGISTERS = 65536  # in an NVIDIA multiprocessor
_SIMDS = 4  # in an AMD compute unit
# ptxas: a serialized wgmma pipeline, or registers that could not be moved between warps.
_SERIALIZED = re.compile(r"C751[0-7][^\n]*")


class Allowed(NamedTuple):
    """Scratch memory that a kernel may have: bytes per thread, and why."""

    scratch: int
    why: str


# Of backward kernels, by target, kernel and padded head size.
JUSTIFIED = {
    ("sm_90", "keys", 128): Allowed(128, "outside the unmasked loop; measured faster than every configuration without"),
    ("sm_90", "queries", 64): Allowed(24, "under triton 3.6, none under 3.7.1; 4 % faster than the next without"),
    ("sm_90", "whole queries", 64): Allowed(48, "the same, and what the addresses of its results are made of"),
    ("sm_90", "whole keys", 128): Allowed(28, "as where gradients are added, which is 100; outside the unmasked loop"),
    ("sm_90", "dv", 256): Allowed(368, "reads what it adds to, once per program; all adding kernels: see below"),
    ("sm_90", "dk", 256): Allowed(660, "the same"),
    ("sm_90", "queries", 256): Allowed(404, "the same"),
    ("sm_90", "whole dv", 256): Allowed(32, "under triton 3.6, none under 3.7.1; all writing kernels: see below"),
    ("sm_90", "whole dk", 256): Allowed(120, "the same, and 120 under 3.7.1"),
    ("sm_90", "whole queries", 256): Allowed(32, "under triton 3.6, none under 3.7.1"),
}
# Heads of 256 on sm_90, measured on one H100 with triton 3.6.0, 16 heads and 16,384 tokens, causal. A backward that
# writes takes 17.9 ms with the blocks of the table, and 32.2 ms with blocks of 64 x 64 and 8 warps, which spill
# nothing. A backward that adds
# takes 20.2 and 32.6 ms. No larger blocks that add spill nothing.


@dataclass(frozen=True, slots=True)
class Record:
    """One kernel compiled for one target.

    `occupancy` is in programs per multiprocessor on NVIDIA's chips, in waves per SIMD on AMD's. `registers` are per
    thread; on AMD's chips these are vector registers without `accumulators`. `scratch` is bytes of spills per thread.
    """

    target: str
    kernel: str
    head_dim: int
    blocks: str
    seconds: float = 0.0
    registers: int = 0
    accumulators: int = 0
    scratch: int = 0
    shared: int = 0
    occupancy: int = 0
    instruction: str = ""
    warnings: tuple[str, ...] = ()
    error: str = ""


def allowed_scratch(record: Record) -> int:
    """Return the bytes of scratch memory that a kernel may have per thread."""
    allowed = JUSTIFIED.get((record.target, record.kernel, padded(record.head_dim)))
    return allowed.scratch if allowed else 0


def problems(record: Record) -> list[str]:
    """Return the problems of a record; an empty list if there are none."""
    if record.error:
        return [f"does not compile: {record.error}"]
    chip, found = TARGETS[record.target], []
    if not record.instruction:
        found.append(f"no matrix instruction {chip.matrix}")
    if record.shared > chip.shared:
        found.append(f"{record.shared} bytes of shared memory, the chip has {chip.shared}")
    if record.scratch > (allowed := allowed_scratch(record)):
        found.append(f"{record.scratch} bytes of scratch memory, {allowed} allowed")
    return found + [f"ptxas: {warning}" for warning in record.warnings]


def kernel_table(
    targets: Iterable[str] = tuple(TARGETS), heads: Iterable[int] = HEADS, kernels: Iterable[str] | None = None
) -> Iterator[Record]:
    """Yield a record for each target, head size and kernel, in bf16 with the blocks of the tuning tables.

    Default kernels: `launched_kernels` of the target and head size. A failure to compile is a record too.
    """
    for target in targets:
        if target not in TARGETS:
            raise unknown_name("target", target, TARGETS)
        for head in heads:
            for kernel in launched_kernels(target, head) if kernels is None else kernels:
                if kernel not in KERNELS:
                    raise unknown_name("kernel", kernel, KERNELS)
                yield compile_one(target, kernel, head)


def compile_one(target: str, kernel: str, head: int, blocks: Blocks | None = None) -> Record:
    """Compile one kernel. Default blocks: those of the tuning tables."""
    blocks = blocks or tuned(target, kernel, head)
    description, started = named(blocks), time.perf_counter()
    try:
        compiled, log = _assembled(target, kernel, head, blocks)
    except Exception as error:  # noqa: BLE001 - any error of a compiler is a result
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        message = format_error(f"{kernel} for {target}, head size {head}", got=f"{description}: {str(first)[-300:]}")
        return Record(target, kernel, head, description, error=message)
    seconds = round(time.perf_counter() - started, 2)
    listing = compiled.asm.get("amdgcn")
    facts = read_amd(listing, compiled.metadata, target) if listing else _read_nvidia(compiled, log, target)
    return Record(target, kernel, head, description, seconds, shared=compiled.metadata.shared, **facts)


def launched_kernels(target: str, head: int) -> list[str]:
    """Return those of `KERNELS` that the tables launch: keys, or dv and dk."""
    parts = _tuning(target, head).parts
    return [k for k in KERNELS if _PARTS.get(k.removeprefix(_WHOLE), parts[0]) in parts]


def tuned(target: str, kernel: str, head: int) -> Blocks:
    """Return the first entry of the tuning tables for 16-bit tensors."""
    tuning, use = _tuning(target, head), kernel.removeprefix(_WHOLE)
    choices = tuning.of_part(_PARTS[use]) if use in _PARTS else getattr(tuning, use)
    return (choices or tuning.forward)[0]


def _tuning(target: str, head: int) -> Tuning:
    return choose(HALF, target, mean_size(head, head))


def named(blocks: Blocks) -> str:
    """Return a short description for tables."""
    description = f"{blocks.rows}x{blocks.columns} warps {blocks.warps} stages {blocks.stages}" + " tma" * blocks.tma
    return description + "".join(f" {name} {value}" for name, value in blocks.extra)


def compiled_kernel(target: str, kernel: str, head: int, blocks: Blocks, value: int | None = None) -> Any:
    """Return Triton's compiled kernel, compiled without the cache. `value`: size of values. Default: head size."""
    return _assembled(target, kernel, head, blocks, value)[0]


def _assembled(target: str, kernel: str, head: int, blocks: Blocks, value: int | None = None) -> tuple[Any, str]:
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages, **dict(blocks.extra), **ALWAYS}
    return assembled(_source(kernel, head, value or head, blocks), TARGETS[target].target, options, use_cache=False)


# --------------------------------------------------------------------------------------------- sources


def _source(kernel: str, head: int, value: int, blocks: Blocks) -> ASTSource:
    """Return the kernel with the types of a launch on contiguous bf16 tensors."""
    function = KERNELS[kernel]
    every = {
        "R": blocks.rows,
        "C": blocks.columns,
        "D": head,
        "DV": value,
        "PADDED_D": padded(head),
        "PADDED_DV": padded(value),
        "TOGETHER": blocks.together,
        "CAP": False,
        "PRESCALE": False,
        "PRECISION": "ieee",
        "TMA": blocks.tma,
        "TMA_NUMBERS": blocks.tma,
        "WIDE": False,
        "MERGE": kernel == "resumed",
        "DOUBLE": False,
        "ADD": not kernel.startswith(_WHOLE),
        "PART": _PARTS.get(kernel.removeprefix(_WHOLE)),
    }
    every |= dict.fromkeys(DROPOUT_PARAMETERS)  # no dropout
    names = [parameter.name for parameter in function.params]
    constants = {name: every[name] for name in names if name in every}
    types = {n: "constexpr" if n in constants else _type_of(n, kernel, head, value, blocks) for n in names}
    divisible, attributes = [["tt.divisibility", 16]], {}

    def even(stride: str) -> bool:
        """Return whether a stride is a multiple of 16 for any number of heads and rows."""
        return (value if stride.startswith(("v_", "dv_", "out_", "dout_")) else head) % 16 == 0

    for i, name in enumerate(names):
        if name in ("lse_row", "delta_row"):  # contiguous: Triton makes a stride of 1 a constant
            types[name], constants[name] = "constexpr", 1
        elif types[name].startswith("*") or (name.endswith(("_batch", "_head", "_row")) and even(name)):
            attributes[i,] = divisible
    return ASTSource(fn=function, signature=types, constexprs=constants, attrs=attributes)


def _type_of(name: str, kernel: str, head: int, value: int, blocks: Blocks) -> str:
    """Return Triton's name of a parameter's type."""
    part = kernel.removeprefix(_WHOLE)
    streamed = blocks.tma and name not in _OWN_ROWS[part]
    if name in ("q", "k", "v", "dout"):
        size = padded(head if name in ("q", "k") else value)
        return f"tensordesc<bf16[1, {blocks.columns}, 1, {size}]>" if streamed else "*bf16"
    if name in ("lse", "delta") and part in _PARTS:
        return f"tensordesc<fp32[1, 1, {blocks.columns}]>" if streamed else "*fp32"
    if name in ("lse", "delta"):
        return "*fp32"
    if name in ("out", "dq", "dk", "dv"):
        return "*fp32" if part == kernel else "*bf16"
    if name == "table":
        return "*i32"
    return "fp32" if name in ("scale", "inner", "outer", "gradient_scale") else "i32"


# ------------------------------------------------------------------------------------- reading the code


def _first(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _instruction(target: str, text: str) -> str:
    found = re.search(rf"\b{TARGETS[target].matrix}", text)
    return found.group(0) if found else ""


def read_amd(text: str, metadata: Any, target: str) -> dict[str, Any]:
    """Return the fields of a `Record` from an amdgcn listing and Triton's metadata of the kernel."""
    # The listing's occupancy ignores shared memory, which is set at the launch.
    by_shared = TARGETS[target].shared_of_unit // max(1, metadata.shared) * metadata.num_warps // _SIMDS
    return {
        "registers": _first(r"\.vgpr_count:\s*(\d+)", text),
        "accumulators": _first(r"\.agpr_count:\s*(\d+)", text),
        "scratch": _first(r"\.private_segment_fixed_size:\s*(\d+)", text),
        "occupancy": min(_first(r"Occupancy:\s*(\d+)", text), by_shared),
        "instruction": _instruction(target, text),
    }


def _read_nvidia(compiled: Any, log: str, target: str) -> dict[str, Any]:
    """Return the fields of a `Record` from a cubin and ptxas's log."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        done = subprocess.run([tools / "cuobjdump", "-res-usage", cubin], capture_output=True, text=True, check=False)
    usage = done.stdout + done.stderr
    registers = _first(r"REG:(\d+)", usage)
    chip, metadata = TARGETS[target], compiled.metadata
    threads = metadata.num_warps * 32
    by_registers = _REGISTERS // max(1, -(-registers // 8) * 8 * threads)
    by_shared = chip.shared_of_unit // (metadata.shared + KIB)
    return {
        "registers": registers,
        "scratch": max(_first(r"STACK:(\d+)", usage), _first(r"(\d+) bytes spill stores", log)),
        "occupancy": min(by_registers, by_shared, 2048 // threads),
        "instruction": _instruction(target, compiled.asm["ptx"]),
        "warnings": tuple(sorted(set(_SERIALIZED.findall(log)))),
    }
