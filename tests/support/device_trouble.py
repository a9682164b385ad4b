"""Run one rank of tests/device/test_trouble.py.

It has two meshes on two streams under random delays, or a peer with a planted fault.

python -m tests.support.device_trouble RANKS FOLDER RANK WHAT TRANSPORT
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import burst_portable as bp
from burst_portable.backends.selection import for_device
from burst_portable.config import Config
from burst_portable.errors import CommunicationError, MismatchError, UnsupportedError
from burst_portable.runtime.prepared_call import PreparedCall
from burst_portable.strategies.registry import make_strategy

DEADLINE = 5.0
STUCK = 100.0
"""Seconds after which a rank prints where each of its threads is."""
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


def shards(mesh: bp.Mesh, device: torch.device, length: int, seed: int, kv_heads: int) -> list[torch.Tensor]:
    """Return this rank's q, k, v and dout, equal in every run."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, length, heads, DIM) for heads in (HEADS, kv_heads, kv_heads, HEADS)]
    whole = [torch.randn(shape, generator=generator).bfloat16().to(device) for shape in shapes]
    return [bp.shard(x, mesh) for x in whole]


def train(
    mesh: bp.Mesh, device: torch.device, length: int, seed: int, strategy: str = "ring", kv_heads: int = KV_HEADS
) -> list[torch.Tensor]:
    """Return (out, dq, dk, dv) of one call."""
    return attend(mesh, shards(mesh, device, length, seed, kv_heads), seed, strategy)


def attend(mesh: bp.Mesh, mine: list[torch.Tensor], seed: int = 0, strategy: str = "ring") -> list[torch.Tensor]:
    """Return (out, dq, dk, dv) of the given shards."""
    *inputs, dout = mine
    leaves = [x.requires_grad_() for x in inputs]
    groups = 2 if HEADS // mesh.size > 1 else 1
    options = (
        {"head_groups": groups} if strategy == "ulysses" else {"transfer": "direct", "prefetch_steps": 1 + seed % 3}
    )
    chosen = make_strategy(strategy, **options)
    out = bp.attention(*leaves, mesh=mesh, strategy=chosen, deterministic=True)
    out.backward(dout)
    return [out.detach(), *(x.grad for x in leaves)]


def busy(device: torch.device, chance: random.Random) -> None:
    """Run work of random length on the current stream and delay the host."""
    x = torch.ones(2048, 2048, device=device)
    for _ in range(chance.randrange(6)):
        x = x @ x * 1e-3
    time.sleep(chance.random() * 2e-3)


def stress(rank: int, device: torch.device, config: Config, *, groups: bool = False) -> dict[str, object]:
    """Run two meshes on two streams and compare bitwise with an undisturbed run.

    The meshes share a process group, or have one each; each has its own memory.
    """
    other = dist.new_group() if groups else None
    meshes = [bp.Mesh.from_group(group, config=config) for group in (None, other)]
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
    kept = (entry for mesh in meshes for entry in mesh._calls.values())
    names = sorted({call.transport.name for call in kept if isinstance(call, PreparedCall)})
    return {"wrong": wrong, "transports": names}


def allocations(rank: int, device: torch.device, config: Config) -> dict[str, object]:
    """Check that repeated calls allocate no device memory."""
    mesh = bp.Mesh.from_group(config=config)
    asked: list[int] = []
    # The memory in use depends on how far the host runs ahead, so its maximum takes some turns.
    # If each call allocated memory, no `steady` turns in a row would be without an allocation.
    steady = 10
    for _ in range(60):
        for seed, strategy in enumerate(("ring", "burst", "ulysses")):
            train(mesh, device, 4096, seed, strategy)
        torch.accelerator.synchronize()
        asked.append(torch.get_device_module(device).memory_stats()["num_device_alloc"])
    steady_from = len(asked) - asked[::-1].count(asked[-1])
    return {"wrong": [] if steady_from <= len(asked) - steady else [f"asked for memory so often: {asked}"]}


def graph(rank: int, device: torch.device, config: Config) -> dict[str, object]:
    """Capture both passes of all ranks in a graph.

    Check that a replay computes from the present contents of the tensors.
    """
    wrong = []
    for strategy in ("ring", "burst", "ulysses"):
        mesh, stream = bp.Mesh.from_group(config=config), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            mine = [x.requires_grad_() for x in shards(mesh, device, 1024, 0, KV_HEADS)]

            def step(
                mesh: bp.Mesh = mesh, mine: list[torch.Tensor] = mine, strategy: str = strategy
            ) -> list[torch.Tensor]:
                out = bp.attention(*mine[:3], mesh=mesh, strategy=strategy, deterministic=True)
                return [out.detach(), *torch.autograd.grad(out, mine[:3], mine[3].detach())]

            for _ in range(3):  # make plans, agreement, tables and compiled kernels before the capture
                step()
        stream.synchronize()
        captured = torch.cuda.CUDAGraph()
        # Other threads (torch's watchdog) query events at the same time.
        with torch.cuda.graph(captured, stream=stream, capture_error_mode="thread_local"):
            held = step()
        for seed in (1, 2):
            with torch.cuda.stream(stream), torch.no_grad():
                for x, new in zip(mine, shards(mesh, device, 1024, seed, KV_HEADS), strict=True):
                    x.copy_(new)
                captured.replay()
                stream.synchronize()
                found = [x.clone() for x in held]
            with torch.cuda.stream(stream):
                expected = step()
            stream.synchronize()
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"{strategy}, inputs {seed}")
    return {"wrong": wrong}


def fault(rank: int, device: torch.device, config: Config, what: str, folder: Path) -> dict[str, object]:
    """Delay, stop or kill rank 1 in its third step; the other ranks must raise and end."""
    mesh = bp.Mesh.from_group(config=config)
    for _ in range(2):
        train(mesh, device, 1024, 0)
    torch.accelerator.synchronize()
    dist.barrier()
    torch.accelerator.synchronize()
    if rank == 1:
        (folder / "struck").touch()
        if what != "late":
            os.kill(os.getpid(), STRIKES[what])  # all threads of the process end or pause
        time.sleep(60)
        os._exit(0)
    started = time.monotonic()

    def until_it_is_noticed() -> None:
        while time.monotonic() < started + 60:
            train(mesh, device, 1024, 0)
            torch.accelerator.synchronize()

    return outcome_of(until_it_is_noticed)


def disagree(rank: int, device: torch.device, config: Config) -> None:
    """Make a call with other shapes on rank 1, after a call that all ranks have cached."""
    mesh = bp.Mesh.from_group(config=config)
    for kv_heads in (KV_HEADS, KV_HEADS, KV_HEADS // 2 if rank == 1 else KV_HEADS * 2):
        train(mesh, device, 1024, 0, kv_heads=kv_heads)
        torch.accelerator.synchronize()


def run_out_of_memory(rank: int, device: torch.device, config: Config) -> None:
    """Allocate longer inputs, and fill all remaining memory on rank 1."""
    mesh = bp.Mesh.from_group(config=config)
    train(mesh, device, 1024, 0)
    longer = shards(mesh, device, 65536, 0, KV_HEADS)
    dist.barrier()
    held, size = [], 1 << 30
    while rank == 1 and size >= 1 << 20:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    attend(mesh, longer)
    torch.accelerator.synchronize()


def outcome_of(work: Callable[[], None]) -> dict[str, object]:
    """Run work and return its error, message and duration."""
    started = time.monotonic()
    try:
        work()
    except (CommunicationError, MismatchError, torch.OutOfMemoryError) as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - started}
    return {"error": "", "message": "nothing was noticed", "seconds": time.monotonic() - started}


FAULTS = ("late", "stopped", "killed", "shapes", "memory")
STRIKES = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}
PLAYS: dict[str, Callable[[int, torch.device, Config, Path], dict[str, object]]] = {
    "stress": lambda rank, device, config, _: stress(rank, device, config),
    "stress_groups": lambda rank, device, config, _: stress(rank, device, config, groups=True),
    "allocations": lambda rank, device, config, _: allocations(rank, device, config),
    "graph": lambda rank, device, config, _: graph(rank, device, config),
    "late": lambda rank, device, config, folder: fault(rank, device, config, "late", folder),
    "stopped": lambda rank, device, config, folder: fault(rank, device, config, "stopped", folder),
    "killed": lambda rank, device, config, folder: fault(rank, device, config, "killed", folder),
    "shapes": lambda rank, device, config, _: outcome_of(lambda: disagree(rank, device, config)),
    "memory": lambda rank, device, config, _: outcome_of(lambda: run_out_of_memory(rank, device, config)),
}


def main(ranks: int, folder: Path, rank: int, what: str, transport: str) -> None:
    faulthandler.dump_traceback_later(STUCK, exit=False)
    device = join(ranks, folder, rank)
    config = Config(timeout=DEADLINE if what in FAULTS else 60.0, transport=transport, kernel="triton")
    try:
        found = PLAYS[what](rank, device, config, folder)
    except UnsupportedError as error:  # this machine has no such transport
        found = {"absent": str(error)}
    # Report any other error, so that the test does not miss a rank.
    except Exception:  # noqa: BLE001
        found = {"error": "unforeseen", "message": traceback.format_exc(), "seconds": 0.0, "wrong": ["unforeseen"]}
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    sys.stderr.flush()
    os._exit(0)  # after a fault, an ordered shutdown is impossible


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])
