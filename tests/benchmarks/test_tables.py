"""Test the sentences about strategies that benchmarks/tables.py writes from files of `burst-portable bench`."""

from __future__ import annotations

import json

import pytest

import burst_portable as bp
from benchmarks import tables
from benchmarks.tables import BENCH_FILE, BENCH_FILE_OF_FOUR, BENCH_SAME_PLANS, PASSES, bench_rows, bench_sentences
from burst_portable.bench.masks import MASKS


def row(mask, entry, seconds):
    """Return one row of a file. None: the entry was refused."""
    times = {} if seconds is None else {"forward_seconds": seconds / 4, "backward_seconds": seconds * 3 / 4}
    found = {"mask": mask, "entry": entry, "status": "refused" if seconds is None else "ok", **times}
    return found | (
        {"reason": "it is too large; got 64 GiB per rank: 64 heads; allowed: 16"} if seconds is None else {}
    )


TIMES = {
    "full": {"ring": 1.0, "ulysses": 1.003, "distflash": 2.0},
    "causal": {"ring": 2.0, "ulysses": 1.0, "distflash": 2.0},
    "full_sliding": {"ring": 1.5, "ulysses": 1.0, "distflash": 2.0},
}


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ("ring", "fastest on full. Elsewhere, it had 0.50 to 0.66 of the speed of the fastest, least on causal."),
        ("ulysses", "fastest on all masks but full. There, it had 0.99 to 0.99 of the speed of the fastest."),
        ("distflash", "it had 0.50 to 0.50 of the speed of the fastest, least on full."),
        ("ring_self_attention", "On four H200, it was refused on all masks: it is too large (64 GiB per rank)."),
        ("dispatch", "On four H200, it was not measured."),
    ],
)
def test_bench_sentences_cut_and_name_masks(entry, sentence, tmp_path, monkeypatch):
    rows = [row(mask, name, time) for mask, times in TIMES.items() for name, time in times.items()]
    rows += [row(mask, "ring_self_attention", None) for mask in TIMES]
    rows += [row(mask, other, 0.1) for mask in TIMES for other in ("auto", "yunchang")]  # neither is compared
    (tmp_path / f"{BENCH_FILE_OF_FOUR}.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert bench_sentences(BENCH_FILE_OF_FOUR, entry).endswith(sentence)


def steps(strategy, ranks, mask):
    """Return whether heads are divided, and the steps of all ranks, in a call of `bench`."""
    length = 8192 * ranks
    sizes = {"seq_len": length, "ranks": ranks, "heads": 64, "kv_heads": 8, "layout": "zigzag"}
    plan = bp.plan(**sizes, mask=MASKS[mask](length), strategy=strategy)
    return plan.heads, [plan.pass_plan(name).steps_of(rank) for name in PASSES for rank in range(ranks)]


def masks_with_other_plan(ranks, strategy, other):
    return {mask for mask in MASKS if steps(strategy, ranks, mask) != steps(other, ranks, mask)}


@pytest.mark.parametrize(("key", "other"), BENCH_SAME_PLANS.items())
def test_equal_plans_have_equal_steps_and_times(key, other):
    file, name = key
    assert masks_with_other_plan(2, name, other) == set()
    assert file == BENCH_FILE
    time = {
        (one["mask"], one["entry"]): one["forward_seconds"] + one["backward_seconds"]
        for one in bench_rows(BENCH_FILE)
        if one["status"] == "ok"
    }
    ratios = {mask: time[mask, name] / time[mask, other] for mask in {mask for mask, _ in time}}
    assert len(ratios) == 16
    assert all(1 / 1.01 < ratio < 1.01 for ratio in ratios.values()), ratios  # docs/strategies.md states the 1 %


@pytest.mark.parametrize(("ranks", "others"), [(2, set()), (4, {"share_question", "sink_sliding"})])
def test_distflash_over_zigzag_is_direct_ring(ranks, others):
    assert masks_with_other_plan(ranks, "distflash", "ring(transfer=direct)") == others
