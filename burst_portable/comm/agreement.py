"""Do all ranks make the same call? Asked before the first hop of every pass, and answered on every rank.

Each rank states 16 bytes (a hash of everything that must be equal) and how many passes it has begun. Where those
differ, the facts themselves are exchanged, and every rank raises naming both sides; no block is sent. Nothing here
depends on what a rank has cached: all ranks ask in every pass.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from burst_portable.comm.base import Transport
from burst_portable.errors import BurstError, CommunicationError, MismatchError, explain

_FACTS_SIZE = 4096
_SHOWN = 300
REFUSED = "refused"
"""The fact of a rank that refused its own call: others must not wait for it."""


class Statement(NamedTuple):
    """What one rank says of its call."""

    digest: bytes
    facts: str

    def of_pass(self, name: str) -> Statement:
        """The same call, in one of its passes."""
        return state({**json.loads(self.facts), "pass": name}, self.digest)


def state(facts: Mapping[str, str], more: bytes = b"") -> Statement:
    """A statement of facts; `more` is hashed with them and not shown."""
    text = json.dumps(facts, sort_keys=True)
    return Statement(hashlib.blake2b(text.encode() + more, digest_size=16).digest(), text)


def agree(transport: Transport, mine: Statement, deadline: float | None = None) -> None:
    """Return when all ranks of the transport have stated the same; every rank must ask.

    Raises `MismatchError` on every rank where they differ, `CommunicationError` where a rank does not answer.
    """
    if transport.size == 1 or not transport.host:
        return
    transport.passes += 1
    stated = transport.share(
        mine.digest + transport.passes.to_bytes(8, "little"), "asking whether ranks agree", deadline
    )
    if all(other == stated[0] for other in stated):
        return
    packed = mine.facts.encode()[:_FACTS_SIZE].ljust(_FACTS_SIZE)
    texts = [facts.decode(errors="ignore").strip() for facts in transport.share(packed, "telling each other", deadline)]
    counts = [int.from_bytes(other[16:], "little") for other in stated]
    raise MismatchError(
        explain(
            f"rank {transport.rank}: the ranks do not make the same call",
            got=_difference(texts, counts),
            next_step="all ranks of a mesh must make the same calls in the same order",
        )
    )


def tell_refusal(transport: Transport, error: BurstError, deadline: float) -> None:
    """Let the others know that this rank refuses its call, so that they raise too instead of waiting.

    They may not be there at all: then `deadline` seconds are lost, and the refusal is raised all the same.
    """
    try:
        agree(transport, state({REFUSED: str(error)[:1000]}), deadline)
    except CommunicationError:
        return  # this rank's own error says more


def _difference(texts: Sequence[str], counts: Sequence[int]) -> str:
    """Fact by fact, what which ranks say."""
    facts = []
    for text in texts:
        try:
            facts.append(json.loads(text))
        except json.JSONDecodeError:  # cut at the size of a message
            facts.append({"facts": text[:_SHOWN]})
    if refusals := [f"rank {r} refused: {f[REFUSED]}" for r, f in enumerate(facts) if REFUSED in f]:
        return "; ".join(refusals)
    names = sorted({name for f in facts for name in f})
    told = [_sides(name, [f.get(name, "-") for f in facts]) for name in names]
    if len(set(counts)) > 1:
        told.append(_sides("passes begun", [str(c) for c in counts]))
    return "; ".join(filter(None, told)) or "a mask or layout with the same name and other positions"


def _sides(name: str, values: Sequence[str]) -> str:
    """``name: value on rank 0, 2; other on rank 1``; empty if all say the same."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        ranks[value].append(rank)
    if len(ranks) == 1:
        return ""
    sides = [f"{value[:_SHOWN]} on rank {', '.join(map(str, who[:8]))}" for value, who in ranks.items()]
    return f"{name}: " + " but ".join(sides)
