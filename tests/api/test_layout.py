"""Test layouts: each position is on one rank, work is balanced, and invalid layouts raise."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_portable.errors import LayoutError
from burst_portable.layout import OF_DOCUMENTS, Layout, Segment, make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.tiles import find_tiles
from burst_portable.strategies.ring import RingStrategy


@given(st.integers(1, 200), st.integers(1, 16), st.sampled_from(["contiguous", "zigzag", "striped"]))
def test_make_layout_covers_each_position_once(length, ranks, name):
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
def test_whole_documents_layout_covers_each_position_once(lengths, ranks):
    """Split documents have two chunks per rank and perhaps a rest; all others are on one rank."""
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


@given(lengths, st.integers(1, 9), st.booleans())
def test_dispatched_layout_gives_ranks_equally_many_tokens(lengths, ranks, causal):
    """Numbers of tokens differ by at most one, and each position is on one rank."""
    ends = [0, *accumulate(lengths)]
    if ends[-1] < ranks:
        return
    where = make_layout("dispatched", ends[-1], ranks, Mask.documents(ends, causal=causal))
    assert sorted(p for r in range(ranks) for p in where.positions(r)) == list(range(ends[-1]))
    counts = [where.count(r) for r in range(ranks)]
    assert max(counts) - min(counts) <= 1


def test_dispatched_layout_of_masks_with_one_pattern():
    """Without any visible pair, and with one rank; without a mask, the error names the argument."""
    assert make_layout("dispatched", 64, 1, Mask.causal()).shards == ((Segment(0, 64),),)
    hidden = Mask((), "hidden")
    assert [make_layout("dispatched", 64, 4, hidden).count(rank) for rank in range(4)] == [16] * 4
    with pytest.raises(LayoutError, match="needs the mask; got none; pass mask="):
        make_layout("dispatched", 64, 4)


@pytest.mark.parametrize(("length", "least"), [(16384, 128), (16399, 128), (2048, 64)])
def test_dispatched_layout_has_few_short_chunks(length, least):
    mask = Mask.documents((0, 500, 900, length))
    for shard in make_layout("dispatched", length, 4, mask).shards:
        assert min(s.count for s in shard) >= least


def test_dispatched_layout_searches_less_for_many_ranks():
    """With 512 ranks, chunks are dealt by their pairs alone. It takes about a second."""
    where = make_layout("dispatched", 1 << 18, 512, Mask.documents(range(0, (1 << 18) + 1, 1 << 12)))
    assert {where.count(rank) for rank in range(512)} == {512}


def _shared(segment, start, stop):
    return max(0, min(stop, segment.start + segment.count) - max(start, segment.start))


@pytest.mark.parametrize(("ranks", "seed"), [(2, 0), (4, 0), (8, 1)])
def test_whole_documents_layout_is_balanced_and_sends_little(ranks, seed):
    """Lengths as of web text: pairs and rows within 3 %, and fewer bytes than document_zigzag."""
    chance, ends = random.Random(seed), [0]
    while ends[-1] < 131072:
        ends.append(min(131072, ends[-1] + max(16, int(chance.lognormvariate(6.2, 1.4)))))
    mask = Mask.documents(ends)
    sent = {}
    for name in OF_DOCUMENTS:
        where = make_layout(name, ends[-1], ranks, mask)
        problem = AttentionCall(mask, where, 32, 8, 128, 128)
        plan = RingStrategy(transfer="direct").plan(problem)
        sent[name] = plan_cost(plan, HardwareSpec(600.0, 300.0)).sent
        pairs = [sum(s.compute.tiles.num_pairs for s in plan.forward.steps_of(r) if s.compute) for r in range(ranks)]
        assert sum(pairs) == mask.num_pairs(ends[-1])
        for held in (pairs, [where.count(rank) for rank in range(ranks)]):
            assert max(held) * ranks < 1.03 * sum(held)
    assert sent["whole_documents"] < 0.5 * sent["document_zigzag"]
    cut = [stop - start for start, stop in pairwise(ends) if not _on_one_rank(where, start, stop)]
    for shard in where.shards:
        assert sum(s.count % 128 == 0 for s in shard[: len(cut)]) == len(cut)


@pytest.mark.parametrize("mask", [Mask.full(), Mask.causal(), Mask.window(7), Mask.window(3, 5)], ids=str)
def test_masks_of_one_region_are_one_document(mask):
    for length, ranks in ((128, 4), (53, 3), (7, 2)):
        split = make_layout("document_zigzag", length, ranks, mask)
        assert split.shards == make_layout("zigzag", length, ranks).shards
        whole = make_layout("whole_documents", length, ranks, mask)
        assert sorted(p for rank in range(ranks) for p in whole.positions(rank)) == list(range(length))


@pytest.mark.parametrize(("rows", "most"), [(8192, 1.03), (4096, 1.05), (1024, 1.18)])
def test_whole_documents_layout_balances_one_long_document(rows, most):
    """Blocks stay whole, which matters more if a rank has few of them."""
    for length in range(4 * rows, 8 * rows, 4 * rows // 199):
        where = make_layout("whole_documents", length, 4, Mask.documents((0, length)))
        pairs = [sum(s.count * (s.start + s.last + 2) // 2 for s in shard) for shard in where.shards]
        assert sum(pairs) == length * (length + 1) // 2
        assert max(pairs) * 4 < most * sum(pairs)
        assert max(map(where.count, range(4))) * 4 < most * length


def _on_one_rank(where, start, stop):
    return any(_shared(s, start, stop) == stop - start for shard in where.shards for s in shard)


@st.composite
def partitions(draw, start=0, count=24, step=1):
    """Draw segments that partition a progression. Each cut makes two halves, or separates every second element."""
    if count < 2 or draw(st.integers(0, 3)) == 0:
        return [Segment(start, count, step)]
    if draw(st.booleans()):
        cut = draw(st.integers(1, count - 1))
        halves = (start, cut, step), (start + cut * step, count - cut, step)
    else:
        halves = (start, -(-count // 2), 2 * step), (start + step, count // 2, 2 * step)
    return [s for half in halves for s in draw(partitions(*half))]


@given(st.data())
def test_layout_rejects_segments_that_do_not_partition(data):
    """Segments that miss, repeat or add a position raise `LayoutError`."""
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


def test_segment_accepts_integers_only():
    assert Segment(np.int64(2), torch.tensor(3)) == Segment(2, 3)
    assert type(Segment(np.int64(2), 3).start) is int
    for name, wrong in (("start", (1.0, 3)), ("count", (1, "3")), ("step", (1, 3, True))):
        with pytest.raises(LayoutError, match=f"{name} of a segment must be an int"):
            Segment(*wrong)
    for wrong in ((-1, 3), (1, -3), (1, 3, 0)):
        with pytest.raises(LayoutError, match="segment"):
            Segment(*wrong)


@given(*[st.builds(Segment, st.integers(0, 30), st.integers(1, 9), st.integers(1, 9))] * 2)
def test_segments_meet_if_they_share_a_position(a, b):
    assert a.meets(b) == bool(set(a.positions()) & set(b.positions()))


@pytest.mark.parametrize(
    ("length", "shards", "message"),
    [
        (8, [[Segment(0, 4)]], "4 of 8"),
        (8, [[Segment(0, 8)], [Segment(0, 8)]], "a position twice"),
        (8, [[Segment(0, 4)], [Segment(4, 5)]], "position 8; allowed: 0 to 7"),
        (8, [[Segment(0, 8)], []], r"without a token; got ranks \[1\]"),
        (8, [[(0, 8)]], "needs segments"),
        (8, [Segment(0, 8)], "a list of segments for every rank"),
        (8.0, [[Segment(0, 8)]], "ranks and tokens"),
        (8, [], "ranks and tokens"),
    ],
)
def test_layout_rejects_invalid_shards(length, shards, message):
    with pytest.raises(LayoutError, match=message):
        Layout("mine", length, shards)


def test_layout_rejects_too_many_ranks():
    """The error is raised before any segment is listed."""
    with pytest.raises(LayoutError, match="too many ranks; got 1073741824; allowed: at most 16384"):
        make_layout("zigzag", 1 << 40, 1 << 30)
    with pytest.raises(LayoutError, match="too many ranks"):
        Layout("mine", 16385, [[Segment(i, 1)] for i in range(16385)])


@pytest.mark.parametrize("numbers", [(0, 4, 0), (0, 4, -1), (-1, 4), (0, -1), (0, 4.0), (0, True)])
def test_segment_rejects_invalid_numbers(numbers):
    with pytest.raises(LayoutError, match="segment"):
        Segment(*numbers)


def test_make_layout_zigzag_positions():
    where = make_layout("zigzag", 16, 2)
    assert where.positions(0) == [0, 1, 2, 3, 12, 13, 14, 15]
    assert where.positions(1) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert where.shards[1] == (Segment(4, 8),)  # adjacent segments are joined


@pytest.mark.parametrize(
    ("name", "least", "most"), [("contiguous", 1.8, 2.0), ("zigzag", 1.0, 1.001), ("striped", 1.0, 1.002)]
)
def test_make_layout_balances_causal_work(name, least, most):
    where = make_layout(name, 4096, 8)
    work = [sum(find_tiles(Mask.causal(), q, k).num_pairs for k in where.shards) for q in where.shards]
    assert sum(work) == 4096 * 4097 // 2
    assert least <= max(work) * 8 / sum(work) <= most
