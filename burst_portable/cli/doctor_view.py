"""What the doctor found, for people."""

from __future__ import annotations

from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from burst_portable.cli.output import console

Facts = dict[str, Any]


def show(facts: Facts) -> None:
    """Versions, then a row a backend, then the kernels of those that run."""
    say = console()
    say.print(f"[bold]burst_portable {facts['version']}[/] on Python {facts['python']}, {escape(facts['platform'])}")
    found = [f"{name} {version or 'is not installed'}" for name, version in facts["packages"].items()]
    say.print(", ".join(found), markup=False)
    say.print("hop deadline {deadline:g} s, local kernel {kernel}".format(**facts["settings"]), markup=False)
    say.print(_backends(facts["backends"]))
    for name, backend in facts["backends"].items():
        for line in _details(name, backend):
            say.print(line)


def _backends(backends: dict[str, Facts]) -> Table:
    table = Table(title="backends", title_justify="left", title_style="bold")
    for column in ("backend", "runs here", "device", "process group", "from"):
        table.add_column(column)
    for name, backend in backends.items():
        verdict = Text("yes", "green") if backend["ok"] else Text(f"no: {backend['reason']}", "red")
        row = (backend.get("device_type", ""), backend.get("process_group", ""), backend["from"])
        table.add_row(escape(name), verdict, *map(escape, row))
    return table


def _details(name: str, backend: Facts) -> list[Table | Text]:
    lines: list[Table | Text] = []
    for key, value in backend["facts"].items():
        listed = value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]
        for number, entry in enumerate(listed):
            label = key if len(listed) == 1 else f"{key} {number}"
            shown = ", ".join(f"{k} {v}" for k, v in entry.items()) if isinstance(entry, dict) else entry
            lines.append(Text(f"{name}: {label} {shown}"))
    if backend["kernels"]:
        lines += [_kernels(name, backend["kernels"])]
        lines += [Text(f"  {line}", "dim") for line in _reasons(backend["kernels"])]
    return lines


def _kernels(name: str, kernels: list[Facts]) -> Table:
    table = Table(title=f"kernels of {escape(name)}, the preferred first", title_justify="left", title_style="bold")
    table.add_column("problem")
    for kernel in kernels:
        table.add_column(escape(kernel["name"]))
    for case in kernels[0]["supports"]:
        answers = [kernel["supports"][case]["ok"] for kernel in kernels]
        table.add_row(escape(case), *(Text("yes", "green") if ok else Text("no", "red") for ok in answers))
    return table


def _reasons(kernels: list[Facts]) -> list[str]:
    return [
        f"{kernel['name']}, {case}: {answer['reason']}"
        for kernel in kernels
        for case, answer in kernel["supports"].items()
        if not answer["ok"]
    ]
