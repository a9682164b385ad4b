"""What the Triton kernels are held to, wherever they run: in the interpreter and on a device.

A case is one attention over a whole sequence, computed as a ring would: every rank's queries meet every rank's
keys, forward into a running state, backward with the row's global LSE into float32 buffers. It is compared with
dense attention in float64, whose mask comes straight from the regions and knows neither layouts nor tiles.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from burst_portable.kernels.contract import Kernel, Options, writes_gradients
from burst_portable.kernels.whole import attend_whole, gradients
from burst_portable.layout import Layout, Segment
from burst_portable.layouts import make_layout
from burst_portable.mask import Mask
from burst_portable.numerics import State, finished, merge_into, per_row, row_delta
from burst_portable.tiles import Tile, Tiles, find_tiles
from tests.poison import fresh_memory_is_nan

# Relative error (Frobenius) against float64 on the same inputs. Plain attention with products in that dtype loses
# about 2e-7, 4e-4 and 3e-3 in `out`, and twice as much in the gradients.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """One attention. `poison`: NaN lies around every tensor, in memory that the kernel must not use."""

    mask: str
    length: int = 53
    layout: str = "contiguous"
    ranks: int = 1
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    scale: float = 0.25
    poison: bool = True
    deltas: bool = False

    def __str__(self) -> str:
        default = {name: field.default for name, field in type(self).__dataclass_fields__.items()}
        odd = [f"{n}={getattr(self, n)}" for n in default if n != "mask" and getattr(self, n) != default[n]]
        return "-".join([self.mask, *odd]).replace("torch.", "")

    @cached_property
    def parsed(self) -> Mask:
        return Mask.parse(self.mask, self.length)


def masks(length: int) -> list[str]:
    """Every form of mask, cut at uneven places."""
    a, b, c = length // 5 + 1, length // 2 + 1, length - length // 8
    return [
        "full",
        "causal",
        f"window:{length // 3}",
        f"window:{a}:{length // 4}",
        f"documents:0,{a},{b},{c},{length}",
        f"full_documents:0,{a},{b},{c},{length}",
        f"prefix:{b}",
        f"sink:3:{a}",
        f"global:5:{a}:4",
        f"block_causal:{a}",
        f"share_question:{a},{b - a},{c - b},{length - c}",
    ]


def layouts(mask: str) -> list[tuple[str, int]]:
    """(layout, ranks) that a mask is tried on."""
    chosen = [("contiguous", 1), ("contiguous", 2), ("zigzag", 2), ("striped", 2)]
    return [*chosen, ("document_zigzag", 2)] if "documents" in mask else chosen


SHAPES = [
    Case("causal", batch=2, heads=4, kv_heads=2),
    Case("causal", heads=3, kv_heads=3, head_dim=24, value_dim=40),
    Case("causal", head_dim=80, value_dim=16),
    Case("window:9", head_dim=128, value_dim=96, length=37),
    Case("causal", softcap=1.5),
    Case("sink:3:11", softcap=1.5, layout="zigzag", ranks=2, deltas=True),
    Case("causal", scale=-0.3),
    Case("causal", scale=0.0),
    Case("causal", length=64, poison=False),
    Case("full", length=1),
    Case("documents:0,1,2,40,53", layout="striped", ranks=4, deltas=True),
    Case("share_question:7,5,2,1,1,17,20", deltas=True),
]


def cases(length: int, dtype: torch.dtype, heads: int = 2, **changes: object) -> list[Case]:
    """The whole list: masks by layouts (with so many heads on one of K/V), and shapes."""
    table = [
        Case(mask, length, layout, ranks, heads=heads, dtype=dtype)
        for mask in masks(length)
        for layout, ranks in layouts(mask)
    ]
    return [replace(case, **changes) for case in [*table, *(replace(s, dtype=dtype) for s in SHAPES)]]


# ---------------------------------------------------------------------------------------------- oracle


def visible(mask: Mask, length: int) -> Tensor:
    """[S, S] of bool, from the regions' definition."""
    q, k = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
    keep = torch.zeros(length, length, dtype=torch.bool)
    for r in mask.regions:
        rows, columns = (q >= r.q_start) & (q < r.q_stop), (k >= r.k_start) & (k < r.k_stop)
        keep |= rows & columns & (q - k >= r.lo) & (q - k <= r.hi)
    return keep


def dense(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) in float64, by torch's autograd over the whole score matrix."""
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    queries, keys, values = leaves[0], *(x.repeat_interleave(group, 2) for x in leaves[1:])
    s = torch.einsum("bqhd,bkhd->bhqk", queries, keys) * case.scale
    if case.softcap is not None:
        s = case.softcap * torch.tanh(s / case.softcap)
    keep = visible(case.parsed, case.length).to(q.device)
    s = s.masked_fill(~keep, -torch.inf)
    seen = keep.any(-1)
    lse = torch.logsumexp(s.masked_fill(~seen[:, None], 0.0), -1).masked_fill(~seen, -torch.inf)
    p = torch.softmax(s.masked_fill(~seen[:, None], 0.0), -1).masked_fill(~seen[:, None], 0.0)
    out = torch.einsum("bhqk,bkhd->bqhd", p, values)
    gradients = torch.autograd.grad(out, leaves, dout.double())
    return out.detach(), lse.detach(), *gradients


# ------------------------------------------------------------------------------------------------ body


def surrounded(x: Tensor, poison: bool) -> Tensor:
    """The same numbers inside a larger tensor full of NaN; [B, S, H, D], its strides multiples of 16 bytes."""
    if not poison:
        return x
    batch, rows, heads, size = x.shape
    room = torch.full((batch, rows + 5, heads + 1, size + 24), torch.nan, dtype=x.dtype, device=x.device)
    room[:, 2 : 2 + rows, :heads, 16 : 16 + size] = x
    return room[:, 2 : 2 + rows, :heads, 16 : 16 + size]


def ring(kernel: Kernel, case: Case, layout: Layout, full: list[Tensor]) -> tuple[Tensor, ...]:
    """(out, lse, dq, dk, dv) of the whole sequence: every rank's queries against every rank's keys in turn."""
    q, k, v = full[1:]
    options = Options(case.scale, case.softcap)
    where = [torch.tensor(layout.positions(r), device=q.device) for r in range(layout.ranks)]
    blocks = [[surrounded(x[:, at], case.poison) for x in full] for at in where]
    sums = [[torch.zeros_like(x, dtype=torch.float32) for x in block[1:]] for block in blocks]
    tiles = [[find_tiles(case.parsed, a, b) for b in layout.shards] for a in layout.shards]
    out = torch.full((*q.shape[:3], v.shape[-1]), torch.nan, dtype=torch.float32, device=q.device)
    lse = out.new_full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    for mine in range(layout.ranks):
        state = None
        for other in range(layout.ranks):
            state = kernel.attend(blocks[mine][1], *blocks[other][2:], tiles[mine][other], options, state=state)
        state = finished(state, case.dtype)
        out[:, where[mine]], lse[:, :, where[mine]] = state
        for other in range(layout.ranks):
            given = {"delta": row_delta(blocks[mine][0], state[0])} if case.deltas else {"out": state[0]}
            into = (sums[mine][0], *sums[other][1:])
            kernel.attend_backward(
                *blocks[mine][:2], *blocks[other][2:], state[1], tiles[mine][other], options, **given, into=into
            )
    joined = []
    for index, like in enumerate((q, k, v)):
        whole = torch.full(like.shape, torch.nan, dtype=torch.float32, device=q.device)
        for rank, at in enumerate(where):
            whole[:, at] = sums[rank][index]
        joined.append(whole)
    return out, lse, *joined


def at_once(kernel: Kernel, case: Case, full: list[Tensor]) -> tuple[Tensor, ...]:
    """The same as one call that computes all: results in the dtype of the inputs, but for LSE."""
    dout, q, k, v = (surrounded(x, case.poison) for x in full)
    every = (Segment(0, case.length),)
    tiles, options = find_tiles(case.parsed, every, every), Options(case.scale, case.softcap)
    out, lse = attend_whole(kernel, q, k, v, tiles, options)
    made = gradients(kernel, dout, q, k, v, out, lse, tiles, options)
    assert {x.dtype for x in (out, *made)} == {case.dtype}
    assert lse.dtype == torch.float32
    return out, lse, *made


def inputs(case: Case, device: str) -> list[Tensor]:
    """dout, q, k, v; drawn on the CPU, so that every device sees the same."""
    shapes = [(case.heads, case.value_dim), (case.heads, case.head_dim)]
    shapes += [(case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim)]
    generator = torch.Generator().manual_seed(case.length)
    made = [torch.randn(case.batch, case.length, *shape, generator=generator) for shape in shapes]
    return [x.to(case.dtype).to(device) for x in made]


def check(kernel: Kernel, case: Case, device: str) -> dict[str, float]:
    """Run one case; the errors, or an AssertionError that says which is too large."""
    full = inputs(case, device)
    layout = make_layout(case.layout, case.length, case.ranks, case.parsed)
    expected = dense(*full, case)
    errors = judged(ring(kernel, case, layout, full), expected, case)
    if case.ranks == 1 and writes_gradients(kernel):
        judged(at_once(kernel, case, full), expected, case)
    return errors


def judged(found: tuple[Tensor, ...], right: tuple[Tensor, ...], case: Case) -> dict[str, float]:
    """The errors of (out, lse, dq, dk, dv), or an AssertionError that says which is too large."""
    got = dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))
    expected = dict(zip(got, right, strict=True))
    assert torch.equal(got["lse"] == -torch.inf, expected["lse"] == -torch.inf), "other rows saw nothing"
    empty = per_row(expected["lse"] == -torch.inf)
    assert not got["out"].masked_select(empty).any(), "a row that saw nothing is not 0"
    errors = {}
    for name, value in got.items():
        finite = torch.isfinite(expected[name])
        difference = (value.double() - expected[name])[finite]
        scale = expected[name][finite].norm().clamp_min(0.2 * finite.sum().sqrt())  # gradients that cancel to 0
        errors[name] = float(difference.norm() / scale)
    limit = LIMITS[case.dtype]
    bad = {name: error for name, error in errors.items() if not error < limit}  # NaN is bad too
    assert not bad, f"{case}: relative errors {bad}, allowed {limit}"
    return errors


def check_untouched(kernel: Kernel, device: str) -> None:
    """A running state keeps, to the bit, every row that no tile touches."""
    case = Case("documents:0,20,40", length=40)
    _, q, k, v = inputs(case, device)
    options = Options(0.25)
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
    """Where one call computes all, rows and keys of blocks that no tile touches get 0, not what memory held."""
    case = Case("full", length=400)
    dout, q, k, v = inputs(case, device)
    tiles, options, seen = Tiles([Tile(150, 160, 150, 160, 0, 9)]), Options(case.scale), slice(150, 160)
    with fresh_memory_is_nan():
        out, lse = attend_whole(kernel, q, k, v, tiles, options)
        made = gradients(kernel, dout, q, k, v, out, lse, tiles, options)
    for x in (out, *made):
        assert x[:, seen].any()
        assert not x[:, : seen.start].any()
        assert not x[:, seen.stop :].any()
    assert torch.isfinite(lse).sum() == 10 * lse.shape[1]


def check_delta(kernel: Kernel, device: str) -> None:
    """The one-pass delta is that of numerics."""
    dout, out = torch.randn(2, 70, 3, 40, device=device), torch.randn(2, 70, 3, 40, device=device)
    torch.testing.assert_close(kernel.row_delta(dout, out), row_delta(dout, out))


def check_flat(kernel: Kernel, device: str) -> None:
    """Merging many blocks costs float32 no more than merging two: what a merge rounds must not add up."""
    case = Case("full", length=96, scale=0.7)
    _, q, k, v = full = inputs(case, device)
    rows = 16
    out, lse, *_ = dense(*full, case)
    exact, q = (out[:, :rows], lse[:, :, :rows]), q[:, :rows]

    def errors(blocks: int) -> list[float]:
        state, size = None, case.length // blocks
        everything = Tiles([Tile(0, rows, 0, size, -size, rows)])
        for keys, values in zip(k.split(size, 1), v.split(size, 1), strict=True):
            state = kernel.attend(q, keys, values, everything, Options(case.scale), state=state)
        merged = finished(state, case.dtype)
        return [float((x - y).norm() / y.norm()) for x, y in zip(merged, exact, strict=True)]

    few, many = errors(2), errors(32)
    assert all(b < 1.25 * a for a, b in zip(few, many, strict=True)), f"2 blocks: {few}; 32 blocks: {many}"


def check_far(kernel: Kernel, device: str, *, far_lse: bool = True) -> None:
    """Whatever a kernel reads or writes may lie further from its tensor's start than 32 bits can count."""
    # A long tensor; and rows so long that those of one block of 128 (in the interpreter 32) span as much.
    for stride in (1 << 16, 1 << 27 if device == "cpu" else 1 << 25):
        _check_far(kernel, device, stride, far_lse)


def _room(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """So many zeros. On a CPU, memory that is only there once it is written: there are few other numbers."""
    if device != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    without_reserve = 0x4000  # Linux's MAP_NORESERVE, which Python names from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | without_reserve
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype=dtype)


def _check_far(kernel: Kernel, device: str, stride: int, far_lse: bool) -> None:
    length, first, d = 64, (1 << 31) // stride, 64
    case = Case("causal", length, heads=1, head_dim=d, value_dim=d, dtype=torch.float16, scale=0.125)
    options = Options(case.scale, deterministic=False)
    rows = first + length
    rooms = {kind: _room(rows * stride, kind, device) for kind in (torch.float16, torch.float32)}

    def far(x: Tensor, at: int) -> Tensor:
        """The same numbers in the last rows of a tensor; `at` places share a row's memory."""
        shape, steps = ((1, rows, 1, d), (stride, stride, d, 1)) if x.dim() == 4 else ((1, 1, rows), (1, 1, stride))
        made = rooms[x.dtype].as_strided(shape, steps, 2 * at * d)
        made[(slice(None), slice(first, None)) if x.dim() == 4 else (..., slice(first, None))] = x
        return made

    def run(given: list[Tensor], tiles: Tiles, state: State, into: list[Tensor]) -> tuple[Tensor, ...]:
        dout, q, k, v = given
        out, lse = kernel.attend(q, k, v, tiles, options, state=state)
        kernel.attend_backward(dout, q, k, v, lse, tiles, options, out=out, into=tuple(into))
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
    """The merge in one pass is that of numerics in float64, and touches only the rows of its state."""
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
        lse[:, 1, seed::4] = lse[:, 1, 3::4] = -torch.inf  # rows that some parts saw, and rows that none did
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
    merge((total[:, :0], total_lse[:, :, :0]), out[:, :0], lse[:, :, :0])  # of no rows, nothing is launched


def check_push(kernel: Kernel, device: str) -> None:
    """Every line of every message of a launch lands where it belongs, and nothing beside it."""
    from burst_portable.backends.cuda.peers.push_kernel import AT_ONCE, push_kernel

    generator = torch.Generator().manual_seed(3)
    # Lines, their width, and from one to the next here and there, in 16 bytes; a program takes 1024 of these at once.
    whole = [(1, width, 0, 0) for width in (0, 1, 1023, 1024, 1025, 5000)]
    apart = [(7, 1, 3, 2), (5, 3, 3, 9), (200, 16, 64, 48), (33, 200, 200, 201), (1, 40, 7, 7), (9, 5, 0, 5)]
    shapes = whole + apart + [(n, n + 1, 2 * n + 1, n + 2) for n in range(1, AT_ONCE - len(whole) - len(apart))]
    for some in (shapes, shapes[3:9]):
        spare = AT_ONCE - len(some)
        rooms = [4 * (lines * (width + max(step, jump)) + 2) for lines, width, step, jump in some]
        sources = [torch.randint(1, 1 << 30, (n,), dtype=torch.int32, generator=generator).to(device) for n in rooms]
        targets = [torch.zeros_like(x) for x in sources]
        filled = [*sources, *sources[:1] * spare], [*targets, *targets[:1] * spare]
        sizes, widths = [lines * width for lines, width, _, _ in some], [max(1, width) for _, width, _, _ in some]
        counts = [*sizes, *[0] * spare, *widths, *[1] * spare]
        for i in (2, 3):
            counts += [*(shape[i] for shape in some), *[0] * spare]
        push_kernel[(3, len(some))](*filled[0], *filled[1], *counts)
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
