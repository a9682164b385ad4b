"""Claims against what is there: what is claimed works, what is not claimed is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch
import torch.distributed as dist

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel
from burst_portable.conformance.cases import DTYPES, Case
from burst_portable.conformance.checks.attention import HEAD_SIZES, judged
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import run_kernel, serves
from burst_portable.conformance.trial import Check, Outcome, Subject, Trial, plain
from burst_portable.errors import UnknownNameError, UnsupportedError, first_line
from burst_portable.kernels.base import Kernel, LazyKernel

NAME = "claims"


def _cases(dtype: torch.dtype, size: int) -> Iterator[Case]:
    """Yield the cases of one dtype and head size that a kernel may claim or decline."""
    for value_size in (size, size // 2):
        for softcap in (None, 5.0):
            for deterministic in (True, False):
                heads = f"4x2x{size}x{value_size}"
                yield Case(
                    ranks=1, dtype=dtype, heads=heads, softcap=softcap, deterministic=deterministic,
                    length=9, batch=1,
                )  # fmt: skip


def _grid(effort: str) -> dict[str, list[Case]]:
    """Return all of these cases, by dtype and head size: a trial takes seconds if kernels are compiled for it."""
    sizes = (16, 80) if effort == "quick" else (*HEAD_SIZES, 8, 320, 512)
    return {f"{name}-{size}": list(_cases(dtype, size)) for name, dtype in DTYPES.items() for size in sizes}


def trials(subject: Subject) -> Iterator[Trial]:
    """What the backend says about itself, then what each kernel says."""
    for name, ask in _ASKED.items():
        yield plain(NAME, name, _made, ask, subject)
    for kernel in subject.kernels:
        yield plain(NAME, f"{kernel.name}-reasons", _made, _reasons, subject, kernel)
        for name, cases in _grid(subject.effort).items():
            if not _declines(subject, kernel, cases):
                yield plain(NAME, f"{kernel.name}-runs-what-it-claims-{name}", _made, _runs, subject, kernel, cases)


def _made(ask: Callable[..., str], *arguments: object) -> Outcome:
    return Outcome(wrong=ask(*arguments))


def _declines(subject: Subject, kernel: Kernel | LazyKernel, cases: Sequence[Case]) -> bool:
    return not any(serves(kernel, case, subject.device.type) for case in cases)


def _device(subject: Subject) -> str:
    x = torch.ones(3, device=subject.device)
    return "" if float(x.sum()) == 3 else f"a tensor on {subject.device} does not add up"


def _probe(subject: Subject) -> str:
    probe = subject.backend.probe()
    if not probe.ok:
        return f"it is examined though its probe says no: {probe.reason}"
    for name, fact in probe.facts.items():
        try:
            json.dumps({name: fact})
        except TypeError:
            return f"a report must hold its facts, and {name!r} is a {type(fact).__name__}: plain data is needed"
    return ""


def _process_group(subject: Subject) -> str:
    group = subject.backend.capabilities.process_group
    return "" if dist.is_available() and dist.is_backend_available(group) else f"torch has no process group {group!r}"


def _streams(subject: Subject) -> str:
    if not subject.backend.capabilities.streams:
        return ""
    try:
        torch.Event(subject.device).record()
    except RuntimeError as error:
        return f"it claims streams, and torch records no event on {subject.device}: {first_line(error)}"
    module = torch.get_device_module(subject.device)
    missing = [name for name in ("Stream", "Event", "current_stream", "synchronize") if not hasattr(module, name)]
    return f"it claims streams, and torch.{subject.device.type} has no {', '.join(missing)}" if missing else ""


def _names(subject: Subject) -> str:
    names = [kernel.name for kernel in subject.backend.kernels()]
    if not names or not all(names) or len(set(names)) < len(names):
        return f"kernels need a name each: {names}"
    try:
        choose_kernel(subject.backend, Case().make_call(subject.device.type), "no such kernel")
    except UnknownNameError:
        return ""
    return "a kernel that is none was found"


def _hardware(subject: Subject) -> str:
    hardware = subject.backend.capabilities.hardware
    return "" if hardware.tflops > 0 and hardware.intra_node_bandwidth > 0 else f"rates must be above 0: {hardware}"


def _direct_transport(subject: Subject) -> str:
    """A direct transport that is named exists, and one that exists is named: otherwise nobody would use it."""
    named = subject.backend.capabilities.direct_transport
    there = type(subject.backend).connect_direct is not Backend.connect_direct
    if named and not there:
        return f"it claims the direct transport {named!r}, and has no connect_direct"
    return "it has connect_direct, and names no direct transport" if there and not named else ""


_ASKED: dict[str, Callable[[Subject], str]] = {
    "device": _device,
    "probe": _probe,
    "process-group": _process_group,
    "streams": _streams,
    "kernel-names": _names,
    "hardware": _hardware,
    "direct-transport": _direct_transport,
}


def _reasons(subject: Subject, kernel: Kernel | LazyKernel) -> str:
    """Check that a kernel declines with a reason, always the same, and that naming it raises an error with it."""
    for case in chain.from_iterable(_grid(subject.effort).values()):
        call = case.make_call(subject.device.type)
        support = kernel.supports(call)
        if kernel.supports(call) != support:
            return f"it answers differently the second time ({case.spec()})"
        if support.ok:
            continue
        if not support.reason:
            return f"it declines without a reason ({case.spec()})"
        try:
            choose_kernel(subject.backend, call, kernel.name)
        except UnsupportedError as refusal:
            if support.reason not in str(refusal):
                return f"the refusal does not tell the reason ({case.spec()})"
        else:
            return f"named, it is taken though it declines ({case.spec()})"
    return ""


def _runs(subject: Subject, kernel: Kernel | LazyKernel, cases: Sequence[Case]) -> str:
    """Check that each of these calls that the kernel claims gives right numbers."""
    for case in cases:
        if kernel.supports(case.make_call(subject.device.type)).ok:
            x, loaded = make_inputs(case), kernel.load()
            outcome = judged(case, x, run_kernel(loaded, case, x, subject.device), loaded.traits.rounding)
            if not outcome.ok:
                return f"{outcome.text()} (claimed: {case.spec()})"
    return ""


CHECK = Check(NAME, "what is claimed works; what is not claimed is refused with a reason", trials)
