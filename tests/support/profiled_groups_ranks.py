"""Run the ranks of tests/profiling/test_session_groups.py: two sequence groups of two ranks under data parallelism.

python -m tests.support.profiled_groups_ranks FOLDER

Each process writes the results of its sessions. Kernels are slow on global rank 3, the second rank of the second
group.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.config import Config
from burst_portable.errors import BurstError
from tests.support.forked import run_forked

RANKS, SLOW_RANK, DELAY = 4, 3, 0.05
MISSED = 2.0  # seconds that a rank waits for a rank that never arrives


def slow_kernel() -> None:
    fast = CpuFlashKernel.attend

    def slow(*arguments, **options):
        time.sleep(DELAY)
        return fast(*arguments, **options)

    CpuFlashKernel.attend = slow


def call(mesh: bp.Mesh) -> None:
    bp.attention(*(torch.randn(1, 64, 2, 16) for _ in range(3)), mesh=mesh, mask="full", strategy="ring")


def error_text(work: Callable[[], object]) -> str:
    try:
        work()
    except BurstError as error:
        return str(error)
    return ""


def run_sessions(mesh: bp.Mesh) -> dict[str, object]:
    call(mesh)
    with bp.profile() as session:
        for _ in range(3):
            call(mesh)
    report = session.report()
    found: dict[str, object] = {"report": report and report.data}
    found["everybody"] = error_text(lambda: session.report(bp.Mesh.from_group()))
    with bp.profile() as several:
        call(mesh)
        call(bp.Mesh.single())
    found["several"] = error_text(several.report)
    one = several.report(mesh)
    found["one of several"] = one and one.data
    with bp.profile() as empty:
        pass
    found["empty"] = error_text(empty.report)
    return found


def error_without_peer(mesh: bp.Mesh) -> str:
    """Return the error of a rank whose neighbor does not call report: rank 1 of group 1, rank 0 of group 2.

    This must be the last call on its group, whose messages are out of sync afterwards.
    """
    with bp.profile() as session:
        call(mesh)
    if mesh.rank == 1 - mesh.global_ranks[0] // 2:
        return ""
    return error_text(session.report)


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)  # forked ranks have one random state, and would draw the same shards
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    if rank == SLOW_RANK:
        slow_kernel()
    found = run_sessions(bp.Mesh.from_device_mesh(grid, "sequence"))
    found["missing"] = error_without_peer(bp.Mesh.from_device_mesh(grid, "sequence", config=Config(timeout=MISSED)))
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    run_forked(RANKS, main, Path(sys.argv[1]))
