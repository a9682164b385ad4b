"""Check that all ranks make the same call, before a pass sends its first block.

Each rank shares 16 bytes (a hash of everything that must be equal) and how many passes it has begun. If these differ,
the facts themselves are exchanged, and every rank raises an error that names both sides. No block is then sent.

Transports of host memory compare in every pass. With others the host would have to wait for the device, so ranks
compare only when a call is new, through the store of their group. If a rank later makes a different call, the flags of
peer copies (`comm.peer_copy`) or the timeout of NCCL reveal it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from burst_portable.comm.base import Transport
from burst_portable.errors import (
    SAME_CALLS,
    BurstError,
    CommunicationError,
    CommunicationTimeoutError,
    MismatchError,
    PeerLostError,
)

_FACTS_SIZE = 4096
_SHOWN = 300
_REMEMBERED = 1 << 14  # signatures that a transport need not compare again
_TELLING = 10.0  # seconds that a rank with an error waits for the other ranks to receive it
_TITLE = ("pass", "mask", "case")
HINTS = {  # what to do if ranks differ in a fact that no user chose
    "tokens": "where ranks hold different numbers of rows, pass seq_len= (tokens of the whole sequence)",
    "strategy": "where 'auto' chose, name a strategy, or give all ranks the same BURST_HARDWARE_SPEC and kernel",
    "rows of the batch": "load the same rows on all ranks of a sequence (divide data over data-parallel ranks alone)",
    "rows that cross nodes": "name one kernel= for all ranks",
    "values of the parameters": "seed ranks alike or load one checkpoint; call all_reduce_gradients before each step",
}
_GIVEN = ("mask", "batch", "heads", "head sizes", "dtype", "backend")  # if these differ, `auto` chooses differently
REFUSED = "refused"
"""Name of the fact that a rank sends in place of its call after an error, so that no rank waits for it."""


class HashedValue(NamedTuple):
    """A fact that ranks compare by a digest of its content; errors show its name."""

    name: str
    digest: str


Facts = Mapping[str, str | HashedValue]


class CallSignature(NamedTuple):
    """The facts of a call that all ranks must have in common, and their digest."""

    digest: bytes
    facts: Facts

    def of_pass(self, name: str) -> CallSignature:
        """Return the signature of one pass of this call."""
        return call_signature({**self.facts, "pass": name})

    @property
    def title(self) -> str:
        """Describe the call in a few words, for errors about ranks that do not answer."""
        shown = [fact.name if isinstance(fact, HashedValue) else fact for fact in map(self.facts.get, _TITLE) if fact]
        return ", ".join(shown) or "a refusal"


def hashed_value(name: str, value: object) -> HashedValue:
    """Hash the repr of a value, which must be the same on all ranks."""
    return HashedValue(name[:_SHOWN], hashlib.blake2b(repr(value).encode(), digest_size=16).hexdigest())


def call_signature(facts: Facts) -> CallSignature:
    """Return the signature of a call. Only the digest of a `HashedValue` counts: equal masks may differ in name."""
    compared = {key: fact.digest if isinstance(fact, HashedValue) else fact for key, fact in facts.items()}
    text = json.dumps(compared, sort_keys=True)
    return CallSignature(hashlib.blake2b(text.encode(), digest_size=16).digest(), facts)


def agree(transport: Transport, mine: CallSignature, *, forward_pass: int = 0, timeout: float | None = None) -> None:
    """Count a pass, and return when all ranks of the transport have the same signature. Every rank must call this.

    Args:
        transport: of the ranks that make the call together.
        mine: signature of this rank's call.
        forward_pass: for a backward pass, which of the transport's passes was its forward pass: ranks that go backward
            in different orders would exchange blocks of different calls.
        timeout: seconds. Default: the transport's own.

    Raises:
        MismatchError: the signatures differ; raised on every rank.
        CommunicationError: a rank does not answer, or the last pass of this rank has not ended: see
            `Transport.check_in_sync`.
    """
    if transport.size == 1:
        return
    transport.check_in_sync()
    transport.state.passes += 1
    if mine.digest in transport.agreed:
        return
    label = f"asking whether ranks agree on pass {transport.state.passes} ({mine.title})"
    _ask(transport, mine, label, forward_pass=forward_pass, timeout=timeout)
    if not transport.host:
        _remember(transport, mine.digest)


def agree_on_call(transport: Transport, call: str, facts: Facts | None = None) -> None:
    """Return when all ranks of the transport make this call, which is no pass of attention. Compares every time.

    Args:
        transport: of the ranks that make the call together.
        call: how users write it, "session.report()".
        facts: what all ranks must have in common.

    Raises:
        MismatchError: the facts differ, or some ranks make another call; raised on every rank.
        CommunicationTimeoutError, PeerLostError: a rank does not make the call, which the message names.
    """
    if transport.size == 1:
        return
    transport.check_in_sync()
    try:
        _ask(transport, call_signature({"pass": call, **(facts or {})}), f"asking whether all ranks call {call}")
    except (CommunicationTimeoutError, PeerLostError) as error:
        raise type(error)(f"{error}; every rank of the mesh must call {call}") from error


def _ask(
    transport: Transport, mine: CallSignature, label: str, *, forward_pass: int = 0, timeout: float | None = None
) -> None:
    """Raise `MismatchError` on every rank if the signatures differ."""
    counts = transport.state.passes.to_bytes(8, "little") + forward_pass.to_bytes(8, "little")
    stated = transport.share(mine.digest + counts, label, timeout)
    if all(other == stated[0] for other in stated):
        return
    packed = json.dumps(mine.facts).encode()[:_FACTS_SIZE].ljust(_FACTS_SIZE)
    texts = [facts.decode(errors="ignore").strip() for facts in transport.share(packed, "telling each other", timeout)]
    got = _difference(texts, stated)
    step = f"{SAME_CALLS}, backward too"
    follows = {"strategy"} if any(f"{fact}: " in got for fact in _GIVEN) else set()
    if hint := next((hint for fact, hint in HINTS.items() if fact not in follows and f"{fact}: " in got), None):
        step = f"{hint}; else, {step}"
    raise MismatchError(f"rank {transport.rank}: the ranks do not make the same call", got=got, next_step=step)


def _remember(transport: Transport, digest: bytes) -> None:
    if len(transport.agreed) >= _REMEMBERED:  # all ranks do this at once: they have agreed on the same statements
        transport.agreed.clear()
    transport.agreed.add(digest)


def share_error(transport: Transport, error: Exception, timeout: float = _TELLING) -> None:
    """Send the error that this rank is about to raise, so that the other ranks raise too and do not wait.

    If no other rank answers, this takes at most `timeout` seconds, and the caller raises its error anyway. Ranks that
    have agreed on this call before do not compare, and so do not receive the error. This rank's next call then raises
    too, since the other ranks would match it with the present one. See `Transport.between_passes`.
    """
    told = str(error) if isinstance(error, BurstError) else f"{type(error).__name__}: {error}"
    try:
        # The error may be about a transform, a trace or a mode of torch, which would also affect the messages.
        with (
            _untraced(),
            torch._C._DisableFuncTorch(),
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
        ):
            agree(transport, call_signature({REFUSED: told[:1000]}), timeout=min(_TELLING, timeout))
    except CommunicationError:
        return  # this rank's own error says more


@contextmanager
def _untraced() -> Iterator[None]:
    """Leave torch.jit.trace, in which a process group raises. Without a trace, no state may be set."""
    if not torch._C._is_tracing():
        yield
        return
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # stubs leave it out
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # stubs leave it out


def _difference(texts: Sequence[str], stated: Sequence[bytes]) -> str:
    """Return the facts that differ, each with the values of all ranks."""
    facts: list[dict[str, Any]] = []
    for text in texts:
        try:
            facts.append(json.loads(text))
        except json.JSONDecodeError:  # cut off at the size of a message
            facts.append({"facts": text[:_SHOWN]})
    if refusals := [f"rank {r} refused: {f[REFUSED]}" for r, f in enumerate(facts) if REFUSED in f]:
        return "; ".join(refusals)
    names = sorted({name for f in facts for name in f})
    if all("pass" in f for f in facts) and len({f["pass"] for f in facts}) > 1:  # most facts belong to one kind of pass
        names = ["pass", *(name for name in names if name != "pass" and all(name in f for f in facts))]
    told = [_sides(name, [f.get(name, "-") for f in facts]) for name in names]
    for name, start in (("passes begun", 16), ("backward of the pass", 24)):
        told.append(_sides(name, [str(int.from_bytes(one[start : start + 8], "little")) for one in stated]))
    return "; ".join(filter(None, told)) or "facts that were too long to show"


def _sides(name: str, values: Sequence[str | list[str]]) -> str:
    """Return ``name: value on rank 0, 2; other on rank 1``, or "" if all are equal. A `HashedValue` is a list here."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        told, compared = value if isinstance(value, list) else (value, value)
        ranks[compared].append((rank, told))
    if len(ranks) == 1:
        return ""
    sides, names = [], set()
    for who in ranks.values():
        called = who[0][1][:_SHOWN]
        sides.append(
            f"{'another of that name' if called in names else called} on rank {', '.join(str(r) for r, _ in who[:8])}"
        )
        names.add(called)
    return f"{name}: " + " but ".join(sides)
