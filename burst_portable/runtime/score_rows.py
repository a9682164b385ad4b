"""Execute passes that store whole rows of scores: K and V are sent one after the other (`ring_self_attention`).

The steps of the plan run once with K and once with V. The scores of a rank's queries with all keys are stored between::

    forward                                          backward
    for each block of K: scores = q K^T              for each block of V: dweights = dout V^T, dV += weights^T dout
    weights = softmax(scores)                        dscores = weights (dweights - delta)
    for each block of V: out += weights V            for each block of K: dq += dscores K,     dK += dscores^T q
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.kernels.base import as_kernels_take
from burst_portable.kernels.score_kernel import ScoreRowKernel, visible_part, without_hidden
from burst_portable.numerics import accumulation_dtype, anchored, as_dtype
from burst_portable.planning.tiles import Tiles
from burst_portable.runtime.block_gradients import BlockGradients
from burst_portable.runtime.blocks import Blocks
from burst_portable.runtime.prepared_call import Executor, PreparedCall

_K, _V = 0, 1  # index of the messages in `PreparedPass.separate`


class ScoreRowExecutor(Executor):
    """Run passes in which K and V are sent one after the other."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        """See `Executor`. Saves the weights too, which are as large as the scores."""
        kernel, call = _kernel(prepared), prepared.kernel_call
        batch, rows, heads, _ = q.shape
        wide, keys = accumulation_dtype(q.dtype), call.k_layout.length
        weights = torch.full((batch, heads, rows, keys), -torch.inf, dtype=wide, device=q.device)
        out = torch.zeros((batch, heads, rows, v.shape[-1]), dtype=wide, device=q.device)

        def with_keys(block: Tensor, columns: slice, tiles: Tiles) -> None:
            weights[..., columns] = kernel.scores(q, block, tiles, call)

        def with_values(block: Tensor, columns: slice, tiles: Tiles) -> None:
            part, values = visible_part(tiles), without_hidden(block, tiles, 1, is_columns=True)
            out[:, :, part[0]] += kernel.weighted(
                kernel.dropped(weights[..., columns], tiles, call)[..., *part], values
            )

        _circulate(prepared, _K, k, q, with_keys)
        lse = torch.logsumexp(weights, -1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.to(wide).view(1, -1, 1).expand_as(lse))
        weights.sub_(anchored(lse).unsqueeze(-1)).exp_()
        _circulate(prepared, _V, v, q, with_values)
        rounded = out.transpose(1, 2).to(q.dtype, memory_format=torch.contiguous_format)
        return rounded, lse if prepared.with_lse else None, (q, k, v, weights, rounded, lse)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """See `Executor`."""
        q, k, v, weights, out, lse = saved
        kernel, call, wide = _kernel(prepared), prepared.kernel_call, weights.dtype
        dout = torch.zeros_like(out) if dout is None else as_kernels_take(dout)
        delta = numerics.row_delta(dout, out)
        douts, queries = (x.to(wide).transpose(1, 2) for x in (dout, q))  # [B, H, rows, D]
        scores = torch.zeros_like(weights)  # their gradients
        dq = torch.zeros_like(queries)
        dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))

        def with_values(block: Tensor, columns: slice, tiles: Tiles, dv_sum: Tensor) -> None:
            part, values = visible_part(tiles), without_hidden(block, tiles, 1, is_columns=True)
            rows, gradients = without_hidden(douts, tiles, 2, is_columns=False), scores[..., columns]
            gradients[..., *part] = kernel.product(rows, values)
            if call.dropout is not None:
                gradients.copy_(kernel.dropped(gradients, tiles, call))
            dropped = kernel.dropped(weights[..., columns], tiles, call)[..., *part]
            dv_sum[:, part[1]] += kernel.summed(dropped, rows, v.shape[2])

        def with_keys(block: Tensor, columns: slice, tiles: Tiles, dk_sum: Tensor) -> None:
            part, keys = visible_part(tiles), without_hidden(block, tiles, 1, is_columns=True)
            gradients = scores[..., columns][..., *part]
            dq[:, :, part[0]] += kernel.weighted(gradients, keys)
            rows = without_hidden(queries, tiles, 2, is_columns=False)
            dk_sum[:, part[1]] += kernel.summed(gradients, rows, k.shape[2])

        _circulate_back(prepared, _V, v, dv, q, with_values)
        scores.sub_(delta.unsqueeze(-1)).mul_(weights).mul_(call.scale)
        if call.softcap is not None:  # the capped score of a weight is log(weight) + LSE
            capped = (weights.log() + lse.unsqueeze(-1)) / call.softcap
            scores.mul_(torch.where(weights > 0, 1.0 - capped.square(), 0.0))
        _circulate_back(prepared, _K, k, dk, q, with_keys)
        dsinks = None if sinks is None else numerics.sinks_gradient(sinks, lse, delta)
        dq = dq.transpose(1, 2).contiguous()
        return as_dtype(dq, q.dtype), as_dtype(dk, q.dtype), as_dtype(dv, q.dtype), dsinks


def _kernel(prepared: PreparedCall) -> ScoreRowKernel:
    kernel = prepared.kernel
    assert isinstance(kernel, ScoreRowKernel), "`prepare.kernel_for_plan` returns it for such plans"
    return kernel


def _columns(prepared: PreparedCall) -> list[int]:
    """Return the first column of each rank's keys in a row of scores, and the number of all columns."""
    layout = prepared.kernel_call.k_layout
    return list(accumulate((layout.count(rank) for rank in range(layout.ranks)), initial=0))


def _circulate(
    prepared: PreparedCall, tensor: int, local: Tensor, q: Tensor, use: Callable[[Tensor, slice, Tiles], None]
) -> None:
    """Run the steps of the forward pass with K or V. `use` gets each block, its columns and its tiles."""
    starts, messages = _columns(prepared), prepared.forward.separate[tensor]
    blocks = Blocks(prepared, messages, {"kv": (local,)}, q.dtype, tensor, backward=False)
    for step, step_messages in messages.steps:
        blocks.begin(step, step_messages)
        if compute := step.compute:
            (block,) = blocks.use(step, step_messages)
            (owner,) = compute.k_owners
            with prepared.observer.computes(compute, q, backward=False):
                use(block, slice(starts[owner], starts[owner + 1]), compute.tiles)
        blocks.end(step)
    blocks.finish()


def _circulate_back(
    prepared: PreparedCall,
    tensor: int,
    local: Tensor,
    gradient: Tensor,
    q: Tensor,
    use: Callable[[Tensor, slice, Tiles, Tensor], None],
) -> None:
    """Run the steps of the backward pass with K or V. `use` also gets the tensor to which it adds gradients."""
    starts, messages = _columns(prepared), prepared.backward.separate[tensor]
    blocks = Blocks(prepared, messages, {"kv": (local,)}, q.dtype, tensor, backward=True)
    gradients = BlockGradients(blocks, {"kv": (gradient,)})
    for step, step_messages in messages.steps:
        blocks.begin(step, step_messages)
        if compute := step.compute:
            (block,), (total,) = blocks.use(step, step_messages), gradients.accumulators(step, step_messages)
            (owner,) = compute.k_owners
            with prepared.observer.computes(compute, q, backward=True):
                use(block, slice(starts[owner], starts[owner + 1]), compute.tiles, total)
        gradients.end(step, step_messages)
        blocks.end(step)
    gradients.finish()
    blocks.finish()
