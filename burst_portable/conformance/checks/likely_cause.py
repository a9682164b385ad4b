"""Find the likely cause of wrong results, if they look like one of a few known bugs."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import replace

import torch
from torch import Tensor

from burst_portable.conformance import oracle
from burst_portable.conformance.cases import (
    Case,
)
from burst_portable.conformance.oracle import Answer, Inputs, expected


def find_cause(answer: Answer, exact: Answer, too_large: Container[str]) -> str:
    """Return the likely cause of errors that are too large, if they look like one of a few known bugs; else ""."""
    if "lse" in too_large and (text := _find_lse_cause(answer.lse, exact.lse)):
        return text
    if "out" in too_large and answer.out.itemsize > 2:
        for dtype in (torch.bfloat16, torch.float16):
            if torch.equal(answer.out, answer.out.to(dtype).to(answer.out.dtype)):
                return f"out looks like it was rounded to {str(dtype).removeprefix('torch.')}"
    if "out" in too_large or "lse" in too_large:
        return ""  # gradients depend on them
    if _are_swapped(answer, exact):
        return "dk and dv look swapped"
    for name, found in answer.quantities().items():
        if name in too_large and not found.any():
            return f"{name} is 0 everywhere: it was not written"
        if name in too_large and oracle.relative_error(2 * found, exact.quantities()[name]) < _SIMILAR:
            return f"{name} is half of the exact value: it may be written instead of added"
    return ""


def find_cause_in_heads(answer: Answer, case: Case, x: Inputs, too_large: Container[str]) -> str:
    """Return whether query head h seems to read K/V head h % Hkv, as if K and V were tiled over heads; else ""."""
    heads, kv_heads = x.q.shape[2], x.k.shape[2]
    if "lse" not in too_large or kv_heads in (1, heads):
        return ""
    order = torch.arange(heads).view(-1, kv_heads).T.flatten()  # heads with equal remainders are a group
    sinks = None if x.sinks is None else x.sinks[order]
    grouped, _ = expected(case, replace(x, q=x.q[:, :, order], dout=x.dout[:, :, order], sinks=sinks))
    if oracle.relative_error(answer.lse, grouped.lse[:, order.argsort()]) < _SIMILAR:
        group = heads // kv_heads
        return f"query head h looks as if it read K/V head h % {kv_heads}; it must read h // {group}"
    return ""


_SIMILAR = 0.02  # relative difference up to which numbers look alike


def _are_swapped(answer: Answer, exact: Answer) -> bool:
    """Return whether dk looks like the exact dv, and dv like the exact dk."""
    pairs = ((answer.dk, exact.dv), (answer.dv, exact.dk))
    return all(oracle.relative_error(found, other) < _SIMILAR for found, other in pairs)


def _find_lse_cause(lse: Tensor, exact: Tensor) -> str:
    """Return whether the LSE looks like a logarithm in base 2, or like the exact one plus a constant; else ""."""
    finite = exact.isfinite() & lse.isfinite()
    found, expected = lse[finite].double(), exact[finite].double()
    if len(found) < 2:
        return ""
    difference = found - expected
    offset = float(difference.mean())
    near = _SIMILAR * float(difference.abs().max())
    if float((difference - offset).abs().max()) < near:
        counted = round(math.exp(min(offset, 8.0)))
        repeated = counted > 1 and abs(offset - math.log(counted)) < near
        hint = f", as if each key were counted {counted} times" if repeated else ""
        return f"lse is off by the same number in every row: {offset:.2g}{hint}"
    if float((found - expected / math.log(2)).abs().max()) < near:
        return "lse looks like base 2; it must be the natural logarithm"
    return ""


def find_masked_error(answer: Answer, exact: Answer) -> str:
    """Return what is wrong in fully masked rows and in keys that no row sees, which must be exactly 0."""
    masked = exact.lse.transpose(1, 2) == float("-inf")
    unseen = (exact.dv == 0).all(-1) & (exact.dk == 0).all(-1)
    wrong = {
        "out of a fully masked row is not 0": answer.out[masked],
        "LSE of a fully masked row is not -inf": answer.lse.transpose(1, 2)[masked] != float("-inf"),
        "dq of a fully masked row is not 0": answer.dq[masked],
        "dv of a key that no row sees is not 0": answer.dv[unseen],
    }
    return next((text for text, elements in wrong.items() if bool(elements.any())), "")
