"""Compare the choices of the cost model with the measured rows on file."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.choices import choices, main

# (largest regret, rows within 1 %) of 16 and 14 rows. The times of the second file include the host.
EXPECTED = {"bench-h200x2-2026-11-29": (0.013, 14), "bench-h200x4-2026-11-28": (0.056, 10)}


@pytest.fixture(scope="module")
def rows():
    return list(choices())


def test_choices_cover_every_row_of_the_files(rows):
    expected = [name for name, count in zip(EXPECTED, (16, 14), strict=True) for _ in range(count)]
    assert [one.file for one in rows] == expected
    assert all(set(one.predicted) == set(one.measured) for one in rows)
    assert {name for one in rows for name in one.predicted} >= {"ring", "burst", "ulysses", "distflash", "dispatch"}
    chosen = {
        one.row: "all_gather(head_groups=1)" in one.measured for one in rows if one.file.startswith("bench-h200x2")
    }
    assert chosen["block_causal"], "the row of `auto` counts as its choice"
    assert not chosen["prefix_lm"]
    assert not any("auto" in one.measured for one in rows)


@pytest.mark.parametrize("file", EXPECTED)
def test_choice_is_among_the_fastest_of_each_row(rows, file):
    largest, close = EXPECTED[file]
    regrets = {one.row: one.regret for one in rows if one.file == file}
    assert max(regrets.values()) < largest, regrets
    assert sum(regret < 0.01 for regret in regrets.values()) >= close, regrets


def test_choices_detect_a_model_without_messages(rows):
    """With free messages, a ring and a burst would take equally long, and more rows would be missed."""
    free = {"p2p_bandwidth": (), "peer_copy_bandwidth": (), "all_to_all_bandwidth": (), "comm_slowdown": (0.0, 0.0)}
    fast = {"message_latency": 0.0, "intra_node_bandwidth": 1e6}
    without = choices(lambda hardware: replace(hardware, **free, **fast))
    assert sum(one.regret for one in without) > 1.2 * sum(one.regret for one in rows)


def test_main_prints_a_line_for_each_row(rows, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["choices.py"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 1
    assert lines[1].split()[1] == "full"
    assert lines[1].endswith("%")
