"""Compute the attention of a row in float64, from the definition of a mask's regions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from burst_portable.bench.task import SEED, Task
from burst_portable.kernels.dropout import weight_factors
from burst_portable.planning.call import Dropout

Results = tuple[Tensor, Tensor, Tensor, Tensor]
"""(out, dq, dk, dv), each [1, S, H, D]."""
NAMES = ("out", "dq", "dk", "dv")
_CHUNK = 256  # queries of the oracle at once


@dataclass(frozen=True)
class Expected:
    """The right results of the query heads of the last K/V head, over all tokens.

    A query that sees one key has the weight 1, whatever its score. The terms of its gradient cancel: dq is 0, and it
    adds 0 to dk. Any implementation rounds these terms, so the errors of a result that is 0 are relative to them.

    Attributes:
        results: out, dq, dk and dv.
        terms: Sizes of the terms that cancel, [1, S, H, 1], of dq and of dk by name.
    """

    results: Results
    terms: dict[str, Tensor]


def oracle(task: Task, scale: float) -> Expected:
    """Compute the query heads of the last K/V head. Memory grows with the length, not with its square."""
    q, k, v, dout = task.tensors
    group = q.shape[2] // k.shape[2]
    q, dout = (x[0, :, -group:].transpose(0, 1).double() for x in (q, dout))
    k, v = (x[0, :, -1].double() for x in (k, v))
    out, dq, dk, dv = (torch.zeros_like(x) for x in (dout, q, k, v))
    dq_terms, dk_terms = (torch.zeros_like(x[..., :1]) for x in (q, k))
    q_norm, k_norm, v_norm, dout_norm = (x.norm(dim=-1, keepdim=True) for x in (q, k, v, dout))
    keys = torch.arange(k.shape[0], device=k.device)
    for start in range(0, len(keys), _CHUNK):
        rows = slice(start, min(start + _CHUNK, len(keys)))
        seen = _visible(task, rows, keys)
        weights = (q[:, rows] @ k.T * scale).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
        factors: Tensor | float = 1.0
        if task.dropout:
            dropout = Dropout(task.dropout, first_head=task.tensors[0].shape[2] - group, seed=SEED)
            factors = weight_factors(dropout, keys[rows], keys, 1, group)[0]
        out[:, rows] = (weights * factors) @ v
        dv += torch.einsum("hqk,hqd->kd", weights * factors, dout[:, rows])
        delta = (dout[:, rows] * out[:, rows]).sum(-1, keepdim=True)
        only = seen.sum(-1, keepdim=True) == 1
        dscores = (weights * (dout[:, rows] @ v.T * factors - delta) * scale).masked_fill(only, 0.0)
        dq[:, rows] = dscores @ k
        dk += torch.einsum("hqk,hqd->kd", dscores, q[:, rows])
        if only.any():
            cancelled = weights * factors * only * abs(scale) * (dout_norm[:, rows] @ v_norm.T)
            dq_terms[:, rows] = cancelled @ k_norm
            dk_terms += torch.einsum("hqk,hqd->kd", cancelled, q_norm[:, rows])
    dq_terms, dk_terms = _bshd(dq_terms), _bshd(dk_terms)
    return Expected((_bshd(out), _bshd(dq), _bshd(dk), _bshd(dv)), {"dq": dq_terms, "dk": dk_terms})


def _visible(task: Task, rows: slice, keys: Tensor) -> Tensor:
    """Return which keys the queries of some rows see, [rows, S]."""
    queries = keys[rows].unsqueeze(1)
    seen = torch.zeros(queries.shape[0], len(keys), dtype=torch.bool, device=keys.device)
    for r in task.mask.regions_of_rows(rows.start, rows.stop):
        box = (queries >= r.q_start) & (queries < r.q_stop) & (keys >= r.k_start) & (keys < r.k_stop)
        seen |= box & (queries - keys >= r.lo) & (queries - keys <= r.hi)
    return seen


def _bshd(x: Tensor) -> Tensor:
    """Return [H, S, D], or [S, D] of one head, as [1, S, H, D]."""
    return x.transpose(0, 1).unsqueeze(0) if x.dim() == 3 else x[None, :, None]
