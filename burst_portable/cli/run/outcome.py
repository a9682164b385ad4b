"""From what ranks and the reference left behind to the verdict, and to the facts that JSON and report are made of."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import transformers

from burst_portable import __version__
from burst_portable.backends.base import Backend, HardwareSpec
from burst_portable.backends.selection import load
from burst_portable.cli.plan_facts import plan_facts
from burst_portable.cli.run.job import Job, hardware_of_run
from burst_portable.cli.run.setup import Prepared, mfu
from burst_portable.cli.run.train import PHASES, Course, Gradients, Outcome, course_of
from burst_portable.config import from_environment

SCHEMA = "burst_portable.run/3"
Facts = dict[str, Any]
T = TypeVar("T")

# What may differ from one device: about ten times the largest difference that was seen with the tiny model, over 2 and
# 3 ranks, 256 to 4096 tokens and 2 to 30 steps of AdamW. transformers computes losses in float32 whatever the model.
# Gradients are compared after all steps: AdamW moves a weight whose gradient is next to nothing as far as any other, so
# rounding decides where it goes, and more is added up than attention itself loses. `gradient` is over all parameters
# together, and would hide a wrong dK, whose norm may be a thousandth of the whole; `parameter` is the worst one alone.
# Seen in float32: 2e-7, 2e-5, 3e-4; float64: 2e-7, 1e-8; bfloat16: 7e-5, 6e-3; float16: 3e-5, 2e-3. The worst
# parameter was measured in float32 alone, and stands as far from the others elsewhere.
TOLERANCES: dict[str, dict[str, float]] = {
    "float64": {"loss": 2e-6, "gradient": 1e-7, "parameter": 1e-6},
    "float32": {"loss": 2e-6, "gradient": 2e-4, "parameter": 3e-3},
    "bfloat16": {"loss": 1e-3, "gradient": 6e-2, "parameter": 4e-1},
    "float16": {"loss": 3e-4, "gradient": 2e-2, "parameter": 2e-1},
}
_SMALLEST = 1e-4
"""A gradient below this share of the whole is measured against it: one that should be 0 is rounding alone."""


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """|a - b| / |b|, loss by loss; infinite where one is not a finite number."""
    return [_ratio(abs(a - b), abs(b)) for a, b in zip(losses, reference, strict=True)]


def _ratio(difference: float, norm: float) -> float:
    """error / size, where 0 / 0 is 0 and anything that is not finite is infinite."""
    if not norm:
        return 0.0 if difference == 0 else math.inf
    ratio = difference / norm
    return ratio if math.isfinite(ratio) else math.inf


@dataclass(frozen=True)
class Apart:
    """|g - r| / |r| over all parameters together, and of the parameter where it is largest."""

    together: float
    parameter: float
    name: str


def gradient_differences(gradients: Gradients, reference: Gradients) -> Apart:
    """How far gradients are from the reference, in float64; infinite where they do not match."""
    if not reference or gradients.keys() != reference.keys():
        return Apart(math.inf, math.inf, "other parameters have gradients")
    apart, norms = {}, {}
    for name, expected in reference.items():
        r, g = expected.detach().double().cpu(), gradients[name].detach().double().cpu()
        apart[name], norms[name] = (math.inf if g.shape != r.shape else float((g - r).norm())), float(r.norm())
    whole = math.hypot(*norms.values())
    relative = {name: _ratio(apart[name], max(norms[name], _SMALLEST * whole)) for name in reference}
    worst = max(relative, key=lambda name: relative[name])
    return Apart(_ratio(math.hypot(*apart.values()), whole), relative[worst], worst)


def facts_of(prepared: Prepared, outcomes: list[Outcome], reference: Outcome | None, gradients: Apart | None) -> Facts:
    """All that is known about a run, as plain data.

    Args:
        outcomes: in rank order.
        reference: of one device, or None without a check.
        gradients: how far they are apart, where there are some and they were checked.
    """
    job, backend = prepared.job, load(prepared.job.backend)
    courses = [course_of(o) for o in outcomes]
    alone = course_of(reference) if reference else None
    facts: Facts = {
        **_asked(prepared),
        **_compared(job, courses[0], alone, gradients),
        "notes": outcomes[0].notes,
        "ranks_agree": len({o.fingerprint for o in outcomes}) == 1
        and all(c.losses == courses[0].losses for c in courses),
        "perplexity": _perplexity(courses[0]) if job.scoring else None,
        "reference_perplexity": _perplexity(alone) if alone and job.scoring else None,
        **_speed(prepared, outcomes, courses, alone),
        "phases": [_phases(o, c) for o, c in zip(outcomes, courses, strict=True)],
        "peak_memory_bytes": [o.peak_memory_bytes for o in outcomes],
        "device_memory": backend.capabilities.streams,
        "plan": plan_facts(prepared.plan, _hardware(prepared, backend), 0),
        "device": platform.processor() or platform.machine(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    facts["failures"] = failures(facts)
    facts["status"] = "failed" if facts["failures"] else "ok" if alone else "unchecked"
    return facts


def _asked(prepared: Prepared) -> Facts:
    """What was to be run, and with which plan."""
    job, plan = prepared.job, prepared.plan
    return {
        "schema": SCHEMA,
        "version": __version__,
        "mode": "perplexity" if job.scoring else "training",
        "backend": job.backend,
        "backend_reason": prepared.backend_reason,
        "world_size": job.ranks,
        "strategy": plan.strategy,
        "strategy_requested": job.strategy,
        "transfer": {name: part.route.name for name, part in plan.passes()} if plan.ring_size > 1 else None,
        "layout": job.layout,
        "seq_len": job.seq_len,
        "steps": job.steps,
        "batch": job.batch,
        "dtype": job.dtype,
        "learning_rate": None if job.scoring else job.learning_rate,
        "seed": job.seed,
        "gradient_checkpointing": job.gradient_checkpointing,
        "threads_per_rank": job.threads,
        "model": prepared.model,
        "text": prepared.text,
    }


def _compared(job: Job, course: Course, alone: Course | None, gradients: Apart | None) -> Facts:
    """Losses beside those of one device, and how far they and the gradients are apart."""
    losses = course.losses
    differences = relative_differences(losses, alone.losses) if alone else None
    return {
        "losses": losses,
        "reference_losses": alone.losses if alone else None,
        "relative_differences": differences,
        "max_relative_difference": max(differences) if differences else None,
        "gradient_relative_difference": gradients.together if gradients else None,
        "worst_gradient_relative_difference": gradients.parameter if gradients else None,
        "worst_gradient": gradients.name if gradients else None,
        "tolerances": TOLERANCES[job.dtype],
    }


def _hardware(prepared: Prepared, backend: Backend) -> HardwareSpec:
    """The rates for predictions: those of BURST_HARDWARE_SPEC, or what is known of such machines."""
    job, head_dim = prepared.job, prepared.plan.call.head_dim
    return hardware_of_run(backend, job.ranks, from_environment().hardware_spec, job.dtype, head_dim)


def _speed(prepared: Prepared, outcomes: Sequence[Outcome], courses: Sequence[Course], alone: Course | None) -> Facts:
    """Tokens and FLOPs a second. A step takes as long as on its slowest rank; the peak is of the slowest device."""
    job = prepared.job
    seconds = [max(c.seconds[i] for c in courses) for i in range(job.steps)]
    peak = min((o.peak for o in outcomes), key=lambda one: one["flops"] or math.inf)
    tokens = job.seq_len * job.batch
    return {
        "tokens_per_second": tokens / _mean(seconds),
        "reference_tokens_per_second": tokens / _mean(alone.seconds) if alone else None,
        "seconds_per_step": _mean(seconds),
        "reference_seconds_per_step": _mean(alone.seconds) if alone else None,
        "model_flops_per_step": prepared.model_flops,
        "mfu": mfu(prepared.model_flops, _mean(seconds), job.ranks, peak["flops"]),
        "peak": peak,
        "step_seconds": seconds,
        "reference_step_seconds": alone.seconds if alone else None,
    }


def failures(facts: Facts) -> list[str]:
    """What is wrong with a run, a line each; none where all is well or was not checked."""
    wrong = []
    limits = facts["tolerances"]
    if not facts["ranks_agree"]:
        wrong.append("ranks ended with different parameters or losses")
    if not all(math.isfinite(loss) for loss in facts["losses"]):
        wrong.append("a loss is not finite")
    loss, gradient = facts["max_relative_difference"], facts["gradient_relative_difference"]
    worst = facts["worst_gradient_relative_difference"]
    if loss is not None and not loss <= limits["loss"]:
        wrong.append(f"losses differ from one device by {loss:.2g} (allowed: {limits['loss']:.2g})")
    if gradient is not None and not gradient <= limits["gradient"]:
        wrong.append(f"gradients differ from one device by {gradient:.2g} (allowed: {limits['gradient']:.2g})")
    if worst is not None and not worst <= limits["parameter"]:
        told = f"the gradient of {facts['worst_gradient']} differs from one device by {worst:.2g}"
        wrong.append(f"{told} (allowed: {limits['parameter']:.2g})")
    return wrong


def steady(values: Sequence[T]) -> Sequence[T]:
    """The steps without the first, which also warms up, if there are others."""
    return values[1:] if len(values) > 1 else values


def _mean(seconds: Sequence[float]) -> float:
    """The mean over the steps that `steady` leaves."""
    return sum(steady(seconds)) / len(steady(seconds))


def _perplexity(course: Course) -> float:
    mean = sum(loss * n for loss, n in zip(course.losses, course.tokens, strict=True)) / sum(course.tokens)
    return math.exp(mean) if mean < 700 else math.inf


def _phases(outcome: Outcome, course: Course) -> dict[str, float | None]:
    """Mean seconds of a step by phase. `kernels` and `communication_wait` are None if they could not be told apart."""
    steps = steady([*range(len(course.phases))])
    names = [name for name in PHASES if name in course.phases[0]]
    means: dict[str, float | None] = {
        name: sum(course.phases[i][name] for i in steps) / len(steps)
        for name in (*names, "kernels", "communication_wait")
    }
    return means if outcome.timed else {**means, "kernels": None, "communication_wait": None}
