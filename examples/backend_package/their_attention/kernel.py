"""Define a simple kernel for local attention. A tile is a box of scores and a band across it."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support
from burst_portable.numerics import State
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, Tiles


class TheirKernel(Kernel):
    """See `burst_portable.kernels.base.Kernel` for the duty of each method."""

    name = "their_boxes"

    def supports(self, call: AttentionCall) -> Support:
        """Return whether a call is supported. A call that is declined needs a reason."""
        if call.softcap is not None:
            return Support(False, "it has no softcap")
        if call.head_dim > 256:
            return Support(False, f"heads of size {call.head_dim} are larger than 256")
        return Support(True)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        *,
        state: State | None = None,
        yields_to_comm: bool = False,
    ) -> State:
        """Compute each tile and merge it into the running state. Rows without visible keys get 0 and -inf."""
        state = numerics.empty_state(q, v.shape[-1]) if state is None else state
        for tile in tiles:
            rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
            scores = _scores(q[:, rows], k[:, columns], tile, call)
            lse = torch.logsumexp(scores, -1)
            p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1))
            out = torch.einsum("bhij,bjhd->bihd", p, _shared(v[:, columns], q))
            numerics.merge_into((state[0][:, rows], state[1][:, :, rows]), out, lse)
        return state

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        """Recompute the weights from the global LSE, so that the gradients of tiles add up."""
        dout, q, k, v, lse, out, delta = x
        if delta is None:
            assert out is not None, "exactly one of delta and out"
            delta = numerics.row_delta(dout, out)
        dq, dk, dv = into
        groups = k.shape[2]
        for tile in tiles:
            rows, columns = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
            scores = _scores(q[:, rows], k[:, columns], tile, call)
            row_lse = lse[:, :, rows].unsqueeze(-1)
            p = torch.exp(scores - row_lse.masked_fill(row_lse == -torch.inf, 0.0))
            do = _wide(dout[:, rows])
            dp = torch.einsum("bihd,bjhd->bhij", do, _shared(v[:, columns], q))
            ds = p * (dp - delta[:, :, rows].unsqueeze(-1)) * call.scale
            dq[:, rows] += torch.einsum("bhij,bjhd->bihd", ds, _shared(k[:, columns], q))
            dk[:, columns] += _summed(torch.einsum("bhij,bihd->bjhd", ds, _wide(q[:, rows])), groups)
            dv[:, columns] += _summed(torch.einsum("bhij,bihd->bjhd", p, do), groups)


def _scores(q: Tensor, k: Tensor, tile: Tile, call: AttentionCall) -> Tensor:
    """Return scores of shape [B, H, rows, columns], -inf outside the band. Indices are those of the blocks."""
    scores = torch.einsum("bihd,bjhd->bhij", _wide(q), _shared(k, q)) * call.scale
    row = torch.arange(tile.q_start, tile.q_stop).unsqueeze(1)
    distance = row - torch.arange(tile.k_start, tile.k_stop)
    return scores.masked_fill((distance < tile.lo) | (distance > tile.hi), -torch.inf)


def _wide(x: Tensor) -> Tensor:
    """Convert to a wider dtype, so that only the results are rounded."""
    return x.to(numerics.running_dtype(x.dtype))


def _shared(x: Tensor, q: Tensor) -> Tensor:
    """Repeat K or V for all query heads. A production kernel must not repeat them."""
    return _wide(x).repeat_interleave(q.shape[2] // x.shape[2], dim=2)


def _summed(x: Tensor, groups: int) -> Tensor:
    """Add up the gradients of heads that share a K/V head."""
    batch, columns, heads, size = x.shape
    return x.reshape(batch, columns, groups, heads // groups, size).sum(3)
