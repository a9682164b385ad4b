"""Test that a changed report file gives an `InputError` or a page, never a traceback."""

from __future__ import annotations

import functools
import io
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from burst_portable.errors import InputError
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.compare import compare, differences
from burst_portable.profiling.report.schema import find_error
from tests.profiling.report.test_html import SAMPLE
from tests.support.synthetic_records import ring, training_run, with_ablation

VALUES: list[Any] = [
    None, True, -1, 0, 3, 1.5, -0.5, 10**30, 1 << 62, -(1 << 62), 1e308, 5e-324, "", "x", "[/b]", "9" * 20_000, "a\nb",
    "forward", [], [1], [[]], {}, {"a": 1}, {"rank": 1}, [None], ["x"],
]  # fmt: skip
NAMES = "new", "passes", "kind", "rank", "", "a<b", "ring_step"


@functools.cache
def complete_report() -> str:
    """Return the file of a report with every part."""
    data = Report.of(with_ablation(training_run(0, 2, steps=2))).data
    peak = {"rank": 0, "flops": 1e9, "bandwidth": 1e9, "measured": True, "device": "", "dtype": "", "source": ""}
    kernel = {"name": "", "kind": "", "activity": "", "backward": 0, "count": 1, "time_ns": 1, "ring_step": 0}
    traced = {"rank": 0, "on_device": True, "partition": data["ranks"][0], "contention": None, "kernels": [kernel]}
    sensors = {"rank": 0, "reason": "", "time_ns": [0, 1], "watts": [1.0, 2.0]}
    parts = {name: Report.of(ring(2, 3)).data[name] for name in ("plans", "efficiency", "prediction")}
    data = {**data, **parts, "peaks": [peak], "kernel_trace": [traced], "sensors": [sensors]}
    assert find_error(data) == ""
    return json.dumps(data)


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Yield the path of every value, of lists only of the first and the last item."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = {index: value[index] for index in (0, len(value) - 1)[: len(value)]}.items()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def change(data: Any, path: tuple, draw: random.Random) -> str:
    """Drop, replace, repeat or extend the value at a path, and return what was done."""
    *parents, last = path
    for key in parents:
        data = data[key]
    kind, value = draw.choice(("drop", "set", "set", "add", "wrap")), draw.choice(VALUES)
    if kind == "drop":
        del data[last]
    elif kind == "add" and isinstance(data[last], dict):
        data[last][draw.choice(NAMES)] = value
    elif kind == "add" and isinstance(data[last], list):
        data[last].insert(draw.randrange(len(data[last]) + 1), draw.choice((value, *data[last][:1])))
    elif kind == "wrap":
        data[last] = [data[last]]
    else:
        data[last] = value
    return f"{kind} {path} {str(value)[:20]}"


def use(file, original: dict[str, Any]) -> None:
    """Load a file and write it in every form."""
    report = Report.load(file)
    for write in (report.write_html, report.write_chrome, report.write_json):
        write(file.with_suffix(".out"))
    report.markdown()
    report.print(Console(file=io.StringIO(), width=100))
    for pair in ((original, report.data), (report.data, original)):
        compare(*pair, 0.1)
        differences(*pair)


@pytest.mark.parametrize(
    ("count", "seed"), [(20, 0), (20, 1), *(pytest.param(600, seed, marks=pytest.mark.full) for seed in range(2, 8))]
)
def test_changed_reports_give_no_traceback(tmp_path, count, seed):
    text = complete_report() if seed % 2 else SAMPLE.read_text(encoding="utf-8")
    original, file = json.loads(text), tmp_path / "changed.json"
    places, draw, rejected = list(paths(original))[1:], random.Random(seed), 0
    for _ in range(count):
        changed = json.loads(text)
        done = change(changed, draw.choice(places), draw)
        file.write_text(json.dumps(changed))
        try:
            use(file, original)
        except InputError:
            rejected += 1
        except Exception as error:
            raise AssertionError(done) from error
    assert 0.2 * count < rejected < 0.9 * count


@pytest.mark.parametrize("entry", [3, {"flops": 1, "compute_ns": 1}, None])
def test_unknown_pass_is_rejected(tmp_path, entry):
    """The entries of `passes` are summed."""
    data = json.loads(SAMPLE.read_text(encoding="utf-8"))
    data["ranks"][1]["passes"]["sideways"] = entry
    (tmp_path / "changed.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"report\.ranks\[1\]\.passes has an unknown entry 'sideways'"):
        Report.load(tmp_path / "changed.json")


def test_number_with_too_many_digits_is_rejected(tmp_path):
    """Python converts no integers of more than 4,300 digits to text."""
    text = SAMPLE.read_text(encoding="utf-8")
    (tmp_path / "changed.json").write_text(text.replace('"rank":0', f'"rank":{"9" * 5000}', 1))
    with pytest.raises(InputError, match="is not a report"):
        Report.load(tmp_path / "changed.json")
