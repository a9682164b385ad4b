"""Test a backend's Triton kernels in Triton's interpreter on the CPU: evidence level "interpreter".

    python -m backends.interpreter rocm --chip gfx942 [--quick] [--json backends/rocm/evidence/interpreter.json]

Run the conformance suite's test cases for kernels with the blocks of the tuning tables for a chip, and with few heads,
since the interpreter is slow. They show that the kernels are correct with those blocks in float32 and float16. They do
not test a compiler, a device, or bfloat16, which the interpreter computes wrongly without an error.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from burst_portable.backends.base import Backend, Probe
from burst_portable.backends.selection import load

AXES: dict[str, tuple[object, ...]] = {
    "heads": ("2x1x16x16", "1x1x40x24", "1x1x64x64", "1x1x80x80"),
    "dtype": (torch.float32, torch.float16),
    "ranks": (1, 2, 3),
    "softcap": (None, 5.0),
    "deterministic": (True, False),
    "batch": (1,),
}
SOURCES = {
    "cuda": ("kernels/triton",),
    "rocm": ("kernels/triton",),
    "ascend": ("kernels/triton", "backends/ascend"),
}
"""Folders of each backend's kernels."""
NO_BFLOAT16 = "Triton's interpreter computes bfloat16 wrongly"


class Interpreted(Backend):
    """A backend with a single kernel, on CPU tensors."""

    name = ""
    capabilities = load("cpu").capabilities

    def __init__(self, name: str, kernel: Any, facts: dict[str, str]) -> None:
        self.name, self.kernel, self.facts = name, kernel, facts

    def probe(self) -> Probe:
        return Probe(True, facts=self.facts)

    def kernels(self) -> tuple[Any, ...]:
        return (self.kernel,)


def kernel_of(backend: str, chip: str) -> Any:
    """Return the kernel with the blocks of a chip, without the dtypes that the interpreter computes wrongly."""
    from burst_portable.backends.ascend.triton_launch import AscendTritonKernel
    from burst_portable.kernels.base import Support
    from burst_portable.kernels.triton.triton_kernel import TritonKernel
    from burst_portable.kernels.triton.tuning import HALF, SINGLE
    from burst_portable.planning.call import AttentionCall

    kind = AscendTritonKernel if backend == "ascend" else TritonKernel

    class Kernel(kind):  # type: ignore[valid-type, misc]  # which of the two is known only when it runs
        def supports(self, call: AttentionCall) -> Support:
            return Support(False, NO_BFLOAT16) if call.dtype == "bfloat16" else super().supports(call)

    if backend == "ascend":
        return Kernel()
    return Kernel(*({"*": table.get(chip, table["*"])} for table in (HALF, SINGLE)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend", choices=("cuda", "rocm", "ascend"))
    parser.add_argument("--chip", default="")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # before the kernels are imported

    import triton

    from backends.evidence import fingerprint, finish
    from burst_portable.conformance import check_backend
    from burst_portable.conformance.cases import MASKS, MEMORY, covering
    from burst_portable.layout import NAMES as LAYOUTS

    facts = {
        "name": f"Triton's interpreter, blocks of {chosen.chip or chosen.backend}",
        "sources": fingerprint(*SOURCES[chosen.backend]),
    }
    subject = Interpreted(chosen.backend, kernel_of(chosen.backend, chosen.chip), facts)

    def told(done: int, total: int, trial: Any, result: Any) -> None:
        if result is not None and not result.ok:
            print(f"FAILED {trial.text}: {result.message}", flush=True)
        elif result is not None and done % 25 == 0:
            print(f"{done} of {total}", flush=True)

    every = covering({"mask": tuple(MASKS), "layout": LAYOUTS, **AXES, "memory": MEMORY})
    cases = [f"kernels:triton:{case.spec()}" for case in every][: 5 if chosen.quick else None]
    made = check_backend(subject, cases=cases, ranks=3, evidence_level="interpreter", progress=told)
    made = replace(made, versions={**made.versions, "triton": triton.__version__}, only=("kernels",))
    return finish(made, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
