"""Run a script over ranks as torchrun does, but fork them from one process, so that imports run once.

python -m tests.support.ranks_of RANKS MODULE OPTIONS OF ITS main()

`tests/benchmarks/test_ring.py` starts one of these scripts with torchrun itself.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.script import end
from tests.support.forked import run_forked


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_rank(main: Callable[[], int], ranks: int, port: int, rank: int) -> None:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}
    end(main)


if __name__ == "__main__":
    count, module = int(sys.argv[1]), importlib.import_module(sys.argv[2])
    sys.argv = [str(module.__file__), *sys.argv[3:]]
    run_forked(count, partial(run_rank, module.main, count, free_port()))
