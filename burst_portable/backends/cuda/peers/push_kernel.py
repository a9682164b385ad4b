"""Define the kernel of `push`: program (i, m) writes the blocks i, i + n, i + 2n, ... of message m, for n programs."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def push_kernel(messages, BLOCK: tl.constexpr = 1024):
    """Copy lines of 16-byte pieces.

    Args:
        messages: a tuple of (source, target, size, width, step, jump). The addresses of source and target are divisible
            by 16. The other numbers are in pieces of 16 bytes: total size, width of a line, and the distance from one
            line to the next in source and target. All are parameters of the kernel, so that a program loads no table.
    """
    source, target, size, width, step, jump = messages[0]
    for i in tl.static_range(1, len(messages)):
        mine = tl.program_id(1) == i
        source, target = tl.where(mine, messages[i][0], source), tl.where(mine, messages[i][1], target)
        size, width = tl.where(mine, messages[i][2], size), tl.where(mine, messages[i][3], width)
        step, jump = tl.where(mine, messages[i][4], step), tl.where(mine, messages[i][5], jump)
    source = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    target = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    number = tl.arange(0, 4)[None, :]
    for first in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        line, column = (at // width).to(tl.int64), at % width
        inside = (at < size)[:, None]
        here = (line * step + column) * 4
        there = (line * jump + column) * 4
        tl.store(
            target + (there[:, None] + number), tl.load(source + (here[:, None] + number), mask=inside), mask=inside
        )
