"""Dense attention in float64, written from the definition. It shares no code with what it judges.

Nothing here knows tiles, layouts, merging or tricks: positions are listed, the mask is a matrix, gradients come
from autograd. It needs memory in proportion to the square of the length, so it is for short sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from burst_portable.mask import Mask


@dataclass(frozen=True)
class Answer:
    """Everything that an attention gives."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None

    def quantities(self) -> dict[str, Tensor]:
        """The quantities by name, without those that are None."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def differs(self, other: Answer) -> str:
        """The first quantity that has other bits in the other answer; "" if none has."""
        theirs = other.quantities()
        return next((name for name, value in self.quantities().items() if not torch.equal(value, theirs[name])), "")


def dense_mask(mask: Mask, q_length: int, k_length: int | None = None) -> Tensor:
    """``[Sq, Sk]`` bool, straight from the definition of a region; how often a pair is seen must be 0 or 1."""
    k_length = q_length if k_length is None else k_length
    q, k = torch.arange(q_length).unsqueeze(1), torch.arange(k_length)
    seen = torch.zeros(q_length, k_length, dtype=torch.int64)
    for r in mask.regions:
        box = (q >= r.q_start) & (q < r.q_stop) & (k >= r.k_start) & (k < r.k_stop)
        seen += (box & (q - k >= r.lo) & (q - k <= r.hi)).long()
    if int(seen.max()) > 1:
        raise AssertionError("the oracle met a mask that counts a pair twice")
    return seen.bool()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    mask: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Answer:
    """Out, LSE and all gradients for an upstream gradient `dout`; `mask` is ``[Sq, Sk]`` bool.

    In a lower `dtype` it is *plain attention*: what its arithmetic loses there is what tolerances are multiples of.
    """
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    keys, values = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    columns = [scores]
    if sinks is not None:
        sinks = sinks.detach().to(dtype).requires_grad_()
        columns.append(sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1))
    every = torch.cat(columns, dim=-1)
    seen = (every > -torch.inf).any(-1, keepdim=True)
    p = torch.softmax(torch.where(seen, every, 0.0), dim=-1) * seen
    out = torch.einsum("bhij,bjhd->bihd", p[..., : k.shape[1]], values)
    out.backward(dout.to(dtype))
    lse = torch.logsumexp(every.detach().double(), dim=-1)
    dq, dk, dv = q.grad, k.grad, v.grad
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return Answer(out.detach(), lse, dq, dk, dv, None if sinks is None else sinks.grad)
