"""Execute the steps of one rank, for all strategies but `ring_self_attention` (`score_rows`).

`head_groups` runs them for one group of heads after the other. `head_parallel` exchanges tokens for heads before and
after them.

One pass, as `forward_rows` and `backward_rows` run it::

    for step in steps:          planning/schedule.py, Step: what this rank does at each step
        Blocks.begin            wait for the blocks of this step; send blocks; post receives for later steps
        LocalResult.attend      forward: compute with the local and the received blocks, and merge the part
        HelperResults.end       forward: merge the parts of helpers; send parts for remote queries
        kernel.attend_backward  backward: add the gradients of both sides to their sums
        BlockGradients.end      backward: add received gradients; send the sums of remote blocks
        Blocks.end              release blocks that no later step uses

`planning.messages.StepMessages` has the sizes of the messages of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.kernels.base import BackwardInputs, Gradients, as_kernels_take
from burst_portable.numerics import State, accumulation_dtype, as_dtype
from burst_portable.planning.messages import StepMessages
from burst_portable.planning.schedule import Step
from burst_portable.runtime.block_gradients import BlockGradients
from burst_portable.runtime.blocks import Blocks
from burst_portable.runtime.helper_results import HelperResults
from burst_portable.runtime.local_result import LocalResult
from burst_portable.runtime.message_views import Views
from burst_portable.runtime.prepared_call import Executor, PreparedCall


class StepExecutor(Executor):
    """Run passes that send blocks of the sequence and do not divide heads."""

    def forward(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, keep: bool
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
        out, lse = forward_rows(prepared, q, k, v, sinks)
        if out.dtype is not q.dtype:
            out = out.to(q.dtype)
        if keep and out._is_view():  # torch raises an error if a view is changed in place
            out = out.detach()
        if keep and lse._is_view():
            lse = lse.detach()
        return out, lse if prepared.with_lse else None, (q, k, v, out, lse)

    def backward(
        self, prepared: PreparedCall, saved: Sequence[Tensor], sinks: Tensor | None, dout: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        q, k, v, out, lse = saved
        # Other ranks wait for this rank's part of the pass, even if its result was not used.
        if dout is None:
            dout = torch.zeros_like(out)
        elif type(dout) is not Tensor or dout.stride(-1) != 1 or dout.is_neg():
            dout = as_kernels_take(dout)
        delta = None if sinks is None else prepared.kernel.row_delta(dout, out)
        dq, dk, dv = backward_rows(prepared, BackwardInputs(dout, q, k, v, lse, out, delta))
        dsinks = None if sinks is None or delta is None else numerics.sinks_gradient(sinks, lse, delta)
        return as_dtype(dq, q.dtype), as_dtype(dk, q.dtype), as_dtype(dv, q.dtype), dsinks


def forward_rows(prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> State:
    """Return (out, LSE) of the local rows: out in the dtype of q or wider, LSE in the accumulation dtype.

    `k` and `v` are local. The plan brings those of other ranks.
    """
    compute = prepared.forward.single
    if compute is not None and sinks is None:
        with prepared.observer.computes(compute, q, backward=False):
            state = prepared.kernel.forward_single_call(
                q, k, v, compute.tiles, prepared.kernel_call, yields_to_comm=prepared.yields_to_comm
            )
    else:
        # Sinks are merged before out is rounded.
        steps = ForwardSteps(prepared, q, k, v, may_round=sinks is None)
        for step, step_messages in prepared.forward.messages.steps:
            steps.run(step, step_messages)
        state = steps.finish()
    if sinks is not None:
        numerics.add_sinks(state, sinks)
    out, lse = state
    return out, lse if lse.dtype is torch.float32 else as_dtype(lse, accumulation_dtype(q.dtype))


def backward_rows(prepared: PreparedCall, x: BackwardInputs) -> Gradients:
    """Return (dq, dk, dv) of the local rows, in the dtype of q or the accumulation dtype.

    `x` has `out`, and `delta` if it has been computed already.
    """
    compute = prepared.backward.single
    if compute is not None:
        with prepared.observer.computes(compute, x.q, backward=True):
            x = x if x.delta is None else x._replace(delta=None)
            return prepared.kernel.backward_single_call(x, compute.tiles, prepared.kernel_call)
    if prepared.backward_takes_out:
        x = x._replace(delta=None)
    else:
        assert x.out is not None, "forward saved it"
        delta = prepared.kernel.row_delta(x.dout, x.out) if x.delta is None else x.delta
        x = x._replace(out=None, delta=delta)
    steps = BackwardSteps(prepared, x)
    for step, step_messages in prepared.backward.messages.steps:
        steps.run(step, step_messages)
    return steps.finish()


class ForwardSteps:
    """The steps of one rank in a forward pass, for one group of heads: round `round_index` of `Plan.rounds`.

    The result is (out, LSE) of this rank's queries. `may_round`: see `LocalResult`.
    """

    def __init__(
        self, prepared: PreparedCall, q: Tensor, k: Tensor, v: Tensor, *, may_round: bool, round_index: int = 0
    ) -> None:
        self._prepared, self._q, self._k, self._v = prepared, q, k, v
        self._local_result = LocalResult(prepared, q, v.shape[-1], may_round=may_round)
        messages = prepared.forward.messages
        self._blocks = Blocks(prepared, messages, {"kv": (k, v), "q": (q,)}, q.dtype, round_index, backward=False)
        self._helper_results = HelperResults(self._blocks)

    def run(self, step: Step, messages: StepMessages) -> None:
        """Run the next step."""
        prepared, blocks = self._prepared, self._blocks
        blocks.begin(step, messages)
        if compute := step.compute:
            block = blocks.use(step, messages)
            yields_to_comm = prepared.yields_to_comm and blocks.is_communicating(step.index)
            with prepared.observer.computes(compute, self._q, backward=False):
                if messages.side == "q":  # this rank helps: remote queries with the local keys
                    (q,) = block
                    part = prepared.kernel.attend(
                        q, self._k, self._v, compute.tiles, prepared.kernel_call, yields_to_comm=yields_to_comm
                    )
                    self._helper_results.keep(step, part)
                else:
                    k, v = block
                    self._local_result.attend(k, v, compute.tiles, yields_to_comm=yields_to_comm)
        self._helper_results.end(step, messages, self._local_result)
        blocks.end(step)

    def finish(self) -> State:
        """Return (out, LSE) after all steps."""
        self._blocks.finish()
        self._helper_results.finish(self._local_result)
        return self._local_result.finish()


class BackwardSteps:
    """The steps of one rank in a backward pass, for one group of heads: round `round_index` of `Plan.rounds`.

    The result is (dq, dk, dv) of this rank's shard, in the accumulation dtype. If queries are sent, `x` has delta.
    """

    def __init__(self, prepared: PreparedCall, x: BackwardInputs, round_index: int = 0) -> None:
        self._prepared, self._x = prepared, x
        dq, dk, dv = (torch.zeros(t.shape, dtype=accumulation_dtype(t.dtype), device=t.device) for t in (x.q, x.k, x.v))
        self._results: Gradients = dq, dk, dv
        sides = prepared.backward.plan.sides
        local = {side: (x.k, x.v) if side == "kv" else _query_block(x) for side in sides}
        self._blocks = Blocks(prepared, prepared.backward.messages, local, x.q.dtype, round_index, backward=True)
        self._gradients = BlockGradients(self._blocks, {"kv": (dk, dv), "q": (dq,)})

    def run(self, step: Step, messages: StepMessages) -> None:
        """Run the next step."""
        prepared, x, blocks, gradients = self._prepared, self._x, self._blocks, self._gradients
        dq, dk, dv = self._results
        blocks.begin(step, messages)
        if compute := step.compute:
            block, sums = blocks.use(step, messages), gradients.accumulators(step, messages)
            if (messages.side or blocks.side) == "kv":
                (k, v), (dk_sum, dv_sum) = block, sums
                inputs, into = x._replace(k=k, v=v), (dq, dk_sum, dv_sum)
            else:
                (q, dout, lse, delta), (dq_sum,) = block, sums
                inputs, into = x._replace(dout=dout, q=q, lse=lse, delta=delta), (dq_sum, dk, dv)
            with prepared.observer.computes(compute, x.k, backward=True):
                prepared.kernel.attend_backward(inputs, compute.tiles, prepared.kernel_call, into=into)
        gradients.end(step, messages)
        blocks.end(step)

    def finish(self) -> Gradients:
        """Return (dq, dk, dv) after all steps."""
        self._gradients.finish()
        self._blocks.finish()
        return self._results


def _query_block(x: BackwardInputs) -> Views:
    """Return the tensors of a block of queries in the backward pass."""
    assert x.delta is not None, "queries are sent with delta instead of out"
    return x.q, x.dout, x.lse, x.delta
