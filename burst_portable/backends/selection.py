"""Find, load and choose backends by name, from the entry points of this and of third-party packages.

A backend is imported when it is first needed. The backends of this package are also listed here, so that an
uninstalled checkout finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

from burst_portable.errors import (
    BackendUnavailableError,
    UnsupportedError,
    format_error,
    in_a_line,
    shown,
    unknown_name,
)
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.hardware import MeasuredHardware, read_hardware_spec
from burst_portable.planning.kernel_times import read_kernel_times
from burst_portable.utils.entry_points import registered_targets

if TYPE_CHECKING:  # a help text lists the names without importing torch
    from burst_portable.backends.base import Backend, HardwareSpec, Probe
    from burst_portable.kernels.base import Kernel, LazyKernel

T = TypeVar("T")
GROUP = "burst_portable.backends"
_OURS = {name: f"burst_portable.backends.{name}:backend" for name in ("cpu", "cuda", "rocm", "ascend")}


def known() -> dict[str, str]:
    """Return each backend's name and target (``module:attribute``). No package can replace our names."""
    return {name: targets[0] for name, targets in registered_targets(GROUP, _OURS).items()}


def passed_over() -> list[str]:
    """Return a message for each package that registered one of our names. These packages are never used."""
    return [
        format_error(
            f"the backend {name!r} (from {target}) is not used",
            got="a name that burst_portable has itself",
            next_step=f"register another name than {', '.join(_OURS)}",
        )
        for name in _OURS
        for target in registered_targets(GROUP, _OURS)[name][1:]
    ]


@lru_cache(maxsize=32)
def load(name: str) -> Backend:
    """Return the backend of that name.

    Raises:
        UnknownNameError: no backend has that name.
        BackendUnavailableError: the backend cannot be imported: a package is absent, too old, or broken.
    """
    table = registered_targets(GROUP, _OURS)
    if name not in table:
        raise unknown_name("backend", name, table)
    targets = table[name]
    if name not in _OURS and len(targets) > 1:
        what = f"several packages register the name {name!r}"
        raise BackendUnavailableError(what, got=", ".join(sorted(targets)), next_step="uninstall all but one")
    return _import_backend(name, targets[0])


def _import_backend(name: str, target: str) -> Backend:
    """Import a backend and check it. Each error of a third-party package has its own message."""
    module, _, attribute = target.partition(":")
    what = f"the backend {name!r} (from {target})"
    try:
        backend: object = getattr(import_module(module), attribute)
    except BackendUnavailableError as error:  # its message names the absent or old package
        raise BackendUnavailableError(f"{what} cannot be used: {error}") from error
    except ModuleNotFoundError as error:
        missing = error.name or "a module"
        next_step = f"install {missing}, or remove the package that registers {name!r}"
        raise BackendUnavailableError(
            f"{what} needs {missing}, which is absent", got=error, next_step=next_step
        ) from error
    # A vendor's module may raise anything on import. The message must name it.
    except (Exception, SystemExit) as error:
        next_step = f"`python -c 'import {module}'` shows where; reinstall that package, or remove it"
        if isinstance(error, TypeError) and "abstract" in str(error):  # the error names the methods
            next_step = "implement these methods; docs/writing_a_backend.md describes them"
        raise BackendUnavailableError(
            f"{what} is broken: it fails to import", got=in_a_line(error), next_step=next_step
        ) from error
    from burst_portable.backends.base import Backend  # needs torch, which the imported module has loaded

    if isinstance(backend, type):
        reason = f"it is a class; register an object of it, backend = {backend.__name__}()"
    elif not isinstance(backend, Backend):
        next_step = f"upgrade the package of {module}: it was written for another version of burst_portable"
        reason = f"its class {type(backend).__name__!r} does not derive from burst_portable.backends.base.Backend"
        raise BackendUnavailableError(f"{what} is not a backend: {reason}", next_step=next_step)
    elif not (reason := _contract_violation(backend, name)):
        return backend
    next_step = "see docs/writing_a_backend.md"
    raise BackendUnavailableError(f"{what} is not a backend: {reason}", next_step=next_step)


def _contract_violation(backend: Backend, name: str) -> str:
    """Return how a backend violates the contract, or "". Do not call any of its methods."""
    from burst_portable.backends.base import Capabilities, HardwareSpec

    if backend.name != name or name == "auto":
        return f"its name is {backend.name!r}; it must be the registered name, and not 'auto'"
    if missing := [method for method in ("probe", "kernels") if not callable(getattr(backend, method))]:
        return f"its {' and '.join(missing)} must be methods"
    capabilities = backend.capabilities
    if not isinstance(capabilities, Capabilities):
        return f"its capabilities are a {type(capabilities).__name__}, not a Capabilities"
    if not isinstance(capabilities.hardware, HardwareSpec):
        return f"the rates of its capabilities are a {type(capabilities.hardware).__name__}, not a HardwareSpec"
    return ""


def probed(backend: Backend) -> Probe:
    """Return the backend's probe. A probe that violates its contract counts as a failure with that reason."""
    from burst_portable.backends.base import Probe

    try:
        probe = backend.probe()
    # A probe must not raise. If it does, only users who name this backend get an error.
    except Exception as error:  # noqa: BLE001
        return Probe(False, f"its probe is broken: it raised {in_a_line(error)}")
    if not isinstance(probe, Probe):
        return Probe(False, f"its probe is broken: it returned a {type(probe).__name__}, not a Probe")
    return probe if probe.ok or probe.reason else Probe(False, "it does not say why", probe.facts)


def unavailable_reason(name: str, device_type: str | None = None) -> str:
    """Return why that backend cannot run here, or cannot take tensors of a device type; "" if it can."""
    try:
        backend = load(name)
    except BackendUnavailableError as error:  # the caller may not have named it: return a reason, as for a failed probe
        return str(error)
    supported = backend.capabilities.device_type
    if device_type not in (None, supported):
        return f"it takes tensors on {supported}"
    probe = probed(backend)
    return "" if probe.ok else probe.reason


def runnable(name: str) -> Backend:
    """Return the backend that a user named.

    Raises:
        UnknownNameError: no backend has that name.
        BackendUnavailableError: it cannot run on this machine. The message lists the backends that can.
    """
    backend = load(name)
    if reason := unavailable_reason(name):
        able = [other for other in known() if not unavailable_reason(other)]
        raise BackendUnavailableError(
            f"the backend {name!r} cannot run here: {reason}", allowed=", ".join(able) or "none runs here"
        )
    return backend


@lru_cache(maxsize=32)
def for_device(device_type: str, named: str = "auto") -> Backend:
    """Return the backend for tensors of a device type: the named one, or the first that can run here.

    Raises:
        UnsupportedError: there is none, or the named one takes tensors of another device type.
        UnknownNameError, BackendUnavailableError: see `runnable`.
    """
    if named == "auto":
        reasons = []
        for name in known():
            reason = unavailable_reason(name, device_type)
            if not reason:
                return load(name)
            reasons.append(f"not {name}: {reason}")
        raise UnsupportedError(
            f"no backend for tensors on {device_type!r}: {'; '.join(reasons)}",
            next_step="run `burst-portable doctor`",
        )
    backend = runnable(named)
    if reason := unavailable_reason(named, device_type):
        able = [name for name in known() if not unavailable_reason(name, device_type)]
        raise UnsupportedError(
            f"the backend {named!r} was named, and {reason}",
            got=f"tensors on {device_type!r}",
            allowed=f"for these: {', '.join(able) or 'none'}",
            next_step="move the tensors, or name no backend",
        )
    return backend


def hardware_of(
    backend: Backend,
    ranks: int,
    kernel: Kernel | None = None,
    file: str = "",
    dtype: str = "",
    head_dim: int = 0,
    *,
    high_priority: bool = False,
) -> HardwareSpec:
    """Return the rates that predict plans for this many ranks.

    They are measured on a machine like this one if the backend has such rates, else the backend's estimates.

    Args:
        backend: the backend of the tensors.
        ranks: number of ranks.
        kernel: the kernel that will compute, if known.
        file: path of a hardware spec (`planning.hardware`), which replaces all other rates. Default: none.
        dtype: dtype of the call, if known. If the file was measured with another one, `source` notes it.
        head_dim: head size of the call, if known. As `dtype`.
        high_priority: whether messages have high priority: see `comm.base.Transport`.

    Raises:
        InputError: the file cannot be used.
    """
    name, traits = (kernel.name, kernel.traits) if kernel else ("", KernelTraits())
    if file:
        found = read_hardware_spec(file).hardware_for(ranks, name, dtype, head_dim)
        found = replace(found, kernel=traits) if kernel else found
    else:
        found = replace(backend.measured_hardware(ranks, name) or backend.capabilities.hardware, kernel=traits)
    return found.with_high_priority() if high_priority else found


def machines(ranks: int) -> dict[str, MeasuredHardware]:
    """Return the measured rates of machines that backends list, by name. It imports all backends and torch."""
    found: dict[str, MeasuredHardware] = {}
    for name in known():
        try:
            found |= load(name).machines(ranks)
        except BackendUnavailableError:
            continue  # `burst-portable doctor` reports the reason
    return found


def group_options_of(backend: Backend, timeout: timedelta) -> dict[str, Any]:
    """Return arguments of `init_process_group` and `new_group`: the timeout, and options for messages of high priority.

    Without options of the backend, the timeout is the only argument.

    Raises:
        BackendUnavailableError: the backend fails to make the options.
    """
    try:
        options = backend.group_options(timeout)
    # Caught here: an error from creating the group would look as if ranks were absent.
    except Exception as error:
        what = f"the backend {backend.name!r} is broken: it fails to make options of a process group"
        next_step = "upgrade or fix it: group_options(timeout) returns torch's pg_options, or None"
        raise BackendUnavailableError(what, got=in_a_line(error), next_step=next_step) from error
    return {"timeout": timeout} if options is None else {"timeout": timeout, "pg_options": options}


def supports_high_priority(backend: Backend) -> bool:
    """Return whether messages have high priority in groups that are created with the backend's options."""
    return "pg_options" in group_options_of(backend, timedelta(seconds=1))


def open_or_reason(make: Callable[[int], T], index: int) -> T | str:
    """Return `make(index)`, for example `backend.meter(0)`, or the reason why it is unavailable."""
    try:
        return make(index)
    except BackendUnavailableError as error:
        return str(error)


def as_kineto(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert a trace's events to the form that Kineto writes, with the backend whose tracer wrote them."""
    for name in known():
        try:
            backend = load(name)
        except BackendUnavailableError:
            continue  # `burst-portable doctor` reports the reason
        if (converted := backend.kineto(events)) is not None:
            return converted
    return events


def kernels_of(backend: Backend) -> tuple[Kernel | LazyKernel, ...]:
    """Return the kernels of a backend, in order of preference.

    Raises:
        BackendUnavailableError: The backend fails to make them, or one does not derive from `Kernel`.
    """
    from burst_portable.kernels.base import Kernel, LazyKernel

    what = f"the backend {backend.name!r} is broken"
    try:
        kernels = tuple(backend.kernels())
    # Code of a vendor may raise anything. The message must name the backend.
    except Exception as error:
        next_step = "upgrade or fix it; docs/writing_a_backend.md describes kernels()"
        raise BackendUnavailableError(f"{what}: kernels() failed", got=in_a_line(error), next_step=next_step) from error
    for kernel in kernels:
        if not isinstance(kernel, Kernel | LazyKernel):
            allowed = "objects whose classes derive from burst_portable.kernels.base.Kernel"
            raise BackendUnavailableError(
                f"{what}: kernels() returned an object that is no kernel", got=shown(kernel), allowed=allowed
            )
    return kernels


def choose_kernel(backend: Backend, call: AttentionCall, named: str = "auto", *, times: str = "") -> tuple[Kernel, str]:
    """Return the kernel for a call and the reason: the named one, or with "auto" the fastest or first that serves it.

    Args:
        backend: The backend.
        call: The attention, with the heads of one rank.
        named: Name of a kernel, or "auto".
        times: Path of a file of measured times (`planning.kernel_times`). With "auto", the fastest kernel in it is
            used. Default: none; the first of the backend's kernels is used.

    Raises:
        InputError: The file of times cannot be used.
        UnknownNameError: The backend has no kernel of that name.
        BackendUnavailableError: `supports` of a kernel returned something else than a `Support`.
        UnsupportedError: No kernel serves the call, or the named one does not, with all reasons.
    """
    from burst_portable.kernels.checked_kernel import support_of

    kernels: dict[str, Kernel | LazyKernel] = {kernel.name: kernel for kernel in kernels_of(backend)}
    if not isinstance(named, str) or named not in ("auto", *kernels):
        raise unknown_name(f"kernel of the backend {backend.name!r}", named, kernels)
    if named == "auto":
        reasons: list[str] = []
        untimed = ""
        if times:
            ranked, source = read_kernel_times(times).ranked(backend.name, call)
            for name in ranked:
                if name in kernels and support_of(kernels[name], call).ok:
                    return kernels[name].load(), f"the fastest of {len(ranked)} with {source}"
            untimed = f" ({f'{times} has no kernel that serves it' if ranked else source})"
        slower: list[Kernel | LazyKernel] = []
        for kernel in kernels.values():
            support = support_of(kernel, call)
            if support.ok and not support.slower:
                return kernel.load(), "; ".join([f"the first of the backend's that serves it{untimed}", *reasons])
            slower += [kernel] if support.ok else []
            reasons.append(f"not {kernel.name}: {support.slower or support.reason}")
        if slower:
            return slower[0].load(), "; ".join([f"no other of the backend's serves it{untimed}", *reasons])
        raise UnsupportedError(f"no kernel of the backend {backend.name!r} serves this call", got="; ".join(reasons))
    support = support_of(kernels[named], call)
    if support.ok:
        return kernels[named].load(), "named"
    able = [other for other, kernel in kernels.items() if support_of(kernel, call).ok]
    raise UnsupportedError(
        f"the kernel {named!r} was named and does not serve this call: {support.reason}",
        allowed=", ".join(able) or "no kernel serves it",
        next_step="kernel='auto' takes the first that does" if able else None,
    )
