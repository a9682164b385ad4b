"""One rank of test_faults: a training step after another, until a fault that is planted on rank 1 strikes.

    python -m tests.spmd.faulty_rank RANK RANKS FOLDER FAULT POST DEADLINE STRATEGY

FAULT strikes on rank 1 at its POST-th post of transfers (forward and backward count alike).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.comm.torch_dist import TorchDistTransport
from burst_portable.config import Config
from burst_portable.errors import CommunicationError


def raise_memory_error() -> None:
    raise torch.OutOfMemoryError("planted: out of memory")


def raise_own_error() -> None:
    raise ZeroDivisionError("planted: an error of the model")


FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "late": lambda: time.sleep(60),
    "out_of_memory": raise_memory_error,
    "raises": raise_own_error,
}


class Faulty(TorchDistTransport):
    """Strikes at its n-th post."""

    def __init__(self, deadline: float, fault: str | None, post: int) -> None:
        super().__init__(None, "gloo", batched=False, deadline=deadline)
        self._fault, self._left = fault, post

    def post(self, sends, receives, label=""):
        self._left -= 1
        if self._fault and self._left == 0:
            FAULTS[self._fault]()
        return super().post(sends, receives, label)


def train(mesh: bp.Mesh, strategy: str) -> None:
    """More steps than any fault waits for."""
    for _ in range(20):
        q, k, v = (torch.randn(1, 8, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        bp.attention(q, k, v, mask="full", mesh=mesh, strategy=strategy).sum().backward()


def main(rank: int, ranks: int, folder: Path, fault: str, post: int, deadline: float, strategy: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    transport = Faulty(deadline, fault if rank == 1 else None, post)
    mesh = bp.Mesh(rank, ranks, lambda device_type: transport, config=Config(deadline=deadline))
    dist.barrier()
    started = time.monotonic()
    try:
        train(mesh, strategy)
    except CommunicationError as error:
        told = {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
        (folder / f"rank{rank}.json").write_text(json.dumps(told))
        os._exit(3)  # a user's program would end here; what is left of the group is not waited for


if __name__ == "__main__":
    number, count, where, which, at, seconds, by = sys.argv[1:]
    main(int(number), int(count), Path(where), which, int(at), float(seconds), by)
