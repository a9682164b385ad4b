"""What the doctor found, for people."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from burst_portable.cli.output import console, labelled, table

Facts = dict[str, Any]


def show(facts: Facts) -> None:
    """Versions, then a row a backend, then the kernels of those that run."""
    say = console()
    say.print(f"[bold]burst_portable {facts['version']}[/] on Python {facts['python']}, {escape(facts['platform'])}")
    found = [f"{name} {version or 'is not installed'}" for name, version in facts["packages"].items()]
    say.print(", ".join(found), markup=False)
    say.print(
        "hop deadline {deadline:g} s, local kernel {kernel}, transport {transport}".format(**facts["settings"]),
        markup=False,
    )
    for told in (*facts["unknown"], *facts["passed_over"]):
        say.print(labelled("warning", told, style="yellow"))
    say.print(_rates(facts["rates"]), markup=False)
    say.print("", _backends(facts["backends"]), "")
    for name, backend in facts["backends"].items():
        if not backend["ok"]:
            say.print(labelled(name, f"no: {backend['reason']}"))
    for name, backend in facts["backends"].items():
        for line in _details(name, backend):
            say.print(line)


def _rates(rates: Facts | None) -> str:
    """What `auto` chooses with."""
    if rates is None:
        return "BURST_RATES is not set: auto chooses with what is known of the backend's devices"
    if not rates["ok"]:
        return f"BURST_RATES cannot be used: {rates['reason']}"
    where = f"{rates['device']}, {rates['ranks']} rank{'' if rates['ranks'] == 1 else 's'}, kernel {rates['kernel']}"
    return f"BURST_RATES: auto chooses with {rates['file']}, measured on {where}, {rates['date']}"


def _backends(backends: dict[str, Facts]) -> Table:
    columns = ("backend", "runs here", "device", "process group", "from")
    rows = table(*columns, left=columns)
    for name, backend in backends.items():
        row = (backend.get("device_type", ""), backend.get("process_group", ""), backend["from"].partition(":")[0])
        rows.add_row(escape(name), _answer(backend["ok"]), *map(escape, row))
    return rows


def _answer(ok: bool) -> Text:
    return Text("yes", "green") if ok else Text("no", "red")


def _details(name: str, backend: Facts) -> list[Table | Padding | str]:
    """What a backend's probe found, a line per device; then its kernels, and why some do not serve."""
    short, lines = [], []
    for key, value in backend["facts"].items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines += [f"{key} {number} {_joined(entry)}" for number, entry in enumerate(value)]
        elif isinstance(value, dict):
            lines.append(f"{key} {_joined(value)}")
        else:
            short.append(f"{key} {_word(value)}")
    told: list[Table | Padding | str] = [labelled(name, line) for line in (", ".join(short), *lines) if line]
    if backend["kernels"]:
        told += ["", _kernels(name, backend["kernels"]), ""]
        told += [Padding(Text(line, "dim"), (0, 0, 0, 2)) for line in _reasons(backend["kernels"])]
    return told


def _joined(facts: Facts) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in facts.items())


def _word(value: Any) -> Any:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else value


def _kernels(name: str, kernels: list[Facts]) -> Table:
    names = [escape(kernel["name"]) for kernel in kernels]
    rows = table("problem", *names, left=names, title=f"kernels of {escape(name)}, the preferred first")
    for case in kernels[0]["supports"]:
        rows.add_row(escape(case), *(_answer(kernel["supports"][case]["ok"]) for kernel in kernels))
    return rows


def _reasons(kernels: list[Facts]) -> list[str]:
    return [
        f"{kernel['name']}, {case}: {answer['reason']}"
        for kernel in kernels
        for case, answer in kernel["supports"].items()
        if not answer["ok"]
    ]
