"""DISTFLASHATTN (arXiv 2310.03294): under a causal mask over contiguous shards, early ranks help late ones.

::

    step t = 1 .. W/2, rank p, its partner r = (p - t) mod W
        r < p    out, lse = merge((out, lse), attend(q, k and v of r))      runtime/executor.py, forward_rows
        r > p    p has no keys of r to see: it is a helper of r
                 send attend(q of r, k, v) to r, which merges it in step t + 1                  _Partials.end

                      W = 5, causal: who computes the row of queries with the column of keys, and when
             kv0  1   2   3   4
        q0    0                          step 0: each rank its local block, half of it visible
         1   1a  0                       1a: at step 1, by the rank of the queries
         2   2a  1a  0
         3   2h  2a  1a  0               2h: at step 2, by the rank of the keys, a helper
         4   1h  2h  2a  1a  0

Distances t and W - t share a step, so all ranks compute for (W - 1)/2 steps if W is odd: none is idle. If W is even,
half of the ranks have nothing to do in the last step, 1/(W + 1) of the pass by mask area. Each block comes from its
owner one step before its use. Backward, helpers are sent Q, dO, LSE and delta, and return dQ; all other ranks are sent
K and V, and return dK and dV.

Under any mask, a rank helps another one if it sees none of its keys. If all pairs of ranks see each other (full masks,
or causal ones over a zigzag layout), no rank helps, and the plan is that of `ring` with `transfer="direct"`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan, make_pass_plan
from burst_portable.planning.tiles import BlockPairs
from burst_portable.strategies.base import Strategy, make_route, should_round_gradients
from burst_portable.strategies.options import GRADIENT_COMM_DTYPE, PREFETCH_STEPS, GradientCommDtype, option


@dataclass(frozen=True)
class DistFlashStrategy(Strategy):
    """Send K and V to late ranks, and queries of late ranks to early ranks."""

    name = "distflash"
    title = "K and V are sent to late ranks; early ranks get queries of late ranks and return results"

    prefetch_steps: int = option(PREFETCH_STEPS)
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        route = make_route(call.ranks, "direct", self.prefetch_steps)
        helpers = EarlyRanks(call.ranks)
        rounds_gradients = should_round_gradients(call, self.gradient_comm_dtype)
        return Plan(
            call,
            self.name,
            forward=make_pass_plan(call, "kv", route, helpers=helpers),
            backward=make_pass_plan(call, "kv", route, route, rounds_gradients=rounds_gradients, helpers=helpers),
        )

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(prefetch_steps=64)


@dataclass(frozen=True)
class EarlyRanks:
    """Let a rank compute the queries of another one whose keys it does not see, if that is the earlier step."""

    ranks: int

    def helps(self, pairs: BlockPairs, q_owner: int, k_owner: int) -> bool:
        distance = (q_owner - k_owner) % self.ranks
        return 2 * distance > self.ranks and not pairs.sees(k_owner, q_owner)
