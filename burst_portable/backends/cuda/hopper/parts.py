"""Define the functions that the Hopper kernels share: shared memory, TMA, softmax, rescaling, masks, layouts.

Versions of Gluon differ in the Python names of some functions for shared memory and TMA, but their compilers do not.
The names in this module work with all supported versions.
"""

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import _unwrap_if_constexpr, builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

# The first name exists from Triton 3.8 on, the second one before.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@builtin
def tma_add(desc, coord, src, _semantic=None):
    """Add a buffer in shared memory to global memory.

    Gluon has `tma.async_atomic_add` for this from Triton 3.8 on, and no function before.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)


@builtin
def reinterpret(buffer, dtype, shape, layout, _semantic=None):
    """Return the same bytes with another dtype, shape and layout.

    Gluon names it `reinterpret` from Triton 3.9 on, and `_reinterpret` before.
    """
    shape = [_unwrap_if_constexpr(size) for size in _unwrap_if_constexpr(shape)]
    return _semantic.memdesc_reinterpret(buffer, _unwrap_if_constexpr(dtype), shape, _unwrap_if_constexpr(layout))


@gluon.jit
def partial_sum(p, BN: gl.constexpr):
    """Sum [64, BN] to [64, 8]. Each thread adds only its own elements of a row, so no shuffles are needed."""
    return gl.sum(gl.reshape(p, [64, BN // 8, 8]), axis=1)


@gluon.jit
def convert_to_16_bits(p, dtype: gl.constexpr):
    """Convert float32 to 16 bits in pairs.

    Without the inline assembly, the compiler carries halves of pairs around the loop and swaps each pair in it.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.bfloat16, is_pure=True, pack=2)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.float16, is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def capped(s, factor):
    """Return tanh(x) for 2·x·log2(e) = s·factor. It saturates, and is never NaN if s is not NaN.

    `tanh.approx` takes one instruction of the special function unit instead of two. But the cap would multiply its
    error of 5e-4.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; "
        "fma.rn.f32 $0, e, 0fC0000000, 0f3F800000; }",
        "=f,f", [s * factor], dtype=gl.float32, is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def exponent_scale(qk_scale, CAP: gl.constexpr):
    """Return the factor from scores to exponents of 2. With a softcap CAP, the scores are the results of `capped`."""
    return CAP * 1.4426950408889634 if CAP > 0 else qk_scale


@gluon.jit
def finish(row_sum, row_max, old_lse, MERGE: gl.constexpr):
    """Return the LSE of each row, the weight of the running result if MERGE, and the weight of the new result."""
    new = (row_max + gl.log2(row_sum)) * 0.6931471805599453
    if MERGE:
        high = gl.maximum(gl.maximum(old_lse, new), -1e30)
        both = high + gl.log(gl.exp(old_lse - high) + gl.exp(new - high))
        # A row without visible keys in both results gets weights of 0, not exp(-inf + inf).
        anchor = gl.maximum(both, -1e30)
        keep = gl.exp(old_lse - anchor)
        gain = gl.where(row_sum > 0, gl.exp(new - anchor) / row_sum, 0.0)
    else:
        both = new
        keep = row_sum  # not used
        gain = gl.where(row_sum > 0, 1.0 / row_sum, 0.0)
    return both, keep, gain


def _rescale_asm(n: int) -> tuple[str, str]:
    """Return PTX code, and its operands, that multiplies a thread's n elements of [64, D] by the factors of their rows.

    The elements are alternately two of one row and two of another row. A warp skips the n multiplications if all
    factors of its rows are 1, as for most key blocks. They would be a seventh of all instructions of a block.
    """
    one, other = f"${2 * n}", f"${2 * n + 2}"
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n))
    text = (
        f"{{ .reg .pred any; setp.neu.f32 any, {one}, 0f3F800000; setp.neu.or.f32 any, {other}, 0f3F800000, any; "
        f"vote.sync.any.pred any, any, 0xffffffff; @!any bra same; {products} same: }}"
    )
    return text, ",".join([*["=f"] * n, *map(str, range(n)), *["f"] * n])


_ASM_8, _OPERANDS_8 = map(gl.constexpr, _rescale_asm(8))
_ASM_16, _OPERANDS_16 = map(gl.constexpr, _rescale_asm(16))
_ASM_32, _OPERANDS_32 = map(gl.constexpr, _rescale_asm(32))
_ASM_64, _OPERANDS_64 = map(gl.constexpr, _rescale_asm(64))


@gluon.jit
def rescale(o, alpha):
    """Return o * alpha[:, None] for an accumulator o [64, D] of 16, 32, 64 or 128 columns."""
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]
    if o.shape[1] == 128:
        return gl.inline_asm_elementwise(
            _ASM_64, _OPERANDS_64, [o, factors], dtype=gl.float32, is_pure=True, pack=64)  # fmt: skip
    elif o.shape[1] == 64:
        return gl.inline_asm_elementwise(
            _ASM_32, _OPERANDS_32, [o, factors], dtype=gl.float32, is_pure=True, pack=32)  # fmt: skip
    elif o.shape[1] == 32:
        return gl.inline_asm_elementwise(
            _ASM_16, _OPERANDS_16, [o, factors], dtype=gl.float32, is_pure=True, pack=16)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _ASM_8, _OPERANDS_8, [o, factors], dtype=gl.float32, is_pure=True, pack=8)  # fmt: skip


@gluon.jit
def hide(x, first, last, hidden):
    """Return the accumulator x [64, N] with `hidden` in place of elements outside first <= column < last of a row."""
    # A thread has columns 8·i + 2·(lane % 4) + pair of a row. The reshape makes i and pair compile-time constants. As
    # numbers in registers they would take N / 4 registers, also in the loops without a mask.
    #     lane % 4   0   1   2   3   0   1 ...
    #     column    0 1 2 3 4 5 6 7 8 9 10 ...
    layout: gl.constexpr = x.type.layout
    N: gl.constexpr = x.shape[1]
    parts = gl.reshape(x, [64, N // 8, 4, 2])
    l4: gl.constexpr = parts.type.layout
    l3: gl.constexpr = gl.SliceLayout(3, l4)
    l2: gl.constexpr = gl.SliceLayout(2, l3)
    rl: gl.constexpr = gl.SliceLayout(1, l2)
    eights = gl.arange(0, N // 8, gl.SliceLayout(0, l2))[None, :][:, :, None][:, :, :, None]
    lanes = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, l3)))[None, :], 1)
    pairs = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, l4))))[None, :]
    pairs = gl.expand_dims(gl.expand_dims(pairs, 1), 2)
    first = gl.convert_layout(first, rl)
    count = gl.maximum(gl.convert_layout(last, rl) - first, 0)[:, None][:, :, None] + 0 * lanes
    shift = 2 * lanes - first[:, None][:, :, None]
    # One unsigned comparison tests both bounds: a negative difference becomes a large number.
    place = (8 * eights + pairs) + gl.expand_dims(shift, 3)
    seen = place.to(gl.uint32, bitcast=True) < gl.expand_dims(count, 3).to(gl.uint32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.where(seen, parts, hidden), [64, N]), layout)


def hide_asm(n: int) -> tuple[str, str]:
    """Return PTX code, and its operands, that replaces some of a thread's n elements of [64, N] by -inf.

    The elements are alternately two of one row and two of another row. Element i is in column
    8·(i // 4) + 2·(lane % 4) + i % 2. So a row has one bit per element, in the order of columns::

        lane % 4   0   1   2   3   0   1
        column    0 1 2 3 4 5 6 7 8 9 10 ...
        bit       0 1 0 1 0 1 0 1 2 3 2 ...

    The code makes these bits from the bounds of the row, and then tests one bit per element. The compiler turns seven
    bits into predicates with one instruction. The bounds [first, last) are operands once per element, of which the
    first one of each row is read.
    """
    bits = ""
    for row in (0, 1):
        for name, operand in (("first", 2 * n), ("last", 3 * n)):
            # elements before the bound: 2 of each eight columns, and up to 2 of the last eight
            bits += (
                f"sub.s32 {name}, ${operand + 2 * row}, lane; max.s32 {name}, {name}, 0; and.b32 part, {name}, 7; "
                f"min.s32 part, part, 2; shr.u32 {name}, {name}, 3; shl.b32 {name}, {name}, 1; "
                f"add.s32 {name}, {name}, part; shl.b32 {name}, ones, {name}; "
            )  # a shift by 32 or more gives 0
        bits += f"not.b32 last, last; and.b32 seen{row}, first, last; "
    chosen = "".join(
        f"and.b32 part, seen{i // 2 % 2}, {1 << (i // 4 * 2 + i % 2)}; setp.ne.b32 is_seen, part, 0; "
        f"selp.f32 ${i}, ${i}, 0fFF800000, is_seen; "
        for i in sorted(range(n), key=lambda i: i // 2 % 2)  # one row after the other
    )
    text = (
        "{ .reg .b32 lane, first, last, part, ones, seen<2>; .reg .pred is_seen; "
        f"mov.u32 lane, %laneid; and.b32 lane, lane, 3; shl.b32 lane, lane, 1; mov.b32 ones, -1; {bits}{chosen}}}"
    )
    return text, ",".join([*["=f"] * n, *map(str, range(n)), *["r"] * (2 * n)])


_HIDE, _HIDE_OPERANDS = map(gl.constexpr, hide_asm(64))


@gluon.jit
def hide_scores(s, first, last):
    """Return the scores s [64, N] with -inf in place of elements outside first <= column < last of a row.

    With N = 128 it takes half the instructions of `hide`. In the forward, documents took 1 to 5 % less time on one
    H200. With N = 64 it was slower (heads of 256, 2 %), and in the backward too (heads of 64, 4 %).
    """
    if s.shape[1] == 128:
        rl: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        first = gl.convert_layout(first, rl)[:, None]
        last = gl.convert_layout(last, rl)[:, None]
        return gl.inline_asm_elementwise(
            _HIDE, _HIDE_OPERANDS, [s, first, last], dtype=gl.float32, is_pure=True, pack=64)  # fmt: skip
    else:
        return hide(s, first, last, float("-inf"))


@gluon.constexpr_function
def swizzled_rows(rows, columns, bits):
    """Return a shared memory layout in which dQ is written without bank conflicts.

    It holds [rows, columns] elements of 16 or 32 bits in lines of up to 128 bytes, swizzled as by TMA. The order of
    the rows in each group of eight is changed.

    Half a warp writes four rows of a float32 accumulator, and 32 bytes of each row. In the swizzle, rows 0 and 1 use
    the same banks, and so do rows 2 and 3. Rows 0, 2, 4 and 6 use different banks. So dS (16 bits) is written with its
    queries in the order 0 2 4 6 1 3 5 7. Its product dQ has the same order, and each row is written (32 bits) to the
    line of its query::

        line of dS      0 1 2 3 4 5 6 7          row of the product    0 1 2 3 4 5 6 7
        holds query     0 2 4 6 1 3 5 7          goes to line          0 2 4 6 1 3 5 7
    """
    # elements per line, and per chunk of 16 bytes, which the swizzle moves as a unit
    line, chunk = min(columns, 1024 // bits), 128 // bits
    order = [2, 4, 1] if bits == 16 else [4, 1, 2]  # positions of lines 1, 2 and 4
    bases = [[0, 1 << i] for i in range(min(line, columns).bit_length() - 1)]
    narrow = (1024 // bits // line).bit_length() - 1  # 1 for lines of 64 bytes
    bases += [[row, chunk * (1 << i >> narrow)] for i, row in enumerate(order)]
    bases += [[8 << i, 0] for i in range((rows // 8).bit_length() - 1)]
    bases += [[0, line << i] for i in range((columns // line).bit_length() - 1)]
    return gl.SharedLinearLayout(offset_bases=bases, alignment=1024)


@gluon.constexpr_function
def panel(columns, bits):
    """Return the shared memory layout of rows of `columns` elements that TMA and matrix products require.

    Lines of 128 bytes are swizzled, or shorter lines if a row is shorter.
    """
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, columns * bits // 8), element_bitwidth=bits, rank=2)
