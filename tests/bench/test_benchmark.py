"""Test the benchmark over threads and through the command."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from burst_portable import run_threads
from burst_portable.bench.benchmark import Benchmark
from burst_portable.bench.entries import Entry
from burst_portable.bench.masks import MASKS
from burst_portable.bench.oracle import oracle
from burst_portable.bench.peer_names import PEERS
from burst_portable.bench.peers import Peer
from burst_portable.bench.results import SCHEMA, append_rows, compare, markdown, read_rows
from burst_portable.bench.task import SEED, Setting, Task
from burst_portable.cli import main
from burst_portable.cli.bench_worker import BenchJob, bench_local
from burst_portable.cli.process import Ended
from burst_portable.conformance import oracle as dense
from burst_portable.errors import CommunicationError, InputError, PeerLostError
from burst_portable.layout import make_layout
from burst_portable.planning.call import Dropout
from burst_portable.planning.verify import verify
from burst_portable.strategies.registry import known, make_strategy

SETTING = Setting(heads=4, kv_heads=2, head_dim=8, dtype="float32", layout="zigzag", rounds=1)


class PlantedEntry(Entry):
    """An entry whose name is not that of a strategy."""

    def checked_plan(self, task, mesh):
        return None


class WrongEntry(PlantedEntry):
    """Scale the output of a strategy, so that the output and all gradients are wrong."""

    def prepare(self, task, mesh):
        prepared = Entry("ring").prepare(task, mesh)
        return replace(prepared, forward=lambda: prepared.forward() * 1.01)


@pytest.mark.parametrize("name", MASKS)
def test_oracle_equals_dense_attention(name):
    mask, length = MASKS[name](301), 301  # not a multiple of the oracle's chunk
    q, k, v, dout = (torch.randn(1, length, heads, 8) for heads in (4, 2, 2, 4))
    task = Task(mask, make_layout("zigzag", length, 2, mask), "auto", (q, k, v, dout))
    right = dense.attention(q, k, v, dout, dense.dense_mask(mask, length), scale=8**-0.5)
    for found, whole in zip(oracle(task, 8**-0.5).results, (right.out, right.dq, right.dk, right.dv), strict=True):
        torch.testing.assert_close(found, whole[:, :, -found.shape[2] :], rtol=1e-9, atol=1e-11)
    assert mask.num_pairs(length) == int(dense.dense_mask(mask, length).sum())
    assert mask.fully_masked_tokens(length) == 0


def test_measure_with_dropout_compares_all_strategies():
    """The oracle equals dense attention with a mask by an independent generator; a wrong probability is wrong."""
    setting, p = replace(SETTING, dropout=0.3), 0.3
    mask, length = MASKS["causal"](61), 61
    tensors = tuple(torch.randn(1, length, heads, 8) for heads in (4, 2, 2, 4))
    task = Task(mask, make_layout("zigzag", length, 2, mask), "auto", tensors, p)
    right = dense.attention(*tensors, dense.dense_mask(mask, length), scale=8**-0.5, dropout=Dropout(p, seed=SEED))
    for found, whole in zip(oracle(task, 8**-0.5).results, (right.out, right.dq, right.dk, right.dv), strict=True):
        torch.testing.assert_close(found, whole[:, :, -found.shape[2] :], rtol=1e-9, atol=1e-11)
    names = ["ring", "burst", "ulysses", "distflash", "ring_self_attention"]

    class OtherProbability(PlantedEntry):
        def prepare(self, task, mesh):
            return Entry("ring").prepare(replace(task, dropout=0.2), mesh)

    def work(mesh):
        entries = [*map(Entry, names), OtherProbability("planted"), Peer("peer")]
        every = [*names, "planted", "peer"]
        return Benchmark(mesh, torch.device("cpu"), setting, entries).measure("causal", 61, "auto", every)

    for *ours, planted, peer in run_threads(2, work):
        assert [row["status"] for row in ours] == ["ok"] * len(names)
        assert planted["status"] == "wrong"
        assert (peer["status"], peer["reason"]) == (
            "refused", "its dropout depends on the ranks, so no result is right"
        )  # fmt: skip


def test_measure_shows_wrong_and_refused_entries_without_speed():
    entries = [Entry("ring"), WrongEntry("planted"), Entry("ulysses"), Entry("none_such")]

    def work(mesh):
        names = [entry.name for entry in entries]
        return Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure("causal", 61, "auto", names)

    for ring, planted, ulysses, unknown in run_threads(2, work):
        assert ring["status"] == ulysses["status"] == "ok"
        assert ring["forward_tflops"] > 0
        assert ring["backward_seconds"] > 0
        assert ring["forward_sent_bytes"] == 31 * 2 * 2 * 8 * 4  # K and V of the longer shard
        assert planted["status"] == "wrong"
        assert "out is off by 0.01" in planted["reason"]
        assert "forward_tflops" not in planted
        assert unknown["status"] == "refused"
        assert "none_such" in unknown["reason"]


class LeavingEntry(PlantedEntry):
    """End the process at its first use, as a package may that needs a device."""

    errors = Peer.errors

    def prepare(self, task, mesh):
        raise SystemExit("needs a GPU")


def test_peer_that_ends_the_process_has_reason():
    """The other entries of the row are measured."""

    def work(mesh):
        entries = [LeavingEntry("planted"), Entry("ring")]
        return Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure("full", 31, "auto", ["planted", "ring"])

    for planted, ring in run_threads(2, work):
        assert (planted["status"], planted["reason"]) == ("failed", "SystemExit: needs a GPU")
        assert ring["status"] == "ok"


class DifferentPlans(PlantedEntry):
    """Plan a ring on rank 0, and another strategy on all other ranks."""

    def checked_plan(self, task, mesh):
        return Entry("burst" if mesh.rank else "ring").checked_plan(task, mesh)


class FailingRank(PlantedEntry):
    """Raise an error on rank 1 before any rank runs."""

    def checked_plan(self, task, mesh):
        if mesh.rank:
            raise KeyError("only here")


def test_entries_whose_ranks_differ_are_rows():
    """Ranks compare plans and errors before one of them waits for messages, and measure the other entries."""

    def work(mesh):
        entries = [DifferentPlans("planted"), FailingRank("failing"), Entry("ring")]
        return Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure(
            "full", 31, "auto", [one.name for one in entries]
        )

    for planted, failing, ring in run_threads(3, work):
        assert (planted["status"], failing["status"], ring["status"]) == ("failed", "failed", "ok")
        differ = "ring (transfer ring, backward kv) on rank 0, but burst (transfer ring, backward q) on ranks 1, 2; "
        assert differ in str(planted)
        assert "`burst-portable conform --strategy planted`" in planted["reason"]
        assert failing["reason"].startswith("failed on rank 1: KeyError: 'only here'; failed on rank 2: KeyError")


class FailingRun(PlantedEntry):
    """Raise an error on rank 1 while rank 0 waits for its messages."""

    def prepare(self, task, mesh):
        prepared = Entry("ring").prepare(task, mesh)

        def forward():
            if mesh.rank:
                raise KeyError("only here")
            return prepared.forward()

        return replace(prepared, forward=forward)


def test_rank_that_fails_alone_names_the_entry():
    """It does not wait for the timeout of messages, which ends other ranks."""

    def work(mesh):
        entries, found = [FailingRun("planted"), Entry("ring")], []
        benchmark = Benchmark(mesh, torch.device("cpu"), SETTING, entries, error_seconds=0.1)
        benchmark.measure("full", 31, "auto", ["planted", "ring"], found.append)

    with pytest.raises(
        CommunicationError, match="rank 1: planted failed while other ranks run it; got KeyError: 'only"
    ):
        run_threads(2, work)


def test_bench_goes_on_without_an_entry_that_ended_a_rank(monkeypatch):
    """Ranks start again without it. Its other rows are failed, too; a rank lost elsewhere ends the command."""
    runs, rows = [], []

    def run_processes(job, folder, on_step, worker):
        runs.append(job.work)
        for mask, _, _, names in job.work:
            for name in names:
                on_step({"entry": name})
                if name == "dies":
                    raise PeerLostError("rank 1 ended with code 3")
            on_step({"entry": ""})
            if mask == "prefix_lm":
                raise PeerLostError("rank 1 ended later")
            on_step({"rows": [{"mask": mask, "entry": name, "status": "ok"} for name in names]})

    monkeypatch.setattr("burst_portable.cli.bench_worker.run_processes", run_processes)
    work = [(mask, 64, "auto", ["ring", "dies"]) for mask in ("full", "causal")]
    job = BenchJob(ranks=2, ranks_per_node=None, backend="cpu", device_type="cpu", setting={}, work=work)
    bench_local(job, rows.extend)
    assert runs == [work, [(mask, 64, "auto", ["ring"]) for mask in ("full", "causal")]]
    assert [(row["mask"], row["entry"], row["status"], row.get("reason")) for row in rows] == [
        ("full", "dies", "failed", "rank 1 ended with code 3"),
        ("causal", "dies", "failed", "it does not run again, since it ended a rank on full"),
        ("full", "ring", "ok", None),
        ("causal", "ring", "ok", None),
    ]
    with pytest.raises(PeerLostError, match="later"):
        bench_local(replace(job, work=[("prefix_lm", 64, "auto", ["ring"])]), rows.extend)


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


def local_threads(job, on_rows):
    """Do the work of `bench_local` in threads."""
    entries = [Entry(name) for name in ("ring", "ulysses")]

    def work(mesh):
        benchmark = Benchmark(mesh, torch.device("cpu"), SETTING, entries)
        return [benchmark.measure(*one) for one in job.work]

    for rows in run_threads(job.ranks, work)[0]:
        on_rows(rows)


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


RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("bench-*.json"))


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_read_rows_takes_any_line_breaks(path, tmp_path):
    """The files in benchmarks/results have one row per line, or one number per line."""
    data = json.loads(path.read_text())
    (tmp_path / "line.json").write_text(json.dumps(data))
    assert read_rows(path) == read_rows(tmp_path / "line.json") == (data["settings"], data["rows"])
    append_rows(tmp_path / "rows.jsonl", data["settings"], data["rows"])
    assert read_rows(tmp_path / "rows.jsonl") == read_rows(path)


def test_rows_of_auto_record_what_ran():
    """The bytes are those of the strategy that was chosen."""

    def work(mesh):
        entries = [Entry("auto"), Entry("ring")]
        first = Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure("causal", 61, "auto", ["auto", "ring"])
        (named,) = Benchmark(mesh, torch.device("cpu"), SETTING, [Entry(first[0]["chose"])]).measure(
            "causal", 61, "auto", [first[0]["chose"]]
        )
        return *first, named

    for auto, ring, named in run_threads(2, work):
        assert make_strategy(auto["chose"]).label == auto["chose_first"] == auto["chose"]
        assert "chose" not in ring
        assert "chose" not in named
        for name in ("forward_sent_bytes", "backward_sent_bytes", "forward_messages", "backward_messages"):
            assert auto[name] == named[name]


def test_count_of_auto_counts_the_strategy_that_ran():
    """Over the plain transport of the count, `auto` would choose another strategy."""

    class Chosen(Entry):
        def choice(self, prepared, task, mesh):
            return "ulysses"

    def work(mesh):
        entries = [Chosen("auto"), Entry("ulysses")]
        return Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure("causal", 61, "auto", ["auto", "ulysses"])

    for auto, ulysses in run_threads(2, work):
        assert auto["forward_sent_bytes"] == ulysses["forward_sent_bytes"]
        assert auto["backward_messages"] == ulysses["backward_messages"]


def test_tables_show_what_auto_ran():
    """If `auto` chose again in its first call, both strategies are shown."""
    speeds = {f"{name}_{what}": 1.0 for name in ("forward", "backward") for what in ("tflops", "sent_bytes", "seconds")}
    base = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "auto", "status": "ok"}
    row = base | {"peak_bytes": None} | speeds
    once = row | {"chose_first": "burst", "chose": "burst"}
    again = row | {"chose_first": "ring(transfer=direct)", "chose": "burst"}
    assert "| auto: burst | 1 |" in markdown([once])
    assert "| auto: ring(transfer=direct), then burst | 1 |" in markdown([again])
    assert "| auto | 1 |" in markdown([row])
    assert compare([once], [once])[0][0] == "full, 8 tokens, 2 ranks, auto, auto: burst"
    assert compare([row], [once])[0][0] == "full, 8 tokens, 2 ranks, auto, auto: burst (before: auto)"
    assert (
        compare([again], [once])[0][0]
        == "full, 8 tokens, 2 ranks, auto, auto: burst (before: auto: ring(transfer=direct), then burst)"
    )


def test_compare_reports_ratios_and_statuses():
    row = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    old, new = row | measured(2.0, 3.0), row | measured(1.0, 6.0)
    assert compare([old], [new]) == [("full, 8 tokens, 2 ranks, auto, ring", "2.000", "0.500")]
    assert compare([{**old, "ranks": 4}], [new]) == []
    assert compare([old], [{**row, "status": "wrong"}]) == [("full, 8 tokens, 2 ranks, auto, ring", "ok", "wrong")]


def test_compare_marks_differences_within_the_spread(tmp_path, capsys):
    row = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    old = {**row, **measured(2.0, 3.0), "forward_spread": 0.02, "backward_spread": 0.02}
    new = {**row, **measured(2.1, 3.1), "forward_spread": 0.01, "backward_spread": 0.05}
    assert compare([old], [new])[0][1:] == ("0.952", "0.968 ~")
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, one in zip(files, (old, new), strict=True):
        write_json(file, [one])
    assert main(["bench", "compare", *map(str, files), "--json", str(tmp_path / "c.json")]) == 0
    assert "1 marked ~ are within the spread of repeats" in capsys.readouterr().out
    (found,) = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert (found["forward"], found["backward"], found["within_spread"]) == ("0.952", "0.968", ["backward"])


def test_read_rows_names_the_damaged_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    append_rows(path, {"schema": SCHEMA}, [row, row])
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], '{"mask": fu', lines[2], ""]))
    with pytest.raises(InputError, match=r"line 3 is not JSON: Expecting value: '\{\"mask\": fu'"):
        read_rows(path)
    path.write_text("\n".join([lines[0], "[1]", ""]))
    with pytest.raises(InputError, match=r"line 2 is no object: '\[1\]'"):
        read_rows(path)


def test_read_rows_rejects_other_version(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, {"schema": "burst_portable.bench/2"}, [])
    with pytest.raises(InputError, match=f"another version.*{SCHEMA}"):
        read_rows(path)


def test_layout_of_any_mask_is_used_and_others_are_refused(capsys):
    entries = [Entry("ring"), Entry("dispatch")]

    def work(mesh):
        setting = replace(SETTING, layout="dispatched")
        return Benchmark(mesh, torch.device("cpu"), setting, entries).measure(
            "causal_document", 300, "auto", ["ring", "dispatch"]
        )

    for ring, dispatch in run_threads(3, work):
        assert ring["status"] == dispatch["status"] == "ok"
        assert dispatch["forward_sent_bytes"] <= ring["forward_sent_bytes"]
    assert main(["bench", "--layout", "whole_documents"]) == 2
    error = capsys.readouterr().err
    assert "the mask block_causal: the layout 'whole_documents' needs a mask of documents" in error
    assert "allowed: masks of documents (full, causal and window are one document)" in error


def test_bench_takes_layouts_of_documents_with_their_masks(tmp_path, monkeypatch):
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", own_threads)
    masks = "full,causal,causal_sliding,causal_document,sliding_document"
    arguments = ["bench", "--strategies", "ring", "--seq-len", "64", "--masks", masks]
    file = tmp_path / "a.json"
    assert main([*arguments, "--layout", "whole_documents", "--json", str(file)]) == 0
    settings, rows = read_rows(file)
    assert settings["layout"] == "whole_documents"
    assert [row["status"] for row in rows] == ["ok"] * 5


@pytest.mark.parametrize(
    ("text", "missing"),
    [("ours", PEERS), ("ours,ring", PEERS), ("all", ()), ("yunchang,ours", set(PEERS) - {"yunchang"})],
)
def test_bench_takes_groups_of_strategies_in_lists(text, missing, capsys, monkeypatch):
    """Each entry runs once, in the order in which it is named first."""
    jobs = []
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", lambda job, on_rows: jobs.append(job))
    monkeypatch.setattr("burst_portable.cli.bench.available_peers", lambda *, on_cpu: [*PEERS])
    assert main(["bench", "--masks", "causal", "--seq-len", "64", "--strategies", text]) == 0
    ((_, _, _, names),) = jobs[0].work
    expected = [*known(), *PEERS]
    if text.startswith("yunchang"):
        expected.insert(0, "yunchang")
    assert list(names) == [name for name in dict.fromkeys(expected) if name not in missing]


def test_bench_measures_repeated_choices_once(monkeypatch):
    jobs = []
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", lambda job, on_rows: jobs.append(job))
    arguments = ["--masks", "full,causal,full", "--seq-len", "64,33,64", "--kernels", "auto,reference,auto"]
    assert main(["bench", "--strategies", "ring,burst,ring", "--ranks", "2,2", *arguments]) == 0
    found = [(job.ranks, *one[:3], *one[3]) for job in jobs for one in job.work]
    choices = product(["full", "causal"], [64, 33], ["auto", "reference"])
    assert found == [(2, *one, "ring", "burst") for one in choices]


def test_bench_names_groups_of_strategies_in_errors(capsys):
    assert main(["bench", "--strategies", "our"]) == 2
    error = capsys.readouterr().err
    assert "unknown strategy; got 'our'; allowed: all, " in error
    assert "did you mean 'ours'" in error


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


def test_bench_rejects_short_forms_among_names_of_masks(capsys):
    assert main(["bench", "--masks", "full,window:5"]) == 2
    assert "pass short forms with --mask, once for each: --mask window:5" in capsys.readouterr().err


def test_bench_rejects_sequences_that_no_rank_can_hold(capsys):
    assert main(["bench", "--seq-len", "64,17m"]) == 2
    assert "a sequence is too long; got --seq-len 64,17m; allowed: at most 16,777,216 tokens" in capsys.readouterr().err


def test_markdown_groups_reasons_by_entry():
    base = {"seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "usp", "status": "refused", "reason": "heads | ranks"}
    rows = [{**base, "mask": mask} for mask in ("full", "causal")]
    timed = {"forward_tflops": 1.5, "backward_tflops": 0.25, "forward_sent_bytes": 2048, "backward_sent_bytes": 0}
    rows.append({**base, "mask": "full", "entry": "ring", "status": "ok", "peak_bytes": 1 << 20, **timed})
    text = markdown(rows)
    assert "| causal | 8 | 2 | auto | usp | refused |  |  |  |  |\n" in text
    assert "| full | 8 | 2 | auto | ring | 1.5 | 0.25 | 2 KiB | 0 B | 1 MiB |\n" in text
    assert text.endswith("\n\n- usp, refused: heads | ranks (full, causal)\n")


def test_entry_that_cannot_divide_heads_has_reason():
    """Three ranks cannot divide four heads; the ring is measured."""

    def work(mesh):
        entries = [Entry("ulysses"), Entry("ring")]
        return Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure("full", 31, "auto", ["ulysses", "ring"])

    for ulysses, ring in run_threads(3, work):
        assert (ulysses["status"], ring["status"]) == ("refused", "ok")
        assert "cannot divide these heads" in ulysses["reason"]


def test_bench_rejects_an_unknown_kernel(capsys):
    assert main(["bench", "--kernels", "auto,cpu_flsh"]) == 2
    assert "did you mean 'cpu_flash'" in capsys.readouterr().err


SETTINGS = {"schema": SCHEMA, "version": "1", "backend": "cpu", "heads": 4, "kv_heads": 2, "head_dim": 8,
            "dtype": "float32", "layout": "zigzag", "rounds": 3}  # fmt: skip


def write_json(path, rows, **settings):
    path.write_text(json.dumps({"settings": {**SETTINGS, **settings}, "rows": rows}, indent=1))


def measured(forward, backward, flops=1e12):
    """Return the numbers of a row with the status "ok"."""
    times = {"forward": forward, "backward": backward}
    return {
        **{f"{name}_seconds": value for name, value in times.items()},
        **{f"{name}_tflops": flops / 1e12 / value for name, value in times.items()},
        **{f"{name}_sent_bytes": 64 for name in times},
        "peak_bytes": None,
    }


def test_compare_of_other_sizes_compares_the_rate_of_work():
    """Twice as many heads in twice the time are equally fast."""
    row = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    assert compare([row | measured(2.0, 3.0)], [row | measured(4.0, 6.0, flops=2e12)])[0][1:] == ("1.000", "1.000")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"status": None}, "no status in row 2"),
        ({"status": "fine"}, "the status of row 2 is 'fine', none of ok, refused, wrong, failed"),
        ({"status": "wrong"}, "no reason in row 2"),
        ({"mask": None}, "no mask in row 2"),
        ({"forward_tflops": None}, "no forward_tflops in row 2"),
        ({"backward_seconds": 0.0}, "backward_seconds of row 2 is 0.0, not a positive number"),
        ({"backward_seconds": "fast"}, "backward_seconds of row 2 is 'fast', not a positive number"),
        ({"forward_tflops": float("nan")}, "forward_tflops of row 2 is nan, not a positive number"),
        ({"forward_sent_bytes": -1}, "forward_sent_bytes of row 2 is -1, not a number from 0"),
        ({"forward_spread": "x"}, "forward_spread of row 2 is 'x', not a number from 0"),
        ({"peak_bytes": True}, "peak_bytes of row 2 is True, not a number from 0"),
    ],
)
def test_files_with_damaged_rows_are_rejected(changes, told, tmp_path, capsys):
    """None removes a name. Every command that reads files names the row."""
    row = {"mask": "full", "seq_len": 64, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    right = row | measured(1.0, 2.0)
    wrong = {name: value for name, value in {**right, **changes}.items() if value is not None or name == "peak_bytes"}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    write_json(files[0], [right])
    write_json(files[1], [right, wrong])
    lines = tmp_path / "rows.jsonl"
    append_rows(lines, SETTINGS, [right, wrong])
    for words in (["compare", *files], ["draw", files[1], "--picture", tmp_path / "a.svg"], ["--resume", lines]):
        assert main(["bench", *map(str, words)]) == 2
        assert told in capsys.readouterr().err


def test_files_without_settings_are_rejected(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"settings": {"schema": SCHEMA}, "rows": []}))
    with pytest.raises(InputError, match="no version in its settings"):
        read_rows(file)


def test_bench_resume_keeps_a_file_of_json(tmp_path, capsys):
    """Rows after its object would end in a file that no command reads."""
    file = tmp_path / "a.json"
    write_json(file, [])
    before = file.read_bytes()
    assert main(["bench", "--ranks", "2", "--masks", "full", "--strategies", "ring", "--resume", str(file)]) == 2
    assert "rows cannot be appended to this file" in capsys.readouterr().err
    assert file.read_bytes() == before


def test_bench_compare_tells_differences_of_files(tmp_path, capsys):
    where = {"mask": "full", "seq_len": 64, "ranks": 2, "kernel": "auto", "status": "ok"}
    rows = [where | {"entry": name, **measured(1.0, 2.0)} for name in ("ring", "burst")]
    first, second, third = (tmp_path / f"{name}.json" for name in "abc")
    write_json(first, rows, dtype="float32")
    write_json(second, rows[:1], dtype="bfloat16")
    write_json(third, rows[1:], dtype="bfloat16")
    assert main(["bench", "compare", str(first), str(second), "--json", "-"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["differences"] == ["dtype: float32, then bfloat16", "1 row only in the first file"]
    assert [(row["forward"], row["backward"]) for row in told["rows"]] == [("1.000", "1.000")]
    assert main(["bench", "compare", str(second), str(third)]) == 2
    assert "no row in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["compare", "a", "b", "--picture", "c.svg"], "bench compare has no such option; got --picture"),
        (["draw", "a", "--picture", "c.svg", "--json", "-"], "bench draw has no such option; got --json"),
        (["draw", "a", "--picture", "c.svg", "--markdown", "c.md"], "bench draw has no such option; got --markdown"),
    ],
)
def test_bench_of_files_rejects_other_options(words, error, capsys):
    assert main(["bench", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", '{"schema": "burst_por'])
def test_read_rows_names_a_file_without_a_complete_line(text, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match="no complete line"):
        read_rows(file)


@pytest.mark.parametrize("lengths", ["64,1", "0", "64,x"])
def test_bench_rejects_lengths(lengths, capsys):
    assert main(["bench", "--seq-len", lengths]) == 2
    assert "--seq-len" in capsys.readouterr().err


@pytest.mark.parametrize("ranks", ["2,0", "two", "2,", "-1"])
def test_bench_rejects_numbers_of_ranks(ranks, capsys):
    assert main(["bench", "--ranks", ranks]) == 2
    assert "not a number of ranks" in capsys.readouterr().err


def test_bench_rejects_several_sizes_under_launcher(monkeypatch, capsys):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "localhost"),
                        ("MASTER_PORT", "29500")):  # fmt: skip
        monkeypatch.setenv(name, value)
    assert main(["bench", "--ranks", "2,4"]) == 2
    assert "a launcher starts one number of ranks; got --ranks 2,4; allowed: 2, or no" in capsys.readouterr().err


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


def own_threads(job, on_rows):
    """Do the work of `bench_local` in threads, with the sizes of the job."""

    def work(mesh):
        benchmark = Benchmark(mesh, torch.device("cpu"), Setting(**job.setting), [Entry("ring")])
        return [benchmark.measure(*one) for one in job.work]

    for rows in run_threads(job.ranks, work)[0]:
        on_rows(rows)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--mask", "documents:0,900"],
            "the mask documents:0,900 for --seq-len 512: the mask 'documents(1)' is",
        ),
        (
            ["--mask", "share_question:4"],
            "the mask share_question:4 for --seq-len 512: share_question needs",
        ),
        (["--mask", "windw:3"], "unknown mask; got 'windw'"),
        (["--mask", "window:x"], "the mask 'window:x' cannot be read; allowed: window:LEFT[:RIGHT]"),
        (["--heads", "6", "--kv-heads", "4"], "query heads are not a multiple"),
        (["--kv-heads", "0"], "kv_heads"),
        (["--head-dim", "2000"], "head_dim is too large"),
    ],
)
def test_bench_rejects_sizes_and_masks_before_ranks_start(options, error, capsys):
    assert main(["bench", "--strategies", "ring", *options]) == 2
    assert error in capsys.readouterr().err


def test_plan_of_an_entry_is_verified_once(monkeypatch):
    plans = []

    def counted(plan):
        plans.append(plan)
        return verify(plan)

    def work(mesh):
        return Benchmark(mesh, torch.device("cpu"), SETTING, [Entry("ring")]).measure("full", 31, "auto", ["ring"])

    monkeypatch.setattr("burst_portable.bench.entries.verify", counted)
    assert all(rows[0]["forward_messages"] == 1 for rows in run_threads(2, work))
    assert len(plans) == 2  # one per rank


class LeakingEntry(PlantedEntry):
    """Add a gradient to dq alone, also where it is 0 because a token sees only itself."""

    def prepare(self, task, mesh):
        prepared = Entry("ring").prepare(task, mesh)
        q = prepared.leaves[0]
        return replace(prepared, forward=lambda: prepared.forward() + (q - q.detach()))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ranks", "length"), [(1, 1), (2, 2), (2, 3), (1, 5), (3, 7)])
def test_short_sequences_are_right_in_all_masks(ranks, length, dtype):
    """A token that sees only itself has dq = 0; rounding of its terms is no error."""
    setting = replace(SETTING, dtype=dtype, head_dim=32)
    entries = [Entry("ring"), Entry("ulysses"), LeakingEntry("planted")]
    if ranks == 3:
        del entries[1]
    names = [entry.name for entry in entries]

    def work(mesh):
        bench = Benchmark(mesh, torch.device("cpu"), setting, entries)
        return [row for mask in MASKS for row in bench.measure(mask, length, "auto", names)]

    for row in run_threads(ranks, work)[0]:
        assert row["status"] == ("wrong" if row["entry"] == "planted" else "ok"), row
        assert row["entry"] != "planted" or row["reason"].startswith("dq is off by"), row
