"""A report: the data of `analyze`, and the files that are made of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burst_portable.errors import InputError, shown
from burst_portable.profiling.analysis.analyze import SCHEMA, analyze
from burst_portable.profiling.records import RankRecords
from burst_portable.profiling.report.schema import what_is_wrong
from burst_portable.utils.files import read_json, write_text
from burst_portable.utils.values import as_int

_LARGEST = 1 << 28  # bytes, unpacked
_ADVICE = "pass a report's profile.json, which `burst-portable run --profile --report FOLDER` writes"


def _nothing_left(steps: int, skip: int) -> InputError:
    """The error where nothing is left to report: nothing was recorded, or everything recorded is skipped."""
    if not steps:
        return InputError("nothing was recorded", next_step="call attention inside `with burst_portable.profile(...)`")
    recorded = "1 training step" if steps == 1 else f"{steps} training steps"
    return InputError(
        "everything that was recorded is skipped",
        got=f"{recorded}, skip={skip}",
        allowed="a skip of less than the steps",
        next_step="call session.mark() after each step, or all calls count as one; or record more steps than skip",
    )


class Report:
    """Where the time went. `data` is what the JSON file holds; see `profiling/README.md` for its fields."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @classmethod
    def of(cls, records: Sequence[RankRecords], *, skip: int = 0) -> Report:
        """From all ranks' records, without the first `skip` training steps.

        Raises `InputError` if nothing is left to report, if `skip` is not a number of steps, and for records of several
        meshes.
        """
        ranks = sorted(one.rank for one in records)
        if len(set(ranks)) < len(ranks):
            raise InputError(
                "these are records of several meshes: a rank is there twice",
                got=f"ranks {', '.join(map(str, ranks))}",
                next_step="pass mesh= to profile(), or gather each sequence group's on their own",
            )
        number = as_int(skip)
        if number is None or number < 0:
            raise InputError("skip must be a number of training steps", got=shown(skip), allowed="an int >= 0")
        last = max((int(t["iteration"].max()) for r in records for t in r.tables.values() if len(t)), default=-1)
        if last < number:
            raise _nothing_left(last + 1, number)
        return cls(analyze(records, skip=number))

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """A report that `write_json` wrote.

        Raises `InputError` for another file.
        """
        path = Path(path)
        if os.path.isdir(path):  # such as that of `run --report`
            raise InputError(f"{path} is not a report", got="a folder", next_step=f"pass {path / 'profile.json'}")
        data = read_json(path, "a report", _LARGEST, next_step=_ADVICE)
        data = data.get("profile", data) if isinstance(data, dict) else {}
        data = data if isinstance(data, dict) else {}
        if data.get("schema") != SCHEMA:
            got = repr(data["schema"])[:80] if "schema" in data else "no schema"
            older = str(data.get("schema")).startswith(SCHEMA.partition("/")[0])
            advice = "record it again" if older else _ADVICE
            raise InputError(f"{path} is not a profile of this version", got=got, allowed=SCHEMA, next_step=advice)
        if wrong := what_is_wrong(data):
            raise InputError(f"{path} is not a report that this library wrote", got=wrong, next_step=_ADVICE)
        return cls(data)

    @property
    def verdict(self) -> str:
        """One sentence: the largest loss, and whose it is."""
        return str(self.data["verdict"]["text"])

    def write_json(self, path: str | Path) -> None:
        """The data, for CI and for `burst-portable profile`."""
        write_text(path, json.dumps(self.data, separators=(",", ":"), allow_nan=False) + "\n")

    def write_html(self, path: str | Path) -> None:
        """One file that needs nothing else: timeline, partition, steps, prediction."""
        from burst_portable.profiling.report.html import page

        write_text(path, page(self.data))

    def write_chrome(self, path: str | Path) -> None:
        """A trace for ui.perfetto.dev or chrome://tracing: a process per rank, tracks for computing and messages."""
        from burst_portable.profiling.report.chrome import trace

        write_text(path, json.dumps(trace(self.data), separators=(",", ":")) + "\n")

    def markdown(self) -> str:
        """For a pull request."""
        from burst_portable.profiling.report.tables import markdown

        return markdown(self.data)

    def print(self, console: Any = None) -> None:
        """To the terminal, or to a rich console."""
        from burst_portable.profiling.report.terminal import show

        show(self.data, console)
