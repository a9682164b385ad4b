"""Test that `verify` rejects other tiles of the local block, and other positions, than those of the mask."""

from __future__ import annotations

import dataclasses

import pytest

from burst_portable.mask import Mask
from burst_portable.planning.call import Dropout
from burst_portable.planning.plans import make_pass_plan
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.planning.verify import verify
from tests.support.changed_plans import AllSteps, change_step, errors_after
from tests.support.plans import make_plan


def mirrored(tiles: Tiles) -> Tiles:
    """Return tiles in which each key sees the queries that saw it: as many pairs."""
    return Tiles((Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo) for t in tiles), tiles.positions)


@pytest.mark.parametrize("strategy", ["ring", "all_gather"])  # alone, and with received blocks
@pytest.mark.parametrize("change", [mirrored, lambda tiles: Tiles()], ids=["mirrored", "none"])
def test_verify_names_other_tiles_of_the_local_block(strategy, change):
    plan = make_plan(Mask.causal(), "contiguous", strategy)

    def local(steps: AllSteps) -> None:
        index = next(i for i, step in enumerate(steps[1]) if step.compute and 1 in step.compute.k_owners)
        *others, block = steps[1][index].compute.blocks
        blocks = (*others, block._replace(tiles=change(block.tiles)))
        change_step(steps, 1, index, compute=dataclasses.replace(steps[1][index].compute, blocks=blocks))

    says = (
        "without tiles of block 1"
        if change is not mirrored
        else "with other tiles of its local block than the mask has"
    )
    assert any(says in error for error in errors_after(plan, local))


def test_verify_names_other_tiles_of_a_part_of_the_local_block():
    plan = make_plan(
        Mask.full(), "contiguous", length=4 * 1536, transfer="direct", prefetch_steps=3, blocks_per_launch=3,
        local_block_order="split",
    )  # fmt: skip
    assert verify(plan) == []

    def moved(steps: AllSteps) -> None:
        """Move a column from the first part to the second: as many pairs, in other rows."""
        for index, columns in ((0, (0, 1534)), (2, (0, 1536))):
            compute = steps[1][index].compute
            (block,) = compute.blocks
            (tile,) = block.tiles
            blocks = (block._replace(tiles=Tiles([dataclasses.replace(tile, k_start=columns[0], k_stop=columns[1])])),)
            change_step(steps, 1, index, compute=dataclasses.replace(compute, blocks=blocks))

    errors = errors_after(plan, moved, "backward")
    says = "computes q1 x kv1 at step 0 with other tiles of its local block than the mask has in rows [0, 512)"
    assert any(says in error for error in errors), errors


@pytest.mark.parametrize("strategy", ["ring", "burst", "all_gather", "distflash"])
def test_verify_names_other_positions_of_dropout(strategy):
    base = make_plan(Mask.window(9), "contiguous", strategy)
    call = dataclasses.replace(base.call, dropout=Dropout(0.1))
    forward, backward = (
        make_pass_plan(
            dataclasses.replace(part.call, dropout=call.dropout), part.side, part.route, part.gradient_route,
            helpers=part.helpers,
        )
        for _, part in base.passes()
    )  # fmt: skip
    plan = dataclasses.replace(base, call=call, forward=forward, backward=backward)
    assert verify(plan) == []

    def turned(steps: AllSteps) -> None:
        index = next(i for i, step in enumerate(steps[2]) if step.compute and step.arrivals)
        compute = steps[2][index].compute
        change_step(steps, 2, index, compute=dataclasses.replace(compute, positions=compute.positions[::-1]))

    for name in ("forward", "backward"):
        assert any("dropout would drop other weights" in error for error in errors_after(plan, turned, name))
