"""The kernel of `push`: program (i, m) writes each so many-th block of message m into its rank's memory."""

from __future__ import annotations

import triton
import triton.language as tl

AT_ONCE = 24


@triton.jit(do_not_specialize=[f"size{i}" for i in range(AT_ONCE)])
def push_kernel(
    source0, source1, source2, source3, source4, source5, source6, source7,
    source8, source9, source10, source11, source12, source13, source14, source15,
    source16, source17, source18, source19, source20, source21, source22, source23,
    target0, target1, target2, target3, target4, target5, target6, target7,
    target8, target9, target10, target11, target12, target13, target14, target15,
    target16, target17, target18, target19, target20, target21, target22, target23,
    size0, size1, size2, size3, size4, size5, size6, size7,
    size8, size9, size10, size11, size12, size13, size14, size15,
    size16, size17, size18, size19, size20, size21, size22, size23,
    BLOCK: tl.constexpr = 4096,
):  # fmt: skip
    """Sizes count 16 bytes, the numbers of a block 4. Pointers cannot be put in a list: each message has names."""
    message = tl.program_id(1)
    source, target, size = source0, target0, size0
    if message == 1:
        source, target, size = source1, target1, size1
    elif message == 2:
        source, target, size = source2, target2, size2
    elif message == 3:
        source, target, size = source3, target3, size3
    elif message == 4:
        source, target, size = source4, target4, size4
    elif message == 5:
        source, target, size = source5, target5, size5
    elif message == 6:
        source, target, size = source6, target6, size6
    elif message == 7:
        source, target, size = source7, target7, size7
    elif message == 8:
        source, target, size = source8, target8, size8
    elif message == 9:
        source, target, size = source9, target9, size9
    elif message == 10:
        source, target, size = source10, target10, size10
    elif message == 11:
        source, target, size = source11, target11, size11
    elif message == 12:
        source, target, size = source12, target12, size12
    elif message == 13:
        source, target, size = source13, target13, size13
    elif message == 14:
        source, target, size = source14, target14, size14
    elif message == 15:
        source, target, size = source15, target15, size15
    elif message == 16:
        source, target, size = source16, target16, size16
    elif message == 17:
        source, target, size = source17, target17, size17
    elif message == 18:
        source, target, size = source18, target18, size18
    elif message == 19:
        source, target, size = source19, target19, size19
    elif message == 20:
        source, target, size = source20, target20, size20
    elif message == 21:
        source, target, size = source21, target21, size21
    elif message == 22:
        source, target, size = source22, target22, size22
    elif message == 23:
        source, target, size = source23, target23, size23
    for first in range(tl.program_id(0) * BLOCK, size * 4, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < size * 4), mask=at < size * 4)
