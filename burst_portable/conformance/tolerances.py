"""The one table of tolerances: multiples of what plain attention in the same dtype loses against float64.

    error of a quantity  <=  multiple · error of plain attention in that dtype  +  floor of the dtype

and 4 times what a kernel says that it rounds its operands by (`Kernel.rounding`), which only TF32 does. A gradient is
three products, one after the other, each of two rounded operands.

Errors are relative in the 2-norm, over the whole quantity. Plain attention is measured on the same inputs, so a
hard case is judged against how hard it is. Nothing softens them: no environment variable, no second try.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable.conformance.oracle import Answer
from burst_portable.numerics import accumulation_dtype

MULTIPLE = {"out": 1.5, "lse": 1.5, "dq": 1.5, "dk": 1.5, "dv": 1.5, "dsinks": 1.5}

# A few units of rounding: where plain attention happens to be exact, a sum in another order still rounds.
FLOOR = {torch.float64: 1e-14, torch.float32: 6e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}

_ROUNDINGS = 4


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


def error_of_weights(exact: Answer, dtype: torch.dtype, rounding: float = 0.0) -> float:
    """The relative error of a weight from rounding the largest LSE: gradients recompute each as exp(score - LSE).

    That is what makes attention fit (FlashAttention-2, section 3.1.2), and its price where scores are large: an LSE
    of 100 is rounded by 4e-6, and every weight of its row with it. Plain attention keeps its weights and pays nothing.
    A kernel whose operands are rounded, by `rounding`, moves a score of 100 by up to 0.1, if they are those of TF32.
    """
    finite = exact.lse[exact.lse.isfinite()].abs()
    eps = torch.finfo(accumulation_dtype(dtype)).eps
    return float(finite.max()) * (eps + rounding) if finite.numel() else 0.0


def errors(
    answer: Answer, exact: Answer, plain: Answer, dtype: torch.dtype, extra: float = 0.0, rounding: float = 0.0
) -> dict[str, tuple[float, float]]:
    """Every quantity of an answer: name -> (error, allowed).

    Args:
        extra: is allowed to gradients besides.
        rounding: of the kernel's operands.
    """
    expected, usual = exact.quantities(), plain.quantities()
    return {
        name: (
            relative_error(value, expected[name]),
            MULTIPLE[name] * relative_error(usual[name], expected[name])
            + FLOOR[dtype]
            + _ROUNDINGS * rounding
            + (extra if name.startswith("d") else 0.0),
        )
        for name, value in answer.quantities().items()
    }


def judge(answer: Answer, exact: Answer, plain: Answer, dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """The quantities that are too far off: name -> (error, allowed). Empty for a good answer."""
    every = errors(answer, exact, plain, dtype)
    return {name: (error, allowed) for name, (error, allowed) in every.items() if not error <= allowed}
