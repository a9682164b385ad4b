"""What a transport must do, as jobs of one rank, on threads or processes: each says what was wrong, or nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

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
    for handles in groups:
        for handle in handles:
            handle.wait()


def numbers(transport: Transport, device: torch.device) -> str:
    """Ranks are numbered 0 to size - 1, each once."""
    mine = torch.full((8,), transport.rank, dtype=torch.uint8, device=device)
    parts = [_empty(transport, 8, device) for _ in range(transport.size)]
    transport.all_gather(mine, parts, "numbers")
    told = [int(part[0]) for part in parts]
    return "" if told == list(range(transport.size)) else f"ranks call themselves {told}"


def sizes(transport: Transport, device: torch.device) -> str:
    """To the next rank and from the one before, from a byte to a few MiB, odd ones too."""
    rank, size = transport.rank, transport.size
    for count in (1, 3, 16, 17, 4096, 65537, 1 << 21):
        out = _bytes(count, 100 * rank + count, device)
        came = _empty(transport, count, device)
        sent, received = transport.post([Message(out, (rank + 1) % size)], [Message(came, (rank - 1) % size)], "sizes")
        _wait(received, sent)
        if not torch.equal(came, _bytes(count, 100 * ((rank - 1) % size) + count, device)):
            return f"{count} bytes came as others"
    return ""


def order(transport: Transport, device: torch.device) -> str:
    """Messages between two ranks stay in order: several in one post, and several posts before the first wait."""
    rank, size = transport.rank, transport.size
    there, back = (rank + 1) % size, (rank - 1) % size
    handles: list[Sequence[Handle]] = []
    came: list[Tensor] = []
    kept: list[Tensor] = []
    for first in (0, 3, 6):
        outs = [torch.full((64,), first + i, dtype=torch.uint8, device=device) for i in range(3)]
        ins = [_empty(transport, 64, device) for _ in range(3)]
        sent, received = transport.post([Message(b, there) for b in outs], [Message(b, back) for b in ins], "order")
        handles += [received, sent]
        came += ins
        kept += outs
    _wait(*handles)
    told = [int(buffer[0]) for buffer in came]
    return "" if told == list(range(9)) else f"messages 0 to 8 came as {told}"


def everyone(transport: Transport, device: torch.device) -> str:
    """All to all, sizes of their own, some of nothing."""
    rank, size = transport.rank, transport.size

    def count(source: int, target: int) -> int:
        return 0 if (source + target) % 3 == 2 else 1 + 7 * source + 31 * target

    sends = [_bytes(count(rank, r), 10 * rank + r, device) for r in range(size)]
    receives = [_empty(transport, count(r, rank), device) for r in range(size)]
    transport.all_to_all(sends, receives, "everyone")
    wrong = [r for r in range(size) if not torch.equal(receives[r], _bytes(count(r, rank), 10 * r + rank, device))]
    return f"all_to_all brought other bytes from ranks {wrong}" if wrong else ""


def gathered(transport: Transport, device: torch.device) -> str:
    """All gather, of sizes of their own, twice on end."""
    rank, size = transport.rank, transport.size
    for turn in range(2):
        receives = [_empty(transport, 5 + 3 * r, device) for r in range(size)]
        transport.all_gather(_bytes(5 + 3 * rank, rank + turn, device), receives, "gathered")
        wrong = [r for r in range(size) if not torch.equal(receives[r], _bytes(5 + 3 * r, r + turn, device))]
        if wrong:
            return f"all_gather brought other bytes from ranks {wrong}"
    return ""


def laps(transport: Transport, device: torch.device) -> str:
    """What arrived is sent on while the next arrives, repeatedly: nothing that is still in use is overwritten."""
    rank, size = transport.rank, transport.size
    for lap in range(6):
        held = _bytes(1025, 50 * lap + rank, device)
        for hop in range(1, size + 1):
            came = _empty(transport, 1025, device)
            sent, received = transport.post(
                [Message(held, (rank + 1) % size)], [Message(came, (rank - 1) % size)], f"hop {hop}"
            )
            _wait(received)
            _wait(sent)
            held = came
        if not torch.equal(held, _bytes(1025, 50 * lap + rank, device)):
            return f"after a lap round all ranks the message had changed (lap {lap})"
    return ""


def apart(transport: Transport, device: torch.device) -> str:
    """Buffers that are held at the same time are memory of their own."""
    held = [transport.buffer(96, device) for _ in range(8)]
    for number, buffer in enumerate(held):
        if buffer.numel() != 96 or buffer.dtype != torch.uint8 or not buffer.is_contiguous():
            return f"buffer(96) gave {tuple(buffer.shape)} {buffer.dtype}"
        buffer.fill_(number)
    told = [int(buffer[0]) for buffer in held]
    return "" if told == list(range(8)) else f"buffers held at once share memory: {told}"


def unchanged(transport: Transport, device: torch.device) -> str:
    """What is sent does not change."""
    rank, size = transport.rank, transport.size
    out = _bytes(2000, rank, device)
    before, came = out.clone(), _empty(transport, 2000, device)
    sent, received = transport.post([Message(out, (rank + 1) % size)], [Message(came, (rank - 1) % size)], "unchanged")
    _wait(received, sent)
    return "" if torch.equal(out, before) else "a message that was sent has changed"


def written_just_before(transport: Transport, device: torch.device) -> str:
    """A message may be written right before it is posted, and used right after waiting: no sync between."""
    rank, size = transport.rank, transport.size
    x = torch.full((512, 512), 1.0 + rank, device=device)
    for _ in range(8):
        x = (x @ x).clamp(1.0 + rank, 1.0 + rank)  # on a device this takes longer than posting does
    out, came = x.view(-1).view(torch.uint8), _empty(transport, x.numel() * 4, device)
    sent, received = transport.post(
        [Message(out, (rank + 1) % size)], [Message(came, (rank - 1) % size)], "written just before"
    )
    _wait(received)
    total = came.view(torch.float32).double().sum()
    _wait(sent)
    out.fill_(0)
    right = (1.0 + (rank - 1) % size) * x.numel()
    return "" if float(total) == right else "a message was read before it was written, or used before it came"


def sent(transport: Transport, device: torch.device) -> str:
    """What is sent may be overwritten once its handle has been waited for, however late the other end is."""
    count = 1 << 24  # more than a link takes before anybody receives: the rest is still in the sender's memory
    if transport.rank == 0:
        out = torch.full((count,), 1, dtype=torch.uint8, device=device)
        leaving, _ = transport.post([Message(out, 1)], [], "sent")
        _wait(leaving)
        out.fill_(0)
    elif transport.rank == 1:
        came = _empty(transport, count, device)
        time.sleep(0.1)
        _, arriving = transport.post([], [Message(came, 0)], "sent")
        _wait(arriving)
        if not bool((came == 1).all()):
            return "a message changed when its sender, who had waited for the handle, wrote over it"
    return ""


def late(transport: Transport, device: torch.device) -> str:
    """A rank that posts late is waited for."""
    rank, size = transport.rank, transport.size
    if rank == size - 1:
        time.sleep(0.1)
    out = torch.full((100,), rank + 1, dtype=torch.uint8, device=device)
    came = _empty(transport, 100, device)
    sent, received = transport.post([Message(out, (rank + 1) % size)], [Message(came, (rank - 1) % size)], "late")
    _wait(received, sent)
    return "" if int(came[0]) == (rank - 1) % size + 1 else "something else came than a late rank sent"


def exchanged(transport: Transport, device: torch.device) -> str:
    """In passes, from all ranks at once, itself too, to places in inboxes; strided sends too if it supports them.

    Alone, and as beside a kernel: a transport may move that in another way. Then inside nodes of two, where the last
    rank may be alone: nobody waits for the ranks of other nodes.
    """
    nodes = sorted({transport.size, min(2, transport.size)}, reverse=True)
    ways = product(nodes, (False, True) if transport.supports_strided_sends else (False,), (True, False))
    wrong = (_exchanged(transport, device, *way, turn) for turn, way in enumerate(ways))
    return next(filter(None, wrong), "")


def _exchanged(
    transport: Transport, device: torch.device, ranks_per_node: int, picked: bool, alone: bool, turn: int
) -> str:
    """Run one pass with one exchange inside nodes of `ranks_per_node` ranks; return what is wrong, or "".

    Bytes that an earlier turn left in a buffer do not count as received.
    """
    lines, width, step = 24, 48, 80  # bytes
    rank, size = transport.rank, lines * width
    node = range(rank - rank % ranks_per_node, min(rank - rank % ranks_per_node + ranks_per_node, transport.size))
    ranks = (*(r for r in transport.others if r in node), rank)
    offset = rank * size

    def sent(source: int, target: int) -> Tensor:
        return _bytes(size, (turn * transport.size + source) * transport.size + target, device)

    blocks = [sent(rank, r) for r in range(transport.size)]
    leaving: Parts | Strips
    if picked:
        apart = torch.full((lines, transport.size, step), 255, dtype=torch.uint8, device=device)
        apart[:, :, :width] = torch.stack([block.view(lines, width) for block in blocks], 1)
        across = transport.size * step
        leaving = Strips(apart, tuple(Strip(r, r * step, offset, lines, width, across, width) for r in ranks))
    else:
        leaving = Parts(torch.cat(blocks), tuple(Part(r, r * size, (r + 1) * size, offset) for r in ranks))
    transport.begin(b"exchanged", size)
    inbox = transport.inbox(transport.size * size, device, rank, 0)
    arriving = Parts(inbox, tuple(Part(r, r * size, (r + 1) * size, r * size) for r in ranks))
    exchange = transport.exchange([leaving], [arriving], "to all ranks at once", alone=alone)
    exchange.copy_own()
    exchange.wait()
    exchange.wait_sent()
    leaving.buffer.fill_(0)
    came = inbox.clone()
    transport.end()
    if any(not torch.equal(came[r * size : (r + 1) * size], sent(r, rank)) for r in node):
        how = (
            "" if alone else " beside a kernel",
            "" if ranks_per_node == transport.size else f" inside nodes of {ranks_per_node}",
            ", of lines that lie apart" if picked else "",
        )
        return f"other bytes came than were sent at once{''.join(how)}"
    return ""


def shared(transport: Transport, device: torch.device) -> str:
    """What each rank says reaches every rank, in the order of ranks, outside a pass and inside."""
    for turn, count in enumerate((1, 32, 4096)):
        if turn:
            transport.begin(b"shared")
        told = transport.share(bytes([100 * turn + transport.rank]) * count, "shared")
        if turn:
            transport.end()
        if told != [bytes([100 * turn + rank]) * count for rank in range(transport.size)]:
            return f"share of {count} bytes gave other bytes than the ranks said, or not in their order"
    return ""


def disagreed(transport: Transport, device: torch.device) -> str:
    """Ranks that make different calls are told so, on every rank: else they would take each other's blocks."""
    try:
        agree(transport, call_signature({"case": f"that of rank {transport.rank}"}))
    except MismatchError as error:
        sides = (f"that of rank {rank} on rank {rank}" for rank in range(transport.size))
        silent = [side for side in sides if side not in str(error)]
        return f"the error of ranks that disagree does not name {silent[0]!r}" if silent else ""
    return "ranks made different calls, and nobody was told"


def unended(transport: Transport, device: torch.device) -> str:
    """No pass begins in one that has not ended: it would take that one's messages for its own."""
    transport.begin(b"unended")
    try:
        transport.begin(b"unended")
    except CommunicationError:
        return ""
    finally:
        transport.end()
    return "a pass began in one that had not ended"


JOBS: dict[str, Job] = {
    job.__name__: job
    for job in (
        numbers,
        sizes,
        order,
        everyone,
        gathered,
        laps,
        apart,
        unchanged,
        written_just_before,
        sent,
        late,
        exchanged,
        shared,
        disagreed,
        unended,
    )
}
