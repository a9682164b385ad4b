"""Files that are made of a report, and comparing two of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import burst_portable as bp
from burst_portable.cli import main
from burst_portable.profiling.ablation import Ablation
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.schema import what_is_wrong
from burst_portable.profiling.report.tables import ablation_text, step_rows
from burst_portable.profiling.report.terminal import show
from tests.profiling.made import Maker, ablated, ring


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    Report.of(ring(4, 6)).write_json(folder / "even.json")
    Report.of(ring(4, 6, slow=[2])).write_json(folder / "slow.json")
    return folder


def test_what_was_not_seen_is_written_and_read_again(tmp_path):
    """A link whose bytes were all there before anyone looked; hosts whose clocks nothing relates."""
    a, b = Maker(0), Maker(1)
    for one in (a, b):
        one.compute(0, 0, 100)
        one.message(1, 1 - one.rank, sends=True, posted=10, start=90, end=91, owner=one.rank, issued=0)
        one.message(1, 1 - one.rank, sends=False, posted=10, start=100, end=101, owner=1 - one.rank, issued=0)
    far = Maker(1, "another host")
    far.compute(0, 0, 100)
    plan = bp.plan(seq_len=256, ranks=2, heads=2, head_dim=16)
    for name, makers in (("links", (a, b)), ("hosts", (a, far))):
        report = Report.of([one.records(plan) for one in makers])
        report.write_json(tmp_path / name)
        report.write_html(tmp_path / f"{name}.html")
        assert Report.load(tmp_path / name).data == report.data
    assert [link["bytes_per_second"] for link in Report.load(tmp_path / "links").data["links"]] == [None, None]
    assert Report.load(tmp_path / "hosts").data["clock"]["uncertainty_ns"] is None


def test_the_terminal_begins_with_the_verdict(files, capsys):
    assert main(["profile", str(files / "slow.json")]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("SLOW RANK  Rank 2 computes slowly")
    assert max(map(len, printed.splitlines()[2:])) <= 80


def test_on_a_terminal_the_verdict_goes_on_below_its_text(files, capsys):
    """A terminal cuts words where its lines end; a log gets a line, which can be searched."""
    data = Report.load(files / "slow.json").data
    data["verdict"]["text"] = data["verdict"]["text"] + " [not] markup"
    for on_terminal in (True, False):
        show(data, Console(force_terminal=on_terminal, width=80, color_system=None))
        lines = capsys.readouterr().out.splitlines()
        end = next(i for i, line in enumerate(lines) if line.startswith("  what to do  "))
        assert (end > 1) == on_terminal
        assert all(line.startswith(" " * len("SLOW RANK  ")) for line in lines[1:end])
        told = " ".join(line.strip() for line in lines[:end])
        assert told.removeprefix("SLOW RANK").strip() == data["verdict"]["text"]
        assert (max(map(len, lines)) <= 80) == on_terminal


def test_a_narrow_terminal_cuts_no_number(files, capsys):
    """Numbers went to dots, beside a bar as wide as ever."""
    data = Report.load(files / "slow.json").data
    for width in (40, 60, 80):
        show(data, Console(force_terminal=True, width=width, color_system=None))
        printed = capsys.readouterr().out
        assert "…" not in printed
        assert ("where it went" in printed) == (width >= 80)
        assert max(map(len, printed.splitlines())) <= width


def test_the_slowest_rank_of_a_step_computes_longest_and_does_not_wait(files, capsys):
    """Rank 1 computes for 400 µs; rank 0 is done after 100 and waits for 450."""
    a, b = Maker(0), Maker(1)
    a.compute(1, 0, 100)
    b.compute(1, 0, 400)
    a.message(1, 1, sends=False, posted=0, start=100, end=550, owner=1, issued=0)
    b.message(1, 0, sends=True, posted=400, start=400, end=401, owner=1, issued=0)
    report = Report.of([a.records(), b.records()])
    row = step_rows(report.data)[-1]
    assert (row["slowest"], row["slowest_compute"], row["longest_wait"]) == (1, 400_000, 450_000)
    report.print()
    line = next(line for line in capsys.readouterr().out.splitlines() if "forward 1" in line)
    assert line.split()[-5:-2] == ["1", "400", "µs"], line


def test_a_light_report_tells_no_totals_that_were_not_recorded(tmp_path, capsys):
    """Nothing says what it sent or hid; the agreement's 24 bytes are not all that was sent."""
    maker = Maker(0)
    maker.collective(0, 0, 10)
    maker.compute(0, 10, 110)
    for light in (True, False):
        record = maker.records()
        report = Report.of([replace(record, facts={**record.facts, "light": light})])
        report.print()
        printed = " ".join(capsys.readouterr().out.split())
        report.write_html(tmp_path / "l.html")
        page = (tmp_path / "l.html").read_text(encoding="utf-8")
        for text in (printed, page, report.markdown()):
            assert ("a light report" in text) == light
        assert ("communication hidden" in printed) == ("24 B sent" in printed) == (not light), printed
        assert ('data-path="ranks.0.sent_bytes"' in page) == (not light)
        assert ('data-path="ranks.0.exposed_copy"' in page) == (not light)
        assert ("| 10.0 µs | - | 0 ns |" in report.markdown()) == light, report.markdown()


def test_exposed_in_the_terminal_is_communication_without_copies(capsys):
    """200 µs of communication and 30 of copies that nothing hid: two numbers, as in the other forms."""
    maker = Maker(0)
    maker.compute(0, 0, 100)
    maker.collective(0, 100, 300)
    maker.copy(0, 300, 330)
    report = Report.of([maker.records()])
    report.print()
    lines = capsys.readouterr().out.splitlines()
    header, row = (next(x for x in lines if x.split()[:1] == [first]) for first in ("rank", "0"))
    assert header.split()[:7] == ["rank", "span", "computing", "exposed", "copies", "blocking", "idle"]
    assert "330 µs 100 µs 200 µs 30.0 µs 200 µs 0 ns" in " ".join(row.split())
    assert "| 0 | 330 µs | 100 µs | 200 µs | 30.0 µs | 0 ns | 200 µs |" in report.markdown()


def test_other_forms_are_written(files, capsys):
    names = [files / name for name in ("p.html", "p.json", "p.md")]
    wanted = ["--html", names[0], "--chrome", names[1], "--markdown", names[2]]
    assert main(["profile", str(files / "slow.json"), *map(str, wanted), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = Report.load(files / "slow.json")
    assert printed["ranks"] == report.data["ranks"]
    assert printed["verdict"]["rank"] == 2
    assert report.verdict in names[0].read_text(encoding="utf-8").replace("\u00a0", " ")
    assert report.verdict in names[2].read_text(encoding="utf-8")


def test_an_ablation_is_in_every_form(tmp_path, capsys):
    report = Report.of(ablated(ring(2, 3)))
    report.write_json(tmp_path / "a.json")
    wanted = ["--html", str(tmp_path / "a.html"), "--markdown", str(tmp_path / "a.md")]
    assert main(["profile", str(tmp_path / "a.json"), *wanted]) == 0
    printed = capsys.readouterr().out
    row = ("20.0 ms", "3.00 ms", "5.00 ms", "2.00 ms", "10.0 ms")
    assert f"rank 1 {' '.join(row)}" in " ".join(printed.split())
    assert max(map(len, printed.splitlines()[2:])) <= 80
    assert f"| rank 1 | {' | '.join(row)} |" in (tmp_path / "a.md").read_text(encoding="utf-8")
    assert ">Ablation<" in (tmp_path / "a.html").read_text(encoding="utf-8")
    assert main(["profile", str(tmp_path / "a.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ablation"] == report.data["ablation"]
    assert "a step of 20.0 ms on rank 0" in ablation_text(report.data)
    told = {name: text for names, text in report.data["evidence"].items() for name in names.split(", ")}
    assert told["hidden"].startswith("ablation: ")


def test_an_ablation_of_less_than_runs_differ_by_is_told_so():
    """Steps that were shorter with messages, or with kernels, than without: the words name no time below zero."""
    facts = {"rank": 1, **Ablation(0.0200, 0.0203, 0.0199, 0.0198).facts()}
    told = ablation_text({"ablation": [facts]})
    assert facts["exposed_communication"] == -300_000
    assert "attention's messages add no more than runs differ by, its kernels add 100 µs, 400 µs are hidden" in told
    assert "-" not in ablation_text({"ablation": [{"rank": 0, **Ablation(0.0200, 0.0203, 0.0201, 0.0206).facts()}]})


def test_a_report_says_how_far_device_clocks_drift(tmp_path, capsys):
    records = ring(2, 3)
    told = [{"ppm": 12.5 * one.rank, "uncertainty_ppm": 0.2, "corrected": True} for one in records]
    report = Report.of([replace(r, facts={**r.facts, "drift": t}) for r, t in zip(records, told, strict=True)])
    assert [row["ppm"] for row in report.data["drift"]] == [0.0, 12.5]
    report.write_json(tmp_path / "d.json")
    assert main(["profile", str(tmp_path / "d.json"), "--html", str(tmp_path / "d.html")]) == 0
    text = "device clocks drift by up to 12 ppm, taken out"
    assert text in " ".join(capsys.readouterr().out.split())
    assert text in (tmp_path / "d.html").read_text(encoding="utf-8")


def test_the_trace_has_every_rank_and_every_event(files):
    report = Report.load(files / "slow.json")
    report.write_chrome(files / "trace.json")
    events = json.loads((files / "trace.json").read_text())["traceEvents"]
    tracks = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    kinds = {"compute and copies", "communication: waiting", "communication: transfers"}
    assert {name.removesuffix(" (2)") for _, name in tracks} == kinds
    assert {rank for rank, _ in tracks} == {0, 1, 2, 3}
    spans = [e for e in events if e["ph"] == "X"]
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for e in events:  # what Perfetto and Chrome want of the two kinds that there are
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
    for track in by_track.values():  # one that began within another and outlived it would be drawn wrong
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


def test_transfers_that_run_beside_one_another_get_tracks_of_their_own(tmp_path):
    """Where a stream saw them come: from 2 to 150 us, from 52 to 220, from 150 to 160. Perfetto drops what overlaps."""
    makers = Maker(0), Maker(1)
    for one in makers:
        other = 1 - one.rank
        one.compute(0, 0, 300)
        for owner, posted, left, arrived in ((5, 0, 2, 150), (6, 50, 52, 220), (7, 149, 150, 160)):
            both = {"posted": posted, "left": left, "owner": owner}
            one.message(1, other, sends=True, start=300, end=301, **both)
            one.message(1, other, sends=False, start=300, end=301, arrived=arrived, **both)
    Report.of([one.records() for one in makers]).write_chrome(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0}
    came = {e["name"][-1]: names[e["tid"]] for e in events if e.get("cat") == "transfer" and e["pid"] == 0}
    track = "communication: transfers"
    assert came == {"5": track, "6": f"{track} (2)", "7": track}


def test_idle_is_cut_where_the_window_ends():
    """Of a message that came at 50 us nothing is waited for from 110 to 130: the last event ends at 100, idle is 0."""
    one = Maker(0)
    one.compute(0, 0, 100)
    one.message(1, 1, sends=False, posted=0, start=110, end=130, arrived=50)
    (rank,) = Report.of([one.records()]).data["ranks"]
    assert (rank["span"], rank["idle"]) == (100_000, 0)
    assert (rank["idle_between_kernels"], rank["idle_outside_attention"]) == (0, 0)


def test_comparing_says_what_became_slower(files, capsys):
    even, slow = str(files / "even.json"), str(files / "slow.json")
    assert main(["compare", even, even]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[-1] for row in rows if row[:1] == ["span"]] == ["1.00"]
    assert main(["compare", slow, even]) == 0, "faster is no failure"
    capsys.readouterr()
    assert main(["compare", even, slow]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("SLOWER")
    assert "computing" in printed.splitlines()[0]
    assert main(["compare", even, slow, "--threshold", "5"]) == 0


def changed(files, name: str, change) -> str:
    """The even report with something else in it."""
    data = json.loads((files / "even.json").read_text())
    change(data)
    (files / name).write_text(json.dumps(data))
    return str(files / name)


def test_other_work_is_not_compared(files, capsys):
    """Sixteen times the FLOPs for four times the tokens: neither is slower, whatever the times."""

    def longer(data):
        for one in (one for rank in data["ranks"] for one in rank["passes"].values()):
            one["flops"] *= 16
        for plan in data["plans"]:
            plan["seq_len"] *= 4

    tokens = json.loads((files / "even.json").read_text())["plans"][0]["seq_len"]
    even, long = str(files / "even.json"), changed(files, "long.json", longer)
    for pair in ((even, long), (long, even)):
        assert main(["compare", *pair]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "other work, so that neither can be called slower" in told
    assert f"got tokens {4 * tokens} and {tokens}; " in told
    assert "of attention a step; profile both with the same model" in told


def test_the_same_work_in_more_steps_is_compared(files):
    def twice(data):
        data["iterations"] += data["iterations"]
        for rank in data["ranks"]:
            for one in rank["passes"].values():
                one["flops"] *= 2

    assert main(["compare", str(files / "even.json"), changed(files, "twice.json", twice)]) == 0


def test_what_else_differs_is_told(files, capsys):
    even, light = str(files / "even.json"), changed(files, "light.json", lambda data: data.update(light=True))

    def other(data):
        data["device"] = "cuda"
        for plan in data["plans"]:
            plan["strategy"] = "ulysses"

    assert main(["compare", even, even]) == 0
    assert not {"warning", "differs"} & set(capsys.readouterr().out.split())
    assert main(["compare", even, light]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "warning level: session before, light after: levels cost different times of their own" in told
    other = changed(files, "other.json", other)
    assert main(["compare", even, other]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "differs strategy: ring before, ulysses after" in told
    assert "warning device: cpu before, cuda after" in told
    assert main(["compare", even, other, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"name": "strategy", "before": "ring", "after": "ulysses"} in told["differs"]


def test_what_is_no_report_is_refused(files, capsys):
    (files / "other.json").write_text('{"schema": "something/1"}')
    assert main(["profile", str(files / "other.json")]) == 2
    assert "something/1" in capsys.readouterr().err
    assert main(["compare", str(files / "missing.json"), str(files / "even.json")]) == 2
    Report.of(ring(2, 3)).write_json(files / "two.json")
    assert main(["compare", str(files / "two.json"), str(files / "even.json")]) == 2
    with pytest.raises(bp.BurstError, match="nothing was recorded"), bp.profile() as session:
        session.report()


def test_a_traced_kernel_of_no_place_is_refused():
    """The page names it: "most of it at step 0: q0 x kv0"."""
    one = Maker(0)
    one.compute(0, 0, 100)
    one.traced(0, 0, 90)
    data = Report.of([one.records(bp.plan(seq_len=64, ranks=1, heads=2, head_dim=16))]).data
    assert what_is_wrong(data) == ""
    del data["traced"][0]["kernels"][0]["what"]
    assert what_is_wrong(data) == "report.traced[0].kernels[0] has no what"


def test_steps_that_were_all_skipped_are_told_from_none_recorded():
    """One step, for nobody marked where it ends; and three of which as many are skipped."""
    with bp.profile() as session:
        bp.attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)))
        bp.attention(*(torch.randn(1, 8, 1, 8) for _ in range(3)))
    assert session.report() is not None
    with pytest.raises(
        bp.BurstError, match=r"everything that was recorded is skipped.*1 training step, skip=1.*mark\(\)"
    ):
        session.report(skip=1)
    maker = Maker(0)
    for maker.iteration in range(3):
        maker.compute(0, 100 * maker.iteration, 100 * maker.iteration + 50)
    assert Report.of([maker.records()], skip=2).data["ranks"][0]["span"] == 50_000
    with pytest.raises(bp.BurstError, match="3 training steps, skip=3"):
        Report.of([maker.records()], skip=3)


def test_times_that_do_not_add_up_are_refused(files, tmp_path):
    written = json.loads((files / "even.json").read_text())
    for name, row in (("ranks", written["ranks"][0]), ("steps", written["steps"][0]["ranks"][0])):
        for more in (1, -(1 << 40)):
            row["idle"] += more
            (tmp_path / "changed.json").write_text(json.dumps(written))
            row["idle"] -= more
            with pytest.raises(bp.BurstError, match=rf"report\.{name}\[0\] whose parts do not add up"):
                Report.load(tmp_path / "changed.json")


@pytest.mark.parametrize("skip", [-1, 1.5, "x", True])
def test_a_number_of_steps_to_skip(skip):
    with pytest.raises(bp.BurstError, match="skip must be a number of training steps"):
        Report.of(ring(2, 3), skip=skip)
