"""Test that programs of deterministic passes wait little for each other, by a simulation of launches."""

import random

import pytest

from burst_portable.backends.cuda.hopper import cuts, ordered_tables
from burst_portable.backends.cuda.hopper.cuts import PassSizes, adding_cuts, writing_cuts
from tests.support.launch_tables import mask_tiles
from tests.support.simulated_backward import end_of

RAGGED = "documents:" + ",".join(map(str, [0, *sorted(random.Random(0).sample(range(64, 4096), 3)), 4096]))
MASKS = {
    "causal": "causal",
    "full": "full",
    "documents": "documents:0,1024,2048,3072,4096",
    "other documents": RAGGED,
    "window": "window:1024",
    "prefix": "prefix:2048",
    "question": "share_question:1024,768,768,768,768",
}


def simulated(mask, *, ordered, heads=(16, 16), tokens=4096):
    sizes = PassSizes(1, tokens, tokens, *heads, 64, 64, processors=132)
    tiles = mask_tiles(mask, tokens)
    cuts = writing_cuts(tiles, sizes, ordered=ordered) or adding_cuts(tiles, sizes, ordered=ordered)
    return sum(end_of(*cut, sizes) for cut in cuts)


def share(mask, **more):
    """Return the speed of the deterministic pass as a share of that of the usual one."""
    return simulated(mask, ordered=False, **more) / simulated(mask, ordered=True, **more)


def test_simulation_equals_measured_time():
    assert simulated("causal", ordered=False) == pytest.approx(191, rel=0.02)


@pytest.mark.parametrize("name", MASKS)
def test_programs_of_deterministic_passes_wait_little(name):
    assert share(MASKS[name]) > 0.9


@pytest.mark.parametrize(("heads", "least"), [((16, 16), 0.8), ((32, 8), 0.93)], ids=str)
def test_programs_that_follow_sinks_wait_little(heads, least):
    assert share("sink:64:1024", heads=heads) > least


@pytest.mark.parametrize("mask", ["sink:4:2048", "sink:16:512"])
def test_aligned_blocks_of_queries_save_time(mask, monkeypatch):
    aligned = share(mask)
    monkeypatch.setattr(cuts, "align_queries", lambda tiles, *_: (tiles, (0,)))
    assert aligned > 1.02 * share(mask)


def increasing(collected, inner):
    """Return the outer blocks in the order of their keys. Each visits queries by increasing index."""
    blocks = sorted(collected.items(), key=lambda item: item[0])
    for _, block in blocks:
        block.sort()
    return blocks


@pytest.mark.parametrize("name", ["causal", "documents", "window"])
def test_simulation_finds_order_in_which_programs_wait(name, monkeypatch):
    monkeypatch.setattr(ordered_tables, "order_rows", increasing)
    assert share(MASKS[name]) < 0.8
