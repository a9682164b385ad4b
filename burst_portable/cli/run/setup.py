"""Validate the options of `burst-portable run` before a process starts, and build the job and its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import Embedding

from burst_portable.cli.backend_choice import choose_backend
from burst_portable.cli.flags import DTYPES
from burst_portable.cli.machine_limits import check_memory, check_processes, cores
from burst_portable.cli.run.dropout import check_dropout_is_used, set_dropout
from burst_portable.cli.run.job import Job, check_numbers, hardware_of_run
from burst_portable.cli.run.models import (
    checkpoint_of,
    config_of,
    enable_gradient_checkpointing,
    local_model,
    outline,
    silence_transformers,
)
from burst_portable.cli.run.texts import check_tokens, tokens_of
from burst_portable.cli.strategy_flags import make_named_strategy
from burst_portable.config import from_environment
from burst_portable.errors import InputError, unknown_name
from burst_portable.integrations.transformers.layers.global_positions import can_watch_positions
from burst_portable.integrations.transformers.layouts import masks_of_layers, sizes_of
from burst_portable.integrations.transformers.models.checks import check_model
from burst_portable.integrations.transformers.models.position_limits import check_positions
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import plan as make_plan

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_flops(config: Any, model: Any, *, seq_len: int, batch: int, scoring: bool) -> int | None:
    """Return the FLOPs of a step over all ranks, or None for mixtures of experts.

    A token of a mixture of experts uses only some of the parameters, and how many is not counted. The model's weights
    may have no memory. With `scoring` there is no backward pass.
    """
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None
    sizes = sizes_of(config)
    num_pairs = sum(mask.num_pairs(seq_len) for mask in masks_of_layers(config))
    embeddings = {module.weight for module in model.modules() if isinstance(module, Embedding)}
    if (head := model.get_output_embeddings()) is not None:  # it may share its weight with an embedding
        embeddings -= {head.weight}
    parameters: int = sum(p.numel() for p in model.parameters() if p not in embeddings)
    forward = 2 * seq_len * parameters + 2 * num_pairs * sizes["heads"] * (sizes["head_dim"] + sizes["v_head_dim"])
    return batch * forward * (1 if scoring else 3)


def mfu(flops: int | None, seconds: float, ranks: int, peak: float | None) -> float | None:
    """Return the model FLOP utilization of a step, or None if its FLOPs or the peak FLOP/s of a rank are unknown."""
    return flops / (seconds * ranks * peak) if flops and peak else None


STEPS = 10


@dataclass(frozen=True)
class PreparedJob:
    """A validated job and facts about it.

    Attributes:
        job: The job.
        plan: Plan of the layers whose attention has the most FLOPs.
        hardware: Rates for predicted times: those of BURST_HARDWARE_SPEC, or of the backend.
        text: Description of the tokens.
        model: Facts about the model, for reports.
        model_flops: FLOPs per step, see `model_flops`.
        backend_reason: Why the backend was chosen; empty if it was named.
    """

    job: Job
    plan: Plan
    hardware: HardwareSpec
    text: str
    model: dict[str, Any]
    model_flops: int | None
    backend_reason: str


def prepare_job(job: Job, steps: int | None, *, local: bool) -> PreparedJob:
    """Validate and complete a job. `local`: all ranks run on this machine. Raises `BurstError`."""
    silence_transformers()
    settings = from_environment()
    check_numbers(job, steps)
    if job.dtype not in DTYPES:
        raise unknown_name("dtype", job.dtype, DTYPES)
    backend, reason = choose_backend(job.backend, job.ranks if local else 1)
    on_cpu = local and not backend.capabilities.streams  # ranks share this machine's cores and memory
    if on_cpu:
        check_processes(job.ranks)
    kernels = ("auto", *(kernel.name for kernel in backend.kernels()))
    if settings.kernel not in kernels:
        raise unknown_name("kernel in BURST_KERNEL", settings.kernel, kernels)
    name, job = job.model, replace(job, model=local_model(job.model))
    config, checkpoint = config_of(job.model, job.seq_len), checkpoint_of(job.model)
    if job.dropout:
        set_dropout(config, job.dropout)
    sketch = _check_model(config, job)
    tokens, text = tokens_of(job.text, checkpoint)
    check_tokens(tokens, job.seq_len, config.vocab_size)
    hardware = hardware_of_run(backend, job.ranks, settings.hardware_spec, job.dtype, sizes_of(config)["head_dim"])
    plan = _plan(config, job, make_named_strategy(job.strategy, job.ranks_per_node, job.options, hardware))
    model = _model_facts(name, config, sketch)
    flops = model_flops(config, sketch, seq_len=job.seq_len, batch=job.batch, scoring=job.scoring)
    if steps is None:
        steps = math.ceil(tokens.numel() // job.seq_len / job.batch) if job.scoring else STEPS
    is_path = checkpoint is not None or Path(job.model).is_file()
    job = replace(
        job,
        model=str(Path(job.model).resolve()) if is_path else job.model,
        text=None if job.text is None else str(Path(job.text).resolve()),
        backend=backend.name,
        layout=plan.layout.name,
        steps=steps,
        device_type=backend.capabilities.device_type,
        threads=max(1, cores() // job.ranks) if local else torch.get_num_threads(),
    )
    if on_cpu:
        check_memory(
            model["parameters"],
            model["vocabulary"],
            tokens=job.seq_len * job.batch,
            copies=job.ranks,
            itemsize=torch.promote_types(getattr(torch, job.dtype), torch.float32).itemsize,
            training=not job.scoring,
        )
    return PreparedJob(job, plan, hardware, text, model, flops, reason)


def _check_model(config: Any, job: Job) -> Any:
    """Return the model without its weights. Raises `BurstError` if it is not supported."""
    sketch = outline(config)
    check_model(sketch)
    check_positions(config, job.seq_len, watched=can_watch_positions(sketch))
    if not job.scoring:
        _check_dropout(config, given=job.dropout)
    if job.dropout:
        check_dropout_is_used(sketch, job.dropout)
    if job.gradient_checkpointing:
        if job.scoring:
            what, next_step = "--gradient-checkpointing requires a backward pass", "omit one of them"
            raise InputError(what, got="--eval", next_step=next_step)
        enable_gradient_checkpointing(sketch)
    return sketch


def _check_dropout(config: Any, *, given: float) -> None:
    """Raise `InputError` for dropout in training, which differs at random from the run on one device.

    Attention dropout by global position does not; it is `given` by --dropout.
    """
    other_tasks = ("classifier", "summary")  # their heads are not part of a language model
    found = {
        name: value
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop"))
        and value
        and not name.startswith(other_tasks)
        and not (given and name == "attention_dropout")
    }
    if found:
        next_step = "set it to 0 in the config; --dropout P sets attention_dropout, which is compared"
        raise InputError("dropout cannot be compared with one device", got=found, next_step=next_step)


def _plan(config: Any, job: Job, strategy: Strategy) -> Plan:
    """Return the plan of the layers with the most FLOPs, after planning all, as each may be unsupported."""
    plans = [
        make_plan(
            seq_len=job.seq_len,
            ranks=job.ranks,
            **sizes_of(config),
            mask=mask,
            strategy=strategy,
            layout=job.layout,
            batch=job.batch,
            itemsize=getattr(torch, job.dtype).itemsize,
            dropout_p=job.dropout,
        )
        for mask in dict.fromkeys(masks_of_layers(config))
    ]
    return max(plans, key=lambda plan: plan.call.num_pairs)


def _model_facts(name: str, config: Any, sketch: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": config.model_type,
        "parameters": sum(p.numel() for p in sketch.parameters()),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        "hidden_size": config.hidden_size,
        "vocabulary": config.vocab_size,
    }
