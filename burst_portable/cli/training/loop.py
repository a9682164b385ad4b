"""Training and scoring, on a shard or on one device: the same loop, so that the two differ in nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from burst_portable.gradients import sum_gradients, sum_over_ranks
from burst_portable.mesh import Mesh
from burst_portable.profiling.session import Session

PHASES = ("forward", "backward", "gradient sum", "optimizer")


@dataclass
class Course:
    """What happened, step by step.

    Attributes:
        losses: mean over all tokens of a step; in scoring, of a sequence.
        tokens: how many tokens each loss is the mean of.
        seconds: of each step.
        phases: seconds of each step by name; `kernels` and `waiting` are parts of forward and backward.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Sharded:
    """What a rank's loop has and one device's has not: its handle, its mesh, and what records its attention.

    session.totals tells kernels from waiting where work is done when a call returns (`timed`).
    """

    handle: Any
    mesh: Mesh
    session: Session | None = None
    timed: bool = False

    def total(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return sum_over_ranks(x, self.mesh)


OnStep = Callable[[Course], None]


@dataclass(frozen=True)
class Where:
    """The device that computes, and in which dtype: 16 bits are autocast's, over float32 parameters."""

    device: torch.device
    dtype: torch.dtype

    @property
    def parameters(self) -> torch.dtype:
        """The dtype of parameters: AdamW's small steps vanish in 16 bits, and its epsilon in float16."""
        return torch.promote_types(self.dtype, torch.float32)

    def autocast(self) -> torch.autocast:
        """The context of a forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize < 4)


def train(
    model: Any, data: Iterable[Tensor], learning_rate: float, where: Where, sharded: Sharded | None, on_step: OnStep
) -> Course:
    """AdamW at a fixed rate, a step a batch. The gradients of the last step stay in the model.

    Args:
        data: batches ``[B, N]`` of whole sequences, the same on every rank.
        sharded: None on one device.
        on_step: hears of each step when it is done.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    course = Course()
    for ids in data:
        train_step(model, optimizer, ids, where, sharded, course)
        on_step(course)
    return course


def train_step(
    model: Any, optimizer: Optimizer, ids: Tensor, where: Where, sharded: Sharded | None, course: Course
) -> None:
    """One step of `train`; what happened is added to the course."""
    started = perf_counter()
    optimizer.zero_grad(set_to_none=True)
    before = _read(sharded)
    loss, tokens = _forward(model, ids, where, sharded)
    forward = perf_counter()
    loss.backward()
    backward = perf_counter()
    kernels, waiting = (b - a for a, b in zip(before, _read(sharded), strict=True))
    if sharded is not None:
        sum_gradients(model.parameters(), sharded.mesh)
    value = _whole(loss, sharded)
    summed = perf_counter()
    optimizer.step()
    done = perf_counter()
    spent = (forward - started, backward - forward, summed - backward, done - summed)
    phases = dict(zip(PHASES, spent, strict=True)) | {"kernels": kernels, "waiting": waiting}
    _note(course, value, tokens, done - started, phases)


def score(model: Any, data: Iterable[Tensor], where: Where, sharded: Sharded | None, on_step: OnStep) -> Course:
    """The mean loss of each batch, without training."""
    model.eval()
    course = Course()
    for ids in data:
        started = perf_counter()
        before = _read(sharded)
        with torch.no_grad():
            loss, tokens = _forward(model, ids, where, sharded)
        kernels, waiting = (b - a for a, b in zip(before, _read(sharded), strict=True))
        value = _whole(loss, sharded)
        seconds = perf_counter() - started
        _note(course, value, tokens, seconds, {"forward": seconds, "kernels": kernels, "waiting": waiting})
        on_step(course)
    return course


def once(model: Any, ids: Tensor, where: Where, sharded: Sharded | None, *, scoring: bool) -> None:
    """A step's attention and what is between: forward and, in training, backward. Gradients come on top of what the
    model has; nothing is summed over ranks, and nothing learns."""
    with torch.set_grad_enabled(not scoring):
        loss, _ = _forward(model, ids, where, sharded)
        if not scoring:
            loss.backward()


def _forward(model: Any, ids: Tensor, where: Where, sharded: Sharded | None) -> tuple[Tensor, int]:
    """This rank's part of the mean loss, and how many tokens the mean is over."""
    ids = ids.to(where.device)
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    with where.autocast():
        if sharded is None:  # transformers shifts the labels and takes the mean itself: a path that is not ours
            return model(input_ids=ids, labels=ids, use_cache=False).loss, tokens
        return model(**sharded.handle.shard(ids)).loss, tokens


def _whole(loss: Tensor, sharded: Sharded | None) -> float:
    value = loss.detach().double()
    return (value if sharded is None else sharded.total(value.reshape(1))).item()


def _read(sharded: Sharded | None) -> tuple[float, float]:
    session = sharded.session if sharded else None
    return session.totals() if session else (0.0, 0.0)


def _note(course: Course, loss: float, tokens: int, seconds: float, phases: dict[str, float]) -> None:
    course.losses.append(loss)
    course.tokens.append(tokens)
    course.seconds.append(seconds)
    course.phases.append(phases)
