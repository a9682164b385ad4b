"""Connect the ranks of a group with peer copies, if all of them support these. All ranks take the same decision."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import driver
from burst_portable.comm.base import Message, Part, Parts, Strip, Strips, Transport
from burst_portable.comm.peer_copy import PeerCopyTransport
from burst_portable.errors import BurstError, MismatchError, UnsupportedError, first_line

_PROOF = 1 << 20  # bytes of the trial message that every rank sends to every other rank
_PROOF_SECONDS = 20.0


def unavailable() -> str:
    """Return why this machine has no peer copies; "" if no reason is visible to a single process."""
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory
    except ImportError as error:
        return f"this torch has no symmetric memory: {error}"
    device = current_device()
    kind = symmetric_memory.get_backend(device) if hasattr(symmetric_memory, "get_backend") else "CUDA"
    if kind not in ("CUDA", None):  # None: nothing was chosen yet
        return f"torch's symmetric memory is set to {kind}, not to CUDA"
    try:
        driver(device.index)
    except BurstError as error:
        return str(error)
    for a, b in permutations(range(torch.cuda.device_count()), 2):
        if not torch.cuda.can_device_access_peer(a, b):
            return f"GPU {a} cannot address the memory of GPU {b}"
    return ""


def current_device() -> torch.device:
    """Return the current GPU with its index."""
    return torch.device("cuda", torch.cuda.current_device())


def connect(other: Transport, group: Any, timeout: float, *, host: str | None = None) -> Transport:
    """Return a transport of peer copies between the ranks of `other`, each on its current device. Collective.

    The ranks, those of `group`, agree over `other`. A pass may wait `timeout` seconds for its next message. `host` is
    the name of this rank's host; default: `this_host()`.

    Raises:
        UnsupportedError: On all ranks, with the reasons of the ranks that do not support peer copies.
    """
    device = current_device()
    facts = {
        "reason": unavailable(),
        "host": this_host() if host is None else host,
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "index": str(device.index),
    }
    facts_of_ranks = share_facts(other, facts, "asking for peer copies")
    reasons = _reasons(facts_of_ranks)
    if len({facts["host"] for facts in facts_of_ranks}) > 1:
        reasons.append("the ranks are on several hosts")
    if len({facts["gpu"] for facts in facts_of_ranks}) < other.size:
        reasons.append("two ranks share a GPU")
    if reasons:
        raise UnsupportedError("; ".join(reasons))
    from burst_portable.backends.cuda.peers.memory import CudaPeerMemory

    for by_copies in (False, True):  # by copies: slower, and works with every driver
        memory = CudaPeerMemory(group, device, other.share, min(timeout, _PROOF_SECONDS), by_copies=by_copies)
        transport = PeerCopyTransport(memory, other)
        failures = _reasons(share_facts(other, {"reason": _run_trials(transport, device)}, "trying peer copies"))
        if not failures:
            memory.watch.timeout = timeout
            return transport
        reasons += failures
    if len({facts["index"] for facts in facts_of_ranks}) < other.size:  # torch's symmetric memory rejects this
        reasons.append("ranks have one number for different GPUs; let each rank see all of them (CUDA_VISIBLE_DEVICES)")
    raise UnsupportedError(f"peer copies were tried and failed: {'; '.join(dict.fromkeys(reasons))}")


def _reasons(facts_of_ranks: list[dict[str, str]]) -> list[str]:
    return [f"rank {rank}: {facts['reason']}" for rank, facts in enumerate(facts_of_ranks) if facts["reason"]]


def share_facts(other: Transport, facts: dict[str, str], what: str) -> list[dict[str, str]]:
    """Return the facts of every rank, in rank order.

    Raises:
        MismatchError: Another rank makes another call.
    """
    replies = other.share(json.dumps(facts).encode(), what)
    try:
        return [json.loads(reply) for reply in replies]
    except ValueError as error:  # another rank shared something else, for example an error of its call
        raise MismatchError(
            f"rank {other.rank}, {what}: the ranks do not make the same call",
            got=", ".join(repr(reply[:100]) for reply in replies),
            next_step="look at the other ranks' errors",
        ) from error


def this_host() -> str:
    """Return the name of this host and the id of its boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"


def _run_trials(transport: PeerCopyTransport, device: torch.device) -> str:
    """Send messages between all ranks in a few trial passes, and return the error; "" if there is none."""
    # The strips go once by a kernel and once by copy engines.
    lines = partial(_exchange, strided=True)
    trials: list[Callable[..., dict[int, Tensor]]] = [_messages, _exchange, lines, partial(lines, exclusive=False)]
    try:
        for turn, trial in enumerate(trials, 1):
            if error := _run_trial(transport, device, turn, trial):
                return error
    # Errors of a compiler count too: NCCL still works, and the other ranks wait for this rank's result.
    except Exception as caught:  # noqa: BLE001
        transport.state.pass_active = False  # the ranks continue with the other transport, which the trial did not use
        return f"{type(caught).__name__}: {first_line(caught)}"
    return ""


def _run_trial(
    transport: PeerCopyTransport, device: torch.device, turn: int, trial: Callable[..., dict[int, Tensor]]
) -> str:
    """Let `trial` send bytes to all ranks and return those that arrived from each. Return the error, if any."""
    rank = transport.rank
    transport.begin(b"proof", _PROOF)
    received = trial(transport, torch.full((_PROOF,), 16 * turn + rank % 16, dtype=torch.uint8, device=device))
    found = torch.stack([block.min() for block in received.values()] + [block.max() for block in received.values()])
    transport.end()
    done = torch.cuda.Event()
    done.record()
    while not done.query():  # the watch ends it at the timeout
        time.sleep(0.001)
    transport.memory.check()
    expected = [16 * turn + peer % 16 for peer in received] * 2
    return "" if found.tolist() == expected else f"received other bytes than were sent: {found.tolist()}"


def _messages(transport: PeerCopyTransport, block: Tensor) -> dict[int, Tensor]:
    """Send one message to each other rank."""
    arriving = {peer: transport.receive_buffer(_PROOF, block.device, peer) for peer in transport.other_ranks}
    sent, received = transport.post(
        [Message(block, peer) for peer in arriving],
        [Message(buffer, peer) for peer, buffer in arriving.items()],
        "trying peer copies",
    )
    for handle in (*received, *sent):
        handle.wait()
    return arriving


def _exchange(
    transport: PeerCopyTransport, block: Tensor, *, strided: bool = False, exclusive: bool = True
) -> dict[int, Tensor]:
    """Send parts, or strips of several lines, to all ranks, this rank included, in one exchange."""
    size, offset, ranks = _PROOF, transport.rank * _PROOF, (*transport.other_ranks, transport.rank)
    leaving: Parts | Strips = Parts(block, tuple(Part(r, 0, size, offset) for r in ranks))
    if strided:
        width, step = 1024, 4096
        lines = _PROOF // step
        size = lines * width
        leaving = Strips(block, tuple(Strip(r, 0, offset, lines, width, step, width) for r in ranks))
    received = transport.receive_buffer(transport.size * _PROOF, block.device, transport.rank, 0)
    arriving = Parts(received, tuple(Part(r, r * _PROOF, r * _PROOF + size, r * _PROOF) for r in ranks))
    exchange = transport.exchange([leaving], [arriving], "trying peer copies", exclusive=exclusive)
    exchange.copy_local()
    exchange.wait()
    exchange.wait_sent()
    return {r: received[r * _PROOF : r * _PROOF + size] for r in ranks}
