"""Define `burst-portable doctor`, which lists installed packages, backends and kernels."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from burst_portable import __version__
from burst_portable.backends.selection import known, load, passed_over, probed
from burst_portable.cli.output import JsonName, JsonOption, console, labelled, table
from burst_portable.config import Config, from_environment
from burst_portable.errors import BackendUnavailableError, InputError, format_error, shown, unknown_name
from burst_portable.planning.hardware import read_hardware_spec
from burst_portable.planning.kernel_times import read_kernel_times

if TYPE_CHECKING:
    from burst_portable.kernels.base import Kernel, LazyKernel
    from burst_portable.planning.call import AttentionCall

SCHEMA = "burst_portable.doctor/2"
PACKAGES = ("torch", "numpy", "triton", "transformers", "typer", "rich", "jinja2")

Facts = dict[str, Any]


def doctor(json_name: JsonName = None) -> int:
    """List installed packages, and the backends and kernels that can run on this machine.

    For others it prints the reason. Exit code 1 if no backend can run.

    Examples:

    burst-portable doctor
    burst-portable doctor --json doctor.json
    """
    json_option = JsonOption(json_name)
    facts = examine()
    if not json_option.stdout:
        show(facts)
    json_option.write(facts)
    return 0 if any(backend["ok"] for backend in facts["backends"].values()) else 1


def examine() -> Facts:
    """Return the JSON of the command."""
    settings = from_environment()
    backends = {name: _backend(name, entry_point) for name, entry_point in sorted(known().items())}
    return {
        "schema": SCHEMA,
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "settings": {"timeout": settings.timeout, "kernel": settings.kernel, "transport": settings.transport},
        "unknown_settings": _unknown_settings(settings, backends),
        "hardware": _hardware(settings.hardware_spec),
        "kernel_times": _kernel_times(settings.kernel_times),
        "backends": backends,
        "ignored_packages": passed_over(),
    }


def _unknown_settings(settings: Config, backends: dict[str, Facts]) -> list[str]:
    """Return an error for each setting whose value no available backend has. Calls that need it will fail."""
    available = [backend for backend in backends.values() if backend["ok"]]
    kernels = [kernel["name"] for backend in available for kernel in backend["kernels"]]
    transports = [backend[key] for backend in available for key in ("process_group", "direct_transport")]
    variables = (("BURST_KERNEL", settings.kernel, kernels), ("BURST_TRANSPORT", settings.transport, transports))
    return [
        str(unknown_name(f"name in {variable}", name, ("auto", *filter(None, allowed))))
        for variable, name, allowed in variables
        if name not in ("auto", *allowed)
    ]


def _hardware(file: str) -> Facts | None:
    """Return whether `auto` can use the file of BURST_HARDWARE_SPEC, or None if the variable is not set."""
    if not file:
        return None
    try:
        found = read_hardware_spec(file)
    except InputError as error:
        return {"file": file, "ok": False, "reason": str(error)}
    about = {"device": found.device, "ranks": found.ranks, "kernel": found.kernel, "date": found.date}
    return {"file": file, "ok": True, "reason": "", **about}


def _kernel_times(file: str) -> Facts | None:
    """Return whether `auto` can use the file of BURST_KERNEL_TIMES, or None if the variable is not set."""
    if not file:
        return None
    try:
        found = read_kernel_times(file)
    except InputError as error:
        return {"file": file, "ok": False, "reason": str(error)}
    about = {"device": found.device, "backend": found.backend, "date": found.date, "rows": len(found.rows)}
    return {"file": file, "ok": True, "reason": "", **about}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend(name: str, entry_point: str) -> Facts:
    try:
        backend = load(name)
        probe = probed(backend)
        capabilities = backend.capabilities
        if probe.ok and (reason := _missing_device_type(capabilities.device_type)):
            probe = replace(probe, ok=False, reason=reason)
        kernels = [_kernel(kernel, capabilities.device_type) for kernel in backend.kernels()] if probe.ok else []
    except BackendUnavailableError as error:
        reason = str(error)
    # The backend of another package may raise any exception. It is reported like other reasons.
    except Exception as error:  # noqa: BLE001
        reason = f"broken: {type(error).__name__}: {error}"
    else:
        names = ("device_type", "process_group", "direct_transport", "streams")
        return {
            "ok": probe.ok,
            "reason": probe.reason,
            "entry_point": entry_point,
            **{name: getattr(capabilities, name) for name in names},
            "hardware": {name: getattr(capabilities.hardware, name) for name in ("tflops", "intra_node_bandwidth")},
            "facts": dict(probe.facts),
            "kernels": kernels,
        }
    return {"ok": False, "reason": " ".join(reason.split()), "entry_point": entry_point, "facts": {}, "kernels": []}


def _missing_device_type(device_type: str) -> str:
    """Return why tensors cannot have a device type, or "" if they can."""
    import torch

    try:
        torch.device(device_type)
    except RuntimeError:  # it lists the types that torch has
        what = "the probe succeeded, but torch does not support the device type"
        return format_error(what, got=shown(device_type), next_step="import the vendor's package in the probe")
    return ""


def _kernel(kernel: Kernel | LazyKernel, device: str) -> Facts:
    """Return which of a few typical calls a kernel supports."""
    from burst_portable.kernels.checked_kernel import support_of

    answers = ((case, support_of(kernel, call)) for case, call in _calls(device))
    return {"name": kernel.name, "supports": {case: {"ok": one.ok, "reason": one.reason} for case, one in answers}}


def _calls(device: str) -> Iterator[tuple[str, AttentionCall]]:
    """Yield typical calls by name."""
    from burst_portable.layout import make_layout
    from burst_portable.mask import Mask
    from burst_portable.planning.call import AttentionCall

    layout = make_layout("contiguous", 1, 1)
    usual = AttentionCall(Mask.causal(), layout, 8, 2, 128, 128, dtype="bfloat16", device=device, deterministic=False)
    for dtype, itemsize in (("float32", 4), ("bfloat16", 2), ("float16", 2), ("float64", 8)):
        yield dtype, replace(usual, dtype=dtype, itemsize=itemsize)
    # The other calls use 16 bits, because vendors' kernels support no wider dtype.
    yield "deterministic", replace(usual, deterministic=True)
    yield "head_dim=64", replace(usual, head_dim=64, v_head_dim=64)
    yield "head_dim=80", replace(usual, head_dim=80, v_head_dim=80)
    yield "head_dim=256", replace(usual, head_dim=256, v_head_dim=256)
    yield "v_head_dim=64", replace(usual, v_head_dim=64)
    yield "softcap", replace(usual, softcap=30.0)


def show(facts: Facts) -> None:
    """Print versions, a row per backend, and the kernels of the available backends."""
    out = console()
    out.print(f"[bold]burst_portable {facts['version']}[/] on Python {facts['python']}, {escape(facts['platform'])}")
    packages = [f"{name} {version or 'is not installed'}" for name, version in facts["packages"].items()]
    out.print(", ".join(packages), markup=False)
    out.print(
        "communication timeout {timeout:g} s, local kernel {kernel}, transport {transport}".format(**facts["settings"]),
        markup=False,
    )
    for warning in (*facts["unknown_settings"], *facts["ignored_packages"]):
        out.print(labelled("warning", warning, style="yellow"))
    out.print(_show_hardware(facts["hardware"]), markup=False)
    if times := facts["kernel_times"]:
        out.print(_show_kernel_times(times), markup=False)
    columns = ("backend", "available", "device", "process group", "package")
    rows = table(*columns, left=columns)
    for name, backend in facts["backends"].items():
        row = (
            backend.get("device_type", ""),
            backend.get("process_group", ""),
            backend["entry_point"].partition(":")[0],
        )
        rows.add_row(escape(name), _answer(backend["ok"]), *map(escape, row))
    out.print("", rows, "")
    for name, backend in facts["backends"].items():
        if not backend["ok"]:
            out.print(labelled(name, f"no: {backend['reason']}"))
    for name, backend in facts["backends"].items():
        for line in _details(name, backend):
            out.print(line)


def _show_hardware(hardware: Facts | None) -> str:
    """Describe the rates from which `auto` predicts times."""
    if hardware is None:
        return "BURST_HARDWARE_SPEC is not set: auto uses typical rates of the backend's devices"
    if not hardware["ok"]:
        return f"BURST_HARDWARE_SPEC cannot be used: {hardware['reason']}"
    ranks = f"{hardware['ranks']} rank{'' if hardware['ranks'] == 1 else 's'}"
    machine = f"{hardware['device']}, {ranks}, kernel {hardware['kernel']}"
    return f"BURST_HARDWARE_SPEC: auto uses {hardware['file']}, measured on {machine}, {hardware['date']}"


def _show_kernel_times(times: Facts) -> str:
    """Describe the file from which `auto` chooses kernels."""
    if not times["ok"]:
        return f"BURST_KERNEL_TIMES cannot be used: {times['reason']}"
    source = f"{times['rows']} kinds of calls timed on {times['device']}, {times['date']}"
    return f"BURST_KERNEL_TIMES: auto takes the fastest kernel of {times['file']}, {source}"


def _answer(ok: bool) -> Text:
    return Text("yes", "green") if ok else Text("no", "red")


def _details(name: str, backend: Facts) -> list[Table | Padding | str]:
    """Return lines about a backend: the facts of its probe, one per device, and a table of its kernels."""
    short, lines = [], []
    for key, value in backend["facts"].items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{key} {number} {_joined(entry)}" for number, entry in enumerate(value)]
        elif isinstance(value, dict):
            lines.append(f"{key} {_joined(value)}")
        else:
            short.append(f"{key} {_word(value)}")
    details: list[Table | Padding | str] = [labelled(name, line) for line in (", ".join(short), *lines) if line]
    if kernels := backend["kernels"]:
        names = [escape(kernel["name"]) for kernel in kernels]
        rows = table("call", *names, left=names, title=f"kernels of {escape(name)}, preferred first")
        for case in kernels[0]["supports"]:
            rows.add_row(escape(case), *(_answer(kernel["supports"][case]["ok"]) for kernel in kernels))
        details += ["", rows, ""]
        for kernel in kernels:
            for case, answer in kernel["supports"].items():
                if not answer["ok"]:
                    reason = Text(f"{kernel['name']}, {case}: {answer['reason']}", "dim")
                    details.append(Padding(reason, (0, 0, 0, 2)))
    return details


def _joined(facts: Facts) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in facts.items())


def _word(value: Any) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
