"""The kernel of `push`: program (i, m) writes each so many-th block of message m into its rank's memory."""

from __future__ import annotations

import triton
import triton.language as tl

AT_ONCE = 24


@triton.jit(do_not_specialize=[f"{name}{i}" for name in ("size", "width", "step", "jump") for i in range(AT_ONCE)])
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
    width0, width1, width2, width3, width4, width5, width6, width7,
    width8, width9, width10, width11, width12, width13, width14, width15,
    width16, width17, width18, width19, width20, width21, width22, width23,
    step0, step1, step2, step3, step4, step5, step6, step7,
    step8, step9, step10, step11, step12, step13, step14, step15,
    step16, step17, step18, step19, step20, step21, step22, step23,
    jump0, jump1, jump2, jump3, jump4, jump5, jump6, jump7,
    jump8, jump9, jump10, jump11, jump12, jump13, jump14, jump15,
    jump16, jump17, jump18, jump19, jump20, jump21, jump22, jump23,
    BLOCK: tl.constexpr = 1024,
):  # fmt: skip
    """All count 16 bytes, 4 numbers. A line is `width` long, the next one `step` further on here and `jump` there.

    Pointers cannot be put in a list: each message has names.
    """
    message = tl.program_id(1)
    source, target, size, width, step, jump = source0, target0, size0, width0, step0, jump0
    if message == 1:
        source, target, size, width, step, jump = source1, target1, size1, width1, step1, jump1
    elif message == 2:
        source, target, size, width, step, jump = source2, target2, size2, width2, step2, jump2
    elif message == 3:
        source, target, size, width, step, jump = source3, target3, size3, width3, step3, jump3
    elif message == 4:
        source, target, size, width, step, jump = source4, target4, size4, width4, step4, jump4
    elif message == 5:
        source, target, size, width, step, jump = source5, target5, size5, width5, step5, jump5
    elif message == 6:
        source, target, size, width, step, jump = source6, target6, size6, width6, step6, jump6
    elif message == 7:
        source, target, size, width, step, jump = source7, target7, size7, width7, step7, jump7
    elif message == 8:
        source, target, size, width, step, jump = source8, target8, size8, width8, step8, jump8
    elif message == 9:
        source, target, size, width, step, jump = source9, target9, size9, width9, step9, jump9
    elif message == 10:
        source, target, size, width, step, jump = source10, target10, size10, width10, step10, jump10
    elif message == 11:
        source, target, size, width, step, jump = source11, target11, size11, width11, step11, jump11
    elif message == 12:
        source, target, size, width, step, jump = source12, target12, size12, width12, step12, jump12
    elif message == 13:
        source, target, size, width, step, jump = source13, target13, size13, width13, step13, jump13
    elif message == 14:
        source, target, size, width, step, jump = source14, target14, size14, width14, step14, jump14
    elif message == 15:
        source, target, size, width, step, jump = source15, target15, size15, width15, step15, jump15
    elif message == 16:
        source, target, size, width, step, jump = source16, target16, size16, width16, step16, jump16
    elif message == 17:
        source, target, size, width, step, jump = source17, target17, size17, width17, step17, jump17
    elif message == 18:
        source, target, size, width, step, jump = source18, target18, size18, width18, step18, jump18
    elif message == 19:
        source, target, size, width, step, jump = source19, target19, size19, width19, step19, jump19
    elif message == 20:
        source, target, size, width, step, jump = source20, target20, size20, width20, step20, jump20
    elif message == 21:
        source, target, size, width, step, jump = source21, target21, size21, width21, step21, jump21
    elif message == 22:
        source, target, size, width, step, jump = source22, target22, size22, width22, step22, jump22
    elif message == 23:
        source, target, size, width, step, jump = source23, target23, size23, width23, step23, jump23
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
