"""Define `Report`: the data of `analyze`, and the files that it writes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burst_portable.errors import InputError, shown
from burst_portable.profiling.analysis.analyze import SCHEMA, analyze
from burst_portable.profiling.event_tables import RankRecords
from burst_portable.profiling.report.schema import find_error
from burst_portable.utils.files import read_json, write_text
from burst_portable.utils.values import as_int

_MAX_BYTES = 1 << 28  # unpacked
_ADVICE = "pass a report's profile.json, which `burst-portable run --profile --report FOLDER` writes"


def _nothing_left(steps: int, skip: int) -> InputError:
    """Return the error of an empty report: nothing was recorded, or all recorded steps are skipped."""
    if not steps:
        return InputError("nothing was recorded", next_step="call attention inside `with burst_portable.profile(...)`")
    recorded = "1 training step" if steps == 1 else f"{steps} training steps"
    return InputError(
        "all recorded training steps are skipped",
        got=f"{recorded}, skip={skip}",
        allowed="skip below the number of steps",
        next_step="call session.mark() after each step, otherwise all calls count as one step; or record more steps",
    )


class Report:
    """A profile of a run.

    Attributes:
        data: Contents of the JSON file; `profiling/README.md` lists its fields.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data

    @classmethod
    def of(cls, records: Sequence[RankRecords], *, skip: int = 0) -> Report:
        """Build a report from all ranks' records, without the first `skip` training steps.

        Raises:
            InputError: If no step is left, if `skip` is not a number of steps, or if the records are of several meshes.
        """
        ranks = sorted(one.rank for one in records)
        if len(set(ranks)) < len(ranks):
            raise InputError(
                "the records are of several meshes: a rank occurs twice",
                got=f"ranks {', '.join(map(str, ranks))}",
                next_step="pass mesh= to profile(), or gather each sequence group separately",
            )
        number = as_int(skip)
        if number is None or number < 0:
            raise InputError("skip must be a number of training steps", got=shown(skip), allowed="an int >= 0")
        steps = 1 + max((one.last_train_step for one in records), default=-1)
        if steps <= number:
            raise _nothing_left(steps, number)
        return cls(analyze(records, skip=number))

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Read a report that `write_json` wrote.

        Raises:
            InputError: If the file is not a report of this version.
        """
        path = Path(path)
        if os.path.isdir(path):  # for example the folder of `run --report`
            raise InputError(f"{path} is not a report", got="a folder", next_step=f"pass {path / 'profile.json'}")
        data = read_json(path, "a report", _MAX_BYTES, next_step=_ADVICE)
        data = data.get("profile", data) if isinstance(data, dict) else {}
        data = data if isinstance(data, dict) else {}
        if data.get("schema") != SCHEMA:
            got = repr(data["schema"])[:80] if "schema" in data else "no schema"
            older = str(data.get("schema")).startswith(SCHEMA.partition("/")[0])
            advice = "record it again" if older else _ADVICE
            raise InputError(f"{path} is not a profile of this version", got=got, allowed=SCHEMA, next_step=advice)
        if error := find_error(data):
            raise InputError(f"{path} is not a report that this library wrote", got=error, next_step=_ADVICE)
        return cls(data)

    @property
    def summary(self) -> str:
        """One or two sentences: the largest bottleneck, its cause and the time that it costs."""
        return str(self.data["summary"]["text"])

    def write_json(self, path: str | Path) -> None:
        """Write the data, for CI and for `burst-portable profile`."""
        write_text(path, json.dumps(self.data, separators=(",", ":"), allow_nan=False) + "\n")

    def write_html(self, path: str | Path) -> None:
        """Write one self-contained page: timeline, partition, ring steps, prediction."""
        from burst_portable.profiling.report.html import page

        write_text(path, page(self.data))

    def write_chrome(self, path: str | Path) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing, with a process per rank."""
        from burst_portable.profiling.report.chrome import trace

        write_text(path, json.dumps(trace(self.data), separators=(",", ":")) + "\n")

    def markdown(self) -> str:
        """Return summary, partition and bottlenecks as Markdown, for a pull request."""
        from burst_portable.profiling.report.tables import markdown

        return markdown(self.data)

    def print(self, console: Any = None) -> None:
        """Print the report to the terminal, or to a rich console."""
        from burst_portable.profiling.report.terminal import show

        show(self.data, console)
