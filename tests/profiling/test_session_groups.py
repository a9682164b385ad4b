"""Test sessions without mesh= under data parallelism: sequence groups with equal rank numbers are not mixed."""

from __future__ import annotations

import json

import pytest
import torch

import burst_portable as bp
from burst_portable.profiling.report import Report
from tests.support.fork_server import run_program
from tests.support.profiled_groups_ranks import RANKS
from tests.support.recorded_calls import one_step
from tests.support.synthetic_records import ring


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Run four processes in two groups and return the results of each process."""
    folder = tmp_path_factory.mktemp("groups")
    done = run_program("tests.support.profiled_groups_ranks", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_each_sequence_group_has_its_own_report(results):
    reports = [one["report"] for one in results]
    assert [report is None for report in reports] == [False, True, False, True]
    for report in (reports[0], reports[2]):
        assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
        assert sum(plan["calls"] for plan in report["plans"]) == 3
    assert (reports[2]["summary"]["kind"], reports[2]["summary"]["rank"]) == ("slow rank", 1)


def test_ambiguous_mesh_raises_and_names_argument(results):
    for rank, one in enumerate(results):
        group = "0, 1" if rank < 2 else "2, 3"
        assert "no call of this mesh was recorded" in one["everybody"]
        assert f"mesh= of ranks 0, 1, 2, 3, calls of ranks {group}" in one["everybody"]
        assert "calls of several meshes were recorded" in one["several"]
        assert "pass mesh= to profile() or report()" in one["several"]
        assert "its mesh is unknown" in one["empty"]
        assert "pass mesh= to profile()" in one["empty"]


def test_report_with_mesh_covers_its_calls_only(results):
    for one in (results[0]["one of several"], results[2]["one of several"]):
        assert [rank["rank"] for rank in one["ranks"]] == [0, 1]
        assert [(plan["ranks"], plan["calls"]) for plan in one["plans"]] == [(2, 1)]


def test_rank_missing_from_report_is_named(results):
    assert [bool(one["missing"]) for one in results] == [True, False, False, True]
    for one, absent in ((results[0], 1), (results[3], 0)):
        assert (
            f"checking that all ranks call session.report() or gather(): receiving from rank {absent} took too long"
            in one["missing"]
        )
        assert one["missing"].endswith("; every rank of the mesh must call session.report() or gather()")


def test_rank_threads_use_mesh_of_their_calls():
    def work(mesh):
        with bp.profile() as session:
            one_step(mesh, "ring")
        return session.report()

    report, *others = bp.run_threads(3, work)
    assert others == [None, None]
    assert [rank["rank"] for rank in report.data["ranks"]] == [0, 1, 2]


def test_records_of_several_meshes_raise():
    with pytest.raises(bp.BurstError, match=r"a rank occurs twice.*0, 0, 1, 1.*mesh="):
        Report.of([*ring(2, 3), *ring(2, 3)])


def test_deep_session_of_several_meshes_raises():
    """The tracer's names contain the rank but not the mesh."""
    x = torch.randn(1, 32, 1, 8)
    with bp.profile("kernels") as session:
        bp.run_threads(2, lambda mesh: bp.attention(x, x, x + mesh.rank, mesh=mesh))
        bp.attention(x, x, x, mesh=bp.Mesh.single())
    with pytest.raises(bp.BurstError, match="level 'kernels' cannot separate calls of several meshes"):
        session.records()
