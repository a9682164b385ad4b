"""Train or score one rank's shard of a job."""

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
from burst_portable.cli.flags import make_named_strategy
from burst_portable.cli.run.job import Job, hardware_of_run
from burst_portable.cli.run.models import (
    batches,
    build,
    checkpoint_of,
    config_of,
    enable_gradient_checkpointing,
    silence_transformers,
    tokens_of,
)
from burst_portable.gradients import all_reduce, all_reduce_gradients
from burst_portable.integrations.transformers import parallelize
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


@dataclass(frozen=True)
class Sharded:
    """Objects of a rank that a run on one device does not have.

    Attributes:
        handle: The `ShardedModel`, which shards batches.
        mesh: The mesh of the ranks.
        session: Records the attention calls.
        timed: Whether calls return after their work, so that the session's totals distinguish kernels from waiting.
    """

    handle: Any
    mesh: Mesh
    session: Session | None = None
    timed: bool = False

    def total(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        return all_reduce(x, self.mesh)


OnStep = Callable[[StepHistory], None]


@dataclass(frozen=True)
class DeviceConfig:
    """The device of a run, and its dtype. 16-bit dtypes use autocast with float32 parameters."""

    device: torch.device
    dtype: torch.dtype

    @property
    def parameters(self) -> torch.dtype:
        """Dtype of the parameters: AdamW's small updates vanish in 16 bits, and its epsilon in float16."""
        return torch.promote_types(self.dtype, torch.float32)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of a forward pass."""
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype.itemsize < 4)


def train(
    model: Any,
    data: Iterable[Tensor],
    learning_rate: float,
    device_config: DeviceConfig,
    sharded: Sharded | None,
    on_step: OnStep,
) -> StepHistory:
    """Train with AdamW at a constant learning rate, one step per batch. The last gradients stay in the model.

    Args:
        model: The model, sharded or not.
        data: Batches ``[B, N]`` of full sequences, equal on all ranks.
        learning_rate: Learning rate of AdamW.
        device_config: Device and dtype.
        sharded: Objects of this rank; None on one device.
        on_step: Called with the history after each step.
    """
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    history = StepHistory()
    for ids in data:
        train_step(model, optimizer, ids, device_config, sharded, history)
        on_step(history)
    return history


def train_step(
    model: Any,
    optimizer: Optimizer,
    ids: Tensor,
    device_config: DeviceConfig,
    sharded: Sharded | None,
    history: StepHistory,
) -> None:
    """Train one step and append its results to the history."""
    started = perf_counter()
    optimizer.zero_grad(set_to_none=True)
    before = _totals(sharded)
    loss, tokens = _forward(model, ids, device_config, sharded)
    forward = perf_counter()
    loss.backward()
    backward = perf_counter()
    kernels, waiting = (b - a for a, b in zip(before, _totals(sharded), strict=True))
    if sharded is not None:
        all_reduce_gradients(model.parameters(), sharded.mesh)
    value = _global_loss(loss, sharded)
    reduced = perf_counter()
    optimizer.step()
    done = perf_counter()
    spent = (forward - started, backward - forward, reduced - backward, done - reduced)
    phases = dict(zip(PHASES, spent, strict=True)) | {"kernels": kernels, "communication_wait": waiting}
    _append(history, value, tokens, done - started, phases)


def score(
    model: Any, data: Iterable[Tensor], device_config: DeviceConfig, sharded: Sharded | None, on_step: OnStep
) -> StepHistory:
    """Compute the mean loss of each batch, without training. Arguments as in `train`."""
    model.eval()
    history = StepHistory()
    for ids in data:
        started = perf_counter()
        before = _totals(sharded)
        with torch.no_grad():
            loss, tokens = _forward(model, ids, device_config, sharded)
        kernels, waiting = (b - a for a, b in zip(before, _totals(sharded), strict=True))
        value = _global_loss(loss, sharded)
        seconds = perf_counter() - started
        _append(
            history, value, tokens, seconds, {"forward": seconds, "kernels": kernels, "communication_wait": waiting}
        )
        on_step(history)
    return history


def forward_backward(
    model: Any, ids: Tensor, device_config: DeviceConfig, sharded: Sharded | None, *, scoring: bool
) -> None:
    """Run forward and, in training, backward of one step, without all-reduce and optimizer.

    Gradients are added to those of the model.
    """
    with torch.set_grad_enabled(not scoring):
        loss, _ = _forward(model, ids, device_config, sharded)
        if not scoring:
            loss.backward()


def _forward(model: Any, ids: Tensor, device_config: DeviceConfig, sharded: Sharded | None) -> tuple[Tensor, int]:
    """Return this rank's part of the mean loss, and the number of tokens of the mean."""
    ids = ids.to(device_config.device)
    tokens = ids.shape[0] * (ids.shape[1] - 1)
    with device_config.autocast():
        if sharded is None:  # transformers shifts the labels and computes the mean: independent of this package
            return model(input_ids=ids, labels=ids, use_cache=False).loss, tokens
        return model(**sharded.handle.shard(ids)).loss, tokens


def _global_loss(loss: Tensor, sharded: Sharded | None) -> float:
    value = loss.detach().double()
    return (value if sharded is None else sharded.total(value.reshape(1))).item()


def _totals(sharded: Sharded | None) -> tuple[float, float]:
    session = sharded.session if sharded else None
    return session.totals() if session else (0.0, 0.0)


def _append(history: StepHistory, loss: float, tokens: int, seconds: float, phases: dict[str, float]) -> None:
    history.losses.append(loss)
    history.tokens.append(tokens)
    history.seconds.append(seconds)
    history.phases.append(phases)


GRADIENTS = "gradients.safetensors"
_FINGERPRINT_CHUNK = 1 << 22  # elements
Gradients = dict[str, Tensor]
"""Gradients of the last step by parameter name; empty if no training."""


@dataclass(frozen=True)
class Outcome:
    """Results of a rank or of the reference, as plain data for a pipe.

    Attributes:
        history: `StepHistory` as a dict.
        peak_memory_bytes: Peak memory of the device, or of the process on CPUs.
        fingerprint: Hash of the parameters after the last step; equal on all ranks of a correct run.
        timed: Whether kernels and waiting were measured separately.
        notes: Remarks about the model's weights.
        peak: `backends.base.Peaks` of the device as a dict.
        profile: The profiler's report, on rank 0 of a profiled run.
    """

    history: dict[str, Any]
    peak_memory_bytes: int
    fingerprint: str
    timed: bool
    notes: list[str]
    peak: dict[str, Any]
    profile: dict[str, Any] | None = None


def run_rank(job: Job, mesh: Mesh, device: torch.device, on_step: OnStep) -> tuple[Outcome, Gradients]:
    """Train or score this rank's shard. Return the outcome, and the last gradients, summed over the ranks."""
    backend = load(job.backend)
    capabilities = backend.capabilities
    with profile(job.profile or "basic", mesh=mesh) as session:  # type: ignore[arg-type]  # the command sets it

        def prepare(model: Any) -> Sharded:
            head_dim = sizes_of(model.config)["head_dim"]
            hardware = hardware_of_run(backend, job.ranks, mesh.config.hardware_spec, job.dtype, head_dim)
            strategy = make_named_strategy(job.strategy, job.ranks_per_node, job.options, hardware)
            handle = parallelize(model, mesh, strategy=strategy, layout=job.layout)
            session.mark()  # building the model is not part of the first step
            return Sharded(handle, mesh, session, timed=not capabilities.streams)

        def ablate(step: Callable[[], object], model: Any) -> None:
            session.ablate(step, model=model, device=device.type)

        def end_step(history: StepHistory) -> None:
            session.mark()
            on_step(history)

        outcome, gradients = _run(job, device, prepare, end_step, ablate if job.ablate else None)
    if job.profile and (report := session.report(skip=1 if job.steps > 1 else 0)):
        outcome = replace(outcome, profile=report.data)
    return outcome, gradients


def run_reference(job: Job, device: torch.device, on_step: OnStep) -> tuple[Outcome, Gradients]:
    """Run the job on one device with plain attention. Only the loop is code of this package."""
    return _run(job, device, lambda model: None, on_step)


def _run(
    job: Job,
    device: torch.device,
    prepare: Callable[[Any], Sharded | None],
    on_step: OnStep,
    ablate: Callable[[Callable[[], object], Any], None] | None = None,
) -> tuple[Outcome, Gradients]:
    silence_transformers()
    tokens, _ = tokens_of(job.text, checkpoint_of(job.model))
    data = batches(tokens, job.seq_len, job.batch, job.steps)
    device_config = DeviceConfig(device, getattr(torch, job.dtype))
    model, notes = build(job.model, config_of(job.model, job.seq_len), device_config.parameters, job.seed, device)
    if job.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    sharded = prepare(model)
    if job.scoring:
        history = score(model, data, device_config, sharded, on_step)
    else:
        history = train(model, data, job.learning_rate, device_config, sharded, on_step)
    timed, memory = bool(sharded and sharded.timed), peak_memory(device)
    if ablate is not None:
        first = next(iter(batches(tokens, job.seq_len, job.batch, 1)))
        ablate(partial(forward_backward, model, first, device_config, sharded, scoring=job.scoring), model)
    peak = asdict(load(job.backend).peaks(job.dtype))
    outcome = Outcome(asdict(history), memory, fingerprint(model), timed, notes, peak)
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


def history_of(outcome: Outcome) -> StepHistory:
    """Return the history of an outcome, which is a dict."""
    return StepHistory(**outcome.history)
