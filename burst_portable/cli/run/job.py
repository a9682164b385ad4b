"""Define `Job`, the file from which a rank's process reads its work."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from burst_portable.backends.selection import hardware_of, supports_high_priority
from burst_portable.errors import InputError

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend
    from burst_portable.planning.hardware import HardwareSpec

_LARGEST = 1 << 62  # fits the integers of the libraries below, also as a seed


def hardware_of_run(backend: Backend, ranks: int, file: str, dtype: str, head_dim: int) -> HardwareSpec:
    """Return the rates from which `auto` predicts times, for the process groups that `worker.join` creates."""
    high_priority = ranks > 1 and supports_high_priority(backend)
    return hardware_of(backend, ranks, file=file, dtype=dtype, head_dim=head_dim, high_priority=high_priority)


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """Plain values that the process of each rank reads.

    Attributes:
        device_type: torch's type of the backend's devices.
        threads: CPU threads of torch per rank.
    """

    ranks: int
    ranks_per_node: int | None
    backend: str
    device_type: str = ""
    threads: int = 1

    def save(self, path: Path) -> None:
        """Write the values to a file for `load`."""
        path.write_text(json.dumps(vars(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the object that `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class Job(RankJob):
    """One call of `burst-portable run`. `setup.prepare_job` replaces "auto" and sets the fields that have defaults.

    Attributes:
        model: "tiny", a config's JSON file, or a checkpoint folder.
        text: A file, or None for text that is part of Python.
        scoring: Whether to compute the perplexity instead of training.
        options: Options of the strategy except ranks per node, by name.
        profile: Level of profiling, "standard" or "kernels"; "" for none.
        ablate: Whether one step is repeated without communication, attention kernels, or both.
        steps: Training steps, or batches that are scored.
        dropout: Probability of attention dropout; 0 for none.
    """

    model: str
    text: str | None
    seq_len: int
    batch: int
    learning_rate: float
    seed: int
    scoring: bool
    strategy: str
    options: Mapping[str, object]
    layout: str
    dtype: str
    gradient_checkpointing: bool
    profile: str
    ablate: bool
    steps: int = 0
    dropout: float = 0.0


def check_numbers(job: Job, steps: int | None) -> None:
    """Raise `InputError` if a number is out of its range."""
    least = {
        "--seq-len": (job.seq_len, 2),
        "--ranks": (job.ranks, 1),
        "--batch": (job.batch, 1),
        "--seed": (job.seed, 0),
    }
    if steps is not None:
        least["--steps"] = (steps, 1)
    for name, (value, at_least) in least.items():
        if not at_least <= value <= _LARGEST:
            what = "small" if value < at_least else "large"
            raise InputError(f"{name} is too {what}", got=value, allowed=f"{at_least} to 2**62")
    if not (math.isfinite(job.learning_rate) and job.learning_rate > 0):
        raise InputError("--lr is not a learning rate", got=job.learning_rate, allowed="above 0")
    if job.ranks > job.seq_len:
        got = f"--ranks {job.ranks}, --seq-len {job.seq_len}"
        raise InputError("more ranks than tokens", got=got, allowed=f"at most {job.seq_len} ranks")


@contextmanager
def disable_garbage_collection() -> Iterator[None]:
    """Disable garbage collection in the block, which speeds up imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
