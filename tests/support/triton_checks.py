"""Define checks of the Triton kernels beyond `triton_cases`, in the interpreter and on a device.

A check takes a kernel and a device. Tests select a check by its name in `CHECKS`.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from burst_portable.kernels.base import BackwardInputs, Kernel
from burst_portable.layout import Segment, make_layout
from burst_portable.numerics import State, finished, merge_into, per_row, row_delta
from burst_portable.planning.tiles import Tile, Tiles, find_tiles
from tests.support.calls import settings
from tests.support.poison import fresh_memory_is_nan
from tests.support.triton_cases import Case, dense, inputs


def check_untouched(kernel: Kernel, device: str) -> None:
    """Check that a running state keeps each row outside of tiles, bitwise."""
    case = Case("documents:0,20,40", length=40)
    _, q, k, v = inputs(case, device)
    options = settings(0.25)
    whole = find_tiles(case.parsed, *[make_layout("contiguous", 40, 1).shards[0]] * 2)
    out, lse = kernel.attend(q, k, v, whole, options)
    before = out.clone(), lse.clone()
    one = Tiles([tile for tile in whole if tile.q_start == 20])
    assert len(one) == 1
    merged = kernel.attend(q, k, v, one, options, state=(out, lse))
    assert merged[0] is out
    assert merged[1] is lse
    assert torch.equal(out[:, :20], before[0][:, :20])
    assert torch.equal(lse[:, :, :20], before[1][:, :, :20])
    assert (lse[:, :, 20:] > before[1][:, :, 20:]).all()
    kernel.attend(q, k, v, Tiles(), options, state=(out, lse))
    out, lse = kernel.attend(q, k, v, Tiles(), options)
    assert not out.any()
    assert (lse == -torch.inf).all()


def check_unseen(kernel: Kernel, device: str) -> None:
    """Check that a single call writes 0 to rows and keys of blocks outside of tiles."""
    case = Case("full", length=400)
    dout, q, k, v = inputs(case, device)
    tiles, options, seen = Tiles([Tile(150, 160, 150, 160, 0, 9)]), settings(case.scale), slice(150, 160)
    with fresh_memory_is_nan():
        out, lse = kernel.forward_single_call(q, k, v, tiles, options)
        made = kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, options)
    for x in (out, *made):
        assert x[:, seen].any()
        assert not x[:, : seen.start].any()
        assert not x[:, seen.stop :].any()
    assert torch.isfinite(lse).sum() == 10 * lse.shape[1]


def check_delta(kernel: Kernel, device: str) -> None:
    """Check that the one-pass delta equals that of numerics."""
    dout, out = torch.randn(2, 70, 3, 40, device=device), torch.randn(2, 70, 3, 40, device=device)
    torch.testing.assert_close(kernel.row_delta(dout, out), row_delta(dout, out))


def check_flat(kernel: Kernel, device: str) -> None:
    """Check that merging many float32 blocks is as accurate as merging two."""
    case = Case("full", length=96, scale=0.7)
    _, q, k, v = full = inputs(case, device)
    rows = 16
    out, lse, *_ = dense(*full, case)
    exact, q = (out[:, :rows], lse[:, :, :rows]), q[:, :rows]

    def errors(blocks: int) -> list[float]:
        state, size = None, case.length // blocks
        everything = Tiles([Tile(0, rows, 0, size, -size, rows)])
        for keys, values in zip(k.split(size, 1), v.split(size, 1), strict=True):
            state = kernel.attend(q, keys, values, everything, settings(case.scale), state=state)
        merged = finished(state, case.dtype)
        return [float((x - y).norm() / y.norm()) for x, y in zip(merged, exact, strict=True)]

    few, many = errors(2), errors(32)
    assert all(b < 1.25 * a for a, b in zip(few, many, strict=True)), f"2 blocks: {few}; 32 blocks: {many}"


def check_far(kernel: Kernel, device: str, *, far_lse: bool = True) -> None:
    """Check reads and writes at offsets beyond 32 bits from the start of a tensor."""
    # A long tensor, and rows so long that one block of 128 (32 in the interpreter) spans as much.
    for stride in (1 << 16, 1 << 27 if device == "cpu" else 1 << 25):
        _check_far(kernel, device, stride, far_lse)


def _room(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """Return zeros. On a CPU, use memory that is only allocated when written, because few values are written."""
    if device != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    without_reserve = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | without_reserve
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype=dtype)


def _check_far(kernel: Kernel, device: str, stride: int, far_lse: bool) -> None:
    length, first, d = 64, (1 << 31) // stride, 64
    case = Case("causal", length, heads=1, head_dim=d, v_head_dim=d, dtype=torch.float16, scale=0.125)
    options = settings(case.scale, deterministic=False)
    rows = first + length
    rooms = {kind: _room(rows * stride, kind, device) for kind in (torch.float16, torch.float32)}

    def far(x: Tensor, at: int) -> Tensor:
        """Copy x to the last rows of a tensor. The tensors with different `at` share the memory of a row."""
        shape, steps = ((1, rows, 1, d), (stride, stride, d, 1)) if x.dim() == 4 else ((1, 1, rows), (1, 1, stride))
        made = rooms[x.dtype].as_strided(shape, steps, 2 * at * d)
        made[(slice(None), slice(first, None)) if x.dim() == 4 else (..., slice(first, None))] = x
        return made

    def run(given: list[Tensor], tiles: Tiles, state: State, into: list[Tensor]) -> tuple[Tensor, ...]:
        dout, q, k, v = given
        out, lse = kernel.attend(q, k, v, tiles, options, state=state)
        kernel.attend_backward(BackwardInputs(dout, q, k, v, lse, out=out), tiles, options, into=tuple(into))
        return out, lse, *into

    near = find_tiles(case.parsed, (Segment(0, length),), (Segment(0, length),))
    given = inputs(case, device)
    zeros = [torch.zeros(1, length, 1, d, device=device) for _ in range(4)]
    lse = torch.full((1, 1, length), -torch.inf, device=device)
    there = [far(x, i) for i, x in enumerate(given)], [far(x, i) for i, x in enumerate(zeros)]
    behind = far(lse, 4) if far_lse else torch.cat([lse.new_zeros(1, 1, first), lse], 2)
    shifted = Tiles(tile.shifted(first, first) for tile in near)
    got = run(there[0], shifted, (there[1][0], behind), there[1][1:])
    expected = run(given, near, (zeros[0], lse), zeros[1:])
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a[:, first:] if a.dim() == 4 else a[..., first:], b, rtol=1e-5, atol=1e-5)
        assert b.abs().sum() > 0


def check_merging(kernel: Kernel, device: str) -> None:
    """Check that the one-pass merge equals numerics in float64 and changes only rows of its state."""
    from burst_portable.kernels.triton.merging import OnePass

    merge, (batch, rows, heads, size) = OnePass(), (2, 70, 3, 40)
    memory = torch.full((batch, rows + 20, heads, size + 8), torch.nan, device=device)
    numbers = torch.full((batch, heads, rows + 20), torch.nan, dtype=torch.float64, device=device)
    total, total_lse = memory[:, 7 : 7 + rows, :, :size], numbers[:, :, 7 : 7 + rows]
    total.zero_(), total_lse.fill_(-torch.inf)
    exact = total.double(), total_lse.clone()
    for seed, height in enumerate((1.0, 30.0, 1e4)):
        generator = torch.Generator().manual_seed(seed)
        heads_first = torch.randn(batch, heads, rows, size, generator=generator).half().to(device)
        lse = (torch.randn(batch, heads, rows, generator=generator) * height).to(device)
        lse[:, 1, seed::4] = lse[:, 1, 3::4] = -torch.inf  # rows that some parts saw, and rows that no part saw
        out = heads_first.transpose(1, 2).masked_fill(per_row(lse == -torch.inf), 0.0)
        merge((total, total_lse), out, lse)
        merge_into(exact, out.double(), lse.double())
        torch.testing.assert_close(total.double(), exact[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(total_lse, exact[1], rtol=1e-12, atol=1e-12)
    assert (total_lse[:, 1, 3::4] == -torch.inf).all()
    assert not total[:, 3::4, 1].any()
    lse[0, 0, 5] = torch.nan
    merge((total, total_lse), out, lse)
    assert total_lse[0, 0, 5].isnan()
    assert total[0, 5, 0].isnan().all()
    assert int(total.isnan().sum()) == size, "a NaN stays in its row"
    assert memory[:, :7].isnan().all()
    assert memory[:, 7 + rows :].isnan().all()
    assert memory[..., size:].isnan().all()
    assert numbers[:, :, 7 + rows :].isnan().all()
    merge((total[:, :0], total_lse[:, :, :0]), out[:, :0], lse[:, :, :0])  # without rows, nothing is launched


def check_push(kernel: Kernel, device: str) -> None:
    """Check that a launch copies each line of each message and writes nothing else."""
    from burst_portable.backends.cuda.peers.push import AT_ONCE
    from burst_portable.backends.cuda.peers.push_kernel import push_kernel

    generator = torch.Generator().manual_seed(3)
    # Lines, their width, and their distances in source and target, in units of 16 bytes. A program copies 1024 units at
    # once.
    whole = [(1, width, 0, 0) for width in (0, 1, 1023, 1024, 1025, 5000)]
    apart = [(7, 1, 3, 2), (5, 3, 3, 9), (200, 16, 64, 48), (33, 200, 200, 201), (1, 40, 7, 7), (9, 5, 0, 5)]
    shapes = whole + apart + [(n, n + 1, 2 * n + 1, n + 2) for n in range(1, AT_ONCE - len(whole) - len(apart))]
    for some in (shapes, shapes[3:9]):
        rooms = [4 * (lines * (width + max(step, jump)) + 2) for lines, width, step, jump in some]
        sources = [torch.randint(1, 1 << 30, (n,), dtype=torch.int32, generator=generator).to(device) for n in rooms]
        targets = [torch.zeros_like(x) for x in sources]
        messages = [
            (source.data_ptr(), target.data_ptr(), lines * width, max(1, width), step, jump)
            for source, target, (lines, width, step, jump) in zip(sources, targets, some, strict=True)
        ]
        spare = [(0,) * 6] * (AT_ONCE - len(some))
        push_kernel[(3, len(some))]((*messages, *spare))
        for source, target, (lines, width, step, jump) in zip(sources, targets, some, strict=True):
            right = torch.zeros_like(target)
            right.as_strided((lines, 4 * width), (4 * jump, 1)).copy_(
                source.as_strided((lines, 4 * width), (4 * step, 1))
            )
            assert torch.equal(target, right)


CHECKS = {
    "untouched": check_untouched,
    "unseen": check_unseen,
    "delta": check_delta,
    "flat": check_flat,
    "far": check_far,
    "merging": check_merging,
    "push": check_push,
}
