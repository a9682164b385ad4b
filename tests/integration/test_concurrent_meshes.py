"""Test concurrent models, separate or overlapping groups, and threads: they share no buffers, and a shared pool is
detected.
"""

from __future__ import annotations

import json
from functools import partial

import pytest

import burst_portable as bp
from burst_portable.comm.local import LocalTransport, run_transports
from tests.support.concurrent_meshes import GROUPS, RANKS, Delaying, Pool, compare, run_concurrently
from tests.support.fork_server import run_program


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run_concurrently")
    done = run_program("tests.support.concurrent_meshes", folder, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.mark.slow
def test_concurrent_process_groups_are_correct(over_gloo):
    for rank, found in enumerate(over_gloo):
        assert found["right"] == {name: 0 for name, ranks in GROUPS.items() if rank in ranks}


def test_buffer_pool_shared_by_groups_is_detected(over_gloo):
    """Results are correct for one group at a time and wrong for several."""
    assert [found["pool, one at a time"] for found in over_gloo] == [{"model": 0}] * RANKS
    assert (
        sum(sum(wrong.values()) for found in over_gloo for wrong in found["pool, at once"]) > 0
    )  # they collide at random


def on_threads(ranks: int, seed: int, pool: Pool | None) -> int:
    """Run a model on ranks that are threads, and return the number of wrong attention results of all ranks."""

    def work(transport: LocalTransport) -> int:
        delaying = Delaying(transport, 10 * seed + transport.rank, pool)
        return compare(bp.Mesh(transport.rank, ranks, lambda _: delaying), seed, 4)

    return sum(run_transports(ranks, work))


@pytest.mark.parametrize("seed", range(2))
def test_concurrent_thread_meshes_are_correct(seed):
    work = {str(n): partial(on_threads, ranks, seed + n, None) for n, ranks in enumerate((2, 3, 2))}
    assert set(run_concurrently(work).values()) == {0}


def test_buffer_pool_shared_by_threads_is_detected():
    assert on_threads(2, 0, Pool(2)) == 0
    pool = Pool(2)
    tries = (
        run_concurrently({str(n): partial(on_threads, 2, seed + n, pool) for n in range(3)}) for seed in range(0, 15, 3)
    )
    assert any(sum(wrong.values()) for wrong in tries)  # threads collide at random, so there are a few tries
