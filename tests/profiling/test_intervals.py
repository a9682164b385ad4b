"""Test interval arithmetic and the partition against a grid of nanoseconds."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from burst_portable.profiling.intervals import FIELDS, Timeline, intersect, measure, subtract, total, union

GRID = 60
spans = st.lists(st.tuples(st.integers(0, GRID), st.integers(0, GRID)).map(sorted).map(tuple), max_size=8)


def array(pairs):
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def covered(pairs) -> np.ndarray:
    """Return for each nanosecond whether a span contains it."""
    grid = np.zeros(GRID, dtype=bool)
    for start, stop in pairs:
        grid[start:stop] = True
    return grid


def is_a_set(a) -> bool:
    return bool((a[:, 0] < a[:, 1]).all() and (a[1:, 0] > a[:-1, 1]).all())


@given(spans, spans)
def test_set_operations_equal_grid(a, b):
    mine, other = union(array(a)), union(array(b))
    assert is_a_set(mine)
    assert (covered(mine.tolist()) == covered(a)).all()
    assert (covered(intersect(mine, other).tolist()) == (covered(a) & covered(b))).all()
    assert (covered(subtract(mine, other).tolist()) == (covered(a) & ~covered(b))).all()
    assert total(subtract(mine, other)) == (covered(a) & ~covered(b)).sum()


@given(spans, spans)
def test_within_equals_grid(a, windows):
    expected = [covered(a)[start:stop].sum() for start, stop in windows]
    assert measure(union(array(a)), array(windows)).tolist() == expected


@given(spans, spans, spans, spans)
def test_partition_equals_grid(compute, waits, transfers, copies):
    timeline = Timeline.of(array(compute), array(waits + transfers), array(copies), array(waits))
    found = timeline.partition()
    c, w, t, m = (covered(x) for x in (compute, waits, transfers, copies))
    comm = w | t
    busy = np.flatnonzero(c | comm | m)
    span = int(busy[-1] - busy[0] + 1) if len(busy) else 0
    assert found == {
        "span": span,
        "compute": c.sum(),
        "exposed_comm": (comm & ~c).sum(),
        "exposed_copy": (m & ~c & ~comm).sum(),
        "idle": span - len(busy),
        "comm": comm.sum(),
        "overlap": (c & comm).sum(),
        "blocking": (w & ~c).sum(),
    }
    assert set(found) == set(FIELDS)
    assert found["span"] == found["compute"] + found["exposed_comm"] + found["exposed_copy"] + found["idle"]


@given(spans, spans, st.lists(st.integers(0, GRID), min_size=2, max_size=6, unique=True).map(sorted))
def test_measured_pieces_add_up(compute, comm, cuts):
    timeline = Timeline.of(array(compute), array(comm))
    pieces = timeline.measure(array(list(pairwise(cuts))))
    whole = timeline.measure(array([(cuts[0], cuts[-1])]))
    assert {name: values.sum() for name, values in pieces.items()} == {n: v[0] for n, v in whole.items()}


def test_union_of_a_million_intervals_is_fast():
    starts = np.sort(np.random.default_rng(0).integers(0, 10**9, 1_000_000))  # nearly in order, as recorded
    many = np.stack((starts, starts + np.random.default_rng(1).integers(1, 2000, len(starts))), axis=1)
    seconds = []  # CPU seconds of this process, because other processes share the machine
    for _ in range(5):
        began = time.process_time()
        union(many)
        seconds.append(time.process_time() - began)
    assert min(seconds) < 0.1
