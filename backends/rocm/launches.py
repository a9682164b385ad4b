"""Run the launch code of the portable kernels for one chip on a fake driver.

    python backends/rocm/launches.py gfx942 [--quick]

Print a line of JSON for each launch: the compiled kernel and its faults. A process has one chip, since Triton and the
kernels cache the properties of the device.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton

sys.path.insert(0, str(Path(__file__).parent))

from fake_driver import FakeDriver, Launched

from burst_portable.conformance.cases import MASKS
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.triton.machine_code import Record, problems, read_amd
from burst_portable.kernels.triton.triton_kernel import TritonKernel
from burst_portable.kernels.triton.tuning import HALF, SINGLE, Blocks, choose, mean_size
from burst_portable.layout import make_layout
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import find_tiles


@dataclass(frozen=True)
class Case:
    """One configuration. `skewed`: tensors with unaligned starts and strides."""

    dtype: torch.dtype = torch.bfloat16
    head: int = 64
    value: int = 64
    mask: str = "causal"
    softcap: float | None = None
    skewed: bool = False

    def __str__(self) -> str:
        extra = "-softcap" * (self.softcap is not None) + "-skewed" * self.skewed
        return f"{str(self.dtype).removeprefix('torch.')}-{self.head}x{self.value}-{self.mask}{extra}"


CASES = (
    Case(),
    Case(head=128, value=128, mask="sink_window"),
    Case(torch.float16, 128, 64, "documents"),
    Case(head=80, value=80, mask="window"),
    Case(head=256, value=256),
    Case(softcap=20.0, mask="full"),
    Case(skewed=True),
    Case(torch.float32, 64, 64),
    Case(torch.float32, 128, 128),
)
BATCH, HEADS, KV_HEADS, LENGTH = 2, 4, 2, 500
USE = {"keys_kernel": "keys", "queries_kernel": "queries", "delta_kernel": "delta"}


def tensors(case: Case) -> list[torch.Tensor]:
    """Return q, k, v and dout."""
    sizes = [(HEADS, case.head), (KV_HEADS, case.head), (KV_HEADS, case.value), (HEADS, case.value)]
    made = []
    for heads, size in sizes:
        room = torch.zeros(BATCH, LENGTH, heads, size + 3 * case.skewed, dtype=case.dtype)
        made.append(room[..., 1 : 1 + size] if case.skewed else room)
    return made


def launch(kernel: TritonKernel, case: Case) -> None:
    """Launch forward and backward over two blocks of keys, so that the second merges, then over all in one call."""
    q, k, v, dout = tensors(case)
    call = AttentionCall.of(q, k, v, scale=case.head**-0.5, softcap=case.softcap)
    mask, (whole,) = MASKS[case.mask], make_layout("contiguous", LENGTH, 1).shards
    halves = [shard[0] for shard in make_layout("contiguous", LENGTH, 2).shards]
    state = None
    into = tuple(torch.zeros(x.shape) for x in (q, k, v))
    for half in halves:
        columns, tiles = slice(half.start, half.last + 1), find_tiles(mask, whole, (half,))
        state = kernel.attend(q, k[:, columns], v[:, columns], tiles, call, state=state)
    assert state is not None
    for half in halves:
        columns, tiles = slice(half.start, half.last + 1), find_tiles(mask, whole, (half,))
        block = into[0], into[1][:, columns], into[2][:, columns]
        kernel.attend_backward(
            BackwardInputs(dout, q, k[:, columns], v[:, columns], state[1], out=state[0]), tiles, call, into=block
        )
    tiles = find_tiles(mask, whole, whole)
    out, lse = kernel.forward_single_call(q, k, v, tiles, call)
    kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, call)


def use_of(launched: Launched) -> str:
    if launched.kernel == "attend_kernel":
        return "resumed" if launched.given["MERGE"] else "forward"
    return USE[launched.kernel]


def tuned(case: Case, use: str, chip: str) -> Blocks:
    """Return the blocks of the tuning tables."""
    table = SINGLE if case.dtype == torch.float32 else HALF
    tuning = choose(table, chip, mean_size(case.head, case.value))
    return (getattr(tuning, use) or tuning.forward)[0]


def wrong(case: Case, launched: Launched, chip: str, record: Record) -> list[str]:
    """Return unfit arguments, differences from the tuning tables, and exceeded limits of the chip."""
    use, metadata, given = use_of(launched), launched.launcher.metadata, launched.given
    found = launched.wrong()
    if (metadata.target.arch, metadata.target.warp_size) != (chip, 64):
        found.append(f"compiled for {metadata.target}")
    limits = problems(record)
    if case.dtype == torch.float32 or use == "delta":  # exact float32 products are no matrix instructions
        limits = [limit for limit in limits if "matrix instruction" not in limit]
    if use == "delta":
        return found + [limit for limit in limits if "shared" not in limit or record.shared]
    blocks = tuned(case, use, chip)
    expected = (blocks.rows, blocks.columns, blocks.warps, blocks.stages, *(value for _, value in blocks.extra))
    extra = (getattr(metadata, name) for name, _ in blocks.extra)
    if (given["R"], given["C"], metadata.num_warps, metadata.num_stages, *extra) != expected:
        found.append(f"launched with other blocks than {blocks}")
    every_row = use == "forward" or not given.get("ADD", True)
    rows = given["k_rows" if use == "keys" else "q_rows"]
    programs = -(-rows // blocks.rows) * BATCH * (KV_HEADS if use == "keys" else HEADS)
    if launched.grid[0] > programs or (every_row and launched.grid[0] != programs) or launched.grid[1:] != (1, 1):
        found.append(f"{launched.grid} programs, expected {programs}")
    return found + limits


def examine(chip: str, cases: tuple[Case, ...]) -> Iterator[dict[str, object]]:
    """Yield a result for each launch."""
    driver = FakeDriver(chip)
    triton.runtime.driver.set_active(driver)
    kernel = TritonKernel()
    for case in cases:
        driver.launched.clear()
        launch(kernel, case)
        first, compiled = list(driver.launched), len(driver.listings)
        driver.launched.clear()
        launch(kernel, case)  # with other memory: nothing may be compiled again
        again = len(driver.listings) != compiled or [x.kernel for x in first] != [x.kernel for x in driver.launched]
        for one in (*first, *driver.launched):
            metadata = one.launcher.metadata
            facts = read_amd(driver.listings[metadata.hash], metadata, chip)
            record = Record(chip, use_of(one), case.head, "", shared=metadata.shared, **facts)
            found = wrong(case, one, chip, record) + ["compiled again for tensors of the same layout"] * again
            yield {"name": f"{chip} {case} {use_of(one)}", "wrong": found, **asdict(record), "programs": one.grid[0]}


def main(arguments: list[str]) -> int:
    chip, *options = arguments
    for result in examine(chip, CASES[:1] if "--quick" in options else CASES):
        print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
