"""Define forward and backward kernels for triton-ascend, with the tables and the mathematics of kernels/triton.

The differences, from triton-ascend's programming guide and the behavior of its compiler:

- One program per core, each with its share of the work: a launch has at most 65535 programs, and starting one takes
  time.
- Masks compare float32: comparisons of integer vectors become scalar loops. All indices are below 2**24, so exact.
- A left operand of a product that is used again is copied (``x + 0.0``), since a product may overwrite it.
- Addresses are a scalar start (64 bits) and offsets that are affine in the lanes, so that nothing is gathered.

Shapes: R rows of the program's block ("own" rows), C columns of one step, P a head size padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from burst_portable.kernels.triton.common import capped, step_start, stretch


@triton.jit
def _head(source, batch, head, batch_stride, head_stride):
    return source + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def _rows(source, row, stop, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Return addresses [ROWS, PADDED] in one head from `row` on, and a mask of those inside it."""
    lanes, inner = tl.arange(0, ROWS), tl.arange(0, PADDED)
    address = source + tl.cast(row, tl.int64) * stride + (lanes[:, None] * stride + inner[None, :])
    return address, ((row + lanes) < stop)[:, None] & (inner < SIZE)[None, :]


@triton.jit
def _read(source, row, stop, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    address, there = _rows(source, row, stop, stride, ROWS, SIZE, PADDED)
    return tl.load(address, mask=there, other=0.0)


@triton.jit
def _numbers(source, row, stop, stride, COUNT: tl.constexpr):
    """Return addresses [COUNT] in one head of [B, H, S], and a mask of those inside it."""
    lanes = tl.arange(0, COUNT)
    return source + tl.cast(row, tl.int64) * stride + lanes * stride, (row + lanes) < stop


@triton.jit
def _bounds(rows, entry):
    """Return the first and the last visible column of the entry's tile for each own row, float32 [R] each."""
    row = rows.to(tl.float32)
    inside = (row >= tl.load(entry + 8).to(tl.float32)) & (row < tl.load(entry + 9).to(tl.float32))
    last = tl.minimum(rows - tl.load(entry + 6), tl.load(entry + 10) - 1).to(tl.float32)
    return (rows - tl.load(entry + 7)).to(tl.float32), tl.where(inside, last, -1.0)


@triton.jit
def _seen(lower, upper, start, nominal, COUNT: tl.constexpr):
    """Return which pairs [R, COUNT] of a masked block are in the tile and in no earlier block."""
    columns = (start + tl.arange(0, COUNT)).to(tl.float32)
    lower = tl.maximum(lower, nominal.to(tl.float32))
    return (columns[None, :] >= lower[:, None]) & (columns[None, :] <= upper[:, None])


# ------------------------------------------------------------------------------------------- forward


@triton.jit
def _attend(
    mine, k, v, acc, top, total, rows, entry, scale, inner, outer, k_row, v_row,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add all full, or all masked, blocks of one table entry to the online softmax (base 2)."""
    first, left, second, count = stretch(entry, MASKED)
    stop, last_start = tl.load(entry + 10), tl.load(entry + 11)
    lower, upper = _bounds(rows, entry)
    for n in range(count):
        nominal, j = step_start(n, first, left, second, last_start, C, MASKED)
        keys = _read(k, j, stop, k_row, C, D, PADDED_D)
        s = tl.dot(mine + 0.0, tl.trans(keys), input_precision=PRECISION)
        s = capped(s, inner) * outer if CAP else s * scale
        if MASKED:
            s = tl.where(_seen(lower, upper, j, nominal, C), s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        anchor = tl.where(new == float("-inf"), 0.0, new)  # without visible pairs: avoid -inf - -inf
        p = tl.math.exp2(s - anchor[:, None])
        fade = tl.math.exp2(top - anchor)
        total = total * fade + tl.sum(p, 1)
        values = _read(v, j, stop, v_row, C, DV, PADDED_DV)
        acc = acc * fade[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
        top = new
    return acc, top, total


@triton.jit
def attend_kernel(
    q, k, v, out, lse, table, scale, inner, outer,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    out_batch, out_row, out_head, lse_batch, lse_head, lse_row,
    q_rows, blocks, heads, group, work,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
    MERGE: tl.constexpr,
):  # fmt: skip
    """Compute out and LSE. The programs share `work` = blocks x heads x batch pieces."""
    for piece in range(tl.program_id(0), work, tl.num_programs(0)):
        block = table + (piece % blocks) * 4
        head, batch = (piece // blocks) % heads, piece // blocks // heads
        start = tl.load(block)
        rows = start + tl.arange(0, R)
        keys = _head(k, batch, head // group, k_batch, k_head)
        values = _head(v, batch, head // group, v_batch, v_head)
        mine = _read(_head(q, batch, head, q_batch, q_head), start, q_rows, q_row, R, D, PADDED_D)
        target = _head(out, batch, head, out_batch, out_head)
        target, there = _rows(target, start, q_rows, out_row, R, DV, PADDED_DV)
        sums, exists = _numbers(_head(lse, batch, head, lse_batch, lse_head), start, q_rows, lse_row, R)
        acc = tl.zeros([R, PADDED_DV], tl.float32)
        top = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        if MERGE:  # a running state equals the softmax of one score, lse, with the value out
            old = tl.load(sums, mask=exists, other=float("-inf"))
            top = old * 1.4426950408889634
            acc = tl.load(target, mask=there, other=0.0)
            total = tl.where(top == float("-inf"), 0.0, 1.0)
        before = top
        for entry in range(tl.load(block + 1), tl.load(block + 2), 12):
            acc, top, total = _attend(
                mine, keys, values, acc, top, total, rows, table + entry, scale, inner, outer, k_row, v_row,
                C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, False,
            )  # fmt: skip
            acc, top, total = _attend(
                mine, keys, values, acc, top, total, rows, table + entry, scale, inner, outer, k_row, v_row,
                C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, True,
            )  # fmt: skip
        total = tl.where(total == 0.0, 1.0, total)  # exactly 0: no visible pair, acc is 0 and top is -inf
        merged = (top + tl.math.log2(total)) * 0.6931471805599453
        if MERGE:  # rows without new keys must stay bitwise unchanged
            merged = tl.where((total == 1.0) & (top == before), old, merged)
        tl.store(target, acc / total[:, None], mask=there)
        tl.store(sums, merged, mask=exists)


# ------------------------------------------------------------------------------------------ backward


@triton.jit
def _base_two(lse):
    """Return LSE in base 2. +inf for a fully masked row, whose weights become exp2(-inf) = 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def _weights(s, lse, scale, inner, outer, CAP: tl.constexpr):
    """Return the probabilities and the derivative of the softcap."""
    if CAP:
        t = capped(s, inner)
        return tl.math.exp2(t * outer - lse), 1.0 - t * t
    else:
        return tl.math.exp2(s * scale - lse), 1.0


@triton.jit
def _of_queries(
    keys, values, dk, dv, rows, entry, q, dout, lse, delta, scale, inner, outer, q_row, dout_row, lse_row, delta_row,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dK and dV of all full, or all masked, blocks of queries of one entry. Scores are [keys, queries]."""
    first, left, second, count = stretch(entry, MASKED)
    stop, last_start = tl.load(entry + 10), tl.load(entry + 11)
    lower, upper = _bounds(rows, entry)
    for n in range(count):
        nominal, j = step_start(n, first, left, second, last_start, C, MASKED)
        queries = _read(q, j, stop, q_row, C, D, PADDED_D)
        sums, there = _numbers(lse, j, stop, lse_row, C)
        row_lse = _base_two(tl.load(sums, mask=there, other=float("-inf")))
        s = tl.dot(keys + 0.0, tl.trans(queries), input_precision=PRECISION)
        p, slope = _weights(s, row_lse[None, :], scale, inner, outer, CAP)
        if MASKED:
            keep = _seen(lower, upper, j, nominal, C)
            p = tl.where(keep, p, 0.0)
        douts = _read(dout, j, stop, dout_row, C, DV, PADDED_DV)
        dv += tl.dot(p.to(douts.dtype), douts, input_precision=PRECISION)
        deltas, there = _numbers(delta, j, stop, delta_row, C)
        row_delta = tl.load(deltas, mask=there, other=0.0)
        dp = tl.dot(values + 0.0, tl.trans(douts), input_precision=PRECISION)
        ds = p * (dp - row_delta[None, :]) * slope
        if MASKED:
            ds = tl.where(keep, ds, 0.0)  # values outside the tile may be NaN, and 0 * NaN is NaN
        dk += tl.dot(ds.to(queries.dtype), queries, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _of_keys(
    query, dout, row_lse, row_delta, dq, rows, entry, k, v, scale, inner, outer, k_row, v_row,
    C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
    CAP: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add dQ of all full, or all masked, blocks of keys of one entry. Scores are [queries, keys]."""
    first, left, second, count = stretch(entry, MASKED)
    stop, last_start = tl.load(entry + 10), tl.load(entry + 11)
    lower, upper = _bounds(rows, entry)
    for n in range(count):
        nominal, j = step_start(n, first, left, second, last_start, C, MASKED)
        keys = _read(k, j, stop, k_row, C, D, PADDED_D)
        values = _read(v, j, stop, v_row, C, DV, PADDED_DV)
        s = tl.dot(query + 0.0, tl.trans(keys), input_precision=PRECISION)
        p, slope = _weights(s, row_lse[:, None], scale, inner, outer, CAP)
        dp = tl.dot(dout + 0.0, tl.trans(values), input_precision=PRECISION)
        ds = p * (dp - row_delta[:, None]) * slope
        if MASKED:
            ds = tl.where(_seen(lower, upper, j, nominal, C), ds, 0.0)
        dq += tl.dot(ds.to(keys.dtype), keys, input_precision=PRECISION)
    return dq


@triton.jit
def _add(target, value, row, stop, stride, ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    address, there = _rows(target, row, stop, stride, ROWS, SIZE, PADDED)
    tl.store(address, tl.load(address, mask=there, other=0.0) + value, mask=there)


@triton.jit
def keys_kernel(
    q, k, v, dout, lse, delta, dk, dv, table, scale, inner, outer, gradient_scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row,
    dk_batch, dk_row, dk_head, dv_batch, dv_row, dv_head,
    k_rows, blocks, heads, group, work,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK and dV, one block of keys per piece, summed over its query heads. `heads` are K/V heads."""
    for piece in range(tl.program_id(0), work, tl.num_programs(0)):
        block = table + (piece % blocks) * 4
        head, batch = (piece // blocks) % heads, piece // blocks // heads
        start = tl.load(block)
        rows = start + tl.arange(0, R)
        keys = _read(_head(k, batch, head, k_batch, k_head), start, k_rows, k_row, R, D, PADDED_D)
        values = _read(_head(v, batch, head, v_batch, v_head), start, k_rows, v_row, R, DV, PADDED_DV)
        sum_dk = tl.zeros([R, PADDED_D], tl.float32)
        sum_dv = tl.zeros([R, PADDED_DV], tl.float32)
        for reader in range(head * group, head * group + group):
            queries = _head(q, batch, reader, q_batch, q_head)
            douts = _head(dout, batch, reader, dout_batch, dout_head)
            row_lse = _head(lse, batch, reader, lse_batch, lse_head)
            row_delta = _head(delta, batch, reader, delta_batch, delta_head)
            for entry in range(tl.load(block + 1), tl.load(block + 2), 12):
                sum_dk, sum_dv = _of_queries(
                    keys, values, sum_dk, sum_dv, rows, table + entry, queries, douts, row_lse, row_delta,
                    scale, inner, outer, q_row, dout_row, lse_row, delta_row,
                    C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, False,
                )  # fmt: skip
                sum_dk, sum_dv = _of_queries(
                    keys, values, sum_dk, sum_dv, rows, table + entry, queries, douts, row_lse, row_delta,
                    scale, inner, outer, q_row, dout_row, lse_row, delta_row,
                    C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, True,
                )  # fmt: skip
        _add(_head(dk, batch, head, dk_batch, dk_head), sum_dk * gradient_scale, start, k_rows, dk_row, R, D, PADDED_D)
        _add(_head(dv, batch, head, dv_batch, dv_head), sum_dv, start, k_rows, dv_row, R, DV, PADDED_DV)


@triton.jit
def queries_kernel(
    q, k, v, dout, lse, delta, dq, table, scale, inner, outer, gradient_scale,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, dout_batch, dout_row, dout_head,
    lse_batch, lse_head, lse_row, delta_batch, delta_head, delta_row, dq_batch, dq_row, dq_head,
    q_rows, blocks, heads, group, work,
    R: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ, one block of queries per piece."""
    for piece in range(tl.program_id(0), work, tl.num_programs(0)):
        block = table + (piece % blocks) * 4
        head, batch = (piece // blocks) % heads, piece // blocks // heads
        start = tl.load(block)
        rows = start + tl.arange(0, R)
        keys = _head(k, batch, head // group, k_batch, k_head)
        values = _head(v, batch, head // group, v_batch, v_head)
        query = _read(_head(q, batch, head, q_batch, q_head), start, q_rows, q_row, R, D, PADDED_D)
        mine = _read(_head(dout, batch, head, dout_batch, dout_head), start, q_rows, dout_row, R, DV, PADDED_DV)
        sums, there = _numbers(_head(lse, batch, head, lse_batch, lse_head), start, q_rows, lse_row, R)
        row_lse = _base_two(tl.load(sums, mask=there, other=float("-inf")))
        deltas, there = _numbers(_head(delta, batch, head, delta_batch, delta_head), start, q_rows, delta_row, R)
        row_delta = tl.load(deltas, mask=there, other=0.0)
        sum_dq = tl.zeros([R, PADDED_D], tl.float32)
        for entry in range(tl.load(block + 1), tl.load(block + 2), 12):
            sum_dq = _of_keys(
                query, mine, row_lse, row_delta, sum_dq, rows, table + entry, keys, values, scale, inner, outer,
                k_row, v_row, C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, False,
            )  # fmt: skip
            sum_dq = _of_keys(
                query, mine, row_lse, row_delta, sum_dq, rows, table + entry, keys, values, scale, inner, outer,
                k_row, v_row, C, D, DV, PADDED_D, PADDED_DV, CAP, PRECISION, True,
            )  # fmt: skip
        _add(_head(dq, batch, head, dq_batch, dq_head), sum_dq * gradient_scale, start, q_rows, dq_row, R, D, PADDED_D)
