"""Test the command `bench`: its rows, the files that it continues, its exit code, and interruptions."""

from __future__ import annotations

import json
import re
import signal
from itertools import product

import pytest

from burst_portable.bench.results import read_rows
from burst_portable.cli import main
from burst_portable.cli.process import Ended
from tests.support.bench_rows import local_threads, own_threads, write_json


@pytest.mark.usefixtures("ranks_are_forked")
def test_bench_resumes_after_interruption(tmp_path, capfd):
    rows = tmp_path / "rows.jsonl"
    arguments = ["bench", "--strategies", "ring,ulysses", "--seq-len", "33,64", "--resume", str(rows), "--json"]
    assert main([*arguments, "--masks", "causal"]) == 0
    capfd.readouterr()
    first = rows.read_text()
    rows.write_text(first + '{"mask": "ful')  # the interrupted write of a row
    assert main([*arguments, "--masks", "causal,full"]) == 0
    found = json.loads(capfd.readouterr().out)["rows"]
    assert [(row["mask"], row["seq_len"], row["entry"], row["status"]) for row in found] == [
        (mask, length, entry, "ok")
        for mask in ("causal", "full")
        for length in (33, 64)
        for entry in ("ring", "ulysses")
    ]
    assert rows.read_text().startswith(first)
    assert read_rows(rows)[1] == found
    assert main(["bench", "compare", str(rows), str(rows)]) == 0
    assert capfd.readouterr().out.count("1.000") == 16


def test_bench_measures_several_numbers_of_ranks(tmp_path, capsys, monkeypatch):
    """A file that has the rows of two ranks gets those of three; tables and pictures show both."""
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", local_threads)
    file, picture = tmp_path / "rows.jsonl", tmp_path / "a.svg"
    arguments = ["bench", "--strategies", "ring,ulysses", "--seq-len", "64", "--masks", "full,causal"]
    arguments += ["--resume", str(file)]
    assert main([*arguments, "--ranks", "2"]) == 0
    first = file.read_text()
    assert main([*arguments, "--ranks", "2,3", "--picture", str(picture)]) == 0
    assert file.read_text().startswith(first)
    found = read_rows(file)[1]
    assert [(row["mask"], row["ranks"], row["entry"], row["status"]) for row in found] == [
        (mask, ranks, entry, "ok" if (ranks, entry) != (3, "ulysses") else "refused")
        for ranks in (2, 3)
        for mask in ("full", "causal")
        for entry in ("ring", "ulysses")
    ]
    assert {row["forward_messages"] for row in found if row["entry"] == "ring"} == {1, 2}
    out = capsys.readouterr().out
    assert out.count("ulysses, refused: ") == 1
    assert [line.split()[:5] for line in out.splitlines() if line.startswith("causal")][-2:] == [
        ["causal", "64", "3", "auto", "ring"],
        ["causal", "64", "3", "auto", "ulysses"],
    ]
    labels = [text for text in re.findall(r'font-size="17">([^<]+)<', picture.read_text()) if text != "x"]
    assert labels == ["full", "2 ranks", "full", "3 ranks", "causal", "2 ranks", "causal", "3 ranks"]
    assert "2 and 3 ranks on" in picture.read_text()


def test_bench_takes_layouts_of_documents_with_their_masks(tmp_path, monkeypatch):
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", own_threads)
    masks = "full,causal,causal_sliding,causal_document,sliding_document"
    arguments = ["bench", "--strategies", "ring", "--seq-len", "64", "--masks", masks]
    file = tmp_path / "a.json"
    assert main([*arguments, "--layout", "whole_documents", "--json", str(file)]) == 0
    settings, rows = read_rows(file)
    assert settings["layout"] == "whole_documents"
    assert [row["status"] for row in rows] == ["ok"] * 5


def test_bench_measures_repeated_choices_once(monkeypatch):
    jobs = []
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", lambda job, on_rows: jobs.append(job))
    arguments = ["--masks", "full,causal,full", "--seq-len", "64,33,64", "--kernels", "auto,reference,auto"]
    assert main(["bench", "--strategies", "ring,burst,ring", "--ranks", "2,2", *arguments]) == 0
    found = [(job.ranks, *one[:3], *one[3]) for job in jobs for one in job.work]
    choices = product(["full", "causal"], [64, 33], ["auto", "reference"])
    assert found == [(2, *one, "ring", "burst") for one in choices]


def test_bench_without_any_measured_entry_returns_1(capsys, monkeypatch):
    """Three ranks cannot divide four heads."""
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", local_threads)
    arguments = ["bench", "--ranks", "3", "--seq-len", "64", "--masks", "causal", "--strategies"]
    assert main([*arguments, "ulysses"]) == 1
    assert capsys.readouterr().err == (
        "burst-portable: no entry was measured: 1 refused, wrong or failed, for the reasons above\n"
    )
    assert main([*arguments, "ring,ulysses"]) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("kept", "count"), [(True, 2), (False, 2), (True, 0), (False, 0)])
def test_interrupted_bench_tells_how_it_goes_on(tmp_path, capsys, monkeypatch, kept, count):
    def interrupted(job, on_rows):
        if count:
            on_rows([{"mask": "full", "entry": "ring"}] * count)
        raise Ended(signal.SIGINT)

    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", interrupted)
    file = tmp_path / "my rows.jsonl"
    words = ["bench", "--strategies", "ring", *(["--resume", str(file)] if kept else [])]
    monkeypatch.setattr("sys.argv", ["burst-portable", *words])
    assert main() == 130
    command = "burst-portable bench --strategies ring"
    if not count:
        again = f"{command} --resume '{file}'" if kept else command
        assert capsys.readouterr().err == (
            f"burst-portable: interrupted before the first row; to begin again: {again}\n"
        )
        assert not file.exists()
        return
    told = f"interrupted; {file} keeps 2 rows; to go on: {command} --resume '{file}'"
    lost = f"interrupted; 2 rows are lost; with --resume FILE, rows are kept: {command} --resume rows.jsonl"
    assert capsys.readouterr().err == f"burst-portable: {told if kept else lost}\n"


def test_bench_lists_entries_that_ended_a_rank_in_order(capsys, monkeypatch):
    def out_of_order(job, on_rows):
        (mask, length, kernel, names), *_ = job.work
        for name in reversed(names):
            where = {"mask": mask, "seq_len": length, "ranks": job.ranks, "kernel": kernel}
            on_rows([{**where, "entry": name, "status": "failed", "reason": "it ended a rank"}])

    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", out_of_order)
    assert main(["bench", "--strategies", "ring,burst,usp", "--masks", "full", "--json"]) == 1
    assert [row["entry"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["ring", "burst", "usp"]


def test_bench_resume_keeps_a_file_of_json(tmp_path, capsys):
    """Rows after its object would end in a file that no command reads."""
    file = tmp_path / "a.json"
    write_json(file, [])
    before = file.read_bytes()
    assert main(["bench", "--ranks", "2", "--masks", "full", "--strategies", "ring", "--resume", str(file)]) == 2
    assert "rows cannot be appended to this file" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_bench_takes_own_mask_and_sizes(tmp_path, capsys, monkeypatch):
    """Only the own mask is measured unless --masks is given; the bytes are those of the given heads."""
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", own_threads)
    own = ["--mask", "window:9:0", "--mask", "documents:0,20,64"]
    arguments = ["bench", "--strategies", "ring", "--seq-len", "64", "--json", str(tmp_path / "a.json"), *own]
    assert main([*arguments, "--heads", "6", "--kv-heads", "3", "--head-dim", "16"]) == 0
    settings, rows = read_rows(tmp_path / "a.json")
    assert [settings[name] for name in ("heads", "kv_heads", "head_dim")] == [6, 3, 16]
    assert [(row["mask"], row["status"]) for row in rows] == [("window:9:0", "ok"), ("documents:0,20,64", "ok")]
    assert rows[0]["forward_sent_bytes"] == 32 * 3 * 16 * 2 * 4
    assert main([*arguments, "--masks", "full", "--heads", "2"]) == 0
    settings, rows = read_rows(tmp_path / "a.json")
    assert settings["kv_heads"] == 2
    assert [row["mask"] for row in rows] == ["full", "window:9:0", "documents:0,20,64"]
