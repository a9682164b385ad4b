"""Test block-sparse masks: against matrices made from the definition, their regions, attention, and errors."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import dense_mask
from burst_portable.errors import InputError, MaskError
from burst_portable.mask import Mask
from tests.support.attention_cases import check_on_threads

KINDS = {
    f"{'causal_' * causal}{'variable_' * variable}block_sparse": {"causal": causal, "variable": variable}
    for causal in (False, True)
    for variable in (False, True)
}


def matrix(length, block_size, percent, seed=0, *, causal=False, variable=False):
    """Return the visible pairs, token by token: a block is visible if fewer than `count` blocks have higher scores."""
    draw, block_of = random.Random(seed), [token // block_size for token in range(length)]
    if variable:
        blocks, least = max(1, length // block_size), max(1, block_size // 4)
        cuts = sorted(int(draw.random() * (length - blocks * least + 1)) for _ in range(blocks - 1))
        starts = [cut + least * (i + 1) for i, cut in enumerate(cuts)]
        block_of = [sum(start <= token for start in starts) for token in range(length)]
    blocks = block_of[-1] + 1
    visible = torch.zeros(blocks, blocks, dtype=torch.bool)
    for own in range(blocks):
        score = [draw.random() for _ in range(own + 1 if causal else blocks)]
        score[own] = 2.0
        for other in range(len(score)):
            visible[own, other] = sum(one > score[other] for one in score) < max(1, len(score) * percent // 100)
    seen = visible[block_of][:, block_of]
    return seen.tril() if causal else seen


@given(
    st.integers(1, 60), st.integers(1, 70), st.integers(1, 100), st.integers(0, 1 << 40), st.sampled_from(list(KINDS))
)
def test_block_sparse_equals_its_definition(length, block_size, percent, seed, kind):
    mask = Mask.block_sparse(length, block_size, percent, seed, **KINDS[kind])
    seen = dense_mask(mask, length)
    assert torch.equal(seen, matrix(length, block_size, percent, seed, **KINDS[kind]))
    assert mask.num_pairs(length) == int(seen.sum())
    assert mask.fully_masked_tokens(length) == 0
    assert Mask.parse(f"{kind}:{block_size}:{percent}:{seed}", length) == mask
    if not seed:
        assert Mask.parse(f"{kind}:{block_size}:{percent}", length) == mask


def faults(mask, length, block_size, percent, *, causal=False):
    """Return which statements of the docstring are false for a mask of equal blocks. It has no random numbers."""
    seen = dense_mask(mask, length)
    starts = range(0, length, block_size)
    found = set()
    for own, q in enumerate(starts):
        rows = seen[q : q + block_size]
        whole = [bool(rows[-1, k : k + block_size].all()) for k in starts]
        allowed = own + 1 if causal else len(starts)
        if not whole[own]:
            found.add("own")
        if sum(whole) != max(1, allowed * percent // 100):
            found.add("count")
        expected = torch.tensor(whole).repeat_interleave(block_size)[:length].expand_as(rows)
        if not torch.equal(rows, expected.tril(q) if causal else expected):
            found.add("shape")
        here = sorted((r for r in mask.regions if r.q_start == q), key=lambda r: r.k_start)
        if any(a.k_stop == b.k_start for a, b in pairwise(here)):
            found.add("not merged")
    return found


SIZES = {"length": 100, "block_size": 8, "percent": 40}


@pytest.mark.parametrize("causal", [False, True])
def test_block_sparse_has_own_block_and_equal_counts(causal):
    for seed in range(20):
        mask = Mask.block_sparse(**SIZES, seed=seed, causal=causal)
        assert not faults(mask, **SIZES, causal=causal)
        assert len(mask.regions) < sum(max(1, n * 40 // 100) for n in (range(1, 14) if causal else [13] * 13))


def in_halves(mask):
    return Mask([replace(r, k_start=k, k_stop=k + 4) for r in mask.regions for k in range(r.k_start, r.k_stop, 4)])


@pytest.mark.parametrize(
    ("causal", "plant", "fault"),
    [
        (False, lambda m: Mask(m.regions[:-1]), "count"),
        (False, lambda m: Mask([replace(m.regions[0], k_stop=m.regions[0].k_stop - 1), *m.regions[1:]]), "shape"),
        (True, lambda m: Mask([replace(r, lo=-(1 << 60)) for r in m.regions]), "shape"),
        (False, lambda m: Mask([r for r in m.regions if not r.k_start <= r.q_start < r.k_stop]), "own"),
        (False, in_halves, "not merged"),
    ],
)  # fmt: skip
def test_faults_of_planted_masks_are_found(causal, plant, fault):
    mask = Mask.block_sparse(**SIZES, seed=3, causal=causal)
    assert fault in faults(plant(mask), **SIZES, causal=causal)


@given(st.integers(1, 4000), st.integers(1, 400), st.integers(0, 99))
def test_variable_blocks_are_at_least_a_quarter_of_their_size(length, block_size, seed):
    """With one percent, every block sees only itself, so the regions are the blocks."""
    count = max(1, length // block_size)
    if count < 200:
        mask = Mask.block_sparse(length, block_size, 1, seed, variable=True)
        sizes = [r.q_stop - r.q_start for r in mask.regions]
        assert len(sizes) == count
        assert all((r.q_start, r.q_stop) == (r.k_start, r.k_stop) for r in mask.regions)
        assert sum(sizes) == length
        assert count == 1 or min(sizes) >= max(1, block_size // 4)


FROZEN = [
    (0, 5, 0, 5, True),
    (5, 11, 5, 11, True),
    (11, 21, 5, 21, True),
    (21, 34, 5, 34, True),
    (34, 41, 5, 21, False),
    (34, 41, 34, 41, True),
    (41, 60, 0, 5, False),
    (41, 60, 11, 34, False),
    (41, 60, 41, 60, True),
]


def test_block_sparse_depends_on_its_seed_only():
    """A frozen mask: other numbers on a rank with another version of Python would compute another attention."""
    for kind in KINDS.values():
        made = [Mask.block_sparse(4096, 128, 20, seed, **kind) for seed in (0, 0, 1)]
        assert made[0] == made[1] != made[2]
    state = random.getstate()
    frozen = Mask.block_sparse(60, 10, 75, 7, causal=True, variable=True)
    assert random.getstate() == state
    assert [(r.q_start, r.q_stop, r.k_start, r.k_stop, r.lo == 0) for r in frozen.regions] == FROZEN


@dataclass(frozen=True)
class Sparse(Case):
    """A case with a block-sparse mask in its short form."""

    def make_mask(self):
        return Mask.parse(self.mask, self.length)


RAGGED = Sparse(mask="causal_block_sparse:9:40:1", length=107, ranks=4, batch=1)
CASES = [
    replace(RAGGED, strategy="ring"),
    replace(RAGGED, mask="variable_block_sparse:11:30", strategy="dispatch", layout="dispatched", dtype=torch.bfloat16),
    replace(RAGGED, mask="block_sparse:16:30:2", strategy="burst", ranks=3, heads="wide_values", batch=2),
    replace(RAGGED, mask="causal_variable_block_sparse:9:50", strategy="all_gather", heads="mqa", sinks=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_of_block_sparse_masks_matches_oracle(case):
    check_on_threads(case, peers=False)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"percent": 101}, "percent of a mask is out of range; got 101; allowed: an int from 1 to 100"),
        ({"percent": 0}, "percent of a mask is out of range; got 0"),
        ({"percent": 12.5}, "percent of a mask is out of range; got 12.5"),
        ({"block_size": 0}, "block_size of a mask is out of range; got 0"),
        ({"seed": -1}, "seed of a mask is out of range; got -1"),  # Python's generator takes it for 1
        ({"causal": 1}, "causal must be a bool; got 1"),
        ({"variable": None}, "variable must be a bool; got None"),
        ({"length": 0}, "length is not a size"),
        (
            {"length": 10251, "block_size": 10},
            "got 1,026 blocks of 10; allowed: 1,024; use blocks of 11 tokens",
        ),
        ({"length": 10250, "block_size": 10, "variable": True}, "got 1,025 blocks of 10; allowed: 1,024"),
    ],
    ids=str,
)
def test_block_sparse_rejects_values(values, message):
    with pytest.raises(InputError) as error:
        Mask.block_sparse(**SIZES | values)
    assert message in str(error.value)


def test_block_sparse_takes_most_blocks():
    assert len(Mask.block_sparse(10240, 10, 1, variable=True).regions) >= 1024
    with pytest.raises(MaskError, match="too many blocks"):
        Mask.block_sparse(10241, 10, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rest", ["", ":8", ":8:20:1:2", ":8:20%", ":8:0.2"])
def test_short_form_of_block_sparse_rejects_other_numbers(kind, rest):
    with pytest.raises(MaskError) as error:
        Mask.parse(kind + rest, 64)
    assert f"cannot be read; allowed: {kind}:SIZE:PERCENT[:SEED]" in str(error.value)
    with pytest.raises(MaskError, match="needs the length of the sequence"):
        Mask.parse(f"{kind}:8:20")
