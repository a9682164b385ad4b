"""Test the trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json

from burst_portable.profiling.report import Report
from tests.support.synthetic_records import Maker


def test_chrome_trace_has_all_ranks_and_events(files):
    report = Report.load(files / "slow.json")
    report.write_chrome(files / "trace.json")
    events = json.loads((files / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    kinds = {"compute and copies", "communication: waiting", "communication: transfers"}
    assert {name.removesuffix(" (2)") for _, name in tracks} == kinds
    assert {rank for rank, _ in tracks} == {0, 1, 2, 3}
    spans = [e for e in events if e["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for e in events:  # required fields of the two kinds of events
        assert e["ph"] in "XM"
        assert isinstance(e["pid"], int)
        if e["ph"] == "M":
            assert set(e["args"]) == {"sort_index" if e["name"].endswith("sort_index") else "name"}
        else:
            assert (e["pid"], e["tid"]) in named
            assert min(e["ts"], e["dur"]) >= 0
            assert e["name"]
    by_track: dict[tuple, list] = {}
    for e in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        by_track.setdefault((e["pid"], e["tid"]), []).append(
            (round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000))
        )
    for track in by_track.values():  # an event that begins within another one and ends after it would be drawn wrong
        open_until: list[int] = []
        for start, end in track:
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)
    assert len(spans) == sum(len(r["kind"]) for r in report.data["events"]["ranks"])
    kernels = [e for e in spans if e["cat"] == "compute" and e["pid"] == 2]
    assert [e["dur"] for e in kernels] == [300.0] * 6
    assert all(e["tid"] == 0 for e in kernels)


def test_overlapping_transfers_get_separate_chrome_tracks(tmp_path):
    """Transfers at 2-150, 52-220 and 150-160 µs; Perfetto drops overlapping slices of a track."""
    makers = Maker(0), Maker(1)
    for one in makers:
        other = 1 - one.rank
        one.compute(0, 0, 300)
        for owner, posted, left, arrived in ((5, 0, 2, 150), (6, 50, 52, 220), (7, 149, 150, 160)):
            both = {"posted": posted, "left": left, "start": 300, "end": 301}
            one.message(1, other, sends=True, owner=owner + 10 * one.rank, **both)
            one.message(1, other, sends=False, owner=owner + 10 * other, arrived=arrived, **both)
    Report.of([one.records() for one in makers]).write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    came = {e["name"][-1]: names[e["tid"]] for e in events if e.get("cat") == "transfer" and e["pid"] == 0}
    track = "communication: transfers"
    assert came == {"5": track, "6": f"{track} (2)", "7": track}
