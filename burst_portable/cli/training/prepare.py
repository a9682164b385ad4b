"""All that can be refused is refused here, before a process starts: from what was typed to a job and its plan."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from burst_portable.backends.base import Backend
from burst_portable.backends.registry import known, load
from burst_portable.cli.training.job import DTYPES, Job
from burst_portable.cli.training.models import checkpoint_of, config_of, outline, quiet
from burst_portable.cli.training.texts import check_tokens, tokens_of
from burst_portable.errors import BackendUnavailableError, InputError, explain, unknown_name
from burst_portable.integrations.transformers.checks import check_model, check_positions
from burst_portable.mask import Mask
from burst_portable.planning import plan as make_plan
from burst_portable.plans import Plan
from burst_portable.strategies.auto import AutoStrategy

STEPS = 10


@dataclass(frozen=True)
class Prepared:
    """A job that can run, and what can be told about it before it does.

    Attributes:
        plan: of the layers whose attention is the most work.
        text: what the tokens are.
        model: facts about the model, for reports.
        backend_reason: why this backend, where it was chosen.
    """

    job: Job
    plan: Plan
    text: str
    model: dict[str, Any]
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
    layout: str,
    dtype: str,
    profiled: bool,
    local: bool,
) -> Prepared:
    """A job from what was typed. `local`: all ranks run on this machine. Raises `BurstError`."""
    quiet()
    _check_numbers(seq_len, ranks, steps, batch, learning_rate, seed)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    chosen, reason = choose_backend(backend, ranks if local else 1)
    config = config_of(model, seq_len)
    checkpoint = checkpoint_of(model)
    tokens, name = tokens_of(text, checkpoint)
    check_tokens(tokens, seq_len, config.vocab_size)
    sketch = outline(config)
    check_model(sketch)
    check_positions(config, seq_len)
    _check_dropout(config, scoring)
    plan = _plan(config, seq_len, ranks, batch, strategy, layout, dtype, chosen)
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
        process_group=chosen.capabilities.process_group,
        strategy=strategy,
        layout=layout,
        dtype=dtype,
        threads=max(1, cores() // ranks) if local else torch.get_num_threads(),
        profile=profiled,
    )
    return Prepared(job, plan, name, _about(model, config, sketch), reason)


def cores() -> int:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_backend(name: str, ranks: int) -> tuple[Backend, str]:
    """The backend of that name, or for "auto" an accelerator with a device a rank, else what needs none; and why.

    Raises `UnknownNameError`, or `BackendUnavailableError` with the reason.
    """
    if name not in ("auto", *known()):
        raise unknown_name("backend", name, ("auto", *known()))
    if name != "auto":
        backend = load(name)
        if reason := _missing(backend, ranks):
            raise BackendUnavailableError(explain(f"the backend {name!r} cannot run here", got=reason))
        return backend, "named"
    backends, reasons = [], []
    for one in known():
        try:
            backends.append(load(one))
        except BackendUnavailableError as error:  # nobody named it: a reason, like a probe's
            reasons.append(_briefly(one, str(error)))
    for backend in sorted(backends, key=lambda b: not b.capabilities.streams):
        if reason := _missing(backend, ranks):
            reasons.append(_briefly(backend.name, reason))
            continue
        return backend, "; ".join([f"chose {backend.name}", *reasons])
    raise BackendUnavailableError(
        explain("no backend can run here", got="; ".join(reasons), next_step="run `burst-portable doctor`")
    )


def _briefly(name: str, reason: str) -> str:
    """Why not this one, without what to do about it: nobody asked for it, and `burst-portable doctor` tells all."""
    return f"not {name}: {reason.partition(';')[0]}"


def _missing(backend: Backend, ranks: int) -> str | None:
    """Why a backend cannot run so many ranks on this machine, or None."""
    probe = backend.probe()
    if not probe.ok:
        return probe.reason
    if backend.capabilities.streams:
        count = torch.get_device_module(backend.capabilities.device_type).device_count()
        if count < ranks:
            return f"{count} devices for {ranks} ranks"
    return None


def _check_numbers(seq_len: int, ranks: int, steps: int | None, batch: int, rate: float, seed: int) -> None:
    least = {"--seq-len": (seq_len, 2), "--ranks": (ranks, 1), "--batch": (batch, 1), "--seed": (seed, 0)}
    if steps is not None:
        least["--steps"] = (steps, 1)
    for name, (value, at_least) in least.items():
        if value < at_least:
            raise InputError(explain(f"{name} is too small", got=value, allowed=f"at least {at_least}"))
    if not (math.isfinite(rate) and rate > 0):
        raise InputError(explain("--lr is no learning rate", got=rate, allowed="above 0"))
    if ranks > seq_len:
        raise InputError(explain("more ranks than tokens", got=f"--ranks {ranks}, --seq-len {seq_len}"))


def _check_dropout(config: Any, scoring: bool) -> None:
    """Attention refuses dropout while training; other dropout would differ from the reference, draw by draw."""
    heads_of_other_tasks = ("classifier", "summary")
    found = {
        name: value
        for name, value in config.to_dict().items()
        if ("dropout" in name or name.endswith("pdrop")) and value and not name.startswith(heads_of_other_tasks)
    }
    if found and not scoring:
        raise InputError(
            explain("dropout cannot be compared with one device", got=found, next_step="set it to 0 in the config")
        )


def _plan(
    config: Any, seq_len: int, ranks: int, batch: int, strategy: str, layout: str, dtype: str, backend: Backend
) -> Plan:
    """The plan of the layers with the most work; plans of the others are made too, so that they can refuse."""
    heads = config.num_attention_heads
    plans = [
        make_plan(
            seq_len=seq_len,
            ranks=ranks,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            mask=mask,
            strategy=AutoStrategy(rates=backend.capabilities.rates) if strategy == "auto" else strategy,
            layout=layout,
            batch=batch,
            itemsize=getattr(torch, dtype).itemsize,
        )
        for mask in _masks(config)
    ]
    return max(plans, key=lambda plan: plan.problem.area)


def _masks(config: Any) -> list[Mask]:
    """What the layers of a decoder let through, as its config says."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
    return [
        Mask.window(window - 1) if kind == "sliding_attention" and window else Mask.causal()
        for kind in dict.fromkeys(kinds)
    ]


def _about(name: str, config: Any, sketch: Any) -> dict[str, Any]:
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


def check_writable(report: Path | None, json_file: Path | None) -> None:
    """Refuse places that nothing can be written to, before the work is done. The report's folder is made."""
    try:
        if report is not None:
            report.mkdir(parents=True, exist_ok=True)
        if json_file is not None and (json_file.is_dir() or not json_file.absolute().parent.is_dir()):
            raise InputError(explain("--json names no file in a folder that is there", got=str(json_file)))
    except OSError as error:
        raise InputError(explain(f"the report cannot be written to {report}", got=error.strerror)) from error
