"""The kernels of the cpu backend, tile list by tile list: state, gradients, conventions, conversions."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import burst_portable as bp
from burst_portable import numerics
from burst_portable.backends.cpu.attention import CpuFlashKernel, lower
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import LENGTH, MASKS
from burst_portable.conformance.oracle import judge
from burst_portable.errors import DtypeError, InputError, ShapeError, UnsupportedError
from burst_portable.kernels.base import KernelProblem, Options
from burst_portable.kernels.operator_kernel import causal_window, triangles
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.layout import make_layout
from burst_portable.planning.tiles import Tile, Tiles, banded_box, find_tiles

KERNELS = [ReferenceKernel(), CpuFlashKernel()]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def inputs(dtype, heads=6, kv_heads=2, d=8, dv=8, rows=LENGTH):
    shapes = [(2, rows, heads, d), (2, rows, kv_heads, d), (2, rows, kv_heads, dv), (2, rows, heads, dv)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def run(kernel, q, k, v, dout, parts, options, with_out=False):
    """All parts (k range, tiles), merged in the kernel's state, then their gradients."""
    state = None
    for columns, tiles in parts:
        state = kernel.attend(q, k[:, columns], v[:, columns], tiles, options, state=state)
    out, lse = numerics.finished(state, q.dtype)
    into = tuple(torch.zeros(x.shape, dtype=numerics.accumulation_dtype(x.dtype)) for x in (q, k, v))
    delta = numerics.row_delta(dout, out)
    for columns, tiles in parts:
        given = {"out": out} if with_out else {"delta": delta}
        block = (into[0], into[1][:, columns], into[2][:, columns])
        kernel.attend_backward(dout, q, k[:, columns], v[:, columns], lse, tiles, options, **given, into=block)
    return oracle.Answer(out, lse, *into)


def expected(q, k, v, dout, mask, dtype, **options):
    seen = oracle.dense_mask(mask, LENGTH)
    return [oracle.attention(q, k, v, dout, seen, **options, dtype=t) for t in (torch.float64, dtype)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_mask_whole_and_in_pieces(kernel, name, pieces):
    """Pieces of the keys, one attend each: the running state merges them."""
    q, k, v, dout = inputs(torch.float32)
    shards = make_layout("contiguous", LENGTH, pieces).shards
    whole = make_layout("contiguous", LENGTH, 1).shards[0]
    parts = [(slice(s.start, s.last + 1), find_tiles(MASKS[name], whole, (s,))) for shard in shards for s in shard]
    answer = run(kernel, q, k, v, dout, parts, Options(0.3), with_out=pieces == 1)
    exact, plain = expected(q, k, v, dout, MASKS[name], torch.float32, scale=0.3)
    assert judge(answer, exact, plain, torch.float32) == {}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(kernel, dtype):
    q, k, v, dout = inputs(dtype)
    tiles = find_tiles(MASKS["sink_window"], *[make_layout("contiguous", LENGTH, 1).shards[0]] * 2)
    answer = run(kernel, q, k, v, dout, [(slice(None), tiles)], Options(0.3))
    exact, plain = expected(q, k, v, dout, MASKS["sink_window"], dtype, scale=0.3)
    assert judge(answer, exact, plain, dtype) == {}


def test_the_reference_takes_value_sizes_and_softcap():
    q, k, v, dout = inputs(torch.float32, dv=5)
    tiles = Tiles([Tile(0, LENGTH, 0, LENGTH, 0, LENGTH - 1)])
    answer = run(ReferenceKernel(), q, k, v, dout, [(slice(None), tiles)], Options(0.7, softcap=2.0))
    exact, plain = expected(q, k, v, dout, MASKS["causal"], torch.float32, scale=0.7, softcap=2.0)
    assert judge(answer, exact, plain, torch.float32) == {}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
def test_what_lies_outside_every_tile_is_neither_read_nor_written(kernel):
    """NaN in rows and columns that no tile names must not spread; their results stay as they were."""
    q, k, v, dout = inputs(torch.float32)
    for x in (q, k, v, dout):
        x[:, :10] = torch.nan
        x[:, 40:] = torch.nan
    tiles = Tiles([Tile(10, 40, 10, 40, 0, 29)])
    state = kernel.attend(q, k, v, tiles, Options(0.3))
    assert bool((state[0][:, :10] == 0).all())
    assert bool((state[1][:, :, 40:] == -torch.inf).all())
    assert bool(state[0][:, 10:40].isfinite().all())
    into = tuple(torch.full(x.shape, 7.0) for x in (q, k, v))
    lse = state[1].float()
    kernel.attend_backward(dout, q, k, v, lse, tiles, Options(0.3), delta=torch.zeros_like(lse), into=into)
    for gradient in into:
        assert bool((gradient[:, :10] == 7).all())
        assert bool((gradient[:, 40:] == 7).all())
        assert bool(gradient.isfinite().all())
        assert bool((gradient[:, 10:40] != 7).any())


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("columns", [1, 7, 15, 16, 33])
def test_nan_shows_however_few_the_columns(kernel, columns):
    """torch's CPU operator takes a row of fewer than 16 scores that are NaN for one that sees nothing."""
    q, k, v, _ = inputs(torch.float32, rows=40)
    q[0, 3, 1, 0] = torch.nan
    k, v = (x[:, :columns] for x in (k, v))
    out, lse = bp.partial_attention(q, k, v, [Tile(0, 40, 0, columns, -columns, 40)], kernel=kernel.name)
    wrong = torch.zeros(lse.shape, dtype=torch.bool)
    wrong[0, 1, 3] = True
    assert torch.equal(lse.isnan(), wrong)
    assert torch.equal(out.isnan().all(-1), wrong.transpose(1, 2))
    assert torch.equal(out.isnan().any(-1), wrong.transpose(1, 2))


@pytest.mark.parametrize("name", MASKS)
def test_lowering_covers_every_cell_once(name):
    """The calls of torch's operator hold exactly the cells of the tile, with no row left empty."""
    whole = make_layout("contiguous", LENGTH, 1).shards[0]
    covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    for tile in find_tiles(MASKS[name], whole, whole):
        for piece in lower(tile):
            box = torch.ones(piece.rows.stop - piece.rows.start, piece.columns.stop - piece.columns.start).long()
            if piece.causal:
                box = box.tril()
            if (mask := piece.mask(torch.float32)) is not None:
                box = (mask == 0).long()
            assert bool(box.any(1).all())
            covered[piece.rows, piece.columns] += box
    assert torch.equal(covered, oracle.dense_mask(MASKS[name], LENGTH).long())


def boxes(length):
    """Tiles of every kind: whole masks, striped ones, and small bands across small boxes."""
    for mask in MASKS.values():
        for layout, ranks in (("contiguous", 1), ("striped", 3)):
            shards = make_layout(layout, length, ranks, mask).shards
            yield from (tile for a in shards for b in shards for tile in find_tiles(mask, a, b))
    for rows, columns, lo, width in itertools.product((1, 2, 5), (1, 3, 6), range(-6, 5), range(7)):
        if tile := banded_box(3, 3 + rows, 2, 2 + columns, 1 + lo, 1 + lo + width):
            yield tile


NO_CAUSAL_WINDOW = {
    "causal": [Tile(0, 9, 0, 9, 0, 8)],
    "causal, with another bound": [Tile(0, 9, 0, 9, 0, 100)],
    "a box": [Tile(0, 9, 0, 9, -8, 8)],
    "a window of both sides": [Tile(0, 9, 0, 9, -1, 3)],
    "a window that begins before its row": [Tile(0, 9, 0, 9, 1, 3)],
    "only some rows": [Tile(1, 9, 0, 9, 0, 3)],
    "only some columns": [Tile(0, 9, 0, 8, 0, 3)],
    "a window of fewer rows": [Tile(0, 8, 0, 8, 0, 3)],
    "two documents": [Tile(0, 4, 0, 4, 0, 2), Tile(4, 9, 4, 9, 0, 2)],
    "a window and sinks": [Tile(0, 9, 0, 9, 0, 3), Tile(4, 9, 0, 2, 4, 8)],
    "nothing": [],
}


def test_causal_windows_are_recognized():
    (whole,) = make_layout("contiguous", 9, 1).shards
    for left in range(8):
        assert causal_window(find_tiles(bp.Mask.window(left), whole, whole), 9, 9) == left
    assert causal_window([Tile(0, 1, 0, 1, 0, 0)], 1, 1) is None


@pytest.mark.parametrize("case", NO_CAUSAL_WINDOW)
def test_what_is_no_causal_window(case):
    assert causal_window(NO_CAUSAL_WINDOW[case], 9, 9) is None


@pytest.mark.parametrize(("rows", "columns"), [(9, 10), (10, 9), (10, 10)])
def test_a_causal_window_over_a_part_is_none(rows, columns):
    assert causal_window([Tile(0, 9, 0, 9, 0, 3)], rows, columns) is None


def test_triangles_cover_every_cell_once():
    """Boxes and causal squares alone, no empty row; a reversed one is the mirror image."""
    kinds = set()
    for tile in boxes(LENGTH):
        covered = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
        for piece in triangles(tile):
            box = torch.ones(piece.rows.stop - piece.rows.start, piece.columns.stop - piece.columns.start).long()
            assert box.numel()
            if piece.causal:
                assert box.shape[0] == box.shape[1]
                box = box.tril()
            covered[piece.rows, piece.columns] += box.flip(0, 1) if piece.reversed else box
            kinds.add((piece.causal, piece.reversed))
        distance = torch.arange(LENGTH).unsqueeze(1) - torch.arange(LENGTH)
        inside = (distance >= tile.lo) & (distance <= tile.hi)
        expected = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
        cut = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        expected[cut] = inside[cut].long()
        assert torch.equal(covered, expected), tile
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cuda"}, "CPU tensors"),
        ({"value_dim": 5}, "differ from heads"),
        ({"softcap": True}, "no softcap"),
        ({"positive_scale": False}, "must be positive"),
        ({"dtype": torch.int32}, "int32"),
    ],
)
def test_cpu_flash_says_what_it_does_not_do(change, reason):
    facts = {"dtype": torch.float32, "device": "cpu", "heads": 4, "kv_heads": 2, "head_dim": 8, "value_dim": 8}
    support = CpuFlashKernel().supports(KernelProblem(**{**facts, **change}))
    assert not support.ok
    assert reason in support.reason


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-50, 1e-31])
def test_scales_that_are_not_positive(scale):
    """Not in float32, that is: 1e-50 is 0 there, for which cpu_flash would answer NaN; 1e-31 is as good as 0."""
    q, k, v, dout = inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = bp.attention(*leaves, mask="causal", scale=scale, return_lse=True)
    out.backward(dout)
    answer = oracle.Answer(out.detach(), lse, *(x.grad for x in leaves))
    exact, plain = expected(*(x.detach() for x in leaves), dout, MASKS["causal"], torch.float32, scale=scale)
    assert judge(answer, exact, plain, torch.float32) == {}
    with pytest.raises(UnsupportedError, match="must be positive"):
        bp.attention(*leaves, scale=scale, kernel="cpu_flash")
    blocks = [x.detach() for x in (q, k, v)]
    assert bool(bp.partial_attention(*blocks, [Tile(0, 9, 0, 9, 0, 8)], scale=scale)[0].isfinite().all())


# -------------------------------------------------------------------------------------------- a user's tiles


user_tiles = st.builds(
    lambda q, rows, k, columns, lo, width: Tile(q, q + rows, k, k + columns, lo, lo + width),
    st.integers(0, 6), st.integers(1, 6), st.integers(0, 5), st.integers(1, 5), st.integers(-14, 14), st.integers(0, 9),
)  # fmt: skip


@given(st.lists(user_tiles, max_size=3))
def test_any_disjoint_tiles_of_a_user(tiles):
    """Rows that see nothing, bands that miss their box, blocks of different lengths; overlaps are refused."""
    q, k, v = torch.randn(1, 12, 2, 4), torch.randn(1, 10, 2, 4), torch.randn(1, 10, 2, 4)
    distance = torch.arange(12).unsqueeze(1) - torch.arange(10)
    times = torch.zeros(12, 10)
    for t in tiles:
        band = (distance >= t.lo) & (distance <= t.hi)
        times[t.q_start : t.q_stop, t.k_start : t.k_stop] += band[t.q_start : t.q_stop, t.k_start : t.k_stop]
    if times.max() > 1:
        with pytest.raises(ShapeError, match="two tiles overlap"):
            bp.partial_attention(q, k, v, tiles)
        return
    scores = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) / 2).masked_fill(times == 0, -torch.inf)
    right = (scores.softmax(-1).nan_to_num(0.0) @ v.double().transpose(1, 2)).transpose(1, 2)
    out, lse = bp.partial_attention(q, k, v, tiles)
    torch.testing.assert_close(out, right.float())
    torch.testing.assert_close(lse, scores.logsumexp(-1).float())


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (Tile(0, 17, 0, 16, -99, 99), "past its block.*16 rows and 12 columns"),
        (Tile(0, 16, 0, 13, -99, 99), "past its block"),
        (Tile(-1, 16, 0, 12, -99, 99), "past its block"),
        (Tile(5, 5, 0, 12, -99, 99), "is empty"),
        (Tile(5, 3, 0, 12, -99, 99), "is empty"),
        (Tile(0, 16, 0, 12, 3, 2), "is empty"),
        (Tile(0, 16.0, 0, 12, 0, 9), "not a tile"),
        ((0, 16, 0, 12, 0, 9), "not a tile"),
    ],
)
def test_bad_tiles_of_a_user(tile, message):
    """torch's operator would end the process at some of these."""
    q, k = torch.randn(1, 16, 2, 4), torch.randn(1, 12, 2, 4)
    with pytest.raises(ShapeError, match=message):
        bp.partial_attention(q, k, k, [tile])


# -------------------------------------------------------------------------------------------------- numerics


def test_merging_with_nothing_changes_nothing():
    q, k, v, _ = inputs(torch.float32)
    part = ReferenceKernel().attend(q, k, v, Tiles([Tile(0, LENGTH, 0, LENGTH, -99, 99)]), Options(0.3))
    nothing = numerics.empty_state(q, 8)
    for parts in ([part, nothing], [nothing, part], [nothing, part, nothing]):
        out, lse = numerics.merge(parts)
        torch.testing.assert_close(out, part[0].to(out.dtype), rtol=0, atol=0)
        torch.testing.assert_close(lse, part[1].to(lse.dtype), rtol=0, atol=0)
    out, lse = numerics.merge([nothing, nothing])
    assert not out.any()
    assert bool((lse == -torch.inf).all())


@pytest.mark.parametrize("spread", [0.0, 50.0, 1e4, 1e30])
def test_merging_survives_scores_far_apart(spread):
    a = (torch.ones(1, 1, 1, 1), torch.full((1, 1, 1), spread))
    b = (torch.full((1, 1, 1, 1), 3.0), torch.full((1, 1, 1), -spread))
    out, lse = numerics.merge([a, b])
    assert out.item() == pytest.approx(2.0 if spread == 0 else 1.0)
    assert lse.isfinite().all()


def part(rows=5, heads=3, dtype=torch.float32):
    return torch.randn(2, rows, heads, 8).to(dtype), torch.randn(2, heads, rows)


@pytest.mark.parametrize(
    ("parts", "error", "message"),
    [
        ([], InputError, "at least one"),
        ([part()[0]], InputError, "pairs"),
        ([part(), part(rows=6)], ShapeError, "do not go together"),
        ([part(), part(heads=1)], ShapeError, "do not go together"),
        ([(part()[0], part(rows=1)[1])], ShapeError, "do not go together"),
        ([part(), part(dtype=torch.bfloat16)], DtypeError, "bfloat16"),
        ([(part()[0].int(), part()[1])], DtypeError, "int32"),
    ],
)
def test_what_merge_refuses(parts, error, message):
    """Shapes that torch would broadcast to a wrong result, above all."""
    with pytest.raises(error, match=message):
        numerics.merge(parts)


def test_merging_takes_nothing_from_a_row_that_saw_nothing():
    """Whatever another library left in its out there."""
    out, lse = part()
    blind = torch.full_like(out, torch.nan), torch.full_like(lse, -torch.inf)
    for parts in ([blind, (out, lse)], [(out, lse), blind]):
        torch.testing.assert_close(numerics.merge(parts), (out, lse))
    assert not numerics.merge([blind, blind])[0].any()


@pytest.mark.parametrize("size", [1e-25, 1.0, 1e25])
def test_the_stand_in_for_out_has_the_row_sums(size):
    """Also where the square of dO would vanish or overflow."""
    dout = torch.randn(2, 5, 3, 8) * size
    dout[:, 2] = 0
    delta = torch.randn(2, 3, 5) * size
    delta[:, :, 2] = 0
    stand_in = numerics.surrogate_out(dout, delta)
    made = numerics.row_delta(dout.double() / size, stand_in)
    torch.testing.assert_close(made, delta.double() / size, rtol=1e-5, atol=1e-6)


def test_sinks_by_hand():
    """One key with score 0 and a sink with logit 0 share the weight."""
    state = (torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1))
    numerics.add_sinks(state, torch.zeros(1))
    assert state[0].flatten().tolist() == [0.5, 0.5]
    assert state[1].item() == pytest.approx(0.6931472)


def test_a_closed_sink_over_a_row_that_sees_nothing():
    """A sink of -inf takes no part: the row stays out 0 and LSE -inf, and gives no gradient."""
    out, lse = torch.zeros(1, 2, 1, 4), torch.tensor([[[-torch.inf, 1.0]]])
    out[:, 1] = 3.0
    before = out.clone(), lse.clone()
    sinks = torch.tensor([-torch.inf])
    numerics.add_sinks((out, lse), sinks)
    torch.testing.assert_close((out, lse), before, rtol=0, atol=0)
    assert numerics.sinks_gradient(sinks, lse, torch.tensor([[[0.0, 2.0]]])).tolist() == [0.0]
