"""Test process groups that send messages by kernels. The simulation follows torch's rule for the first call.

"If this API call is the first collective call in the group, all ranks of the group must participate" (its
`batch_isend_irecv`). Such a group connects in this call, and early ranks wait for the rest.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.comm import torch_dist
from burst_portable.comm.agreement import call_signature
from burst_portable.comm.local import run_transports
from burst_portable.comm.torch_dist import StoreExchange, TorchDistTransport
from burst_portable.config import Config
from burst_portable.errors import CommunicationError, LayoutError
from burst_portable.runtime import autograd

RANKS = 3


class Batched(TorchDistTransport):
    """A transport over a simulated process group whose ranks are threads."""

    def __init__(self, local):
        super().__init__(local, "nccl", batched=True)
        self.local = local

    def share(self, data, label="share", timeout=None):
        return self.local.share(data, label, timeout)


@pytest.fixture
def asked(monkeypatch):
    """Record the batches of the ranks. The first batch of a rank waits for those of all other ranks."""
    connected, batches = threading.Barrier(RANKS), []

    def batch(ops):
        local = ops[0].group
        if not any(rank == local.rank for rank, _ in batches):
            connected.wait(2)
        batches.append((local.rank, len(ops)))
        ways = [[(op.tensor, op.peer) for op in ops if op.send == way] for way in (True, False)]
        leaving, arriving = local.post(*([torch_dist.Message(*one) for one in way] for way in ways))
        return [*leaving, *arriving]

    stand_in = SimpleNamespace(
        isend=True,
        irecv=False,
        P2POp=lambda send, tensor, group, group_peer: SimpleNamespace(
            send=send, tensor=tensor, group=group, peer=group_peer
        ),
        batch_isend_irecv=batch,
        get_rank=lambda local: local.rank,
        get_world_size=lambda local: local.size,
    )
    monkeypatch.setattr(torch_dist, "dist", stand_in)
    monkeypatch.setattr(torch_dist, "exchange_error_notes", lambda *_: "")
    return batches


def test_named_error_without_message_names_exception_type(monkeypatch):
    monkeypatch.setattr(torch_dist, "exchange_error_notes", lambda *_: "")
    told = str(torch_dist.named_error(RuntimeError(), "rank 0, forward step 1", None))
    assert told == "rank 0, forward step 1 failed; got RuntimeError; look at the output of that rank"


def test_rank_without_messages_connects(asked):
    """The first rank has a document by itself; the remaining ranks share one."""
    mask, generator = bp.Mask.documents((0, 8, 24)), torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 24, heads, 8, generator=generator) for heads in (4, 2, 2)]

    def work(local):
        transport = Batched(local)
        mesh = bp.Mesh(local.rank, RANKS, lambda _: transport)
        shards = [bp.shard(x, mesh, layout="contiguous").requires_grad_() for x in whole]
        out = bp.attention(*shards, mask=mask, mesh=mesh, strategy="ring", layout="contiguous")
        out.sum().backward()
        return out.detach(), shards[1].grad

    alone = [x.clone().requires_grad_() for x in whole]
    out = bp.attention(*alone, mask=mask, mesh=bp.Mesh.single())
    out.sum().backward()
    outs, grads = zip(*run_transports(RANKS, work, timeout=5.0), strict=True)
    torch.testing.assert_close(torch.cat(outs, 1), out.detach())
    torch.testing.assert_close(torch.cat(grads, 1), alone[1].grad)
    assert [sum(rank == r for rank, _ in asked) for r in range(RANKS)] == [1, 4, 4], "once, and only where it is new"


class Asking(Batched):
    """Agree through a store, as ranks with device messages do."""

    share = TorchDistTransport.share


def test_rank_with_undelivered_error_cannot_make_next_call(asked, monkeypatch):
    """Otherwise the other ranks would match its next rows with the failed call."""
    store = dist.HashStore()
    monkeypatch.setattr(torch_dist, "store_exchange", lambda group: StoreExchange(store, group.rank, group.size))

    def work(local):
        transport = Asking(local)
        mesh = bp.Mesh(local.rank, RANKS, lambda _: transport, config=Config(timeout=0.4))

        def call(rows=8):
            x = torch.ones(1, rows, 2, 8)
            return bp.attention(x, x, x, mask="full", mesh=mesh, strategy="ring", seq_len=24)

        call()
        if local.rank == 1:
            with pytest.raises(LayoutError, match="rank 1 holds a different number of rows"):
                call(rows=7)
        with pytest.raises(CommunicationError) as raised:
            call()
        return str(raised.value)

    told = run_transports(RANKS, work, timeout=1.0)
    assert told[1].startswith("rank 1: the last exchange between passes has not ended")
    assert all(told[rank].startswith(f"rank {rank}, forward step ") for rank in (0, 2))


@pytest.mark.parametrize(("index", "current"), [(1, 1), (0, 0), (None, 0)])
def test_pass_begins_on_device_of_its_tensors(index, current, monkeypatch):
    """NCCL rejects two ranks that connect on the same current device."""
    at, begun = [0], []

    @contextmanager
    def device_index(number):
        at[0], before = number, at[0]
        yield
        at[0] = before

    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: at[0])
    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(autograd, "agree", lambda *_, **__: None)
    transport = SimpleNamespace(size=2, check_in_sync=lambda: None, begin=lambda *_: begun.append(at[0]))
    forward, call = SimpleNamespace(signature=call_signature({}), bytes_per_sender=0), SimpleNamespace(dropout=None)
    prepared = SimpleNamespace(transport=transport, forward=forward, kernel_call=call)
    autograd.begin(prepared, torch.device("cpu" if index is None else "cuda", index))
    assert begun == [current]
    assert at == [0]
