"""Test peer copies between threads: late ranks do not change results, and planted bugs are detected."""

from __future__ import annotations

import time

import pytest
import torch

import burst_portable as bp
from burst_portable.comm import peer_copy
from burst_portable.comm.base import Message, Part, Parts, Strips
from burst_portable.comm.local import run_transports
from burst_portable.comm.peer_copy import (
    EXCHANGES,
    MESSAGES,
    PeerCopyTransport,
    arrival_flag,
    exchange_flags,
    flags,
    free_flag,
    peer_of,
)
from burst_portable.config import Config
from burst_portable.conformance.cases import Case
from burst_portable.conformance.exchanges import JOBS
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import (
    CommunicationError,
    CommunicationTimeoutError,
    InputError,
    MismatchError,
    UnsupportedError,
)
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.messages import inboxes
from burst_portable.runtime.exchange_parts import can_send_strided
from tests.support.attention_cases import expected, make_inputs, on_one_rank
from tests.support.thread_peers import ThreadPeers, World, run_peers

LOCAL_LAST = "ring(transfer=direct, prefetch_steps=64, local_block_order=last)"
BURST_ONE_LAUNCH = "burst(transfer=direct, prefetch_steps=64, blocks_per_launch=64)"
RING_TWO_BLOCKS = "ring(transfer=direct, blocks_per_launch=2)"
CASES = [
    Case(mask="causal", strategy="ring(transfer=direct)", ranks=3, batch=2),
    Case(mask="documents", layout="document_zigzag", strategy="burst(transfer=direct)", ranks=4, heads="mha"),
    Case(mask="window", layout="contiguous", strategy="ring(transfer=direct)", ranks=4, dtype=torch.bfloat16),
    Case(mask="causal", strategy="ulysses", ranks=3, heads="gqa", sinks=True),
    Case(mask="causal", strategy="ulysses", ranks=4, heads="mqa"),
    Case(mask="causal", layout="contiguous", strategy="ulysses", ranks=4, heads="mha", batch=1, length=64),
    Case(mask="custom", layout="striped", strategy="ring", ranks=3),
    Case(mask="causal", strategy=RING_TWO_BLOCKS, ranks=4, batch=2),
    Case(mask="causal", strategy=LOCAL_LAST, ranks=4, heads="mha"),
    Case(mask="documents", strategy=BURST_ONE_LAUNCH, ranks=4, dtype=torch.bfloat16),
    Case(mask="documents", layout="whole_documents", strategy=LOCAL_LAST, ranks=3),  # one document is split
    # Several gradients are returned at once. These sizes leave gaps between messages in the inbox.
    Case(mask="full", strategy=RING_TWO_BLOCKS, ranks=4, heads="4x1x8x8", batch=1, length=21),
    Case(mask="full", strategy=BURST_ONE_LAUNCH, ranks=4, heads="4x1x8x8", batch=1, length=21),
    Case(mask="window_both", strategy="ring", ranks=4, heads="4x1x8x8", batch=1, length=31),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_peer_copy_attention_matches_oracle(case):
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)
    for answer in run_peers(World(case.ranks), lambda mesh: on_one_rank(mesh, case, inputs)):
        assert find_violations(answer, exact, plain, case.dtype) == {}


@pytest.mark.parametrize("seed", range(3))
def test_late_ranks_do_not_change_results(seed):
    """Passes of changing sizes with random delays are bitwise equal to passes without delay."""
    cases = [CASES[0], Case(mask="causal", strategy="burst(transfer=direct)", ranks=3), CASES[3], CASES[0]]

    def work(mesh):
        return [on_one_rank(mesh, case, make_inputs(case)).quantities() for case in cases]

    calm = run_peers(World(3), work)
    late = run_peers(World(3, delay=0.004, seed=seed), work)
    for before, after in zip(calm, late, strict=True):
        for one, other in zip(before, after, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("job", JOBS)
def test_transport_jobs_between_and_within_passes(job):
    """Within a pass, all messages use the inboxes and no other pass begins."""

    def work(mesh):
        transport = mesh.transport("cpu")
        between = JOBS[job](transport, torch.device("cpu"))
        if job in ("exchange", "share", "unfinished_pass"):  # these begin their own passes
            return between
        transport.begin(
            bytes_per_sender=1 << (25 if job == "reuse_after_wait" else 22)
        )  # enough for all messages of a job
        within = "" if job in ("ring_laps", "message_order", "mismatch") else JOBS[job](transport, torch.device("cpu"))
        transport.end()
        return between + within

    assert run_peers(World(3), work) == ["", "", ""]


def test_exchange_that_waits_for_all_ranks_is_detected(monkeypatch):
    """Only the given ranks set their flags."""
    flags_of = peer_copy.exchange_flags
    monkeypatch.setattr(peer_copy, "exchange_flags", lambda size, index, _: flags_of(size, index, tuple(range(size))))
    with pytest.raises(CommunicationTimeoutError, match=r"rank \d has not sent its message"):
        run_peers(World(3, timeout=1.0), lambda mesh: JOBS["exchange"](mesh.transport("cpu"), torch.device("cpu")))


class Forgetful(ThreadPeers):
    """A planted bug: strided local parts are not copied."""

    def copy_local(self, leaving):
        super().copy_local([one for one in leaving if isinstance(one, Parts)])


def test_exchange_that_omits_local_part_is_detected():
    """The bytes of the last pass at this offset are not accepted."""
    told = run_peers(World(3), lambda mesh: JOBS["exchange"](mesh.transport("cpu"), torch.device("cpu")), Forgetful)
    assert told == ["an exchange concurrently with a kernel with strided sends received other bytes"] * 3


def lap(mesh, transport, number: int, read_late: float) -> bool:
    """Run one pass in which each rank sends a block. Return whether the block received late was of this pass."""
    size, there, back = 4096, (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    transport.begin(b"lap", size)
    came = transport.receive_buffer(size, torch.device("cpu"), back)
    block = torch.full((size,), 16 * mesh.rank + number, dtype=torch.uint8)
    sent, received = transport.post([Message(block, there)], [Message(came, back)], f"lap {number}")
    for handle in (*received, *sent):
        handle.wait()
    time.sleep(read_late)
    right = bool((came == 16 * back + number).all())
    transport.end()
    return right


def laps(mesh) -> bool:
    transport = mesh.transport("cpu")
    # Rank 1 reads late, while rank 0, which sends to it, is already in the next pass.
    right = [lap(mesh, transport, number, 0.05 * (mesh.rank == 1)) for number in range(4)]
    return all(right)


def test_inbox_is_not_overwritten_while_read():
    assert all(run_peers(World(2), laps))


class Eager(ThreadPeers):
    """A planted bug: senders do not wait until the inbox is free."""

    def wait(self, flags, mark, what, *, copying):
        if not copying:
            super().wait(flags, mark, what, copying=False)


def test_sender_that_does_not_wait_overwrites_inbox():
    def work(mesh):
        if mesh.rank:
            return laps(mesh)
        # Here rank 0 receives nothing. In a group of two it would otherwise wait for messages of rank 1.
        transport = mesh.transport("cpu")
        for number in range(4):
            transport.begin(b"lap", 4096)
            block = torch.full((4096,), number, dtype=torch.uint8)
            sent, _ = transport.post([Message(block, 1)], [], f"lap {number}")
            sent[0].wait()
            transport.end()
        return True

    with pytest.raises((AssertionError, CommunicationError)):
        assert all(run_peers(World(2, timeout=1.0), work, Eager))


def test_peer_that_sends_nothing_is_named():
    def work(mesh):
        transport = mesh.transport("cpu")
        transport.begin(b"call", 512)
        if mesh.rank == 0:
            time.sleep(0.4)
            return
        came = transport.receive_buffer(8, torch.device("cpu"), 0)
        _, received = transport.post([], [Message(came, 0)], "forward step 3")
        with pytest.raises(CommunicationTimeoutError, match="rank 1, forward step 3: rank 0 has not sent"):
            received[0].wait()
        with pytest.raises(CommunicationError, match="the last pass has not ended"):  # the pass was never ended
            transport.begin(b"call", 512)

    run_peers(World(2, timeout=0.2), work)


def test_flags_of_another_call_are_not_accepted():
    """Sizes and numbers of passes are equal, so only the flags differ."""

    def work(mesh):
        transport = mesh.transport("cpu")
        transport.begin(b"ab" if mesh.rank else b"cd", 512)
        came = transport.receive_buffer(8, torch.device("cpu"), 1 - mesh.rank)
        block = torch.zeros(8, dtype=torch.uint8)
        _, received = transport.post([Message(block, 1 - mesh.rank)], [Message(came, 1 - mesh.rank)], "forward step 0")
        with pytest.raises(CommunicationTimeoutError, match="forward step 0"):
            received[0].wait()

    run_peers(World(2, timeout=0.2), work)


def test_flags_of_restarted_numbers_are_not_accepted():
    """The same call, after the pass number has wrapped around, with unchanged flags."""

    def work(mesh):
        transport = mesh.transport("cpu")
        device, peer = torch.device("cpu"), 1 - mesh.rank
        for again in (False, True):
            if again:
                transport._number = peer_copy.MARKS - 1
            transport.begin(b"call", 512)
            came = transport.receive_buffer(8, device, peer)
            sends = [] if again else [Message(torch.zeros(8, dtype=torch.uint8), peer)]
            _, (received,) = transport.post(sends, [Message(came, peer)], "forward step 0")
            if again:
                with pytest.raises(CommunicationTimeoutError, match="has not sent"):
                    received.wait()
            else:
                received.wait()
                transport.end()

    run_peers(World(2, timeout=0.2), work)


def test_more_messages_than_flags_raise():
    def work(mesh):
        transport = mesh.transport("cpu")
        transport.begin(b"call", 512)
        for _ in range(MESSAGES):
            transport.receive_buffer(8, torch.device("cpu"), 1 - mesh.rank)
        with pytest.raises(UnsupportedError, match="no space"):
            transport.receive_buffer(8, torch.device("cpu"), 1 - mesh.rank)

    run_peers(World(2), work)


def test_more_exchanges_than_flags_raise():
    def work(mesh):
        transport = mesh.transport("cpu")
        transport.begin(b"call", 64)
        mine = torch.zeros(8, dtype=torch.uint8)
        for number in range(EXCHANGES + 1):
            received = transport.receive_buffer(8 * mesh.size, torch.device("cpu"), mesh.rank, 0)
            there = Parts(mine, tuple(Part(r, 0, 8, 8 * mesh.rank) for r in range(mesh.size)))
            here = Parts(received, tuple(Part(r, 8 * r, 8 * r + 8, 8 * r) for r in range(mesh.size)))
            if number == EXCHANGES:
                with pytest.raises(UnsupportedError, match=f"exchange {number + 1}; allowed: {EXCHANGES} exchanges"):
                    transport.exchange([there], [here], "one too many")
            else:
                transport.exchange([there], [here], "call").wait()

    run_peers(World(2), work)


@pytest.mark.parametrize("size", [1, 2, 8, 70])
def test_flags_identify_peers(size):
    peers = tuple(range(size))
    found = [(arrival_flag(peer, index), peer) for peer in peers for index in range(MESSAGES)]
    found += [(free_flag(size, peer), peer) for peer in peers]
    found += [
        (flag, p) for e in range(EXCHANGES) for flag, p in zip(exchange_flags(size, e, peers), peers, strict=True)
    ]
    assert {flag for flag, _ in found} == set(range(flags(size)))
    assert len(found) == flags(size)
    assert all(peer_of(flag, size) == peer for flag, peer in found)


@pytest.mark.parametrize("strategy", ["ring(transfer=direct)", "burst(transfer=direct)"])
def test_peer_copies_send_bytes_of_plan(strategy):
    case = Case(mask="window", layout="contiguous", strategy=strategy, ranks=4)
    world = World(4)
    run_peers(world, lambda mesh: on_one_rank(mesh, case, make_inputs(case)))
    _, kv_heads, d, _ = case.sizes
    plan = bp.plan(
        seq_len=case.length, ranks=4, heads=case.sizes[0], kv_heads=kv_heads, head_dim=d, batch=case.batch,
        mask=case.make_mask(), strategy=case.make_strategy(), layout=case.make_layout(), itemsize=case.dtype.itemsize,
    )  # fmt: skip
    cost = plan_cost(plan, HardwareSpec(1.0, 1.0))
    assert world.copied == [sum(cost.per_rank[name][r].sent for name in ("forward", "backward")) for r in range(4)]
    # A quarter of the inboxes is that of one rank. Under this window, a rank gets one or two messages.
    assert 4 * inboxes(plan, 0).forward == max(c.received for c in cost.per_rank["forward"])


class PeersBesideThreads(bp.Mesh):
    """A mesh with peer copies for direct messages and the usual transport for the rest, as on GPUs."""

    peers: PeerCopyTransport

    def transport_for(self, device_type, *, direct):
        return (self.peers, "") if direct else super().transport_for(device_type, direct=direct)


def test_peer_copy_ranks_stay_in_sync_after_rejected_call():
    """The failing rank has no peer copies yet and reports its error without them."""
    world = World(2, timeout=3.0)

    def work(local):
        mesh = PeersBesideThreads(local.rank, 2, lambda device_type: local, config=Config(timeout=3.0))
        mesh.peers = PeerCopyTransport(ThreadPeers(world, local.rank), local)
        x = torch.ones(1, 8, 2, 4, requires_grad=True)
        said = []
        for scale in (0.5, "bad" if mesh.rank == 0 else 0.25, 0.5, 0.125):
            try:
                bp.attention(x, x, x, mesh=mesh, strategy="ulysses", scale=scale).sum().backward()
                said.append("")
            except (InputError, MismatchError) as error:
                said.append(str(error))
        return said

    for first, refused, *later in run_transports(2, work, timeout=3.0):
        assert "scale is not a number" in refused
        assert [first, *later] == ["", "", ""]


def test_transport_can_be_named():
    def work(mesh):
        assert isinstance(mesh.transport_for("cpu", direct=True)[0], PeerCopyTransport)
        mesh.config = bp.config.Config(transport="nccl")
        with pytest.raises(ValueError, match="transport"):
            mesh.transport_for("cpu", direct=True)

    run_peers(World(2), work)


def _laid(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same numbers in a larger tensor of NaN."""
    batch, rows, heads, dim = x.shape
    if how == "heads first":
        return x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
    room = torch.full((batch, rows, heads + 3, dim), torch.nan, dtype=x.dtype)
    room[:, :, 2:-1] = x
    return room[:, :, 2:-1]


@pytest.mark.parametrize("heads", ["8x4x16x8", "8x2x16x16"])
@pytest.mark.parametrize(("how", "batch"), [("fused", 2), ("heads first", 2), ("fused", 5)])
def test_rows_are_sent_without_packing(how, batch, heads):
    """Results equal contiguous tensors; only some layouts and large batches are packed."""
    case = Case(mask="causal", layout="contiguous", strategy="ulysses", ranks=4, heads=heads, batch=batch, length=70)
    inputs = make_inputs(case)
    sent = set()

    class Noting(ThreadPeers):
        def copy(self, leaving, *, exclusive):
            sent.update((type(one), exclusive) for one in leaving)
            super().copy(leaving, exclusive=exclusive)

    def work(mesh, laid):
        leaves = [bp.shard(x, mesh, layout="contiguous").detach() for x in (inputs.q, inputs.k, inputs.v)]
        leaves = [(_laid(x, how) if laid else x).requires_grad_() for x in leaves]
        out = bp.attention(*leaves, mask="causal", mesh=mesh, strategy="ulysses", layout="contiguous", seq_len=70)
        dout = bp.shard(inputs.dout, mesh, layout="contiguous")
        return out.detach(), *torch.autograd.grad(out, leaves, _laid(dout, how) if laid else dout)

    plain = run_peers(World(4), lambda mesh: work(mesh, False))
    answers = run_peers(World(4), lambda mesh: work(mesh, True), Noting)
    for one, other in zip(answers, plain, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    packed = how == "heads first" or batch > 4
    assert sent == {(Parts if packed else Strips, True), (Parts, True)}, "there and back"


@pytest.mark.parametrize("rows", [1, 6])
def test_rows_that_engines_cannot_copy_are_packed(rows):
    """One row per rank with overlapping strides, and gradients expanded from one row."""
    case = Case(mask="full", layout="contiguous", strategy="ulysses", ranks=4, heads="8x4x16x8", length=4 * rows)
    inputs = make_inputs(case)

    def work(mesh, odd):
        leaves = [bp.shard(x, mesh, layout="contiguous") for x in (inputs.q, inputs.k, inputs.v)]
        leaves = [(_laid(x, "heads first") if odd else x.contiguous()).requires_grad_() for x in leaves]
        out = bp.attention(*leaves, mask="full", mesh=mesh, strategy="ulysses", layout="contiguous")
        weights = inputs.dout[:, :1]
        dout = weights.expand_as(out) if odd else weights.repeat(1, rows, 1, 1)
        assert odd == ((leaves[0] if rows == 1 else dout).stride(1) < 8 * dout.shape[3])
        return out.detach(), *torch.autograd.grad(out, leaves, dout)

    plain, odd = (run_peers(World(4), lambda mesh, odd=odd: work(mesh, odd)) for odd in (False, True))
    for one, other in zip(plain, odd, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("shape", "strides", "can"),
    [
        ((4, 9, 6, 8), (432, 48, 8, 1), True),
        ((4, 9, 6, 8), (0, 48, 8, 1), True),  # one batch, expanded
        ((4, 9, 6, 8), (432, 47, 8, 1), False),  # rows overlap
        ((4, 9, 6, 8), (432, 0, 8, 1), False),
        ((4, 1, 6, 8), (432, 0, 8, 1), True),
        ((4, 9, 1, 8), (432, 8, 99, 1), True),
        ((4, 9, 6, 8), (432, 8, 72, 1), False),  # heads before rows
        ((4, 9, 6, 8), (432, 48, 8, 2), False),
        ((5, 9, 6, 8), (432, 48, 8, 1), False),
        ((1, 2, 6, 8), (1, (1 << 30) - 1, 8, 1), True),
        ((1, 2, 6, 8), (1, 1 << 30, 8, 1), False),
    ],
)
def test_can_send_strided_accepts_few_lines(shape, strides, can):
    """The lines must fit `comm.base.Strip`, and there must be few."""
    assert can_send_strided(torch.empty_strided(shape, strides, dtype=torch.bfloat16, device="meta")) == can
