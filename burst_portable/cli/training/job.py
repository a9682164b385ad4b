"""A job: everything that a rank needs to know, as data that is written to a file and read by its process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

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
        strategy, inner, travels, moves: see `cli.strategies`.
        recompute: whether layers are computed again in the backward pass, instead of keeping what they made.
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
    inner: int | None = None
    travels: str | None = None
    moves: str | None = None
    recompute: bool = False
    profile: str = ""
    ablate: bool = False
