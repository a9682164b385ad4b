"""Test masks against matrices: their visible pairs and overlaps, and the errors of invalid masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_portable.conformance.oracle import dense_mask
from burst_portable.errors import MaskError, UnknownNameError
from burst_portable.mask import UNBOUNDED, Mask, Region, band_area

sizes = st.integers(1, 9)
bounds = st.integers(-12, 14)


@given(sizes, sizes, bounds, bounds)
def test_band_area_counts_pairs(rows, columns, lo, hi):
    counted = sum(lo <= i - j <= hi for i in range(rows) for j in range(columns))
    assert band_area(rows, columns, lo, hi) == counted


def document(position: int) -> int:
    """Return the document index of a position. Three documents end at 5, 6 and 19; later positions are padding."""
    return sum(position >= end for end in (5, 6, 19))


@pytest.mark.parametrize(
    ("text", "mask", "sees"),
    [
        ("full", Mask.full(), lambda q, k: True),
        ("causal", Mask.causal(), lambda q, k: k <= q),
        ("window:4", Mask.window(4), lambda q, k: q - 4 <= k <= q),
        ("window:4:2", Mask.window(4, 2), lambda q, k: q - 4 <= k <= q + 2),
        ("documents:0,5,6,19", Mask.documents((0, 5, 6, 19)), lambda q, k: document(q) == document(k) < 3 and k <= q),
        (
            "full_documents:0,5,6,19",
            Mask.documents((0, 5, 6, 19), causal=False),
            lambda q, k: document(q) == document(k) < 3,
        ),
        (
            None,
            Mask.documents((0, 5, 6, 19), window=2),
            lambda q, k: document(q) == document(k) < 3 and q - 2 <= k <= q,
        ),
        (
            None,
            Mask.documents((0, 5, 6, 19), causal=False, window=2),
            lambda q, k: document(q) == document(k) < 3 and q - 2 <= k <= q + 2,
        ),
        ("prefix:5", Mask.prefix_lm(5), lambda q, k: k < 5 or k <= q),
        ("sink:3:4", Mask.sink_window(3, 4), lambda q, k: k <= q and (k < 3 or q - 4 <= k)),
        ("global:3:4:2", Mask.global_window(3, 4, 2), lambda q, k: q < 3 or k < 3 or q - 4 <= k <= q + 2),
        ("block_causal:7", Mask.block_causal((0, 7, 14, 21, 24)), lambda q, k: k // 7 <= q // 7),
        (
            "share_question:5,1,13",
            Mask.share_question((5, 1, 13)),
            lambda q, k: max(q, k) < 19 and k <= q and (k < 5 or document(q) == document(k)),
        ),
    ],
    ids=lambda x: "sees" if callable(x) else str(x),
)
def test_mask_constructors_and_short_forms_equal_definitions(text, mask, sees):
    """Each constructor and its short form, compared position by position."""
    expected = torch.tensor([[sees(q, k) for k in range(24)] for q in range(24)])
    assert torch.equal(dense_mask(mask, 24), expected)
    if text is not None:
        assert Mask.parse(text, 24) == mask


regions = st.builds(
    lambda q, rows, k, columns, lo, width: Region(q, q + rows, k, k + columns, lo, lo + width),
    st.integers(0, 12), st.integers(1, 10), st.integers(0, 12), st.integers(1, 10), bounds, st.integers(0, 15),
)  # fmt: skip


@given(regions, regions)
def test_region_overlaps_equals_dense_overlap(a, b):
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
def test_mask_rejects_overlapping_regions(many):
    overlapping = any(a.overlaps(b) for i, a in enumerate(many) for b in many[:i])
    if overlapping:
        with pytest.raises(MaskError):
            Mask(tuple(many))
    else:
        assert int(sum(dense_mask(Mask((r,)), 24).sum() for r in many)) == Mask(tuple(many)).num_pairs(24)


@given(st.lists(regions, max_size=4), st.integers(1, 24), st.integers(1, 24))
def test_mask_counts_pairs_and_fully_masked_tokens(many, length, keys):
    """The sequence may end before a region ends, or before it begins."""
    try:
        mask = Mask(tuple(many))
    except MaskError:
        return
    seen = dense_mask(mask, 24)[:length]
    assert mask.num_pairs(length, keys) == int(seen[:, :keys].sum())
    assert mask.fully_masked_tokens(length) == int((~seen[:, :length].any(1)).sum())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("causl", "did you mean 'causal'"),
        ("window", r"window:LEFT"),
        ("window:-1", "out of range"),
        ("window:x", "cannot be read"),
        ("window:1_0:0", "cannot be read"),
        ("window:\u0661:0", "cannot be read"),
        ("documents:0,5,3", "strictly increasing"),
        ("documents:1,5", r"allowed: 0, .*if these are lengths, pass \[0, 1, 6\]$"),
        ("documents:0,5,5", r"remove empty documents: cu_seqlens\.unique_consecutive\(\)$"),
        ("documents:0", "strictly increasing ends$"),
        ("prefix:0", "out of range"),
        ("share_question:5", "an answer"),
        ("block_causal:0", "out of range"),
        ("block_causal", "block_causal:SIZE"),
        ("documents:", "cumulative lengths"),
    ],
)
def test_mask_parse_rejects_invalid_text(text, message):
    with pytest.raises((MaskError, UnknownNameError), match=message):
        Mask.parse(text, 64)


def test_mask_parse_needs_length_for_block_causal_only():
    assert Mask.parse("window:4") == Mask.window(4)
    with pytest.raises(MaskError, match="needs the length"):
        Mask.parse("block_causal:4")


@pytest.mark.parametrize(
    "bounds",
    [
        torch.tensor([0, 4, 9], dtype=torch.int32),
        np.array([0, 4, 9]),
        [np.int64(0), torch.tensor(4), 9],
        range(0, 10, 9),
    ],
)
def test_mask_documents_accepts_many_types(bounds):
    expected = Mask.documents([int(b) for b in bounds])
    assert Mask.documents(bounds) == expected
    assert all(type(r.q_stop) is int for r in Mask.documents(bounds).regions)


@pytest.mark.parametrize(
    "bounds",
    [[0, 4.7, 9], [0.0, 9.0], ["0", "9"], "09", [False, 9], torch.tensor([0.0, 9.0]), torch.tensor([[0, 9]]), 9, None],
)
def test_mask_constructors_reject_fractions(bounds):
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
        (lambda: Mask(5), "needs regions"),
        (lambda: Mask(["causal"]), "needs regions"),
        (lambda: Mask((), name=3), "name of a mask"),
        (lambda: Region(0, 4.0, 0, 4), "q_stop of a region"),
        (lambda: Region(0, 4, False, 4), "k_start of a region"),
    ],
)
def test_mask_rejects_wrong_types(make, message):
    with pytest.raises(MaskError, match=message):
        make()


@pytest.mark.parametrize(
    "numbers", [(-1, 4, 0, 4), (4, 4, 0, 4), (0, 4, -1, 4), (0, 4, 4, 4), (0, 4, 0, 4, 1, 0)], ids=str
)
def test_region_rejects_empty_or_negative_boxes(numbers):
    with pytest.raises(MaskError, match="empty or starts before 0"):
        Region(*numbers)


def test_mask_accepts_numpy_and_tensor_sizes():
    assert Mask.window(np.int64(3), torch.tensor(1)) == Mask.window(3, 1)
    assert Mask(r for r in (Region(np.int32(0), 4, 0, 4),)) == Mask((Region(0, 4, 0, 4),))


def test_check_lengths_rejects_mask_longer_than_sequence():
    with pytest.raises(MaskError, match="longer than the sequence"):
        Mask.documents((0, 8, 65)).check_lengths(64, 64)
    Mask.documents((0, 8, 64)).check_lengths(64, 64)
    Mask((Region(0, UNBOUNDED, 0, 8),)).check_lengths(64, 64)


def test_equal_masks_have_equal_hashes():
    assert Mask.causal() == Mask.causal()
    assert hash(Mask.documents((0, 4, 9))) == hash(Mask.documents((0, 4, 9)))
    assert Mask.documents((0, 4, 9)) == Mask.documents([0, 4, 9])
    assert Mask.documents((0, 4, 9)) != Mask.documents((0, 5, 9))


@pytest.mark.parametrize(
    "mask",
    [
        Mask.full(),
        Mask.causal(),
        Mask.window(3, 2),
        Mask.prefix_lm(4),
        Mask.sink_window(2, 5),
        Mask.global_window(2, 3, 1),
    ],
    ids=str,
)
def test_mask_text_parses_to_equal_mask(mask: Mask):
    assert mask.text == mask.name
    assert Mask.parse(mask.text) == mask
    assert Mask.parse(mask.text).text == mask.text


@pytest.mark.parametrize(
    "mask",
    [
        Mask(Mask.full().regions, "causal"),
        Mask.documents([0, 3, 9]),
        Mask.share_question([3, 2, 2]),
        Mask.block_causal([0, 4, 8]),
        Mask.parse("documents:0,3,9"),
    ],
    ids=str,
)
def test_mask_without_short_form_has_no_text(mask: Mask):
    """Names are arbitrary, and those of masks that list positions only count them."""
    assert mask.text == ""
