"""Run the Hopper kernels' Python on the CPU against float64, with checked waits and slots; see `emulator.machine`."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from burst_portable.backends.cuda.hopper import (
    backward,
    backward_launches,
    cuts,
    kernel,
    ordered_tables,
    prepared_launches,
)
from burst_portable.backends.cuda.hopper import forward as hopper_forward
from burst_portable.backends.cuda.hopper import split_backward as hopper_split_backward
from burst_portable.backends.cuda.hopper.prepared_launches import build_forward_launch, sizes_of
from burst_portable.backends.cuda.hopper.support import triton_reason
from burst_portable.kernels.base import BackwardInputs
from burst_portable.planning.call import LEAST_SCALE
from burst_portable.planning.tiles import Tile, Tiles
from tests.support import hopper_cases
from tests.support.hopper_cases import (
    KERNEL,
    MASKS,
    ORACLE,
    TOLERANCE,
    add_by_query_head,
    compare,
    compare_backward,
    compare_forward,
    compare_gradients_in_place,
    compare_merged_rows,
    compare_unaligned,
    compare_whole,
    compare_yielding,
    divide_by_query_head,
    divide_ordered_long_blocks,
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
from tests.support.poison import fresh_memory_is_nan

if triton_reason():
    pytest.skip(triton_reason(), allow_module_level=True)

from tests.support.calls import settings
from tests.support.emulator.hopper import EmulatedKernels, emulate
from tests.support.emulator.machine import Machine

randn = functools.partial(hopper_cases.randn, device="cpu")


def full(*values):
    """Return the parameters of a case that other cases cover but for their combination."""
    return pytest.param(*values, marks=pytest.mark.full)


def every_second(first, second, start=0):
    """Return all pairs of two lists. Every second one runs by default, and every element of both is in one of these.

    `start`: 0 if the first pair runs, 1 if it does not.
    """
    pairs = itertools.product(enumerate(first), enumerate(second))
    return [(pytest.param if (i + j) % 2 == start else full)(x, y) for (i, x), (j, y) in pairs]


ORDERS = [(0, 0.0), (1, 0.5), (2, 1.0)]  # (seed, eager)


@pytest.fixture(params=ORDERS[1:2], ids=["mixed"])
def machine(request, monkeypatch):
    emulate(monkeypatch, EmulatedKernels(Machine(*request.param)))


def inputs(batch, length, heads, kv_heads, dim, dtype=torch.bfloat16, value_dim=None):
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim or dim))
    return tuple(randn(batch, length, *size, dtype=dtype, seed=i) for i, size in enumerate(sizes))


@pytest.mark.parametrize(("mask", "dim"), every_second(MASKS, [64, 128]))
def test_emulated_masks(mask, dim, machine):
    compare(*inputs(1, 301, 1, 1, dim), tiles_of(mask, 301))


# One case per pair of panel sizes, values larger and smaller than heads, and sizes that end inside a panel.
HEADS = [
    (16, 16), (40, 64), (80, 80), (72, 128), (96, 96), (112, 64), (160, 160), (192, 64), (192, 128), (200, 136),
    (256, 256),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "mask"), every_second(HEADS, ["causal", "full_documents:0,100,170,301"]))
def test_emulated_other_head_sizes(heads, mask, machine):
    dim, value_dim = heads
    compare(*inputs(1, 301, 1, 1, dim, value_dim=value_dim), tiles_of(mask, 301))


@pytest.mark.full
@pytest.mark.parametrize("machine", ORDERS, ids=["late", "mixed", "early"], indirect=True)
@pytest.mark.parametrize(("dim", "value_dim"), HEADS)
@pytest.mark.parametrize("mask", MASKS)
def test_emulated_masks_with_other_head_sizes(mask, dim, value_dim, machine):
    compare(*inputs(2, 301, 4, 2, dim, value_dim=value_dim), tiles_of(mask, 301))


@pytest.mark.parametrize(("dim", "value_dim"), [full(96, 96), (192, 128), full(256, 256)])
@pytest.mark.parametrize(
    "machine",
    [pytest.param(ORDERS[0], marks=pytest.mark.full), ORDERS[1], pytest.param(ORDERS[2], marks=pytest.mark.full)],
    ids=["late", "mixed", "early"],
    indirect=True,
)
def test_emulated_groups_and_dtypes_of_other_head_sizes(dim, value_dim, machine):
    compare(*inputs(2, 129, 3, 1, dim, torch.float16, value_dim), tiles_of("causal", 129))
    q, (k, v, _) = randn(1, 133, 2, dim), inputs(1, 211, 1, 1, dim)
    v = randn(1, 211, 1, value_dim, seed=2)
    compare(q, k, v, Tiles([Tile(5, 130, 17, 200, -2000, 2000)]))
    compare_merged_rows(dim, "cpu", value_dim)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), full(96, 96), full(192, 128), (256, 256)])
def test_emulated_softcap(dim, value_dim, machine):
    for dtype in (torch.bfloat16, torch.float16):
        q, k, v = inputs(1, 150, 2, 1, dim, dtype, value_dim)
        compare(3 * q, k, v, tiles_of("window:90", 150), softcap=3.0)


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (112, 96), (192, 128), (256, 256)])
def test_emulated_gradients_in_strided_buffers(dim, value_dim, machine):
    q, k, v = inputs(2, 150, 2, 1, dim, value_dim=value_dim)
    compare_gradients_in_place(q, k, v, randn(2, 150, 2, value_dim, seed=7), tiles_of("causal", 150))


def test_emulated_large_heads_are_deterministic(machine):
    q, k, v = inputs(1, 200, 2, 1, 256)
    tiles, options = tiles_of("causal", 200), settings(scale=0.1)
    out, lse = KERNEL.attend(q, k, v, tiles, options, out_dtype=q.dtype)
    given = BackwardInputs(randn(1, 200, 2, 256, seed=7), q, k, v, lse, out)
    first, second = (KERNEL.backward_single_call(given, tiles, options) for _ in range(2))
    assert first[0].dtype == q.dtype
    assert all(map(torch.equal, first, second))


def gradients_in_orders(mask, dim, single_call, monkeypatch, *, deterministic, length=300):
    """Return the gradients of one call in each order of the threads and engines, and the exact ones."""
    found = []
    for order in ORDERS:
        emulate(monkeypatch, EmulatedKernels(Machine(*order)))
        found.append(ordered_gradients(mask, dim, single_call, deterministic=deterministic, length=length))
    return [made for made, _ in found], found[0][1]


def ordered_gradients(mask, dim, single_call, *, deterministic=True, length=300):
    """Return the gradients of one call, and the exact ones."""
    q, k, v = inputs(1, length, 4, 2, dim)
    tiles, options = tiles_of(mask, length), settings(scale=0.1, deterministic=deterministic)
    out, lse = (x.to(dtype) for x, dtype in zip(oracle_state(mask, dim, length), (q.dtype, torch.float32), strict=True))
    given = BackwardInputs(randn(1, length, 4, dim, seed=7), q, k, v, lse, out)
    made = [torch.full_like(x, 0.25, dtype=torch.float32) for x in (q, k, v)]
    if single_call:
        made = [x + 0.25 for x in hopper_cases.KERNEL.backward_single_call(given, tiles, options)]
    else:
        hopper_cases.KERNEL.attend_backward(given, tiles, options, into=tuple(made))
    exact = tuple(torch.full_like(x, 0.25, dtype=torch.float64) for x in (q, k, v))
    dout, *rest = given[:5]
    ORACLE.attend_backward(BackwardInputs(*wide(dout, *rest), out=out.double()), tiles, options, into=exact)
    return made, exact


@functools.cache
def oracle_state(mask, dim, length):
    q, k, v = inputs(1, length, 4, 2, dim)
    return ORACLE.attend(*wide(q, k, v), tiles_of(mask, length), settings(scale=0.1, deterministic=True))


SHORT_DOCUMENTS = "documents:" + ",".join(map(str, range(0, 301, 20)))
"""Documents of 20 tokens: a key block visits a query block more than once."""


@pytest.mark.parametrize(
    ("case", "single_call"),
    every_second([("causal", 64), ("full", 128), (SHORT_DOCUMENTS, 64), ("window:90", 96)], [True, False]),
)
def test_emulated_deterministic_backward_in_any_order(case, single_call, monkeypatch):
    mask, dim = case
    found, exact = gradients_in_orders(mask, dim, single_call, monkeypatch, deterministic=True)
    check_equal_and_exact(found, exact)


@pytest.mark.parametrize("single_call", [True, full(False)])
def test_emulated_ordered_blocks_start_at_documents(single_call, monkeypatch):
    """Two blocks have rows of two documents each, at a border that is no multiple of 4."""
    mask = "documents:0,333,700"
    check_equal_and_exact(*gradients_in_orders(mask, 96, single_call, monkeypatch, deterministic=True, length=700))


@pytest.mark.parametrize(("mask", "dim"), [("sink:70:100", 64), full("sink:4:100", 96)])
@pytest.mark.parametrize("single_call", [True, full(False)])
def test_emulated_ordered_blocks_align_with_keys_after_sinks(mask, dim, single_call, monkeypatch):
    """The first block of queries is short. It and the next one have rows of both, to which visits add 0."""
    check_equal_and_exact(*gradients_in_orders(mask, dim, single_call, monkeypatch, deterministic=True, length=500))


def check_equal_and_exact(found, exact):
    for made in found:
        assert all(map(torch.equal, made, found[0]))
        assert all(gap(x - 0.25, y - 0.25) < 1e-2 for x, y in zip(made, exact, strict=True))


@pytest.mark.parametrize("dim", [64, full(72)])
def test_emulated_query_heads_add_to_cleared_gradients(dim, monkeypatch):
    """Sums start in memory with NaN, which the launches clear."""
    add_by_query_head(monkeypatch)
    with fresh_memory_is_nan():
        found, exact = gradients_in_orders("causal", dim, True, monkeypatch, deterministic=False)
    assert all(gap(x - 0.25, y - 0.25) < 1e-2 for made in found for x, y in zip(made, exact, strict=True))
    assert found[0][0].dtype == torch.bfloat16, "dQ in float32 shows that a program computed all heads of a group"


@pytest.mark.parametrize(
    ("mask", "dim", "single_call"),
    [
        ("causal", 64, False), ("window:90", 96, True),
        full("causal", 64, True), full("window:90", 96, False),
        full(SHORT_DOCUMENTS, 128, True), full(SHORT_DOCUMENTS, 128, False),
    ],
)  # fmt: skip
def test_emulated_ordered_gradients_by_query_head(mask, dim, single_call, monkeypatch):
    """Programs of query heads that share a K/V head write dK and dV separately."""
    divide_by_query_head(monkeypatch)
    check_equal_and_exact(*gradients_in_orders(mask, dim, single_call, monkeypatch, deterministic=True))


@pytest.mark.parametrize(
    ("mask", "dim", "single_call"),
    [full("sink:5:60", 64, True), ("sink:200:20", 64, False), full("sink:200:20", 128, True)],
)
def test_emulated_ordered_gradients_of_divided_keys(mask, dim, single_call, monkeypatch):
    """Several programs compute keys that all queries see, and two blocks of such keys add to the same queries."""
    divide_ordered_long_blocks(monkeypatch)
    found, exact = gradients_in_orders(mask, dim, single_call, monkeypatch, deterministic=True, length=1030)
    check_equal_and_exact(found, exact)


ORDERED_BUGS = {
    "all parts write the same rows": (ordered_tables, "written = [(k_block * i,", "written = [(0 * i,"),
    "one part only": (backward_launches, "one.sum((-5, -2))", "one.select(-5, 0).sum(-2)"),
    "one query head only": (backward_launches, "one.sum((-5, -2))", "one.sum(-5).select(-2, 0)"),
}


@pytest.mark.parametrize("bug", [full(bug) if i else bug for i, bug in enumerate(ORDERED_BUGS)])
def test_emulation_finds_bug_of_ordered_gradients(bug, tmp_path, machine, monkeypatch):
    divide_ordered_long_blocks(monkeypatch)
    use_planted(*ORDERED_BUGS[bug], tmp_path, monkeypatch)
    made, exact = ordered_gradients("sink:5:60", 64, True, length=1030)
    with pytest.raises(AssertionError):
        check_equal_and_exact([made], exact)


FRESH_BUGS = {
    "first visits add": ("turn, next_turn, begins)", "turn, next_turn, 0)"),
    "no block is cleared": ("    if earlier:\n        return ()", "    return ()"),
    "blocks at borders are written": ("        fresh[number] = 0\n", "        pass\n"),
    "repeated visits have the turn of the first one": ("number + repeat * len(order)", "number"),
}


@pytest.mark.parametrize("bug", FRESH_BUGS)
def test_emulation_finds_bug_of_fresh_gradients(bug, tmp_path, monkeypatch):
    """Each first visit of a block of dQ writes it, unless the block is cleared before."""
    use_planted(ordered_tables, *FRESH_BUGS[bug], tmp_path, monkeypatch)
    hopper_cases.new_kernel(monkeypatch)  # the other one keeps launches
    masks = (("documents:0,333,700", 96, 700), (SHORT_DOCUMENTS, 96, 300))

    def work():
        for mask, dim, length in masks:
            made, exact = ordered_gradients(mask, dim, True, length=length)
            check_equal_and_exact([made], exact)

    assert finds_bug(work, EmulatedKernels, monkeypatch)


def test_emulated_backward_without_order_varies(monkeypatch):
    """The orders of the machine are enough to show a missing wait of the deterministic backward."""
    found, _ = gradients_in_orders("full", 128, False, monkeypatch, deterministic=False)
    assert not all(torch.equal(made[0], found[0][0]) for made in found)


@pytest.mark.parametrize("single_call", [True, full(False)])
def test_emulated_large_heads_divided_by_query_head(single_call, machine, monkeypatch):
    monkeypatch.setattr(cuts, "SPLIT_LATE", 1e9)
    monkeypatch.setattr(cuts, "SPLIT_PREDICTED", 0)
    found, exact = gradients_in_orders("causal", 192, single_call, monkeypatch, deterministic=False)
    for made in found:
        assert all(gap(x - 0.25, y - 0.25) < 1e-2 for x, y in zip(made, exact, strict=True))


@pytest.mark.parametrize("mask", [full(mask) if i % 2 else mask for i, mask in enumerate(MASKS)])
def test_emulated_masks_in_tall_blocks(mask, machine, monkeypatch):
    use_tall_blocks(monkeypatch)
    compare_forward(*inputs(1, 301, 2, 1, 64), tiles_of(mask, 301))


@pytest.mark.parametrize("machine", ORDERS, ids=["late", "mixed", "early"], indirect=True)
def test_emulated_documents_in_tall_blocks(machine, monkeypatch):
    use_tall_blocks(monkeypatch)
    compare_forward(*inputs(1, 1000, 1, 1, 64), tiles_of("documents:0,90,890,950", 1000))


@pytest.mark.full
@pytest.mark.parametrize("machine", ORDERS, ids=["late", "mixed", "early"], indirect=True)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
def test_emulated_longer_masks(mask, dim, machine):
    compare(*inputs(2, 900, 4, 2, dim), tiles_of(mask, 900))


# The remaining pairs of orders and head sizes differ from test_emulated_masks in groups and dtypes only.
@pytest.mark.parametrize(
    ("machine", "dim"),
    [
        pytest.param(
            order,
            dim,
            marks=[] if (name, dim) == ("mixed", 64) else pytest.mark.full,
            id=f"{name}-{dim}",
        )
        for name, order in zip(("late", "mixed", "early"), ORDERS, strict=True)
        for dim in (64, 128)
    ],
    indirect=["machine"],
)
def test_emulated_head_groups_and_dtypes(dim, machine):
    for dtype, heads, length in (
        (torch.float16, (3, 1), 129),
        (torch.bfloat16, (2, 2), 257),
        (torch.bfloat16, (1, 1), 1),
    ):
        compare(*inputs(2, length, heads[0], heads[1], dim, dtype), tiles_of("causal", length))


@pytest.mark.parametrize("dim", [64, full(128)])
def test_emulated_different_query_and_key_lengths(dim, machine):
    q, (k, v, _) = randn(1, 233, 2, dim), inputs(1, 511, 1, 1, dim)
    compare(q, k, v, Tiles([Tile(5, 200, 17, 500, -2000, 2000)]))
    compare(q, k, v, Tiles([Tile(0, 10, 400, 511, -2000, 2000), Tile(100, 233, 0, 77, 100, 300)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_emulated_smallest_scale(dtype, machine):
    """bfloat16 weights include the scale and LSE is divided by it: below 1e-36 gradients are 0."""
    options = settings(LEAST_SCALE, deterministic=False)
    assert options.positive_scale
    assert not replace(options, scale=0.9 * LEAST_SCALE).positive_scale
    q, k, v = inputs(1, 200, 1, 1, 64, dtype)
    dout, tiles = randn(1, 200, 1, 64, dtype=dtype, seed=7), tiles_of("causal", 200)
    out, lse = ORACLE.attend(*wide(q, k, v), tiles, options)
    exact = tuple(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    ORACLE.attend_backward(BackwardInputs(*wide(dout, q, k, v), lse, out=out), tiles, options, into=exact)
    into = tuple(torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    KERNEL.attend_backward(BackwardInputs(dout, q, k, v, lse.float(), out=out.to(dtype)), tiles, options, into=into)
    for found, right, times in zip(into, exact, (LEAST_SCALE, LEAST_SCALE, 1.0), strict=True):
        assert gap(found.double() / times, right / times) < TOLERANCE[dtype][2]


@pytest.mark.parametrize("dim", [64, full(128)])
def test_emulated_long_boxes_start_at_different_blocks(dim, machine, monkeypatch):
    use_small_l2(monkeypatch)
    q, k, v = (randn(1, n, h, dim, seed=i) for i, (n, h) in enumerate(((300, 2), (901, 1), (901, 1))))
    compare_forward(q, k, v, Tiles([Tile(0, 300, 0, 901, -901, 300)]))
    compare_forward(q, k, v, Tiles([Tile(0, 200, 0, 768, -901, 300), Tile(200, 300, 100, 901, -800, 100)]))


@pytest.mark.parametrize(
    ("machine", "room", "programs"),
    [
        pytest.param(
            order, room, programs, marks=[] if i == j == 1 else pytest.mark.full, id=f"{name}-{room}-{programs}"
        )
        for i, (name, order) in enumerate(zip(("late", "mixed", "early"), ORDERS, strict=True))
        for j, (room, programs) in enumerate([(1, 15), (3, 8), (1 << 20, 3)])
    ],
    indirect=["machine"],
)
def test_emulated_yielding_programs(room, programs, machine, monkeypatch):
    use_yielding_programs(monkeypatch, room)
    q, k, v = inputs(1, 600, 3, 1, 64)  # 15 items, with key blocks of 45 rows or half as many
    tiles = tiles_of("causal", 600)
    launched = build_forward_launch(tiles, sizes_of(q, k, v), q.device, every_block=True, yields_to_comm=True)
    assert launched.grid == (programs, 1, 1)
    compare_yielding(q, k, v, tiles)


@pytest.mark.parametrize("dim", [64, full(128)])
def test_emulated_inputs_without_tma_alignment(dim, machine):
    compare_unaligned(*inputs(2, 129, 2, 1, dim), randn(2, 129, 2, dim, seed=7), tiles_of("causal", 129))


@pytest.mark.parametrize(("machine", "dim"), every_second(ORDERS, [64, 128]), indirect=["machine"])
def test_emulated_merge_of_rows(dim, machine):
    compare_merged_rows(dim, "cpu")


@pytest.mark.parametrize("dim", [64, 128])
def test_emulated_state_is_merged_in_place(dim, machine):
    length, options = 500, settings(scale=0.1)
    q, k, v = inputs(1, length, 2, 1, dim)
    tiles = tiles_of("causal", length)
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    state = fresh_state(q)
    for start, stop in ((400, 500), (0, 150), (150, 400)):
        part = [t.clipped(0, length, start, stop) for t in tiles]
        local = Tiles(t.shifted(0, -start) for t in part if t is not None)
        KERNEL.attend(q, k[:, start:stop], v[:, start:stop], local, options, state=state)
    assert gap(state[0], exact[0]) < TOLERANCE[q.dtype][0]
    assert gap(state[1], exact[1]) < TOLERANCE[q.dtype][1]


@pytest.mark.parametrize(
    ("mask", "dim"),
    [("documents:0,90,690,770", 64), full("documents:0,90,690,770", 128), full("full_documents:0,77,647,770", 128)],
)
def test_emulated_documents_at_block_boundaries(mask, dim, machine):
    """A partial block writes neither results nor state in the rows of the next document."""
    q, k, v = inputs(1, 770, 2, 1, dim)
    tiles, options = tiles_of(mask, 770), settings(scale=dim**-0.5, deterministic=False)
    compare(q, k, v, tiles)
    out, lse = KERNEL.attend(q, k, v, tiles, options, state=fresh_state(q))
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    assert gap(out, exact[0]) < TOLERANCE[q.dtype][0]
    assert gap(lse, exact[1]) < TOLERANCE[q.dtype][1]


@pytest.mark.parametrize(
    ("mask", "dim"), [("causal", 64), full("causal", 128), full("documents:0,100,357,600", 128), full("sink:4:150", 64)]
)
def test_emulated_backward_one_program_per_kv_head(mask, dim, machine, monkeypatch):
    """Uses the blocks of a call with many programs. With few programs, these blocks would delay the last program."""
    use_one_program_per_kv_head(monkeypatch)
    q, k, v = inputs(2, 301, 3, 1, dim)
    compare_backward(q, k, v, tiles_of(mask, 301))


def second_launch_inputs(monkeypatch, batch, heads, kv_heads, dim, tiles, apart):
    """Return inputs of 1030 rows, few enough for the emulator. Assert that a second launch computes the keys `apart`.

    `attend_backward` has no such launch, so `compare_whole` covers all of it.
    """
    split_long_blocks(monkeypatch)
    q, k, v = inputs(batch, 1030, heads, kv_heads, dim)
    assert second_launch_keys(q, k, v, tiles) == apart
    return q, k, v, tiles


@pytest.mark.parametrize(("machine", "dim"), every_second(ORDERS, [64, 128], start=1), indirect=["machine"])
def test_emulated_sink_gradients_in_second_launch(dim, machine, monkeypatch):
    """The first launch writes all other gradients; elements that no launch writes would be NaN."""
    compare_whole(*second_launch_inputs(monkeypatch, 1, 1, 1, dim, tiles_of("sink:5:60", 1030), (0, 5)))


@pytest.mark.parametrize("dim", [64, full(128)])
def test_emulated_sink_gradients_with_few_kv_heads(dim, machine, monkeypatch):
    compare_whole(*second_launch_inputs(monkeypatch, 2, 2, 1, dim, tiles_of("sink:5:30", 1030), (0, 5)))


@pytest.mark.parametrize(("first", "last", "apart"), [(300, 310, (256, 310)), full(1025, 1029, (1024, 1030))])
def test_emulated_gradients_of_keys_seen_by_all_queries(first, last, apart, machine, monkeypatch):
    compare_backward(*second_launch_inputs(monkeypatch, 1, 1, 1, 128, tiles_with_long_block(first, last), apart))


FORWARD_BUGS = {
    "the first key slot is free before the product has read it": (
        "    s = warpgroup_mma_wait(0, deps=[s])\n    mbarrier.arrive(k_emp.index(slot), count=1)\n",
        "    mbarrier.arrive(k_emp.index(slot), count=1)\n    s = warpgroup_mma_wait(0, deps=[s])\n",
    ),
    "a value slot is free before the product has read it": (
        "    o, p16, p = warpgroup_mma_wait(0, deps=[ot, p16, p])\n    mbarrier.arrive(v_emp.index(slot), count=1)\n",
        "    mbarrier.arrive(v_emp.index(slot))\n        o, p16, p = warpgroup_mma_wait(0, deps=[ot, p16, p])\n",
    ),
    "a value slot is never free": ("    mbarrier.arrive(v_emp.index(slot), count=1)\n    p16", "    p16"),
    "values are not waited for": ("    mbarrier.wait(v_rdy.index(slot), (it // NS) & 1)\n    ot", "    ot"),
    "keys of the block before": ("mbarrier.wait(k_rdy.index(nslot), ((it + 1) // NS) & 1)", "pass"),
    "the scores are not waited for": ("    s = warpgroup_mma_wait(2 if VB else 1, deps=[s])\n", ""),
    "queries are not waited for": ("    mbarrier.wait(q_rdy, turn & 1)\n", ""),
    "queries of the next item too early": ("        mbarrier.wait(q_emp, (turn & 1) ^ 1)\n", ""),
    "the result is stored without a fence": ("fence_async_shared()\n", "pass\n"),
    "the next item's result over the one that TMA still reads": (
        "        tma.store_wait(0)\n        if MODE",
        "        if MODE",
    ),
    "the end does not wait for the last store": ("        turn += 1\n    tma.store_wait(0)\n", "        turn += 1\n"),
    "the next item's number is not handed on": ("    mbarrier.arrive(t_rdy.index(turn & 1), count=1)\n", ""),
}  # fmt: skip
MERGE_BUGS = {
    "the running result too early": ("mbarrier.wait(o_emp, (turn & 1) ^ 1)", "pass"),
    "the running result is not waited for": ("            mbarrier.wait(o_rdy, turn & 1)\n", ""),
}
BACKWARD_BUGS = {
    "dS without a fence": ("    fence_async_shared()\n    mbarrier.arrive(ds_rdy", "    mbarrier.arrive(ds_rdy"),
    "dS of the other worker is not waited for": ("    mbarrier.wait(ds_rdy.index(pair), (it // 2) & 1)\n", ""),
    "a query slot is free before dK has read it": (
        "    dk, ds = warpgroup_mma_wait(0, deps=[dkt, ds])\n    mbarrier.arrive(q_emp.index(slot), count=1)\n",
        "    mbarrier.arrive(q_emp.index(slot), count=1)\n        dk, ds = warpgroup_mma_wait(0, deps=[dkt, ds])\n",
    ),
    "dV over a product too many": ("warpgroup_mma_wait(2, deps=[dvt, p16])", "warpgroup_mma_wait(3, deps=[dvt, p16])"),
    "dQ a product too early": ("warpgroup_mma_wait(2 if B else 1, deps=[dq])", "warpgroup_mma_wait(2, deps=[dq])"),
    "dS with its queries in order": (", [BM, 64], ds_rows).permute", ", [BM, 64], None).permute"),
    "dQ with its rows as they come": (", [64, 64], dq_rows).store", ", [64, 64], None).store"),
    "dQ over one that TMA still reads": ("    mbarrier.wait(dq_emp.index(WG), (it & 1) ^ 1)\n", ""),
    "dQ without a fence": ("    fence_async_shared()\n    mbarrier.arrive(dq_rdy", "    mbarrier.arrive(dq_rdy"),
    "dQ is not waited for": ("        mbarrier.wait(dq_rdy.index(2 * (it % SETS) + w), (it // SETS) & 1)\n", ""),
    "dQ's buffer is free before TMA has read it": ("    tma.store_wait(0)\n    for w in", "    for w in"),
    "row terms are not waited for": ("    mbarrier.wait(do_rdy.index(slot), phase)\n", ""),
    "keys are not waited for": ("    mbarrier.wait(kv_rdy, 0)\n", ""),
    "staging over what the other worker still reads": ("    mbarrier.wait(done, 0)\n", ""),
    "the end does not wait for what it adds": ("    tma.store_wait(0)\n\n\n# No argument", "\n\n# No argument"),
}  # fmt: skip


def plant(module, change, folder):
    """Load the module with one text replaced."""
    text = Path(module.__file__).read_text()
    assert text.count(change[0]) >= 1, change[0]
    path = folder / f"planted_{Path(module.__file__).name}"
    path.write_text(text.replace(*change))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    made = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = made  # dataclasses look up their module there
    try:
        spec.loader.exec_module(made)
    finally:
        del sys.modules[path.stem]
    return made


def use_planted(source, text, replaced, folder, monkeypatch):
    """Use the module with one text replaced in backward passes."""
    module = plant(source, (text, replaced), folder)
    if source is ordered_tables:
        for name in ("ordered_table", "divided_table"):
            monkeypatch.setattr(cuts, name, getattr(module, name))
    elif source is cuts:
        monkeypatch.setattr(prepared_launches, "writing_cuts", module.writing_cuts)
    elif source is backward_launches:
        for name in ("compiled_kernels", "current_stream"):  # the emulated versions
            monkeypatch.setattr(module, name, getattr(kernel, name))
        for name in ("keys_of", "run_separate_launch"):
            monkeypatch.setattr(kernel, name, getattr(module, name))
    else:
        for name in ("compiled_kernels", "current_stream", "on"):  # the emulated versions
            monkeypatch.setattr(module, name, getattr(kernel, name))
        monkeypatch.setattr(hopper_cases, "KERNEL", module.HopperKernel())


def finds_bug(work, kernels_on, monkeypatch):
    """Return whether some order of events shows an error."""
    for seed, (_, eager) in itertools.product(range(8), ORDERS):
        emulate(monkeypatch, kernels_on(Machine(seed, eager)))
        try:
            work()
        except AssertionError:
            return True
    return False


def forward(merge):
    q, k, v = inputs(1, 600, 3, 1, 64)
    tiles, options = tiles_of("causal", 600), settings(scale=0.125)
    out, lse = KERNEL.attend(q, k, v, tiles, options, state=fresh_state(q) if merge else None)
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    assert gap(out, exact[0]) < 6e-3
    assert gap(lse, exact[1]) < 2e-5


WAY_BUGS = {
    "each program begins at its own number": ("_program() * gl.maximum(turns, 1)", "_program()"),
    "a program does one item too many": ("(t + 1) % turns == 0", "t % turns == 0"),
    "a program does not go on": ("items, t + 1)", "items, items)"),
}


@pytest.mark.parametrize("bug", WAY_BUGS)
def test_emulation_finds_bug_of_yielding_programs(bug, tmp_path, monkeypatch):
    module = plant(hopper_forward, WAY_BUGS[bug], tmp_path)
    use_yielding_programs(monkeypatch, 3)
    q, k, v = inputs(1, 600, 3, 1, 64)
    work = functools.partial(compare_yielding, q, k, v, tiles_of("causal", 600))
    assert finds_bug(work, lambda machine: EmulatedKernels(machine, forward=module), monkeypatch)


@pytest.mark.parametrize("bug", [*FORWARD_BUGS, *MERGE_BUGS])
def test_emulation_finds_bug_of_forward(bug, tmp_path, monkeypatch):
    module = plant(hopper_forward, {**FORWARD_BUGS, **MERGE_BUGS}[bug], tmp_path)
    work = functools.partial(forward, merge=bug in MERGE_BUGS)
    assert finds_bug(work, lambda machine: EmulatedKernels(machine, forward=module), monkeypatch)


@pytest.mark.parametrize("bug", BACKWARD_BUGS)
def test_emulation_finds_bug_of_backward(bug, tmp_path, monkeypatch):
    module = plant(backward, BACKWARD_BUGS[bug], tmp_path)
    q, k, v = inputs(1, 600, 1, 1, 64)
    work = functools.partial(compare_backward, q, k, v, tiles_of("causal", 600))
    assert finds_bug(work, lambda machine: EmulatedKernels(machine, backward=module), monkeypatch)


SPLIT_BUGS = {
    "a streamed slot is free before the sum has read it": (
        "    mbarrier.arrive(x_emp.index(xs), count=1)\n    return acc, acc2\n",
        "    return acc, acc2\n",
    ),
    "values are free before dP has read them": (
        "    dp = warpgroup_mma_wait(0, deps=[dp])\n    mbarrier.arrive(y_emp.index(ys), count=1)\n",
        "    mbarrier.arrive(y_emp.index(ys), count=1)\n    dp = warpgroup_mma_wait(0, deps=[dp])\n",
    ),
    "S a product too early": ("mma_wait(2 if VB else 1, deps=[s])", "mma_wait(3, deps=[s])"),
    "streamed rows are not waited for": ("    mbarrier.wait(x_rdy.index(xs), (it // NX) & 1)\n", ""),
    "dO is not waited for": ("        mbarrier.wait(y_rdy.index(ys), (it // NY) & 1)\n", ""),
    "own rows are not waited for": ("    mbarrier.wait(own_rdy, 0)\n", ""),
    "stored without a fence": ("            fence_async_shared()\n", ""),
    "the end does not wait for what it stores": ("    tma.store_wait(0)\n\n\n# No argument", "\n\n# No argument"),
    "the second panel is not summed": ("        acc, acc2, ds = warp", "        acc, _, ds = warp"),
    "rows of the next document are written as well": ("if (stop - row >= 64) | (stop == length):", "if stop > row:"),
    "columns of the second panel over the first": ("out_ss, out_sh, OA, OD, STORE)", "out_ss, out_sh, 0, OD, STORE)"),
}  # fmt: skip

# These take the most orders of events to show, and the emulator's checks that find them find other bugs too.
SLOW_BUGS = {
    "values are free before dP has read them", "dO is not waited for", "own rows are not waited for",
    "stored without a fence", "the end does not wait for what it stores",
    "rows of the next document are written as well",
}  # fmt: skip


@pytest.mark.parametrize("bug", [full(bug) if bug in SLOW_BUGS else bug for bug in SPLIT_BUGS])
def test_emulation_finds_bug_of_split_backward(bug, tmp_path, monkeypatch):
    module = plant(hopper_split_backward, SPLIT_BUGS[bug], tmp_path)
    q, k, v = inputs(1, 770, 1, 1, 256)
    work = functools.partial(compare_backward, q, k, v, tiles_of("full_documents:0,90,690,770", 770))
    assert finds_bug(work, lambda machine: EmulatedKernels(machine, split_backward=module), monkeypatch)


LARGE_FORWARD_BUGS = {
    "the next item's queries over a result that TMA still reads": (
        "            tma.store_wait(0)\n            mbarrier.arrive(q_emp, count=1)\n",
        "            mbarrier.arrive(q_emp, count=1)\n",
    ),
    "scores a product too early": ("warpgroup_mma_wait(2 if VB else 1, deps=[s])", "warpgroup_mma_wait(3, deps=[s])"),
    "the second panel is not scaled down": ("        o2 = rescale(o2, fade)\n", "        o2 = o2\n"),
    "no second panel of scores": ("s = warpgroup_mma(q2, k2", "warpgroup_mma(q2, k2"),
}  # fmt: skip


@pytest.mark.parametrize("bug", LARGE_FORWARD_BUGS)
def test_emulation_finds_bug_of_forward_of_large_heads(bug, tmp_path, monkeypatch):
    module = plant(hopper_forward, LARGE_FORWARD_BUGS[bug], tmp_path)
    q, k, v = inputs(1, 600, 3, 1, 160)
    k *= torch.arange(600)[:, None, None] / 100  # maxima grow from block to block
    tiles, options = tiles_of("causal", 600), settings(scale=0.125)
    exact, _ = ORACLE.attend(*wide(q, k, v), tiles, options)

    def work():
        out, _ = KERNEL.attend(q, k, v, tiles, options, out_dtype=q.dtype)
        assert gap(out, exact) < 9e-3

    assert finds_bug(work, lambda machine: EmulatedKernels(machine, forward=module), monkeypatch)


SHORT_BUGS = {
    "rows of the next document are written as well": ("if (stop - row >= 64) | (stop == out_rows):", "if stop > row:"),
    "a row too many": ("mask=(rows < stop)[:, None]", "mask=(rows <= stop)[:, None]"),
}


@pytest.mark.parametrize("bug", SHORT_BUGS)
def test_emulation_finds_bug_of_partial_blocks(bug, tmp_path, monkeypatch):
    module = plant(backward, SHORT_BUGS[bug], tmp_path)
    q, k, v = inputs(1, 770, 1, 1, 64)
    work = functools.partial(compare_backward, q, k, v, tiles_of("documents:0,90,690,770", 770))
    assert finds_bug(work, lambda machine: EmulatedKernels(machine, backward=module), monkeypatch)


SECOND_LAUNCH_BUGS = {
    "sums that nobody casts": (
        kernel,
        "_foreach_copy_((dk[:, keys], dv[:, keys]), sums)",
        "_foreach_copy_((dk[:, keys],), sums[:1])",
    ),
    "the first keys in the place of those of the launch": (
        backward_launches,
        "k=x.k[:, keys],",
        "k=x.k[:, : keys.stop - keys.start],",
    ),
    "sums that begin with anything": (kernel, "sums = [torch.zeros(", "sums = [torch.empty("),
    "keys before them in no launch": (cuts, "_of_keys(tiles, 0, start)", "_of_keys(tiles, 0, 0)"),
    "keys behind them in no launch": (cuts, "_of_keys(tiles, stop, n_keys)", "_of_keys(tiles, stop, stop)"),
    "queries counted from the keys' start too": (cuts, "shifted(0, -start)", "shifted(-start, -start)"),
    "keys counted from the first of all": (cuts, "tile.shifted(0, -start) for tile", "tile for tile"),
}  # fmt: skip


@pytest.mark.parametrize("bug", SECOND_LAUNCH_BUGS)
def test_emulation_finds_bug_of_second_launch(bug, tmp_path, machine, monkeypatch):
    use_planted(*SECOND_LAUNCH_BUGS[bug], tmp_path, monkeypatch)
    given = second_launch_inputs(monkeypatch, 1, 1, 1, 128, tiles_with_long_block(300, 310), (256, 310))
    with pytest.raises(AssertionError):
        compare_whole(*given)
