"""Test a transport, as jobs of one rank on a thread or in a process. A job returns what is wrong, or ""."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, product

import torch
from torch import Tensor

from burst_portable.comm.agreement import agree, call_signature
from burst_portable.comm.base import Handle, Message, Part, Parts, Strip, Strips, Transport
from burst_portable.errors import CommunicationError, MismatchError

Job = Callable[[Transport, torch.device], str]


def _bytes(size: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator).to(device)


def _empty(transport: Transport, size: int, device: torch.device) -> Tensor:
    buffer = transport.buffer(size, device)
    buffer.fill_(255)
    return buffer


def _wait(*groups: Sequence[Handle]) -> None:
    for handle in chain(*groups):
        handle.wait()


def _pass_on(transport: Transport, message: Tensor, label: str) -> Tensor:
    """Send a message to the next rank, and return that of the previous one, which has the same size."""
    came = _empty(transport, message.numel(), message.device)
    following, previous = transport.other_ranks[0], transport.other_ranks[-1]
    sent, received = transport.post([Message(message, following)], [Message(came, previous)], label)
    _wait(received, sent)
    return came


def rank_numbers(transport: Transport, device: torch.device) -> str:
    """Check that the ranks have the numbers 0 to size - 1."""
    message = torch.full((8,), transport.rank, dtype=torch.uint8, device=device)
    parts = [_empty(transport, 8, device) for _ in range(transport.size)]
    transport.all_gather(message, parts, "rank numbers")
    found = [int(part[0]) for part in parts]
    return "" if found == list(range(transport.size)) else f"rank numbers are {found}"


def message_sizes(transport: Transport, device: torch.device) -> str:
    """Send 1 byte to 2 MiB to the next rank, odd sizes too. The sent tensor does not change."""
    rank, size = transport.rank, transport.size
    for count in (1, 3, 16, 17, 4096, 65537, 1 << 21):
        out = _bytes(count, 100 * rank + count, device)
        came = _pass_on(transport, out, "message sizes")
        if not torch.equal(out, _bytes(count, 100 * rank + count, device)):
            return f"sending changed the sent tensor of {count} bytes"
        if not torch.equal(came, _bytes(count, 100 * ((rank - 1) % size) + count, device)):
            return f"a message of {count} bytes arrived with other bytes"
    return ""


def message_order(transport: Transport, device: torch.device) -> str:
    """Check the order of messages between two ranks: several in a post, and several posts before a wait."""
    following, previous = transport.other_ranks[0], transport.other_ranks[-1]
    outs = [torch.full((64,), number, dtype=torch.uint8, device=device) for number in range(11)]
    came = [_empty(transport, 64, device) for _ in outs]
    sends, receives = [Message(b, following) for b in outs], [Message(b, previous) for b in came]
    posts = (slice(0, 3), slice(3, 5), slice(5, 8), slice(8, 11))
    posted = [transport.post(sends[part], receives[part], "message order") for part in posts]
    _wait(*(handles for sent, received in posted for handles in (received, sent)))
    found = [int(buffer[0]) for buffer in came]
    return "" if found == list(range(11)) else f"messages 0 to 10 arrived as {found}"


def all_to_all(transport: Transport, device: torch.device) -> str:
    """Exchange messages of different sizes between all ranks, some of them empty."""
    rank, size = transport.rank, transport.size

    def count(source: int, target: int) -> int:
        return 0 if (source + target) % 3 == 2 else 1 + 7 * source + 31 * target

    sends = [_bytes(count(rank, r), 10 * rank + r, device) for r in range(size)]
    receives = [_empty(transport, count(r, rank), device) for r in range(size)]
    transport.all_to_all(sends, receives, "all to all")
    wrong = [r for r in range(size) if not torch.equal(receives[r], _bytes(count(r, rank), 10 * r + rank, device))]
    return f"all_to_all received other bytes from ranks {wrong}" if wrong else ""


def all_gather(transport: Transport, device: torch.device) -> str:
    """Gather messages of different sizes, twice in a row."""
    rank, size = transport.rank, transport.size
    for turn in range(2):
        receives = [_empty(transport, 5 + 3 * r, device) for r in range(size)]
        transport.all_gather(_bytes(5 + 3 * rank, rank + turn, device), receives, "all gather")
        wrong = [r for r in range(size) if not torch.equal(receives[r], _bytes(5 + 3 * r, r + turn, device))]
        if wrong:
            return f"all_gather received other bytes from ranks {wrong}"
    return ""


def ring_laps(transport: Transport, device: torch.device) -> str:
    """Forward messages around the ring while the next ones arrive: no buffer in use is overwritten."""
    rank, size = transport.rank, transport.size
    for lap in range(6):
        message = _bytes(1025, 50 * lap + rank, device)
        for hop in range(1, size + 1):
            message = _pass_on(transport, message, f"hop {hop}")
        if not torch.equal(message, _bytes(1025, 50 * lap + rank, device)):
            return f"a message changed on its way around the ring (lap {lap})"
    return ""


def distinct_buffers(transport: Transport, device: torch.device) -> str:
    """Check that buffers that are in use at the same time do not share memory."""
    buffers = [transport.buffer(96, device) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        if buffer.numel() != 96 or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            return f"buffer(96) returned {tuple(buffer.shape)} {buffer.dtype}"
        buffer.fill_(number)
    found = [int(buffer[0]) for buffer in buffers]
    return "" if found == list(range(8)) else f"buffers in use share memory: {found}"


def stream_order(transport: Transport, device: torch.device) -> str:
    """Write a message right before posting it, and use one right after waiting for it, without a synchronization."""
    rank, size = transport.rank, transport.size
    x = torch.full((512, 512), 1.0 + rank, device=device)
    for _ in range(8):
        x = (x @ x).clamp(1.0 + rank, 1.0 + rank)  # on a device this takes longer than posting
    out, came = x.view(-1).view(torch.uint8), _empty(transport, x.numel() * 4, device)
    sends, receives = [Message(out, (rank + 1) % size)], [Message(came, (rank - 1) % size)]
    sent, received = transport.post(sends, receives, "stream order")
    _wait(received)
    total = came.view(torch.float32).double().sum()
    _wait(sent)
    out.fill_(0)
    right = (1.0 + (rank - 1) % size) * x.numel()
    return "" if float(total) == right else "a message was read before it was written, or used before it arrived"


def reuse_after_wait(transport: Transport, device: torch.device) -> str:
    """Overwrite a sent tensor once its handle has been waited for, although the receiver posts late.

    Every byte of this large message is compared, so a part of it that arrives at the place of another one is found.
    """
    count = 1 << 24  # more than a link buffers: the rest is still in the sender's memory
    out = _bytes(count if transport.rank < 2 else 0, 1, device)
    transport.share(b"ready", "reuse after wait")  # making the message may take longer than the receiver is late
    if transport.rank == 0:
        leaving, _ = transport.post([Message(out, 1)], [], "reuse after wait")
        _wait(leaving)
        out.fill_(0)
    elif transport.rank == 1:
        came = _empty(transport, count, device)
        time.sleep(0.2)
        _, arriving = transport.post([], [Message(came, 0)], "reuse after wait")
        _wait(arriving)
        wrong = came != out
        if bool(came[wrong].any()):
            return f"a message of {count} bytes arrived with other bytes"
        if bool(wrong.any()):  # they are 0
            return "a message changed when its sender overwrote it after waiting for the handle"
    return ""


def late_rank(transport: Transport, device: torch.device) -> str:
    """Check that a rank waits for a rank that posts late."""
    rank, size = transport.rank, transport.size
    if rank == size - 1:
        time.sleep(0.1)
    came = _pass_on(transport, torch.full((100,), rank + 1, dtype=torch.uint8, device=device), "late rank")
    return "" if int(came[0]) == (rank - 1) % size + 1 else "other bytes arrived than a late rank sent"


def exchange(transport: Transport, device: torch.device) -> str:
    """Exchange parts of buffers between all ranks in one pass, including the rank itself, also with strided sends.

    Runs exclusively, and concurrently with a kernel: a transport may use another route then. Repeats it inside nodes of
    two ranks, of which the last may have one: no rank waits for ranks of other nodes.
    """
    nodes = sorted({transport.size, min(2, transport.size)}, reverse=True)
    ways = product(nodes, (False, True) if transport.supports_strided_sends else (False,), (True, False))
    wrong = (_exchange_once(transport, device, *way, turn) for turn, way in enumerate(ways))
    return next(filter(None, wrong), "")


def _exchange_once(
    transport: Transport, device: torch.device, ranks_per_node: int, is_strided: bool, exclusive: bool, turn: int
) -> str:
    """Run one pass with one exchange inside nodes of `ranks_per_node` ranks; return what is wrong, or "".

    Each turn sends other bytes, so bytes that an earlier turn left in a buffer do not count as received.
    """
    lines, width, step = 24, 48, 80  # bytes
    rank, size = transport.rank, lines * width
    node = range(rank - rank % ranks_per_node, min(rank - rank % ranks_per_node + ranks_per_node, transport.size))
    ranks = (*(r for r in transport.other_ranks if r in node), rank)
    offset = rank * size

    def sent(source: int, target: int) -> Tensor:
        return _bytes(size, (turn * transport.size + source) * transport.size + target, device)

    blocks = [sent(rank, r) for r in range(transport.size)]
    leaving: Parts | Strips
    if is_strided:
        strided = torch.full((lines, transport.size, step), 255, dtype=torch.uint8, device=device)
        strided[:, :, :width] = torch.stack([block.view(lines, width) for block in blocks], 1)
        across = transport.size * step
        leaving = Strips(strided, tuple(Strip(r, r * step, offset, lines, width, across, width) for r in ranks))
    else:
        leaving = Parts(torch.cat(blocks), tuple(Part(r, r * size, (r + 1) * size, offset) for r in ranks))
    transport.begin(b"exchange", size)
    received = transport.receive_buffer(transport.size * size, device, rank, 0)
    arriving = Parts(received, tuple(Part(r, r * size, (r + 1) * size, r * size) for r in ranks))
    exchange = transport.exchange([leaving], [arriving], "to all ranks at once", exclusive=exclusive)
    exchange.copy_local()
    exchange.wait()
    exchange.wait_sent()
    leaving.buffer.fill_(0)
    came = received.clone()
    transport.end()
    if any(not torch.equal(came[r * size : (r + 1) * size], sent(r, rank)) for r in node):
        options = (
            "" if exclusive else " concurrently with a kernel",
            "" if ranks_per_node == transport.size else f" inside nodes of {ranks_per_node}",
            " with strided sends" if is_strided else "",
        )
        return f"an exchange{''.join(options)} received other bytes"
    return ""


def share(transport: Transport, device: torch.device) -> str:
    """Check that every rank gets the bytes of all ranks, in the order of ranks, outside of a pass and inside."""
    for turn, count in enumerate((1, 32, 4096)):
        if turn:
            transport.begin(b"share")
        found = transport.share(bytes([100 * turn + transport.rank]) * count, "share")
        if turn:
            transport.end()
        if found != [bytes([100 * turn + rank]) * count for rank in range(transport.size)]:
            return f"share of {count} bytes returned other bytes, or another order"
    return ""


def mismatch(transport: Transport, device: torch.device) -> str:
    """Check that different calls raise an error on every rank: otherwise the ranks would use each other's blocks."""
    try:
        agree(transport, call_signature({"case": f"that of rank {transport.rank}"}))
    except MismatchError as error:
        sides = (f"that of rank {rank} on rank {rank}" for rank in range(transport.size))
        missing = [side for side in sides if side not in str(error)]
        return f"the error for different calls does not contain {missing[0]!r}" if missing else ""
    return "different calls raised no error"


def unfinished_pass(transport: Transport, device: torch.device) -> str:
    """Check that no pass begins before the previous one has ended: it would receive that one's messages."""
    transport.begin(b"unfinished_pass")
    try:
        transport.begin(b"unfinished_pass")
    except CommunicationError:
        return ""
    finally:
        transport.end()
    return "a pass began before the previous one had ended"


JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        rank_numbers,
        message_sizes,
        message_order,
        all_to_all,
        all_gather,
        ring_laps,
        distinct_buffers,
        stream_order,
        reuse_after_wait,
        late_rank,
        exchange,
        share,
        mismatch,
        unfinished_pass,
    )
}
