"""Scaling the running output down where a row's maximum grew, which most blocks of keys do not do."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


def _asm(n: int) -> tuple[str, str]:
    """PTX and its operands for what a thread has of [64, D]: n elements, two of one row and two of another by turns.

    A warp jumps over the n multiplications where none of its rows' factors differs from 1: they would be a seventh of
    all instructions of a block.
    """
    one, other = f"${2 * n}", f"${2 * n + 2}"
    products = "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i}; " for i in range(n))
    text = (
        f"{{ .reg .pred any; setp.neu.f32 any, {one}, 0f3F800000; setp.neu.or.f32 any, {other}, 0f3F800000, any; "
        f"vote.sync.any.pred any, any, 0xffffffff; @!any bra same; {products} same: }}"
    )
    return text, ",".join([*["=f"] * n, *map(str, range(n)), *["f"] * n])


_ASM_32, _OPERANDS_32 = map(gl.constexpr, _asm(32))
_ASM_64, _OPERANDS_64 = map(gl.constexpr, _asm(64))


@gluon.jit
def faded(o, fade):
    """o [64, D], an accumulator of 64 or 128 columns, times a factor a row."""
    factors = gl.convert_layout(fade, gl.SliceLayout(1, o.type.layout))[:, None]
    if o.shape[1] == 128:
        return gl.inline_asm_elementwise(
            _ASM_64, _OPERANDS_64, [o, factors], dtype=gl.float32, is_pure=True, pack=64)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _ASM_32, _OPERANDS_32, [o, factors], dtype=gl.float32, is_pure=True, pack=32)  # fmt: skip
