"""Define the forward kernel: one launch for all tiles of a block pair, merged into a running state if there is one.

A program computes R queries of one head. It visits the visible keys in steps of C and keeps an online softmax in base 2
(FlashAttention-2, arXiv 2307.08691, algorithm 1). Blocks without a mask and blocks with a mask have separate loops. At
the end, the program divides by the row sums and writes out and LSE.

Shapes: q [R, D], k [C, D], v [C, Dv], scores [R, C], acc [R, Dv]; top and total [R]. `top` is the row maximum in base 2
and `total` is the row sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from burst_portable.kernels.triton.arguments import DROPOUT_NUMBERS
from burst_portable.kernels.triton.common import (
    capped,
    head_of,
    load_positions,
    load_rows,
    place,
    row_bounds,
    seen,
    step_start,
    stretch,
    weight_factors,
    widened,
)


@triton.jit
def _weights(s, top, scale, keep, inner, outer, MASKED: tl.constexpr, CAP: tl.constexpr, PRESCALE: tl.constexpr):
    """Return the weights [R, C], the new row maximum in base 2 [R], and the factor for all previous sums [R]."""
    factor = scale
    if CAP:
        s = capped(s, inner) * outer
        factor = 1.0
    elif PRESCALE:  # for a scale that is not positive, max(s) * scale is not the maximum
        s = s * scale
        factor = 1.0
    if MASKED:
        s = tl.where(keep, s, float("-inf"))
    new = tl.maximum(top, tl.max(s, 1) * factor)
    anchor = new
    if MASKED:
        anchor = tl.where(new == float("-inf"), 0.0, new)  # a row without visible keys: avoids -inf - -inf
    return tl.math.exp2(s * factor - anchor[:, None]), new, tl.math.exp2(top - anchor)


@triton.jit
def _walk(
    q, k, v, acc, top, total, rows, entry, batch, head, scale, inner, outer, k_row, v_row, k_at, mine_at, dropout,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    CAP: tl.constexpr, PRESCALE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add all full or, if MASKED, all masked blocks of one table entry to the online softmax (acc, top, total)."""
    first, left, second, count = stretch(entry, MASKED)
    stop = tl.load(entry + 10)
    last_start = tl.load(entry + 11)
    lower, upper = row_bounds(rows, entry)
    for n in tl.range(0, count):
        nominal, j = step_start(n, first, left, second, last_start, C, MASKED)
        keys = load_rows(k, batch, head, j, stop, k_row, C, D, PADDED_D, TMA, MASKED)
        s = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
        keep = seen(lower, upper, j + tl.arange(0, C), nominal) if MASKED else None
        p, top, fade = _weights(s, top, scale, keep, inner, outer, MASKED, CAP, PRESCALE)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        if dropout is not None:
            columns_at = load_positions(k_at, j, stop, C, MASKED)
            p *= weight_factors(mine_at[:, None], columns_at[None, :], dropout)
        values = load_rows(v, batch, head, j, stop, v_row, C, DV, PADDED_DV, TMA, MASKED)
        acc = tl.dot(p.to(values.dtype), values, acc, input_precision=PRECISION)
    return acc, top, total


@triton.jit
def _resume(
    out, lse, rows, inside, out_row, lse_row, DV: tl.constexpr, PADDED_DV: tl.constexpr, MERGE: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """Return the initial online softmax (acc, top, total): from `out` and `lse` if MERGE, else empty.

    A running state (out, lse) equals the softmax after a single score `lse` with value `out`. If the softmax continues
    from it, no separate merge is needed. So registers never hold a second set of R x Dv numbers.
    """
    if MERGE:
        inner = tl.arange(0, PADDED_DV)
        wide = rows.to(tl.int64)
        top = tl.load(lse + wide * lse_row, mask=inside, other=float("-inf")) * 1.4426950408889634
        keep = inside[:, None] & (inner < DV)[None, :]
        acc = tl.load(out + wide[:, None] * out_row + inner[None, :], mask=keep, other=0.0)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    else:
        acc = tl.zeros([R, PADDED_DV], tl.float32)
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
    return acc, top, total


@triton.jit
def _store(
    acc, top, total, out, lse, rows, inside, out_row, lse_row,
    DV: tl.constexpr, PADDED_DV: tl.constexpr, MERGE: tl.constexpr,
):  # fmt: skip
    """Divide acc by the row sums, and write out and LSE."""
    inner = tl.arange(0, PADDED_DV)
    wide = rows.to(tl.int64)
    if MERGE:  # rows without new keys must stay bitwise unchanged
        before = tl.load(lse + wide * lse_row, mask=inside, other=float("-inf")) * 1.4426950408889634
        inside &= (total != 1.0) | (top != before)
    # A sum of exactly 0 means no visible keys; acc is then 0 and top is -inf. NaN stays NaN.
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (1.0 / total)[:, None]
    mine = (top + tl.math.log2(total)) * 0.6931471805599453
    keep = inside[:, None] & (inner < DV)[None, :]
    tl.store(out + wide[:, None] * out_row + inner[None, :], acc.to(out.dtype.element_ty), mask=keep)
    tl.store(lse + wide * lse_row, mine, mask=inside)


@triton.jit
def _store_double(
    acc, top, total, out, lse, rows, inside, out_row, lse_row,
    DV: tl.constexpr, PADDED_DV: tl.constexpr, MERGE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Divide acc by the row sums, merge a running state if MERGE, and write out and LSE in float64.

    float64 is `numerics.running_dtype` of float32. The merge is that of `numerics.merge_into`. Its rounding errors are
    below the precision of float32, so they do not accumulate.
    """
    inner = tl.arange(0, PADDED_DV)
    wide = rows.to(tl.int64)
    seen = total != 0.0
    total = tl.where(seen, total, 1.0).to(tl.float64)
    merged = (top.to(tl.float64) + tl.math.log2(total)) * tl.full([R], 0.6931471805599453, tl.float64)
    share = 1.0 / total
    lse += wide * lse_row
    out += wide[:, None] * out_row + inner[None, :]
    if MERGE:
        mine = tl.where(seen, merged, 0.0)
        before = tl.load(lse, mask=inside, other=float("-inf"))
        anchor = tl.maximum(before, mine)
        merged = anchor + tl.math.log(tl.math.exp(before - anchor) + tl.math.exp(mine - anchor))
        share *= tl.math.exp(mine - merged)
        inside &= seen  # rows without new keys stay unchanged
    keep = inside[:, None] & (inner < DV)[None, :]
    result = acc.to(tl.float64) * share[:, None]
    if MERGE:
        result += tl.load(out, mask=keep, other=0.0) * tl.math.exp(before - merged)[:, None]
    tl.store(out, result, mask=keep)
    tl.store(lse, merged, mask=inside)


@triton.jit(
    do_not_specialize=["q_rows", "blocks", "heads", "group", *DROPOUT_NUMBERS]
)  # avoids one compilation per length
def attend_kernel(
    q, k, v, out, lse, table, scale, inner, outer,
    q_at, k_at, first_head, seed_low, seed_high, drop_below, keep_scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head, lse_batch, lse_head, lse_row,
    q_rows, blocks, heads, group,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, TOGETHER: tl.constexpr, CAP: tl.constexpr,
    PRESCALE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, MERGE: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """Compute out and LSE of one block of R queries of one head.

    Args:
        q, k, v: [B, S, H, D or DV]. If TMA, k and v are descriptors of blocks of C rows.
        out, lse: Results [B, Sq, Hq, DV] and [B, Hq, Sq]. If MERGE, they contain the running state before.
        table: int32 `blocks.BlockTable.data`.
        scale, inner, outer: `arguments.score_numbers`. `scale` is not read if CAP, else `inner` and `outer` are not.
        q_at, k_at, first_head, seed_low, seed_high, drop_below, keep_scale: `arguments.dropout_arguments`.
        q_batch to lse_row: Strides in elements. The last stride of q, k, v and out is 1.
        q_rows, blocks, heads, group: Queries, blocks of the table, query heads, and query heads per K/V head.
        R, C: Queries of a block, and keys of one step.
        D, DV, PADDED_D, PADDED_DV: Head sizes of q and k, and of v and out, then both padded (`arguments.padded`).
        TOGETHER: Heads whose programs follow each other (`common.place`).
        CAP: Whether there is a softcap.
        PRESCALE: Whether scores are scaled before their maximum, because `scale` may be 0 or negative.
        PRECISION: Of products of float32: "ieee" or "tf32".
        WIDE: Whether offsets inside a block of rows of q, k or v may exceed 32 bits.
        DOUBLE: Whether out and lse are float64.
    """
    batch, head, block = place(table, blocks, heads, TOGETHER)
    start = tl.load(block)
    rows = start + tl.arange(0, R)
    shared = head // group
    keys = head_of(k, batch, shared, k_batch, k_head, TMA)
    values = head_of(v, batch, shared, v_batch, v_head, TMA)
    queries = head_of(q, batch, head, q_batch, q_head, False)
    k_row, v_row = widened(k_row, WIDE), widened(v_row, WIDE)
    mine = load_rows(queries, batch, head, start, q_rows, widened(q_row, WIDE), R, D, PADDED_D, False, True)
    out = head_of(out, batch, head, out_batch, out_head, False)
    lse = head_of(lse, batch, head, lse_batch, lse_head, False)
    inside = rows < q_rows
    mine_at, dropout = None, None
    if q_at is not None:
        mine_at = load_positions(q_at, start, q_rows, R, True)
        dropout = (batch, first_head + head, seed_low, seed_high, drop_below, keep_scale)
    resumes: tl.constexpr = MERGE and not DOUBLE
    acc, top, total = _resume(out, lse, rows, inside, out_row, lse_row, DV, PADDED_DV, resumes, R)
    for entry in range(tl.load(block + 1), tl.load(block + 2), 12):
        acc, top, total = _walk(
            mine, keys, values, acc, top, total, rows, table + entry, batch, shared, scale, inner, outer, k_row, v_row,
            k_at, mine_at, dropout,
            C, D, DV, PADDED_D, PADDED_DV, CAP, PRESCALE, PRECISION, TMA, False,
        )  # fmt: skip
        acc, top, total = _walk(
            mine, keys, values, acc, top, total, rows, table + entry, batch, shared, scale, inner, outer, k_row, v_row,
            k_at, mine_at, dropout,
            C, D, DV, PADDED_D, PADDED_DV, CAP, PRESCALE, PRECISION, TMA, True,
        )  # fmt: skip
    if out.dtype.element_ty.primitive_bitwidth == 16:  # a second load: frees the registers of Q's addresses
        rows = tl.load(block, volatile=True) + tl.arange(0, R)
        inside = rows < q_rows
    if DOUBLE:
        _store_double(acc, top, total, out, lse, rows, inside, out_row, lse_row, DV, PADDED_DV, MERGE, R)
    else:
        _store(acc, top, total, out, lse, rows, inside, out_row, lse_row, DV, PADDED_DV, MERGE)
