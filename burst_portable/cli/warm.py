"""Implement `burst-portable kernels --warm`: compile the kernels of a model's attention into Triton's cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.progress import Progress, TextColumn
from torch import Tensor

from burst_portable.backends.selection import kernels_of, load
from burst_portable.cli.flags import DEFAULT_LAYOUT, DTYPES
from burst_portable.cli.output import JsonOption, console, on_stderr, table
from burst_portable.cli.run.models import config_of, local_model
from burst_portable.comm.agreement import call_signature
from burst_portable.config import from_environment, triton_cache
from burst_portable.errors import BackendUnavailableError, InputError, UnsupportedError, unknown_name
from burst_portable.kernels.base import Kernel, Support, torch_dtype
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.runtime.ahead import AbsentTransport, rehearse
from burst_portable.runtime.prepare import plan_for_kernel, prepared_call
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.base import Strategy
from burst_portable.strategies.planner import cached_plan, call_of_sizes, mask_of
from burst_portable.strategies.registry import strategy_of

if TYPE_CHECKING:
    from burst_portable.backends.base import Backend
    from burst_portable.kernels.triton.compile_only import CompiledKernel
    from burst_portable.planning.plans import Plan
    from burst_portable.runtime.prepared_call import PreparedCall

SCHEMA = "burst_portable.warm/1"
_SINKS = frozenset({"gpt_oss"})  # types of models whose attention has a sink logit per head


@dataclass(frozen=True)
class Job:
    """The attention calls whose kernels are compiled. See the options of the command."""

    model: str
    target: str
    dtype: str
    seq_lens: tuple[int, ...]
    ranks: int
    ranks_per_node: int | None
    strategies: tuple[str, ...]
    masks: tuple[str, ...]
    deterministic: bool


def warm(job: Job, jobs: int, json_option: JsonOption) -> int:
    """Compile the kernels of a job with `jobs` threads, print and write a report, and return the exit code 0.

    Raises:
        InputError: The model, the dtype or the number of ranks is invalid.
        UnsupportedError: No kernel that is compiled ahead serves the calls, or one of its kernels does not compile.
    """
    import triton

    from burst_portable.kernels.triton.compile_only import compile_kernels

    launches = list(launches_of(job))
    started = time.perf_counter()
    columns = TextColumn("{task.completed} kernels, the last one {task.description}")
    with Progress(columns, **on_stderr(quiet=json_option.stdout)) as progress:
        task = progress.add_task("", total=None)
        made = compile_kernels(
            job.target,
            lambda: [launch() for launch in launches],
            jobs=jobs,
            on_kernel=lambda one: progress.update(task, advance=1, description=one.name),
        )
    seconds = round(time.perf_counter() - started, 3)
    cache = str(triton.knobs.cache.dir)
    if not json_option.stdout:
        _show(made, job.target, cache, seconds)
    facts = {"schema": SCHEMA, "target": job.target, "triton": triton.__version__, "cache": cache, "seconds": seconds}
    json_option.write({**facts, "kernels": [asdict(one) for one in made]})
    return 0


def default_target() -> str:
    """Return the target of this machine's GPU. Raise `InputError` if there is none, or if it is no known target."""
    from burst_portable.kernels.triton.machine_code import TARGETS

    named = f"name it with --target: {', '.join(TARGETS)}"
    if not torch.cuda.is_available():
        raise InputError("the target is not known", got="a machine without a GPU", next_step=named)
    properties = torch.cuda.get_device_properties(0)
    architecture = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    found = architecture if torch.version.hip else f"sm_{properties.major}{properties.minor}"
    if found not in TARGETS:
        raise InputError("kernels are not compiled ahead for this GPU", got=found, next_step=named)
    return found


def launches_of(job: Job) -> Iterator[Callable[[], None]]:
    """Yield a function for each plan, rank and memory layout that makes the launches of both passes.

    Raises:
        InputError: It is no model, or the dtype is unknown.
        UnsupportedError: Its layers differ in size, or no kernel serves a call.
    """
    from burst_portable.kernels.triton.machine_code import TARGETS

    if job.target not in TARGETS:
        raise unknown_name("target", job.target, TARGETS)
    backend, named = load(TARGETS[job.target].backend), from_environment().kernel
    for call in calls_of(job):
        for strategy in _strategies(job, call):
            plan = cached_plan(strategy, call)
            if plan.score_rows:
                got = f"the strategy {plan.strategy}, which stores rows of scores with torch's operators"
                raise UnsupportedError("this strategy has no kernels to compile", got=got)
            kernel = kernel_for(backend, plan.forward.call, job.target, named)
            kernel.save_compiled_in(triton_cache())
            for rank in range(call.ranks):
                for heads_first in (False, True):
                    yield partial(_launch, absent_call(plan, backend, kernel, rank), heads_first=heads_first)


def calls_of(job: Job) -> Iterator[AttentionCall]:
    """Yield a call for each length and mask of the job; by default, each mask of the model. The device is "meta".

    Raise `UnsupportedError` if its layers differ in size, and `InputError` for a wrong model or mask.
    """
    from burst_portable.integrations.transformers.layouts import masks_of_layers, sizes_of

    if job.dtype not in DTYPES:
        raise unknown_name("dtype", job.dtype, DTYPES)
    model = local_model(job.model)
    config = config_of(str(Path(model) / "config.json") if Path(model).is_dir() else model, max(job.seq_lens))
    for length in job.seq_lens:
        named = [mask_of(text, length) for text in job.masks]
        for mask in dict.fromkeys(named or masks_of_layers(config)):
            described = call_of_sizes(
                seq_len=length, ranks=job.ranks, **sizes_of(config), mask=mask, layout=DEFAULT_LAYOUT,
                itemsize=getattr(torch, job.dtype).itemsize,
            )  # fmt: skip
            yield replace(
                described,
                dtype=job.dtype,
                device="meta",
                softcap=getattr(config, "attn_logit_softcapping", None),
                deterministic=job.deterministic,
                sinks=config.model_type in _SINKS,
            )


def _strategies(job: Job, call: AttentionCall) -> Iterable[Strategy]:
    """Return the named strategies, or all that `auto` compares."""
    if job.strategies:
        return [strategy_of(name, job.ranks_per_node) for name in job.strategies]
    if call.ranks == 1:
        return [strategy_of("ring")]
    return AutoStrategy(ranks_per_node=job.ranks_per_node).list_candidates(call)[0].values()


def kernel_for(backend: Backend, call: AttentionCall, target: str, named: str = "auto") -> Kernel:
    """Return the first kernel of a backend that serves a call on a target and is compiled ahead.

    Args:
        backend: The backend.
        call: The attention, with the heads of one rank.
        target: The target.
        named: Name of the only kernel that may be used (`Config.kernel`), or "auto".

    Raises:
        UnknownNameError: The backend has no kernel of that name.
        UnsupportedError: There is none.
    """
    kernels = {kernel.name: kernel for kernel in kernels_of(backend)}
    if named not in ("auto", *kernels):
        raise unknown_name(f"kernel of the backend {backend.name!r}", named, kernels)
    reasons = []
    for kernel in kernels.values() if named == "auto" else [kernels[named]]:
        try:
            support = kernel.supports(call)
        except BackendUnavailableError as error:
            support = Support(False, str(error))
        traits = kernel.load().traits if support.ok else KernelTraits()
        reason = support.reason or (support.slower if named == "auto" else "")
        if not reason and not traits.compiles_ahead:
            reason = "it calls another package"
        if not reason and traits.target not in ("", target):
            reason = f"it is for {traits.target}"
        if not reason:
            return kernel.load()
        reasons.append(f"not {kernel.name}: {reason}")
    raise UnsupportedError(f"no kernel can be compiled ahead for {target}", got="; ".join(reasons))


def absent_call(plan: Plan, backend: Backend, kernel: Kernel, rank: int) -> PreparedCall:
    """Return what one rank runs for a plan, without the other ranks."""
    plan = plan_for_kernel(plan, kernel)
    return prepared_call(plan, backend, kernel, AbsentTransport(rank, plan.call.ranks), call_signature({}))


def _launch(prepared: PreparedCall, *, heads_first: bool) -> None:
    """Make the launches of a rank.

    Models transpose queries and keys for rotary embeddings. With `heads_first`, they are such views.
    """
    call = prepared.plan.call
    rows, dtype = call.layout.count(prepared.transport.rank), torch_dtype(call)

    def made(heads: int, dim: int, *, transposed: bool) -> Tensor:
        shape = (call.batch, heads, rows, dim) if transposed else (call.batch, rows, heads, dim)
        x = torch.empty(shape, dtype=dtype, device="meta")
        return x.transpose(1, 2) if transposed else x

    q, k = (made(heads, call.head_dim, transposed=heads_first) for heads in (call.heads, call.kv_heads))
    v = made(call.kv_heads, call.v_head_dim, transposed=False)
    sinks = torch.empty(call.heads, dtype=dtype, device="meta") if call.sinks else None
    rehearse(prepared, q, k, v, sinks, gradients=True)


def _show(made: list[CompiledKernel], target: str, cache: str, seconds: float) -> None:
    rows = table("kernel", "seconds", "", title=f"kernels of the model for {target}")
    for one in made:
        rows.add_row(one.name, f"{one.seconds:.2f}", "cached" if one.cached else "compiled")
    out = console()
    new = sum(not one.cached for one in made)
    out.print(rows, "")
    out.print(f"{new} compiled, {len(made) - new} cached, in {seconds:.1f} s, in {cache}", markup=False)
