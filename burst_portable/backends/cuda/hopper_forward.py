"""Forward attention for Hopper (sm_90) in Gluon: a load warp and two warpgroups of 64 query rows each.

One program does one block of 128 query rows of one head. Per key block, a warpgroup starts Q·Kᵀ of the
next block and P·V of this one together, and does the softmax of the next while the tensor cores work::

    load warp      K0 V0 | K1 V1 | K2 V2 ...            TMA into NS slots; full and empty barriers a slot
    warpgroup w    QK0 softmax0 | QK1+PV0 softmax1 | QK2+PV1 softmax2 | ... | PV(n-1) epilogue

Which key blocks a query block visits stands in an int32 table (see `hopper_tables`): one masked block that is
peeled off the loop, then the full ones in a loop that knows no mask, then the masked rest.

Shapes: q, out [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; lse [B, Hq, Sq]. Tensor descriptors have four dimensions, so
rows past a batch's end are read as 0 and never written.
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

# What the epilogue writes.
OUT_16 = 0  # out in the input's dtype
OUT_32 = 1  # out in float32
MERGE_32 = 2  # merges into a running float32 (out, lse)

_OUT_16 = gl.constexpr(OUT_16)
_MERGE_32 = gl.constexpr(MERGE_32)


@gluon.jit
def _work(table, heads, head_group):
    # program -> batch, head, row of the work table. Along x run heads that share K/V in the L2, along y blocks, long
    # rows first, along z the other heads and batches: no divisions before the first load.
    head = gl.program_id(2) * head_group + gl.program_id(0)
    return head // heads, head % heads, table + 16 * gl.program_id(1)


@gluon.jit
def _load(desc, b, row, h, ready, slot, dtype: gl.constexpr, ROWS: gl.constexpr, D: gl.constexpr):
    mbarrier.expect(ready, desc.block_type.nbytes)
    view = slot._reinterpret(dtype, [1, ROWS, 1, D], desc.layout)
    tma.async_copy_global_to_shared(desc, [b, row, h, 0], ready, view)


@gluon.jit
def _load_pair(
    k_desc,
    v_desc,
    b,
    row,
    h,
    k_sm,
    v_sm,
    k_rdy,
    v_rdy,
    k_emp,
    v_emp,
    it,
    BN: gl.constexpr,
    D: gl.constexpr,
    NS: gl.constexpr,
):
    slot = it % NS
    phase = ((it // NS) & 1) ^ 1
    mbarrier.wait(k_emp.index(slot), phase)
    _load(k_desc, b, row, h, k_rdy.index(slot), k_sm.index(slot), k_desc.dtype, BN, D)
    mbarrier.wait(v_emp.index(slot), phase)
    _load(v_desc, b, row, h, v_rdy.index(slot), v_sm.index(slot), v_desc.dtype, BN, D)


@gluon.jit
def _producer(
    q_desc, k_desc, v_desc, o_desc, table, q_sm, k_sm, v_sm, q_rdy, k_rdy, v_rdy, k_emp, v_emp,
    heads, kv_group, head_group, BN: gl.constexpr, D: gl.constexpr, NS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    b, h, work = _work(table, heads, head_group)
    kv = h // kv_group
    row0 = gl.load(work) * 128
    runs = table + gl.load(work + 1)
    n_runs = gl.load(work + 2)
    first = gl.load(work + 8)
    mbarrier.expect(q_rdy, 2 * q_desc.block_type.nbytes)
    for w in gl.static_range(2):
        view = q_sm.index(w)._reinterpret(q_desc.dtype, [1, 64, 1, D], q_desc.layout)
        tma.async_copy_global_to_shared(q_desc, [b, row0 + 64 * w, h, 0], q_rdy, view)
    _load_pair(k_desc, v_desc, b, first, kv, k_sm, v_sm, k_rdy, v_rdy, k_emp, v_emp, 0, BN, D, NS)
    it = 1
    for r in range(n_runs):
        col = gl.load(runs + 2 * r)
        count = gl.load(runs + 2 * r + 1)
        for i in range(count):
            _load_pair(k_desc, v_desc, b, col + i * BN, kv, k_sm, v_sm, k_rdy, v_rdy, k_emp, v_emp, it, BN, D, NS)
            it += 1
    if MODE == _MERGE_32:
        # the running out travels through the next turn's slots: K for the first warpgroup, V for the second
        slot = it % NS
        phase = ((it // NS) & 1) ^ 1
        mbarrier.wait(k_emp.index(slot), phase)
        part = k_sm.index(slot)._reinterpret(gl.float32, [64, D], _plain())
        _load(o_desc, b, row0, h, k_rdy.index(slot), part, gl.float32, 64, D)
        mbarrier.wait(v_emp.index(slot), phase)
        part = v_sm.index(slot)._reinterpret(gl.float32, [64, D], _plain())
        _load(o_desc, b, row0 + 64, h, v_rdy.index(slot), part, gl.float32, 64, D)


@gluon.constexpr_function
def _plain():
    # the layout of 64 rows of float32 on their way to or from memory
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)


@gluon.jit
def _bounds(entry, row0, sl: gl.constexpr):
    # a masked block's visible columns [left, right) of each row, counted from its first column
    col = gl.load(entry)
    k_start = gl.load(entry + 1)
    k_stop = gl.load(entry + 2)
    q_start = gl.load(entry + 3)
    q_stop = gl.load(entry + 4)
    lo = gl.load(entry + 5)
    hi = gl.load(entry + 6)
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, sl))
    left = gl.maximum(rows - hi, k_start) - col
    right = gl.minimum(rows - lo + 1, k_stop) - col
    right = gl.where((rows >= q_start) & (rows < q_stop), right, 0)
    return left, right


@gluon.jit
def _hide(s, left, right, BN: gl.constexpr, sl: gl.constexpr):
    cols = gl.arange(0, BN, gl.SliceLayout(0, sl))[None, :]
    return gl.where((cols >= left[:, None]) & (cols < right[:, None]), s, float("-inf"))


@gluon.jit
def _partial_sum(p, BN: gl.constexpr):
    # sums only what a thread holds of a row, without shuffles: [64, BN] -> [64, 8]
    return gl.sum(gl.reshape(p, [64, BN // 8, 8]), axis=1)


@gluon.jit
def _packed(p, dtype: gl.constexpr):
    # To 16 bits in pairs: left alone, the compiler carries halves around the loop and swaps each pair in it.
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.bfloat16, is_pure=True, pack=2)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.float16, is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def _step(
    q, k_sm, v_sm, k_rdy, v_rdy, k_emp, v_emp, it, o, p16, total, top, left, right, qk_scale,
    MASK: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, NS: gl.constexpr,
):  # fmt: skip
    # P·V of block `it` beside Q·Kᵀ and the softmax of block it + 1
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    slot = it % NS
    nslot = (it + 1) % NS
    mbarrier.wait(k_rdy.index(nslot), ((it + 1) // NS) & 1)
    s = gl.zeros([64, BN], gl.float32, sl)
    s = warpgroup_mma(q, k_sm.index(nslot).permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(v_rdy.index(slot), (it // NS) & 1)
    ot = warpgroup_mma(p16, v_sm.index(slot), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_emp.index(nslot), count=1)
    if MASK:
        s = _hide(s, left, right, BN, sl)
    ntop = gl.maximum(top, gl.max(s, axis=1) * qk_scale)
    fade = gl.exp2(top - ntop)
    p = gl.exp2(s * qk_scale - ntop[:, None])
    fade_parts = gl.convert_layout(fade, gl.SliceLayout(1, total.type.layout))
    total = total * fade_parts[:, None] + _partial_sum(p, BN)
    o, p16, p = warpgroup_mma_wait(0, deps=[ot, p16, p])
    mbarrier.arrive(v_emp.index(slot), count=1)
    p16 = gl.convert_layout(_packed(p, p16.dtype), gl.DotOperandLayout(0, ol, 2))
    o = o * gl.convert_layout(fade, gl.SliceLayout(1, ol))[:, None]
    return o, p16, total, ntop


@gluon.jit
def _finish(total, top, old, MODE: gl.constexpr):
    # the row's LSE, and the weights of the running result and of this one
    new = (top + gl.log2(total)) * 0.6931471805599453
    if MODE == _MERGE_32:
        high = gl.maximum(gl.maximum(old, new), -1e30)
        both = high + gl.log(gl.exp(old - high) + gl.exp(new - high))
        # a row that saw nothing on either side: its weights are 0, not exp(-inf + inf)
        anchor = gl.maximum(both, -1e30)
        keep = gl.exp(old - anchor)
        gain = gl.where(total > 0, gl.exp(new - anchor) / total, 0.0)
    else:
        both = new
        keep = total  # not used
        gain = gl.where(total > 0, 1.0 / total, 0.0)
    return both, keep, gain


@gluon.jit
def _store_32(
    o,
    keep,
    o_desc,
    b,
    row,
    h,
    k_sm,
    v_sm,
    k_rdy,
    v_rdy,
    k_emp,
    v_emp,
    n,
    WG: gl.constexpr,
    D: gl.constexpr,
    NS: gl.constexpr,
    MODE: gl.constexpr,
):
    # through a drained slot: see the producer
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    slot = n % NS
    phase = (n // NS) & 1
    if WG == 0:
        part = k_sm.index(slot)._reinterpret(gl.float32, [64, D], _plain())
        if MODE == _MERGE_32:
            mbarrier.wait(k_rdy.index(slot), phase)
        else:
            mbarrier.wait(k_emp.index(slot), phase ^ 1)
    else:
        part = v_sm.index(slot)._reinterpret(gl.float32, [64, D], _plain())
        if MODE == _MERGE_32:
            mbarrier.wait(v_rdy.index(slot), phase)
        else:
            mbarrier.wait(v_emp.index(slot), phase ^ 1)
    if MODE == _MERGE_32:
        o = o + part.load(ol) * keep[:, None]
    part.store(o)
    fence_async_shared()
    view = part._reinterpret(gl.float32, [1, 64, 1, D], o_desc.layout)
    tma.async_copy_shared_to_global(o_desc, [b, row, h, 0], view)


@gluon.jit
def _consumer(
    WG: gl.constexpr, o_desc, lse, table, q_sm, k_sm, v_sm, q_rdy, k_rdy, v_rdy, k_emp, v_emp,
    qk_scale, Sq, lse_sb, lse_sh, heads, head_group,
    BN: gl.constexpr, D: gl.constexpr, NS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    rl: gl.constexpr = gl.SliceLayout(1, ol)
    dtype: gl.constexpr = q_sm.dtype
    b, h, work = _work(table, heads, head_group)
    row0 = gl.load(work) * 128 + 64 * WG
    n_full = gl.load(work + 3)
    masked = table + gl.load(work + 4)
    n = n_full + gl.load(work + 5)
    left, right = _bounds(work + 8, row0, sl)
    rows = row0 + gl.arange(0, 64, rl)
    lse_row = lse + b * lse_sb + h * lse_sh + rows
    old = gl.zeros([64], gl.float32, rl)
    if MODE == _MERGE_32:
        old = gl.load(lse_row, mask=rows < Sq, other=float("-inf"))
    q = q_sm.index(WG)
    # the first block, always with a mask; nothing to multiply by V yet
    mbarrier.wait(q_rdy, 0)
    mbarrier.wait(k_rdy.index(0), 0)
    s = gl.zeros([64, BN], gl.float32, sl)
    s = warpgroup_mma(q, k_sm.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_emp.index(0), count=1)
    s = _hide(s, left, right, BN, sl)
    top = gl.maximum(gl.max(s, axis=1) * qk_scale, -1e30)  # finite, also where nothing is seen
    p = gl.exp2(s * qk_scale - top[:, None])
    total = _partial_sum(p, BN)
    p16 = gl.convert_layout(_packed(p, dtype), gl.DotOperandLayout(0, ol, 2))
    o = gl.zeros([64, D], gl.float32, ol)
    for it in range(n_full):
        o, p16, total, top = _step(
            q, k_sm, v_sm, k_rdy, v_rdy, k_emp, v_emp, it, o, p16, total, top, left, right, qk_scale,
            False, BN, D, NS)  # fmt: skip
    for it in range(n_full, n):
        left, right = _bounds(masked, row0, sl)
        masked += 8
        o, p16, total, top = _step(
            q, k_sm, v_sm, k_rdy, v_rdy, k_emp, v_emp, it, o, p16, total, top, left, right, qk_scale,
            True, BN, D, NS)  # fmt: skip
    slot = n % NS
    mbarrier.wait(v_rdy.index(slot), (n // NS) & 1)
    ot = warpgroup_mma(p16, v_sm.index(slot), o, is_async=True)
    total = gl.convert_layout(gl.sum(total, axis=1), rl)
    both, keep, gain = _finish(total, gl.convert_layout(top, rl), old, MODE)
    gl.store(lse_row, both, mask=rows < Sq)
    o, p16 = warpgroup_mma_wait(0, deps=[ot, p16])
    mbarrier.arrive(v_emp.index(slot), count=1)
    o = o * gain[:, None]
    if MODE == _OUT_16:
        q.store(o.to(dtype))  # this warpgroup is done with its queries
        fence_async_shared()
        view = q._reinterpret(dtype, [1, 64, 1, D], o_desc.layout)
        tma.async_copy_shared_to_global(o_desc, [b, row0, h, 0], view)
    else:
        _store_32(o, keep, o_desc, b, row0, h, k_sm, v_sm, k_rdy, v_rdy, k_emp, v_emp, n + 1, WG, D, NS, MODE)
    tma.store_wait(0)


# Nothing is specialised by value: the launcher reuses one compiled kernel for all values.
@gluon.jit(do_not_specialize=["lse", "table", "Sq", "lse_sb", "lse_sh", "heads", "kv_group", "head_group"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, lse, table, qk_scale: gl.float32, Sq: gl.int32, lse_sb: gl.int64, lse_sh: gl.int64,
    heads: gl.int32, kv_group: gl.int32, head_group: gl.int32,
    BN: gl.constexpr, D: gl.constexpr, NS: gl.constexpr, MODE: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_desc.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_sm = gl.allocate_shared_memory(dtype, [2, 64, D], tile)
    k_sm = gl.allocate_shared_memory(dtype, [NS, BN, D], tile)
    v_sm = gl.allocate_shared_memory(dtype, [NS, BN, D], tile)
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    q_rdy = gl.allocate_shared_memory(gl.int64, [1], bl)
    k_rdy = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    v_rdy = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    k_emp = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    v_emp = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    mbarrier.init(q_rdy, count=1)
    for i in gl.static_range(NS):
        mbarrier.init(k_rdy.index(i), count=1)
        mbarrier.init(v_rdy.index(i), count=1)
        mbarrier.init(k_emp.index(i), count=2)
        mbarrier.init(v_emp.index(i), count=2)
    fence_async_shared()
    # The argument tuples stand inline: a local variable would turn their constants into tensors.
    gl.warp_specialize([
        (_consumer, (0, o_desc, lse, table, q_sm, k_sm, v_sm, q_rdy, k_rdy, v_rdy, k_emp, v_emp,
                     qk_scale, Sq, lse_sb, lse_sh, heads, head_group, BN, D, NS, MODE)),
        (_consumer, (1, o_desc, lse, table, q_sm, k_sm, v_sm, q_rdy, k_rdy, v_rdy, k_emp, v_emp,
                     qk_scale, Sq, lse_sb, lse_sh, heads, head_group, BN, D, NS, MODE)),
        (_producer, (q_desc, k_desc, v_desc, o_desc, table, q_sm, k_sm, v_sm, q_rdy, k_rdy, v_rdy, k_emp, v_emp,
                     heads, kv_group, head_group, BN, D, NS, MODE)),
    ], [4, 1], [REGS, 24])  # fmt: skip
