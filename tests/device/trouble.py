"""One rank of test_trouble: two meshes on two streams under random delays, or a peer that is late or gone.

python -m tests.device.trouble RANKS FOLDER RANK WHAT TRANSPORT
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.backends.registry import for_device
from burst_portable.config import Config
from burst_portable.errors import CommunicationError, UnsupportedError
from burst_portable.strategies.registry import make_strategy

DEADLINE = 5.0
HEADS, KV_HEADS, DIM = 8, 4, 64


def join(ranks: int, folder: Path, rank: int) -> torch.device:
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    device = torch.device(kind.type, rank)
    torch.accelerator.set_device_index(rank)
    group = for_device(device.type).capabilities.process_group
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group(group, store=store, rank=rank, world_size=ranks, device_id=device)
    return device


def train(mesh: bp.Mesh, device: torch.device, length: int, seed: int, strategy: str = "ring") -> list[torch.Tensor]:
    """(out, dq, dk, dv) of one call; the same on every run."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    whole = [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]
    q, k, v, dout = (bp.shard(x, mesh) for x in whole)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    groups = 2 if HEADS // mesh.size > 1 else 1
    options = {"groups": groups} if strategy == "ulysses" else {"moves": "fetch", "ahead": 1 + seed % 3}
    chosen = make_strategy(strategy, **options)
    out = bp.attention(*leaves, mesh=mesh, strategy=chosen, deterministic=True)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def busy(device: torch.device, chance: random.Random) -> None:
    """Work of random length on the current stream, and a host that comes late."""
    x = torch.ones(2048, 2048, device=device)
    for _ in range(chance.randrange(6)):
        x = x @ x * 1e-3
    time.sleep(chance.random() * 2e-3)


def stress(rank: int, device: torch.device, config: Config) -> dict[str, object]:
    """Two meshes of one group, each with memory of its own, on two streams; bits against a calm run."""
    meshes = [bp.Mesh.from_group(config=config) for _ in range(2)]
    jobs = [
        (index % 2, (256, 1024, 4096)[index % 3], index, ("ring", "burst", "ulysses")[index % 3]) for index in range(12)
    ]
    calm = [train(meshes[which], device, length, seed, strategy) for which, length, seed, strategy in jobs]
    torch.accelerator.synchronize()
    streams = [torch.Stream(device) for _ in range(2)]
    chance, wrong = random.Random(rank), []
    for turn in range(5):
        hurried = []
        for which, length, seed, strategy in jobs:
            with streams[(which + turn) % 2]:
                busy(device, chance)
                hurried.append(train(meshes[which], device, length, seed, strategy))
        torch.accelerator.synchronize()
        for job, one, other in zip(jobs, calm, hurried, strict=True):
            if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
                wrong.append(f"turn {turn}: {job}")
    names = sorted({call.runtime.transport.name for mesh in meshes for call in mesh._calls.values()})
    return {"wrong": wrong, "transports": names}


def fault(rank: int, device: torch.device, config: Config, what: str, folder: Path) -> dict[str, object]:
    """Rank 1 is late or killed in its third step; the others say so and end."""
    mesh = bp.Mesh.from_group(config=config)
    for _ in range(2):
        train(mesh, device, 1024, 0)
    torch.accelerator.synchronize()
    dist.barrier()
    torch.accelerator.synchronize()
    if rank == 1:
        (folder / "struck").touch()
        if what == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        os._exit(0)
    started = time.monotonic()
    try:
        while time.monotonic() < started + 60:
            train(mesh, device, 1024, 0)
            torch.accelerator.synchronize()
    except CommunicationError as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return {"error": "", "message": "nothing was noticed", "seconds": time.monotonic() - started}


def main(ranks: int, folder: Path, rank: int, what: str, transport: str) -> None:
    device = join(ranks, folder, rank)
    config = Config(deadline=60.0 if what == "stress" else DEADLINE, transport=transport, kernel="triton")
    try:
        found = stress(rank, device, config) if what == "stress" else fault(rank, device, config, what, folder)
    except UnsupportedError as error:  # this machine has no such transport
        found = {"absent": str(error)}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(0)  # after a fault there is nothing left to take down in order


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
