"""The forward's softmax: a row's sum, P in 16 bits, and what the row comes to."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def partial_sum(p, BN: gl.constexpr):
    """[64, BN] -> [64, 8]: sums only what a thread holds of a row, without shuffles."""
    return gl.sum(gl.reshape(p, [64, BN // 8, 8]), axis=1)


@gluon.jit
def packed(p, dtype: gl.constexpr):
    """To 16 bits, in pairs: left alone, the compiler carries halves around the loop and swaps each pair in it."""
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.bfloat16, is_pure=True, pack=2)  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.float16, is_pure=True, pack=2)  # fmt: skip


@gluon.jit
def finish(total, top, old, MERGE: gl.constexpr):
    """A row's LSE, and the weights of the running result, if there is one, and of this one."""
    new = (top + gl.log2(total)) * 0.6931471805599453
    if MERGE:
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
