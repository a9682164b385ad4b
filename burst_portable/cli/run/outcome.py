"""Compare the outcomes of ranks and reference, and build the JSON of `burst-portable run`."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from burst_portable import __version__
from burst_portable.backends.selection import load
from burst_portable.cli.plan_facts import plan_facts
from burst_portable.cli.run.setup import PreparedJob, mfu
from burst_portable.cli.run.train import Gradients, Outcome

SCHEMA = "burst_portable.run/5"
Facts = dict[str, Any]

# Tolerances are about ten times the largest measured difference from one device: tiny model, 2 and 3 ranks, 256 to
# 4,096 tokens, 2 to 30 steps of AdamW. transformers computes losses in float32 for every dtype. Gradients are compared
# after all steps. AdamW moves a weight with a near-zero gradient as far as any other weight, so rounding decides its
# direction, and the steps accumulate more error than attention has. `gradient` is the error of all parameters together.
# It would hide a wrong dK, whose norm may be a thousandth of the total, so `parameter` is the largest error of one.
# Measured in float32: 2e-7, 2e-5, 3e-4; float64: 2e-7, 1e-8; bfloat16: 7e-5, 6e-3; float16: 3e-5, 2e-3. The error of
# one parameter was measured in float32 only; other dtypes use the same ratio to `gradient`.
TOLERANCES: dict[str, dict[str, float]] = {
    "float64": {"loss": 2e-6, "gradient": 1e-7, "parameter": 1e-6},
    "float32": {"loss": 2e-6, "gradient": 2e-4, "parameter": 3e-3},
    "bfloat16": {"loss": 1e-3, "gradient": 6e-2, "parameter": 4e-1},
    "float16": {"loss": 3e-4, "gradient": 2e-2, "parameter": 2e-1},
}
_MIN_NORM = 1e-4
"""Smallest norm by which an error is divided, relative to the total: gradients that should be 0 are rounding errors."""


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Return |a - b| / |b| of each loss; infinite if one is not finite."""
    return [_ratio(abs(a - b), abs(b)) for a, b in zip(losses, reference, strict=True)]


def _ratio(difference: float, norm: float) -> float:
    """Return difference / norm, where 0 / 0 is 0; infinite if the result is not finite."""
    if not norm:
        return 0.0 if difference == 0 else math.inf
    ratio = difference / norm
    return ratio if math.isfinite(ratio) else math.inf


def gradient_error(gradients: Gradients, reference: Gradients) -> tuple[float, float, str]:
    """Return |g - r| / |r| of all gradients, then the largest of one parameter, and its name.

    Computed in float64. Infinite if names or shapes differ.
    """
    if not reference or gradients.keys() != reference.keys():
        return math.inf, math.inf, "other parameters have gradients"
    differences, norms = {}, {}
    for name, expected in reference.items():
        r, g = expected.detach().double().cpu(), gradients[name].detach().double().cpu()
        differences[name] = float((g - r).norm()) if g.shape == r.shape else math.inf
        norms[name] = float(r.norm())
    total = math.hypot(*norms.values())
    relative = {name: _ratio(differences[name], max(norms[name], _MIN_NORM * total)) for name in reference}
    worst = max(relative, key=lambda name: relative[name])
    return _ratio(math.hypot(*differences.values()), total), relative[worst], worst


def facts_of(
    prepared: PreparedJob,
    outcomes: list[Outcome],
    reference: Outcome | None,
    gradients: tuple[float, float, str] | None,
) -> Facts:
    """Return the JSON of a run. `reference` and `gradients`, from `gradient_error`, are None if not compared."""
    job, first = prepared.job, outcomes[0]
    total, largest, worst = gradients or (None, None, None)
    differences = relative_differences(first.losses, reference.losses) if reference else None
    facts: Facts = {
        **_job_facts(prepared),
        "losses": first.losses,
        "reference_losses": reference.losses if reference else None,
        "relative_differences": differences,
        "max_relative_difference": max(differences) if differences else None,
        "gradient_relative_difference": total,
        "worst_gradient_relative_difference": largest,
        "worst_gradient": worst,
        "tolerances": TOLERANCES[job.dtype],
        "kernels": first.kernels,
        "notes": first.notes,
        "ranks_agree": all((o.fingerprint, o.losses) == (first.fingerprint, first.losses) for o in outcomes),
        "perplexity": _perplexity(first) if job.scoring else None,
        "reference_perplexity": _perplexity(reference) if reference and job.scoring else None,
        **_speed(prepared, outcomes, reference),
        "phases": [_phases(o) for o in outcomes],
        "peak_memory_bytes": [o.peak_memory_bytes for o in outcomes],
        "device_memory": load(job.backend).capabilities.streams,
        "plan": plan_facts(prepared.plan, prepared.hardware, 0),
        "device": platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    facts["failures"] = failures(facts)
    facts["status"] = "failed" if facts["failures"] else "ok" if reference else "unchecked"
    return facts


def _job_facts(prepared: PreparedJob) -> Facts:
    """Return the settings of the run."""
    job, plan = prepared.job, prepared.plan
    return {
        "schema": SCHEMA,
        "version": __version__,
        "mode": "perplexity" if job.scoring else "training",
        "backend": job.backend,
        "backend_reason": prepared.backend_reason,
        "world_size": job.ranks,
        "strategy": plan.label,
        "strategy_requested": job.strategy,
        "transfer": {name: part.route.name for name, part in plan.passes()} if plan.ring_size > 1 else None,
        "layout": job.layout,
        "seq_len": job.seq_len,
        "steps": job.steps,
        "batch": job.batch,
        "dtype": job.dtype,
        "learning_rate": None if job.scoring else job.learning_rate,
        "seed": job.seed,
        **({"dropout": job.dropout} if job.dropout else {}),
        "gradient_checkpointing": job.gradient_checkpointing,
        "threads_per_rank": job.threads,
        "model": prepared.model,
        "text": prepared.text,
    }


def _speed(prepared: PreparedJob, outcomes: Sequence[Outcome], reference: Outcome | None) -> Facts:
    """Return times and rates. A step takes as long as its slowest rank; the peak is that of the slowest device."""
    job = prepared.job
    seconds = [max(o.seconds[i] for o in outcomes) for i in range(job.steps)]
    peak = min((o.peak for o in outcomes), key=lambda one: one["flops"] or math.inf)
    tokens = job.seq_len * job.batch
    return {
        "tokens_per_second": tokens / _mean(seconds),
        "reference_tokens_per_second": tokens / _mean(reference.seconds) if reference else None,
        "seconds_per_step": _mean(seconds),
        "reference_seconds_per_step": _mean(reference.seconds) if reference else None,
        "model_flops_per_step": prepared.model_flops,
        "mfu": mfu(prepared.model_flops, _mean(seconds), job.ranks, peak["flops"]),
        "peak": peak,
        "step_seconds": seconds,
        "reference_step_seconds": reference.seconds if reference else None,
    }


def failures(facts: Facts) -> list[str]:
    """Describe each failed check of a run. The list is empty if all passed or were not run."""
    found = []
    limits = facts["tolerances"]
    if not facts["ranks_agree"]:
        found.append("ranks ended with different parameters or losses")
    if not all(math.isfinite(loss) for loss in facts["losses"]):
        found.append("a loss is not finite")
    for key, limit, what in (
        ("max_relative_difference", "loss", "losses differ"),
        ("gradient_relative_difference", "gradient", "gradients differ"),
        ("worst_gradient_relative_difference", "parameter", f"the gradient of {facts['worst_gradient']} differs"),
    ):
        if facts[key] is not None and not facts[key] <= limits[limit]:
            found.append(f"{what} from one device by {facts[key]:.2g} (allowed: {limits[limit]:.2g})")
    return found


def _mean(seconds: Sequence[float]) -> float:
    """Return the mean without the first value, the warm-up step, if there are others."""
    values = seconds[1:] or seconds
    return sum(values) / len(values)


def _perplexity(outcome: Outcome) -> float:
    mean = sum(loss * n for loss, n in zip(outcome.losses, outcome.tokens, strict=True)) / sum(outcome.tokens)
    return math.exp(mean) if mean < 700 else math.inf


def _phases(outcome: Outcome) -> dict[str, float | None]:
    """Return mean seconds of a step by phase. `kernels` and `communication_wait` are None if not measured."""
    means: dict[str, float | None] = {
        name: _mean([step[name] for step in outcome.phases]) for name in outcome.phases[0]
    }
    return means if outcome.timed else {**means, "kernels": None, "communication_wait": None}
