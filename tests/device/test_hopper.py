"""Test the Hopper kernel on a device against the float64 reference: all masks, ragged lengths, GQA, states, strides."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from burst_portable.backends.cuda.driver import Ready
from burst_portable.backends.cuda.hopper import cuts
from burst_portable.backends.cuda.hopper.compiled_kernels import compiled_kernels
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs
from burst_portable.numerics import empty_state
from burst_portable.planning.tiles import Tile, Tiles
from tests.support import hopper_cases
from tests.support.calls import kernel_call, settings
from tests.support.hopper_cases import (
    KERNEL,
    MASKS,
    ORACLE,
    TOLERANCE,
    compare,
    compare_backward,
    compare_forward,
    compare_gradients_in_place,
    compare_merged_rows,
    compare_unaligned,
    compare_yielding,
    fresh_state,
    gap,
    second_launch_keys,
    split_long_blocks,
    tiles_of,
    tiles_with_long_block,
    use_one_program_per_kv_head,
    use_small_l2,
    use_tall_blocks,
    use_yielding_programs,
    wide,
)
from tests.support.triton_checks import check_far

pytestmark = pytest.mark.device

DEVICE = "cuda"
randn = functools.partial(hopper_cases.randn, device=DEVICE)


def inputs(batch, length, heads, kv_heads, dim, value_dim, dtype=torch.bfloat16):
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    return tuple(randn(batch, length, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes))


@pytest.fixture(scope="module", autouse=True)
def hopper():
    # torch for ROCm reports the same capability for an MI250.
    if torch.version.hip or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no sm_90 device")
    reason = KERNEL.supports(kernel_call(torch.bfloat16, DEVICE, 2, 2, 128, 128, deterministic=False)).reason
    assert not reason, reason


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_hopper_masks(mask, dim):
    length = 600
    q, k, v = (randn(2, length, h, dim, seed=i) for i, h in enumerate((4, 2, 2)))
    compare(q, k, v, tiles_of(mask, length))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["documents:0,90,1114,1300,1900", "full_documents:0,77,777,1900"])
def test_hopper_documents_at_block_boundaries(mask, dim):
    """A partial block writes neither results nor state in the rows of the next document."""
    q, k, v = (randn(2, 1900, h, dim, seed=i) for i, h in enumerate((4, 2, 2)))
    tiles, options = tiles_of(mask, 1900), settings(scale=dim**-0.5, deterministic=False)
    compare(q, k, v, tiles)
    state = KERNEL.attend(q, k, v, tiles, options, state=fresh_state(q))
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    assert gap(state[0], exact[0]) < TOLERANCE[q.dtype][0]
    assert gap(state[1], exact[1]) < TOLERANCE[q.dtype][1]


HEADS = [
    (16, 16), (40, 64), (80, 80), (72, 128), (96, 96), (112, 64), (160, 160), (192, 64), (192, 128), (200, 136),
    (256, 256),
]  # fmt: skip


@pytest.mark.parametrize(("dim", "value_dim"), HEADS)
def test_hopper_other_head_sizes(dim, value_dim):
    """Covers all masks, both dtypes, groups, partial blocks, and NaN in neighboring memory."""
    for mask in MASKS:
        compare(*inputs(2, 600, 4, 2, dim, value_dim), tiles_of(mask, 600))
    compare(*inputs(2, 1000, 6, 2, dim, value_dim, torch.float16), tiles_of("causal", 1000))
    compare(*inputs(1, 1, 2, 1, dim, value_dim), tiles_of("causal", 1))
    q, (k, v) = randn(2, 333, 4, dim), inputs(2, 1111, 4, 2, dim, value_dim)[1:]
    compare(q, k, v, Tiles([Tile(5, 300, 17, 1000, -2000, 2000)]))
    compare_merged_rows(dim, DEVICE, value_dim)
    dout = randn(2, 300, 4, value_dim, seed=7)
    compare_unaligned(*inputs(2, 300, 4, 2, dim, value_dim), dout, tiles_of("causal", 300))
    compare_gradients_in_place(*inputs(2, 300, 4, 2, dim, value_dim), dout, tiles_of("causal", 300))


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)])
def test_hopper_softcap(dim, value_dim):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = inputs(2, 600, 4, 2, dim, value_dim, dtype)
        for mask in ("causal", "window:90"):
            compare(3 * q, k, v, tiles_of(mask, 600), softcap=3.0)


@pytest.mark.parametrize("mask", ["causal", "full", "window:300", "documents:0,700,711,1500,3000", "sink:4:500"])
@pytest.mark.parametrize(("dim", "heads", "kv_heads"), [(64, 8, 2), (80, 8, 8), (96, 4, 4), (128, 32, 8), (256, 8, 2)])
def test_hopper_deterministic_backward(dim, heads, kv_heads, mask):
    q, k, v = inputs(2, 3000, heads, kv_heads, dim, dim)
    tiles, options = tiles_of(mask, 3000), settings(scale=0.1)
    out, lse = KERNEL.attend(q, k, v, tiles, options, out_dtype=q.dtype)
    given = BackwardInputs(randn(*out.shape, seed=7), q, k, v, lse, out)

    def added(deterministic=True):
        made = tuple(torch.full_like(x, 0.25, dtype=torch.float32) for x in (q, k, v))
        KERNEL.attend_backward(given, tiles, settings(scale=0.1, deterministic=deterministic), into=made)
        return made

    first, sums = KERNEL.backward_single_call(given, tiles, options), added()
    for _ in range(50):
        assert all(map(torch.equal, first, KERNEL.backward_single_call(given, tiles, options)))
        assert all(map(torch.equal, sums, added()))
    assert all(gap(x, y.double() - 0.25) < 1e-2 for x, y in zip(first, added(deterministic=False), strict=True))
    assert all(gap(x - 0.25, y.double()) < 1e-2 for x, y in zip(sums, first, strict=True))


@pytest.mark.parametrize(("dim", "value_dim"), [(160, 160), (192, 128), (256, 256)])
@pytest.mark.parametrize("mask", ["causal", "window:300", "documents:0,700,711,1500,2000"])
def test_hopper_large_heads_divided_by_query_head(dim, value_dim, mask, monkeypatch):
    monkeypatch.setattr(cuts, "SPLIT_LATE", 1e9)
    hopper_cases.new_kernel(monkeypatch)
    q, k, v = inputs(2, 2000, 8, 2, dim, value_dim)
    compare(q, k, v, tiles_of(mask, 2000))
    compare_gradients_in_place(q, k, v, randn(2, 2000, 8, value_dim, seed=7), tiles_of(mask, 2000))


@pytest.mark.parametrize("mask", MASKS)
def test_hopper_forward_masks_in_tall_blocks(mask, monkeypatch):
    use_tall_blocks(monkeypatch)
    q, k, v = (randn(2, 600, h, 64, seed=i) for i, h in enumerate((4, 2, 2)))
    compare_forward(q, k, v, tiles_of(mask, 600))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 63, 193, 1000, 1900])
def test_hopper_forward_lengths_in_tall_blocks(length, dtype, monkeypatch):
    use_tall_blocks(monkeypatch)
    q, k, v = (randn(2, length, h, 64, dtype=dtype, seed=i) for i, h in enumerate((6, 2, 2)))
    compare_forward(q, k, v, tiles_of("causal", length))
    if length == 1900:
        compare_forward(q, k, v, tiles_of("documents:0,90,1114,1300,1900", length))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_hopper_backward_one_program_per_kv_head(mask, dim, monkeypatch):
    """Uses the blocks of a call with many programs. With few programs, these blocks would delay the last program."""
    use_one_program_per_kv_head(monkeypatch)
    q, k, v = (randn(2, 600, h, dim, seed=i) for i, h in enumerate((6, 2, 2)))
    compare(q, k, v, tiles_of(mask, 600))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["sink:64:300", "sink:200:300"])
def test_hopper_adds_sink_gradients_in_second_launch(mask, dtype):
    """The first launch writes all other gradients; elements that no launch writes would be NaN."""
    q, k, v = (randn(1, 8600, 2, 128, dtype=dtype, seed=i) for i in range(3))
    tiles = tiles_of(mask, 8600)
    assert second_launch_keys(q, k, v, tiles) == (0, 200 if mask == "sink:200:300" else 64)
    compare_backward(q, k, v, tiles)


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_adds_long_block_gradients_in_second_launch(dim, monkeypatch):
    """One head per program or a group of heads; the long block is in the middle or at the end."""
    split_long_blocks(monkeypatch)
    monkeypatch.setattr(cuts, "LATE", 1)  # otherwise a group of heads would need hundreds
    for heads, kv_heads in ((3, 3), (24, 12)):
        q, k, v = (randn(2, 1030, h, dim, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
        for first, last, apart in ((0, 9, (0, 9)), (300, 310, (256, 310)), (1025, 1029, (1024, 1030))):
            tiles = tiles_with_long_block(first, last)
            assert second_launch_keys(q, k, v, tiles) == apart
            compare_backward(q, k, v, tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 2), (8, 1)])
@pytest.mark.parametrize("length", [1, 63, 129, 1000])
def test_hopper_lengths_and_head_groups(length, heads, dim, dtype):
    q, k, v = (randn(1, length, h, dim, dtype=dtype, seed=i) for i, h in enumerate((heads[0], heads[1], heads[1])))
    compare(q, k, v, tiles_of("causal", length))


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_different_query_and_key_lengths(dim):
    q, k, v = randn(2, 333, 4, dim), randn(2, 1111, 2, dim, seed=1), randn(2, 1111, 2, dim, seed=2)
    compare(q, k, v, Tiles([Tile(5, 300, 17, 1000, -2000, 2000)]))
    compare(q, k, v, Tiles([Tile(0, 333, 0, 1111, -778, 332)]))
    compare(q, k, v, Tiles([Tile(0, 10, 1000, 1111, -2000, 2000), Tile(100, 333, 0, 77, 100, 300)]))


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_long_boxes_start_at_different_blocks(dim, monkeypatch):
    use_small_l2(monkeypatch)
    q, k, v = (randn(1, n, h, dim, seed=i) for i, (n, h) in enumerate(((300, 2), (901, 1), (901, 1))))
    compare_forward(q, k, v, Tiles([Tile(0, 300, 0, 901, -901, 300)]))
    compare_forward(q, k, v, Tiles([Tile(0, 200, 0, 768, -901, 300), Tile(200, 300, 100, 901, -800, 100)]))


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_merges_rows(dim):
    compare_merged_rows(dim, "cuda")


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_merges_state_in_place(dim):
    """Key blocks in sequence equal all keys at once; rows without new keys stay unchanged."""
    length, options = 700, settings(scale=0.1)
    q, k, v = (randn(2, length, h, dim, seed=i) for i, h in enumerate((4, 2, 2)))
    tiles = tiles_of("causal", length)
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    state = fresh_state(q)
    for start, stop in ((600, 700), (0, 200), (200, 600)):
        part = [t.clipped(0, length, start, stop) for t in tiles]
        local = Tiles(t.shifted(0, -start) for t in part if t is not None)
        merged = KERNEL.attend(q, k[:, start:stop], v[:, start:stop], local, options, state=state)
        assert merged[0] is state[0]
        assert merged[1] is state[1]
    assert gap(state[0], exact[0]) < TOLERANCE[q.dtype][0]
    assert gap(state[1], exact[1]) < TOLERANCE[q.dtype][1]


def test_hopper_strided_inputs_and_state():
    length, dim, options = 300, 128, settings(scale=0.09, deterministic=False)
    packed = randn(2, length, 12, dim)
    q, k, v = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    compare(q, k, v, tiles_of("causal", length))
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    compare(*heads_first, tiles_of("causal", length))
    whole = fresh_state(packed)
    part = (whole[0][:, 100:, 4:8], whole[1][:, 4:8, 100:])
    tiles = Tiles([Tile(0, 200, 0, 300, -99, 199)])
    KERNEL.attend(q[:, 100:], k, v, tiles, options, state=part)
    exact = ORACLE.attend(*wide(q[:, 100:], k, v), tiles, options)
    assert gap(part[0], exact[0]) < 6e-3
    assert (whole[0][:, :100] == 0).all()
    assert (whole[0][:, :, :4] == 0).all()
    assert (whole[1][:, :, :100] == -torch.inf).all()


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_yielding_programs(dim, monkeypatch):
    """There are many more programs than multiprocessors, or a single one."""
    for room, length in ((1, 6000), (64, 6000), (1 << 30, 300)):
        use_yielding_programs(monkeypatch, room)
        q, k, v = (randn(1, length, h, dim, seed=i) for i, h in enumerate((8, 2, 2)))
        compare_yielding(q, k, v, tiles_of("causal", length))


@pytest.mark.parametrize("dim", [64, 128])
def test_hopper_accepts_inputs_without_tma_alignment(dim):
    q, k, v, dout = (randn(2, 300, h, dim, seed=i) for i, h in enumerate((4, 2, 2, 4)))
    compare_unaligned(q, k, v, dout, tiles_of("causal", 300))


def test_hopper_converts_state_to_float32():
    q, tiles, options = randn(1, 100, 2, 64), tiles_of("causal", 100), settings(scale=0.1)
    out, lse = KERNEL.attend(q, q, q, tiles, options, state=empty_state(q, 64))
    assert out.dtype == lse.dtype == torch.float32
    assert gap(out, ORACLE.attend(*wide(q, q, q), tiles, options)[0]) < 6e-3


def test_hopper_ignores_nan_outside_inputs():
    """The padding of a block must not come from the next batch, head or row."""
    length, dim = 200, 128
    poisoned = [torch.full((3, length + 30, 4, dim), torch.nan, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x[1:2, 10 : 10 + length, 1:3] for x in poisoned)
    for i, x in enumerate((q, k, v)):
        x.copy_(randn(*x.shape, seed=i))
    compare(q, k, v, tiles_of("causal", length))


def test_hopper_many_items_per_program_and_graph_replay():
    """More items than multiprocessors give equal results twice; a captured graph replays."""
    q, k, v = (randn(3, 1500, h, 64, seed=i) for i, h in enumerate((8, 4, 4)))
    tiles, options = tiles_of("causal", 1500), settings(scale=0.125)
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    first, second = KERNEL.attend(q, k, v, tiles, options), KERNEL.attend(q, k, v, tiles, options)
    assert gap(first[0], exact[0]) < 6e-3
    assert torch.equal(first[0], second[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = KERNEL.attend(q, k, v, tiles, options)
    for seed in (5, 6):
        q.copy_(randn(*q.shape, seed=seed))
        out.fill_(torch.nan)
        graph.replay()
        assert gap(out, ORACLE.attend(*wide(q, k, v), tiles, options)[0]) < 6e-3


def test_hopper_offsets_beyond_two_to_the_31():
    """The rows of LSE are contiguous, so its offsets stay small."""
    check_far(KERNEL, DEVICE, far_lse=False)


def test_hopper_large_scores():
    q, k, v = (randn(1, 300, 2, 128, seed=i) for i in range(3))
    compare(q * 20, k, v, tiles_of("causal", 300))


def test_hopper_rejects_unaligned_outputs():
    q = randn(1, 64, 2, 128)
    tiles = tiles_of("full", 64)
    odd = randn(1, 64, 2, 129, dtype=torch.float32)[..., :128]
    with pytest.raises(UnsupportedError, match="cannot address out"):
        KERNEL.attend(q, q, q, tiles, settings(scale=0.1), state=(odd, fresh_state(q)[1]))


def test_hopper_launches_call_driver_directly():
    q, k, v = (randn(1, 200, 2, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    compare(q, k, v, tiles_of("causal", 200))
    kernels = compiled_kernels()
    for launcher in (kernels.forward, kernels.backward, kernels.row_terms):
        assert launcher._launches
        assert all(isinstance(launch, Ready) for launch in launcher._launches.values())


def test_hopper_runs_in_new_thread():
    q, k, v = (randn(1, 200, 2, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    tiles, options = tiles_of("causal", 200), settings(scale=0.125)
    expected, _ = KERNEL.attend(q, k, v, tiles, options)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        made, _ = pool.submit(KERNEL.attend, q, k, v, tiles, options).result()
    torch.cuda.synchronize()
    assert torch.equal(made, expected)
