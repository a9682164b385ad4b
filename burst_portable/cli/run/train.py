"""Train or score one rank's shard of a job."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.optim import Optimizer

from burst_portable.backends.selection import load
from burst_portable.cli.run.dropout import ReferenceDropout, set_dropout
from burst_portable.cli.run.job import Job, hardware_of_run
from burst_portable.cli.run.models import (
    build,
    checkpoint_of,
    config_of,
    enable_gradient_checkpointing,
    silence_transformers,
)
from burst_portable.cli.run.texts import batches, tokens_of
from burst_portable.cli.strategy_flags import make_named_strategy
from burst_portable.gradients import all_reduce, all_reduce_gradients
from burst_portable.integrations.transformers import ShardedModel, parallelize
from burst_portable.integrations.transformers.layouts import sizes_of
from burst_portable.mesh import Mesh
from burst_portable.profiling.session import Session, profile

PHASES = ("forward", "backward", "gradient_all_reduce", "optimizer")


@dataclass
class StepHistory:
    """Results of each step.

    Attributes:
        losses: Mean loss over all tokens of a step.
        tokens: Number of tokens of each mean.
        seconds: Duration of each step.
        phases: Seconds of each step by phase; `kernels` and `communication_wait` are parts of forward and backward.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)

    def append(self, loss: float, tokens: int, seconds: float, phases: dict[str, float]) -> None:
        """Add the results of a step."""
        self.losses.append(loss)
        self.tokens.append(tokens)
        self.seconds.append(seconds)
        self.phases.append(phases)


@dataclass(frozen=True)
class Sharded:
    """Objects of a rank that a run on one device does not have.

    Attributes:
        model: Shards batches.
        mesh: The mesh of the ranks.
        session: Records the attention calls.
    """

    model: ShardedModel
    mesh: Mesh
    session: Session | None = None


OnStep = Callable[[StepHistory], None]


@dataclass(frozen=True)
class Trainer:
    """Train or score a model on one rank, or on one device if `sharded` is None. 16-bit dtypes use autocast."""

    model: Any
    device: torch.device
    dtype: torch.dtype
    sharded: Sharded | None = None

    def train(self, data: Iterable[Tensor], learning_rate: float, on_step: OnStep) -> StepHistory:
        """Train with AdamW at a constant learning rate, one step per batch. The last gradients stay in the model.

        Args:
            data: Batches ``[B, N]`` of full sequences, equal on all ranks.
            learning_rate: Learning rate of AdamW.
            on_step: Called with the history after each step.
        """
        self.model.train()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
        history = StepHistory()
        for ids in data:
            self.train_step(optimizer, ids, history)
            on_step(history)
        return history

    def train_step(self, optimizer: Optimizer, ids: Tensor, history: StepHistory) -> None:
        """Train one step and append its results to the history."""
        started = perf_counter()
        optimizer.zero_grad(set_to_none=True)
        before = self._totals()
        loss, tokens = self._forward(ids)
        forward = perf_counter()
        loss.backward()
        backward = perf_counter()
        attention = self._attention_seconds(before)
        if self.sharded is not None:
            all_reduce_gradients(self.model.parameters(), self.sharded.mesh)
        value = self._global_loss(loss)
        reduced = perf_counter()
        optimizer.step()
        done = perf_counter()
        spent = (forward - started, backward - forward, reduced - backward, done - reduced)
        history.append(value, tokens, done - started, dict(zip(PHASES, spent, strict=True)) | attention)

    def score(self, data: Iterable[Tensor], on_step: OnStep) -> StepHistory:
        """Compute the mean loss of each batch, without training. Arguments as in `train`."""
        self.model.eval()
        history = StepHistory()
        for ids in data:
            started = perf_counter()
            before = self._totals()
            with torch.no_grad():
                loss, tokens = self._forward(ids)
            attention = self._attention_seconds(before)
            value = self._global_loss(loss)
            seconds = perf_counter() - started
            history.append(value, tokens, seconds, {"forward": seconds} | attention)
            on_step(history)
        return history

    def forward_backward(self, ids: Tensor, *, scoring: bool) -> None:
        """Run forward and, in training, backward of one step. Gradients are added to those of the model."""
        with torch.set_grad_enabled(not scoring):
            loss, _ = self._forward(ids)
            if not scoring:
                loss.backward()

    def _forward(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return this rank's part of the mean loss, and the number of tokens of the mean."""
        ids = ids.to(self.device)
        tokens = ids.shape[0] * (ids.shape[1] - 1)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize < 4):
            if self.sharded is None:  # transformers shifts the labels and computes the mean, without this package
                return self.model(input_ids=ids, labels=ids, use_cache=False).loss, tokens
            return self.model(**self.sharded.model.shard(ids)).loss, tokens

    def _global_loss(self, loss: Tensor) -> float:
        value = loss.detach().double()
        return (value if self.sharded is None else all_reduce(value.reshape(1), self.sharded.mesh)).item()

    def _totals(self) -> tuple[float, float]:
        session = self.sharded.session if self.sharded else None
        return session.totals() if session else (0.0, 0.0)

    def _attention_seconds(self, before: tuple[float, float]) -> dict[str, float]:
        kernels, waiting = self._totals()
        return {"kernels": kernels - before[0], "communication_wait": waiting - before[1]}


GRADIENTS = "gradients.safetensors"
_FINGERPRINT_CHUNK = 1 << 22  # elements
Gradients = dict[str, Tensor]
"""Gradients of the last step by parameter name; empty if no training."""


@dataclass(kw_only=True)
class Outcome(StepHistory):
    """Results of a rank or of the reference, as plain data for a pipe.

    Attributes:
        peak_memory_bytes: Peak memory of the device, or of the process on CPUs.
        fingerprint: Hash of the parameters after the last step; equal on all ranks of a correct run.
        timed: Whether kernels and waiting were measured separately.
        notes: Remarks about the model's weights.
        peak: `backends.base.Peaks` of the device as a dict.
        kernels: Names of the kernels that computed attention -> reason.
        profile: The profiler's report, on rank 0 of a profiled run.
    """

    peak_memory_bytes: int
    fingerprint: str
    timed: bool
    notes: list[str]
    peak: dict[str, Any]
    kernels: dict[str, str]
    profile: dict[str, Any] | None = None


def run_rank(job: Job, mesh: Mesh, device: torch.device, on_step: OnStep) -> tuple[Outcome, Gradients]:
    """Train or score this rank's shard. Return the outcome, and the last gradients, summed over the ranks."""
    with profile(job.profile or "basic", mesh=mesh) as session:  # type: ignore[arg-type]  # the command sets it

        def prepare(model: Any) -> Sharded:
            head_dim = sizes_of(model.config)["head_dim"]
            hardware = hardware_of_run(load(job.backend), job.ranks, mesh.config.hardware_spec, job.dtype, head_dim)
            strategy = make_named_strategy(job.strategy, job.ranks_per_node, job.options, hardware)
            sharded = parallelize(model, mesh, strategy=strategy, layout=job.layout)
            session.mark()  # building the model is not part of the first step
            return Sharded(sharded, mesh, session)

        def end_step(history: StepHistory) -> None:
            session.mark()
            on_step(history)

        outcome, gradients = _run(job, device, prepare, end_step)
    if job.profile and (report := session.report(skip=1 if job.steps > 1 else 0)):
        outcome.profile = report.data
    return outcome, gradients


def run_reference(job: Job, device: torch.device, on_step: OnStep) -> tuple[Outcome, Gradients]:
    """Run the job on one device with plain attention. Only the loop, and dropout if any, is code of this package."""

    def prepare(model: Any) -> None:
        if job.dropout:
            ReferenceDropout(model)

    return _run(job, device, prepare, on_step)


def _run(
    job: Job, device: torch.device, prepare: Callable[[Any], Sharded | None], on_step: OnStep
) -> tuple[Outcome, Gradients]:
    silence_transformers()
    tokens, _ = tokens_of(job.text, checkpoint_of(job.model))
    data = batches(tokens, job.seq_len, job.batch, job.steps)
    dtype = getattr(torch, job.dtype)
    config = config_of(job.model, job.seq_len)
    if job.dropout:
        set_dropout(config, job.dropout)
    model, notes = build(job.model, config, dtype, job.seed, device)
    if job.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    sharded = prepare(model)
    if job.dropout:
        torch.manual_seed(job.seed)  # each call takes the seed of its dropout from this generator
    trainer = Trainer(model, device, dtype, sharded)
    history = trainer.score(data, on_step) if job.scoring else trainer.train(data, job.learning_rate, on_step)
    backend = load(job.backend)
    outcome = Outcome(
        **vars(history),
        peak_memory_bytes=peak_memory(device),
        fingerprint=fingerprint(model),
        timed=sharded is not None and not backend.capabilities.streams,  # calls return after their work
        notes=notes,
        peak=asdict(backend.peaks(job.dtype)),
        kernels=sharded.session.used_kernels if sharded and sharded.session else {},
    )
    if job.ablate and sharded and sharded.session:
        first = next(iter(batches(tokens, job.seq_len, job.batch, 1)))
        step = partial(trainer.forward_backward, first, scoring=job.scoring)
        sharded.session.ablate(step, model=model, device=device.type)
    return outcome, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def save_gradients(gradients: Gradients, folder: Path) -> None:
    """Save gradients for the process that compares them."""
    save_file({name: g.detach().cpu().contiguous() for name, g in gradients.items()}, folder / GRADIENTS)


def load_gradients(folder: Path) -> Gradients:
    """Return the gradients that `save_gradients` wrote."""
    return load_file(folder / GRADIENTS)


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes of the device's allocator, or of this process on CPUs."""
    module = torch.get_device_module(device)
    if hasattr(module, "max_memory_allocated"):
        return int(module.max_memory_allocated())
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def fingerprint(model: Any) -> str:
    """Return a hash of all bits of the parameters: sums modulo 2^64 weighted by position, computed on their device."""
    sums = []
    for parameter in model.parameters():
        dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.itemsize]
        for part in parameter.detach().reshape(-1).view(dtype).split(_FINGERPRINT_CHUNK):
            weights = torch.arange(1, 2 * part.numel(), 2, device=part.device)  # odd: each changed bit changes the sum
            sums.append((part.long() * weights).sum())
    return hashlib.sha256(torch.stack(sums).cpu().numpy().tobytes()).hexdigest()
