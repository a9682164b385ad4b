"""Define cases for the Triton kernels, in the interpreter and on a device.

A case is one attention call over a sequence, computed as by a ring. The queries of each rank attend to the keys of each
rank: forward into a running state, backward with the global LSE of a row into float32 buffers. The reference is dense
attention in float64, whose mask comes from the regions, without layouts or tiles.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from burst_portable.conformance.oracle import dropout_factors
from burst_portable.kernels.base import BackwardInputs, Kernel
from burst_portable.layout import Layout, Segment, make_layout
from burst_portable.mask import Mask
from burst_portable.numerics import finished, per_row, row_delta
from burst_portable.planning.call import AttentionCall, Dropout
from burst_portable.planning.tiles import find_tiles
from tests.support.calls import settings

# Relative error (Frobenius) against float64 on the same inputs. Plain attention with products in that dtype loses
# about 2e-7, 4e-4 and 3e-3 in `out`, and twice as much in the gradients. The largest absolute error, relative to the
# largest absolute value, may be twice this.
LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


@dataclass(frozen=True)
class Case:
    """One attention call. `poison`: surround every tensor with NaN, in memory that the kernel must not use."""

    mask: str
    length: int = 53
    layout: str = "contiguous"
    ranks: int = 1
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    v_head_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    scale: float = 0.25
    poison: bool = True
    deltas: bool = False
    dropout: float = 0.0

    def __str__(self) -> str:
        default = {name: field.default for name, field in type(self).__dataclass_fields__.items()}
        odd = [f"{n}={getattr(self, n)}" for n in default if n != "mask" and getattr(self, n) != default[n]]
        return "-".join([self.mask, *odd]).replace("torch.", "")

    @property
    def settings(self) -> AttentionCall:
        """The settings, as a kernel gets them."""
        dropout = Dropout(self.dropout, first_head=5, seed=0xFEDC_BA98_7654_3210 >> 1) if self.dropout else None
        return settings(self.scale, self.softcap, dropout=dropout)

    @cached_property
    def parsed(self) -> Mask:
        return Mask.parse(self.mask, self.length)


def masks(length: int) -> list[str]:
    """Return all forms of masks, with uneven boundaries."""
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
    """Return the (layout, ranks) pairs for a mask."""
    chosen = [("contiguous", 1), ("contiguous", 2), ("zigzag", 2), ("striped", 2)]
    return [*chosen, ("document_zigzag", 2)] if "documents" in mask else chosen


SHAPES = [
    Case("causal", batch=2, heads=4, kv_heads=2),
    Case("causal", heads=3, kv_heads=3, head_dim=24, v_head_dim=40),
    Case("causal", head_dim=80, v_head_dim=16),
    Case("window:9", head_dim=128, v_head_dim=96, length=37),
    Case("causal", softcap=1.5),
    Case("sink:3:11", softcap=1.5, layout="zigzag", ranks=2, deltas=True),
    Case("causal", scale=-0.3),
    Case("causal", scale=0.0),
    Case("causal", scale=1e-50),  # 0 in float32
    Case("causal", softcap=1e4),  # far above the scores, which must not lose digits
    Case("causal", length=64, poison=False),
    Case("full", length=1),
    Case("documents:0,1,2,40,53", layout="striped", ranks=4, deltas=True),
    Case("share_question:7,5,2,1,1,17,20", deltas=True),
]


WITH_DROPOUT = [
    Case("causal", length=37, batch=2, dropout=0.3),
    Case("window:9", length=41, layout="striped", ranks=2, dropout=0.2, deltas=True),
    Case("documents:0,7,30,53", layout="document_zigzag", ranks=2, head_dim=24, v_head_dim=40, dropout=0.1),
    Case("full", length=33, softcap=1.5, scale=-0.3, dropout=0.5),
]


def cases(length: int, dtype: torch.dtype, heads: int = 2, **changes: object) -> list[Case]:
    """Return all cases: masks by layouts (with `heads` query heads per K/V head), and shapes."""
    table = [
        Case(mask, length, layout, ranks, heads=heads, dtype=dtype)
        for mask in masks(length)
        for layout, ranks in layouts(mask)
    ]
    return [replace(case, **changes) for case in [*table, *(replace(s, dtype=dtype) for s in SHAPES)]]


# ---------------------------------------------------------------------------------------------- oracle


def visible(mask: Mask, length: int) -> Tensor:
    """Return the mask as bool [S, S], from the definition of regions."""
    q, k = torch.arange(length).unsqueeze(1), torch.arange(length).unsqueeze(0)
    keep = torch.zeros(length, length, dtype=torch.bool)
    for r in mask.regions:
        rows, columns = (q >= r.q_start) & (q < r.q_stop), (k >= r.k_start) & (k < r.k_stop)
        keep |= rows & columns & (q - k >= r.lo) & (q - k <= r.hi)
    return keep


def dense(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, case: Case) -> tuple[Tensor, ...]:
    """Return (out, lse, dq, dk, dv) in float64, by torch's autograd over the full score matrix."""
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
    if (dropout := case.settings.dropout) is not None:
        p = p * dropout_factors(dropout, *p.shape).to(q.device)
    out = torch.einsum("bhqk,bkhd->bqhd", p, values)
    gradients = torch.autograd.grad(out, leaves, dout.double())
    return out.detach(), lse.detach(), *gradients


# ------------------------------------------------------------------------------------------------ body


def with_nan_margins(x: Tensor, poison: bool) -> Tensor:
    """Copy x [B, S, H, D] into a larger tensor of NaN, with strides of multiples of 16 bytes."""
    if not poison:
        return x
    batch, rows, heads, size = x.shape
    room = torch.full((batch, rows + 5, heads + 1, size + 24), torch.nan, dtype=x.dtype, device=x.device)
    room[:, 2 : 2 + rows, :heads, 16 : 16 + size] = x
    return room[:, 2 : 2 + rows, :heads, 16 : 16 + size]


def ring(kernel: Kernel, case: Case, layout: Layout, full: list[Tensor]) -> tuple[Tensor, ...]:
    """Return (out, lse, dq, dk, dv) of the sequence: queries of each rank against keys of each rank."""
    q, k, v = full[1:]
    options = case.settings
    where = [torch.tensor(layout.positions(r), device=q.device) for r in range(layout.ranks)]
    blocks = [[with_nan_margins(x[:, at], case.poison) for x in full] for at in where]
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
                BackwardInputs(*blocks[mine][:2], *blocks[other][2:], state[1], **given),
                tiles[mine][other],
                options,
                into=into,
            )
    joined = []
    for index, like in enumerate((q, k, v)):
        whole = torch.full(like.shape, torch.nan, dtype=torch.float32, device=q.device)
        for rank, at in enumerate(where):
            whole[:, at] = sums[rank][index]
        joined.append(whole)
    return out, lse, *joined


def single_call(kernel: Kernel, case: Case, full: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the results of a single call, in the dtype of the inputs except for LSE."""
    dout, q, k, v = (with_nan_margins(x, case.poison) for x in full)
    every = (Segment(0, case.length),)
    tiles, options = find_tiles(case.parsed, every, every), case.settings
    out, lse = kernel.forward_single_call(q, k, v, tiles, options)
    made = kernel.backward_single_call(BackwardInputs(dout, q, k, v, lse, out), tiles, options)
    assert {x.dtype for x in (out, *made)} == {case.dtype}
    assert lse.dtype == torch.float32
    return out, lse, *made


def inputs(case: Case, device: str) -> list[Tensor]:
    """Return dout, q, k, v, drawn on the CPU so that all devices get equal values."""
    shapes = [(case.heads, case.v_head_dim), (case.heads, case.head_dim)]
    shapes += [(case.kv_heads, case.head_dim), (case.kv_heads, case.v_head_dim)]
    generator = torch.Generator().manual_seed(case.length)
    made = [torch.randn(case.batch, case.length, *shape, generator=generator) for shape in shapes]
    return [x.to(case.dtype).to(device) for x in made]


def check(kernel: Kernel, case: Case, device: str) -> dict[str, float]:
    """Run one case and return its errors. Raise AssertionError with the name of an error that is too large."""
    full = inputs(case, device)
    layout = make_layout(case.layout, case.length, case.ranks, case.parsed)
    expected = dense(*full, case)
    errors = check_errors(ring(kernel, case, layout, full), expected, case)
    if case.ranks == 1 and kernel.traits.writes_gradients:
        check_errors(single_call(kernel, case, full), expected, case)
    return errors


def check_errors(found: tuple[Tensor, ...], right: tuple[Tensor, ...], case: Case) -> dict[str, float]:
    """Return the errors of (out, lse, dq, dk, dv). Raise AssertionError with the name of one that is too large."""
    got = dict(zip(("out", "lse", "dq", "dk", "dv"), found, strict=True))
    expected = dict(zip(got, right, strict=True))
    assert torch.equal(got["lse"] == -torch.inf, expected["lse"] == -torch.inf), "other rows saw nothing"
    empty = per_row(expected["lse"] == -torch.inf)
    assert not got["out"].masked_select(empty).any(), "a row that saw nothing is not 0"
    errors, largest = {}, {}
    for name, value in got.items():
        finite = torch.isfinite(expected[name])
        difference = (value.double() - expected[name])[finite]
        right = expected[name][finite]  # gradients that cancel to 0 are compared with the floors
        errors[name] = float(difference.norm() / right.norm().clamp_min(0.2 * finite.sum().sqrt()))
        largest[name] = float(difference.abs().max() / right.abs().max().clamp_min(0.2)) if finite.any() else 0.0
    limit = LIMITS[case.dtype]
    bad = {name: error for name, error in errors.items() if not error < limit}  # true for NaN
    bad |= {f"{name} (max)": error for name, error in largest.items() if not error < 2 * limit}
    assert not bad, f"{case}: relative errors {bad}, allowed {limit}"
    return errors
