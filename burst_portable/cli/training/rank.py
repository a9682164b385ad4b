"""What one rank does with a job, whoever started it."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from burst_portable.backends.registry import load, peaks_of
from burst_portable.cli.strategies import asked_strategy
from burst_portable.cli.training.job import Job
from burst_portable.cli.training.loop import Course, OnStep, Sharded, Where, once, score, train
from burst_portable.cli.training.models import build, checkpoint_of, config_of, quiet, recompute_layers
from burst_portable.cli.training.predicted import rates_of_run
from burst_portable.cli.training.texts import batches, tokens_of
from burst_portable.integrations.transformers import parallelize
from burst_portable.integrations.transformers.layouts import sizes_of
from burst_portable.mesh import Mesh
from burst_portable.profiling.session import profile

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
            rates = rates_of_run(backend, job.ranks, mesh.config.rates, job.dtype, head_dim)
            strategy = asked_strategy(job.strategy, job.inner, job.travels, job.moves, rates)
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
    if job.recompute:
        recompute_layers(model)
    sharded = prepare(model)
    if job.scoring:
        course = score(model, data, where, sharded, on_step)
    else:
        course = train(model, data, job.learning_rate, where, sharded, on_step)
    timed, memory = bool(sharded and sharded.timed), peak_memory(device)
    if again is not None:
        first = next(iter(batches(tokens, job.seq_len, job.batch, 1)))
        again(partial(once, model, first, where, sharded, scoring=job.scoring), model)
    peak = asdict(peaks_of(load(job.backend), job.dtype))
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
