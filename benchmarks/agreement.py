"""What it costs that ranks ask before each pass whether they agree: the same passes with and without, in turns.

    python benchmarks/agreement.py [RANKS ...]

Ranks are processes over gloo on this machine. Prints microseconds a pass of a small attention.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import burst_portable as bp
from benchmarks.ranks import leave
from benchmarks.script import count, end
from burst_portable.config import listen_on_loopback
from burst_portable.runtime import autograd

ROUNDS, PASSES = 100, 10
TOLD = "told.txt"


def one_rank(rank: int, ranks: int, folder: str) -> None:
    """Rank 0 leaves what is to be told in a file, for `main` to print: a rank whose print fails ends in a traceback."""
    torch.set_num_threads(1)
    listen_on_loopback("gloo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = bp.Mesh.from_group()
    q = torch.randn(1, 32, 2, 16)  # next to nothing to compute: the difference is then not lost in it
    asking, spent = autograd.agree, {True: [], False: []}

    def passes() -> float:
        dist.barrier()
        started = time.perf_counter()
        for _ in range(PASSES):
            bp.attention(q, q, q, mesh=mesh, strategy="ring")
        return (time.perf_counter() - started) / PASSES * 1e6

    passes()
    for _ in range(ROUNDS):
        for asks in (True, False):
            autograd.agree = asking if asks else lambda *arguments, **options: None
            spent[asks].append(passes())
    if rank == 0:
        # Other work on a machine only adds: the fastest tenth of many short turns is what the code itself takes.
        asked, silent = (statistics.quantiles(spent[asks], n=10)[0] for asks in (True, False))
        said = f"{ranks} ranks: {asked - silent:.0f} us a pass, {asked:.0f} with and {silent:.0f} without"
        Path(folder, TOLD).write_text(said, encoding="utf-8")
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=count, default=[2, 3, 4], metavar="RANKS")
    for ranks in parser.parse_args().ranks:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(one_rank, (ranks, folder), ranks)
            print(Path(folder, TOLD).read_text(encoding="utf-8"), flush=True)


if __name__ == "__main__":
    end(main)
