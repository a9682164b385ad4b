"""Lower this project's kernels for Ascend with triton-ascend, and check and execute the IR without CANN.

    python -m backends.ascend.triton.check

1. Every kernel lowers in 16 and 32 bits, without gathers and comparisons of integer vectors.
2. One forward and one backward shape are executed from the IR with NumPy and compared with float64.

This shows that triton-ascend lowers the kernels to a correct IR. It does not show that bishengir-compile takes the IR,
that tiles fit the unified buffer, or how products round on the device.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # no device is needed here

import numpy as np
import triton
import triton.language as tl

from backends.ascend.triton.execute import Memory, Program, rounded
from backends.ascend.triton.lower import GATHER, lower
from burst_portable.backends.ascend import triton_kernels
from burst_portable.kernels.triton.blocks import block_table, transposed
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.tiles import find_tiles

OPTIMIZER = Path(triton.__file__).parent / "backends" / "ascend" / "triton-adapter-opt"
KERNELS = {name: getattr(triton_kernels, name) for name in ("attend_kernel", "keys_kernel", "queries_kernel")}
LOG2_E = 1.4426950408889634
# Relative error (Frobenius) against float64. The IR rounds weights to 16 bits before the second product.
LIMITS = {"fp32": 2e-6, "fp16": 2e-3, "bf16": 1.2e-2}
LENGTH, HEADS, SIZE, PROGRAMS = 83, 2, 32, 3


def constants_of(rows: int, columns: int, size: int, **flags: Any) -> dict[str, Any]:
    """Return the compile-time parameters. Like Triton, make strides of 1 constants."""
    sizes = {"R": rows, "C": columns, "D": size, "DV": size, "PADDED_D": size, "PADDED_DV": size}
    return {**sizes, "CAP": False, "PRECISION": "ieee", "MERGE": False, "lse_row": 1, "delta_row": 1, **flags}


def lowered(name: str, dtype: str, constants: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the IR of a kernel and the names of its arguments."""
    kernel = KERNELS[name]
    names = [p.name for p in kernel.params]
    known = {n: constants[n] for n in names if n in constants}
    types = {n: type_of(n, dtype) for n in names if n not in known}
    return lower(kernel, types, known), list(types)


def type_of(name: str, dtype: str) -> str:
    """Return Triton's name of an argument's type."""
    if name in ("q", "k", "v", "dout"):
        return f"*{dtype}"
    if name in ("out", "lse", "delta", "dq", "dk", "dv"):
        return "*fp32"
    if name == "table":
        return "*i32"
    return "fp32" if name in ("scale", "inner", "outer", "gradient_scale") else "i32"


def every_kernel() -> Iterator[tuple[str, str]]:
    """Yield the description of each lowered kernel, and its faults."""
    for name in KERNELS:
        for dtype, cut in (("bf16", (64, 64)), ("fp16", (64, 64)), ("fp32", (32, 32))):
            for flags in ({}, {"CAP": True}, *([{"MERGE": True}] if name == "attend_kernel" else [])):
                text, _ = lowered(name, dtype, constants_of(*cut, 64, **flags))
                yield f"{name} {dtype} {' '.join(flags)}".strip(), wrong_in(text)


def wrong_in(text: str) -> str:
    """Return the operations of an IR that are slow on these devices."""
    wrong = [f"{GATHER}: a gather"] if GATHER in text else []
    wrong += [f"an integer vector is compared: {x}" for x in re.findall(r"arith\.cmpi .*tensor<.*", text)]
    return "; ".join(wrong)


@triton.jit
def gathers(source, places, target, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(target + lanes, tl.load(source + tl.load(places + lanes)))


@triton.jit
def compares(source, target, stop, N: tl.constexpr):
    lanes = tl.arange(0, N)
    tl.store(target + lanes, tl.where(lanes * 3 < stop, tl.load(source + lanes), 0.0))


def missed_faults() -> str:
    """Return the faults that the check misses, tried with two faulty kernels."""
    texts = {
        "a gather": lower(gathers, {"source": "*fp32", "places": "*i32", "target": "*fp32"}, {"N": 64}),
        "a comparison": lower(compares, {"source": "*fp32", "target": "*fp32", "stop": "i32"}, {"N": 64}),
    }
    return ", ".join(what for what, text in texts.items() if not wrong_in(text))


# ------------------------------------------------------------------------------------------- execution


class Shape:
    """A causal attention over two documents, whose tensors are flat buffers, [S, H, D]; K and V have one head."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        cast = {"bf16": rounded, "fp16": lambda x: x.astype(np.float16), "fp32": lambda x: x}[dtype]
        random = np.random.default_rng(0)
        heads = {"q": HEADS, "k": 1, "v": 1, "dout": HEADS}
        self.tensors = {
            name: cast(random.standard_normal((LENGTH, n, SIZE)).astype(np.float32)) for name, n in heads.items()
        }
        mask = Mask.documents((0, 50, LENGTH))
        (shard,) = make_layout("contiguous", LENGTH, 1).shards
        self.tiles = find_tiles(mask, shard, shard)
        i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)
        self.seen = (j <= i) & ((i < 50) == (j < 50))
        self.scale = SIZE**-0.5

    def exact(self) -> dict[str, np.ndarray]:
        """Return all results in float64, from the definition."""
        q, k, v, dout = (x.astype(np.float64) for x in self.tensors.values())
        scores = np.where(self.seen[None], np.einsum("ihd,jxd->hij", q, k) * self.scale, -np.inf)
        top = scores.max(-1, keepdims=True)
        lse = top + np.log(np.exp(scores - top).sum(-1, keepdims=True))
        p = np.exp(scores - lse)
        out = np.einsum("hij,jxd->ihd", p, v)
        delta = (dout * out).sum(-1).T
        ds = p * (np.einsum("ihd,jxd->hij", dout, v) - delta[..., None]) * self.scale
        return {
            "out": out,
            "lse": lse[..., 0],
            "delta": delta,
            "dq": np.einsum("hij,jxd->ihd", ds, k),
            "dk": np.einsum("hij,ihd->jd", ds, q)[:, None],
            "dv": np.einsum("hij,ihd->jd", p, dout)[:, None],
        }

    def run(self, name: str, buffers: dict[str, np.ndarray]) -> None:
        """Run one kernel from its IR on `buffers` and the tensors, each a flat memref."""
        rows, columns = (32, 16) if name != "keys_kernel" else (16, 32)
        text, names = lowered(name, self.dtype, constants_of(rows, columns, SIZE))
        tiles = [transposed(t) for t in self.tiles] if name == "keys_kernel" else self.tiles
        table = block_table(tiles, LENGTH, LENGTH, rows, columns, every_row=name == "attend_kernel")
        heads = 1 if name == "keys_kernel" else HEADS
        work = table.blocks * heads
        tensors = {**self.tensors, **buffers}
        facts = {
            "scale": self.scale * LOG2_E,
            "inner": 0.0,
            "outer": 0.0,
            "gradient_scale": self.scale,
            "q_rows": LENGTH,
            "k_rows": LENGTH,
            "blocks": table.blocks,
            "heads": heads,
            "group": HEADS,
            "work": work,
        }
        flat = {name: Memory(x.reshape(-1), 0, (x.size,), (1,)) for name, x in {**tensors, "table": table.data}.items()}
        arguments = [flat[n] if n in flat else number(n, facts, tensors) for n in names]
        Program(text, OPTIMIZER).run(arguments, min(PROGRAMS, work))


def number(name: str, facts: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """Return a scalar argument: a fact, or a stride of a tensor."""
    if name in facts:
        return (np.float32 if isinstance(facts[name], float) else np.int32)(facts[name])
    tensor, _, which = name.rpartition("_")
    shape = tensors[tensor].shape
    if tensor in ("lse", "delta"):  # [H, S]
        return np.int32({"batch": shape[0] * shape[1], "head": shape[1], "row": 1}[which])
    return np.int32({"batch": tensors[tensor].size, "row": shape[1] * shape[2], "head": shape[2]}[which])


def executed() -> Iterator[tuple[str, float, float]]:
    """Yield (result, error, tolerance) of a forward and a backward in each dtype."""
    for dtype in ("fp32", "fp16", "bf16"):
        shape = Shape(dtype)
        exact = shape.exact()
        lse = np.full((HEADS, LENGTH), np.nan, np.float32)
        got = {"out": np.full((LENGTH, HEADS, SIZE), np.nan, np.float32), "lse": lse}
        shape.run("attend_kernel", got)
        given = {name: exact[name].astype(np.float32) for name in ("lse", "delta")}
        got |= {name: np.ones(exact[name].shape, np.float32) for name in ("dq", "dk", "dv")}
        shape.run("keys_kernel", {**given, "dk": got["dk"], "dv": got["dv"]})
        shape.run("queries_kernel", {**given, "dq": got["dq"]})
        for name, value in got.items():
            found = value - 1.0 if name.startswith("d") else value  # gradients were added to ones
            error = float(np.linalg.norm(found - exact[name]) / np.linalg.norm(exact[name]))
            yield f"{dtype} {name}", error, LIMITS[dtype]


def main() -> int:
    """Run all checks and return the exit code: 1 if one fails."""
    started, failed, count = time.monotonic(), 0, 0
    if missed := missed_faults():
        print(f"  FAILED the check itself: it does not find {missed}")
        return 1
    for what, wrong in every_kernel():
        count += 1
        failed += bool(wrong)
        if wrong:
            print(f"  FAILED {what}: {wrong}")
    print(f"triton-ascend {triton.__version__}: {count} kernels lowered, no gather, no comparison of integer vectors")
    for what, error, allowed in executed():
        bad = not error <= allowed
        failed += bad
        print(f"  {'FAILED' if bad else 'ok'} {what}: relative error {error:.1e}, allowed {allowed:.1e}")
    print(f"executed from the IR with NumPy; {failed} failed, in {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
