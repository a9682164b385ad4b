"""Masks, layouts and tiles against matrices: what Hypothesis thinks of, and what is known by hand."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections import defaultdict
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.conformance.oracle import dense_mask
from burst_portable.cost import Rates, plan_cost
from burst_portable.errors import LayoutError, MaskError, UnknownNameError
from burst_portable.layout import NAMES, OF_DOCUMENTS, Layout, Segment, make_layout
from burst_portable.mask import UNBOUNDED, Mask, Region, band_area
from burst_portable.plans import Problem
from burst_portable.strategies.ring import RingStrategy
from burst_portable.tiles import Tile, banded_box, find_tiles, fuse, sees

sizes = st.integers(1, 9)
bounds = st.integers(-12, 14)


def cells(tile: Tile) -> set[tuple[int, int]]:
    return {
        (i, j)
        for i in range(tile.q_start, tile.q_stop)
        for j in range(tile.k_start, tile.k_stop)
        if tile.lo <= i - j <= tile.hi
    }


@given(sizes, sizes, bounds, bounds)
def test_the_area_of_a_band(rows, columns, lo, hi):
    counted = sum(lo <= i - j <= hi for i in range(rows) for j in range(columns))
    assert band_area(rows, columns, lo, hi) == counted


@given(st.integers(0, 5), sizes, st.integers(0, 5), sizes, bounds, bounds)
def test_a_banded_box_keeps_every_cell_and_no_empty_row_or_column(q, rows, k, columns, lo, hi):
    box = {(i, j) for i in range(q, q + rows) for j in range(k, k + columns) if lo <= i - j <= hi}
    tile = banded_box(q, q + rows, k, k + columns, lo, hi)
    if tile is None:
        assert not box
        return
    assert cells(tile) == box
    assert {i for i, _ in box} == set(range(tile.q_start, tile.q_stop))
    assert {j for _, j in box} == set(range(tile.k_start, tile.k_stop))
    assert tile.area == len(box)
    assert tile.full == (len(box) == tile.rows * tile.columns)


@given(st.integers(0, 9), sizes, st.integers(0, 9), sizes, bounds, bounds, st.integers(1, 5))
def test_blocks_that_are_visited(q, rows, k, columns, lo, hi, block):
    """Of every block of rows: from the first column that one of them sees to the last, in whole blocks."""
    tile = banded_box(q, q + rows, k, k + columns, lo, hi)
    if tile is None:
        return
    seen = defaultdict(list)
    for i, j in cells(tile):
        seen[i // block].append(j)
    counted = sum(-(-(max(row) + 1 - min(row)) // block) for row in seen.values())
    assert tile.visited(block) == (tile.area if block == 1 else counted * block * block)


@pytest.mark.parametrize(("lo", "hi"), [(0, UNBOUNDED), (0, 4096), (-UNBOUNDED, UNBOUNDED), (-UNBOUNDED, 5)])
def test_blocks_of_long_tiles_are_estimated(lo, hi):
    """What one tile visits is close to what its halves do, whose blocks are counted."""
    whole = banded_box(0, 16384, 0, 16384, lo, hi)
    parts = [whole.clipped(start, start + 8192, 0, 16384) for start in (0, 8192)]
    assert whole.visited(128) == pytest.approx(sum(part.visited(128) for part in parts), rel=0.02)


regions = st.builds(
    lambda q, rows, k, columns, lo, width: Region(q, q + rows, k, k + columns, lo, lo + width),
    st.integers(0, 12), st.integers(1, 10), st.integers(0, 12), st.integers(1, 10), bounds, st.integers(0, 15),
)  # fmt: skip


@given(regions, regions)
def test_overlap_in_closed_form(a, b):
    both = dense_overlap(a, b)
    assert a.overlaps(b) == both
    if both:
        with pytest.raises(MaskError, match="overlap"):
            Mask((a, b))
    else:
        Mask((a, b))


def dense_overlap(a: Region, b: Region) -> bool:
    return bool((dense_mask(Mask((a,)), 24) & dense_mask(Mask((b,)), 24)).any())


@given(st.lists(regions, min_size=3, max_size=12))
def test_the_sweep_finds_an_overlap_wherever_it_is(many):
    overlapping = any(a.overlaps(b) for i, a in enumerate(many) for b in many[:i])
    if overlapping:
        with pytest.raises(MaskError):
            Mask(tuple(many))
    else:
        assert int(sum(dense_mask(Mask((r,)), 24).sum() for r in many)) == Mask(tuple(many)).area(24)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_tiles_cover_every_pair_exactly_once(name, layout, ranks):
    mask = MASKS[name]
    try:
        where = make_layout(layout, LENGTH, ranks, mask)
    except LayoutError:
        assert layout in OF_DOCUMENTS
        return
    covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    for q_shard in range(ranks):
        for k_shard in range(ranks):
            tiles = find_tiles(mask, where.shards[q_shard], where.shards[k_shard])
            assert sees(mask, where.shards[q_shard], where.shards[k_shard]) == bool(tiles)
            q, k = where.positions(q_shard), where.positions(k_shard)
            for tile in tiles:
                for i, j in cells(tile):
                    covered[q[i], k[j]] += 1
    assert torch.equal(covered, dense_mask(mask, LENGTH).long())
    assert mask.area(LENGTH) == int(covered.sum())


@given(st.data())
def test_random_segments_meet_random_masks(data):
    """Segments of any start and step, several a side: the one place where mask meets layout."""
    mask = data.draw(st.sampled_from(list(MASKS.values())))
    step = data.draw(st.integers(1, 4))

    def side():
        starts = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True))
        return [Segment(s, data.draw(st.integers(1, 5)), step) for s in starts]

    queries, keys = side(), side()
    seen = dense_mask(mask, LENGTH)
    q = [p for s in queries for p in s.positions()]
    k = [p for s in keys for p in s.positions()]
    expected = [(i, j) for i, a in enumerate(q) for j, b in enumerate(k) if seen[a, b]]
    found = [cell for tile in find_tiles(mask, queries, keys) for cell in cells(tile)]
    assert sorted(found) == expected  # sorted: a cell in two tiles would show twice


@given(st.lists(regions, max_size=4), st.integers(1, 24))
def test_blind_rows_are_counted(many, length):
    try:
        mask = Mask(tuple(many))
    except MaskError:
        return
    assert mask.blind_rows(length) == int((~dense_mask(mask, 24)[:length, :length].any(1)).sum())


def test_fusing_gives_one_tile_a_step_for_causal_zigzag_and_striped():
    for layout in ("zigzag", "striped"):
        where = make_layout(layout, 4096, 8)
        pairs = [(a, b) for a in where.shards for b in where.shards]
        assert all(len(find_tiles(Mask.causal(), a, b)) == 1 for a, b in pairs)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9, unique=True), st.integers(1, 4)
)
def test_fusing_never_changes_what_is_seen(corners, size):
    tiles = [banded_box(a * size, (a + 1) * size, b * size, (b + 1) * size, -99, 99) for a, b in corners]
    fused = fuse(list(tiles))
    assert len(fused) <= len(tiles)
    assert sorted(c for t in fused for c in cells(t)) == sorted(c for t in tiles for c in cells(t))


@given(st.integers(1, 200), st.integers(1, 16), st.sampled_from(["contiguous", "zigzag", "striped"]))
def test_layouts_hold_every_position_once_and_leave_no_rank_empty(length, ranks, name):
    if length < ranks:
        with pytest.raises(LayoutError, match="more ranks than tokens"):
            make_layout(name, length, ranks)
        return
    where = make_layout(name, length, ranks)
    held = sorted(p for r in range(ranks) for p in where.positions(r))
    assert held == list(range(length))
    counts = [where.count(r) for r in range(ranks)]
    assert min(counts) >= 1
    assert max(counts) - min(counts) <= 2


lengths = st.lists(st.integers(1, 700), min_size=1, max_size=40)


@given(lengths, st.integers(1, 9))
def test_whole_documents_hold_every_position_once(lengths, ranks):
    """What is cut is cut into two chunks a rank, and perhaps a rest; all else lies whole on one rank."""
    ends = [0, *accumulate(lengths)]
    mask = Mask.documents(ends)
    try:
        where = make_layout("whole_documents", ends[-1], ranks, mask)
    except LayoutError:  # fewer documents than ranks, and none that is long enough to be cut
        assert len(lengths) < 2 * ranks
        return
    assert sorted(p for r in range(ranks) for p in where.positions(r)) == list(range(ends[-1]))
    for start, stop in pairwise(ends):
        parts = [within for shard in where.shards for s in shard if (within := _shared(s, start, stop))]
        assert len(parts) == 1 or (stop - start >= 2 * ranks and len(parts) <= 2 * ranks + 1)
    if ranks == 1:
        assert where.shards[0] == (Segment(0, ends[-1]),)


def _shared(segment, start, stop):
    return max(0, min(stop, segment.start + segment.count) - max(start, segment.start))


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (4, 0), (8, 1)])
def test_whole_documents_are_even_and_little_is_sent(ranks, seed):
    """Lengths as of web text: pairs and rows within 3 %, a fraction of the bytes, chunks of whole blocks first."""
    chance, ends = random.Random(seed), [0]
    while ends[-1] < 131072:
        ends.append(min(131072, ends[-1] + max(16, int(chance.lognormvariate(6.2, 1.4)))))
    mask = Mask.documents(ends)
    sent = {}
    for name in OF_DOCUMENTS:
        where = make_layout(name, ends[-1], ranks, mask)
        problem = Problem(mask, where, where, 32, 8, 128, 128)
        plan = RingStrategy(moves="fetch").plan(problem)
        sent[name] = plan_cost(plan, Rates(600.0, 300.0)).sent
        pairs = [sum(s.compute.tiles.area for s in plan.forward.rank(r) if s.compute) for r in range(ranks)]
        assert sum(pairs) == mask.area(ends[-1])
        for held in (pairs, [where.count(rank) for rank in range(ranks)]):
            assert max(held) * ranks < 1.03 * sum(held)
    assert sent["whole_documents"] < 0.5 * sent["document_zigzag"]
    cut = [stop - start for start, stop in pairwise(ends) if not _on_one_rank(where, start, stop)]
    for shard in where.shards:
        assert sum(s.count % 128 == 0 for s in shard[: len(cut)]) == len(cut)


def _on_one_rank(where, start, stop):
    return any(_shared(s, start, stop) == stop - start for shard in where.shards for s in shard)


@st.composite
def partitions(draw, start=0, count=24, step=1):
    """Segments that hold a progression exactly once, cut in two again and again: in halves, or every second one."""
    if count < 2 or draw(st.integers(0, 3)) == 0:
        return [Segment(start, count, step)]
    if draw(st.booleans()):
        cut = draw(st.integers(1, count - 1))
        halves = (start, cut, step), (start + cut * step, count - cut, step)
    else:
        halves = (start, -(-count // 2), 2 * step), (start + step, count // 2, 2 * step)
    return [s for half in halves for s in draw(partitions(*half))]


@given(st.data())
def test_layouts_made_by_hand_hold_every_position_once_or_are_refused(data):
    """Segments of all steps at once; one of them perhaps moved, stretched or dropped."""
    segments = data.draw(partitions())
    changed = data.draw(st.integers(0, len(segments) - 1))
    s = segments[changed]
    segments[changed : changed + 1] = data.draw(
        st.sampled_from(
            [[s], [], [Segment(max(0, s.start - 1), s.count, s.step)], [Segment(s.start, s.count, s.step + 1)],
             [Segment(s.start, s.count + 1, s.step)], [s, s], [Segment(s.start, 1), s]]
        )
    )  # fmt: skip
    shards = [segments[::2], segments[1::2]]
    held = sorted(p for s in segments for p in s.positions())
    if held == list(range(24)) and all(shards):
        assert sorted(p for rank in range(2) for p in Layout("mine", 24, shards).positions(rank)) == held
    else:
        with pytest.raises(LayoutError, match="'mine'"):
            Layout("mine", 24, shards)


@given(*[st.builds(Segment, st.integers(0, 30), st.integers(1, 9), st.integers(1, 9))] * 2)
def test_segments_that_share_a_position(a, b):
    assert a.meets(b) == bool(set(a.positions()) & set(b.positions()))


@pytest.mark.parametrize(
    ("length", "shards", "message"),
    [
        (8, [[Segment(0, 4)]], "4 of 8"),
        (8, [[Segment(0, 8)], [Segment(0, 8)]], "a position twice"),
        (8, [[Segment(0, 4)], [Segment(4, 5)]], "position 8; allowed: 0 to 7"),
        (8, [[Segment(0, 8)], []], r"without a token; got ranks \[1\]"),
        (8, [[(0, 8)]], "made of segments"),
        (8, [Segment(0, 8)], "a list of segments for every rank"),
        (8.0, [[Segment(0, 8)]], "ranks and tokens"),
        (8, [], "ranks and tokens"),
    ],
)
def test_bad_layouts_are_refused(length, shards, message):
    with pytest.raises(LayoutError, match=message):
        Layout("mine", length, shards)


def test_more_ranks_than_plans_are_made_for():
    """Refused before anything is listed."""
    with pytest.raises(LayoutError, match="too many ranks; got 1073741824; allowed: at most 16384"):
        make_layout("zigzag", 1 << 40, 1 << 30)
    with pytest.raises(LayoutError, match="too many ranks"):
        Layout("mine", 16385, [[Segment(i, 1)] for i in range(16385)])


@pytest.mark.parametrize("numbers", [(0, 4, 0), (0, 4, -1), (-1, 4), (0, -1), (0, 4.0), (0, True)])
def test_bad_segments_are_refused(numbers):
    with pytest.raises(LayoutError, match="segment"):
        Segment(*numbers)


def test_zigzag_by_hand():
    where = make_layout("zigzag", 16, 2)
    assert where.positions(0) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert where.positions(1) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert where.shards[1] == (Segment(4, 8),)  # neighbours are joined


@pytest.mark.parametrize(
    ("name", "least", "most"), [("contiguous", 1.8, 2.0), ("zigzag", 1.0, 1.001), ("striped", 1.0, 1.002)]
)
def test_how_even_causal_work_is(name, least, most):
    where = make_layout(name, 4096, 8)
    work = [sum(find_tiles(Mask.causal(), q, k).area for k in where.shards) for q in where.shards]
    assert sum(work) == 4096 * 4097 // 2
    assert least <= max(work) * 8 / sum(work) <= most


def test_queries_and_keys_of_different_steps_are_refused():
    with pytest.raises(LayoutError, match="different steps"):
        find_tiles(Mask.full(), [Segment(0, 4, 2)], [Segment(0, 4, 1)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causl", "did you mean 'causal'"),
        ("window", r"window:LEFT"),
        ("window:-1", "out of range"),
        ("window:x", "cannot be read"),
        ("documents:0,5,3", "strictly rising"),
        ("documents:1,5", "0 first"),
        ("prefix:0", "out of range"),
        ("share_question:5", "an answer"),
        ("block_causal:0", "out of range"),
    ],
)
def test_bad_masks_are_refused(text, message):
    with pytest.raises((MaskError, UnknownNameError), match=message):
        Mask.parse(text, 64)


@pytest.mark.parametrize(
    "bounds",
    [
        torch.tensor([0, 4, 9], dtype=torch.int32),
        np.array([0, 4, 9]),
        [np.int64(0), torch.tensor(4), 9],
        range(0, 10, 9),
    ],
)
def test_lengths_of_documents_come_in_many_forms(bounds):
    expected = Mask.documents([int(b) for b in bounds])
    assert Mask.documents(bounds) == expected
    assert all(type(r.q_stop) is int for r in Mask.documents(bounds).regions)


@pytest.mark.parametrize(
    "bounds",
    [[0, 4.7, 9], [0.0, 9.0], ["0", "9"], "09", [False, 9], torch.tensor([0.0, 9.0]), torch.tensor([[0, 9]]), 9, None],
)
def test_lengths_that_are_no_whole_numbers(bounds):
    for make in (Mask.documents, Mask.block_causal, Mask.share_question):
        with pytest.raises(MaskError, match="takes whole numbers"):
            make(bounds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mask.window(1.5), "left of a mask.*1.5"),
        (lambda: Mask.window(True), "left of a mask"),
        (lambda: Mask.share_question([4, 0]), "at least 1"),
        (lambda: Mask.parse(None), "short form"),
        (lambda: Mask(5), "made of regions"),
        (lambda: Mask(["causal"]), "made of regions"),
        (lambda: Mask((), name=3), "name of a mask"),
        (lambda: Region(0, 4.0, 0, 4), "q_stop of a region"),
        (lambda: Region(0, 4, False, 4), "k_start of a region"),
    ],
)
def test_masks_of_wrong_types(make, message):
    with pytest.raises(MaskError, match=message):
        make()


def test_sizes_of_a_mask_may_be_numpys():
    assert Mask.window(np.int64(3), torch.tensor(1)) == Mask.window(3, 1)
    assert Mask(r for r in (Region(np.int32(0), 4, 0, 4),)) == Mask((Region(0, 4, 0, 4),))


def test_a_mask_longer_than_the_sequence_is_refused():
    with pytest.raises(MaskError, match="longer than the sequence"):
        Mask.documents((0, 8, 65)).check_lengths(64, 64)
    Mask.documents((0, 8, 64)).check_lengths(64, 64)
    Mask((Region(0, UNBOUNDED, 0, 8),)).check_lengths(64, 64)


def test_equal_masks_are_equal_keys():
    assert Mask.causal() == Mask.causal()
    assert hash(Mask.documents((0, 4, 9))) == hash(Mask.documents((0, 4, 9)))
    assert Mask.documents((0, 4, 9)) == Mask.documents([0, 4, 9])
    assert Mask.documents((0, 4, 9)) != Mask.documents((0, 5, 9))


def test_a_million_tokens_cost_neither_time_nor_memory():
    """Interval search: nothing may be in proportion to the tokens. The bound on time is generous, not on memory."""
    length, ranks = 1 << 20, 1024
    cumulative = [*range(0, length, length // 500 + 1), length]
    tracemalloc.start()
    started = time.process_time()
    mask = Mask.documents(cumulative)
    where = make_layout("zigzag", length, ranks)
    tiles = [find_tiles(mask, where.shards[5], where.shards[owner]) for owner in range(ranks)]
    seconds = time.process_time() - started
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(t.area for t in tiles) > 0
    assert peak < 4 << 20
    assert seconds < 10
