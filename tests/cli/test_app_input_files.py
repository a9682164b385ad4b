"""Test malformed, huge, deep and hostile input files: one line, exit code 2, and no code of the file runs."""

from __future__ import annotations

import copy
import gzip
import json
import math
import os
from pathlib import Path

import pytest

from burst_portable.cli import main
from burst_portable.conformance.report import Report as Conformance
from burst_portable.errors import InputError
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.compare import compare
from burst_portable.utils.files import read_json

SAMPLE = Path(__file__).parents[2] / "profiling" / "sample" / "slow_link.json"
EVENT = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 2}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1, said.err
    assert said.err.startswith("burst-portable: ")
    assert said.err.isascii() or said.err.strip().isprintable()
    assert len(said.err) < 1000
    return said.err


HOSTILE = {
    "empty": (b"", "Expecting value"),
    "binary": (bytes(range(256)) * 4, "is no"),
    "deep": (b"[" * 200_000, "nested too deeply"),
    "deep objects": (b'{"a":' * 100_000, "nested too deeply"),
    "not a number": (b'{"schema": NaN}', "NaN, which is not JSON"),
    "digits": (b'{"schema": ' + b"9" * 5000 + b"}", "digits"),
    "cut gzip": (gzip.compress(b'{"schema": 1}')[:-6], "ended before"),
    "no gzip": (b"\x1f\x8b" + b"x" * 20, "is no"),
    "wrong JSON": (b"3", "no schema"),
    "another version": (b'{"schema": "burst_portable.profile/0"}', "of this version"),
    "a schema that is none": (json.dumps({"schema": ["\x1b[31m" * 1000]}).encode(), "of this version"),
    "another version inside": (b'{"profile": []}', "of this version"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_profile_and_compare_reject_invalid_reports(tmp_path, capsys, name):
    content, told = HOSTILE[name]
    path = tmp_path / "report.json"
    path.write_bytes(content)
    assert told in refused(capsys, "profile", str(path))
    assert told in refused(capsys, "compare", str(SAMPLE), str(path))


def test_readers_reject_bombs_pipes_and_missing_files(tmp_path, capsys):
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(bytes(1 << 20), 9) * 300)  # 300 KB that unpack to 300 MB
    assert "more than 256 MiB" in refused(capsys, "profile", str(bomb))
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, "/dev/zero"):
        for command in (["profile"], ["compare", str(SAMPLE)], ["trace"]):
            kind = "a folder" if path == tmp_path else "not a regular file"
            assert f"got {kind}" in refused(capsys, *command, str(path))
    assert f"pass {tmp_path / 'profile.json'}" in refused(
        capsys, "profile", str(tmp_path)
    )  # the path that `run --report` writes
    for path in (tmp_path / "absent", "x" * 300):
        assert "`burst-portable run --profile --report FOLDER` writes" in refused(capsys, "profile", str(path))
        assert "export_chrome_trace writes it" in refused(capsys, "trace", str(path))


@pytest.mark.parametrize("option", ["--html", "--chrome", "--markdown"])
def test_output_never_overwrites_input(tmp_path, capsys, option):
    report, link = tmp_path / "report.json", tmp_path / "link"
    report.write_bytes(SAMPLE.read_bytes())
    link.symlink_to(report)
    for name in (report, link):
        assert f"{option} names an input file of the command" in refused(
            capsys, "profile", str(report), option, str(name)
        )
    assert "names an input file of the command" in refused(capsys, "run", "--text", str(report), "--json", str(link))
    assert report.read_bytes() == SAMPLE.read_bytes()


@pytest.mark.parametrize("threshold", ["nan", "-0.1"])
def test_compare_rejects_invalid_threshold(capsys, threshold):
    told = refused(capsys, "compare", str(SAMPLE), str(SAMPLE), "--threshold", threshold)
    assert "the threshold is out of range" in told


def places(value: object, place: tuple = ()) -> list[tuple]:
    """Return the paths of all keys and of the first element of each list."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    return [p for key, one in inner for p in ((*place, key), *places(one, (*place, key)))]


def planted(data: dict, place: tuple, value: object) -> dict:
    """Return the data with another value at a path, or without the path if the value is `planted` itself."""
    other = copy.deepcopy(data)
    at = other
    for key in place[:-1]:
        at = at[key]
    if value is planted:
        del at[place[-1]]
    else:
        at[place[-1]] = value
    return other


VALUES = [planted, None, {}, [], -1, 1 << 70, "[/bold]", "\x1b]0;gone\x07", [[[]]], 0.5]


def small() -> dict:
    """Return the sample with few events."""
    data = json.loads(SAMPLE.read_text(encoding="utf-8"))
    for rank in data["events"]["ranks"]:
        for name, column in rank.items():
            rank[name] = column[:3] if isinstance(column, list) else column
    return data


def is_refused(report: dict, folder: Path) -> bool:
    """Return whether a report raises one line. Otherwise every output format must accept it."""
    (folder / "report.json").write_text(json.dumps(report), encoding="utf-8")
    refusal = ""
    try:
        read = Report.load(folder / "report.json")
    except InputError as error:
        refusal = str(error)
    if not refusal:
        read.write_html(folder / "page.html")
        read.write_chrome(folder / "trace.json")
        assert "\x1b" not in read.markdown()
        read.print()
        compare(read.data, read.data, 0.1)
    assert refusal.isprintable()
    return bool(refusal)


@pytest.mark.slow
def test_report_with_replaced_value_is_rejected_or_shown(tmp_path):
    """Each tenth value is replaced by another one; with -m full each value by all of them."""
    data = small()
    some = places(data)[::10]
    told = [is_refused(planted(data, p, VALUES[i % len(VALUES)]), tmp_path) for i, p in enumerate(some)]
    assert sum(told) > len(told) / 2
    assert not is_refused(data, tmp_path)


@pytest.mark.parametrize("name", ["ceiling_flops_per_second", "bound"])
def test_achieved_row_without_ceiling_is_rejected(tmp_path, name):
    assert is_refused(planted(small(), ("efficiency", 0, name), None), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("value", VALUES, ids=lambda v: "absent" if v is planted else repr(v))
def test_report_with_invalid_value_is_rejected(tmp_path, value):
    data = small()
    assert sum(is_refused(planted(data, place, value), tmp_path) for place in places(data)) > 50


def test_html_page_escapes_text_of_report(tmp_path):
    data = json.loads(SAMPLE.read_text(encoding="utf-8"))
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    for place in [p for p in places(data) if p[-1] in ("text", "recommendation", "strategy", "host", "reason", "mask")]:
        data = planted(data, place, attack)
    data["evidence"][attack] = attack
    (tmp_path / "report.json").write_text(json.dumps(data), encoding="utf-8")
    Report.load(tmp_path / "report.json").write_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<img" not in page


@pytest.mark.parametrize(
    "events",
    [
        [1],
        [None],
        [{**EVENT, "ts": None}],
        [{**EVENT, "ts": "soon"}],
        [{**EVENT, "ts": "NaN"}],
        [{**EVENT, "ts": "1e999999999"}],
        [{**EVENT, "ts": -5}],
        [{**EVENT, "dur": -1}],
        [{**EVENT, "dur": 1e30}],
        [{**EVENT, "args": 3}],
        [{k: v for k, v in EVENT.items() if k != "ts"}],
    ],
    ids=str,
)
def test_trace_rejects_invalid_events(tmp_path, capsys, events):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    assert "an event cannot be read" in refused(capsys, "trace", str(path))


@pytest.mark.parametrize("more", [{"distributedInfo": {"rank": "x"}}, {"baseTimeNanoseconds": {}}])
def test_trace_rejects_invalid_headers(tmp_path, capsys, more):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [EVENT], **more}), encoding="utf-8")
    refused(capsys, "trace", str(path))


def test_read_json_rejects_infinite_numbers(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[1e999]", encoding="utf-8")
    with pytest.raises(InputError, match="too large"):
        read_json(path, "no list", 100)
    path.write_text("[1e300]", encoding="utf-8")
    assert math.isclose(read_json(path, "no list", 100)[0], 1e300)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, "{}", '{"schema": "burst_portable.conformance/3"}', "\x00"], ids=lambda t: t[:9]
)
def test_conformance_report_rejects_invalid_json(text):
    with pytest.raises(InputError, match="not a conformance report"):
        Conformance.from_json(text)
