"""Define the backward kernel for Hopper (sm_90) and heads above 128, with one launch per gradient, in Gluon.

A program computes one gradient of 128 rows: queries for dQ, keys for dK and dV. It has one loader, which is a warp, and
two workers. Each worker is a warpgroup that accumulates 64 rows in registers. The program's own rows stay in shared
memory. The other rows are streamed in blocks of BN. S, P, dP and dS below are transposed for dK and dV::

    S = own·streamedᵀ    P = exp2(S - LSE)    dP = own2·streamed2ᵀ    dS = P∘(dP - delta)

    gradient          own        own2    streamed    streamed2
    dQ += dS·K        Q          dO      K           V
    dK += dSᵀ·Q       K          V       Q           dO
    dV += Pᵀ·dO       K          -       Q           dO

These are eight products; one launch would need only five. But a worker of one launch would keep two sums of 64 rows and
256 columns. It would have no registers left to overlap products with exponentials. These launches run at the rate of
the forward. Each element is computed by one program, so the result is deterministic.

An int32 table lists the blocks of streamed rows that each program visits, as in `backward`.

Names: `own`, `ownv`, `x` and `y` are own, own2, streamed and streamed2 of this table. In names of variables, a final
`2` is the second panel of columns, `_sm` shared memory, `_rdy` and `_emp` the barriers of a full and an empty slot.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from burst_portable.backends.cuda.hopper.backward import _bounds, _broadcast_terms, _product, _summed, _work
from burst_portable.backends.cuda.hopper.parts import (
    capped,
    convert_to_16_bits,
    exponent_scale,
    hide,
    panel,
    reinterpret,
    tma_load,
    tma_store,
)

DQ, DK, DV = 0, 1, 2  # the gradient that a launch computes
_DQ, _DK, _DV = gl.constexpr(DQ), gl.constexpr(DK), gl.constexpr(DV)


@gluon.jit
def _load(desc, desc2, b, row, h, ready, slot, slot2, ROWS: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """Start loading ROWS rows: columns [0, A) and, if B, [A, A + B). The barrier `ready` already expects the bytes."""
    tma_load(desc, [b, row, h, 0], ready, reinterpret(slot, desc.dtype, [1, ROWS, 1, A], desc.layout))
    if B:
        tma_load(desc2, [b, row, h, A], ready, reinterpret(slot2, desc.dtype, [1, ROWS, 1, B], desc2.layout))


@gluon.jit
def _loader(
    own_desc, own2_desc, ownv_desc, ownv2_desc, x_desc, x2_desc, y_desc, y2_desc, term_desc, table,
    own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
    own_rdy, x_rdy, y_rdy, x_emp, y_emp, all_heads, heads, kv_group, span, head_group,
    GRADIENT: gl.constexpr, BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr,
    NX: gl.constexpr, NY: gl.constexpr,
):  # fmt: skip
    """Load the program's own rows once, then the streamed rows and their row terms, as soon as slots are empty."""
    b, h, bh, work = _work(table, heads, span, head_group)
    row0 = gl.load(work)
    runs = table + gl.load(work + 1)
    n_runs = gl.load(work + 2)
    mine = h if GRADIENT == _DQ else h // kv_group
    bytes_s: gl.constexpr = 2 * (A + B)  # bytes per row, 16 bits per element
    bytes_v: gl.constexpr = 2 * (VA + VB)
    terms: gl.constexpr = 0 if GRADIENT == _DQ else BN * 4
    mbarrier.expect(own_rdy, 128 * bytes_s + (0 if GRADIENT == _DV else 128 * bytes_v))
    for w in gl.static_range(2):
        _load(own_desc, own2_desc, b, row0 + 64 * w, mine, own_rdy, own_sm.index(w), own2_sm.index(w), 64, A, B)
        if GRADIENT != _DV:
            _load(
                ownv_desc, ownv2_desc, b, row0 + 64 * w, mine, own_rdy, ownv_sm.index(w), ownv2_sm.index(w),
                64, VA, VB)  # fmt: skip
    it = 0
    for g in range(span):
        theirs = h // kv_group if GRADIENT == _DQ else h + g
        for r in range(n_runs):
            first = gl.load(runs + 2 * r)
            count = gl.load(runs + 2 * r + 1)
            for i in range(count):
                row = first + i * BN
                at = bh + g
                slot = it % NX
                mbarrier.wait(x_emp.index(slot), ((it // NX) & 1) ^ 1)
                mbarrier.expect(x_rdy.index(slot), BN * bytes_s + terms)
                _load(x_desc, x2_desc, b, row, theirs, x_rdy.index(slot), x_sm.index(slot), x2_sm.index(slot), BN, A, B)
                if GRADIENT != _DQ:
                    tma_load(term_desc, [at, row], x_rdy.index(slot), l_sm.index(slot))
                slot = it % NY
                mbarrier.wait(y_emp.index(slot), ((it // NY) & 1) ^ 1)
                mbarrier.expect(y_rdy.index(slot), BN * bytes_v + (terms if GRADIENT == _DK else 0))
                _load(
                    y_desc, y2_desc, b, row, theirs, y_rdy.index(slot), y_sm.index(slot), y2_sm.index(slot),
                    BN, VA, VB)  # fmt: skip
                if GRADIENT == _DK:
                    tma_load(term_desc, [at + all_heads, row], y_rdy.index(slot), d_sm.index(slot))
                it += 1


@gluon.jit
def _step(
    WG: gl.constexpr, own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
    x_rdy, y_rdy, x_emp, y_emp, it, i, acc, acc2, lse, minus_delta, masked, n_masked, row0,
    qk_scale,
    GRADIENT: gl.constexpr, BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VB: gl.constexpr,
    NX: gl.constexpr, NY: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Add one block of streamed rows to dQ or dK."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    pl: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    xs = it % NX
    ys = it % NY
    mbarrier.wait(x_rdy.index(xs), (it // NX) & 1)
    factor = exponent_scale(qk_scale, CAP)
    mine = WG + (it >> 30)  # + 0, but not a compile-time constant: see `backward`
    if GRADIENT == _DQ:
        terms = lse[:, None]
        delta = minus_delta[:, None]
    elif EARLY >= 1:  # read before the products start
        terms = _broadcast_terms(l_sm.index(xs), factor, BN, sl)
    s = _product(own_sm.index(mine), own2_sm.index(mine), x_sm.index(xs), x2_sm.index(xs), BN, B)
    mbarrier.wait(y_rdy.index(ys), (it // NY) & 1)
    if GRADIENT == _DK and EARLY == 2:
        delta = _broadcast_terms(d_sm.index(ys), 1.0, BN, sl)
    dp = _product(ownv_sm.index(mine), ownv2_sm.index(mine), y_sm.index(ys), y2_sm.index(ys), BN, VB)
    s = warpgroup_mma_wait(2 if VB else 1, deps=[s])
    if GRADIENT == _DK and EARLY == 0:
        terms = _broadcast_terms(l_sm.index(xs), factor, BN, sl)
    if CAP > 0:
        s = capped(s, qk_scale)
    p = gl.exp2(s * factor + terms)
    if CAP > 0:  # from here on, p is P times the slope of the cap
        p = p * (1.0 - s * s)
    if i < n_masked:
        first, last = _bounds(masked + 8 * i, row0, sl)
        p = hide(p, first, last, 0.0)
    if GRADIENT == _DK and EARLY != 2:
        delta = _broadcast_terms(d_sm.index(ys), 1.0, BN, sl)
    dp = warpgroup_mma_wait(0, deps=[dp])
    mbarrier.arrive(y_emp.index(ys), count=1)
    ds = gl.convert_layout(convert_to_16_bits(p * (dp + delta), x_sm.dtype), pl)
    acct, acct2 = _summed(ds, x_sm.index(xs), x2_sm.index(xs), acc, acc2, B)
    if B:
        acc, acc2, ds = warpgroup_mma_wait(0, deps=[acct, acct2, ds])
    else:
        acc, ds = warpgroup_mma_wait(0, deps=[acct, ds])
    mbarrier.arrive(x_emp.index(xs), count=1)
    return acc, acc2


@gluon.jit
def _weights(
    s, l_sm, xs, i, masked, n_masked, row0, qk_scale, BN: gl.constexpr, CAP: gl.constexpr
):  # fmt: skip
    """Return Pᵀ = exp2(Sᵀ - LSE) of one block, with the softcap and the mask applied."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    factor = exponent_scale(qk_scale, CAP)
    if CAP > 0:
        s = capped(s, qk_scale)
    p = gl.exp2(s * factor + _broadcast_terms(l_sm.index(xs), factor, BN, sl))
    if i < n_masked:
        first, last = _bounds(masked + 8 * i, row0, sl)
        p = hide(p, first, last, 0.0)
    return p


@gluon.jit
def _sum_values(
    own, own2, x_sm, x2_sm, y_sm, y2_sm, l_sm, x_rdy, y_rdy, x_emp, y_emp, n, total, acc, acc2,
    masked, n_masked, row0, qk_scale,
    BN: gl.constexpr, B: gl.constexpr, VB: gl.constexpr, NX: gl.constexpr, NY: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Compute dV over `total` > 0 blocks. Pᵀ·dO of a block overlaps K·Qᵀ and exp2 of the next block."""
    pl: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    mbarrier.wait(x_rdy.index(0), 0)
    s = _product(own, own2, x_sm.index(0), x2_sm.index(0), BN, B)
    s = warpgroup_mma_wait(0, deps=[s])
    p = _weights(s, l_sm, 0, 0, masked, n_masked, row0, qk_scale, BN, CAP)
    mbarrier.arrive(x_emp.index(0), count=1)
    p16 = gl.convert_layout(convert_to_16_bits(p, x_sm.dtype), pl)
    i = 1
    if i == n:
        i = 0
    for it in range(total - 1):
        ys = it % NY
        xs = (it + 1) % NX
        mbarrier.wait(x_rdy.index(xs), ((it + 1) // NX) & 1)
        s = _product(own, own2, x_sm.index(xs), x2_sm.index(xs), BN, B)
        mbarrier.wait(y_rdy.index(ys), (it // NY) & 1)
        acct, acct2 = _summed(p16, y_sm.index(ys), y2_sm.index(ys), acc, acc2, VB)
        s = warpgroup_mma_wait(2 if VB else 1, deps=[s])
        p = _weights(s, l_sm, xs, i, masked, n_masked, row0, qk_scale, BN, CAP)
        mbarrier.arrive(x_emp.index(xs), count=1)
        if VB:
            acc, acc2, p16, p = warpgroup_mma_wait(0, deps=[acct, acct2, p16, p])
        else:
            acc, p16, p = warpgroup_mma_wait(0, deps=[acct, p16, p])
        mbarrier.arrive(y_emp.index(ys), count=1)
        p16 = gl.convert_layout(convert_to_16_bits(p, x_sm.dtype), pl)
        i += 1
        if i == n:  # the next head
            i = 0
    ys = (total - 1) % NY
    mbarrier.wait(y_rdy.index(ys), ((total - 1) // NY) & 1)
    acct, acct2 = _summed(p16, y_sm.index(ys), y2_sm.index(ys), acc, acc2, VB)
    if VB:
        acc, acc2, p16 = warpgroup_mma_wait(0, deps=[acct, acct2, p16])
    else:
        acc, p16 = warpgroup_mma_wait(0, deps=[acct, p16])
    return acc, acc2


@gluon.jit
def _put(
    x, desc, out, buffer, b, row, stop, length, head, out_sb, out_ss, out_sh,
    FIRST: gl.constexpr, D: gl.constexpr, STORE: gl.constexpr,
):  # fmt: skip
    """Write those of 64 rows that are before `stop`, from column FIRST on: write 16 bits if STORE, else add float32."""
    N: gl.constexpr = x.shape[1]
    place = out + b * out_sb + head * out_sh
    if STORE:
        if (stop - row >= 64) | (stop == length):  # TMA does not write past a batch row's end
            reinterpret(buffer, buffer.dtype, [64, N], panel(N, 16)).store(x.to(buffer.dtype))
            fence_async_shared()
            view = reinterpret(buffer, buffer.dtype, [1, 64, 1, N], desc.layout)
            tma_store(desc, [b, row, head, FIRST], view)
        else:
            _put_before(x, place, row, stop, out_ss, FIRST, D, False)
    else:
        _put_before(x, place, row, stop, out_ss, FIRST, D, True)


@gluon.jit
def _put_before(x, place, row, stop, row_stride, FIRST: gl.constexpr, D: gl.constexpr, ADD: gl.constexpr):
    """Write, or add if ADD, the rows before `stop`. This avoids TMA, which stops only at the end of a tensor."""
    rows = row + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    columns = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    place += rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    inside = (rows < stop)[:, None] & (columns < D)[None, :]
    if ADD:  # several programs add to the same rows if each computes one query head (`cuts.split_divides`)
        gl.atomic_add(place, x, mask=inside, sem="relaxed")
    else:
        gl.store(place, x.to(place.dtype.element_ty), mask=inside)


@gluon.jit
def _worker(
    WG: gl.constexpr, out_desc, out2_desc, out, terms, table,
    own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
    own_rdy, x_rdy, y_rdy, x_emp, y_emp, scale, qk_scale, all_heads, heads, kv_group, span, head_group,
    length, padded, out_sb, out_ss, out_sh,
    GRADIENT: gl.constexpr, BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, D: gl.constexpr,
    VA: gl.constexpr, VB: gl.constexpr, DV: gl.constexpr, NX: gl.constexpr, NY: gl.constexpr,
    FOLD: gl.constexpr, STORE: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Compute one gradient of 64 rows: visit all streamed blocks of all `span` heads, then add or write the sum."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    OA: gl.constexpr = VA if GRADIENT == _DV else A
    OB: gl.constexpr = VB if GRADIENT == _DV else B
    OD: gl.constexpr = DV if GRADIENT == _DV else D
    b, h, bh, work = _work(table, heads, span, head_group)
    row0 = gl.load(work) + 64 * WG
    masked = table + gl.load(work + 4)
    n_masked = gl.load(work + 5)
    n = gl.load(work + 3) + n_masked
    acc = gl.zeros([64, OA], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OA, 16]))
    acc2 = 0
    if OB:
        acc2 = gl.zeros([64, OB], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OB, 16]))
    own = own_sm.index(WG)
    own2 = own2_sm.index(WG)
    mbarrier.wait(own_rdy, 0)
    if GRADIENT == _DV:
        if n > 0:
            acc, acc2 = _sum_values(
                own, own2, x_sm, x2_sm, y_sm, y2_sm, l_sm, x_rdy, y_rdy, x_emp, y_emp, n, span * n, acc, acc2,
                masked, n_masked, row0, qk_scale, BN, B, VB, NX, NY, CAP)  # fmt: skip
        if FOLD:
            acc = acc * (1.0 / scale)
            if OB:
                acc2 = acc2 * (1.0 / scale)
    else:
        lse = 0.0
        minus_delta = 0.0
        if GRADIENT == _DQ:
            rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, sl))
            line = terms + gl.cast(bh, gl.int64) * padded + rows
            lse = gl.load(line, mask=rows < length, other=float("-inf")) * exponent_scale(qk_scale, CAP)
            line += gl.cast(all_heads, gl.int64) * padded
            minus_delta = gl.load(line, mask=rows < length, other=0.0)
        i = 0
        for it in range(span * n):
            acc, acc2 = _step(
                WG, own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
                x_rdy, y_rdy, x_emp, y_emp, it, i, acc, acc2, lse, minus_delta, masked, n_masked, row0,
                qk_scale, GRADIENT, BN, A, B, VB, NX, NY, CAP, EARLY)  # fmt: skip
            i += 1
            if i == n:  # the next head
                i = 0
        if not FOLD:
            acc = acc * scale
            if OB:
                acc2 = acc2 * scale
    stop = gl.load(work + 6)
    mine = h if GRADIENT == _DQ else h // kv_group
    _put(acc, out_desc, out, own, b, row0, stop, length, mine, out_sb, out_ss, out_sh, 0, OD, STORE)
    if OB:
        _put(acc2, out2_desc, out, own2, b, row0, stop, length, mine, out_sb, out_ss, out_sh, OA, OD, STORE)
    tma.store_wait(0)


# No argument is specialized by value, because the launcher reuses one compiled kernel for all values.
@gluon.jit(do_not_specialize=["out", "terms", "table", "all_heads", "heads", "kv_group", "span", "head_group", "length", "padded", "out_sb", "out_ss", "out_sh"])  # fmt: skip # noqa: E501
def split_kernel(
    own_desc, own2_desc, ownv_desc, ownv2_desc, x_desc, x2_desc, y_desc, y2_desc, term_desc, out_desc, out2_desc,
    out, terms, table, scale: gl.float32, qk_scale: gl.float32,
    all_heads: gl.int32, heads: gl.int32, kv_group: gl.int32, span: gl.int32, head_group: gl.int32,
    length: gl.int32, padded: gl.int32, out_sb: gl.int64, out_ss: gl.int64, out_sh: gl.int64,
    GRADIENT: gl.constexpr, BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, D: gl.constexpr,
    VA: gl.constexpr, VB: gl.constexpr, DV: gl.constexpr, NX: gl.constexpr, NY: gl.constexpr,
    FOLD: gl.constexpr, STORE: gl.constexpr, CAP: gl.constexpr, EARLY: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """Compute one gradient: allocate shared memory and barriers, then start the two workers and the loader."""
    dtype: gl.constexpr = x_desc.dtype
    own_sm = gl.allocate_shared_memory(dtype, [2, 64, A], panel(A, 16))
    x_sm = gl.allocate_shared_memory(dtype, [NX, BN, A], panel(A, 16))
    y_sm = gl.allocate_shared_memory(dtype, [NY, BN, VA], panel(VA, 16))
    own2_sm = own_sm
    x2_sm = x_sm
    y2_sm = y_sm
    ownv_sm = own_sm
    ownv2_sm = own_sm
    if B:
        own2_sm = gl.allocate_shared_memory(dtype, [2, 64, B], panel(B, 16))
        x2_sm = gl.allocate_shared_memory(dtype, [NX, BN, B], panel(B, 16))
    if VB:
        y2_sm = gl.allocate_shared_memory(dtype, [NY, BN, VB], panel(VB, 16))
    if GRADIENT != _DV:
        ownv_sm = gl.allocate_shared_memory(dtype, [2, 64, VA], panel(VA, 16))
        if VB:
            ownv2_sm = gl.allocate_shared_memory(dtype, [2, 64, VB], panel(VB, 16))
    l_sm = gl.allocate_shared_memory(gl.float32, [NX, 1, BN], term_desc.layout)
    d_sm = gl.allocate_shared_memory(gl.float32, [NY, 1, BN], term_desc.layout)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    own_rdy = gl.allocate_shared_memory(gl.int64, [1], bl)
    x_rdy = gl.allocate_shared_memory(gl.int64, [NX, 1], bl)
    x_emp = gl.allocate_shared_memory(gl.int64, [NX, 1], bl)
    y_rdy = gl.allocate_shared_memory(gl.int64, [NY, 1], bl)
    y_emp = gl.allocate_shared_memory(gl.int64, [NY, 1], bl)
    mbarrier.init(own_rdy, count=1)
    for i in gl.static_range(NX):
        mbarrier.init(x_rdy.index(i), count=1)
        mbarrier.init(x_emp.index(i), count=2)
    for i in gl.static_range(NY):
        mbarrier.init(y_rdy.index(i), count=1)
        mbarrier.init(y_emp.index(i), count=2)
    fence_async_shared()
    # The argument tuples are written inline, because a local variable would turn their constants into tensors.
    gl.warp_specialize([
        (_worker, (0, out_desc, out2_desc, out, terms, table,
                   own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
                   own_rdy, x_rdy, y_rdy, x_emp, y_emp, scale, qk_scale,
                   all_heads, heads, kv_group, span, head_group, length, padded, out_sb, out_ss, out_sh,
                   GRADIENT, BN, A, B, D, VA, VB, DV, NX, NY, FOLD, STORE, CAP, EARLY)),
        (_worker, (1, out_desc, out2_desc, out, terms, table,
                   own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
                   own_rdy, x_rdy, y_rdy, x_emp, y_emp, scale, qk_scale,
                   all_heads, heads, kv_group, span, head_group, length, padded, out_sb, out_ss, out_sh,
                   GRADIENT, BN, A, B, D, VA, VB, DV, NX, NY, FOLD, STORE, CAP, EARLY)),
        (_loader, (own_desc, own2_desc, ownv_desc, ownv2_desc, x_desc, x2_desc, y_desc, y2_desc, term_desc, table,
                   own_sm, own2_sm, ownv_sm, ownv2_sm, x_sm, x2_sm, y_sm, y2_sm, l_sm, d_sm,
                   own_rdy, x_rdy, y_rdy, x_emp, y_emp, all_heads, heads, kv_group, span, head_group,
                   GRADIENT, BN, A, B, VA, VB, NX, NY)),
    ], [4, 1], [REGS, 24])  # fmt: skip
