"""Test ranks with different calls. Each rank raises an error that names both sides, and the group stays usable."""

from __future__ import annotations

import json
import threading
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cpu.backend import CpuBackend
from burst_portable.comm.agreement import agree, call_signature, share_error
from burst_portable.comm.local import run_transports
from burst_portable.config import Config
from burst_portable.errors import BurstError, CommunicationError, LayoutError, MismatchError
from burst_portable.layout import Layout, Segment
from burst_portable.profiling.session import profile
from tests.support.disagreements import DISAGREEMENTS, RANKS, error_of_rank
from tests.support.fork_server import run_program


def check(name: str, said: list[str]) -> None:
    """Check that every rank raised an error that names the different rank and the fact that differs."""
    _, fact = DISAGREEMENTS[name]
    assert all(said), f"{name}: a rank computed in silence: {said}"
    for rank, message in enumerate(said):
        assert fact in message, (name, message)
        assert "rank 1" in message or rank == 1  # rank 1 need not name itself in its own error


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_different_calls_of_threads_raise_mismatch_error(name):
    check(name, bp.run_threads(3, lambda mesh: error_of_rank(mesh, name)))


def test_different_default_lengths_suggest_seq_len():
    """101 tokens are 51 and 50 rows; each rank assumes equal shards."""

    def work(mesh):
        x = bp.shard(torch.ones(1, 101, 1, 8), mesh)
        shown = "tokens: 51 rows x 2 ranks = 102 on rank 0 but 50 rows x 2 ranks = 100 on rank 1"
        with pytest.raises(MismatchError, match=f"{shown}.*pass seq_len="):
            bp.attention(x, x, x, mesh=mesh)
        assert bp.attention(x, x, x, mesh=mesh, seq_len=101).shape == x.shape

    bp.run_threads(2, work)


@pytest.mark.parametrize("mask", ["causal", "full"])
def test_hardware_spec_hint_appears_only_if_masks_agree(mask):
    """`auto` may choose different strategies because of different masks or hardware specs."""

    def work(mesh):
        x = torch.ones(1, 8, 2, 4)
        odd = {"mask": mask, "strategy": "burst"}
        with pytest.raises(MismatchError) as raised:
            bp.attention(x, x, x, mesh=mesh, **(odd if mesh.rank else {"strategy": "ring"}))
        return str(raised.value)

    for message in bp.run_threads(2, work):
        assert "strategy: ring (transfer ring, backward kv) on rank 0 but burst (" in message
        assert ("give all ranks the same BURST_HARDWARE_SPEC" in message) == (mask == "causal")
        assert ("the mask of the unsharded sequence" in message) == (mask != "causal")
        assert message.endswith("all ranks of a mesh must make the same calls in the same order, backward too")


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "usp"])
def test_call_after_failed_pass_raises(strategy, recorded):
    """Rank 1 continues after a local error; it must not get messages of the failed pass."""

    def work(transport):
        post, mesh = transport.post, bp.Mesh(transport.rank, 4, lambda _: transport)
        x = torch.ones(1, 4, 4, 8)

        def failing(*arguments):
            transport.post = post
            raise MemoryError("planted")

        if mesh.rank == 1:
            transport.post = failing
        with profile(mesh=mesh) if recorded else nullcontext():
            with pytest.raises(MemoryError if mesh.rank == 1 else CommunicationError):
                bp.attention(x, x, x, mask="full", mesh=mesh, strategy=strategy)
            for _ in range(2):
                with pytest.raises(CommunicationError, match=rf"^rank {mesh.rank}: the last pass has not ended"):
                    bp.attention(x, x, x, mask="full", mesh=mesh, strategy=strategy)

    run_transports(4, work, timeout=0.5)


@pytest.mark.parametrize(
    "strategy", ["ring", "burst", "double_ring", "usp", bp.make_strategy("ring", transfer="direct")], ids=str
)
def test_segments_of_different_steps_raise_before_the_pass(strategy):
    """Ranks 2 and 3 hold every second row and see keys of rank 1, which has step 1."""
    mixed = Layout("mixed", 32, ((Segment(0, 8),), (Segment(8, 8),), (Segment(16, 8, 2),), (Segment(17, 8, 2),)))
    mask = bp.Mask((bp.Region(8, 16, 0, 8), bp.Region(16, 32, 8, 16)))

    def work(mesh):
        x = torch.ones(1, 8, 2, 8)
        with pytest.raises((LayoutError, MismatchError), match="different steps"):
            bp.attention(x, x, x, mask=mask, mesh=mesh, layout=mixed, strategy=strategy)
        return bp.attention(x, x, x, mask=mask, mesh=mesh, layout="striped", strategy=strategy).shape

    assert bp.run_threads(4, work, timeout=5) == [(1, 8, 2, 8)] * 4


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disagree")
    done = run_program("tests.support.disagreements", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_different_calls_of_processes_raise_mismatch_error(over_gloo, name):
    check(name, [found[name] for found in over_gloo])
    check(name, [found["cached"][name] for found in over_gloo])


def test_different_tokens_come_first_without_consequences(over_gloo):
    for found in over_gloo:
        message = found["length"]
        assert "got tokens: 24 on rank 0, 2 but 27 on rank 1" in message
        assert "another of that name" not in message


def test_processes_with_other_backward_order_raise(over_gloo):
    assert all("backward of the pass: 1 on rank 0, 2 but 2 on rank 1" in found["swapped"] for found in over_gloo)


def test_correct_call_works_after_mismatches(over_gloo):
    assert [found["afterwards"] for found in over_gloo] == ["right"] * 3


def test_equal_masks_and_layouts_may_have_other_names():
    """Ranks compare regions and positions only."""

    def work(mesh):
        mask = bp.Mask(bp.Mask.causal().regions, f"mask of rank {mesh.rank}")
        layout = bp.Layout(f"layout of rank {mesh.rank}", 16, bp.make_layout("zigzag", 16, 2).shards)
        q = torch.ones(1, 8, 2, 4)
        return bp.attention(q, q, q, mask=mask, layout=layout, mesh=mesh, strategy="ring")

    assert all(bool(out.isfinite().all()) for out in bp.run_threads(2, work))


@pytest.mark.parametrize("strategy", ["ring", "burst", "ulysses"])
def test_other_backward_order_raises_mismatch_error(strategy):
    """Two equal calls: the number of the forward pass distinguishes them."""

    def work(mesh):
        q = torch.randn(1, 8, 2, 4, requires_grad=True)
        outs = [bp.attention(q * factor, q, q, mesh=mesh, strategy=strategy) for factor in (1, 2)]
        with pytest.raises(MismatchError, match="backward of the pass: 1 on rank 0 but 2 on rank 1"):
            outs[mesh.rank].sum().backward()

    bp.run_threads(2, work)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_equal_backward_order_on_all_ranks_works(strategy):
    def work(mesh):
        q = torch.randn(1, 8, 2, 4, requires_grad=True)
        outs = [bp.attention(q, q, q, mesh=mesh, strategy=strategy) for _ in range(2)]
        return [torch.autograd.grad(out.sum(), q)[0] for out in reversed(outs)]

    for later, earlier in bp.run_threads(2, work):
        torch.testing.assert_close(later, earlier)


def test_backends_of_different_vendors_raise_mismatch_error(monkeypatch):
    """Two vendors share the device type "cuda" of torch."""
    plain = bp.Mesh.backend_for

    class Other(CpuBackend):
        name = "other"
        capabilities = replace(CpuBackend.capabilities, process_group="xccl")

    def backend_for(mesh, device_type):
        return Other() if threading.current_thread().name == "rank 1" else plain(mesh, device_type)

    monkeypatch.setattr(bp.Mesh, "backend_for", backend_for)

    def work(mesh):
        q = torch.ones(1, 8, 2, 4)
        told = "backend: cpu on rank 0 but other on rank 1; process group: gloo on rank 0 but xccl on rank 1"
        with pytest.raises(MismatchError, match=told):
            bp.attention(q, q, q, mesh=mesh)

    bp.run_threads(2, work)


def test_value_that_is_not_a_tensor_raises_on_all_ranks():
    def work(mesh):
        q = torch.ones(1, 8, 2, 4)
        bp.attention(q, q, q, mesh=mesh)
        mine = "q" if mesh.rank else q
        with pytest.raises((BurstError, AttributeError)) as caught:
            bp.attention(mine, mine, mine, mesh=mesh)
        return str(caught.value)

    assert "rank 1 refused" in bp.run_threads(2, work)[0]


def test_mismatch_of_call_kinds_lists_shared_fields_only():
    def work(mesh):
        x = torch.ones(1, 8, 2, 4)
        with pytest.raises(MismatchError) as caught:
            bp.attention(x, x, x, mesh=mesh) if mesh.rank else bp.unshard(x, mesh, seq_len=16, layout="contiguous")
        return str(caught.value)

    for message in bp.run_threads(2, work):
        assert (
            "got pass: unshard on rank 0 but forward on rank 1; layout: contiguous on rank 0 but zigzag on" in message
        )
        assert "- on rank" not in message


def test_skipped_agreement_check_misses_mismatch():
    """Without the check, the same mismatch gives wrong numbers."""

    def work(mesh):
        mesh.transport("cpu").share = lambda data, *_: [data] * mesh.size  # simulates equal answers of all ranks
        return error_of_rank(mesh, "scale")

    assert not all(bp.run_threads(3, work))


def test_bytes_that_a_transport_did_not_write_are_named():
    """The conformance suite fills fresh memory with ones; the message named 18446744073709551615 passes."""

    def work(mesh):
        transport = mesh.transport("cpu")
        transport.share = lambda data, *_: [b"\xff" * len(data), data]  # a receive from rank 0 without a wait
        with pytest.raises(CommunicationError, match="the 48 bytes received from rank 0 are all equal; got ffffffff"):
            agree(transport, call_signature({"a": "b"}))

    bp.run_threads(2, work)


def test_agreement_costs_one_exchange():
    def work(mesh):
        transport = mesh.transport("cpu")
        asked = []
        share = transport.share
        transport.share = lambda *a, **k: (asked.append(1), share(*a, **k))[1]
        agree(transport, call_signature({"a": "b"}))
        return len(asked)

    assert bp.run_threads(3, work) == [1, 1, 1]


def test_share_error_without_peer_raises_own_error():
    """Rank 1 never calls; rank 0 raises its own error after the timeout at the latest."""

    def work(mesh):
        mesh.config = Config(timeout=0.2)
        if mesh.rank == 0:
            q = torch.randn(1, 8, 2, 4)
            with pytest.raises(ValueError, match="did you mean 'ring'"):
                bp.attention(q, q, q, mesh=mesh, strategy="rng")
        return True

    assert bp.run_threads(2, work, timeout=0.2) == [True, True]


def test_share_error_waits_for_given_timeout():
    """The timeout of the transport does not apply."""
    told = threading.Event()

    def work(transport):
        if transport.rank == 1:
            assert told.wait(30)
            return
        began = time.monotonic()
        share_error(transport, ValueError("mine"), timeout=0.1)
        told.set()
        assert time.monotonic() - began < 5

    run_transports(2, work, timeout=10)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (({"mask": "x" * 5000}, {"mask": "x" * 5000 + "y"}), "facts that were too long to show"),
        (({"mask": "x" * 5000}, {"pass": "forward", "mask": "full"}), r"facts: {.* on rank 0 but - on rank 1.*pass: "),
    ],
)
def test_agreement_truncates_long_facts(facts, message):
    """Truncated facts are not valid JSON."""

    def work(transport):
        with pytest.raises(MismatchError, match=message):
            agree(transport, call_signature(facts[transport.rank]))

    run_transports(2, work)


def test_default_and_given_lengths_agree_if_equal():
    """Only the number of tokens of the sequence is compared, not how a rank got it."""

    def work(mesh):
        q = torch.ones(1, 8, 2, 4)
        given = {"seq_len": 24} if mesh.rank == 1 else {}
        assert bp.attention(q, q, q, mesh=mesh, **given).shape == q.shape
        longer = {"seq_len": 27} if mesh.rank == 1 else {}
        rows = torch.ones(1, 9, 2, 4) if mesh.rank == 1 else q
        told = r"tokens: 8 rows x 3 ranks = 24 on rank 0, 2 but 27 on rank 1"
        with pytest.raises(MismatchError, match=told):
            bp.attention(rows, rows, rows, mesh=mesh, **longer)

    bp.run_threads(3, work)
