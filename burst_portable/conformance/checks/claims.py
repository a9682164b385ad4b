"""Test the claims of a backend: claimed calls give correct results, and other calls are declined with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, product

import torch
import torch.distributed as dist

from burst_portable.backends.base import Backend
from burst_portable.backends.selection import choose_kernel
from burst_portable.conformance.base import BackendUnderTest, Check, Outcome, TestCase, make_plain_test
from burst_portable.conformance.cases import DTYPES, Case
from burst_portable.conformance.checks.comparison import compare
from burst_portable.conformance.checks.kernel_contract import unsupported_reason
from burst_portable.conformance.checks.sizes import HEAD_SIZES
from burst_portable.conformance.kernel_runs import run_kernel
from burst_portable.conformance.oracle import make_inputs
from burst_portable.conformance.running import serves
from burst_portable.errors import UnknownNameError, UnsupportedError, first_line, shown
from burst_portable.kernels.base import Kernel, LazyKernel
from burst_portable.kernels.checked_kernel import support_of
from burst_portable.planning.call import KernelTraits

NAME = "claims"
MOST_ROUNDING = 2**-8
"""Largest rounding that a kernel may declare: that of operands in bfloat16. Tolerances grow with it."""


def _grid(coverage: str) -> dict[str, list[Case]]:
    """Return cases that a kernel may decline, by dtype and head size: a test that compiles kernels takes seconds."""
    grid = {}
    for (name, dtype), size in product(DTYPES.items(), (16, 80) if coverage == "quick" else (*HEAD_SIZES, 8, 320, 512)):
        base = Case(ranks=1, dtype=dtype, length=9, batch=1)
        grid[f"{name}-{size}"] = [
            replace(base, heads=f"4x2x{size}x{value_size}", softcap=softcap, deterministic=deterministic)
            for value_size, softcap, deterministic in product((size, size // 2), (None, 5.0), (True, False))
        ]
    return grid


def list_tests(target: BackendUnderTest) -> Iterator[TestCase]:
    """Yield the tests of the backend's claims, then those of each kernel."""
    for name, find_error in _CLAIMS.items():
        yield make_plain_test(NAME, name, _run, find_error, target)
    for kernel in target.kernels:
        yield make_plain_test(NAME, f"{kernel.name}-declares", _run, _declares, target, kernel)
        yield make_plain_test(NAME, f"{kernel.name}-reasons", _run, _reasons, target, kernel)
        for name, cases in _grid(target.coverage).items():
            if any(serves(kernel, case, target.device.type) for case in cases):
                title = f"{kernel.name}-runs-what-it-claims-{name}"
                yield make_plain_test(NAME, title, _run, _runs, target, kernel, cases)


def _run(find_error: Callable[..., str], *arguments: object) -> Outcome:
    return Outcome(wrong=find_error(*arguments))


def _device(target: BackendUnderTest) -> str:
    x = torch.ones(3, device=target.device)
    return "" if float(x.sum()) == 3 else f"the sum of three ones on {target.device} is not 3"


def _probe(target: BackendUnderTest) -> str:
    probe = target.backend.probe()
    if not probe.ok:
        return f"the second probe failed: {probe.reason}"
    for name, fact in probe.facts.items():
        try:
            json.dumps({name: fact})
        except TypeError:
            return f"facts of the probe must be plain data for the report; {name!r} is a {type(fact).__name__}"
    return ""


def _process_group(target: BackendUnderTest) -> str:
    group = target.backend.capabilities.process_group
    return "" if dist.is_available() and dist.is_backend_available(group) else f"torch has no process group {group!r}"


def _streams(target: BackendUnderTest) -> str:
    if not target.backend.capabilities.streams:
        return ""
    try:
        torch.Event(target.device).record()
    except RuntimeError as error:
        return f"it claims streams, but torch records no event on {target.device}: {first_line(error)}"
    module = torch.get_device_module(target.device)
    missing = [name for name in ("Stream", "Event", "current_stream", "synchronize") if not hasattr(module, name)]
    return f"it claims streams, but torch.{target.device.type} has no {', '.join(missing)}" if missing else ""


def _names(target: BackendUnderTest) -> str:
    names = [kernel.name for kernel in target.backend.kernels()]
    if not names or not all(isinstance(n, str) and n for n in names) or len(set(names)) < len(names):
        return f"every kernel needs a unique name; got {names}"
    try:
        choose_kernel(target.backend, Case().make_call(target.device.type), "no such kernel")
    except UnknownNameError:
        return ""
    return "an unknown kernel name raised no error"


def _hardware(target: BackendUnderTest) -> str:
    hardware = target.backend.capabilities.hardware
    return "" if hardware.tflops > 0 and hardware.intra_node_bandwidth > 0 else f"rates must be above 0; got {hardware}"


def _direct_transport(target: BackendUnderTest) -> str:
    """Check that a named direct transport exists, and that an existing one is named: without a name it is not used."""
    name = target.backend.capabilities.direct_transport
    exists = type(target.backend).connect_direct is not Backend.connect_direct
    if name and not exists:
        return f"it claims the direct transport {name!r}, but has no connect_direct"
    return "it has connect_direct, but names no direct transport" if exists and not name else ""


_CLAIMS: dict[str, Callable[[BackendUnderTest], str]] = {
    "device": _device,
    "probe": _probe,
    "process-group": _process_group,
    "streams": _streams,
    "kernel-names": _names,
    "hardware": _hardware,
    "direct-transport": _direct_transport,
}


def _declares(target: BackendUnderTest, kernel: Kernel | LazyKernel) -> str:
    """Check the name and the traits of a kernel. One that declines every call is not loaded."""
    if unsupported_reason(kernel, target.device.type):
        return ""
    loaded = kernel.load()
    if loaded.name != kernel.name:
        return f"its class has the name {loaded.name!r}; reports need the name of the LazyKernel, {kernel.name!r}"
    traits: object = loaded.traits
    if not isinstance(traits, KernelTraits):
        return f"traits must be a KernelTraits; got {shown(traits)}"
    if not 0 <= traits.rounding <= MOST_ROUNDING:
        return f"the trait rounding must be 0 to 2**-8, since it loosens tolerances; got {traits.rounding:g}"
    if traits.writes_into and type(loaded).attend_into is Kernel.attend_into:
        return "it declares writes_into, but has no attend_into"
    return ""


def _reasons(target: BackendUnderTest, kernel: Kernel | LazyKernel) -> str:
    """Check that a kernel always declines with the same reason, and that requesting it raises an error with it."""
    for case in chain.from_iterable(_grid(target.coverage).values()):
        call = case.make_call(target.device.type)
        support = support_of(kernel, call)
        if support_of(kernel, call) != support:
            return f"the second call of supports returns another answer ({case.spec()})"
        if support.ok:
            continue
        if not support.reason:
            return f'it declines without a reason ({case.spec()}); return Support(False, "reason")'
        try:
            choose_kernel(target.backend, call, kernel.name)
        except UnsupportedError as error:
            if support.reason not in str(error):
                return f"the error does not contain the reason ({case.spec()})"
        else:
            return f"requested by name, it is chosen although it declines ({case.spec()})"
    return ""


def _runs(target: BackendUnderTest, kernel: Kernel | LazyKernel, cases: Sequence[Case]) -> str:
    """Check that each of these calls gives correct numbers if the kernel supports it."""
    for case in cases:
        if support_of(kernel, case.make_call(target.device.type)).ok:
            x, loaded = make_inputs(case), kernel.load()
            outcome = compare(case, x, run_kernel(loaded, case, x, target.device), loaded.traits.rounding)
            if not outcome.ok:
                return f"{outcome.text()} (claimed: {case.spec()})"
    return ""


CHECK = Check(NAME, "supported calls give correct results; all others are declined with a reason", list_tests)
