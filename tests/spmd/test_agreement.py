"""Ranks that disagree: every rank raises, naming both sides; no number, no hang. One group survives them all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import burst_portable as bp
from burst_portable.comm.agreement import agree, state
from burst_portable.config import Config
from burst_portable.errors import MismatchError
from tests.spmd.disagreements import DISAGREEMENTS, told_by

ROOT = Path(__file__).parents[2]


def check(name: str, said: list[str]) -> None:
    """Every rank has raised; the odd one names itself or is named, and what differs is told."""
    _, fact = DISAGREEMENTS[name]
    assert all(said), f"{name}: a rank computed in silence: {said}"
    for rank, message in enumerate(said):
        assert fact in message, (name, message)
        assert "rank 1" in message or rank == 1  # its own refusal need not name itself


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_threads_that_disagree(name):
    check(name, bp.run_local(3, lambda mesh: told_by(mesh, name)))


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("disagree")
    command = [sys.executable, "-m", "tests.spmd.disagreements", "3", str(folder)]
    ranks = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(3)]
    try:
        assert [rank.wait(timeout=90) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_processes_that_disagree(over_gloo, name):
    check(name, [found[name] for found in over_gloo])


def test_a_right_call_works_after_all_of_them(over_gloo):
    assert [found["afterwards"] for found in over_gloo] == ["right"] * 3


def test_masks_of_one_name_are_told_apart():
    """Equal names, sizes and bytes: the hash is of every region."""

    def work(mesh):
        mask = bp.Mask.documents((0, 7 if mesh.rank else 8, 24))
        q = bp.shard(torch.randn(1, 24, 2, 4), mesh)
        with pytest.raises(MismatchError, match="same name and other positions"):
            bp.attention(q, q, q, mask=mask, mesh=mesh, strategy="ring")

    bp.run_local(2, work)


def test_a_planted_silence_is_seen():
    """Without the question, the same disagreement gives a number: what the question is for."""

    def work(mesh):
        mesh.transport("cpu").host = False  # the question is skipped
        return told_by(mesh, "scale")

    assert not all(bp.run_local(3, work))


def test_the_question_costs_one_exchange_when_all_agree():
    def work(mesh):
        transport = mesh.transport("cpu")
        asked = []
        share = transport.share
        transport.share = lambda *a, **k: (asked.append(1), share(*a, **k))[1]
        agree(transport, state({"a": "b"}))
        return len(asked)

    assert bp.run_local(3, work) == [1, 1, 1]


def test_a_refusal_with_nobody_there_is_still_the_refusal():
    """Rank 1 never calls: rank 0's own error comes, after the deadline at the latest."""

    def work(mesh):
        mesh.config = Config(deadline=0.2)
        if mesh.rank == 0:
            q = torch.randn(1, 8, 2, 4)
            with pytest.raises(ValueError, match="did you mean 'ring'"):
                bp.attention(q, q, q, mesh=mesh, strategy="rng")
        return True

    assert bp.run_local(2, work, deadline=0.2) == [True, True]
