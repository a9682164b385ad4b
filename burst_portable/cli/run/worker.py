"""Run one rank as a process: python -m burst_portable.cli.run.worker JOB RANK

`spawn.py` starts it and keeps a pipe to its stdin open, so that a rank ends with its parent. The process writes one
JSON object per line to stdout: {"event": "step", ...}, then "done", or "error" with its kind.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_portable.cli.run.job import Job, RankJob, disable_garbage_collection
from burst_portable.errors import BurstError, CommunicationError, CommunicationTimeoutError, InputError, in_a_line

if TYPE_CHECKING:
    import torch

    from burst_portable.cli.run.train import Gradients, OnStep, Outcome
    from burst_portable.config import LauncherEnv
    from burst_portable.mesh import Mesh


def main(arguments: list[str], work: Callable[[Path, int], None] | None = None) -> int:
    """Run a rank. Return 0, or 1 after an "error" event; other exceptions leave a traceback on stderr.

    `arguments` are the job's file and the rank. `work` gets both; by default it trains or scores.
    """
    path, rank = Path(arguments[0]), int(arguments[1])
    threading.Thread(target=_end_with_parent, args=(path.parent,), daemon=True).start()
    try:
        (work or _run)(path, rank)
    except BurstError as error:
        kind = "communication" if isinstance(error, CommunicationError) else "input"
        write_event(event="error", kind=kind, message=str(error))
        return 1
    return 0


def write_event(**event: Any) -> None:
    """Write one line for the parent. NaN losses are written as NaN, which Python's json can parse."""
    print(json.dumps(event), flush=True)


def _end_with_parent(folder: Path) -> None:
    """Remove the job's folder and exit when the parent ends, which cannot do so if it is killed."""
    os.read(0, 1)  # not sys.stdin: its lock would turn an exit by an exception into an abort
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _run(path: Path, rank: int) -> None:
    job, folder = Job.load(path), path.parent
    with disable_garbage_collection():
        from burst_portable.cli.run.train import StepHistory, run_rank, save_gradients

        gc.freeze()  # imported modules stay until the process ends

    def on_step(history: StepHistory) -> None:
        write_event(event="step", loss=history.losses[-1], seconds=history.seconds[-1])

    with local_mesh(job, rank, folder) as (mesh, device):
        outcome, gradients = run_rank(job, mesh, device, on_step)
        if rank == 0 and gradients:
            save_gradients(gradients, folder)
        write_event(event="done", outcome=asdict(outcome))


@contextmanager
def local_mesh(job: RankJob, rank: int, folder: Path) -> Iterator[tuple[Mesh, torch.device]]:
    """Yield the mesh and the device of a local process. Ranks find each other through a file in `folder`."""
    import torch

    torch.set_num_threads(job.threads)
    device = device_of(job.device_type, rank)
    join(job.backend, rank, job.ranks, folder)
    with _mesh(job) as mesh:
        yield mesh, device


@contextmanager
def launched_mesh(job: RankJob, launcher: LauncherEnv) -> Iterator[tuple[Mesh, torch.device]]:
    """Yield the mesh and the device of a rank that a launcher such as torchrun started.

    Raises:
        CommunicationTimeoutError: If a rank does not connect in time.
    """
    device = device_of(job.device_type, launcher.local_rank)
    address = launcher.address
    next_step = f"check that every rank starts and can connect to {address} (MASTER_ADDR, MASTER_PORT)"
    _create_process_group(job.backend, f"the ranks did not connect at {address}", next_step)
    with _mesh(job) as mesh:
        yield mesh, device


@contextmanager
def _mesh(job: RankJob) -> Iterator[Mesh]:
    import torch.distributed as dist

    from burst_portable.mesh import Mesh

    try:
        yield Mesh.from_group(ranks_per_node=job.ranks_per_node, backend=job.backend)
    finally:
        dist.destroy_process_group()


def join(backend: str, rank: int, ranks: int, folder: Path) -> None:
    """Create the process group of all ranks, through a file in `folder`.

    Raises:
        CommunicationTimeoutError: If a rank does not start in time.
    """
    from burst_portable.backends.selection import load
    from burst_portable.config import listen_on_loopback

    listen_on_loopback(load(backend).capabilities.process_group)
    _create_process_group(
        backend,
        f"rank {rank}: the other ranks did not start",
        "set a larger BURST_TIMEOUT, in seconds",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
    )


def _create_process_group(backend: str, failure: str, next_step: str, **rendezvous: Any) -> None:
    import torch.distributed as dist

    from burst_portable.backends.selection import group_options_of, load
    from burst_portable.config import from_environment

    loaded, timeout = load(backend), from_environment().timeout
    options = group_options_of(loaded, timedelta(seconds=timeout))
    try:
        dist.init_process_group(loaded.capabilities.process_group, **rendezvous, **options)
    # torch raises different errors for unknown host names, used ports and missing ranks.
    except (RuntimeError, ValueError) as error:
        raise CommunicationTimeoutError(
            f"{failure} within {timeout:g} s", got=in_a_line(error), next_step=next_step
        ) from error


def device_of(device_type: str, local_rank: int) -> Any:
    """Return the device of a rank, and make it current if devices have numbers.

    If one device is visible, each rank uses it, because a launcher may hide all other devices.

    Raises:
        InputError: If there are more ranks on this host than devices.
    """
    import torch

    module = torch.get_device_module(device_type)
    if not hasattr(module, "set_device") or module.device_count() <= 1:
        return torch.device(device_type)
    if local_rank >= (count := module.device_count()):
        raise InputError(
            "this host has no device for the rank",
            got=f"local rank {local_rank}",
            allowed=f"0 to {count - 1}",
            next_step="start at most one rank per device on each host",
        )
    module.set_device(local_rank)
    return torch.device(device_type, local_rank)


def run_in_launcher(job: Job, launcher: LauncherEnv, on_step: OnStep) -> tuple[list[Outcome], Gradients]:
    """Run a job as one of the ranks that a launcher such as torchrun started.

    Returns:
        The outcomes of all ranks in rank order, and this rank's gradients.
    """
    from torch.distributed.elastic.multiprocessing.errors import record

    from burst_portable.cli.run.train import Outcome, run_rank

    @record  # torchrun then prints this rank's error last
    def run() -> tuple[list[Outcome], Gradients]:
        with launched_mesh(job, launcher) as (mesh, device):
            outcome, gradients = run_rank(job, mesh, device, on_step)
            return [Outcome(**one) for one in _gather(asdict(outcome), mesh, device)], gradients

    result = run()
    assert result is not None, "errors are raised"
    return result


def _gather(values: dict[str, Any], mesh: Mesh, device: torch.device) -> list[dict[str, Any]]:
    """Return the values of all ranks in rank order. Profiles are too large for `Transport.share`."""
    import torch

    transport = mesh.transport(device.type)
    data = torch.frombuffer(bytearray(json.dumps(values).encode()), dtype=torch.uint8).to(device)
    sizes = [torch.empty(8, dtype=torch.uint8, device=device) for _ in range(mesh.size)]
    transport.all_gather(torch.tensor([data.numel()], device=device).view(torch.uint8), sizes, "outcome sizes")
    parts = [torch.empty(int(size.view(torch.int64)), dtype=torch.uint8, device=device) for size in sizes]
    transport.all_gather(data, parts, "outcomes")
    return [json.loads(part.cpu().numpy().tobytes()) for part in parts]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
