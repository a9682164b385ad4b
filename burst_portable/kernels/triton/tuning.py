"""Define block sizes and launch options by architecture and head size, so that kernels contain no architectures.

A backend may pass other tables to `TritonKernel`. The keys are Triton's names of targets, for example ``sm_90`` and
``gfx942``; ``*`` is for all other targets. Each use has a list, and the first entry that the tensors allow is taken.
Entries with `tma` need hardware descriptors, so strides and addresses that are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from burst_portable.kernels.triton.arguments import padded


@dataclass(frozen=True, slots=True)
class Blocks:
    """Block sizes and launch options of one kernel."""

    rows: int  # of a program's block
    columns: int  # of one step
    warps: int  # Triton's num_warps
    stages: int  # Triton's num_stages
    tma: bool = False  # whether columns are loaded with hardware descriptors
    together: int = 4  # number of heads whose programs start next to each other
    extra: tuple[tuple[str, int], ...] = ()  # other launch options of the target, such as (("waves_per_eu", 2),)


BOTH, ONLY_DV, ONLY_DK = 0, 1, 2
"""What a launch of the backward kernel for keys computes: dK and dV, or one of them."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Choices for the kernels, best first."""

    forward: tuple[Blocks, ...]
    keys: tuple[Blocks, ...]
    queries: tuple[Blocks, ...]
    resumed: tuple[Blocks, ...] = ()  # forward into a running state, if different
    # For a separate launch for dV; `keys` is then for dK only. Faster if a program has no registers for both sums,
    # although K·Qᵀ is multiplied twice.
    values: tuple[Blocks, ...] = ()

    @property
    def parts(self) -> tuple[int, ...]:
        """Return which launches compute the gradients of keys and values."""
        return (ONLY_DV, ONLY_DK) if self.values else (BOTH,)

    def of_part(self, part: int) -> tuple[Blocks, ...]:
        """Return the choices for one of those launches."""
        return self.values if part == ONLY_DV else self.keys


Table = Mapping[str, Mapping[int, Tuning]]
"""Architecture -> largest `mean_size` -> tuning."""


def mean_size(head: int, value: int) -> int:
    """Return the mean of the sizes of a head and its values, both padded as kernels hold them.

    Tunings are chosen by it, because registers and shared memory are proportional to it. It is a power of two if both
    sizes are equal, and 192 for heads of 192 with values of 128.
    """
    return (padded(head) + padded(value)) // 2


def _one(forward: Blocks, keys: Blocks, queries: Blocks, *resumed: Blocks) -> Tuning:
    return Tuning((forward,), (keys,), (queries,), resumed)


_SMALL = _one(Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1))

_LARGE = _one(Blocks(64, 32, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 32, 8, 1))


def _amd(rows: int, columns: int, warps: int, *, narrow: bool = True) -> Blocks:
    """Return blocks with one stage. `narrow`: 16-wide instead of 32-wide matrix instructions."""
    return Blocks(rows, columns, warps, 1, extra=(("matrix_instr_nonkdim", 16),) * narrow)


HALF: Table = {
    "*": {
        64: _one(Blocks(128, 64, 4, 2), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2)),
        128: _one(Blocks(128, 64, 8, 2), Blocks(64, 64, 8, 1), Blocks(64, 64, 8, 1)),
        256: _LARGE,
    },
    # Never timed: the largest blocks that spill nothing, for head sizes that are padded as well.
    "sm_80": {
        64: _one(Blocks(128, 64, 8, 2), Blocks(64, 32, 4, 2), Blocks(64, 64, 8, 2)),
        128: _one(Blocks(128, 64, 8, 2), Blocks(64, 32, 8, 2), Blocks(64, 64, 8, 2)),
        256: Tuning(_LARGE.forward, (Blocks(32, 64, 8, 2),), (Blocks(64, 32, 8, 2),), values=(Blocks(64, 32, 8, 2),)),
    },
    # Measured on one H100: benchmarks/tune.py, and the best of it among other kernels under load, on ten rows of
    # benchmarks/attention.py. Heads of 128 forward: two small programs per multiprocessor, where 128 x 128 leaves room
    # for one, hide one another's starts and ends. Heads of 192 with values of 128, and of 256: the fastest of 40
    # configurations at 16,384 tokens, causal. Hardware descriptors need no registers for addresses, which spilled.
    "sm_90": {
        64: Tuning(
            (Blocks(64, 128, 4, 3, tma=True), Blocks(128, 64, 4, 3)),
            (Blocks(64, 64, 4, 3, tma=True), Blocks(64, 64, 4, 3)),
            (Blocks(128, 64, 4, 3, tma=True), Blocks(64, 128, 4, 3)),
        ),
        128: Tuning(
            (Blocks(64, 64, 4, 3, tma=True), Blocks(64, 64, 4, 3)),
            (Blocks(64, 64, 4, 2, tma=True), Blocks(128, 64, 8, 3)),
            (Blocks(128, 64, 8, 3, tma=True), Blocks(128, 64, 8, 3)),
        ),
        192: Tuning(
            (Blocks(128, 64, 8, 2, tma=True), Blocks(64, 64, 8, 1)),
            (Blocks(128, 64, 8, 2, tma=True), Blocks(128, 32, 8, 2)),
            (Blocks(128, 64, 8, 2, tma=True), Blocks(128, 32, 8, 2)),
            values=(Blocks(128, 64, 8, 3, tma=True), Blocks(128, 32, 8, 2)),
        ),
        256: Tuning(
            (Blocks(128, 64, 8, 2, tma=True), Blocks(64, 64, 8, 1)),
            (Blocks(128, 32, 8, 2, tma=True), Blocks(128, 32, 8, 1)),
            (Blocks(64, 64, 4, 2, tma=True), Blocks(128, 32, 8, 2)),
            values=(Blocks(128, 64, 8, 2, tma=True), Blocks(128, 32, 8, 2)),
        ),
    },
    # Never timed: chosen by machine code, by backends/rocm/tune.py, whose ranking is backends/rocm/tuning.json. Where
    # the first of a ranking spills for tensors with odd strides (backends/rocm/launches.py), under triton 3.6.0 or
    # 3.7.1, the next was taken.
    "gfx90a": {
        64: _one(_amd(128, 64, 8), _amd(64, 32, 4), _amd(128, 64, 8)),
        128: _one(_amd(128, 32, 8), _amd(64, 16, 4), _amd(64, 32, 4), _amd(64, 64, 4)),
        256: _one(_amd(64, 32, 4), _amd(64, 16, 4), _amd(64, 16, 4), _amd(128, 32, 4)),
    },
    "gfx942": {
        64: _one(_amd(128, 64, 4), _amd(128, 16, 4), _amd(128, 16, 4)),
        128: _one(_amd(128, 32, 4, narrow=False), _amd(128, 16, 8), _amd(128, 16, 4), _amd(128, 32, 4)),
        256: _one(_amd(128, 32, 8), _amd(64, 16, 4), _amd(128, 16, 4), _amd(64, 32, 4)),
    },
    "gfx950": {
        64: _one(_amd(128, 64, 4, narrow=False), _amd(128, 32, 4), _amd(128, 64, 8)),
        128: _one(_amd(128, 64, 8), _amd(128, 16, 8), _amd(128, 16, 4)),
        256: _one(_amd(128, 32, 8), _amd(64, 16, 4), _amd(128, 16, 8)),
    },
    # Small, so that small problems have several blocks; interpreted time goes with the number of blocks.
    "interpreter": {256: _one(Blocks(32, 16, 1, 1, together=2), Blocks(16, 32, 1, 1), Blocks(32, 16, 1, 1))},
}
"""For 16-bit tensors."""

SINGLE: Table = {
    # Exact float32 products are not matrix instructions: small blocks, or there are not enough registers.
    "*": {64: _SMALL, 128: _one(Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)),
          256: _one(Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 4, 1))},
    "interpreter": HALF["interpreter"],
}  # fmt: skip
"""For float32 tensors."""


def choose(table: Table, architecture: str, size: int) -> Tuning:
    """Return the tuning for a `mean_size`."""
    sizes = table.get(architecture, table["*"])
    return sizes[min(one for one in sizes if one >= size)]
