"""Compare and draw files of `burst-portable bench`, without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burst_portable.bench.chart import draw
from burst_portable.bench.results import NOISE, Row, differences, read_rows
from burst_portable.bench.results import compare as compare_rows
from burst_portable.cli.output import JsonOption, check_picture, console, labelled, table, writing
from burst_portable.errors import InputError
from burst_portable.planning.plans import PASSES


def of_files(words: list[str], options: dict[str, Any]) -> int:
    """Compare or draw files that earlier calls wrote. `options` are those that were given."""
    command, *names = words
    if (command, len(names)) not in (("compare", 2), ("draw", 1)):
        allowed = "compare A.json B.json, or draw A.json --picture A.svg"
        raise InputError("bench takes no such words", got=" ".join(words), allowed=allowed)
    option = "--json" if command == "compare" else "--picture"
    if not_used := sorted(options.keys() - {option}):
        raise InputError(f"bench {command} has no such option", got=", ".join(not_used), allowed=f"{option} FILE")
    if command == "compare":
        return _compare(Path(names[0]), Path(names[1]), JsonOption(options.get(option), sources=names))
    if option not in options:
        raise InputError("bench draw has no file to write", allowed="--picture FILE.svg")
    settings, rows = read_rows(Path(names[0]))
    if not rows:
        raise InputError(f"{names[0]} has no rows to draw", next_step="name a file with rows of `bench`")
    check_picture(options[option], sources=names)
    with writing(options[option]):
        options[option].write_text(draw(settings, rows), encoding="utf-8")
    return 0


def _compare(before: Path, after: Path, json_option: JsonOption) -> int:
    """Print the speeds of the second file over those of the first, and what else differs."""
    files = read_rows(before), read_rows(after)
    lines, notes = compare_rows(files[0][1], files[1][1]), differences(*files)
    if not lines:
        got = "; ".join(notes) or "no rows"
        raise InputError("the two files have no row in common", got=got, next_step="measure equal masks and sizes")
    made = table("row", "forward", "backward", title=f"speed of {after} over {before}")
    for line in lines:
        made.add_row(*line)
    output = console(stderr=json_option.stdout)
    output.print(made)
    if noisy := sum(value.endswith(NOISE) for line in lines for value in line[1:]):
        output.print(
            labelled("warning", f"{noisy} marked{NOISE} are within the spread of repeats: no difference shown")
        )
    for note in notes:
        output.print(labelled("differs", note))
    rows: list[Row] = []
    for label, *values in lines:
        named = dict(zip(PASSES, values, strict=True))
        plain: Row = {name: value.removesuffix(NOISE) for name, value in named.items()}
        rows.append({"row": label, **plain, "within_spread": [name for name in PASSES if named[name] != plain[name]]})
    json_option.write({"rows": rows, "differences": notes})
    return 0
