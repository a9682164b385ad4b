"""The code of `parts.hide_asm`, run instruction by instruction for each thread of a warp."""

import math
import re

import pytest

pytest.importorskip("triton")
from burst_portable.backends.cuda.hopper import parts

LANES = 32
BITS = 1 << 32


def signed(x):
    return (x + BITS // 2) % BITS - BITS // 2


OPERATIONS = {
    "sub.s32": lambda a, b: a - b,
    "add.s32": lambda a, b: a + b,
    "max.s32": lambda a, b: max(signed(a), signed(b)),
    "min.s32": lambda a, b: min(signed(a), signed(b)),
    "and.b32": lambda a, b: a & b,
    "not.b32": lambda a: ~a,
    "shr.u32": lambda a, b: (a % BITS) >> b,
    "shl.b32": lambda a, b: a << b if b < 32 else 0,
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "setp.ne.b32": lambda a, b: a % BITS != b % BITS,
    "selp.f32": lambda a, b, chosen: a if chosen else b,
}


def run(text, operands):
    """Run the code with these values of `$0`, `$1` and so on. Return the written ones."""
    values = {f"${i}": x for i, x in enumerate(operands)}
    body = re.sub(r"\.reg[^;]*;", "", text.strip("{} "))

    def value(name):
        if name == "0fFF800000":
            return -math.inf
        return values[name] if name in values else int(name)

    for line in filter(None, map(str.strip, body.split(";"))):
        operation, _, names = line.partition(" ")
        to, *sources = (name.strip() for name in names.split(","))
        result = OPERATIONS[operation](*map(value, sources))
        values[to] = result if isinstance(result, float) else result % BITS if result is not True else 1
    return values


def hidden(text, n, lane, bounds):
    """Return which of a thread's elements, of two rows with these bounds, the code replaces by -inf."""
    rows = [i // 2 % 2 for i in range(n)]
    operands = [
        *map(float, range(n)),
        *map(float, range(n)),
        *(bounds[r][0] for r in rows),
        *(bounds[r][1] for r in rows),
    ]
    made = run(text.replace("%laneid", str(lane)), operands)
    found = [made[f"${i}"] for i in range(n)]
    assert all(x in (float(i), -math.inf) for i, x in enumerate(found)), "an element has another value"
    return [x == -math.inf for x in found]


def expected(n, lane, bounds):
    columns = [8 * (i // 4) + 2 * (lane % 4) + i % 2 for i in range(n)]
    return [not bounds[i // 2 % 2][0] <= c < bounds[i // 2 % 2][1] for i, c in enumerate(columns)]


BOUNDS = [
    (0, 128),
    (0, 0),
    (5, 6),
    (-(1 << 30), 1 << 30),
    (127, 128),
    (128, 400),
    (64, 3),
    (-9, 77),
    (31, 97),
    (200, -200),
]


def test_code_hides_elements_outside_bounds():
    text, _ = parts.hide_asm(64)
    for lane in (0, 1, 2, 3, 17, LANES - 1):
        for first in BOUNDS:
            for second in BOUNDS:
                bounds = (first, second)
                assert hidden(text, 64, lane, bounds) == expected(64, lane, bounds), (lane, bounds)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("and.b32 lane, lane, 3", "and.b32 lane, lane, 7"), ("min.s32 part, part, 2", "min.s32 part, part, 3"),
     ("not.b32 last, last", "mov.b32 last, last"), ("max.s32 last, last, 0", "max.s32 last, last, 8")],
)  # fmt: skip
def test_planted_bugs_are_found(right, wrong):
    text, _ = parts.hide_asm(64)
    assert right in text
    planted, pairs = text.replace(right, wrong), list(zip(BOUNDS, BOUNDS[::-1], strict=True))
    cases = [(lane, pair) for lane in range(LANES) for pair in pairs]
    assert any(hidden(planted, 64, lane, pair) != expected(64, lane, pair) for lane, pair in cases)


def test_operands_are_one_register_each():
    _, operands = parts.hide_asm(64)
    kinds = operands.split(",")
    assert (kinds.count("=f"), kinds.count("r"), len(kinds)) == (64, 128, 256)
