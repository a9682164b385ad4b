"""Define the backward kernels: one for dK and dV, one for dQ, and one for delta.

They implement FlashAttention-2 (arXiv 2307.08691), algorithm 2, in two passes. `keys_kernel` computes dK and dV of a
block of keys and visits queries. `queries_kernel` computes dQ of a block of queries and visits keys. LSE and delta are
those of the whole row, so the passes need no other result of the forward. They use no atomics, so results are
deterministic.

If ADD, gradients are added to float32 buffers, each element by one program. Otherwise one launch computes all of them
and writes them in the dtype of the inputs.

For large heads, the sums of dK and dV do not both fit in the registers of a program. The pass over keys is then
launched once for dV and once for dK (PART), and computes K·Qᵀ twice.

Shapes: R own rows, C columns of one step. In `keys_kernel`, own rows are keys and columns are queries.

`forward.attend_kernel` describes the parameters that the kernels share. Here, TMA means that the tensors of columns are
descriptors, and TMA_NUMBERS means that lse and delta are. dQ and dK are multiplied by `gradient_scale`, the scale of
the call.
"""

from __future__ import annotations

import triton
import triton.language as tl

from burst_portable.kernels.triton.arguments import DROPOUT_NUMBERS
from burst_portable.kernels.triton.common import (
    capped,
    head_of,
    load_numbers,
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
from burst_portable.kernels.triton.tuning import ONLY_DK, ONLY_DV

_ONLY_DV, _ONLY_DK = tl.constexpr(ONLY_DV), tl.constexpr(ONLY_DK)


@triton.jit
def _base_two(lse):
    """Return LSE in base 2. A row without visible keys gets +inf, so that its weights are exp2(-inf) = 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def _weights(s, lse, scale, inner, outer, CAP: tl.constexpr):
    """Return the probabilities and the derivative of the softcap, which is 1 without a softcap."""
    if CAP:
        t = capped(s, inner)
        return tl.math.exp2(t * outer - lse), 1.0 - t * t
    else:
        return tl.math.exp2(s * scale - lse), 1.0


@triton.jit
def _walk_queries(
    keys, values, dk, dv, rows, entry, queries, douts, lse, delta, batch, head, scale, inner, outer,
    q_row, dout_row, lse_row, delta_row, q_at, mine_at, dropout,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TMA_NUMBERS: tl.constexpr, MASKED: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Add all full or, if MASKED, all masked query blocks of one table entry to dk and dv.

    Scores are transposed: [keys, queries].
    """
    first, left, second, count = stretch(entry, MASKED)
    stop = tl.load(entry + 10)
    last_start = tl.load(entry + 11)
    lower, upper = row_bounds(rows, entry)
    for n in tl.range(0, count):
        nominal, j = step_start(n, first, left, second, last_start, C, MASKED)
        columns = j + tl.arange(0, C)
        q = load_rows(queries, batch, head, j, stop, q_row, C, D, PADDED_D, TMA, MASKED)
        row_lse = _base_two(load_numbers(lse, batch, head, j, stop, lse_row, C, TMA_NUMBERS, MASKED))
        p, slope = _weights(
            tl.dot(keys, tl.trans(q), input_precision=PRECISION), row_lse[None, :], scale, inner, outer, CAP
        )
        if MASKED:
            keep = seen(lower, upper, columns, nominal)
            p = tl.where(keep, p, 0.0)
        dout = load_rows(douts, batch, head, j, stop, dout_row, C, DV, PADDED_DV, TMA, MASKED)
        factors = None
        if dropout is not None:
            columns_at = load_positions(q_at, j, stop, C, MASKED)
            factors = weight_factors(columns_at[None, :], mine_at[:, None], dropout)
        if PART != _ONLY_DK:
            dropped = p if dropout is None else p * factors
            dv = tl.dot(dropped.to(dout.dtype), dout, dv, input_precision=PRECISION)
        if PART != _ONLY_DV:
            row_delta = load_numbers(delta, batch, head, j, stop, delta_row, C, TMA_NUMBERS, MASKED)
            dp = tl.dot(values, tl.trans(dout), input_precision=PRECISION)
            if dropout is not None:
                dp *= factors
            ds = p * (dp - row_delta[None, :]) * slope
            if MASKED:
                ds = tl.where(keep, ds, 0.0)  # 0 times a value outside the tile may be NaN
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _walk_keys(
    query, dout, row_lse, row_delta, dq, rows, entry, k, v, batch, head, scale, inner, outer, k_row, v_row,
    k_at, mine_at, dropout,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add all full or, if MASKED, all masked key blocks of one table entry to dq. Scores are [queries, keys]."""
    first, left, second, count = stretch(entry, MASKED)
    stop = tl.load(entry + 10)
    last_start = tl.load(entry + 11)
    lower, upper = row_bounds(rows, entry)
    for n in tl.range(0, count):
        nominal, j = step_start(n, first, left, second, last_start, C, MASKED)
        keys = load_rows(k, batch, head, j, stop, k_row, C, D, PADDED_D, TMA, MASKED)
        values = load_rows(v, batch, head, j, stop, v_row, C, DV, PADDED_DV, TMA, MASKED)
        p, slope = _weights(
            tl.dot(query, tl.trans(keys), input_precision=PRECISION), row_lse[:, None], scale, inner, outer, CAP
        )
        dp = tl.dot(dout, tl.trans(values), input_precision=PRECISION)
        if dropout is not None:
            columns_at = load_positions(k_at, j, stop, C, MASKED)
            dp *= weight_factors(mine_at[:, None], columns_at[None, :], dropout)
        ds = p * (dp - row_delta[:, None]) * slope
        if MASKED:
            ds = tl.where(seen(lower, upper, j + tl.arange(0, C), nominal), ds, 0.0)
        dq = tl.dot(ds.to(keys.dtype), keys, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _put_rows(target, value, rows, stop, row_stride, SIZE: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr):
    """Write `value` to target[rows], or add it if ADD, for rows before `stop`."""
    inner = tl.arange(0, PADDED)
    address = target + rows.to(tl.int64)[:, None] * row_stride + inner[None, :]
    keep = (rows < stop)[:, None] & (inner < SIZE)[None, :]
    if ADD:
        value += tl.load(address, mask=keep, other=0.0)
    tl.store(address, value.to(target.dtype.element_ty), mask=keep)


@triton.jit(
    do_not_specialize=["k_rows", "blocks", "heads", "group", *DROPOUT_NUMBERS]
)  # avoids one compilation per length
def keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, table, scale, inner, outer, gradient_scale,
    q_at, k_at, first_head, seed_low, seed_high, drop_below, keep_scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    k_rows, blocks, heads, group,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, TOGETHER: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, TMA_NUMBERS: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV of one block of R keys, or only one of them (PART), summed over the query heads that share it.

    `heads` are K/V heads; `group` query heads share each of them.
    """
    batch, head, block = place(table, blocks, heads, TOGETHER)
    start = tl.load(block)
    rows = start + tl.arange(0, R)
    q_row, dout_row = widened(q_row, WIDE), widened(dout_row, WIDE)
    keys = head_of(k, batch, head, k_batch, k_head, False)
    values = head_of(v, batch, head, v_batch, v_head, False)
    keys = load_rows(keys, batch, head, start, k_rows, widened(k_row, WIDE), R, D, PADDED_D, False, True)
    if PART != _ONLY_DV:
        values = load_rows(values, batch, head, start, k_rows, widened(v_row, WIDE), R, DV, PADDED_DV, False, True)
    mine_at = None if k_at is None else load_positions(k_at, start, k_rows, R, True)
    sum_dk = tl.zeros([R, PADDED_D if PART != _ONLY_DV else 1], tl.float32)
    sum_dv = tl.zeros([R, PADDED_DV if PART != _ONLY_DK else 1], tl.float32)
    for reader in range(head * group, head * group + group):
        queries = head_of(q, batch, reader, q_batch, q_head, TMA)
        douts = head_of(dout, batch, reader, dout_batch, dout_head, TMA)
        reader_lse = head_of(lse, batch, reader, lse_batch, lse_head, TMA_NUMBERS)
        reader_delta = head_of(delta, batch, reader, delta_batch, delta_head, TMA_NUMBERS)
        dropout = None
        if q_at is not None:
            dropout = (batch, first_head + reader, seed_low, seed_high, drop_below, keep_scale)
        for entry in range(tl.load(block + 1), tl.load(block + 2), 12):
            sum_dk, sum_dv = _walk_queries(
                keys, values, sum_dk, sum_dv, rows, table + entry, queries, douts, reader_lse, reader_delta,
                batch, reader, scale, inner, outer, q_row, dout_row, lse_row, delta_row, q_at, mine_at, dropout,
                C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, TMA, TMA_NUMBERS, False, PART,
            )  # fmt: skip
            sum_dk, sum_dv = _walk_queries(
                keys, values, sum_dk, sum_dv, rows, table + entry, queries, douts, reader_lse, reader_delta,
                batch, reader, scale, inner, outer, q_row, dout_row, lse_row, delta_row, q_at, mine_at, dropout,
                C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, TMA, TMA_NUMBERS, True, PART,
            )  # fmt: skip
    if not ADD:  # a second load: frees the registers of addresses during the loop
        rows = tl.load(block, volatile=True) + tl.arange(0, R)
    dk = head_of(dk, batch, head, dk_batch, dk_head, False)
    dv = head_of(dv, batch, head, dv_batch, dv_head, False)
    if PART != _ONLY_DV:
        _put_rows(dk, sum_dk * gradient_scale, rows, k_rows, dk_row, D, PADDED_D, ADD)
    if PART != _ONLY_DK:
        _put_rows(dv, sum_dv, rows, k_rows, dv_row, DV, PADDED_DV, ADD)


@triton.jit(
    do_not_specialize=["q_rows", "blocks", "heads", "group", *DROPOUT_NUMBERS]
)  # avoids one compilation per length
def queries_kernel(
    q, k, v, dout, lse, delta, dq, table, scale, inner, outer, gradient_scale,
    q_at, k_at, first_head, seed_low, seed_high, drop_below, keep_scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dq_batch, dq_row, dq_head,
    q_rows, blocks, heads, group,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, TOGETHER: tl.constexpr, CAP: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Compute dQ of one block of R queries. `heads` are query heads; `group` of them share a K/V head."""
    batch, head, block = place(table, blocks, heads, TOGETHER)
    start = tl.load(block)
    rows = start + tl.arange(0, R)
    wide = rows.to(tl.int64)
    shared = head // group
    keys = head_of(k, batch, shared, k_batch, k_head, TMA)
    values = head_of(v, batch, shared, v_batch, v_head, TMA)
    k_row, v_row = widened(k_row, WIDE), widened(v_row, WIDE)
    query = head_of(q, batch, head, q_batch, q_head, False)
    mine = head_of(dout, batch, head, dout_batch, dout_head, False)
    query = load_rows(query, batch, head, start, q_rows, widened(q_row, WIDE), R, D, PADDED_D, False, True)
    mine = load_rows(mine, batch, head, start, q_rows, widened(dout_row, WIDE), R, DV, PADDED_DV, False, True)
    row_lse = head_of(lse, batch, head, lse_batch, lse_head, False) + wide * lse_row
    row_delta = head_of(delta, batch, head, delta_batch, delta_head, False) + wide * delta_row
    row_lse = _base_two(tl.load(row_lse, mask=rows < q_rows, other=float("-inf")))
    row_delta = tl.load(row_delta, mask=rows < q_rows, other=0.0)
    mine_at, dropout = None, None
    if q_at is not None:
        mine_at = load_positions(q_at, start, q_rows, R, True)
        dropout = (batch, first_head + head, seed_low, seed_high, drop_below, keep_scale)
    sum_dq = tl.zeros([R, PADDED_D], tl.float32)
    for entry in range(tl.load(block + 1), tl.load(block + 2), 12):
        sum_dq = _walk_keys(
            query, mine, row_lse, row_delta, sum_dq, rows, table + entry, keys, values, batch, shared,
            scale, inner, outer, k_row, v_row, k_at, mine_at, dropout,
            C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, TMA, False,
        )  # fmt: skip
        sum_dq = _walk_keys(
            query, mine, row_lse, row_delta, sum_dq, rows, table + entry, keys, values, batch, shared,
            scale, inner, outer, k_row, v_row, k_at, mine_at, dropout,
            C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, TMA, True,
        )  # fmt: skip
    dq = head_of(dq, batch, head, dq_batch, dq_head, False)
    _put_rows(dq, sum_dq * gradient_scale, rows, q_rows, dq_row, D, PADDED_D, ADD)


@triton.jit(do_not_specialize=["q_rows", "heads", "blocks"])  # avoids one compilation per length
def delta_kernel(
    dout, out, delta, dout_batch, dout_row, dout_head, out_batch, out_row, out_head, q_rows, heads, blocks,
    R: tl.constexpr, DV: tl.constexpr, PADDED_DV: tl.constexpr,
):  # fmt: skip
    """Compute `numerics.row_delta` in one pass: delta [B, H, S], contiguous."""
    line = tl.program_id(0) // blocks  # index in [B·H]
    rows = tl.program_id(0) % blocks * R + tl.arange(0, R)
    inner = tl.arange(0, PADDED_DV)
    keep = (rows < q_rows)[:, None] & (inner < DV)[None, :]
    wide = rows.to(tl.int64)[:, None]
    dout = head_of(dout, line // heads, line % heads, dout_batch, dout_head, False) + wide * dout_row + inner[None, :]
    out = head_of(out, line // heads, line % heads, out_batch, out_head, False) + wide * out_row + inner[None, :]
    product = tl.load(dout, mask=keep, other=0.0).to(tl.float32) * tl.load(out, mask=keep, other=0.0).to(tl.float32)
    tl.store(delta + line.to(tl.int64) * q_rows + rows, tl.sum(product, 1), mask=rows < q_rows)
