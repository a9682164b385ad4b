"""Define loads, scores, masks and dropout for the forward and the backward kernels.

Shapes: R rows of the program's block ("own" rows), C columns of one step, P a head size padded to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(
    source, batch, head, row, stop, stride,
    ROWS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, TMA: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    """Load [ROWS, PADDED] from `row` on. `source` is a descriptor of the tensor, or a pointer to one head.

    A descriptor returns zeros past the tensor. A pointer reads past `stop` unless CLIP.
    """
    if TMA:
        return tl.reshape(source.load([batch, row, head, 0]), (ROWS, PADDED))
    else:
        inner = tl.arange(0, PADDED)
        # Only the block's start needs 64 bits; the offsets inside it stay as narrow as the stride is.
        start = source + tl.cast(row, tl.int64) * stride
        address = start + (tl.arange(0, ROWS)[:, None] * stride + inner[None, :])
        if CLIP:
            keep = (row + tl.arange(0, ROWS))[:, None] < stop
            if SIZE != PADDED:
                keep &= inner[None, :] < SIZE
            return tl.load(address, mask=keep, other=0.0)
        elif SIZE != PADDED:
            return tl.load(address, mask=inner[None, :] < SIZE, other=0.0)
        else:
            return tl.load(address)


@triton.jit
def load_numbers(source, batch, head, row, stop, stride, COUNT: tl.constexpr, TMA: tl.constexpr, CLIP: tl.constexpr):
    """Load [COUNT] numbers of a [B, H, S] tensor from `row` on. `source` as in `load_rows`."""
    if TMA:
        return tl.reshape(source.load([batch, head, row]), (COUNT,))
    else:
        start = source + tl.cast(row, tl.int64) * stride
        index = tl.arange(0, COUNT)
        if CLIP:
            return tl.load(start + index * stride, mask=row + index < stop, other=0.0)
        else:
            return tl.load(start + index * stride)


@triton.jit
def head_of(source, batch, head, batch_stride, head_stride, TMA: tl.constexpr):
    """Return the `source` of `load_rows` for one head."""
    if TMA:
        return source
    else:
        return source + tl.cast(batch, tl.int64) * batch_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def widened(stride, WIDE: tl.constexpr):
    """Return a row stride, in 64 bits if offsets inside a block of rows exceed 32 bits."""
    if WIDE:
        return tl.cast(stride, tl.int64)
    else:
        return stride


@triton.jit
def place(table, blocks, heads, TOGETHER: tl.constexpr):
    """Return this program's batch row, head, and block of the table.

    Programs of TOGETHER heads follow each other: enough heads to fill the device with the longest blocks first, and few
    enough that their keys and values stay in the cache.
    """
    program = tl.program_id(0)
    within = program % TOGETHER
    program = program // TOGETHER
    block = program % blocks
    program = program // blocks
    groups = heads // TOGETHER
    return program // groups, (program % groups) * TOGETHER + within, table + block * 4


@triton.jit
def stretch(entry, MASKED: tl.constexpr):
    """Return two block ranges of a table entry: start of the first, its blocks, start of the second, blocks of both."""
    if MASKED:
        left = tl.load(entry + 3)
        return tl.load(entry + 2), left, tl.load(entry + 4), left + tl.load(entry + 5)
    else:
        count = tl.load(entry + 1)
        start = tl.load(entry)
        return start, count, start, count


@triton.jit
def step_start(n, first, left, second, last_start, COLUMNS: tl.constexpr, MASKED: tl.constexpr):
    """Return the first column of the n-th step, and the column from which it loads.

    The last block of a tile could load columns past the tile. They may be NaN, and masking a factor of a product does
    not remove NaN. So the last step loads the tile's last columns, and columns of earlier steps are masked.
    """
    if MASKED:
        nominal = tl.where(n < left, first + n * COLUMNS, second + (n - left) * COLUMNS)
        return nominal, tl.minimum(nominal, last_start)
    else:
        start = first + n * COLUMNS
        return start, start


@triton.jit
def row_bounds(rows, entry):
    """Return the first and the last visible column [R] of the entry's tile for each own row; none outside the tile.

    With two numbers per row, masking needs no intermediate per score. These kernels are short of registers.
    """
    inside = (rows >= tl.load(entry + 8)) & (rows < tl.load(entry + 9))
    last = tl.minimum(rows - tl.load(entry + 6), tl.load(entry + 10) - 1)
    return rows - tl.load(entry + 7), tl.where(inside, last, -1)


@triton.jit
def seen(lower, upper, columns, nominal):
    """Return which pairs [R, C] of a masked block are in the tile and in no earlier block."""
    return (columns[None, :] >= tl.maximum(lower, nominal)[:, None]) & (columns[None, :] <= upper[:, None])


@triton.jit
def capped(s, inner):
    """Return tanh of a softcapped score. `inner` is scale / cap * 2·log2(e). Saturates and never returns NaN.

    Near 0 it is computed by its series. There 1 - 2 / (1 + e) has only the digits of float32 near 1, and the error is
    multiplied by the cap.
    """
    twice = s * inner
    x = twice * 0.34657359027997264
    square = x * x
    near = x + x * square * (-0.33333333333 + square * (0.13333333333 - square * 0.05396825397))
    return tl.where(square < 0.04, near, 1.0 - 2.0 / (1.0 + tl.math.exp2(twice)))


@triton.jit
def weight_factors(queries, keys, dropout):
    """Return the factors of dropout, 0 or 1 / (1 - p), for positions whose shapes broadcast: see `kernels.dropout`.

    `dropout` is (batch, head, seed_low, seed_high, drop_below, keep_scale) of this program; None without dropout.
    """
    batch, head, seed_low, seed_high, drop_below, keep_scale = dropout
    first, second, third, fourth = tl.philox_impl(
        (keys >> 2).to(tl.uint32), queries.to(tl.uint32), head.to(tl.uint32), batch.to(tl.uint32),
        seed_low.to(tl.uint32, bitcast=True), seed_high.to(tl.uint32, bitcast=True),
    )  # fmt: skip
    number = keys & 3
    word = tl.where(number < 2, tl.where(number == 0, first, second), tl.where(number == 2, third, fourth))
    return tl.where(word >= drop_below.to(tl.uint32, bitcast=True), keep_scale, 0.0)


@triton.jit
def load_positions(source, first, stop, COUNT: tl.constexpr, CLIP: tl.constexpr):
    """Load COUNT global positions from `first` on; those from `stop` on are 0 if CLIP."""
    index = first + tl.arange(0, COUNT)
    if CLIP:
        return tl.load(source + index, mask=index < stop, other=0)
    else:
        return tl.load(source + index)
