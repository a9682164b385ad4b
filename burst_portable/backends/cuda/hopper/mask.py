"""Hiding what a mask does not show, for both Hopper kernels."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def hide(x, first, last, hidden):
    """x [64, N], an accumulator, where first <= column < last of its row, elsewhere `hidden`."""
    # A thread has columns 8·i + 2·(lane % 4) + pair of a row. Taken apart, i and pair are known when compiling: as
    # numbers in registers they would cost N / 4 of them, and the loops that know no mask as well.
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
    # One comparison: as an unsigned number, what is before the first is beyond the last.
    place = (8 * eights + pairs) + gl.expand_dims(shift, 3)
    seen = place.to(gl.uint32, bitcast=True) < gl.expand_dims(count, 3).to(gl.uint32, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.where(seen, parts, hidden), [64, N]), layout)
