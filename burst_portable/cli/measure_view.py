"""What `burst-portable measure` found, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.text import Text

from burst_portable.cli import PROGRAM
from burst_portable.cli.output import console, table
from burst_portable.units import bytes_text, percent, scaled, seconds_text

Facts = dict[str, Any]
BUSY = 1.3
"""Times its shortest round: a rate whose rounds differ by more was measured beside something else."""
_BUSY = "the machine was busy; measure again"


class View:
    """A console; `quiet` on ranks that leave the talking to the first, `stderr` where stdout is for JSON."""

    def __init__(self, *, quiet: bool, stderr: bool) -> None:
        self._console = console(quiet=quiet, stderr=stderr, soft_wrap=True)
        self._progress = console(stderr=True, quiet=quiet)

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """What is being measured: on a terminal one line that goes, in a file or a log a line each."""
        if not self._progress.is_terminal:
            yield lambda what: self._progress.print(f"measuring {what}", markup=False)
            return
        with self._progress.status("starting") as status:
            yield lambda what: status.update(f"measuring {escape(what)}")

    def show(self, facts: Facts, file: Path | None) -> None:
        """A row for each rate, and how to use them."""
        say, ranks = self._console.print, facts["ranks"]
        about = f"{ranks} rank{'' if ranks == 1 else 's'} on {facts['device']} ({facts['backend']})"
        heads = f"{facts['heads']} query and {facts['kv_heads']} K/V heads of {facts['head_dim']}, {facts['dtype']}"
        say(
            Text.assemble(("measured", "bold"), f" {about}, kernel {facts['kernel']}, {heads}; the slowest rank counts")
        )
        rows = table("rate", "value", "how", left=("value", "how"))
        for name, value in facts["rates"].items():
            how = facts["how"][name]
            style = "" if how["measured"] else "dim"
            rows.add_row(Text(name, style), Text(_value(name, value), style), Text(how["how"], style))
        say("", rows, "", sep="\n")
        if busy := [f"{name} by {most:.2g} times" for name, most in facts["varied"].items() if most > BUSY]:
            say(Text.assemble(("warning", "yellow"), f"  rounds differ, {', '.join(busy)}: {_BUSY}"), "", sep="\n")
        told = [f"with --json FILE they are kept, for BURST_RATES=FILE and `{PROGRAM} plan --rates FILE`"]
        if file is not None:
            told = [
                f"auto chooses with them where BURST_RATES={file} is set on every rank, or with "
                f"Config(rates={str(file)!r});",
                f"`{PROGRAM} plan --rates {file} ...` predicts with them anywhere",
            ]
        say("\n".join(told), markup=False)


def _value(name: str, value: Any) -> str:
    if name in ("link", "direct", "spread"):
        return "\n".join(f"{bytes_text(size)}: {_rate(gbps)}" for size, gbps in value) or "none"
    if name in ("tflops", "backward"):
        return scaled(value * 1e12, "FLOP/s") if value else "as forward"
    if name in ("gbps", "outer_gbps", "memory"):
        return _rate(value) if value else "not priced"
    if name.endswith("latency"):
        return seconds_text(value)
    if name in ("holds_up", "holds_up_first"):
        return f"{percent(value[0])} forward, {percent(value[1])} backward" if value else "as holds_up"
    if name in ("backward_together", "backward_in_turn"):
        return percent(value)
    if name in ("far", "long"):
        rows, share = value
        return f"{percent(share)} from {rows:,} rows on" if rows else "as few rows"
    if name == "block":
        return f"{value} x {value}" if value > 1 else "exact pairs"
    if name == "node":
        return f"of {value} ranks" if value else "one"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _rate(gbps: float) -> str:
    return scaled(gbps * 1e9, "B/s")
