"""Backward attention for Hopper (sm_90) in Gluon: a loader, which is a warp, and two workers, warpgroups of 64 keys.

One program does one block of 128 keys of one query head, or of all heads that read them (`span`), with keys as rows,
so that Pᵀ and dSᵀ are register operands of dV and dK. Per block of BM queries, a worker computes::

    Sᵀ = K·Qᵀ       dPᵀ = V·dOᵀ     Pᵀ = exp2(Sᵀ - LSE)     dSᵀ = Pᵀ∘(dPᵀ - delta)
    dV += Pᵀ·dO     dQ = dS·K  (half of it, dS of both through shared memory)         dK += dSᵀ·Q

dQ is added to global float32 by TMA, by a warp of its own (the adder), and so are dK and dV at the end, by the workers:
a ring's steps, and the query heads of one K/V head, add up with no merge. Such additions come in any order, so this
kernel is not deterministic. Where nothing is to be added to them (STORE), dK and dV are written in 16 bits instead.

Which query blocks a key block visits stands in an int32 table (see `block_tables`): the masked ones, then the full
ones, in one loop.

Shapes: q, dout, dq [B, Sq, Hq, D]; k, v, dk, dv [B, Sk, Hkv, D]. `prepare_kernel` makes the row terms
[2·B·Hq, Sq + padding], -LSE of all heads and then -delta.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from burst_portable.backends.cuda.hopper.parts import hide, reinterpret, swizzled_rows, tma_add, tma_load, tma_store


@triton.jit(do_not_specialize=["LSE", "DELTA", "TERMS", "DQ", "rows", "padded", "heads", "all_heads", "o_sb", "o_ss", "o_sh", "g_sb", "g_ss", "g_sh", "lse_sb", "lse_sh", "delta_sb", "delta_sh"])  # fmt: skip # noqa: E501
def prepare_kernel(
    OUT, DOUT, LSE, DELTA, TERMS, DQ, slope: tl.float32, shift: tl.float32,
    rows: tl.int32, padded: tl.int32, heads: tl.int32, all_heads: tl.int32,
    o_sb: tl.int64, o_ss: tl.int64, o_sh: tl.int64, g_sb: tl.int64, g_ss: tl.int64, g_sh: tl.int64,
    lse_sb: tl.int64, lse_sh: tl.int64, delta_sb: tl.int64, delta_sh: tl.int64,
    HAS_OUT: tl.constexpr, CLEAR: tl.constexpr, BM: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    # TERMS: shift - lse·slope of every head, -inf where a row sees nothing or does not exist (its P is then 0), and
    # after them -delta. CLEAR: DQ, float32 in one piece, is set to 0.
    # Strides of out and dout come in units of 4 and 8 elements, so that the compiler knows that they are aligned.
    # Programs side by side do heads that lie side by side.
    head = tl.program_id(0) % all_heads
    row = tl.program_id(0) // all_heads * BM + tl.arange(0, BM)
    b = head // heads
    h = head % heads
    inside = row < rows
    at = row.to(tl.int64)[:, None]
    d = tl.arange(0, D)[None, :]
    if HAS_OUT:
        o = tl.load(OUT + (b * o_sb + h * o_sh) * 4 + at * (o_ss * 4) + d, mask=inside[:, None], other=0.0)
        g = tl.load(DOUT + (b * g_sb + h * g_sh) * 8 + at * (g_ss * 8) + d, mask=inside[:, None], other=0.0)
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
    if CLEAR:
        corner = (tl.cast(b, tl.int64) * rows * heads + h) * D
        tl.store(DQ + corner + at * (heads * D) + d, tl.zeros([BM, D], tl.float32), mask=inside[:, None])


@gluon.jit
def _work(table, heads, span, head_group):
    # program -> batch, its first query head, both as one, row of the work table. Along x run heads that share rows in
    # the L2, along y blocks, long columns first, along z the other heads and batches.
    head = (gl.program_id(2) * head_group + gl.program_id(0)) * span
    return head // heads, head % heads, head, table + 16 * gl.program_id(1)


@gluon.jit
def _load_rows(
    desc, term_desc, b, row, h, at, ready, empty, rows_sm, terms_sm, it,
    BM: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr,
):  # fmt: skip
    # queries or dO, and the row terms that go with them
    slot = it % NQ
    mbarrier.wait(empty.index(slot), ((it // NQ) & 1) ^ 1)
    mbarrier.expect(ready.index(slot), desc.block_type.nbytes + term_desc.block_type.nbytes)
    view = reinterpret(rows_sm.index(slot), desc.dtype, [1, BM, 1, D], desc.layout)
    tma_load(desc, [b, row, h, 0], ready.index(slot), view)
    tma_load(term_desc, [at, row], ready.index(slot), terms_sm.index(slot))


@gluon.jit
def _loader(
    q_desc, k_desc, v_desc, do_desc, term_desc, table, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm,
    kv_rdy, q_rdy, do_rdy, q_emp, do_emp, all_heads, heads, kv_group, span, head_group,
    BM: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr,
):  # fmt: skip
    b, h, bh, work = _work(table, heads, span, head_group)
    col = gl.load(work)
    kv = h // kv_group
    runs = table + gl.load(work + 1)
    n_runs = gl.load(work + 2)
    mbarrier.expect(kv_rdy, 2 * (k_desc.block_type.nbytes + v_desc.block_type.nbytes))
    for w in gl.static_range(2):
        k_view = reinterpret(k_sm.index(w), k_desc.dtype, [1, 64, 1, D], k_desc.layout)
        v_view = reinterpret(v_sm.index(w), v_desc.dtype, [1, 64, 1, D], v_desc.layout)
        tma_load(k_desc, [b, col + 64 * w, kv, 0], kv_rdy, k_view)
        tma_load(v_desc, [b, col + 64 * w, kv, 0], kv_rdy, v_view)
    it = 0
    for g in range(span):
        for r in range(n_runs):
            first = gl.load(runs + 2 * r)
            count = gl.load(runs + 2 * r + 1)
            for i in range(count):
                row = first + i * BM
                at = bh + g
                _load_rows(q_desc, term_desc, b, row, h + g, at, q_rdy, q_emp, q_sm, l_sm, it, BM, D, NQ)
                at += all_heads
                _load_rows(do_desc, term_desc, b, row, h + g, at, do_rdy, do_emp, do_sm, d_sm, it, BM, D, NQ)
                it += 1


@gluon.jit
def _add_dq(dq_desc, b, row, h, dq_sm, dq_rdy, dq_emp, it, D: gl.constexpr):
    for w in gl.static_range(2):
        mbarrier.wait(dq_rdy.index(w), it & 1)
        view = reinterpret(dq_sm.index(w), gl.float32, [1, 64, 1, 64], dq_desc.layout)
        if D == 128:
            tma_add(dq_desc, [b, row, h, w * 64], view)
        else:
            tma_add(dq_desc, [b, row + w * 64, h, 0], view)
    tma.store_wait(0)
    for w in gl.static_range(2):
        mbarrier.arrive(dq_emp.index(w), count=1)


@gluon.jit
def _adder(dq_desc, table, dq_sm, dq_rdy, dq_emp, heads, span, head_group, BM: gl.constexpr, D: gl.constexpr):
    # a warp of its own: the workers have no registers left for where a block lies
    b, h, _bh, work = _work(table, heads, span, head_group)
    runs = table + gl.load(work + 1)
    n_runs = gl.load(work + 2)
    it = 0
    for g in range(span):
        for r in range(n_runs):
            first = gl.load(runs + 2 * r)
            count = gl.load(runs + 2 * r + 1)
            for i in range(count):
                _add_dq(dq_desc, b, first + i * BM, h + g, dq_sm, dq_rdy, dq_emp, it + i, D)
            it += count


@gluon.jit
def _bounds(entry, col0, sl: gl.constexpr):
    # a masked block's visible queries [first, last) of each key, counted from its first query
    row = gl.load(entry)
    q_start = gl.load(entry + 1)
    q_stop = gl.load(entry + 2)
    k_start = gl.load(entry + 3)
    k_stop = gl.load(entry + 4)
    lo = gl.load(entry + 5)  # lo <= key - query <= hi
    hi = gl.load(entry + 6)
    keys = col0 + gl.arange(0, 64, gl.SliceLayout(1, sl))
    first = gl.maximum(keys - hi, q_start) - row
    last = gl.minimum(keys - lo + 1, q_stop) - row
    last = gl.where((keys >= k_start) & (keys < k_stop), last, 0)
    return first, last


@gluon.jit
def _broadcast_terms(buf, factor, BM: gl.constexpr, sl: gl.constexpr):
    # a term a query, the same for every key: [BM] -> [64, BM]
    terms, _ = gl.broadcast(
        (buf.reshape([BM]).load(gl.SliceLayout(0, sl)) * factor)[None, :],
        gl.zeros([64], gl.float32, gl.SliceLayout(1, sl))[:, None],
    )
    return terms


@gluon.jit
def _product(keys, rows, BM: gl.constexpr):
    # Sᵀ or dPᵀ of a block
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    nothing = gl.zeros([64, BM], gl.float32, sl)
    return warpgroup_mma(keys, rows.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def _step(
    WG: gl.constexpr, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm, ds_sm, dq_sm,
    q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, it, i, dk, dv, masked, n_masked, col0, scale, qk_scale,
    BM: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr, FOLD: gl.constexpr,
):  # fmt: skip
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ql: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    pl: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    ds_rows: gl.constexpr = swizzled_rows(BM, 64, 16)
    dq_rows: gl.constexpr = swizzled_rows(64, 64, 32)
    slot = it % NQ
    phase = (it // NQ) & 1
    pair = it % 2
    # 0, which the compiler does not know: it would work out where all operands lie before the loop, and keep that in
    # registers and scratch
    zero = it >> 30
    mbarrier.wait(q_rdy.index(slot), phase)
    s = _product(k_sm.index(WG + zero), q_sm.index(slot), BM)
    mbarrier.wait(do_rdy.index(slot), phase)
    dp = _product(v_sm.index(WG + zero), do_sm.index(slot), BM)
    s = warpgroup_mma_wait(1, deps=[s])
    p = gl.exp2(s * qk_scale + _broadcast_terms(l_sm.index(slot), qk_scale, BM, sl))
    if i < n_masked:
        first, last = _bounds(masked + 8 * i, col0, sl)
        p = hide(p, first, last, 0.0)
    p16 = gl.convert_layout(p.to(q_sm.dtype), pl)
    minus_delta = _broadcast_terms(d_sm.index(slot), 1.0, BM, sl)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (p * (dp + minus_delta)).to(q_sm.dtype)
    reinterpret(ds_sm.index(2 * pair + WG), q_sm.dtype, [BM, 64], ds_rows).permute((1, 0)).store(ds)
    dvt = warpgroup_mma(p16, do_sm.index(slot), dv, is_async=True)
    fence_async_shared()
    mbarrier.arrive(ds_rdy.index(pair), count=1)
    ds = gl.convert_layout(ds, pl)
    mbarrier.wait(ds_rdy.index(pair), (it // 2) & 1)
    dq = gl.zeros([64, 64], gl.float32, ql)
    ds0 = ds_sm.index(2 * pair)
    ds1 = ds_sm.index(2 * pair + 1)
    if D == 128:  # half of the columns
        dq = warpgroup_mma(ds0, k_sm.index(0).slice(WG * 64, 64, dim=1), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds1, k_sm.index(1).slice(WG * 64, 64, dim=1), dq, is_async=True)
    else:  # half of the rows
        dq = warpgroup_mma(ds0.slice(WG * 64, 64, dim=0), k_sm.index(0), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds1.slice(WG * 64, 64, dim=0), k_sm.index(1), dq, is_async=True)
    dv, p16 = warpgroup_mma_wait(2, deps=[dvt, p16])
    mbarrier.arrive(do_emp.index(slot), count=1)
    dkt = warpgroup_mma(ds, q_sm.index(slot), dk, is_async=True)
    # dQ is written beside dK's product, which leaves half of shared memory's bandwidth to others
    dq = warpgroup_mma_wait(1, deps=[dq])
    if not FOLD:
        dq = dq * scale
    mbarrier.wait(dq_emp.index(WG), (it & 1) ^ 1)
    reinterpret(dq_sm.index(WG), gl.float32, [64, 64], dq_rows).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_rdy.index(WG), count=1)
    dk, ds = warpgroup_mma_wait(0, deps=[dkt, ds])
    mbarrier.arrive(q_emp.index(slot), count=1)
    return dk, dv


@gluon.jit
def _add_out(x, desc, buffer, b, row, kv, D: gl.constexpr):
    # 64 rows of float32 through a buffer that nobody reads any more
    plain: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    reinterpret(buffer, gl.float32, [64, D], plain).store(x)
    fence_async_shared()
    tma_add(desc, [b, row, kv, 0], reinterpret(buffer, gl.float32, [1, 64, 1, D], desc.layout))


@gluon.jit
def _store_out(x, desc, out, buffer, b, row, stop, keys, kv, kv_heads, D: gl.constexpr):
    # 64 rows in 16 bits, those before `stop`
    if (stop - row >= 64) | (stop == keys):  # TMA leaves out what is past a batch's end
        buffer.store(x.to(buffer.dtype))
        fence_async_shared()
        view = reinterpret(buffer, buffer.dtype, [1, 64, 1, D], desc.layout)
        tma_store(desc, [b, row, kv, 0], view)
    else:  # the rows from there on are another program's
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        place = ((gl.cast(b, gl.int64) * keys + rows) * kv_heads + kv)[:, None] * D
        place += gl.arange(0, D, gl.SliceLayout(0, x.type.layout))[None, :]
        gl.store(out + place, x.to(buffer.dtype), mask=(rows < stop)[:, None])


@gluon.jit
def _worker(
    WG: gl.constexpr, dk_desc, dv_desc, dk_out, dv_out, table, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm, ds_sm, dq_sm,
    kv_rdy, q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, done,
    scale, qk_scale, heads, kv_group, span, head_group, keys,
    BM: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr, FOLD: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    b, h, _bh, work = _work(table, heads, span, head_group)
    col0 = gl.load(work) + 64 * WG
    masked = table + gl.load(work + 4)
    n_masked = gl.load(work + 5)
    n = gl.load(work + 3) + n_masked
    dk = gl.zeros([64, D], gl.float32, al)
    dv = gl.zeros([64, D], gl.float32, al)
    mbarrier.wait(kv_rdy, 0)
    i = 0
    for it in range(span * n):  # one loop, or the compiler takes `it` for a number that threads differ in
        dk, dv = _step(
            WG, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm, ds_sm, dq_sm,
            q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, it, i, dk, dv,
            masked, n_masked, col0, scale, qk_scale, BM, D, NQ, FOLD)  # fmt: skip
        i += 1
        if i == n:  # the next head
            i = 0
    if FOLD:
        dv = dv * (1.0 / scale)
    else:
        dk = dk * scale
    # What was loaded serves as staging now, a part of it for each; the other worker must have read its last of it.
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    kv = h // kv_group
    if STORE:
        stage = k_sm if WG == 0 else v_sm
        stop = gl.load(work + 6)
        kv_heads = heads // kv_group
        _store_out(dv, dv_desc, dv_out, stage.index(0), b, col0, stop, keys, kv, kv_heads, D)
        _store_out(dk, dk_desc, dk_out, stage.index(1), b, col0, stop, keys, kv, kv_heads, D)
    elif WG == 0:
        _add_out(dv, dv_desc, k_sm, b, col0, kv, D)
        _add_out(dk, dk_desc, q_sm if D == 128 else q_sm.index(0), b, col0, kv, D)
    else:
        _add_out(dv, dv_desc, v_sm, b, col0, kv, D)
        _add_out(dk, dk_desc, do_sm if D == 128 else do_sm.index(0), b, col0, kv, D)
    tma.store_wait(0)


# Nothing is specialised by value: the launcher reuses one compiled kernel for all values.
@gluon.jit(do_not_specialize=["dk_out", "dv_out", "table", "all_heads", "heads", "kv_group", "span", "head_group", "keys"])  # fmt: skip # noqa: E501
def backward_kernel(
    q_desc, k_desc, v_desc, do_desc, term_desc, dq_desc, dk_desc, dv_desc, dk_out, dv_out, table,
    scale: gl.float32, qk_scale: gl.float32,
    all_heads: gl.int32, heads: gl.int32, kv_group: gl.int32, span: gl.int32, head_group: gl.int32,
    keys: gl.int32,
    BM: gl.constexpr, D: gl.constexpr, NQ: gl.constexpr, FOLD: gl.constexpr, STORE: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    q_sm = gl.allocate_shared_memory(dtype, [NQ, BM, D], tile)
    do_sm = gl.allocate_shared_memory(dtype, [NQ, BM, D], tile)
    k_sm = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    v_sm = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    l_sm = gl.allocate_shared_memory(gl.float32, [NQ, 1, BM], term_desc.layout)
    d_sm = gl.allocate_shared_memory(gl.float32, [NQ, 1, BM], term_desc.layout)
    ds_sm = gl.allocate_shared_memory(dtype, [4, BM, 64], tile)
    dq_sm = gl.allocate_shared_memory(gl.float32, [2, 64, 64], wide)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    kv_rdy = gl.allocate_shared_memory(gl.int64, [1], bl)
    q_rdy = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    q_emp = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    do_rdy = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    do_emp = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    ds_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    dq_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    dq_emp = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    done = gl.allocate_shared_memory(gl.int64, [1], bl)
    mbarrier.init(kv_rdy, count=1)
    mbarrier.init(done, count=2)
    for i in gl.static_range(NQ):
        mbarrier.init(q_rdy.index(i), count=1)
        mbarrier.init(q_emp.index(i), count=2)
        mbarrier.init(do_rdy.index(i), count=1)
        mbarrier.init(do_emp.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_rdy.index(i), count=2)
        mbarrier.init(dq_rdy.index(i), count=1)
        mbarrier.init(dq_emp.index(i), count=1)
    fence_async_shared()
    # The argument tuples stand inline: a local variable would turn their constants into tensors.
    gl.warp_specialize([
        (_worker, (0, dk_desc, dv_desc, dk_out, dv_out, table, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm, ds_sm, dq_sm,
                   kv_rdy, q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, done,
                   scale, qk_scale, heads, kv_group, span, head_group, keys, BM, D, NQ, FOLD, STORE)),
        (_worker, (1, dk_desc, dv_desc, dk_out, dv_out, table, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm, ds_sm, dq_sm,
                   kv_rdy, q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, done,
                   scale, qk_scale, heads, kv_group, span, head_group, keys, BM, D, NQ, FOLD, STORE)),
        (_loader, (q_desc, k_desc, v_desc, do_desc, term_desc, table, q_sm, k_sm, v_sm, do_sm, l_sm, d_sm,
                   kv_rdy, q_rdy, do_rdy, q_emp, do_emp, all_heads, heads, kv_group, span, head_group, BM, D, NQ)),
        (_adder, (dq_desc, table, dq_sm, dq_rdy, dq_emp, heads, span, head_group, BM, D)),
    ], [4, 1, 1], [REGS, 24, 24])  # fmt: skip
