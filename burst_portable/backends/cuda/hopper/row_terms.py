"""Define the kernel for Hopper (sm_90) that computes the row terms of a backward pass, and clears dQ.

The backward kernels read two numbers per query and head: -LSE, and -delta, the negative row sum of out·dO.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["LSE", "DELTA", "TERMS", "DQ", "TURNS", "CLEARED", "ORDER", "rows", "padded", "heads", "all_heads", "blocks", "o_sb", "o_ss", "o_sh", "g_sb", "g_ss", "g_sh", "lse_sb", "lse_sh", "delta_sb", "delta_sh"])  # fmt: skip # noqa: E501
def row_terms_kernel(
    OUT, DOUT, LSE, DELTA, TERMS, DQ, TURNS, CLEARED, ORDER, slope: tl.float32, shift: tl.float32,
    rows: tl.int32, padded: tl.int32, heads: tl.int32, all_heads: tl.int32, blocks: tl.int32,
    o_sb: tl.int64, o_ss: tl.int64, o_sh: tl.int64, g_sb: tl.int64, g_ss: tl.int64, g_sh: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, delta_sb: tl.int64, delta_sh: tl.int64,
    HAS_OUT: tl.constexpr, CLEAR: tl.constexpr, FRESH: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
    DV: tl.constexpr, PADDED_D: tl.constexpr, PADDED_DV: tl.constexpr,
):  # fmt: skip
    """Write the row terms: shift - lse·slope of every head, then -delta of every head. If CLEAR, set DQ to 0.

    The first term is -inf if a row sees no key or is padding; its P is then 0. DQ is contiguous float32. Delta is the
    row sum of OUT·DOUT if HAS_OUT, else it is read from DELTA.

    If FRESH, copy TURNS (int32 [blocks]) to ORDER for every head, and clear only those BM rows for which CLEARED (int32
    per BM rows) is not 0.
    """
    # Strides of out and dout are in units of 4 and 8 elements, so that the compiler can derive their alignment.
    # Consecutive programs compute consecutive heads.
    head = tl.program_id(0) % all_heads
    row = tl.program_id(0) // all_heads * BM + tl.arange(0, BM)
    b = head // heads
    h = head % heads
    inside = row < rows
    at = row.to(tl.int64)[:, None]
    if HAS_OUT:
        d = tl.arange(0, PADDED_DV)[None, :]
        keep = inside[:, None] & (d < DV)
        o = tl.load(OUT + (b * o_sb + h * o_sh) * 4 + at * (o_ss * 4) + d, mask=keep, other=0.0)
        g = tl.load(DOUT + (b * g_sb + h * g_sh) * 8 + at * (g_ss * 8) + d, mask=keep, other=0.0)
        delta = tl.sum(o.to(tl.float32) * g.to(tl.float32), 1)
    else:
        delta = tl.load(DELTA + b * delta_sb + h * delta_sh + row, mask=inside, other=0.0)
    lse = tl.load(LSE + b * lse_sb + h * lse_sh + row, mask=inside, other=float("-inf"))
    seen = lse != float("-inf")
    ln = tl.where(seen, shift - lse * slope, float("-inf"))
    first = tl.cast(head, tl.int64) * padded
    tl.store(TERMS + first + row, ln, mask=row < padded)
    first += tl.cast(all_heads, tl.int64) * padded
    tl.store(TERMS + first + row, tl.where(seen, -delta, 0.0), mask=row < padded)
    clears = CLEAR
    if FRESH:  # there are fewer blocks than four for each program of a head
        number = tl.program_id(0) // all_heads
        block = 4 * number + tl.arange(0, 4)
        tl.store(ORDER + head * blocks + block, tl.load(TURNS + block, mask=block < blocks), mask=block < blocks)
        clears = tl.load(CLEARED + number) != 0
    if clears:
        corner = (tl.cast(b, tl.int64) * rows * heads + h) * D
        column = tl.arange(0, PADDED_D)[None, :]
        nothing = tl.zeros([BM, PADDED_D], tl.float32)
        tl.store(DQ + corner + at * (heads * D) + column, nothing, mask=inside[:, None] & (column < D))
