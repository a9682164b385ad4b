"""Make the evidence that needs no AMD GPU: machine code of the portable kernels for three chips, and their launches.

    python -m backends.rocm.machine_code [--json backends/rocm/evidence/machine-code.json] [--chip gfx942] [--quick]

`compile`: each kernel with the blocks of the tuning tables has matrix instructions, does not spill to memory, and fits
the LDS. `launch`: the launch code of a call, on a fake driver (`launches.py`), for more dtypes, head sizes and masks,
passes arguments that fit the compiled kernel. Nothing is run on a device.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from backends.evidence import fingerprint, finish, machine_code
from burst_portable.conformance.report import Report, Result
from burst_portable.kernels.triton.machine_code import TARGETS, Record, kernel_table, problems

CHIPS = ("gfx90a", "gfx942", "gfx950")
HEADS = (64, 128, 256)
SOURCES = ("kernels/triton",)
LAUNCHES = Path(__file__).parent / "launches.py"


def compiled(chips: list[str], heads: tuple[int, ...]) -> Iterator[Result]:
    """Yield a result for each chip, head size and kernel."""
    for record in kernel_table(chips, heads):
        name = f"{record.target} D={record.head_dim} {record.kernel}, {record.blocks}"
        yield _result("compile", name, record, problems(record), record.seconds)


def launched(chip: str, *options: str) -> Iterator[Result]:
    """Yield a result for each launch, from a separate process with a separate compile cache."""
    with tempfile.TemporaryDirectory() as cache:
        root = Path(__file__).parents[2]
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": cache}
        command = [sys.executable, str(LAUNCHES), chip, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    for number, line in enumerate(done.stdout.splitlines()):
        facts = json.loads(line)
        name, wrong, _ = f"{facts.pop('name')} #{number}", facts.pop("wrong"), facts.pop("programs")
        yield _result("launch", name, Record(**facts), wrong, 0.0)
    if done.returncode:
        yield Result("launch", f"{chip} to the end", False, message=done.stderr[-500:])


def _result(check: str, name: str, record: Record, wrong: list[str], seconds: float) -> Result:
    """Return a result with the used and allowed bytes of LDS and of spilled memory."""
    takes = {"LDS": (record.shared, TARGETS[record.target].shared), "scratch": (record.scratch, 0)}
    return Result(check, name, not wrong, seconds, {} if record.error else takes, "; ".join(wrong))


def report(chips: list[str], quick: bool) -> Report:
    """Return the report of both checks for some chips."""
    started = time.monotonic()
    results = list(compiled(chips, HEADS[:1] if quick else HEADS))
    for chip in chips:
        results += launched(chip, *["--quick"] * quick)
    seconds = time.monotonic() - started
    coverage = "quick" if quick else "usual"
    return machine_code("rocm", chips, ("triton",), results, seconds, coverage, fingerprint(*SOURCES))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chip", action="append", choices=CHIPS)
    parser.add_argument("--quick", action="store_true", help="one head size, one case")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    return finish(report(chosen.chip or list(CHIPS), chosen.quick), chosen.json)


if __name__ == "__main__":
    sys.exit(main())
