"""Test which block sizes and launches are chosen: their tables, and times of each way on one H200."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.deterministic import mask_of
from burst_portable.backends.cuda.hopper import cuts
from burst_portable.backends.cuda.hopper.configs import DK, split_configs
from burst_portable.backends.cuda.hopper.cuts import forward_cut, split_divides, turns, writing_cuts
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.planning.tiles import Tile, Tiles, find_tiles
from tests.support.launch_tables import count_visits, dense, mask_tiles, pass_sizes

RESULTS = Path(__file__).parents[4] / "benchmarks" / "results"


@pytest.mark.parametrize(
    ("tiles", "length", "apart"),
    [
        (mask_tiles("sink:64:300", 4300), 4300, (0, 64)),
        (mask_tiles("sink:200:300", 4352), 4352, (0, 200)),
        (Tiles([Tile(0, 4300, 1000, 1100, -9999, 9999), Tile(0, 4300, 1100, 4300, 0, 300)]), 4300, (896, 1100)),
        (Tiles([Tile(0, 4300, 0, 4250, 0, 300), Tile(0, 4300, 4250, 4300, -9999, 9999)]), 4300, (4224, 4300)),
    ],
    ids=["a sink", "two blocks", "in the middle", "at the end"],
)
def test_writing_cuts_computes_long_blocks_in_second_launch(tiles, length, apart):
    """Each key is written by one block of the first launch or accumulated by the second."""
    (whole, rest), (few, divided) = writing_cuts(tiles, pass_sizes(length, 32))
    assert (whole.keys, few.keys) == (None, apart)
    spans = sorted((*(tuple(rest.numbers[16 * w : 16 * w + 7 : 6]) for w in range(rest.blocks)), apart))
    assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])], "each key in one block"
    assert spans[-1][1] == length
    seen = count_visits(rest, 128, 64, peel=False, length=length)
    assert (seen[slice(*apart)] == 0).all()
    added = count_visits(divided, 128, 64, peel=False, length=length)
    assert (added[apart[1] - apart[0] :] == 0).all(), "beyond the keys that it knows"
    seen[slice(*apart)] = added[: apart[1] - apart[0]]
    assert (seen[:length, :length] == dense(tiles, length).T).all()
    assert (seen[length:] == 0).all()


@pytest.mark.parametrize(
    ("mask", "length", "heads", "group", "launches"),
    [
        ("sink:64:1024", 16384, 32, 4, 2),
        ("window:1024", 16384, 32, 1, 1),
        ("causal", 16384, 32, 1, 1),
        ("sink:64:1024", 32768, 256, 1, 1),
        ("sink:4200:1024", 16384, 8, 1, 0),
        ("sink:64:1024", 16384, 8, 4, 2),
        ("causal", 4096, 16, 4, 0),
        ("causal", 4096, 32, 4, 1),
    ],
    ids=[
        "groups",
        "no long block",
        "causal",
        "many heads",
        "a long quarter",
        "few heads",
        "all are late",
        "heads side by side",
    ],
)
def test_writing_cuts_number_of_launches(mask, length, heads, group, launches):
    assert len(writing_cuts(mask_tiles(mask, length), pass_sizes(length, heads, group))) == launches


@pytest.mark.parametrize(
    ("mask", "length", "heads", "group", "whole", "divided"),
    [
        ("window:1024", 16384, 16, 4, 0.737, 0.850),
        ("window:1024", 16384, 16, 8, 0.726, 0.806),
        ("window:1024", 4096, 16, 4, 0.191, 0.221),
        ("window:1024", 4096, 16, 8, 0.323, 0.215),
        ("causal", 16384, 32, 4, 9.511, 9.710),
        ("causal", 4096, 16, 4, 0.539, 0.338),
        ("causal", 2048, 16, 8, 0.509, 0.115),
        ("full", 16384, 16, 8, 9.653, 9.832),
        ("full", 4096, 16, 4, 0.552, 0.587),
        ("full", 4096, 16, 8, 1.038, 0.586),
    ],
)
def test_writing_cuts_takes_the_faster_of_two_measured_ways(mask, length, heads, group, whole, divided):
    """Milliseconds of a backward pass with heads of 128 on one H200, with dK and dV written once or added by heads."""
    assert (len(writing_cuts(mask_tiles(mask, length), pass_sizes(length, heads, group))) == 1) == (whole < divided)


def measured_both_ways():
    """Return rows of a backward pass with few K/V heads, with the milliseconds of both ways on one H200."""
    results = json.loads((RESULTS / "few-kv-heads-h200-2026-11-29.json").read_text(encoding="utf-8"))["results"]
    return [one for one in results if {"whole", "divided"} <= one.keys()]


@pytest.mark.parametrize("row", measured_both_ways(), ids=lambda row: " ".join(map(str, list(row.values())[:5])))
def test_faster_of_two_ways_is_taken_with_few_kv_heads(row):
    """One program computes a whole group of query heads, or each query head has its own. Noise is up to 5 %."""
    heads, kv_heads = map(int, row["heads"].split("/"))
    tokens, dim = row["tokens"], row["head_dim"]
    shard = (Segment(0, tokens),)
    tiles = find_tiles(mask_of(row["mask"], tokens), shard, shard)
    sizes = pass_sizes(tokens, heads, heads // kv_heads, dim)
    split = split_configs(dim, dim)
    divides = not writing_cuts(tiles, sizes) if split is None else split_divides(tiles, sizes, split[DK])
    assert row["takes"] == ("divided" if divides else "whole")
    assert row[row["takes"]] <= 1.05 * min(row["whole"], row["divided"])


@pytest.mark.parametrize(("group", "divides"), [(1, False), (8, True)])
def test_split_divides_few_late_programs_without_prediction(group, divides, monkeypatch):
    """A launch of more programs than `SPLIT_PREDICTED` divides groups if the longest program ends late."""
    monkeypatch.setattr(cuts, "SPLIT_PREDICTED", 0)
    sizes = pass_sizes(4096, 8, group, 256)
    assert split_divides(mask_tiles("causal", 4096), sizes, split_configs(256, 256)[DK]) is divides


def test_forward_cut_staggers_starts_if_l2_is_too_small():
    def starts(keys, dim):
        tiles = Tiles([Tile(0, 1024, 0, keys, -keys, 1024)])
        _, table = forward_cut(tiles, pass_sizes(1024, 32, dim=dim), every_block=False)
        return sorted({table.numbers[table.numbers[16 * w + 1]] for w in range(table.blocks)})

    keys = starts(1 << 18, 128)
    assert [b - a for a, b in pairwise(keys)] == [16 * 128] * 7, "a MiB of K and V in 16 bits"
    assert [len(starts(keys, 128)) for keys in ((1 << 17) - 128, 1 << 17)] == [1, 8]
    assert [len(starts(keys, 64)) for keys in ((1 << 18) - 128, 1 << 18)] == [1, 8]


@pytest.mark.parametrize(
    ("mask", "length", "heads", "workers"),
    [
        ("causal", 8192, 32, 3),
        ("full", 4096, 32, 3),
        ("causal", 4096, 32, 2),
        ("window:1024", 8192, 32, 2),
        ("causal", 8192, 8, 2),
    ],
    ids=["long", "whole", "short", "window", "few heads"],
)
def test_forward_cut_uses_tall_blocks_for_long_and_many_rows(mask, length, heads, workers):
    segment = (Segment(0, length),)
    tiles = find_tiles(Mask.parse(mask, length), segment, segment)
    config, table = forward_cut(tiles, pass_sizes(length, heads, dim=64), every_block=True)
    assert workers == config.W
    assert table.blocks == -(-length // (64 * workers))
    assert forward_cut(tiles, pass_sizes(length, heads), every_block=True)[0].W == 2


@pytest.mark.parametrize(
    ("mask", "length", "heads", "programs"),
    [
        (Mask.causal(), 32768, 32, 8192),  # each block is long enough
        (Mask.window(4096), 16384, 32, 2048),
        (Mask.window(128), 8192, 32, 137),  # 15 short blocks in sequence; the usual 32 would leave only 64 programs
        (Mask.window(128), 2048, 8, 128),
    ],
)
def test_forward_cut_leaves_no_multiprocessor_idle(mask, length, heads, programs):
    shard = (Segment(0, length),)
    _, table = forward_cut(find_tiles(mask, shard, shard), pass_sizes(length, heads), every_block=True)
    items = table.blocks * heads
    assert -(-items // turns(table, pass_sizes(length, heads))) == programs
    assert programs >= min(items, 132)
