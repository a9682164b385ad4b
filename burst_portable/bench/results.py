"""Read, write and compare the rows of a benchmark. A file has one JSON object per line: settings, then rows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burst_portable.errors import InputError, in_a_line, shown
from burst_portable.planning.plans import PASSES
from burst_portable.utils.text import bytes_text

SCHEMA = "burst_portable.bench/3"
Row = dict[str, Any]
_STATUSES = ("ok", "refused", "wrong", "failed")
_SETTINGS = ("version", "backend", "heads", "kv_heads", "head_dim", "dtype", "layout", "rounds")
"""Settings that every file has, and that pictures show."""
_KEY = ("mask", "seq_len", "ranks", "kernel", "entry")
COLUMNS = (
    "mask", "tokens", "ranks", "kernel", "strategy", "TFLOP/s, forward", "backward", "sent, forward", "backward",
    "peak memory",
)  # fmt: skip
"""Speeds are per rank, by the visible pairs and the slowest rank; bytes are the largest of a rank."""


def row_key(row: Row) -> tuple[str, int, int, str, str]:
    """Return what identifies a row: mask, sequence length, ranks, kernel and entry."""
    return row["mask"], row["seq_len"], row["ranks"], row["kernel"], row["entry"]


def read_rows(path: Path) -> tuple[Row, list[Row]]:
    """Return the settings and the rows of a file. A last line that is incomplete is ignored.

    Raises:
        InputError: If it cannot be read, or has another schema.
    """
    try:
        text = path.read_text(encoding="utf-8")
        settings, rows = _parsed(text)
        schema = settings["schema"]
        if schema == SCHEMA:
            _check_names("its settings", settings, _SETTINGS)
            for number, row in enumerate(rows, 1):
                _check_row(f"row {number}", row)
    except (OSError, ValueError, LookupError, TypeError) as error:
        next_step = "name a file that `bench --json` or `bench --resume` wrote"
        raise InputError(f"{path} is no file of a benchmark", got=in_a_line(error), next_step=next_step) from error
    if schema != SCHEMA:
        raise InputError(
            f"{path} is of another version", got=schema, allowed=SCHEMA, next_step="measure again, into another file"
        )
    return settings, rows


def _check_row(where: str, row: Row) -> None:
    """Raise `ValueError` if a row lacks what tables, pictures and comparisons read, or its speed is not positive."""
    _check_names(where, row, (*_KEY, "status"))
    if row["status"] not in _STATUSES:
        raise ValueError(f"the status of {where} is {shown(row['status'])}, none of {', '.join(_STATUSES)}")
    if row["status"] != "ok":
        _check_names(where, row, ("reason",))
        return
    positive = [f"{name}_{what}" for name in PASSES for what in ("tflops", "seconds")]
    counts = [*(f"{name}_sent_bytes" for name in PASSES), *(["peak_bytes"] if row.get("peak_bytes") else [])]
    spreads = [name for name in (f"{name}_spread" for name in PASSES) if name in row]  # which old files lack
    _check_names(where, row, (*positive, *counts, "peak_bytes"))
    for name in (*positive, *counts, *spreads):
        value, is_positive = row[name], name in positive
        if type(value) not in (int, float) or not (value > 0 or (value == 0 and not is_positive)) or value == math.inf:
            wanted = "a positive number" if is_positive else "a number from 0"
            raise ValueError(f"{name} of {where} is {shown(value)}, not {wanted}")


def _check_names(where: str, found: Row, names: Sequence[str]) -> None:
    """Raise `ValueError` if an object lacks one of these names."""
    if missing := [name for name in names if name not in found]:
        raise ValueError(f"no {missing[0]} in {where}")


def _parsed(text: str) -> tuple[Row, list[Row]]:
    """Return the settings and the rows of a file of `--json`, however it is indented, or of `--resume`."""
    try:
        whole = json.loads(text)
    except ValueError:  # several lines with an object each, or an incomplete one
        whole = {}
    if "settings" in whole:
        return whole["settings"], whole["rows"]
    lines = [_parsed_line(number, line) for number, line in enumerate(text.split("\n")[:-1], 1) if line]
    if not lines:
        raise ValueError("no complete line")
    return lines[0], lines[1:]


def _parsed_line(number: int, line: str) -> Row:
    """Return the object of a line. Raise `ValueError` with the number of the line in its file."""
    try:
        row = json.loads(line)
    except ValueError as error:
        reason = str(error).partition(": line 1 column ")[0]
        raise ValueError(f"line {number} is not JSON: {reason}: {shown(line)}") from error
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is no object: {shown(line)}")
    return row


def check_appendable(path: Path) -> None:
    """Raise `InputError` if rows cannot be appended to a file of rows: `--json` wrote it, as one object."""
    first, _, _ = path.read_text(encoding="utf-8").partition("\n")
    try:
        appendable = "schema" in json.loads(first)
    except ValueError:
        appendable = False
    if not appendable:
        allowed = "a new file, or one that --resume wrote"
        raise InputError("rows cannot be appended to this file", got=str(path), allowed=allowed)


def append_rows(path: Path, settings: Row, rows: Sequence[Row]) -> None:
    """Append rows to a file. A new or empty one begins with the settings; an incomplete last line is removed."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    complete = text[: text.rfind("\n") + 1]
    if complete != text:
        path.write_text(complete, encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for one in [*([] if complete else [settings]), *rows]:
            file.write(json.dumps(one) + "\n")


def entry_text(row: Row) -> str:
    """Return the name of an entry; for `auto` also what it ran: "auto: A", or "auto: A, then B" if it chose again."""
    chose, first = row.get("chose"), row.get("chose_first")
    if chose is None:  # another entry, one that did not run, or a file whose writer did not record it
        return str(row["entry"])
    return f"{row['entry']}: {chose}" if first == chose else f"{row['entry']}: {first}, then {chose}"


def cells(row: Row) -> list[str]:
    """Return the cells of `COLUMNS`. A wrong or refused entry has no speed."""
    first = [row["mask"], f"{row['seq_len']:,}", str(row["ranks"]), row["kernel"], entry_text(row)]
    if row["status"] != "ok":
        return [*first, "WRONG" if row["status"] == "wrong" else row["status"], *[""] * (len(COLUMNS) - len(first) - 1)]
    peak = "-" if row["peak_bytes"] is None else bytes_text(row["peak_bytes"])
    speeds = (f"{row[f'{name}_tflops']:.3g}" for name in PASSES)
    return [*first, *speeds, *(bytes_text(row[f"{name}_sent_bytes"]) for name in PASSES), peak]


def reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Return why entries have no speed: "entry, status: reason", and the masks."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row["status"] != "ok":
            found.setdefault(f"{row['entry']}, {row['status']}: {row['reason']}", []).append(row["mask"])
    return {text: ", ".join(dict.fromkeys(masks)) for text, masks in found.items()}


def markdown(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table, and why entries have no speed as a list."""
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(cells, rows)]
    made = "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)
    listed = "".join(f"- {text} ({masks})\n" for text, masks in reasons(rows).items())
    return f"{made}\n{listed}" if listed else made


def differences(before: tuple[Row, Sequence[Row]], after: tuple[Row, Sequence[Row]]) -> list[str]:
    """Return what makes two files hard to compare: other settings, and rows that only one of them has."""
    (old, old_rows), (new, new_rows) = before, after
    found = [
        f"{name}: {old.get(name)}, then {new.get(name)}" for name in {**old, **new} if old.get(name) != new.get(name)
    ]
    old_keys, new_keys = ({row_key(row) for row in rows} for rows in (old_rows, new_rows))
    for text, count in (("first", len(old_keys - new_keys)), ("second", len(new_keys - old_keys))):
        if count:
            found.append(f"{count} row{'s' * (count > 1)} only in the {text} file")
    return found


NOISE = " ~"
"""Mark of a difference within the spread of repeats."""


def _ratio(before: Row, after: Row, name: str) -> str:
    """Return the TFLOP/s of a pass over those of before, and `NOISE` if the repeats of a row differ by as much."""
    ratio = after[f"{name}_tflops"] / before[f"{name}_tflops"]
    spread = max(row.get(f"{name}_spread") or 0.0 for row in (before, after))
    return f"{ratio:.3f}{NOISE if 0 < abs(ratio - 1) <= spread else ''}"


def compare(before: Sequence[Row], after: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return (row, forward, backward) of rows in both files: speed of `after` over `before`, or both statuses.

    A row of `auto` names the strategy that it ran in `after`, and that of `before` if it is another one. `NOISE`
    follows a speed if it is within the spread of the repeats of one of the two rows, which old files lack.
    """
    old, found = {row_key(row): row for row in before}, []
    for new in after:
        if (one := old.get(row_key(new))) is None:
            continue
        label = f"{new['mask']}, {new['seq_len']:,} tokens, {new['ranks']} ranks, {new['kernel']}, {entry_text(new)}"
        if entry_text(one) != entry_text(new):
            label += f" (before: {entry_text(one)})"
        if one["status"] == new["status"] == "ok":
            found.append((label, *(_ratio(one, new, name) for name in PASSES)))
        else:
            found.append((label, one["status"], new["status"]))
    return found
