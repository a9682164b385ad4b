"""Test that a report on rank processes names the failed rank and the failing line of the backend."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from types import SimpleNamespace

import pytest

from burst_portable.conformance.base import describe_error
from burst_portable.conformance.processes import RankError, collect

CAME = (True, "shard")
LOST = (False, (True, "PeerLostError: receiving from rank 1 failed"))
OWN = (False, (False, "KeyError: 'lane 7' (in wire.py:95)"))


def collected(*said):
    """Return the collected results of simulated ranks.

    A tuple is a report, None is silence, and an integer is an exit code.
    """
    ends, pipes, ranks = [], [], []
    for word in said:
        mine, theirs = multiprocessing.Pipe(duplex=False)
        if isinstance(word, tuple):
            theirs.send_bytes(pickle.dumps(word))
        elif word is not None:
            theirs.close()
        ends.append(theirs)
        pipes.append(mine)
        ranks.append(SimpleNamespace(join=lambda seconds: None, exitcode=word))
    return collect(pipes, ranks, start=0.2, report_timeout=0.1)


def test_collected_returns_results_in_rank_order():
    assert collected((True, "a"), (True, "b"), (True, "c")) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("said", "text"),
    {
        "its own error before a lost peer": ((LOST, OWN, LOST), "rank 1: KeyError: 'lane 7' (in wire.py:95)"),
        "a process that ended": ((LOST, -11), "rank 1: ended without a report; exit code -11"),
        "one that hangs": ((LOST, None), f"rank 0: {LOST[1][1]}; rank 1 did not report"),
        "one that hangs, unnoticed": ((CAME, None), "rank 1 did not report within 0.2 s"),
    }.values(),
)
def test_collected_names_rank_at_fault(said, text):
    with pytest.raises(RankError) as caught:
        collected(*said)
    assert str(caught.value) == text


def test_raised_names_file_and_line():
    def driver():
        raise OSError("link\nis down")

    with pytest.raises(OSError, match="link") as caught:
        driver()
    line = driver.__code__.co_firstlineno + 1
    assert describe_error(caught.value) == f"OSError: link is down (in {__file__}:{line})"


def test_describe_error_skips_the_standard_library():
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("x")  # raised inside the standard library
    assert f"(in {__file__}:" in describe_error(caught.value)
