"""Start and join ranks of a test on accelerators: one process per device, or CPU ranks to try a program.

python -m tests.support.PROGRAM FOLDER RANK RANKS [CASE...]
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from burst_portable.backends.selection import for_device

ROOT = Path(__file__).parents[2]
MISSING = 5
"""Exit code of a rank that lacks a package, or finds another version of it: its last line says which."""


def device_of(rank: int) -> torch.device:
    """Return the device of a rank: an accelerator, or the CPU if there are none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, rank)


def join(folder: Path, rank: int, ranks: int, *, has_group: bool | None = None) -> torch.device:
    """Start the process group of the ranks, as torchrun's, and return this rank's device, which is the current one.

    `has_group`: Whether there is such a group. Default: for more than one rank.
    """
    device = device_of(rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(rank)
    if not (ranks > 1 if has_group is None else has_group):
        return device
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # required but unused, because the store is a file
    if device.type == "cpu":
        options: dict[str, object] = {"backend": "gloo"}
    else:
        options = {"backend": for_device(device.type).capabilities.process_group, "device_id": device}
    store = dist.FileStore(str(folder / f"store of {' '.join(sys.argv[3:])}"), ranks)
    dist.init_process_group(**options, store=store, rank=rank, world_size=ranks)
    return device


def leave() -> None:
    """Close the process group, if there is one."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run_ranks(program: str, folder: Path, ranks: int, *words: str, timeout: float = 240) -> str:
    """Run a program of tests/support on all ranks. Return "", or the line in which a rank says what is missing.

    Raises:
        AssertionError: If a rank fails.
    """
    outputs = [folder / f"output of {rank} of {ranks} {' '.join(words)}.txt" for rank in range(ranks)]
    command = [sys.executable, "-m", f"tests.support.{program}", str(folder)]
    first_only = {"CUDA_VISIBLE_DEVICES": "0"} if ranks == 1 else {}  # Trainer would use all devices
    processes = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                one = [*command, str(rank), str(ranks), *words]
                processes.append(
                    subprocess.Popen(one, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=os.environ | first_only)
                )
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    texts = [output.read_text() for output in outputs]
    if MISSING in codes:
        return next(text.strip().splitlines()[-1] for code, text in zip(codes, texts, strict=True) if code == MISSING)
    assert codes == [0] * ranks, "\n".join(text[-3000:] for text in texts)
    return ""


def start(main: Callable[..., None]) -> None:
    """Call `main(folder, rank, ranks, *cases)` with the words of the command line, and leave the process group."""
    folder, rank, ranks, *words = sys.argv[1:]
    try:
        main(Path(folder), int(rank), int(ranks), *words)
    except ImportError as error:
        print(f"missing: {error}")
        sys.exit(MISSING)
    leave()
