"""Check that all ranks make the same call, before a pass sends its first block.

Each rank shares 16 bytes (a hash of everything that must be equal), the number of passes that it has begun, and the
seed of dropout. If these differ, ranks exchange the facts themselves, and every rank raises an error that names both
sides. No block is sent. A checksum of values that must not be equal on all ranks is shared with them.

Transports of host memory compare in every pass. Otherwise the host would have to wait for the device, so ranks compare
only when a call is new, through the store of their group. If a rank later makes a different call, the flags of peer
copies (`comm.peer_copy`) or the timeout of NCCL reveal it.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from struct import pack, unpack_from
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

_FACTS_SIZE = 4096  # bytes
_DIGEST = 16  # bytes
_NUMBERS = ("passes begun", "backward of the pass", "dropout seed")
"""Numbers that ranks compare with each digest."""
_COMPARED = 40  # bytes of the digest and these numbers
_SHOWN = 300  # characters of a fact in an error
_REMEMBERED = 1 << 14  # signatures that a transport need not compare again
_ERROR_TIMEOUT = 10.0  # seconds that a rank with an error waits for the other ranks to receive it
_TITLE = ("pass", "mask", "case")
HINTS = {  # next step if ranks differ in a fact that the caller did not set
    "tokens": "if ranks hold different numbers of tokens, pass seq_len= (tokens of the unsharded sequence)",
    "mask": "give all ranks of a sequence the mask of the unsharded sequence, with all its documents",
    "strategy": "if 'auto' chose, name a strategy, or give all ranks the same BURST_HARDWARE_SPEC and kernel",
    "rows of the batch": "load the same rows on all ranks of a sequence (divide data only over data-parallel ranks, "
    "and seed shuffling alike), and change them before shard(), or remove batch_checksum from all ranks' shards",
    "rows of the masked batch": "load the same rows on all ranks of a sequence, and mask the same tokens: workers "
    "of a data loader draw other random numbers on each rank, so pass seed= to DataCollatorForLanguageModeling, or use "
    "no workers",
    "number of labels": "pass the number that sharded.shard returned, or the labels of all ranks of the sequence",
    "requested outputs": "call the same module with the same arguments, gather_outputs, loss function and mode "
    "(train() or eval(), gradients enabled or not) on all ranks of a sequence",
    "settings of the model": "give all ranks of a sequence the same config and loss function; their versions of "
    "transformers or of the checkpoint may differ",
    "dropout seed": "seed torch alike on all ranks (torch.manual_seed), or pass the same dropout_seed=; on CPUs, other "
    "dropout draws a number per element, so give all ranks the same number of tokens",
    "rows that cross nodes": "name one kernel= for all ranks",
    "values of the parameters": "seed ranks alike or load one checkpoint; before each step, let DDP or FSDP2 "
    "average gradients (with accelerate: prepare(model)), or call all_reduce_gradients",
}
# If one of these differs, `auto` may choose different strategies.
_CAUSES = ("mask", "batch", "heads", "head sizes", "dtype", "backend")
_FOLLOWS_TOKENS = ("layout", "strategy")  # their digests depend on the number of tokens
REFUSED = "refused"
"""Name of the fact that a rank sends instead of its call after an error, so that no rank waits for it."""


class HashedValue(NamedTuple):
    """A fact that ranks compare by a digest of its content; errors show its name."""

    name: str
    digest: str


Facts = Mapping[str, str | HashedValue]


class CallSignature(NamedTuple):
    """The facts of a call that must be equal on all ranks, and their digest."""

    digest: bytes
    facts: Facts

    def of_pass(self, name: str) -> CallSignature:
        """Return the signature of one pass of this call."""
        return call_signature({**self.facts, "pass": name})

    @property
    def title(self) -> str:
        """Describe the call in a few words, for errors about ranks that do not answer."""
        shown = [fact.name if isinstance(fact, HashedValue) else fact for fact in map(self.facts.get, _TITLE) if fact]
        return ", ".join(shown) or "an error"


class ComparedValues(NamedTuple):
    """Values of this rank that must not be equal on all ranks. After they have differed once, they are not compared.

    Attributes:
        key: Digest by which a transport remembers this.
        checksum: Return a checksum of the values, below 2**64. 0: they may be equal to those of the other ranks.
        error: Return the error for values that are equal on all ranks.
    """

    key: bytes
    checksum: Callable[[], int]
    error: Callable[[], BurstError]


def hashed_value(name: str, value: object) -> HashedValue:
    """Return a fact with the hash of the repr of a value, which must be equal on all ranks."""
    return HashedValue(name[:_SHOWN], hashlib.blake2b(repr(value).encode(), digest_size=_DIGEST).hexdigest())


def call_signature(facts: Facts) -> CallSignature:
    """Return the signature of a call. Only the digest of a `HashedValue` counts: equal masks may differ in name."""
    compared = {key: fact.digest if isinstance(fact, HashedValue) else fact for key, fact in facts.items()}
    text = json.dumps(compared, sort_keys=True)
    return CallSignature(hashlib.blake2b(text.encode(), digest_size=_DIGEST).digest(), facts)


def agree(
    transport: Transport,
    signature: CallSignature,
    *,
    forward_pass: int = 0,
    seed: int = 0,
    values: ComparedValues | None = None,
    timeout: float | None = None,
) -> None:
    """Count a pass, and return when all ranks have the same signature. Every rank must call this.

    For a backward pass, `forward_pass` is the number of its forward pass on the transport: ranks that run backward
    passes in different orders would exchange blocks of different calls. `seed` is that of dropout; it is compared, but
    a call with another seed is not new. `values` may be None on some ranks, and no rank raises their error then.
    Default timeout: that of the transport.

    Raises:
        BurstError: All ranks have equal `values`; every rank raises their error.
        MismatchError: The signatures differ; raised on every rank.
        CommunicationError: A rank does not answer, or the last pass of this rank has not ended: see
            `Transport.check_in_sync`.
    """
    if transport.size == 1:
        return
    transport.check_in_sync()
    is_known = signature.digest in transport.agreed
    checksum = 0 if is_known or values is None else _checksum(values, transport)
    transport.state.passes += 1
    if is_known:
        return
    label = f"checking that ranks agree on pass {transport.state.passes} ({signature.title})"
    numbers = transport.state.passes, forward_pass, seed
    checksums = _compare(transport, signature, label, numbers, timeout, checksum=checksum)
    if values is not None and all(checksums):
        if len(set(checksums)) == 1:
            raise values.error()
        _remember(transport, values.key)
    if not transport.host:
        _remember(transport, signature.digest)


def _checksum(values: ComparedValues, transport: Transport) -> int:
    """Return the checksum of values. An error, for example of a device without memory, is sent to the other ranks."""
    try:
        return values.checksum()
    except Exception as error:
        share_error(transport, error)
        raise


def _remember(transport: Transport, digest: bytes) -> None:
    """Add a digest to `Transport.agreed`, on all ranks at the same time."""
    if len(transport.agreed) >= _REMEMBERED:
        transport.agreed.clear()
    transport.agreed.add(digest)


def agree_on_call(transport: Transport, call: str, facts: Facts | None = None) -> None:
    """Return when all ranks make this call, which is not a pass of attention. Compares every time.

    `call` is written as users do, for example "session.report()". `facts` must be equal on all ranks.

    Raises:
        MismatchError: The facts differ, or some ranks make another call; raised on every rank.
        CommunicationTimeoutError: A rank does not make the call in time.
        PeerLostError: A rank failed or returned without the call.
    """
    if transport.size == 1:
        return
    transport.check_in_sync()
    try:
        signature = call_signature({"pass": call, **(facts or {})})
        _compare(transport, signature, f"checking that all ranks call {call}", (transport.state.passes, 0, 0))
    except (CommunicationTimeoutError, PeerLostError) as error:
        raise type(error)(f"{error}; every rank of the mesh must call {call}") from error


def _compare(
    transport: Transport,
    signature: CallSignature,
    label: str,
    numbers: tuple[int, ...],
    timeout: float | None = None,
    *,
    checksum: int = 0,
) -> list[int]:
    """Raise `MismatchError` on every rank if the signatures differ, or the `numbers` of `_NUMBERS`.

    Return the checksums of all ranks, which may differ.
    """
    received = transport.share(signature.digest + pack("<4Q", *numbers, checksum), label, timeout)
    digests = [one[:_COMPARED] for one in received]
    if all(digest == digests[0] for digest in digests):
        return [int.from_bytes(one[_COMPARED:], "little") for one in received]
    packed = json.dumps(signature.facts).encode()[:_FACTS_SIZE].ljust(_FACTS_SIZE)
    shared = transport.share(packed, "exchanging the facts of the calls", timeout)
    if unwritten := [rank for rank, digest in enumerate(digests) if len(set(digest)) == 1]:
        raise CommunicationError(
            f"rank {transport.rank}: the {len(received[0])} bytes received from rank {unwritten[0]} are all equal",
            got=digests[unwritten[0]][:4].hex(),
            allowed="a hash",
            next_step=f"the transport {transport.name!r} must write a receive's buffer before its wait() returns",
        )
    got = _difference([facts.decode(errors="ignore").strip() for facts in shared], digests)
    step = f"{SAME_CALLS}, backward too"
    consequences = {"strategy"} if any(f"{fact}: " in got for fact in _CAUSES) else set()
    if hint := next((hint for fact, hint in HINTS.items() if fact not in consequences and f"{fact}: " in got), None):
        step = f"{hint}; else, {step}"
    raise MismatchError(f"rank {transport.rank}: the ranks do not make the same call", got=got, next_step=step)


def share_error(transport: Transport, error: Exception, timeout: float = _ERROR_TIMEOUT) -> None:
    """Send the error that this rank is about to raise, so that the other ranks raise too and do not wait.

    If no other rank answers, this takes at most `timeout` seconds, and the caller raises its error anyway. Ranks that
    have agreed on this call before do not compare, so they do not receive the error. This rank's next call then raises
    too, because the other ranks would match it with the present one. See `Transport.between_passes`.
    """
    text = str(error) if isinstance(error, BurstError) else f"{type(error).__name__}: {error}"
    try:
        # The error may be about a transform, a trace or a mode of torch, which would also affect the messages.
        with _untraced(), torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction(), _disable_current_modes():
            agree(transport, call_signature({REFUSED: text[:1000]}), timeout=min(_ERROR_TIMEOUT, timeout))
    except CommunicationError:
        return  # the error of this rank contains more


@contextmanager
def _untraced() -> Iterator[None]:
    """Stop torch.jit.trace for this context: a process group raises in it. Without a trace, no state may be set."""
    if not torch._C._is_tracing():
        yield
        return
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # type: ignore[attr-defined]  # stubs leave it out
    try:
        yield
    finally:
        torch._C._set_tracing_state(state)  # type: ignore[attr-defined]  # stubs leave it out


def _difference(texts: Sequence[str], digests: Sequence[bytes]) -> str:
    """Return the facts that differ, each with the values of all ranks. `digests`: see `_compare`."""
    facts: list[dict[str, Any]] = []
    for text in texts:
        try:
            facts.append(json.loads(text))
        except json.JSONDecodeError:  # cut off at the size of a message
            facts.append({"facts": text[:_SHOWN]})
    if errors := [f"rank {r} refused: {f[REFUSED]}" for r, f in enumerate(facts) if REFUSED in f]:
        return "; ".join(errors)
    names = sorted({name for f in facts for name in f}, key=lambda name: (name != "tokens", name))
    if all("pass" in f for f in facts) and len({f["pass"] for f in facts}) > 1:  # most facts belong to one kind of pass
        names = ["pass", *(name for name in names if name != "pass" and all(name in f for f in facts))]
    if len({_compared(f.get("tokens")) for f in facts}) > 1:  # then positions and routes differ, even if names do not
        names = [name for name in names if name not in _FOLLOWS_TOKENS or len({_shown(f.get(name)) for f in facts}) > 1]
    sides = [_sides(name, [f.get(name, "-") for f in facts]) for name in names]
    numbers = zip(*(unpack_from("<3Q", one, _DIGEST) for one in digests), strict=True)
    sides += [_sides(name, list(map(str, values))) for name, values in zip(_NUMBERS, numbers, strict=True)]
    return "; ".join(filter(None, sides)) or "facts that were too long to show"


def _compared(value: Any) -> str:
    """Return what ranks compare of a fact as it was received: see `_shown`."""
    return str(value[1] if isinstance(value, list) else value)


def _shown(value: Any) -> str:
    """Return the name of a fact as it was received: a `HashedValue` is a list here."""
    return str(value[0] if isinstance(value, list) else value)


def _sides(name: str, values: Sequence[str | list[str]]) -> str:
    """Return ``name: value on rank 0, 2; other on rank 1``, or "" if all are equal. A `HashedValue` is a list here."""
    ranks = defaultdict(list)
    for rank, value in enumerate(values):
        shown, compared = value if isinstance(value, list) else (value, value)
        ranks[compared].append((rank, shown))
    if len(ranks) == 1:
        return ""
    sides, names = [], set()
    for group in ranks.values():
        shown = group[0][1][:_SHOWN]
        text = "another of that name" if shown in names else shown
        sides.append(f"{text} on rank {', '.join(str(rank) for rank, _ in group[:8])}")
        names.add(shown)
    return f"{name}: " + " but ".join(sides)
