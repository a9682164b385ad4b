"""Define the forward kernel for Hopper (sm_90), in Gluon.

A program has one loader, which is a warp, and W workers. Each worker is a warpgroup that computes 64 query rows. A work
item is one block of up to 64·W query rows of one head.

One program runs on each multiprocessor and takes items from a counter until none is left. So the loads of an item
overlap the end of the previous item, and items of different lengths are balanced. If kernels that send messages need a
free multiprocessor (`turns` > 0), each program ends after a few items instead.

For each key block, a worker starts Q·Kᵀ of the next block and P·V of the current block together. It computes the
softmax of the next block while the tensor cores work::

    loader      Q | K0 V0 | K1 V1 | K2 V2 ...        TMA into NS slots, each with a full and an empty barrier
    worker w    QK0 softmax0 | QK1+PV0 softmax1 | QK2+PV1 softmax2 | ... | PV(n-1) epilogue

An int32 table lists the key blocks of each item (see `block_tables`). The first block is masked and is computed before
the loop. Then come the full blocks, in a loop without a mask, and then the other masked blocks.

Shapes: q, out [B, Sq, Hq, D]; k, v [B, Sk, Hkv, D]; lse [B, Hq, Sq]. Tensor descriptors have four dimensions, so
rows past the end of a batch row are read as 0 and never written.

Endings of names: `_sm` shared memory, `_rdy` barrier of a full slot, `_emp` barrier of an empty slot, `2` second panel
of columns. Names: `it` key blocks so far, `turn` items so far, `top` row maximum in base 2, `total` partial row sums
[64, 8], `fade` factor for previous sums, `peeled` the masked block before the loop.
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
    convert_to_16_bits,
    exponent_scale,
    finish,
    hide_scores,
    panel,
    partial_sum,
    reinterpret,
    rescale,
    tma_load,
    tma_store,
)

# MODE: output of the epilogue.
OUT_16 = 0  # write out in the dtype of the inputs
OUT_32 = 1  # write out in float32
MERGE_32 = 2  # merge into a running float32 (out, lse)

_OUT_16 = gl.constexpr(OUT_16)
_MERGE_32 = gl.constexpr(MERGE_32)

# A row is rescaled only if its maximum grows by more than this, in base 2. So P is at most 2^8 = 256, and its sums are
# float32.
_BEHIND = gl.constexpr(8.0)


@gluon.jit
def _program():
    """Return the index of this program.

    Without the inline assembly, the compiler reads the index once for all warps and keeps it in memory.
    """
    return gl.inline_asm_elementwise("mov.u32 $0, %ctaid.x;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _item(t, table, heads, blocks, head_group):
    """Return the batch row, the query head and the work row of item t.

    The items of one group of heads are consecutive, so that their K and V share the L2. Long blocks come first.
    """
    per_group = blocks * head_group
    group = t // per_group
    rest = t - group * per_group
    block = rest // head_group
    head = group * head_group + rest - block * head_group
    return head // heads, head % heads, table + 16 * block


@gluon.jit
def _load(desc, desc2, b, row, h, ready, slot, slot2, ROWS: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """Start loading ROWS rows of one head: columns [0, A) and, if B, [A, A + B)."""
    size: gl.constexpr = desc.block_type.nbytes
    mbarrier.expect(ready, size + size * B // A)
    tma_load(desc, [b, row, h, 0], ready, reinterpret(slot, desc.dtype, [1, ROWS, 1, A], desc.layout))
    if B:
        tma_load(desc2, [b, row, h, A], ready, reinterpret(slot2, desc.dtype, [1, ROWS, 1, B], desc2.layout))


@gluon.jit
def _load_pair(
    k_desc, k2_desc, v_desc, v2_desc, b, row, h, k_sm, k2_sm, v_sm, v2_sm, k_rdy, v_rdy, k_emp, v_emp, it,
    BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr, NS: gl.constexpr,
):  # fmt: skip
    """Load a block of BN keys, and then its values, as soon as their slots are empty."""
    slot = it % NS
    phase = ((it // NS) & 1) ^ 1
    mbarrier.wait(k_emp.index(slot), phase)
    _load(k_desc, k2_desc, b, row, h, k_rdy.index(slot), k_sm.index(slot), k2_sm.index(slot), BN, A, B)
    mbarrier.wait(v_emp.index(slot), phase)
    _load(v_desc, v2_desc, b, row, h, v_rdy.index(slot), v_sm.index(slot), v2_sm.index(slot), BN, VA, VB)


@gluon.jit
def _load_parts(desc, desc2, b, row, h, ready, buffer, buffer2, A: gl.constexpr, B: gl.constexpr):
    """Start loading 64 rows for each worker. One barrier, `ready`, covers all of them."""
    W: gl.constexpr = buffer.shape[0]
    size: gl.constexpr = W * desc.block_type.nbytes
    mbarrier.expect(ready, size + size * B // A)
    for w in gl.static_range(W):
        view = reinterpret(buffer.index(w), desc.dtype, [1, 64, 1, A], desc.layout)
        tma_load(desc, [b, row + 64 * w, h, 0], ready, view)
        if B:
            view2 = reinterpret(buffer2.index(w), desc.dtype, [1, 64, 1, B], desc2.layout)
            tma_load(desc2, [b, row + 64 * w, h, A], ready, view2)


@gluon.jit
def _load_out(o_desc, o2_desc, b, row, h, o_rdy, o_emp, o_sm, o2_sm, turn, VA: gl.constexpr, VB: gl.constexpr):
    """Load the running out of an item, as soon as the previous item's result is written from this space."""
    mbarrier.wait(o_emp, (turn & 1) ^ 1)
    _load_parts(o_desc, o2_desc, b, row, h, o_rdy, o_sm, o2_sm, VA, VB)


@gluon.jit
def _first_item(turns):
    """Return the first item of this program."""
    return _program() * gl.maximum(turns, 1)


@gluon.jit
def _next_item(t, items, turns, counter, t_sm, t_rdy, t_emp, turn):
    """Return the next item, and pass it to the workers through shared memory. `items` or more ends the program."""
    if turns > 0:  # the program ends after `turns` consecutive items
        t = gl.where((t + 1) % turns == 0, items, t + 1)
    else:  # the program takes the first item that no program has taken
        t = gl.atomic_add(counter, 1, sem="relaxed") + gl.num_programs(0)
    mbarrier.wait(t_emp.index(turn & 1), ((turn >> 1) & 1) ^ 1)
    t_sm.index(turn & 1).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + t)
    mbarrier.arrive(t_rdy.index(turn & 1), count=1)
    return t


@gluon.jit
def _loader(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, o_desc, o2_desc, table,
    q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, o_sm, o2_sm,
    q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
    counter, items, turns, heads, kv_group, blocks, head_group,
    BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr,
    NS: gl.constexpr, MODE: gl.constexpr, SHARE: gl.constexpr,
):  # fmt: skip
    """Load the blocks of all items of this program, in the order in which the workers read them."""
    it = 0
    turn = 0
    t = _first_item(turns)
    while t < items:
        b, h, work = _item(t, table, heads, blocks, head_group)
        kv = h // kv_group
        row0 = gl.load(work)
        runs = table + gl.load(work + 1)
        n_runs = gl.load(work + 2)
        first = gl.load(work + 8)
        slot = it % NS
        phase = ((it // NS) & 1) ^ 1
        mbarrier.wait(k_emp.index(slot), phase)  # this slot is empty before the space of the queries
        _load(k_desc, k2_desc, b, first, kv, k_rdy.index(slot), k_sm.index(slot), k2_sm.index(slot), BN, A, B)
        mbarrier.wait(q_emp, (turn & 1) ^ 1)
        _load_parts(q_desc, q2_desc, b, row0, h, q_rdy, q_sm, q2_sm, A, B)
        mbarrier.wait(v_emp.index(slot), phase)
        _load(v_desc, v2_desc, b, first, kv, v_rdy.index(slot), v_sm.index(slot), v2_sm.index(slot), BN, VA, VB)
        it += 1
        start = it
        for r in range(n_runs):
            col = gl.load(runs + 2 * r)
            count = gl.load(runs + 2 * r + 1)
            for i in range(count):
                if MODE == _MERGE_32 and not SHARE:  # noqa: SIM102  (a compile-time condition; the next one is not)
                    # Load the running out once its space is free: the workers release it in the item's first step.
                    if it == start + NS - 1:
                        _load_out(o_desc, o2_desc, b, row0, h, o_rdy, o_emp, o_sm, o2_sm, turn, VA, VB)
                _load_pair(
                    k_desc, k2_desc, v_desc, v2_desc, b, col + i * BN, kv, k_sm, k2_sm, v_sm, v2_sm,
                    k_rdy, v_rdy, k_emp, v_emp, it, BN, A, B, VA, VB, NS)  # fmt: skip
                it += 1
        if MODE == _MERGE_32 and not SHARE:  # noqa: SIM102
            if it <= start + NS - 1:
                _load_out(o_desc, o2_desc, b, row0, h, o_rdy, o_emp, o_sm, o2_sm, turn, VA, VB)
        t = _next_item(t, items, turns, counter, t_sm, t_rdy, t_emp, turn)
        turn += 1


@gluon.jit
def _entry(entry):
    """Return the eight values of a masked block's table entry."""
    return (
        gl.load(entry), gl.load(entry + 1), gl.load(entry + 2), gl.load(entry + 3),
        gl.load(entry + 4), gl.load(entry + 5), gl.load(entry + 6), gl.load(entry + 7),
    )  # fmt: skip


@gluon.jit
def _bounds(entry, row0, sl: gl.constexpr):
    """Return the visible columns [left, right) of each row in a masked block, relative to its first column."""
    col, k_start, k_stop, q_start, q_stop, lo, hi, _all_seen = entry
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, sl))
    left = gl.maximum(rows - hi, k_start) - col
    right = gl.minimum(rows - lo + 1, k_stop) - col
    right = gl.where((rows >= q_start) & (rows < q_stop), right, 0)
    return left, right


@gluon.jit
def _scores(q, q2, k, k2, BN: gl.constexpr, B: gl.constexpr):
    """Start Q·Kᵀ. Return the scores [64, BN], which are complete after `warpgroup_mma_wait`."""
    s = gl.zeros([64, BN], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16]))
    s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    if B:
        s = warpgroup_mma(q2, k2.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _first_step(
    q, q2, k_sm, k2_sm, q_rdy, k_rdy, k_emp, o_emp, it, turn, peeled, row0, qk_scale,
    BN: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, NS: gl.constexpr, MODE: gl.constexpr, SHARE: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """Compute Q·Kᵀ and the softmax of an item's first block. Return (top, total, p16); `_step` multiplies by V."""
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VA, 16])
    left, right = _bounds(peeled, row0, sl)
    mbarrier.wait(q_rdy, turn & 1)
    slot = it % NS
    mbarrier.wait(k_rdy.index(slot), (it // NS) & 1)
    s = _scores(q, q2, k_sm.index(slot), k2_sm.index(slot), BN, B)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_emp.index(slot), count=1)
    # Wait until the previous item is written. This wait must not overlap the product. Otherwise there is no barrier
    # between the end of the product and the release of its slot.
    if not SHARE:
        tma.store_wait(0)
        if MODE == _MERGE_32:
            mbarrier.arrive(o_emp, count=1, pred=turn > 0)
    if CAP > 0:
        s = capped(s, qk_scale)
    if MODE == _MERGE_32 or peeled[7] == 0:  # merging has no register for this test
        s = hide_scores(s, left, right)
    factor = exponent_scale(qk_scale, CAP)
    top = gl.maximum(gl.max(s, axis=1) * factor, -1e30)  # finite even without visible keys
    p = gl.exp2(s * factor - top[:, None])
    total = partial_sum(p, BN)
    p16 = gl.convert_layout(convert_to_16_bits(p, q.dtype), gl.DotOperandLayout(0, ol, 2))
    return top, total, p16


@gluon.jit
def _weighted(p16, v, v2, o, o2, VB: gl.constexpr):
    """Start adding P·V to o, and P·V of the second panel to o2. Both are complete after `warpgroup_mma_wait`."""
    ot = warpgroup_mma(p16, v, o, is_async=True)
    if VB:
        p16 = gl.convert_layout(p16, gl.DotOperandLayout(0, o2.type.layout, 2))
        o2 = warpgroup_mma(p16, v2, o2, is_async=True)
    return ot, o2


@gluon.jit
def _step(
    q, q2, k_sm, k2_sm, v_sm, v2_sm, k_rdy, v_rdy, k_emp, v_emp, it, o, o2, p16, total, top, masked, row0,
    qk_scale,
    MASK: gl.constexpr, BN: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr, NS: gl.constexpr,
    CAP: gl.constexpr,
):  # fmt: skip
    """Compute P·V of block `it`, overlapped with Q·Kᵀ and the softmax of block `it + 1`.

    If MASK, `masked` is the table entry of block `it + 1`.
    """
    sl: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VA, 16])
    if MASK:
        left, right = _bounds(_entry(masked), row0, sl)
    slot = it % NS
    nslot = (it + 1) % NS
    mbarrier.wait(k_rdy.index(nslot), ((it + 1) // NS) & 1)
    s = _scores(q, q2, k_sm.index(nslot), k2_sm.index(nslot), BN, B)
    mbarrier.wait(v_rdy.index(slot), (it // NS) & 1)
    ot, ot2 = _weighted(p16, v_sm.index(slot), v2_sm.index(slot), o, o2, VB)
    s = warpgroup_mma_wait(2 if VB else 1, deps=[s])
    mbarrier.arrive(k_emp.index(nslot), count=1)
    if CAP > 0:
        s = capped(s, qk_scale)
    if MASK:
        s = hide_scores(s, left, right)
    factor = exponent_scale(qk_scale, CAP)
    ntop = gl.max(s, axis=1) * factor
    ntop = gl.where(ntop > top + _BEHIND, ntop, top)
    fade = gl.exp2(top - ntop)
    p = gl.exp2(s * factor - ntop[:, None])
    fade_parts = gl.convert_layout(fade, gl.SliceLayout(1, total.type.layout))
    total = total * fade_parts[:, None] + partial_sum(p, BN)
    if VB:
        o, o2, p16, p = warpgroup_mma_wait(0, deps=[ot, ot2, p16, p])
    else:
        o, p16, p = warpgroup_mma_wait(0, deps=[ot, p16, p])
    mbarrier.arrive(v_emp.index(slot), count=1)
    p16 = gl.convert_layout(convert_to_16_bits(p, p16.dtype), gl.DotOperandLayout(0, ol, 2))
    if VB:
        o2 = rescale(o2, fade)
    return rescale(o, fade), o2, p16, total, ntop


@gluon.jit
def _stage(x, buffer):
    """Store x in shared memory, in the dtype of the buffer."""
    buffer.store(x.to(buffer.dtype))


@gluon.jit
def _put(o, place, rows, stop, row_stride, keep, FIRST: gl.constexpr, DV: gl.constexpr, MODE: gl.constexpr):
    """Write rows before `stop` and columns from FIRST on to global memory, without TMA.

    If MODE is MERGE_32, first add the running result, multiplied by its weight `keep` per row.
    """
    columns = FIRST + gl.arange(0, o.shape[1], gl.SliceLayout(0, o.type.layout))
    rl: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    rows = gl.convert_layout(rows, rl)
    place += rows.to(gl.int64)[:, None] * row_stride + columns[None, :]
    inside = (rows < stop)[:, None] & (columns < DV)[None, :]
    if MODE == _MERGE_32:
        o = o + gl.load(place, mask=inside, other=0.0) * gl.convert_layout(keep, rl)[:, None]
    gl.store(place, o.to(place.dtype.element_ty), mask=inside)


@gluon.jit
def _worker(
    WG: gl.constexpr, o_desc, o2_desc, out, lse, table, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, o_sm, o2_sm,
    q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
    qk_scale, Sq, o_sb, o_ss, o_sh, lse_sb, lse_sh, items, turns, heads, blocks, head_group,
    BN: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr, DV: gl.constexpr,
    NS: gl.constexpr, MODE: gl.constexpr, SHARE: gl.constexpr, CAP: gl.constexpr,
):  # fmt: skip
    """Compute 64 query rows of each item: the online softmax over its key blocks, then LSE and out."""
    ol: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VA, 16])
    ol2: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, VB if VB else 16, 16])
    rl: gl.constexpr = gl.SliceLayout(1, ol)
    q = q_sm.index(WG)
    q2 = q2_sm.index(WG)
    part = o_sm.index(WG)
    part2 = o2_sm.index(WG)
    if SHARE:  # values may have fewer columns than queries
        part = reinterpret(part, o_sm.dtype, [64, VA], panel(VA, 16))
        if VB:
            part2 = reinterpret(part2, o_sm.dtype, [64, VB], panel(VB, 16))
    t = _first_item(turns)
    b, h, work = _item(t, table, heads, blocks, head_group)
    row0 = gl.load(work) + 64 * WG
    stop = gl.load(work + 6)
    peeled = _entry(work + 8)
    it = 0
    turn = 0
    while t < items:
        n_full = gl.load(work + 3)
        masked = table + gl.load(work + 4)
        n = n_full + gl.load(work + 5)
        top, total, p16 = _first_step(
            q, q2, k_sm, k2_sm, q_rdy, k_rdy, k_emp, o_emp, it, turn, peeled, row0, qk_scale,
            BN, B, VA, NS, MODE, SHARE, CAP)  # fmt: skip
        o = gl.zeros([64, VA], gl.float32, ol)
        o2 = gl.zeros([64, VB], gl.float32, ol2) if VB else 0
        for i in range(n_full):
            o, o2, p16, total, top = _step(
                q, q2, k_sm, k2_sm, v_sm, v2_sm, k_rdy, v_rdy, k_emp, v_emp, it + i, o, o2, p16, total, top,
                masked, row0, qk_scale, False, BN, B, VA, VB, NS, CAP)  # fmt: skip
        for i in range(n_full, n):
            o, o2, p16, total, top = _step(
                q, q2, k_sm, k2_sm, v_sm, v2_sm, k_rdy, v_rdy, k_emp, v_emp, it + i, o, o2, p16, total, top,
                masked, row0, qk_scale, True, BN, B, VA, VB, NS, CAP)  # fmt: skip
            masked += 8
        if not SHARE:
            mbarrier.arrive(q_emp, count=1)
        rows = row0 + gl.arange(0, 64, rl)
        lse_row = lse + b * lse_sb + h * lse_sh + rows
        old = gl.zeros([64], gl.float32, rl)
        if MODE == _MERGE_32:
            old = gl.load(lse_row, mask=rows < stop, other=float("-inf"))
        it += n
        slot = it % NS
        mbarrier.wait(v_rdy.index(slot), (it // NS) & 1)
        ot, ot2 = _weighted(p16, v_sm.index(slot), v2_sm.index(slot), o, o2, VB)
        # read the next item's work row while the tensor cores work
        at_b, at_h, at_row, at_stop = b, h, row0, stop
        mbarrier.wait(t_rdy.index(turn & 1), (turn >> 1) & 1)
        t = gl.sum(t_sm.index(turn & 1).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)
        mbarrier.arrive(t_emp.index(turn & 1), count=1)
        b, h, work = _item(gl.where(t < items, t, 0), table, heads, blocks, head_group)
        row0 = gl.load(work) + 64 * WG
        stop = gl.load(work + 6)
        peeled = _entry(work + 8)
        total = gl.convert_layout(gl.sum(total, axis=1), rl)
        both, keep, gain = finish(total, gl.convert_layout(top, rl), old, MODE == _MERGE_32)
        gl.store(lse_row, both, mask=rows < at_stop)
        if VB:
            o, o2, p16 = warpgroup_mma_wait(0, deps=[ot, ot2, p16])
        else:
            o, p16 = warpgroup_mma_wait(0, deps=[ot, p16])
        mbarrier.arrive(v_emp.index(slot), count=1)
        it += 1
        o = o * gain[:, None]
        if VB:
            o2 = o2 * gl.convert_layout(gain, gl.SliceLayout(1, ol2))[:, None]
        if MODE == _MERGE_32 and not SHARE:
            mbarrier.wait(o_rdy, turn & 1)
            o = o + part.load(ol) * keep[:, None]
            if VB:
                o2 = o2 + part2.load(ol2) * gl.convert_layout(keep, gl.SliceLayout(1, ol2))[:, None]
        if SHARE and MODE != _OUT_16:  # shared memory has no space for float32
            place = out + at_b * o_sb + at_h * o_sh
            _put(o, place, rows, at_stop, o_ss, keep, 0, DV, MODE)
            if VB:
                _put(o2, place, rows, at_stop, o_ss, keep, VA, DV, MODE)
        elif (at_stop - at_row >= 64) | (at_stop == Sq):  # TMA does not write past a batch row's end
            _stage(o, part)
            if VB:
                _stage(o2, part2)
            fence_async_shared()
            tma_store(o_desc, [at_b, at_row, at_h, 0], reinterpret(part, o_sm.dtype, [1, 64, 1, VA], o_desc.layout))
            if VB:
                view2 = reinterpret(part2, o_sm.dtype, [1, 64, 1, VB], o2_desc.layout)
                tma_store(o2_desc, [at_b, at_row, at_h, VA], view2)
        else:  # rows from `at_stop` on belong to another item
            place = out + at_b * o_sb + at_h * o_sh
            _put(o, place, rows, at_stop, o_ss, keep, 0, DV, _OUT_16)
            if VB:
                _put(o2, place, rows, at_stop, o_ss, keep, VA, DV, _OUT_16)
        if SHARE:  # the next item's queries overwrite this item's rows of out
            tma.store_wait(0)
            mbarrier.arrive(q_emp, count=1)
        turn += 1
    tma.store_wait(0)


# No argument is specialized by value, because the launcher reuses one compiled kernel for all values.
@gluon.jit(do_not_specialize=["out", "lse", "table", "counter", "Sq", "o_sb", "o_ss", "o_sh", "lse_sb", "lse_sh", "items", "turns", "heads", "kv_group", "blocks", "head_group"])  # fmt: skip # noqa: E501
def forward_kernel(
    q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, o_desc, o2_desc, out, lse, table, counter,
    qk_scale: gl.float32, Sq: gl.int32, o_sb: gl.int64, o_ss: gl.int64, o_sh: gl.int64,
    lse_sb: gl.int64, lse_sh: gl.int64,
    items: gl.int32, turns: gl.int32, heads: gl.int32, kv_group: gl.int32, blocks: gl.int32, head_group: gl.int32,
    BN: gl.constexpr, A: gl.constexpr, B: gl.constexpr, VA: gl.constexpr, VB: gl.constexpr, DV: gl.constexpr,
    NS: gl.constexpr, MODE: gl.constexpr, SHARE: gl.constexpr, CAP: gl.constexpr, W: gl.constexpr, REGS: gl.constexpr,
):  # fmt: skip
    """Compute out and LSE of all items: allocate shared memory and barriers, then start the loader and W workers."""
    dtype: gl.constexpr = q_desc.dtype
    q_sm = gl.allocate_shared_memory(dtype, [W, 64, A], panel(A, 16))
    k_sm = gl.allocate_shared_memory(dtype, [NS, BN, A], panel(A, 16))
    v_sm = gl.allocate_shared_memory(dtype, [NS, BN, VA], panel(VA, 16))
    q2_sm = q_sm
    k2_sm = k_sm
    v2_sm = v_sm
    if B:
        q2_sm = gl.allocate_shared_memory(dtype, [W, 64, B], panel(B, 16))
        k2_sm = gl.allocate_shared_memory(dtype, [NS, BN, B], panel(B, 16))
    if VB:
        v2_sm = gl.allocate_shared_memory(dtype, [NS, BN, VB], panel(VB, 16))
    o_sm = q_sm
    o2_sm = q2_sm
    if not SHARE:
        bits: gl.constexpr = o_desc.dtype.primitive_bitwidth
        o_sm = gl.allocate_shared_memory(o_desc.dtype, [W, 64, VA], panel(VA, bits))
        if VB:
            o2_sm = gl.allocate_shared_memory(o_desc.dtype, [W, 64, VB], panel(VB, bits))
    t_sm = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bl: gl.constexpr = mbarrier.MBarrierLayout()
    q_rdy = gl.allocate_shared_memory(gl.int64, [1], bl)
    q_emp = gl.allocate_shared_memory(gl.int64, [1], bl)
    o_rdy = gl.allocate_shared_memory(gl.int64, [1], bl)
    o_emp = gl.allocate_shared_memory(gl.int64, [1], bl)
    k_rdy = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    v_rdy = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    k_emp = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    v_emp = gl.allocate_shared_memory(gl.int64, [NS, 1], bl)
    t_rdy = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    t_emp = gl.allocate_shared_memory(gl.int64, [2, 1], bl)
    for i in gl.static_range(2):
        mbarrier.init(t_rdy.index(i), count=1)
        mbarrier.init(t_emp.index(i), count=W)
    mbarrier.init(q_rdy, count=1)
    mbarrier.init(q_emp, count=W)
    mbarrier.init(o_rdy, count=1)
    mbarrier.init(o_emp, count=W)
    for i in gl.static_range(NS):
        mbarrier.init(k_rdy.index(i), count=1)
        mbarrier.init(v_rdy.index(i), count=1)
        mbarrier.init(k_emp.index(i), count=W)
        mbarrier.init(v_emp.index(i), count=W)
    fence_async_shared()
    # The argument tuples are written inline, because a local variable would turn their constants into tensors.
    if W == 2:
        gl.warp_specialize([
            (_worker, (0, o_desc, o2_desc, out, lse, table, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm,
                       o_sm, o2_sm, q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       qk_scale, Sq, o_sb, o_ss, o_sh, lse_sb, lse_sh, items, turns, heads, blocks, head_group,
                       BN, B, VA, VB, DV, NS, MODE, SHARE, CAP)),
            (_worker, (1, o_desc, o2_desc, out, lse, table, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm,
                       o_sm, o2_sm, q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       qk_scale, Sq, o_sb, o_ss, o_sh, lse_sb, lse_sh, items, turns, heads, blocks, head_group,
                       BN, B, VA, VB, DV, NS, MODE, SHARE, CAP)),
            (_loader, (q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, o_desc, o2_desc, table,
                       q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, o_sm, o2_sm,
                       q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       counter, items, turns, heads, kv_group, blocks, head_group,
                       BN, A, B, VA, VB, NS, MODE, SHARE)),
        ], [4, 1], [REGS, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (_worker, (0, o_desc, o2_desc, out, lse, table, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm,
                       o_sm, o2_sm, q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       qk_scale, Sq, o_sb, o_ss, o_sh, lse_sb, lse_sh, items, turns, heads, blocks, head_group,
                       BN, B, VA, VB, DV, NS, MODE, SHARE, CAP)),
            (_worker, (1, o_desc, o2_desc, out, lse, table, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm,
                       o_sm, o2_sm, q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       qk_scale, Sq, o_sb, o_ss, o_sh, lse_sb, lse_sh, items, turns, heads, blocks, head_group,
                       BN, B, VA, VB, DV, NS, MODE, SHARE, CAP)),
            (_worker, (2, o_desc, o2_desc, out, lse, table, q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm,
                       o_sm, o2_sm, q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       qk_scale, Sq, o_sb, o_ss, o_sh, lse_sb, lse_sh, items, turns, heads, blocks, head_group,
                       BN, B, VA, VB, DV, NS, MODE, SHARE, CAP)),
            (_loader, (q_desc, q2_desc, k_desc, k2_desc, v_desc, v2_desc, o_desc, o2_desc, table,
                       q_sm, q2_sm, k_sm, k2_sm, v_sm, v2_sm, o_sm, o2_sm,
                       q_rdy, k_rdy, v_rdy, o_rdy, q_emp, k_emp, v_emp, o_emp, t_sm, t_rdy, t_emp,
                       counter, items, turns, heads, kv_group, blocks, head_group,
                       BN, A, B, VA, VB, NS, MODE, SHARE)),
        ], [4, 4, 1], [REGS, REGS, 32])  # fmt: skip
