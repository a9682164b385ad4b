"""Compare the Hopper kernel, on a device or on the emulator, with the float64 reference."""

from __future__ import annotations

import math

import torch

from burst_portable.backends.cuda.hopper import block_tables, cuts, outer_blocks
from burst_portable.backends.cuda.hopper.kernel import HopperKernel
from burst_portable.backends.cuda.hopper.prepared_launches import build_writing_launches, sizes_of
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.layout import Segment
from burst_portable.mask import Mask
from burst_portable.numerics import empty_state, finished, row_delta
from burst_portable.planning.tiles import Tiles, find_tiles, make_tile
from burst_portable.runtime.local_result import attend_first
from tests.support.calls import settings

KERNEL, ORACLE = HopperKernel(), ReferenceKernel()
# (out, LSE, gradients): relative Frobenius error, of which bf16 attention itself has about 2e-3 to 4e-3.
TOLERANCE = {torch.bfloat16: (6e-3, 2e-5, 1e-2), torch.float16: (1e-3, 2e-5, 2e-3)}
MASKS = [
    "full", "causal", "window:200", "window:300:100", "documents:0,100,357,600", "full_documents:0,300,301,600",
    "prefix:130", "sink:4:150", "global:70:100:100", "block_causal:96", "share_question:100,200,150,150",
]  # fmt: skip


def tiles_of(text: str, length: int) -> Tiles:
    whole = (Segment(0, length),)
    return find_tiles(Mask.parse(text, length), whole, whole)


def randn(*shape, device, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator(device).manual_seed(100_000 * seed + sum(shape))
    return torch.randn(shape, device=device, generator=generator).to(dtype)


def wide(*tensors):
    return tuple(x.double() for x in tensors)


def fresh_state(q, v=None):
    return finished(empty_state(q, (q if v is None else v).shape[-1]), q.dtype)


def options_for(q, softcap=None):
    """Return settings of a call with the usual scale that needs no deterministic backward."""
    return settings(scale=1 / math.sqrt(q.shape[-1]), softcap=softcap, deterministic=False)


def new_kernel(monkeypatch):
    """Compare a kernel that has no launch tables yet, because tables depend on the settings that a test changes."""
    monkeypatch.setattr(f"{__name__}.KERNEL", type(KERNEL)())


def use_tall_blocks(monkeypatch):
    """Use the blocks of long rows in forward passes at head size 64, however short the rows are."""
    monkeypatch.setattr(cuts, "TALL_BLOCKS", 0)
    monkeypatch.setattr(cuts, "TALL_ITEMS", 0)
    new_kernel(monkeypatch)


def use_one_program_per_kv_head(monkeypatch):
    """Use the backward blocks of a call with many programs, however few there are."""
    monkeypatch.setattr(cuts, "LATE", 0)
    new_kernel(monkeypatch)


def add_by_query_head(monkeypatch):
    """Let each query head add to dK and dV in a single call too, however little work there is."""
    monkeypatch.setattr(cuts, "HOST", 0)
    monkeypatch.setattr(cuts, "ADDING_LAUNCH", -1e9)
    new_kernel(monkeypatch)


def divide_by_query_head(monkeypatch):
    """Let each query head have its own programs in ordered backward passes, however few there are."""
    monkeypatch.setattr(cuts, "SEPARATE_LAUNCH", -1e9)
    new_kernel(monkeypatch)


def split_long_blocks(monkeypatch):
    """Compute long key blocks in a second launch, however short the sequence is."""
    monkeypatch.setattr(outer_blocks, "SHORT", 0)
    new_kernel(monkeypatch)


def divide_ordered_long_blocks(monkeypatch):
    """Divide long key blocks of ordered backward passes into parts of four query blocks, however few there are."""
    monkeypatch.setattr(cuts, "SPLIT_LATE", 1e9)
    monkeypatch.setattr(outer_blocks, "part_length", lambda *_: 4)
    split_long_blocks(monkeypatch)


def use_small_l2(monkeypatch):
    """Make programs start at different blocks of boxes of four key blocks, as if these exceeded the L2 cache."""
    monkeypatch.setattr(block_tables, "ABREAST", 2)
    monkeypatch.setattr(cuts, "blocks_per_mebibyte", lambda keys, dim: 1)
    new_kernel(monkeypatch)


def use_yielding_programs(monkeypatch, room):
    """Let yielding programs end after about `room` key blocks of heads of 128."""
    monkeypatch.setattr(cuts, "ROOM", room)
    new_kernel(monkeypatch)


def compare_gradients_in_place(q, k, v, dout, tiles):
    """Check that gradients are added to parts of larger buffers of any strides, and to nothing else."""
    options = options_for(q)
    given = _given_to_backward(q, k, v, tiles, options, 0, dout)
    buffers, parts = [], []
    for x in (q, k, v):
        batch, rows, heads, dim = x.shape
        buffers.append(torch.full((heads + 2, batch, rows + 3, dim), 0.25, device=x.device))
        parts.append(buffers[-1][1:-1, :, 2:-1].permute(1, 2, 0, 3))
    KERNEL.attend_backward(
        BackwardInputs(dout, q, k, v, given[2].float(), given[1].float()), tiles, options, into=parts
    )
    for name, buffer, part, good in zip("qkv", buffers, parts, given[3], strict=True):
        assert gap(part - 0.25, good) < TOLERANCE[q.dtype][2], f"d{name}"
        part.fill_(0.25)
        assert (buffer == 0.25).all(), f"written beside d{name}"


def tiles_with_long_block(first, last):
    """Return tiles in which the first 900 queries see keys [first, last) of 1030, and a window."""
    boxes = ((0, first, 0, 60), (first, last, -2000, 2000), (last, 1030, 0, 60))
    tiles = (make_tile(0, 900, *box) for box in boxes)
    return Tiles(tile for tile in tiles if tile is not None)


def second_launch_keys(q, k, v, tiles):
    """Return the keys [start, stop) that a second launch of `gradients` computes, or None."""
    found = [launch.cut for launch in build_writing_launches(tiles, sizes_of(q, k, v), q.device, ordered=False)]
    return found[1].keys if len(found) > 1 else None


def compare_forward(q, k, v, tiles, *, softcap=None):
    """Compare a forward pass, with and without an empty state, with float64."""
    options = options_for(q, softcap)
    exact = ORACLE.attend(*wide(q, k, v), tiles, options)
    seen = exact[1] > -torch.inf
    for state in (None, fresh_state(q, v)):
        out, lse = KERNEL.attend(q, k, v, tiles, options, state=state)
        assert gap(out, exact[0]) < TOLERANCE[q.dtype][0]
        assert gap(lse[seen], exact[1][seen]) < TOLERANCE[q.dtype][1]
        assert (lse[~seen] == -torch.inf).all()


def compare_yielding(q, k, v, tiles):
    """Check that yielding programs give bitwise equal results, with and without a state."""
    options = settings(scale=1 / math.sqrt(q.shape[-1]))
    for state in (lambda: None, lambda: KERNEL.attend(q, k, v, tiles, options)):
        stays = KERNEL.attend(q, k, v, tiles, options, state=state())
        yielding = KERNEL.attend(q, k, v, tiles, options, state=state(), yields_to_comm=True)
        assert all(map(torch.equal, stays, yielding))


def compare_unaligned(q, k, v, dout, tiles):
    """Compare inputs that TMA cannot address: odd strides, an odd offset, one batch entry for all.

    Then write two results into the same tensor. A descriptor of the copies of the first call would be wrong.
    """

    def odd_steps(x):
        wide = torch.full((*x.shape[:3], x.shape[3] + 1), torch.nan, device=x.device, dtype=x.dtype)
        wide[..., :-1] = x
        return wide[..., :-1]

    def odd_beginning(x):
        flat = torch.full((x.numel() + 1,), torch.nan, device=x.device, dtype=x.dtype)
        flat[1:] = x.flatten()
        return flat[1:].view(x.shape)

    def one_for_all(x):
        return x[:1].expand_as(x)

    ways = (odd_steps, odd_beginning, one_for_all)
    for turn in range(len(ways)):
        *inputs, gradient = (ways[(i + turn) % len(ways)](x) for i, x in enumerate((q, k, v, dout)))
        compare_forward(*inputs, tiles)
        compare_backward(*inputs, tiles, dout=gradient)
        options = settings(scale=1 / math.sqrt(q.shape[-1]))
        batch, rows, heads, _ = q.shape
        out, lse = q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty(batch, heads, rows, dtype=torch.float32)
        for _ in range(2):
            KERNEL.attend_into(*inputs, tiles, options, out, lse)
            expected = KERNEL.attend(*(x.contiguous() for x in inputs), tiles, options, out_dtype=q.dtype)
            assert torch.equal(out, expected[0])
            assert torch.equal(lse, expected[1])
            for x in inputs:
                x[:1].neg_()  # of `one_for_all`, all batch rows


def gap(x, exact):
    """Return the relative Frobenius error, or half of the relative largest error if that is more.

    Where the exact result is nearly 0 (one key per row), both are relative to the floors.
    """
    assert not torch.isnan(x).any()
    difference, size = x.double() - exact, exact.numel()
    if not size:
        return 0.0
    norm = (difference.norm() / exact.norm().clamp(min=0.01 * size**0.5)).item()
    return max(norm, (difference.abs().max() / exact.abs().max().clamp(min=0.01)).item() / 2)


def compare(q, k, v, tiles, *, seed=0, softcap=None):
    """Compare forward, backward with delta, and backward with out, with float64."""
    tolerance = TOLERANCE[q.dtype]
    options = options_for(q, softcap)
    out, lse = KERNEL.attend(q, k, v, tiles, options)
    exact_out, exact_lse = ORACLE.attend(*wide(q, k, v), tiles, options)
    assert out.dtype == lse.dtype == torch.float32
    seen = exact_lse > -torch.inf
    assert (lse[~seen] == -torch.inf).all()
    assert (out.transpose(1, 2)[~seen] == 0).all()
    assert gap(out, exact_out) < tolerance[0]
    assert gap(lse[seen], exact_lse[seen]) < tolerance[1]
    narrow, narrow_lse = KERNEL.attend(q, k, v, tiles, options, out_dtype=q.dtype)
    assert narrow.dtype == q.dtype
    assert gap(narrow, exact_out) < 1.5 * tolerance[0]
    assert torch.equal(lse, narrow_lse)
    compare_backward(q, k, v, tiles, seed=seed, softcap=softcap)


def compare_merged_rows(dim, device, value_dim=None):
    """Check that the first step writes complete rows in 16 bits and the second merges the remaining rows."""
    length, others, options = 300, 90, settings(scale=0.1)
    sizes = ((length, 2, dim), (length + others, 1, dim), (length + others, 1, value_dim or dim))
    q, k, v = (randn(2, *size, device=device, seed=i) for i, size in enumerate(sizes))
    first, second = tiles_of("window:150", length), Tiles([make_tile(140, 200, 0, others, -20, 190)])
    for merged in ((128, 256), (0, 256), (128, length)):
        out = torch.full((*q.shape[:3], v.shape[3]), torch.nan, device=device, dtype=q.dtype)
        state = attend_first(KERNEL, q, k[:, :length], v[:, :length], first, options, merged, out)
        state = KERNEL.attend(q, k[:, length:], v[:, length:], second, options, state=state)
        rows = slice(*merged)
        assert out[:, rows].isnan().all()
        out[:, rows] = state[0][:, rows].to(out.dtype)
        both = Tiles([*first, *(tile.shifted(0, length) for tile in second)])
        exact_out, exact_lse = ORACLE.attend(*wide(q, k, v), both, options)
        assert gap(out, exact_out) < 1.5 * TOLERANCE[q.dtype][0]
        assert gap(state[1], exact_lse) < TOLERANCE[q.dtype][1]


def compare_backward(q, k, v, tiles, *, seed=0, dout=None, softcap=None):
    """Compare backward with delta, with out, and in a single call."""
    options = options_for(q, softcap)
    given = _given_to_backward(q, k, v, tiles, options, seed, dout)
    dout, exact_out, exact_lse, exact = given
    delta = row_delta(dout.double(), exact_out)
    for way in ({"delta": delta.float()}, {"out": exact_out.to(q.dtype)}, {"out": exact_out.float()}):
        start = tuple(torch.full_like(x, 0.25, dtype=torch.float32) for x in (q, k, v))
        KERNEL.attend_backward(BackwardInputs(dout, q, k, v, exact_lse.float(), **way), tiles, options, into=start)
        for name, mine, good in zip("qkv", start, exact, strict=True):
            assert gap(mine - 0.25, good) < TOLERANCE[q.dtype][2], f"d{name} with {next(iter(way))}"
    _compare_whole(q, k, v, tiles, options, given)


def compare_whole(q, k, v, tiles, *, seed=0):
    """Compare the single-call gradients, which use other blocks than `attend_backward` and have 16 bits."""
    options = options_for(q)
    _compare_whole(q, k, v, tiles, options, _given_to_backward(q, k, v, tiles, options, seed, None), written=True)


def _given_to_backward(q, k, v, tiles, options, seed, dout):
    """Return dout, and out, LSE and the gradients in float64."""
    exact_out, exact_lse = ORACLE.attend(*wide(q, k, v), tiles, options)
    if dout is None:
        dout = randn(*exact_out.shape, device=q.device, dtype=q.dtype, seed=seed + 7)
    exact = tuple(torch.zeros_like(x, dtype=torch.float64) for x in (q, k, v))
    delta = row_delta(dout.double(), exact_out)
    ORACLE.attend_backward(BackwardInputs(*wide(dout, q, k, v), exact_lse, delta=delta), tiles, options, into=exact)
    return dout, exact_out, exact_lse, exact


def _compare_whole(q, k, v, tiles, options, given, *, written=False):
    dout, exact_out, exact_lse, exact = given
    made = KERNEL.backward_single_call(
        BackwardInputs(dout, q, k, v, exact_lse.float(), exact_out.to(q.dtype)), tiles, options
    )
    if written:
        assert KERNEL.traits.writes_gradients
        assert made[1].dtype is made[2].dtype is q.dtype
    for name, mine, good in zip("qkv", made, exact, strict=True):
        assert gap(mine, good) < 1.5 * TOLERANCE[q.dtype][2], f"d{name} of the whole"
