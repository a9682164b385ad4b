"""The one table of tolerances: multiples of what plain attention in the same dtype loses against float64.

    error of a quantity  <=  multiple · error of plain attention in that dtype  +  floor of the dtype

Errors are relative in the 2-norm, over the whole quantity. Plain attention is measured on the same inputs, so a
hard case is judged against how hard it is. Nothing softens them: no environment variable, no second try.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.conformance.oracle import Answer

MULTIPLE = {"out": 1.5, "lse": 1.5, "dq": 1.5, "dk": 1.5, "dv": 1.5, "dsinks": 1.5}

# A few units of rounding: where plain attention happens to be exact, a sum in another order still rounds.
FLOOR = {torch.float64: 1e-14, torch.float32: 6e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def relative_error(x: Tensor, reference: Tensor) -> float:
    """|x - reference| / |reference| in the 2-norm; infinite if x holds a NaN, or an infinity of its own.

    Infinities that the reference has too (LSE of rows that see nothing) must be equal, and count no further.
    """
    x, reference = x.detach().double().cpu(), reference.detach().double().cpu()
    finite = reference.isfinite()
    if x.shape != reference.shape or not torch.equal(x[~finite], reference[~finite]):
        return float("inf")
    difference = (x[finite] - reference[finite]).norm().item()
    norm = reference[finite].norm().item()
    error = difference / norm if norm else difference
    return error if error == error else float("inf")


def judge(answer: Answer, exact: Answer, plain: Answer, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """The quantities that are too far off: name -> (error, allowed). Empty for a good answer."""
    wrong = {}
    expected, usual = exact.quantities(), plain.quantities()
    for name, value in answer.quantities().items():
        allowed = MULTIPLE[name] * relative_error(usual[name], expected[name]) + FLOOR[dtype]
        error = relative_error(value, expected[name])
        if not error <= allowed:
            wrong[name] = (error, allowed)
    return wrong
