"""A rank as a process: python -m burst_portable.cli.run.worker JOB RANK

Started by `launch.py`, whose pipe to our stdin stays open as long as it lives: a rank never outlives its parent.
Tells on stdout, a JSON object a line: {"event": "step", ...}, then "done", or "error" with its kind.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burst_portable.cli.run.job import Job, without_collector
from burst_portable.errors import BurstError, CommunicationError, CommunicationTimeoutError, InputError, in_a_line

if TYPE_CHECKING:
    from burst_portable.config import Launched


def main(arguments: list[str], work: Callable[[Path, int], None] | None = None) -> int:
    """Runs the rank; exit code 0, or 1 with an "error" event or a traceback on stderr.

    `work` is what it does, given the job's file and the rank: to train or score, unless given.
    """
    path, rank = Path(arguments[0]), int(arguments[1])
    threading.Thread(target=_end_with_parent, args=(path.parent,), daemon=True).start()
    try:
        (work or _run)(path, rank)
    except CommunicationError as error:
        tell(event="error", kind="communication", message=str(error))
        return 1
    except BurstError as error:
        tell(event="error", kind="input", message=str(error))
        return 1
    return 0


def tell(**event: Any) -> None:
    """One line to the parent. A loss that is not a number is written as NaN, which Python reads back."""
    print(json.dumps(event), flush=True)


def _end_with_parent(folder: Path) -> None:
    """A parent that was killed cannot remove its folder."""
    os.read(0, 1)  # not through sys.stdin, whose lock would make an end of this process by an exception an abort
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _run(path: Path, rank: int) -> None:
    job, folder = Job.load(path), path.parent
    with without_collector():
        import torch
        import torch.distributed as dist

        from burst_portable.cli.run.train import run_rank, save_gradients
        from burst_portable.mesh import Mesh

        gc.freeze()  # this process is a rank and nothing else: what it has imported stays to its end
    torch.set_num_threads(job.threads)
    device = device_of(job.device_type, rank)
    join(job.backend, rank, job.ranks, folder)
    try:
        outcome, gradients = run_rank(
            job,
            Mesh.from_group(ranks_per_node=job.ranks_per_node, backend=job.backend),
            device,
            lambda course: tell(event="step", loss=course.losses[-1], seconds=course.seconds[-1]),
        )
        if rank == 0 and gradients:
            save_gradients(gradients, folder)
        tell(event="done", outcome=asdict(outcome))
    finally:
        dist.destroy_process_group()


def join(backend: str, rank: int, ranks: int, folder: Path) -> None:
    """Create the process group of all ranks, which meet in a file of `folder`.

    Raises:
        CommunicationTimeoutError: a rank is missing.
    """
    import torch.distributed as dist

    from burst_portable.backends.selection import group_options_of, load
    from burst_portable.config import from_environment, listen_on_loopback

    serving, timeout = load(backend), from_environment().timeout
    process_group = serving.capabilities.process_group
    options = group_options_of(serving, timedelta(seconds=timeout))
    listen_on_loopback(process_group)
    try:
        dist.init_process_group(
            process_group,
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=ranks,
            **options,
        )
    except RuntimeError as error:
        raise CommunicationTimeoutError(
            f"rank {rank}: the other ranks did not start within {timeout:g} s",
            got=in_a_line(error),
            next_step="give them more time with BURST_TIMEOUT, in seconds",
        ) from error


def join_launched(backend: str, place: Launched) -> None:
    """Create the process group of the ranks that a launcher has started.

    Raises:
        CommunicationTimeoutError: a rank is missing.
    """
    import torch.distributed as dist

    from burst_portable.backends.selection import group_options_of, load
    from burst_portable.config import from_environment

    serving, timeout = load(backend), from_environment().timeout
    options = group_options_of(serving, timedelta(seconds=timeout))
    try:
        dist.init_process_group(serving.capabilities.process_group, **options)
    # Names that do not resolve, ports that are taken, ranks that do not come: torch has an error for each.
    except (RuntimeError, ValueError) as error:
        next_step = f"see that every rank starts, and that it reaches {place.meeting} (MASTER_ADDR, MASTER_PORT)"
        raise CommunicationTimeoutError(
            f"the ranks did not meet at {place.meeting} within {timeout:g} s",
            got=in_a_line(error),
            next_step=next_step,
        ) from error


def device_of(device_type: str, local_rank: int) -> Any:
    """The device of a rank, made the current one where devices are numbered.

    Raises `InputError` for more ranks on this host than it has devices. One device is each rank's own: launchers may
    show a rank no other.
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
            next_step="start as many ranks a host as it has devices",
        )
    module.set_device(local_rank)
    return torch.device(device_type, local_rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
