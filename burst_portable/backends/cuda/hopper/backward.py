"""Define the backward kernel for Hopper (sm_90) that computes all gradients in one launch, in Gluon.

A program has two workers, one loader and one adder or, if ORDERED, two adders. A loader or adder is a warp. A worker is
a warpgroup that computes 64 keys. So a program computes one block of 128 keys, for `span` query heads: one, or all that
share the K/V head. Keys are the rows of all products, so Pᵀ and dSᵀ are register operands of dV and dK. Per block of BM
queries, a worker computes::

    Sᵀ = K·Qᵀ       dPᵀ = V·dOᵀ     Pᵀ = exp2(Sᵀ - LSE)     dSᵀ = Pᵀ∘(dPᵀ - delta)
    dV += Pᵀ·dO     dQ = dS·K  (one half per worker; shared memory holds dS of both)  dK += dSᵀ·Q

An adder adds dQ to global float32 by TMA. At the end, the workers add dK and dV in the same way. So the steps of a
ring, and the query heads of one K/V head, accumulate without a merge. If nothing is to be added to dK and dV (STORE),
they are written instead, in 16 bits or, for each query head, in float32.

The order of the additions to dQ varies. If ORDERED, it is the order of the work rows, so the result is deterministic.
In `order`, an int32 per query block is the turn of the visit that adds to it next. A program waits only for programs of
previous work rows, which start before it. If FRESH too, dQ has no values yet: the first visit of a block writes it.

An int32 table lists the query blocks of each key block (see `block_tables`). One loop visits the masked blocks and then
the full blocks. If ORDERED, some masked blocks may follow the full blocks.

Shapes: q, dout, dq [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; dk, dv [B, rows, Hq / out_group, D]. `out_group` is the number
of query heads per head of dK and dV. `row_terms` computes the row terms [2·B·Hq, Sq + padding]: -LSE of all heads, then
-delta of all heads.

Endings of names: `_sm` shared memory, `_rdy` barrier of a full slot, `_emp` barrier of an empty slot, `2` second panel
of columns. Names: `it` query blocks so far, `do` the gradient of out, `l` and `d` the row terms -LSE and -delta.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from burst_portable.backends.cuda.hopper.parts import (
    capped,
    exponent_scale,
    hide,
    panel,
    reinterpret,
    swizzled_rows,
    tma_add,
    tma_load,
    tma_store,
)


@gluon.jit
def _work(table, heads, span, head_group):
    """Return the batch row, the first query head, its index among all heads of the batch, and the work row.

    Programs along x compute heads that share rows in the L2. Programs along y compute blocks, long ones first. Programs
    along z compute the other heads and batch rows.
    """
    head = (gl.program_id(2) * head_group + gl.program_id(0)) * span
    return head // heads, head % heads, head, table + 16 * gl.program_id(1)


@gluon.jit
def _load_rows(
    desc, desc2, term_desc, b, row, h, at, ready, empty, rows_sm, rows2_sm, terms_sm, it,
    BM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, NQ: gl.constexpr,
):  # fmt: skip
    """Load a block of BM queries or rows of dO, and their row terms, as soon as the slot is empty."""
    slot = it % NQ
    mbarrier.wait(empty.index(slot), ((it // NQ) & 1) ^ 1)
    size: gl.constexpr = desc.block_type.nbytes
    mbarrier.expect(ready.index(slot), size + size * B // A + term_desc.block_type.nbytes)
    view = reinterpret(rows_sm.index(slot), desc.dtype, [1, BM, 1, A], desc.layout)
    tma_load(desc, [b, row, h, 0], ready.index(slot), view)
    if B:
        view2 = reinterpret(rows2_sm.index(slot), desc.dtype, [1, BM, 1, B], desc2.layout)
        tma_load(desc2, [b, row, h, A], ready.index(slot), view2)
    tma_load(term_desc, [at, row], ready.index(slot), terms_sm.index(slot))


@gluon.jit
def _load_keys(desc, desc2, b, col, kv, ready, keys_sm, keys2_sm, A: gl.constexpr, B: gl.constexpr):
    """Start loading the keys or values of both workers. The barrier `ready` already expects their bytes."""
    for w in gl.static_range(2):
        view = reinterpret(keys_sm.index(w), desc.dtype, [1, 64, 1, A], desc.layout)
        tma_load(desc, [b, col + 64 * w, kv, 0], ready, view)
        if B:
            view2 = reinterpret(keys2_sm.index(w), desc.dtype, [1, 64, 1, B], desc2.layout)
            tma_load(desc2, [b, col + 64 * w, kv, A], ready, view2)


@gluon.jit
def _loader(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, term_desc, table,
    q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm,
    kv_rdy, q_rdy, do_rdy, q_emp, do_emp, all_heads, heads, kv_group, span, head_group,
    BM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr, NQ: gl.constexpr,
    ORDERED: gl.constexpr,
):  # fmt: skip
    """Load the keys and values once, then the query blocks of all heads in the order in which workers read them."""
    b, h, bh, work = _work(table, heads, span, head_group)
    col = gl.load(work)
    kv = h // kv_group
    runs = table + gl.load(work + 1)
    n_runs = gl.load(work + 2)
    k_size: gl.constexpr = 2 * k_desc.block_type.nbytes
    v_size: gl.constexpr = 2 * v_desc.block_type.nbytes
    mbarrier.expect(kv_rdy, k_size + k_size * B // A + v_size + v_size * VB // VA)
    _load_keys(k_desc, k2_desc, b, col, kv, kv_rdy, k_sm, k2_sm, A, B)
    _load_keys(v_desc, v2_desc, b, col, kv, kv_rdy, v_sm, v2_sm, VA, VB)
    it = 0
    for g in range(span):
        for r in range(n_runs):
            first = gl.load(runs + 2 * r)
            count = gl.load(runs + 2 * r + 1)
            step = BM
            if ORDERED:
                step = gl.where(count < 0, -BM, BM)
                count = gl.maximum(count, -count)
            for i in range(count):
                row = first + i * step
                at = bh + g
                _load_rows(
                    q_desc, q2_desc, term_desc, b, row, h + g, at, q_rdy, q_emp, q_sm, q2_sm, l_sm, it,
                    BM, A, B, NQ)  # fmt: skip
                at += all_heads
                _load_rows(
                    do_desc, do2_desc, term_desc, b, row, h + g, at, do_rdy, do_emp, do_sm, do2_sm, d_sm, it,
                    BM, VA, VB, NQ)  # fmt: skip
                it += 1


@gluon.jit
def _read_turn(place):
    """Start reading whose turn it is. Its use waits for it."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.b32 $0, [$1];", "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _await_turn(place, turn):
    """Wait until the int32 at `place` is this turn."""
    gl.inline_asm_elementwise(
        "{ .reg .pred other; again: ld.relaxed.gpu.global.b32 $0, [$1]; setp.ne.s32 other, $0, $2; @other bra again; }",
        "=&r,l,r", [place, turn], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _pass_turn(place, following):
    """Write the next turn to `place` once the additions of this warp are visible on the device.

    Only one thread starts additions and waits for them here. The other threads wait for it. Without the fence, the
    gradients of equal calls differed on one H200.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred first; .reg .b32 lane; cp.async.bulk.wait_group 0; fence.acq_rel.gpu; "
        "bar.warp.sync 0xffffffff; mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0; "
        "@first st.relaxed.gpu.global.b32 [$1], $2; mov.b32 $0, $2; }",
        "=&r,l,r", [place, following], dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _add_or_write(desc, at, source, begins, FRESH: gl.constexpr):
    """Add a buffer to global memory or, if FRESH and `begins`, write it."""
    if FRESH:
        if begins:
            tma_store(desc, at, source)
        else:
            tma_add(desc, at, source)
    else:
        tma_add(desc, at, source)


@gluon.jit
def _add_dq(
    dq_desc, dq2_desc, b, row, h, dq_sm, dq2_sm, dq_rdy, dq_emp, it, begins,
    A: gl.constexpr, B: gl.constexpr, ORDERED: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Add both workers' halves of one block of dQ to global memory, then mark their buffers as empty."""
    SETS: gl.constexpr = 1 + ORDERED  # of barriers, one per adder
    for w in gl.static_range(2):
        mbarrier.wait(dq_rdy.index(2 * (it % SETS) + w), (it // SETS) & 1)
        if w == 1 and B:
            view = reinterpret(dq2_sm, gl.float32, [1, 64, 1, B], dq2_desc.layout)
            _add_or_write(dq2_desc, [b, row, h, A], view, begins, FRESH)
        else:
            view = reinterpret(dq_sm.index(w), gl.float32, [1, 64, 1, 64], dq_desc.layout)
            if A == 128:
                _add_or_write(dq_desc, [b, row, h, w * 64], view, begins, FRESH)
            else:
                _add_or_write(dq_desc, [b, row + w * 64, h, 0], view, begins, FRESH)
    tma.store_wait(0)
    for w in gl.static_range(2):
        mbarrier.arrive(dq_emp.index(w), count=1)


@gluon.jit
def _adder(
    PART: gl.constexpr, dq_desc, dq2_desc, table, order, dq_sm, dq2_sm, dq_rdy, dq_emp, heads, span, head_group, blocks,
    BM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, ORDERED: gl.constexpr, FRESH: gl.constexpr,
):  # fmt: skip
    """Add dQ of query blocks to global memory. A separate warp does this: workers lack registers for positions.

    If ORDERED, adder 0 adds every second block, and adder 1 those between. To pass a turn, an adder waits until its
    addition is visible on the device. With few columns, this takes longer than the workers take for a block.
    """
    STEP: gl.constexpr = 2 if ORDERED else 1
    b, h, bh, work = _work(table, heads, span, head_group)
    runs = table + gl.load(work + 1)
    n_runs = gl.load(work + 2)
    turns = table + gl.load(work + 7)
    it = 0
    for g in range(span):
        for r in range(n_runs):
            first = gl.load(runs + 2 * r)
            count = gl.load(runs + 2 * r + 1)
            side = 1
            if ORDERED:
                side = gl.where(count < 0, -1, 1)
                count = gl.maximum(count, -count)
            place = order + (bh + g) * blocks
            turn = 0
            next_turn = 0
            begins = 0
            mine = 0
            now = 0
            if ORDERED:
                place += gl.load(turns + 4 * r)
                turn = gl.load(turns + 4 * r + 1)
                next_turn = gl.load(turns + 4 * r + 2)
                begins = gl.load(turns + 4 * r + 3)
                mine = (PART + it) % 2
                now = _read_turn(place + side * min(mine, count - 1))
            for i in range(mine, count, STEP):
                if ORDERED:
                    if now != turn:
                        _await_turn(place + side * i, turn)
                    # Reading takes about as long as half a block, so it starts before the turn is needed.
                    now = _read_turn(place + side * min(i + STEP, count - 1))
                row = first + side * i * BM
                _add_dq(
                    dq_desc, dq2_desc, b, row, h + g, dq_sm, dq2_sm, dq_rdy, dq_emp, it + i, begins,
                    A, B, ORDERED, FRESH)  # fmt: skip
                if ORDERED:
                    _pass_turn(place + side * i, next_turn)
            it += count


@gluon.jit
def _bounds(entry, col0, sl: gl.constexpr):
    """Return the visible queries [first, last) of each key in a masked block, relative to its first query."""
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
    """Return the row terms of BM queries times `factor`, the same for each of 64 keys: [BM] to [64, BM]."""
    terms, _ = gl.broadcast(
        (buf.reshape([BM]).load(gl.SliceLayout(0, sl)) * factor)[None, :],
        gl.zeros([64], gl.float32, gl.SliceLayout(1, sl))[:, None],
    )
    return terms


@gluon.jit
def _product(keys, keys2, rows, rows2, BM: gl.constexpr, B: gl.constexpr):
    """Start Sᵀ or dPᵀ of a block. Return [64, BM], which is complete after `warpgroup_mma_wait`."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    s = gl.zeros([64, BM], gl.float32, sl)
    s = warpgroup_mma(keys, rows.permute((1, 0)), s, use_acc=False, is_async=True)
    if B:
        s = warpgroup_mma(keys2, rows2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _summed(p, rows, rows2, x, x2, B: gl.constexpr):
    """Start adding p·rows to x, and p·rows2 to x2 (second panel). Both are complete after `warpgroup_mma_wait`."""
    xt = warpgroup_mma(p, rows, x, is_async=True)
    if B:
        p = gl.convert_layout(p, gl.DotOperandLayout(0, x2.type.layout, 2))
        x2 = warpgroup_mma(p, rows2, x2, is_async=True)
    return xt, x2


@gluon.jit
def _step(
    WG: gl.constexpr, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm, ds_sm, dq_sm, dq2_sm,
    q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, it, i, dk, dk2, dv, dv2,
    masked, n_early, full, col0, scale, qk_scale,
    BM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr,
    NQ: gl.constexpr, FOLD: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Compute one query block: add to dK and dV in registers, and pass this worker's half of dQ to the adder."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    al: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16])
    vl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VA, 16])
    QN: gl.constexpr = B if WG == 1 and B else 64  # columns of dQ that this worker computes
    ql: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QN, 16])
    pl: gl.constexpr = gl.DotOperandLayout(0, al, 2)
    ds_rows: gl.constexpr = swizzled_rows(BM, 64, 16)
    dq_rows: gl.constexpr = swizzled_rows(64, QN, 32)
    slot = it % NQ
    phase = (it // NQ) & 1
    pair = it % 2
    # This is 0, but not a compile-time constant. Otherwise the compiler would compute the addresses of all operands
    # before the loop, and keep them in registers and scratch memory.
    zero = it >> 30
    mbarrier.wait(q_rdy.index(slot), phase)
    mine = WG + zero
    factor = exponent_scale(qk_scale, CAP)
    if EARLY:  # read before the products start
        terms = _broadcast_terms(l_sm.index(slot), factor, BM, sl)
    s = _product(k_sm.index(mine), k2_sm.index(mine), q_sm.index(slot), q2_sm.index(slot), BM, B)
    mbarrier.wait(do_rdy.index(slot), phase)
    dp = _product(v_sm.index(mine), v2_sm.index(mine), do_sm.index(slot), do2_sm.index(slot), BM, VB)
    s = warpgroup_mma_wait(2 if VB else 1, deps=[s])
    if not EARLY:
        terms = _broadcast_terms(l_sm.index(slot), factor, BM, sl)
    if CAP > 0:
        s = capped(s, qk_scale)
    p = gl.exp2(s * factor + terms)
    if i < n_early:
        first, last = _bounds(masked + 8 * i, col0, sl)
        p = hide(p, first, last, 0.0)
    if ORDERED:  # noqa: SIM102 apart, so that the other kernels are compiled without the condition
        if i >= n_early + full:
            first, last = _bounds(masked + 8 * (i - full), col0, sl)
            p = hide(p, first, last, 0.0)
    p16 = gl.convert_layout(p.to(q_sm.dtype), gl.DotOperandLayout(0, vl, 2))
    if CAP > 0:  # from here on, p is P times the slope of the cap
        p = p * (1.0 - s * s)
    minus_delta = _broadcast_terms(d_sm.index(slot), 1.0, BM, sl)
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (p * (dp + minus_delta)).to(q_sm.dtype)
    reinterpret(ds_sm.index(2 * pair + WG), q_sm.dtype, [BM, 64], ds_rows).permute((1, 0)).store(ds)
    dvt, dvt2 = _summed(p16, do_sm.index(slot), do2_sm.index(slot), dv, dv2, VB)
    fence_async_shared()
    mbarrier.arrive(ds_rdy.index(pair), count=1)
    ds = gl.convert_layout(ds, pl)
    mbarrier.wait(ds_rdy.index(pair), (it // 2) & 1)
    dq = gl.zeros([64, QN], gl.float32, ql)
    ds0 = ds_sm.index(2 * pair)
    ds1 = ds_sm.index(2 * pair + 1)
    if WG == 1 and B:  # the second panel
        dq = warpgroup_mma(ds0, k2_sm.index(0), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds1, k2_sm.index(1), dq, is_async=True)
    elif B:
        dq = warpgroup_mma(ds0, k_sm.index(0), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds1, k_sm.index(1), dq, is_async=True)
    elif A == 128:  # half of the columns
        dq = warpgroup_mma(ds0, k_sm.index(0).slice(WG * 64, 64, dim=1), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds1, k_sm.index(1).slice(WG * 64, 64, dim=1), dq, is_async=True)
    else:  # half of the rows
        dq = warpgroup_mma(ds0.slice(WG * 64, 64, dim=0), k_sm.index(0), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(ds1.slice(WG * 64, 64, dim=0), k_sm.index(1), dq, is_async=True)
    if VB:
        dv, dv2, p16 = warpgroup_mma_wait(2, deps=[dvt, dvt2, p16])
    else:
        dv, p16 = warpgroup_mma_wait(2, deps=[dvt, p16])
    mbarrier.arrive(do_emp.index(slot), count=1)
    dkt, dkt2 = _summed(ds, q_sm.index(slot), q2_sm.index(slot), dk, dk2, B)
    # dQ is written during the product of dK, which uses only half of the bandwidth of shared memory.
    dq = warpgroup_mma_wait(2 if B else 1, deps=[dq])
    if not FOLD:
        dq = dq * scale
    mbarrier.wait(dq_emp.index(WG), (it & 1) ^ 1)
    if WG == 1 and B:
        reinterpret(dq2_sm, gl.float32, [64, QN], dq_rows).store(dq)
    else:
        reinterpret(dq_sm.index(WG), gl.float32, [64, 64], dq_rows).store(dq)
    fence_async_shared()
    mbarrier.arrive(dq_rdy.index((2 * pair if ORDERED else 0) + WG), count=1)
    if B:
        dk, dk2, ds = warpgroup_mma_wait(0, deps=[dkt, dkt2, ds])
    else:
        dk, ds = warpgroup_mma_wait(0, deps=[dkt, ds])
    mbarrier.arrive(q_emp.index(slot), count=1)
    return dk, dk2, dv, dv2


@gluon.jit
def _add_out(x, desc, buffer, b, row, kv, FIRST: gl.constexpr):
    """Add 64 float32 rows to global memory, from column FIRST on. `buffer` is staging that is no longer read."""
    N: gl.constexpr = x.shape[1]
    reinterpret(buffer, gl.float32, [64, N], panel(N, 32)).store(x)
    fence_async_shared()
    tma_add(desc, [b, row, kv, FIRST], reinterpret(buffer, gl.float32, [1, 64, 1, N], desc.layout))


@gluon.jit
def _store_out(x, desc, out, buffer, b, row, stop, out_rows, kv, kv_heads, FIRST: gl.constexpr, D: gl.constexpr):
    """Write those of 64 rows that are before `stop`, from column FIRST on. `buffer` is staging for 64 rows."""
    N: gl.constexpr = x.shape[1]
    if (stop - row >= 64) | (stop == out_rows):  # TMA does not write past a batch row's end
        if desc.dtype == gl.float32:
            reinterpret(buffer, gl.float32, [64, N], panel(N, 32)).store(x)
        else:
            buffer.store(x.to(desc.dtype))
        fence_async_shared()
        tma_store(desc, [b, row, kv, FIRST], reinterpret(buffer, desc.dtype, [1, 64, 1, N], desc.layout))
    else:  # rows from `stop` on belong to another program
        rows = row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
        columns = FIRST + gl.arange(0, N, gl.SliceLayout(0, x.type.layout))
        place = ((gl.cast(b, gl.int64) * out_rows + rows) * kv_heads + kv)[:, None] * D + columns[None, :]
        gl.store(out + place, x.to(desc.dtype), mask=(rows < stop)[:, None] & (columns < D)[None, :])


@gluon.jit
def _worker(
    WG: gl.constexpr, dk_desc, dk2_desc, dv_desc, dv2_desc, dk_out, dv_out, table,
    q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm, ds_sm, dq_sm, dq2_sm,
    kv_rdy, q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, done,
    scale, qk_scale, heads, out_group, span, head_group, out_rows,
    BM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, D: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr,
    DV: gl.constexpr, NQ: gl.constexpr, FOLD: gl.constexpr, STORE: gl.constexpr, CAP: gl.constexpr,
    EARLY: gl.constexpr, ORDERED: gl.constexpr,
):  # fmt: skip
    """Compute dK and dV of 64 keys: visit all query blocks of all `span` heads, then add or write the sums.

    If they are written, the work row has their stop and, in float32, their first row. These are the keys themselves,
    unless several programs compute a part of the gradients of the same keys each.
    """
    b, h, _bh, work = _work(table, heads, span, head_group)
    col0 = gl.load(work) + 64 * WG
    masked = table + gl.load(work + 4)
    full = gl.load(work + 3)
    n = full + gl.load(work + 5)
    n_early = gl.load(work + 8)
    dk = gl.zeros([64, A], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, A, 16]))
    dv = gl.zeros([64, VA], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VA, 16]))
    dk2 = 0
    dv2 = 0
    if B:
        dk2 = gl.zeros([64, B], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, B, 16]))
    if VB:
        dv2 = gl.zeros([64, VB], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VB, 16]))
    mbarrier.wait(kv_rdy, 0)
    i = 0
    for it in range(span * n):  # with nested loops, the compiler would treat `it` as different per thread
        dk, dk2, dv, dv2 = _step(
            WG, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm, ds_sm, dq_sm, dq2_sm,
            q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, it, i, dk, dk2, dv, dv2,
            masked, n_early, full, col0, scale, qk_scale,
            BM, A, B, VA, VB, NQ, FOLD, CAP, EARLY, ORDERED)  # fmt: skip
        i += 1
        if i == n:  # the next head
            i = 0
    if FOLD:
        dv = dv * (1.0 / scale)
        if VB:
            dv2 = dv2 * (1.0 / scale)
    else:
        dk = dk * scale
        if B:
            dk2 = dk2 * scale
    # The shared memory of the inputs now serves as staging, one part per worker. So wait until the other worker has
    # read its last input.
    mbarrier.arrive(done, count=1)
    mbarrier.wait(done, 0)
    kv = h // out_group
    k_at = k_sm.index(WG)
    v_at = v_sm.index(WG)
    k2_at = k2_sm.index(WG)
    v2_at = v2_sm.index(WG)
    if dk_desc.dtype == gl.float32:  # twice as large
        k_at = k_sm if WG == 0 else (q_sm.index(0) if BM == 128 else q_sm)
        v_at = v_sm if WG == 0 else (do_sm.index(0) if BM == 128 else do_sm)
        k2_at = k2_sm if WG == 0 else q2_sm
        v2_at = v2_sm if WG == 0 else do2_sm
    if STORE:
        stop = gl.load(work + 6)
        row = gl.load(work + 9) + 64 * WG if dk_desc.dtype == gl.float32 else col0
        kv_heads = heads // out_group
        _store_out(dv, dv_desc, dv_out, v_at, b, row, stop, out_rows, kv, kv_heads, 0, DV)
        _store_out(dk, dk_desc, dk_out, k_at, b, row, stop, out_rows, kv, kv_heads, 0, D)
        if B:
            _store_out(dk2, dk2_desc, dk_out, k2_at, b, row, stop, out_rows, kv, kv_heads, A, D)
        if VB:
            _store_out(dv2, dv2_desc, dv_out, v2_at, b, row, stop, out_rows, kv, kv_heads, VA, DV)
    else:
        _add_out(dk, dk_desc, k_at, b, col0, kv, 0)
        _add_out(dv, dv_desc, v_at, b, col0, kv, 0)
        if B:
            _add_out(dk2, dk2_desc, k2_at, b, col0, kv, A)
        if VB:
            _add_out(dv2, dv2_desc, v2_at, b, col0, kv, VA)
    tma.store_wait(0)


# No argument is specialized by value, because the launcher reuses one compiled kernel for all values.
@gluon.jit(do_not_specialize=["dk_out", "dv_out", "table", "order", "all_heads", "heads", "kv_group", "out_group", "span", "head_group", "out_rows", "blocks"])  # fmt: skip # noqa: E501
def backward_kernel(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, term_desc, dq_desc, dq2_desc,
    dk_desc, dk2_desc, dv_desc, dv2_desc, dk_out, dv_out, table, order,
    scale: gl.float32, qk_scale: gl.float32,
    all_heads: gl.int32, heads: gl.int32, kv_group: gl.int32, out_group: gl.int32, span: gl.int32,
    head_group: gl.int32, out_rows: gl.int32, blocks: gl.int32,
    BM: gl.constexpr, A: gl.constexpr, B: gl.constexpr, D: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr,
    DV: gl.constexpr, NQ: gl.constexpr, FOLD: gl.constexpr, STORE: gl.constexpr, CAP: gl.constexpr,
    EARLY: gl.constexpr, ORDERED: gl.constexpr, FRESH: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """Compute all gradients: allocate shared memory and barriers, then start the workers, the loader and the adders."""
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    q_sm = gl.allocate_shared_memory(dtype, [NQ, BM, A], panel(A, 16))
    do_sm = gl.allocate_shared_memory(dtype, [NQ, BM, VA], panel(VA, 16))
    k_sm = gl.allocate_shared_memory(dtype, [2, 64, A], panel(A, 16))
    v_sm = gl.allocate_shared_memory(dtype, [2, 64, VA], panel(VA, 16))
    dq_sm = gl.allocate_shared_memory(gl.float32, [1 if B else 2, 64, 64], wide)
    q2_sm = q_sm
    k2_sm = k_sm
    do2_sm = do_sm
    v2_sm = v_sm
    dq2_sm = dq_sm
    if B:
        q2_sm = gl.allocate_shared_memory(dtype, [NQ, BM, B], panel(B, 16))
        k2_sm = gl.allocate_shared_memory(dtype, [2, 64, B], panel(B, 16))
        dq2_sm = gl.allocate_shared_memory(gl.float32, [64, B], panel(B, 32))
    if VB:
        do2_sm = gl.allocate_shared_memory(dtype, [NQ, BM, VB], panel(VB, 16))
        v2_sm = gl.allocate_shared_memory(dtype, [2, 64, VB], panel(VB, 16))
    l_sm = gl.allocate_shared_memory(gl.float32, [NQ, 1, BM], term_desc.layout)
    d_sm = gl.allocate_shared_memory(gl.float32, [NQ, 1, BM], term_desc.layout)
    ds_sm = gl.allocate_shared_memory(dtype, [4, BM, 64], tile)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    kv_rdy = gl.allocate_shared_memory(gl.int64, [1], bl)
    q_rdy = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    q_emp = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    do_rdy = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    do_emp = gl.allocate_shared_memory(gl.int64, [NQ, 1], bl)
    ds_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    dq_rdy = gl.allocate_shared_memory(gl.int64, [2 + 2 * ORDERED, 1], bl)
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
        mbarrier.init(dq_emp.index(i), count=1)
    for i in gl.static_range(2 + 2 * ORDERED):
        mbarrier.init(dq_rdy.index(i), count=1)
    fence_async_shared()
    # The argument tuples are written inline, because a local variable would turn their constants into tensors.
    gl.warp_specialize([
        (_worker, (0, dk_desc, dk2_desc, dv_desc, dv2_desc, dk_out, dv_out, table,
                   q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm, ds_sm, dq_sm, dq2_sm,
                   kv_rdy, q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, done,
                   scale, qk_scale, heads, out_group, span, head_group, out_rows,
                   BM, A, B, D, VA, VB, DV, NQ, FOLD, STORE, CAP, EARLY, ORDERED)),
        (_worker, (1, dk_desc, dk2_desc, dv_desc, dv2_desc, dk_out, dv_out, table,
                   q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm, ds_sm, dq_sm, dq2_sm,
                   kv_rdy, q_rdy, do_rdy, q_emp, do_emp, ds_rdy, dq_rdy, dq_emp, done,
                   scale, qk_scale, heads, out_group, span, head_group, out_rows,
                   BM, A, B, D, VA, VB, DV, NQ, FOLD, STORE, CAP, EARLY, ORDERED)),
        (_loader, (q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, do_desc, do2_desc, term_desc, table,
                   q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, do_sm, do2_sm, l_sm, d_sm,
                   kv_rdy, q_rdy, do_rdy, q_emp, do_emp, all_heads, heads, kv_group, span, head_group,
                   BM, A, B, VA, VB, NQ, ORDERED)),
        (_adder, (0, dq_desc, dq2_desc, table, order, dq_sm, dq2_sm, dq_rdy, dq_emp, heads, span, head_group, blocks,
                  BM, A, B, ORDERED, FRESH)),
        (_adder, (1, dq_desc, dq2_desc, table, order, dq_sm, dq2_sm, dq_rdy, dq_emp, heads, span, head_group, blocks,
                  BM, A, B, ORDERED, FRESH)),
    ][:4 + ORDERED], [4, 1, 1, 1][:3 + ORDERED], [REGS, 24, 24, 24][:3 + ORDERED])  # fmt: skip
