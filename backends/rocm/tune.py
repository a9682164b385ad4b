"""Rank block sizes and launch options of the portable kernels for an absent chip by their machine code.

    python backends/rocm/tune.py gfx942 [gfx90a ...] [--json tuning.json] [--kernel keys] [--head 128]

The time of a step of the unmasked loop is estimated as that of the busiest unit, from a count of its instructions.
Matrix products run at the chip's published rate. A vector instruction takes 4 cycles (16 for exp and log). 128 bytes
per cycle move between the four SIMDs and their LDS (256 on gfx950). With fewer than two waves per SIMD, nothing
overlaps, and matrix and vector time add up. Configurations that spill to memory or do not fit the LDS are left out. The
first line of each group is the choice, from which the tables in `burst_portable/kernels/triton/tuning.py` were written.
Of the configurations within 5 % of the shortest time, it has most cycles of other waves to overlap a load. Nothing was
timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from burst_portable.kernels.triton.machine_code import TARGETS, compiled_kernel, read_amd
from burst_portable.kernels.triton.tuning import Blocks

MATRIX = {"gfx90a": 256, "gfx942": 512, "gfx950": 1024}
"""16-bit FLOPs per cycle of one SIMD."""
LDS_BYTES = {"gfx90a": 128, "gfx942": 128, "gfx950": 256}
"""Bytes per cycle of one compute unit."""
WAVE, SIMDS = 64, 4
KERNELS = ("forward", "resumed", "keys", "queries")


@dataclass(frozen=True)
class Estimate:
    """One configuration and the estimate from its code.

    `cycles` are those of a SIMD per pair of a row and a column, `hidden` those of other waves in one step.
    """

    chip: str
    kernel: str
    head: int
    blocks: str
    cycles: float
    hidden: int
    waves: int
    registers: int
    shared: int
    sgpr_spills: int
    matrix: int
    vector: int
    lds: int


def candidates(head: int) -> Iterator[Blocks]:
    """Yield the configurations to try. A wave has at least 16 rows."""
    rows, columns = ((64, 128), (16, 32, 64)) if head < 256 else ((32, 64, 128), (16, 32))
    for r, c, warps, small in itertools.product(rows, columns, (4, 8), (False, True)):
        if r // warps >= 16 and (small or c >= 32):
            yield Blocks(r, c, warps, 1, extra=(("matrix_instr_nonkdim", 16),) * small)


def estimate(chip: str, kernel: str, head: int, blocks: Blocks) -> Estimate | None:
    """Return the estimate; None if the code spills to memory, does not fit or does not compile."""
    try:
        compiled = compiled_kernel(chip, kernel, head, blocks)
    except Exception as error:  # noqa: BLE001 - any error of a compiler excludes the configuration
        print(f"{chip} {kernel} {head} {blocks}: {str(error)[:80]}", file=sys.stderr)
        return None
    text, metadata = compiled.asm["amdgcn"], compiled.metadata
    facts = read_amd(text, metadata, chip)
    loops = [count for body in innermost(text) if (count := units(body, chip))[0]]
    if facts["scratch"] or metadata.shared > TARGETS[chip].shared or not loops:
        return None
    matrix, vector, lds = min(loops, key=sum)  # the masked loop has more instructions
    waves = max(1, facts["occupancy"])
    busiest = max(matrix, vector, lds) if waves > 1 else max(matrix + vector, lds)
    spills = re.search(r"\.sgpr_spill_count:\s*(\d+)", text)
    extra = "".join(f" {name} {value}" for name, value in blocks.extra)
    return Estimate(
        chip, kernel, head, f"{blocks.rows}x{blocks.columns} warps {blocks.warps}{extra}",
        round(busiest * blocks.warps / (blocks.rows * blocks.columns), 3), round((waves - 1) * busiest), waves,
        facts["registers"],
        metadata.shared, int(spills.group(1)) if spills else 0, round(matrix), vector, round(lds),
    )  # fmt: skip


def innermost(text: str) -> Iterator[list[str]]:
    """Yield the instructions of each innermost loop."""
    lines = [line.strip() for line in text.splitlines()]
    labels = {line.partition(":")[0]: i for i, line in enumerate(lines) if re.match(r"\.LBB\w+:", line)}
    jumps = [(labels[m.group(1)], i) for i, line in enumerate(lines) if (m := re.match(r"s_c?branch\w*\s+(\S+)", line))]
    loops = [(start, end) for start, end in jumps if start <= end]
    for start, end in loops:
        if not any((a, b) != (start, end) and start <= a and b <= end for a, b in loops):
            yield [line for line in lines[start : end + 1] if re.match(r"[a-z]\w+", line)]


def units(body: list[str], chip: str) -> tuple[float, int, float]:
    """Return the cycles of the matrix unit, the vector unit and the LDS for one wave's iteration of a loop."""
    matrix, vector, lds = 0.0, 0, 0.0
    for name in (line.split()[0] for line in body):
        if shape := re.match(r"v_mfma_\w+?_(\d+)x(\d+)x(\d+)", name):
            m, n, k = map(int, shape.groups())
            matrix += 2 * m * n * k / MATRIX[chip]
        elif name.startswith("v_"):
            vector += 16 if re.match(r"v_(exp|log|rcp|rsq|sqrt)_", name) else 4
        elif name.startswith("ds_"):
            bits = int(found.group(1)) if (found := re.search(r"_b(\d+)", name)) else 32
            pairs = 2 if re.match(r"ds_(read|write|load|store)_?2", name) else 1
            lds += bits / 8 * pairs * WAVE / LDS_BYTES[chip] * SIMDS
    return matrix, vector, lds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("chips", nargs="+", choices=sorted(MATRIX))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kernel", action="append", choices=KERNELS)
    parser.add_argument("--head", action="append", type=int, choices=(64, 128, 256))
    chosen = parser.parse_args()
    best = []
    for chip, head, kernel in itertools.product(chosen.chips, chosen.head or (64, 128, 256), chosen.kernel or KERNELS):
        found = [one for blocks in candidates(head) if (one := estimate(chip, kernel, head, blocks))]
        ranked = sorted(found, key=lambda one: one.cycles)[:8]
        fastest = [one for one in ranked if one.cycles <= 1.05 * ranked[0].cycles]
        choice = max(fastest, key=lambda one: (one.hidden, one.waves, -one.shared, -one.registers))
        ranked.sort(key=lambda one: one is not choice)
        best += ranked
        for one in ranked:
            print(*asdict(one).values(), sep="  ", flush=True)
        if chosen.json:
            rows = ",\n ".join(json.dumps(asdict(one)) for one in best)
            chosen.json.write_text(f"[\n {rows}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
