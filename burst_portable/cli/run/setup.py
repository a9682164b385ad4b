"""Validate the options of `burst-portable run` before a process starts, and build the job and its plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Embedding

from burst_portable.backends.base import Backend
from burst_portable.cli.flags import choose_backend, make_named_strategy
from burst_portable.cli.run.job import DTYPES, Job, check_memory, check_numbers, check_processes, cores, hardware_of_run
from burst_portable.cli.run.models import (
    check_tokens,
    checkpoint_of,
    config_of,
    enable_gradient_checkpointing,
    outline,
    silence_transformers,
    tokens_of,
)
from burst_portable.config import from_environment
from burst_portable.errors import InputError, unknown_name
from burst_portable.integrations.transformers.checks import check_model, check_positions
from burst_portable.integrations.transformers.layouts import masks_of, masks_of_layers, sizes_of
from burst_portable.planning.plans import Plan
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import plan as make_plan

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_flops(config: Any, model: Any, *, seq_len: int, batch: int, scoring: bool) -> int | None:
    """Return the FLOPs of a step over all ranks, or None for mixtures of experts.

    A token of a mixture of experts uses only some of the parameters, and how many is not counted.

    Args:
        config: Config of the model.
        model: The model, with or without memory for its weights.
        seq_len: Tokens per sequence.
        batch: Sequences per step.
        scoring: Whether there is no backward pass.
    """
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None
    sizes = sizes_of(config)
    num_pairs = sum(mask.num_pairs(seq_len) for mask in masks_of_layers(config))
    forward = 2 * seq_len * _matmul_parameters(model) + 4 * num_pairs * sizes["heads"] * sizes["head_dim"]
    return batch * forward * (1 if scoring else 3)


def _matmul_parameters(model: Any) -> int:
    """Return the number of parameters without embeddings, except one that also computes the logits."""
    embeddings = {module.weight for module in model.modules() if isinstance(module, Embedding)}
    head = model.get_output_embeddings()
    if head is not None:
        embeddings -= {head.weight}
    return sum(p.numel() for p in model.parameters() if p not in embeddings)


def mfu(flops: int | None, seconds: float, ranks: int, peak: float | None) -> float | None:
    """Return the model FLOP utilization of a step, or None if its FLOPs or the peak FLOP/s of a rank are unknown."""
    return flops / (seconds * ranks * peak) if flops and peak else None


STEPS = 10


@dataclass(frozen=True)
class Prepared:
    """A validated job and facts about it.

    Attributes:
        job: The job.
        plan: Plan of the layers whose attention has the most FLOPs.
        text: Description of the tokens.
        model: Facts about the model, for reports.
        model_flops: FLOPs per step, see `model_flops`.
        backend_reason: Why the backend was chosen; empty if it was named.
    """

    job: Job
    plan: Plan
    text: str
    model: dict[str, Any]
    model_flops: int | None
    backend_reason: str


def prepare(
    *,
    model: str,
    text: str | None,
    seq_len: int,
    ranks: int,
    steps: int | None,
    batch: int,
    learning_rate: float,
    seed: int,
    scoring: bool,
    backend: str,
    strategy: str,
    ranks_per_node: int | None,
    options: Mapping[str, object],
    layout: str,
    dtype: str,
    gradient_checkpointing: bool,
    profile: str,
    ablate: bool,
    local: bool,
) -> Prepared:
    """Return the job of the options. `local`: all ranks run on this machine. Raises `BurstError`."""
    silence_transformers()
    settings = from_environment()
    check_numbers(seq_len, ranks, steps, batch, learning_rate, seed)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    chosen, reason = choose_backend(backend, ranks if local else 1)
    on_cpu = local and not chosen.capabilities.streams  # ranks share this machine's cores and memory
    if on_cpu:
        check_processes(ranks)
    _check_kernel(settings.kernel, chosen)
    config = config_of(model, seq_len)
    checkpoint = checkpoint_of(model)
    sketch = _check_model(config, seq_len, scoring, gradient_checkpointing)
    tokens, name = tokens_of(text, checkpoint)
    check_tokens(tokens, seq_len, config.vocab_size)
    hardware = hardware_of_run(chosen, ranks, settings.hardware_spec, dtype, sizes_of(config)["head_dim"])
    planner = make_named_strategy(strategy, ranks_per_node, options, hardware)
    plan = _plan(config, seq_len, ranks, batch, planner, layout, dtype)
    model_facts = _model_facts(model, config, sketch)
    flops = model_flops(config, sketch, seq_len=seq_len, batch=batch, scoring=scoring)
    if steps is None:
        steps = math.ceil(tokens.numel() // seq_len / batch) if scoring else STEPS
    job = Job(
        model=model if checkpoint is None and not Path(model).is_file() else str(Path(model).resolve()),
        text=None if text is None else str(Path(text).resolve()),
        seq_len=seq_len,
        ranks=ranks,
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        scoring=scoring,
        backend=chosen.name,
        device_type=chosen.capabilities.device_type,
        strategy=strategy,
        ranks_per_node=ranks_per_node,
        options=dict(options),
        layout=plan.layout.name,
        dtype=dtype,
        threads=max(1, cores() // ranks) if local else torch.get_num_threads(),
        gradient_checkpointing=gradient_checkpointing,
        profile=profile,
        ablate=ablate,
    )
    if on_cpu:
        _check_memory(job, model_facts)
    return Prepared(job, plan, name, model_facts, flops, reason)


def _check_kernel(name: str, backend: Backend) -> None:
    kernels = ("auto", *(kernel.name for kernel in backend.kernels()))
    if name not in kernels:
        raise unknown_name("kernel in BURST_KERNEL", name, kernels)


def _check_model(config: Any, seq_len: int, scoring: bool, gradient_checkpointing: bool) -> Any:
    """Return the model without its weights. Raises `BurstError` if it is not supported."""
    sketch = outline(config)
    check_model(sketch)
    check_positions(config, seq_len)
    _check_dropout(config, scoring)
    if gradient_checkpointing:
        _check_gradient_checkpointing(sketch, scoring)
    return sketch


def _check_dropout(config: Any, scoring: bool) -> None:
    """Raise `InputError` for dropout in training, which differs at random from the run on one device."""
    other_tasks = ("classifier", "summary")  # their heads are not part of a language model
    found = {
        name: value
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop")) and value and not name.startswith(other_tasks)
    }
    if found and not scoring:
        raise InputError("dropout cannot be compared with one device", got=found, next_step="set it to 0 in the config")


def _check_gradient_checkpointing(sketch: Any, scoring: bool) -> None:
    if scoring:
        raise InputError(
            "--gradient-checkpointing requires a backward pass",
            got="--eval",
            next_step="omit one of them",
        )
    enable_gradient_checkpointing(sketch)


def _plan(config: Any, seq_len: int, ranks: int, batch: int, strategy: Strategy, layout: str, dtype: str) -> Plan:
    """Return the plan of the layers with the most FLOPs, after planning all, as each may be unsupported."""
    plans = [
        make_plan(
            seq_len=seq_len,
            ranks=ranks,
            **sizes_of(config),
            mask=mask,
            strategy=strategy,
            layout=layout,
            batch=batch,
            itemsize=getattr(torch, dtype).itemsize,
        )
        for mask in masks_of(config)
    ]
    return max(plans, key=lambda plan: plan.call.num_pairs)


def _check_memory(job: Job, model_facts: dict[str, Any]) -> None:
    check_memory(
        model_facts["parameters"],
        model_facts["vocabulary"],
        tokens=job.seq_len * job.batch,
        copies=job.ranks,
        itemsize=torch.promote_types(getattr(torch, job.dtype), torch.float32).itemsize,
        training=not job.scoring,
    )


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
