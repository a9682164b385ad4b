"""Test that the next call of a rank raises after an error within a call, before it sends anything."""

from __future__ import annotations

import contextlib
import json
from itertools import product

import pytest

import burst_portable as bp
from burst_portable.comm.base import Transport, WrappedTransport
from burst_portable.comm.local import Fabric, LocalTransport, run_transports
from burst_portable.comm.peer_copy import PeerCopyTransport
from burst_portable.comm.two_levels import TwoLevelTransport
from burst_portable.errors import CommunicationError
from tests.support.after_errors import CALLS, GLOO, RANKS, play
from tests.support.fork_server import run_program
from tests.support.thread_peers import ThreadPeers, World

ENDED = "CommunicationError: rank 1: the last {} has not ended; its messages would mix with those of this call"
IN_PASS, BETWEEN = ENDED.format("pass"), ENDED.format("exchange between passes")


class Asking(LocalTransport):
    """Agree by messages, as transports of processes do."""

    share = Transport.share


def on_threads(before: str, at: int, after: str, wrap=lambda transport: transport) -> list[list[str]]:
    def work(transport):
        transport = wrap(transport)
        mesh = bp.Mesh(transport.rank, RANKS, lambda _: transport)
        return play(mesh, transport, before, at, after, mesh)

    return run_transports(RANKS, lambda one: work(Asking(one.fabric, one.rank)), timeout=0.3)


def check(found: list[list[str]], says: str) -> None:
    """Check that rank 1's second call raises and that rank 0, which got no report, has no wrong result."""
    (first, second), (failed, refused) = found
    assert failed == "Planted: "
    assert refused.startswith(says)
    assert "wrong" not in (first, second)
    assert second not in ("", "right")


@pytest.mark.parametrize("after", [name for name in CALLS if name != "unshard_wrong_rows"])
@pytest.mark.parametrize(("before", "at"), [*product(CALLS, (1, 2))][:8])
def test_call_after_error_raises(before, at, after):
    check(on_threads(before, at, after), IN_PASS if (before, at) == ("attention", 2) else BETWEEN)


@pytest.mark.parametrize("before", ["attention", "unshard"])
def test_wrapped_transport_rejects_call_after_error(before):
    """The agreement check is not posted through the wrapper."""
    check(on_threads(before, 1, "unshard", WrappedTransport), IN_PASS if before == "attention" else BETWEEN)


def alone() -> LocalTransport:
    return LocalTransport(Fabric(1, 1.0), 0)


def fail_in_a_pass(transport: Transport) -> None:
    transport.begin()


def fail_between(transport: Transport) -> None:
    with contextlib.suppress(RuntimeError), transport.between_passes():
        raise RuntimeError


def leave_out(transport: Transport) -> None:
    transport.mark_out_of_sync()


AROUND = {
    "two levels": lambda wrapped: TwoLevelTransport(wrapped, alone, 1),
    "peer copies": lambda wrapped: PeerCopyTransport(ThreadPeers(World(1), 0), wrapped),
    "wrapped": WrappedTransport,
}


@pytest.mark.parametrize("fail", [fail_in_a_pass, fail_between, leave_out])
@pytest.mark.parametrize("around", AROUND)
def test_failed_exchange_marks_wrapped_transport_out_of_sync(around, fail):
    """Other meshes of the process group see the unfinished exchange."""
    wrapped = alone()
    outer = AROUND[around](wrapped)
    outer.begin()
    outer.end()
    wrapped.check_in_sync()
    fail(outer)
    for transport in (wrapped, outer):
        with pytest.raises(CommunicationError, match="has not ended"):
            transport.check_in_sync()


def test_pass_that_fails_while_connecting_is_unfinished():
    def connect() -> Transport:
        raise RuntimeError

    wrapped = alone()
    with pytest.raises(RuntimeError):
        TwoLevelTransport(wrapped, connect, 1).begin()
    assert wrapped.unfinished() == "pass"


def test_rejected_call_after_error_raises_own_error():
    """The other rank would mistake the error for messages of the pass."""
    _, (failed, refused) = on_threads("attention", 2, "unshard_wrong_rows")
    assert failed == "Planted: "
    assert refused.startswith("LayoutError: rank 1 holds a different number of rows")


@pytest.mark.slow
def test_call_after_error_raises_over_gloo(tmp_path):
    """Before, messages of other sizes ended rank 1 by SIGABRT, and rank 0 took shorter ones for blocks.

    In the last cases, the second call uses another mesh of the group.
    """
    done = run_program("tests.support.after_errors", tmp_path, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    for number, (before, at, _) in enumerate(GLOO):
        found = [json.loads((tmp_path / f"{number}rank{rank}.json").read_text()) for rank in range(RANKS)]
        check(found, IN_PASS if (before, at) == ("attention", 2) else BETWEEN)
