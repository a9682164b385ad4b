"""Make the evidence that needs no NVIDIA GPU: the kernels as machine code for three chips.

    python -m backends.cuda.machine_code [--json backends/cuda/evidence/machine-code.json] [--chip sm_90]

`compile`: each portable kernel with the blocks of the tuning tables has matrix instructions, has no spills without a
reason, and fits shared memory. `hopper`: the same for the Hopper kernels, and no matrix descriptor may come from a path
that did not run. Nothing is run or timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from backends.cuda import aot
from backends.evidence import fingerprint, finish, machine_code
from burst_portable.conformance.report import Report, Result
from burst_portable.kernels.triton.machine_code import TARGETS, allowed_scratch, kernel_table, problems

CHIPS = ("sm_80", "sm_90", "sm_100")
HEADS = {"sm_80": (64, 128, 256), "sm_90": (64, 128, 256), "sm_100": (64, 128)}
"""By chip. On sm_100, blocks for heads of 256 that do not spill are too small for its matrix instructions."""
SCRATCH = {
    "forward D=256": 16,
    "forward D=192/128": 8,
    "backward D=64 bf16, stores, softcap": 320,
    "backward D=64": 56,
    "backward D=128 bf16, stores, softcap": 72,
    "dK D=256": 48,
}
"""Bytes per thread that a Hopper kernel may keep, by how its name begins: the first that fits. What does not change
while a loop runs, and with a softcap its slope in a backward that computes all gradients at once."""
DOUBTFUL = "doubtful descriptors"
SOURCES = ("kernels/triton", "backends/cuda/hopper")


def compiled(chips: list[str]) -> Iterator[Result]:
    """Yield a result for each chip, head size and portable kernel."""
    for record in chain.from_iterable(kernel_table([chip], HEADS[chip]) for chip in chips):
        name = f"{record.target} D={record.head_dim} {record.kernel}, {record.blocks}"
        takes = {"shared memory": (record.shared, TARGETS[record.target].shared)}
        takes |= {"scratch": (record.scratch, allowed_scratch(record))}
        wrong = problems(record)
        yield Result("compile", name, not wrong, record.seconds, {} if record.error else takes, "; ".join(wrong))


def allowed_hopper_scratch(name: str) -> int:
    """Return how many bytes per thread a Hopper kernel of this name may keep in memory."""
    return next((most for beginning, most in SCRATCH.items() if name.startswith(beginning)), 0)


def hopper() -> Iterator[Result]:
    """Yield a result for each Hopper kernel."""
    for build in aot.builds():
        made = aot.compile_build(build)
        takes = {
            "shared memory": (float(made.shared_bytes), float(aot.SHARED_LIMIT)),
            "scratch": (float(made.scratch_bytes), float(allowed_hopper_scratch(made.name))),
        }
        wrong = [
            f"{error:g} bytes of {name}, allowed {most:g}" for name, (error, most) in takes.items() if error > most
        ]
        wrong += [] if made.wgmma else ["no matrix instruction wgmma"]
        wrong += [f"ptxas: {warning}" for warning in made.warnings]
        wrong += made.descriptors
        takes[DOUBTFUL] = (float(len(made.descriptors)), 0.0)
        yield Result("hopper", f"sm_90 {made.name}", not wrong, made.seconds, takes, "; ".join(wrong))


def report(chips: list[str]) -> Report:
    """Return the report of both checks for some chips."""
    started = time.monotonic()
    results = [*compiled(chips), *(hopper() if "sm_90" in chips else ())]
    seconds = time.monotonic() - started
    return machine_code("cuda", chips, ("hopper", "triton"), results, seconds, "usual", fingerprint(*SOURCES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", action="append", choices=CHIPS)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    return finish(report(chosen.chip or list(CHIPS)), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
