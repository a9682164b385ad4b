"""What a machine does, with which plans are priced: see `cost`. Bytes, seconds, GB/s of 1e9 bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import log

from burst_portable.plans import PassName

Curve = tuple[tuple[int, float], ...]
"""(bytes, GB/s) of messages back to back, smallest first; latencies are included."""


OUTER_GBPS = 50.0
"""Between nodes, unless something better is known: a network card of 400 Gb/s for each rank."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a machine does.

    Attributes:
        tflops, backward: matrix TFLOP/s per rank, forward and backward; 0 backward means the same.
        gbps: GB/s per rank in each direction, where there is no curve.
        hop_latency, launch_latency, backward_launch_latency: seconds; 0 backward means the same.
        link: the curve of messages between two ranks over the plain transport.
        direct: the curve of the backend's own transport, for messages that go straight to where they are used; empty
            if there is none.
        spread: the curve of messages to and from several ranks at once over the plain transport, by their total
            bytes.
        holds_up: (forward, backward) the share of a message's time by which it delays a kernel beside it: 0 if the
            message takes nothing that kernels need, 1 if they take turns. For the plain transport.
        holds_up_first: the same if its messages go first (`comm.base.Transport.goes_first`); None: no different.
        memory: GB/s at which blocks are packed, merged and added up outside of kernels; 0: that is not priced.
        backward_together: the share of the backward rate that remains if one launch takes several blocks.
        backward_in_turn: the share of the backward rate that remains if a pass has several launches.
        far: (rows, share): the share of either rate that remains if a pass has several launches and a rank holds at
            least this many rows, so that what each launch reads repeatedly no longer fits a cache.
        long: (rows, share): the share of the forward rate that remains if a rank holds at least this many keys.
        in_pieces: whether the kernel calls an operator on pieces and merges their results.
        merged_once: whether it merges each of them in one pass over memory.
        writes_gradients: whether it writes dK and dV in 16 bits, not added up in float32, where one launch makes them.
        faster_squares: whether rows of head shards are put in natural order where that makes one box or causal square.
        block: rows and columns that a kernel computes at once, including what a mask hides; 1: exact pairs count.
        source: where the numbers come from, in words after "rates": "of an H100", "measured on ...".
        node: ranks per node, where there are several nodes; 0: one node.
        outer_gbps: GB/s per rank in each direction between nodes: another link than the one inside.
        outer_source: "measured" where `outer_gbps` was measured, between nodes of `node` ranks; "given" where it was
            named beside numbers from elsewhere; empty where nobody said.
    """

    tflops: float
    gbps: float
    hop_latency: float = 20e-6
    launch_latency: float = 10e-6
    backward: float = 0.0
    backward_launch_latency: float = 0.0
    link: Curve = ()
    direct: Curve = ()
    spread: Curve = ()
    holds_up: tuple[float, float] = (0.0, 0.0)
    holds_up_first: tuple[float, float] | None = None
    memory: float = 0.0
    in_pieces: bool = False
    merged_once: bool = False
    writes_gradients: bool = False
    faster_squares: bool = False
    backward_together: float = 1.0
    backward_in_turn: float = 1.0
    far: tuple[int, float] = (0, 1.0)
    long: tuple[int, float] = (0, 1.0)
    block: int = 1
    source: str = ""
    node: int = 0
    outer_gbps: float = OUTER_GBPS
    outer_source: str = ""

    def with_nodes(self, node: int, outer_gbps: float | None = None) -> Rates:
        """The rates over nodes of `node` ranks (0: no others than before), with `outer_gbps` between them where given.

        `source` then says if what is between nodes was measured between nodes of another size.
        """
        node = node or self.node
        if outer_gbps is not None:
            return replace(self, node=node, outer_gbps=outer_gbps, outer_source="given")
        other = self.outer_source == "measured" and node != self.node
        source = f"{self.source}, between nodes of {self.node} and not {node}" if other else self.source
        return replace(self, node=node, source=source)

    @property
    def outer_origin(self) -> str:
        """In a word, where `outer_gbps` comes from: "measured", "given", "assumed"; empty where nobody said."""
        return self.outer_source or ("assumed" if self.outer_gbps == OUTER_GBPS else "")

    def between_nodes(self) -> str:
        """What is between nodes, and where that comes from: "assumed 50 GB/s between nodes of 8"."""
        return f"{self.outer_origin} {self.outer_gbps:.4g} GB/s between nodes of {self.node}".lstrip()

    def where_messages_go_first(self) -> Rates:
        """The rates over a transport whose messages go first."""
        return self if self.holds_up_first is None else replace(self, holds_up=self.holds_up_first)

    def apart(self, rank: int, other: int) -> bool:
        """Whether two ranks are on different nodes."""
        return self.node > 0 and rank // self.node != other // self.node

    def spreads(self, direct: bool) -> bool:
        """Whether messages from several ranks arrive at once, not one after the other."""
        return bool(self.spread) and not (direct and self.direct)

    def transfer(
        self, size: float, messages: int = 1, *, direct: bool = False, outer: bool = False, spread: bool = False
    ) -> float:
        """Seconds of some messages, `size` bytes in all, one after the other.

        direct: on the backend's own transport, if there is one; outer: between nodes; spread: at once with others.
        """
        curve = () if outer else (direct and self.direct) or (spread and self.spread) or self.link
        if not curve:
            gbps = self.outer_gbps if outer else self.gbps
            return self.hop_latency * min(messages, 2) + size / (gbps * 1e9)
        return max(self.hop_latency, size / (_at(curve, size / messages) * 1e9))

    def compute(self, flops: float, pass_name: PassName, blocks: int = 1, calls: int = 1) -> float:
        """Seconds of one launch: `blocks` of the travelling side, in `calls` calls of an operator."""
        if pass_name == "forward":
            return calls * self.launch_latency + flops / (self.tflops * 1e12)
        latency = self.backward_launch_latency or self.launch_latency
        rate = (self.backward or self.tflops) * (self.backward_together if blocks > 1 else 1.0)
        return calls * latency + flops / (rate * 1e12)

    def read_and_write(self, size: int) -> float:
        """Seconds to read and write `size` bytes of memory, in all."""
        return size / (self.memory * 1e9) if self.memory else 0.0


def _at(curve: Curve, size: float) -> float:
    """GB/s at a size in bytes: between two measured sizes, linear in the logarithm of the size."""
    (small, slow), *_ = curve
    if size <= small:
        return slow
    for (small, slow), (large, fast) in pairwise(curve):
        if size <= large:
            return slow + (fast - slow) * log(size / small) / log(large / small)
    return curve[-1][1]
