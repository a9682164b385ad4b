"""Ring Self-Attention (Li et al. 2021, arXiv 2105.13120): two rings and whole rows of scores. For comparison only.

::

    forward                                          backward
    for step in range(ranks):                        for step in range(ranks):
        send and receive a block of K                    send and receive a block of V
        scores[block] = q K^T                            dweights[block] = dout V^T; dV of block += weights^T dout
    weights = softmax(scores)                        dscores = weights (dweights - delta)
    for step in range(ranks):                        for step in range(ranks):
        send and receive a block of V                    send and receive a block of K
        out += weights[block] V                          dq += dscores[block] K; dK of block += dscores^T q

`runtime/score_rows.py` runs these loops. A rank stores [B, H, tokens / ranks, tokens] scores: in the forward pass, from
there to the backward pass, and twice in the backward pass. This memory grows with the square of the sequence, which is
why later methods merge partial results instead. Bytes on the wire are those of `ring`, in twice as many messages.

As in the original: both rings, the softmax over whole rows, the stored weights, and the order of the rings.
Different from the original:

- dK and dV follow their blocks around the ring. There, every rank has those of all tokens, which are all-reduced.
- A block is sent only to ranks that see it under the mask. There, attention is full.
- Query heads may share K/V heads. There are no grouped heads, sinks, windows or caps of scores in the original.
- Scores, weights and products have the accumulation dtype, float32 for 16-bit inputs. So on tensor cores, its times
  are longer than those of 16-bit products would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from burst_portable.errors import UnsupportedError
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.memory import score_bytes
from burst_portable.planning.plans import Plan
from burst_portable.planning.routes import RingRoute
from burst_portable.strategies.base import Machine, Strategy, ring_plan
from burst_portable.strategies.options import Option, option


@dataclass(frozen=True)
class RingSelfAttentionStrategy(Strategy):
    """Send K around the ranks and store rows of scores, then send V around.

    Attributes:
        max_score_gib: Largest rows of scores of a rank, in GiB. The backward pass stores twice as much. Larger calls
            are not planned.
    """

    name = "ring_self_attention"
    title = "K circulates, whole rows of scores are stored, then V circulates: the historic baseline"
    offered = "never: ring sends the same bytes and stores no scores"

    max_score_gib: int = option(Option(16, "a size in GiB", help="Largest rows of scores of a rank, in GiB."))

    def check(self, call: AttentionCall) -> None:
        stored = max(score_bytes(call, "forward", rank) for rank in range(call.ranks)) / 2**30
        if stored > self.max_score_gib:
            raise UnsupportedError(
                "the rows of scores of ring_self_attention are too large",
                got=f"{stored:.1f} GiB per rank: batch {call.batch}, {call.heads} heads, "
                f"{call.layout.length} tokens on {call.ranks} ranks",
                allowed=f"max_score_gib={self.max_score_gib}",
                next_step="use the strategy 'ring', which stores no scores, or raise max_score_gib",
            )

    def plan(self, call: AttentionCall) -> Plan:
        self.check(call)
        return replace(ring_plan(call, self.name, side="kv", route=RingRoute(call.ranks)), score_rows=True)

    @classmethod
    def candidates(cls, call: AttentionCall, machine: Machine) -> Iterator[Strategy]:
        """Yield nothing: `ring` sends the same bytes and stores no scores."""
        yield from ()
