"""Run a case of Trainer that is not in the usual tests: the ranks of tests/integration/test_data_parallel.py.

python -m tests.support.trainer_ranks FOLDER CASE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.forked import run_forked
from tests.support.trainer_cases import FULL, RANKS, results


def main(rank: int, folder: Path, name: str, ranks: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused, because the store is a file
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(results(folder / name, **FULL[name]), folder / f"{name} {rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    _, path, case = sys.argv
    count = FULL[case].get("ranks", RANKS)
    run_forked(count, main, Path(path), case, count)
