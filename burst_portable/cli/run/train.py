"""What one rank does with a job, whoever started it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from burst_portable.backends.selection import load
from burst_portable.cli.flags import asked_strategy
from burst_portable.cli.run.job import Job, hardware_of_run
from burst_portable.cli.run.models import (
    batches,
    build,
    checkpoint_of,
    config_of,
    enable_gradient_checkpointing,
    quiet,
    tokens_of,
)
from burst_portable.gradients import all_reduce, all_reduce_gradients
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.layouts import sizes_of
from burst_portable.mesh import Mesh
from burst_portable.profiling.session import Session, profile

PHASES = ("forward", "backward", "gradient_all_reduce", "optimizer")


@dataclass
class Course:
    """What happened, step by step.

    Attributes:
        losses: mean over all tokens of a step; in scoring, of a sequence.
        tokens: how many tokens each loss is the mean of.
        seconds: of each step.
        phases: seconds of each step by name; `kernels` and `communication_wait` are parts of forward and backward.
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
        return all_reduce(x, self.mesh)


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
        all_reduce_gradients(model.parameters(), sharded.mesh)
    value = _whole(loss, sharded)
    summed = perf_counter()
    optimizer.step()
    done = perf_counter()
    spent = (forward - started, backward - forward, summed - backward, done - summed)
    phases = dict(zip(PHASES, spent, strict=True)) | {"kernels": kernels, "communication_wait": waiting}
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
        _note(course, value, tokens, seconds, {"forward": seconds, "kernels": kernels, "communication_wait": waiting})
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


GRADIENTS = "gradients.safetensors"
_FINGERPRINTED = 1 << 22  # numbers at a time
Gradients = dict[str, Tensor]
"""Of the last step, by the parameter's name; empty in scoring."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a rank or of the reference: plain data, for a pipe.

    Attributes:
        course: see `loop.Course`, as a dict.
        peak_memory_bytes: of the device, or of the process where the device is the CPU.
        fingerprint: of the parameters after the last step; equal on all ranks, or something is wrong.
        timed: whether kernels and waiting were told apart.
        notes: what there is to say about the model's weights.
        peak: what its device can do at most, see `backends.base.Peaks`; as a dict.
        profile: the profiler's report, on rank 0 where it was asked for.
    """

    course: dict[str, Any]
    peak_memory_bytes: int
    fingerprint: str
    timed: bool
    notes: list[str]
    peak: dict[str, Any]
    profile: dict[str, Any] | None = None


def run_rank(job: Job, mesh: Mesh, device: torch.device, on_step: OnStep) -> tuple[Outcome, Gradients]:
    """Train or score this rank's shard; the outcome, and the gradients of the last step, summed over the ranks."""
    backend = load(job.backend)
    capabilities = backend.capabilities
    with profile(job.profile or "light", mesh=mesh) as session:  # type: ignore[arg-type]  # checked where typed

        def prepare(model: Any) -> Sharded:
            head_dim = sizes_of(model.config)["head_dim"]
            hardware = hardware_of_run(backend, job.ranks, mesh.config.hardware_spec, job.dtype, head_dim)
            strategy = asked_strategy(job.strategy, job.ranks_per_node, job.options, hardware)
            handle = parallelize(model, mesh, strategy=strategy, layout=job.layout)
            session.mark()  # making the model is not part of the first step
            return Sharded(handle, mesh, session, timed=not capabilities.streams)

        def again(step: Callable[[], object], model: Any) -> None:
            session.ablate(step, model=model, device=device.type)

        def done(course: Course) -> None:
            session.mark()
            on_step(course)

        outcome, gradients = _run(job, device, prepare, done, again if job.ablate else None)
    if job.profile and (report := session.report(skip=1 if job.steps > 1 else 0)):
        outcome = replace(outcome, profile=report.data)
    return outcome, gradients


def run_reference(job: Job, device: torch.device, on_step: OnStep) -> tuple[Outcome, Gradients]:
    """The same on one device: plain attention, nothing of this package but the loop."""
    return _run(job, device, lambda model: None, on_step)


def _run(
    job: Job,
    device: torch.device,
    prepare: Callable[[Any], Sharded | None],
    on_step: OnStep,
    again: Callable[[Callable[[], object], Any], None] | None = None,
) -> tuple[Outcome, Gradients]:
    quiet()
    tokens, _ = tokens_of(job.text, checkpoint_of(job.model))
    data = batches(tokens, job.seq_len, job.batch, job.steps)
    where = Where(device, getattr(torch, job.dtype))
    model, notes = build(job.model, config_of(job.model, job.seq_len), where.parameters, job.seed, device)
    if job.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    sharded = prepare(model)
    if job.scoring:
        course = score(model, data, where, sharded, on_step)
    else:
        course = train(model, data, job.learning_rate, where, sharded, on_step)
    timed, memory = bool(sharded and sharded.timed), peak_memory(device)
    if again is not None:
        first = next(iter(batches(tokens, job.seq_len, job.batch, 1)))
        again(partial(once, model, first, where, sharded, scoring=job.scoring), model)
    peak = asdict(load(job.backend).peaks(job.dtype))
    outcome = Outcome(asdict(course), memory, fingerprint(model), timed, notes, peak)
    return outcome, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def save_gradients(gradients: Gradients, folder: Path) -> None:
    """For the process that compares them."""
    save_file({name: g.detach().cpu().contiguous() for name, g in gradients.items()}, folder / GRADIENTS)


def load_gradients(folder: Path) -> Gradients:
    """The gradients that `save_gradients` wrote."""
    return load_file(folder / GRADIENTS)


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that the device's allocator held, or without a device, this process."""
    module = torch.get_device_module(device)
    if hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def fingerprint(model: Any) -> str:
    """A fingerprint of all bits of the parameters: sums modulo 2^64 weighted by position, computed on their device."""
    sums = []
    for parameter in model.parameters():
        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.itemsize]
        for part in parameter.detach().reshape(-1).view(kind).split(_FINGERPRINTED):
            places = torch.arange(1, 2 * part.numel(), 2, device=part.device)  # odd: no difference of a bit is lost
            sums.append((part.long() * places).sum())
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()


def course_of(outcome: Outcome) -> Course:
    """The course of an outcome that came through a pipe."""
    return Course(**outcome.course)
