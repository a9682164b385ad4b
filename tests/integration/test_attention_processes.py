"""Test attention on processes over gloo against the oracle. One group of processes runs all cases of this file."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.fork_server import run_program

RANKS = 4


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return the errors of every rank, by case."""
    folder = tmp_path_factory.mktemp("gloo")
    done = run_program("tests.support.gloo_ranks", RANKS, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


def test_attention_processes_match_oracle(answers):
    for rank, found in enumerate(answers):
        assert len(found["cases"]) >= 12
        assert {case: wrong for case, wrong in found["cases"].items() if wrong} == {}, f"rank {rank}"


def test_sub_groups_of_device_mesh_have_own_sequences(answers):
    """Data parallel 2 x sequence parallel 2: each pair of ranks has its own sequence."""
    assert [found["sub_groups"] for found in answers] == [{}] * RANKS


def test_megatron_block_equals_one_device(answers):
    """Heads over an axis of two or four ranks, tokens over the other and, around the block, over both axes."""
    for found in answers:
        assert len(found["megatron"]) == 3
        for axes, errors in found["megatron"].items():
            assert errors.keys() == {"y", "dx", "dw0", "dw1", "dw2", "dw3"}
            assert max(errors.values()) < 1e-12, axes


def test_all_reduce_accepts_device_mesh_and_groups(answers):
    """The group may be a DeviceMesh of one axis, a process group, or the default group of all four ranks."""
    pairs = [11.0, 11.0, 1100.0, 1100.0]
    assert [found["summed"] for found in answers] == [[pair, pair, 1111.0, pair] for pair in pairs]


def test_second_sum_over_another_mesh_of_the_group_raises(answers):
    """A mesh and mesh=None are two objects. The second sum multiplied the gradient by the ranks, without an error."""
    for answer in answers:
        first, second, averaged, gradient = answer["second sums"]
        assert "are sums over the ranks already" in first
        assert "are sums over the ranks already" in second
        assert "multiplied by the number of ranks" in averaged
        assert float(gradient) == RANKS


def test_nodes_have_separate_connections(answers):
    """Messages between nodes {0, 1} and {2, 3} use the other group, also outside of rings."""
    for rank, found in enumerate(answers):
        far = [other for other in range(RANKS) if other // 2 != rank // 2]
        assert found["two_levels"] == {"wrong": {}, "near": [rank ^ 1], "far": far}


def test_connected_mesh_of_destroyed_group_raises(answers):
    """The connections of gloo outlive its group, so these calls ran."""
    for rank, found in enumerate(answers):
        message = f"rank {rank}: this rank has destroyed the process group; make a new Mesh of an existing one"
        assert found["destroyed"] == [message] * 3


def test_sent_bytes_equal_plan(answers):
    for found in answers:
        assert found["sent"] == found["planned"]
        assert found["sent"] > 0


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("grad", r"transformed by torch\.func"),
        ("vmap", r"transformed by torch\.func"),
        ("fake", "tensors without data cannot be sent"),
        ("export", "tensors without data cannot be sent"),
        ("trace", "attention cannot be traced"),
        ("tangent", "no forward-mode derivative"),
        ("full tensors", "all ranks hold the same V"),
        ("full tensors of a module", "all ranks hold the same V"),
        ("sums", r"shape: \(1,\) on rank 0 but \(2,\) on rank 1"),
    ],
)
def test_errors_reach_all_processes(answers, what, words):
    for found in answers:
        assert re.search(words, found["refused"][what])


def test_late_transfer_names_rank_step_and_peer(answers):
    """The error of a late message names rank, step and peer."""
    message = answers[0]["late"]
    assert "rank 0" in message
    assert "step 0" in message
    assert "rank 1" in message
