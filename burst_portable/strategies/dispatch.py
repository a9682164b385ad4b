"""Group cast and group reduce (MagiAttention, github.com/SandAI-org/MagiAttention): few launches over needed rows only.

::

    forward                                            backward
    group_cast(k, v)                                   group_cast(k, v)
    out, lse = attend(q, k, v)                         dq, dk, dv = attend_backward(q, k, v, dout, lse), upper rows
    for each stage:                                    for each stage:
        K, V = rows that came from some owners             dq, dK, dV += attend_backward(q, K, V, dout, lse)
        out, lse = merge((out, lse), attend(q, K, V))      dk, dv += group_reduce(dK, dV)
                                                       dq, dk, dv += attend_backward(...), remaining rows

A group cast sends each rank the rows of K and V that its queries see. There is one message per pair of ranks, with
several ranges of rows if the owner holds them in separate places. A group reduce sends their gradients back, and the
owner adds them. The rows of a stage arrive while the stage before it computes.

MagiAttention has three parts. Each is a separate part here too:

- Which rank has which tokens: the layout "dispatched" deals equal chunks so that all ranks have about as many visible
  pairs. `shard` and `attention` take it by name. This strategy works with any layout, but does not balance work.
- Which rows are sent: `planning/plans.py` does this for every route that sends blocks from their owners.
- In how many launches they are computed with: this strategy. It is `ring` with `transfer="direct"` and the blocks of a
  stage in one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from burst_portable.planning.call import AttentionCall
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import OFFERED_AT_ONCE, Machine, Strategy, kv_plan, make_route
from burst_portable.strategies.options import GRADIENT_COMM_DTYPE, GradientCommDtype, Option, option


@dataclass(frozen=True)
class DispatchStrategy(Strategy):
    """Send each rank the rows of K and V that it needs, in a few stages.

    Attributes:
        stages: Number of launches with rows of other ranks. With one, a rank holds all rows that it needs at once, and
            only the local block hides the messages; each further one costs a launch and a merge.
    """

    name = "dispatch"
    title = (
        "each rank gets the rows of K and V that it needs, in a few stages; dK and dV of these rows return to owners"
    )
    offered = OFFERED_AT_ONCE

    stages: int = option(Option(2, "a number of stages", help="Launches with rows of other ranks."))
    gradient_comm_dtype: GradientCommDtype = option(GRADIENT_COMM_DTYPE)

    def plan(self, call: AttentionCall) -> Plan:
        blocks = max(1, -(-(call.ranks - 1) // self.stages))
        make = partial(make_route, call.ranks, "direct", 1, blocks)
        return kv_plan(call, self.name, make, "split", self.gradient_comm_dtype)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        if machine.can_hold_all(call):
            yield cls()

    @classmethod
    def trials(cls) -> Iterator[Strategy]:
        yield cls()
        yield cls(stages=1)
