"""Whether the ranks of a group can have peer copies, and the transport if they can. Settled by all ranks together."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import driver
from burst_portable.comm.base import Message, Part, Parts, Strip, Strips, Transport
from burst_portable.comm.peer_copy import PeerCopyTransport
from burst_portable.errors import BurstError, MismatchError, UnsupportedError, first_line

_PROOF = 1 << 20  # bytes that every rank sends to every other, to see that they arrive
_PROOF_SECONDS = 20.0

Trial = Callable[[PeerCopyTransport, Tensor], dict[int, Tensor]]
"""Sends these bytes to all ranks; returns what has arrived from each."""


def unavailable() -> str:
    """Why this machine cannot have peer copies, as far as one process can tell; "" if nothing rules them out."""
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    device = here()
    kind = symmetric_memory.get_backend(device) if hasattr(symmetric_memory, "get_backend") else "CUDA"
    if kind not in ("CUDA", None):  # None: nothing was chosen yet
        return f"torch's symmetric memory is set to {kind}, not to CUDA"
    try:
        driver(device.index)
    except BurstError as error:
        return str(error)
    count = torch.cuda.device_count()
    apart = [(a, b) for a in range(count) for b in range(count) if a != b and not _reaches(a, b)]
    return f"GPU {apart[0][0]} cannot address the memory of GPU {apart[0][1]}" if apart else ""


def here() -> torch.device:
    """The current GPU, by its number."""
    return torch.device("cuda", torch.cuda.current_device())


def _reaches(a: int, b: int) -> bool:
    return torch.cuda.can_device_access_peer(a, b)


def connect(other: Transport, group: Any, timeout: float, *, host: str | None = None) -> Transport:
    """Peer copies among the ranks of `other`, each on its current device. Collective.

    Args:
        other: The transport over which the ranks agree.
        group: The process group of the ranks.
        timeout: Seconds that a pass may wait for its next message.
        host: Names the host of this rank. Default: `this_host()`.

    Raises:
        UnsupportedError: On all ranks alike, with the reasons of the ranks that cannot have peer copies.
    """
    device = here()
    facts = {
        "reason": unavailable(),
        "host": this_host() if host is None else host,
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
    }
    told = share_facts(other, facts, "asking for peer copies")
    reasons = [f"rank {rank}: {one['reason']}" for rank, one in enumerate(told) if one["reason"]]
    if len({one["host"] for one in told}) > 1:
        reasons.append("the ranks are on several hosts")
    if len({one["gpu"] for one in told}) < other.size:
        reasons.append("two ranks share a GPU")
    if reasons:
        raise UnsupportedError("; ".join(reasons))
    from burst_portable.backends.cuda.peers.memory import CudaPeerMemory

    for by_copies in (False, True):  # the fast way first, then one that needs less of the driver
        memory = CudaPeerMemory(group, device, other.share, min(timeout, _PROOF_SECONDS), by_copies=by_copies)
        transport = PeerCopyTransport(memory, other)
        told = share_facts(other, {"reason": _proof(transport, device)}, "trying peer copies")
        reasons += [f"rank {rank}: {one['reason']}" for rank, one in enumerate(told) if one["reason"]]
        if not any(one["reason"] for one in told):
            memory.watch.timeout = timeout
            return transport
    raise UnsupportedError(f"peer copies were tried and failed: {'; '.join(dict.fromkeys(reasons))}")


def share_facts(other: Transport, facts: dict[str, str], what: str) -> list[dict[str, str]]:
    """Return the facts of every rank, in rank order.

    Raises:
        MismatchError: Another rank shares something else, because it makes another call.
    """
    said = other.share(json.dumps(facts).encode(), what)
    try:
        return [json.loads(one) for one in said]
    except ValueError as error:  # another rank was sharing something else: it refused its call
        raise MismatchError(
            f"rank {other.rank}, {what}: the ranks do not make the same call",
            got=", ".join(repr(one[:100]) for one in said),
            next_step="look at the other ranks' errors",
        ) from error


def this_host() -> str:
    """Return the name of this host and the id of its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _proof(transport: PeerCopyTransport, device: torch.device) -> str:
    """What is wrong with messages between all ranks in a few trial passes; "" if all is well."""
    # By a kernel, and by engines.
    trials: list[Trial] = [_messages, _parts, partial(_lines, exclusive=True), partial(_lines, exclusive=False)]
    try:
        for turn, trial in enumerate(trials, 1):
            if wrong := _tried(transport, device, turn, trial):
                return wrong
    except Exception as error:  # noqa: BLE001  (a compiler's too: NCCL can still be had, and others wait to be told)
        transport.state.pass_active = False  # the ranks go on by the other transport, which had no message of the trial
        return f"{type(error).__name__}: {first_line(error)}"
    return ""


def _tried(transport: PeerCopyTransport, device: torch.device, turn: int, trial: Trial) -> str:
    rank = transport.rank
    transport.begin(b"proof", _PROOF)
    came = trial(transport, torch.full((_PROOF,), 16 * turn + rank % 16, dtype=torch.uint8, device=device))
    found = torch.stack([place.min() for place in came.values()] + [place.max() for place in came.values()])
    transport.end()
    done = torch.cuda.Event()
    done.record()
    while not done.query():  # the watch makes sure that it ends
        time.sleep(0.001)
    transport.memory.check()
    expected = [16 * turn + peer % 16 for peer in came] * 2
    return "" if found.tolist() == expected else f"other bytes came than were sent: {found.tolist()}"


def _messages(transport: PeerCopyTransport, mine: Tensor) -> dict[int, Tensor]:
    """Messages one by one."""
    others = transport.others
    places = [transport.inbox(_PROOF, mine.device, peer) for peer in others]
    sent, received = transport.post(
        [Message(mine, peer) for peer in others],
        [Message(place, peer) for place, peer in zip(places, others, strict=True)],
        "trying peer copies",
    )
    for handle in (*received, *sent):
        handle.wait()
    return dict(zip(others, places, strict=True))


def _parts(transport: PeerCopyTransport, mine: Tensor) -> dict[int, Tensor]:
    """Messages all at once, this rank's own among them."""
    ranks = (*transport.others, transport.rank)
    offset = transport.rank * _PROOF
    return _exchanged(transport, Parts(mine, tuple(Part(r, 0, _PROOF, offset) for r in ranks)), _PROOF)


def _lines(transport: PeerCopyTransport, mine: Tensor, exclusive: bool) -> dict[int, Tensor]:
    """The same for lines that lie apart."""
    width, step = 1024, 4096
    lines = _PROOF // step
    ranks = (*transport.others, transport.rank)
    strips = tuple(Strip(r, 0, transport.rank * _PROOF, lines, width, step, width) for r in ranks)
    return _exchanged(transport, Strips(mine, strips), lines * width, exclusive)


def _exchanged(
    transport: PeerCopyTransport, leaving: Parts | Strips, size: int, exclusive: bool = True
) -> dict[int, Tensor]:
    inbox = transport.inbox(transport.size * _PROOF, leaving.buffer.device, transport.rank, 0)
    ranks = (*transport.others, transport.rank)
    arriving = Parts(inbox, tuple(Part(r, r * _PROOF, r * _PROOF + size, r * _PROOF) for r in ranks))
    exchange = transport.exchange([leaving], [arriving], "trying peer copies", exclusive=exclusive)
    exchange.copy_local()
    exchange.wait()
    exchange.wait_sent()
    return {r: inbox[r * _PROOF : r * _PROOF + size] for r in ranks}
