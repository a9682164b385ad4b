"""The Hopper kernel on a device against the float64 reference: every mask, ragged lengths, GQA, states, strides."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from burst_portable.backends.cuda.driver import Ready
from burst_portable.backends.cuda.hopper import configs
from burst_portable.backends.cuda.hopper.launch import compiled_kernels
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
    compare_as_they_come,
    compare_backward,
    compare_forward,
    compare_making_way,
    compare_rows_that_are_merged,
    fresh_state,
    gap,
    long_blocks_where_they_can,
    making_way,
    one_program_for_all_heads_of_a_key,
    seen_by_all,
    served_apart,
    small_l2,
    tall_where_it_can,
    tiles_of,
    wide,
)
from tests.support.triton_checks import check_far

pytestmark = pytest.mark.device

DEVICE = "cuda"
randn = functools.partial(hopper_cases.randn, device=DEVICE)


@pytest.fixture(scope="module", autouse=True)
def hopper():
    # torch for ROCm gives an MI250 the same number.
    if torch.version.hip or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no sm_90 device")
    reason = KERNEL.supports(kernel_call(torch.bfloat16, DEVICE, 2, 2, 128, 128, deterministic=False)).reason
    assert not reason, reason


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_masks(mask, dim):
    length = 600
    q, k, v = (randn(2, length, h, dim, seed=i) for i, h in enumerate((4, 2, 2)))
    compare(q, k, v, tiles_of(mask, length))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", ["documents:0,90,1114,1300,1900", "full_documents:0,77,777,1900"])
def test_blocks_that_start_with_documents(mask, dim):
    """Where a block stops short, the rows that follow are another's: nothing is written there, into a state neither."""
    q, k, v = (randn(2, 1900, h, dim, seed=i) for i, h in enumerate((4, 2, 2)))
    tiles, options = tiles_of(mask, 1900), settings(scale=dim**-0.5, deterministic=False)
    compare(q, k, v, tiles)
    state = KERNEL.attend(q, k, v, tiles, options, state=fresh_state(q))
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    assert gap(state[0], exact[0]) < TOLERANCE[q.dtype][0]
    assert gap(state[1], exact[1]) < TOLERANCE[q.dtype][1]


@pytest.mark.parametrize("mask", MASKS)
def test_masks_in_tall_blocks(mask, monkeypatch):
    tall_where_it_can(monkeypatch)
    q, k, v = (randn(2, 600, h, 64, seed=i) for i, h in enumerate((4, 2, 2)))
    compare_forward(q, k, v, tiles_of(mask, 600))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 63, 193, 1000, 1900])
def test_lengths_of_tall_blocks(length, dtype, monkeypatch):
    tall_where_it_can(monkeypatch)
    q, k, v = (randn(2, length, h, 64, dtype=dtype, seed=i) for i, h in enumerate((6, 2, 2)))
    compare_forward(q, k, v, tiles_of("causal", length))
    if length == 1900:
        compare_forward(q, k, v, tiles_of("documents:0,90,1114,1300,1900", length))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_one_backward_program_for_all_heads_of_a_key(mask, dim, monkeypatch):
    """As where there are many programs: here that would make the last one late."""
    one_program_for_all_heads_of_a_key(monkeypatch)
    q, k, v = (randn(2, 600, h, dim, seed=i) for i, h in enumerate((6, 2, 2)))
    compare(q, k, v, tiles_of(mask, 600))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["sink:64:300", "sink:200:300"])
def test_gradients_of_sinks_are_added_up_apart(mask, dtype):
    """The others' are written; what is written nowhere would be NaN."""
    q, k, v = (randn(1, 8600, 2, 128, dtype=dtype, seed=i) for i in range(3))
    tiles = tiles_of(mask, 8600)
    assert served_apart(q, k, tiles) == (0, 200 if mask == "sink:200:300" else 64)
    compare_backward(q, k, v, tiles)


@pytest.mark.parametrize("dim", [64, 128])
def test_gradients_of_keys_that_many_see_are_added_up_apart(dim, monkeypatch):
    """One head a program or a group of them, in the middle and at the end."""
    long_blocks_where_they_can(monkeypatch)
    monkeypatch.setattr(configs, "LATE", 1)  # or a group of heads would need hundreds
    for heads, kv_heads in ((3, 3), (24, 12)):
        q, k, v = (randn(2, 1030, h, dim, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads)))
        for first, last, apart in ((0, 9, (0, 9)), (300, 310, (256, 310)), (1025, 1029, (1024, 1030))):
            tiles = seen_by_all(first, last)
            assert served_apart(q, k, tiles) == apart
            compare_backward(q, k, v, tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [(1, 1), (6, 6), (6, 2), (8, 1)])
@pytest.mark.parametrize("length", [1, 63, 129, 1000])
def test_lengths_and_groups(length, heads, dim, dtype):
    q, k, v = (randn(1, length, h, dim, dtype=dtype, seed=i) for i, h in enumerate((heads[0], heads[1], heads[1])))
    compare(q, k, v, tiles_of("causal", length))


@pytest.mark.parametrize("dim", [64, 128])
def test_queries_and_keys_of_other_lengths(dim):
    q, k, v = randn(2, 333, 4, dim), randn(2, 1111, 2, dim, seed=1), randn(2, 1111, 2, dim, seed=2)
    compare(q, k, v, Tiles([Tile(5, 300, 17, 1000, -2000, 2000)]))
    compare(q, k, v, Tiles([Tile(0, 333, 0, 1111, -778, 332)]))
    compare(q, k, v, Tiles([Tile(0, 10, 1000, 1111, -2000, 2000), Tile(100, 333, 0, 77, 100, 300)]))


@pytest.mark.parametrize("dim", [64, 128])
def test_long_boxes_are_walked_from_other_blocks_on(dim, monkeypatch):
    small_l2(monkeypatch)
    q, k, v = (randn(1, n, h, dim, seed=i) for i, (n, h) in enumerate(((300, 2), (901, 1), (901, 1))))
    compare_forward(q, k, v, Tiles([Tile(0, 300, 0, 901, -901, 300)]))
    compare_forward(q, k, v, Tiles([Tile(0, 200, 0, 768, -901, 300), Tile(200, 300, 100, 901, -800, 100)]))


@pytest.mark.parametrize("dim", [64, 128])
def test_rows_that_are_merged(dim):
    compare_rows_that_are_merged(dim, "cuda")


@pytest.mark.parametrize("dim", [64, 128])
def test_state_is_merged_in_place(dim):
    """Blocks of keys one after the other equal all keys at once; rows that a step does not see stay as they are."""
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


def test_strided_inputs_and_state():
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
def test_programs_that_make_way(dim, monkeypatch):
    """Many more than there are multiprocessors, and one alone."""
    for room, length in ((1, 6000), (64, 6000), (1 << 30, 300)):
        making_way(monkeypatch, room)
        q, k, v = (randn(1, length, h, dim, seed=i) for i, h in enumerate((8, 2, 2)))
        compare_making_way(q, k, v, tiles_of("causal", length))


@pytest.mark.parametrize("dim", [64, 128])
def test_inputs_that_tma_cannot_address(dim):
    q, k, v, dout = (randn(2, 300, h, dim, seed=i) for i, h in enumerate((4, 2, 2, 4)))
    compare_as_they_come(q, k, v, dout, tiles_of("causal", 300))


def test_state_of_another_kernel_is_brought_to_float32():
    q, tiles, options = randn(1, 100, 2, 64), tiles_of("causal", 100), settings(scale=0.1)
    out, lse = KERNEL.attend(q, q, q, tiles, options, state=empty_state(q, 64))
    assert out.dtype == lse.dtype == torch.float32
    assert gap(out, ORACLE.attend(*wide(q, q, q), tiles, options)[0]) < 6e-3


def test_neighbours_full_of_nan_do_no_harm():
    """Padding of a block must come from nowhere, not from the next batch, head or row."""
    length, dim = 200, 128
    poisoned = [torch.full((3, length + 30, 4, dim), torch.nan, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    q, k, v = (x[1:2, 10 : 10 + length, 1:3] for x in poisoned)
    for i, x in enumerate((q, k, v)):
        x.copy_(randn(*x.shape, seed=i))
    compare(q, k, v, tiles_of("causal", length))


def test_many_items_a_program_and_a_graph():
    """More work items than multiprocessors, twice the same; a captured graph replays with new numbers."""
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


def test_past_two_to_the_31():
    """LSE alone lies near: its rows are one after the other."""
    check_far(KERNEL, DEVICE, far_lse=False)


def test_large_scores():
    q, k, v = (randn(1, 300, 2, 128, seed=i) for i in range(3))
    compare(q * 20, k, v, tiles_of("causal", 300))


def test_refusals():
    q = randn(1, 64, 2, 128)
    tiles = tiles_of("full", 64)
    with pytest.raises(UnsupportedError, match="deterministic"):
        KERNEL.attend_backward(BackwardInputs(q, q, q, q, q, out=q), tiles, settings(scale=0.1), into=(q, q, q))
    odd = randn(1, 64, 2, 129, dtype=torch.float32)[..., :128]
    with pytest.raises(UnsupportedError, match="cannot address out"):
        KERNEL.attend(q, q, q, tiles, settings(scale=0.1), state=(odd, fresh_state(q)[1]))


def test_launches_go_straight_to_the_driver():
    q, k, v = (randn(1, 200, 2, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    compare(q, k, v, tiles_of("causal", 200))
    kernels = compiled_kernels()
    for launcher in (kernels.forward, kernels.backward, kernels.prepare):
        assert launcher._launches
        assert all(isinstance(launch, Ready) for launch in launcher._launches.values())


def test_a_thread_that_is_new_to_the_device():
    q, k, v = (randn(1, 200, 2, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    tiles, options = tiles_of("causal", 200), settings(scale=0.125)
    expected, _ = KERNEL.attend(q, k, v, tiles, options)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        made, _ = pool.submit(KERNEL.attend, q, k, v, tiles, options).result()
    torch.cuda.synchronize()
    assert torch.equal(made, expected)
