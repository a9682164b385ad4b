"""Test the benchmark over ranks that are threads, and the files of its rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from burst_portable import run_threads
from burst_portable.bench.benchmark import Benchmark
from burst_portable.bench.entries import Entry
from burst_portable.bench.masks import MASKS
from burst_portable.bench.oracle import oracle
from burst_portable.bench.peers import Peer
from burst_portable.bench.results import SCHEMA, append_rows, compare, markdown, read_rows
from burst_portable.bench.task import SEED, Task
from burst_portable.cli import main
from burst_portable.conformance import oracle as dense
from burst_portable.errors import CommunicationError, InputError
from burst_portable.layout import make_layout
from burst_portable.planning.call import Dropout
from burst_portable.planning.verify import verify
from burst_portable.strategies.registry import make_strategy
from tests.support.bench_rows import SETTING, measured


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


def test_compare_of_other_sizes_compares_the_rate_of_work():
    """Twice as many heads in twice the time are equally fast."""
    row = {"mask": "full", "seq_len": 8, "ranks": 2, "kernel": "auto", "entry": "ring", "status": "ok"}
    assert compare([row | measured(2.0, 3.0)], [row | measured(4.0, 6.0, flops=2e12)])[0][1:] == ("1.000", "1.000")


def test_files_without_settings_are_rejected(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps({"settings": {"schema": SCHEMA}, "rows": []}))
    with pytest.raises(InputError, match="no version in its settings"):
        read_rows(file)


@pytest.mark.parametrize("text", ["", '{"schema": "burst_por'])
def test_read_rows_names_a_file_without_a_complete_line(text, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(text)
    with pytest.raises(InputError, match="no complete line"):
        read_rows(file)


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
