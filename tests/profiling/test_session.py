"""Test sessions that are nested, closed in another order, marked by rank threads, or opened on some ranks only."""

from __future__ import annotations

import json
import time

import pytest
import torch

import burst_portable as bp
from burst_portable.cli import main
from burst_portable.errors import BurstError, InputError, MismatchError, PeerLostError
from burst_portable.profiling.ablation import ablate
from burst_portable.runtime.prepared_call import call_wrapper


def attend(mesh=None):
    q, k, v = (torch.randn(1, 32, 2, 16, requires_grad=True) for _ in range(3))
    return bp.attention(q, k, v, mesh=mesh) if mesh is not None else bp.attention(q, k, v)


def calls(session):
    (records,) = session.records()
    return len(records.tables["compute"])


def test_rank_threads_mark_their_own_steps():
    def work(mesh):
        for _ in range(5):
            session.mark()
            attend(mesh).sum().backward()

    with bp.profile() as session:
        bp.run_threads(3, work)
        session.mark()  # the thread that opened the session marks it for all
        bp.run_threads(3, attend)
    for one in session.records():
        steps = one.tables["compute"]["train_step"]
        assert sorted(set(steps.tolist())) == [0, 1, 2, 3, 4, 5]
        assert (steps[steps < 5] == sorted(steps[steps < 5])).all()


def test_nested_sessions_record_both():
    with bp.profile() as outer:
        attend()
        with bp.profile("basic") as ranks_per_node:
            for _ in range(3):
                attend()
        attend()
    assert (calls(outer), calls(ranks_per_node)) == (5, 3)
    assert call_wrapper.get() is None


def test_sessions_must_close_in_reverse_order():
    outer, ranks_per_node = bp.profile(), bp.profile()
    outer.__enter__()
    ranks_per_node.__enter__()
    with pytest.raises(InputError, match="not the last one that was opened"):
        outer.__exit__(None, None, None)
    ranks_per_node.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert call_wrapper.get() is None
    with pytest.raises(InputError, match="not open"):
        outer.__exit__(None, None, None)


@pytest.mark.parametrize("which", ["one rank's calls", "one rank's marks"])
def test_different_training_steps_raise(which):
    def work(mesh):
        seen = bp.profile(mesh=mesh)
        alone = mesh.rank == 0 or which == "one rank's marks"
        if alone:
            seen.__enter__()
        attend(mesh)
        if mesh.rank == 0:
            seen.mark()
        attend(mesh)
        if alone:
            seen.__exit__(None, None, None)
        return seen.report()

    with pytest.raises(InputError, match="different training steps") as refused:
        bp.run_threads(2, work)
    assert "2 on rank 0" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"repeat": 1.5}, "repeat must be a positive integer"),
        ({"repeat": True}, "repeat must be a positive integer"),
        ({"repeat": 0}, "repeat must be a positive integer"),
        ({"step": None}, "step must be a function"),
        ({"model": "x"}, "not a torch.nn.Module"),
    ],
)
def test_ablate_rejects_invalid_arguments(changes, told):
    with pytest.raises(InputError, match=told):
        ablate(**{"step": attend, "mesh": bp.Mesh.single(), **changes})


def quickly(work, timeout=30.0):
    """Return class and message of the error on each of three ranks. Assert that no rank waited for the timeout."""

    def told(mesh):
        with pytest.raises(BurstError) as refused:
            work(mesh)
        return type(refused.value), str(refused.value)

    began = time.monotonic()
    found = bp.run_threads(3, told, timeout=timeout)
    assert time.monotonic() - began < timeout / 2
    return found


def test_ablate_with_different_repeat_counts_raises_on_all_ranks():
    def work(mesh):
        bp.profile(mesh=mesh).ablate(lambda: attend(mesh), repeat=1 + mesh.rank % 2)

    for kind, message in quickly(work):
        assert kind is MismatchError
        assert "got repeat: 1 on rank 0, 2 but 2 on rank 1; " in message


def test_ablate_error_of_one_rank_reaches_all_ranks():
    def work(mesh):
        attend(mesh)
        ablate(lambda: attend(mesh), mesh=mesh, repeat=0 if mesh.rank == 1 else 1)

    first, second, third = quickly(work)
    assert second == (InputError, "repeat must be a positive integer; got 0; allowed: an int >= 1")
    for kind, message in (first, third):
        assert kind is MismatchError
        assert f"rank 1 refused: {second[1]}" in message


def test_report_during_attention_of_others_raises():
    def work(mesh):
        with bp.profile() as session:
            attend(mesh)
        session.report() if mesh.rank == 1 else attend(mesh)

    for kind, message in quickly(work):
        assert kind is MismatchError
        assert "pass: forward on rank 0, 2 but session.report() or gather() on rank 1" in message


def test_report_of_some_ranks_names_missing_ranks():
    def work(mesh):
        with bp.profile() as session:
            attend(mesh)
        if mesh.rank == 2:
            with pytest.raises(PeerLostError) as alone:
                session.report()
            return str(alone.value)
        return ""

    assert bp.run_threads(3, work)[2] == (
        "rank 2, checking that all ranks call session.report() or gather(): ranks 0, 1 returned without this call; "
        "all ranks of a mesh must make the same calls in the same order; "
        "every rank of the mesh must call session.report() or gather()"
    )


@pytest.fixture(scope="module")
def report():
    with bp.profile() as session:
        attend().sum().backward()
    return session.report(skip=torch.tensor(0))


@pytest.mark.parametrize("path", ["/", "/no/such/folder/x", "/dev/full", "a" * 300, None, 3.5, b"x", "a\0b"])
def test_report_writers_name_unwritable_file(report, path):
    for write in (report.write_json, report.write_html, report.write_chrome):
        with pytest.raises(InputError, match="this file cannot be written; got "):
            write(path)


def test_edited_report_prints_brackets_literally(report, tmp_path, capsys):
    for rows in ("efficiency", "ring_steps"):
        for row in report.data[rows]:
            row["pass"] = "[/]"
    (tmp_path / "edited.json").write_text(json.dumps(report.data))
    assert main(["profile", str(tmp_path / "edited.json")]) == 0
    assert "rank 0 [/]" in capsys.readouterr().out


def test_profile_writes_markdown_to_standard_output(report, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report.write_json("one.json")
    assert main(["profile", "one.json", "--markdown", "-"]) == 0
    assert capsys.readouterr().out == report.markdown()
    assert main(["profile", "one.json", "--markdown", "-", "--json"]) == 2
    assert "both use standard output" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_profile_rejects_invalid_level():
    for level in ("x" * 100_000, ["kernels"], None):
        with pytest.raises(InputError, match="unknown level") as refused:
            bp.profile(level)
        assert len(str(refused.value)) < 500
