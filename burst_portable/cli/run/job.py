"""A job: everything that a rank needs to know, as data that is written to a file and read by its process."""

from __future__ import annotations

import gc
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from burst_portable.backends.selection import hardware_of, supports_high_priority
from burst_portable.errors import InputError
from burst_portable.utils.text import bytes_text

_LARGEST = 1 << 62  # fits the integers of the libraries below, also as a seed
_RANKS_A_CORE = 8
_RANKS_ANYWHERE = 16


def check_numbers(seq_len: int, ranks: int, steps: int | None, batch: int, rate: float, seed: int) -> None:
    """Refuse numbers that mean nothing."""
    least = {"--seq-len": (seq_len, 2), "--ranks": (ranks, 1), "--batch": (batch, 1), "--seed": (seed, 0)}
    if steps is not None:
        least["--steps"] = (steps, 1)
    for name, (value, at_least) in least.items():
        if not at_least <= value <= _LARGEST:
            what = "small" if value < at_least else "large"
            raise InputError(f"{name} is too {what}", got=value, allowed=f"{at_least} to 2**62")
    if not (math.isfinite(rate) and rate > 0):
        raise InputError("--lr is not a learning rate", got=rate, allowed="above 0")
    if ranks > seq_len:
        got = f"--ranks {ranks}, --seq-len {seq_len}"
        raise InputError("more ranks than tokens", got=got, allowed=f"at most {seq_len} ranks")


def check_processes(ranks: int, available_cores: int | None = None) -> None:
    """Refuse more processes than the cores of this machine can serve in turns. Default: `cores()`."""
    found = cores() if available_cores is None else available_cores
    most = max(_RANKS_ANYWHERE, _RANKS_A_CORE * found)
    if ranks > most:
        raise InputError(
            "more ranks than this machine's cores can serve, and each is a process with what it holds",
            got=f"--ranks {ranks}, {found} cores",
            allowed=f"at most {most} ({_RANKS_A_CORE} a core, {_RANKS_ANYWHERE} anywhere)",
            next_step="`burst-portable plan` takes any number of ranks and needs no device",
        )


def check_memory(
    parameters: int,
    vocabulary: int,
    *,
    tokens: int,
    copies: int,
    itemsize: int,
    training: bool,
    available: float | None = None,
) -> None:
    """Refuse what cannot fit this machine's memory: a lower bound, from weights and logits alone.

    Args:
        parameters, vocabulary: of the model.
        tokens: of a step.
        copies: processes that hold the model.
        itemsize: bytes of a weight.
        training: gradients, AdamW's two moments and the gradient of the logits come on top.
        available: Bytes of memory. Default: `memory()`.
    """
    available = memory() if available is None else available
    weights = copies * parameters * itemsize * (4 if training else 1)
    logits = tokens * vocabulary * 4 * (2 if training else 1)
    if weights + logits > available:
        raise InputError(
            "the run does not fit this machine's memory",
            got=f"{bytes_text(weights)} of weights{', gradients and moments' if training else ''} over all ranks "
            f"and {bytes_text(logits)} of logits",
            allowed=f"{bytes_text(available)} together",
            next_step="take a smaller model, --seq-len, --batch or --ranks",
        )


def check_room(size: int, copies: int) -> None:
    """Refuse tensors of `size` bytes in each of `copies` processes if this machine's memory cannot hold them."""
    if size * copies > (there := memory()):
        raise InputError(
            "what is measured does not fit this machine's memory",
            got=f"{bytes_text(size)} of q, k, v and gradients per rank, {copies} rank{'' if copies == 1 else 's'}",
            allowed=f"{bytes_text(there)} together",
            next_step="take a smaller --seq-len, --heads, --head-dim or --ranks",
        )


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory() -> float:
    """Return the bytes of memory of this machine; infinite if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return math.inf


if TYPE_CHECKING:
    from burst_portable.backends.base import Backend
    from burst_portable.planning.hardware import HardwareSpec


def hardware_of_run(backend: Backend, ranks: int, file: str, dtype: str, head_dim: int) -> HardwareSpec:
    """Those of `registry.hardware_of`, over the process groups that `worker.join` makes."""
    first = ranks > 1 and supports_high_priority(backend)
    return hardware_of(backend, ranks, file=file, dtype=dtype, head_dim=head_dim, high_priority=first)


DTYPES = ("float32", "bfloat16", "float16", "float64")


class Saved:
    """A dataclass of plain values that another process reads."""

    def save(self, path: Path) -> None:
        """Write it where `load` finds it."""
        path.write_text(json.dumps(vars(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Self:
        """The object that `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Job(Saved):
    """One call of `burst-portable run`.

    Attributes:
        model: "tiny", a config's JSON, or a checkpoint's folder.
        text: a file, or None for the text that comes with Python.
        steps: training steps, or sequences that are scored.
        batch: sequences per step.
        scoring: perplexity instead of training.
        backend, device_type: the backend by name, and the type of its devices.
        strategy: name of the strategy.
        inner: ranks per node, or None.
        options: the strategy's other options that were typed, by name.
        gradient_checkpointing: Whether layers are recomputed in the backward pass.
        profile: the level of profiling, "session" or "deep"; "" for none.
        ablate: whether a step is run again with attention's messages off, its kernels off, and both.
        threads: of torch's CPU operators, a rank.
    """

    model: str
    text: str | None
    seq_len: int
    ranks: int
    steps: int
    batch: int
    learning_rate: float
    seed: int
    scoring: bool
    backend: str
    device_type: str
    strategy: str
    layout: str
    dtype: str
    threads: int
    ranks_per_node: int | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    gradient_checkpointing: bool = False
    profile: str = ""
    ablate: bool = False


@contextmanager
def without_collector() -> Iterator[None]:
    """Garbage is left until the end of the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
