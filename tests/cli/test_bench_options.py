"""Test that the options of `bench` are read and checked before a rank starts."""

from __future__ import annotations

import pytest

from burst_portable.bench.peer_names import PEERS
from burst_portable.cli import main
from burst_portable.strategies.registry import known


@pytest.mark.parametrize(
    ("text", "missing"),
    [("ours", PEERS), ("ours,ring", PEERS), ("all", ()), ("yunchang,ours", set(PEERS) - {"yunchang"})],
)
def test_bench_takes_groups_of_strategies_in_lists(text, missing, capsys, monkeypatch):
    """Each entry runs once, in the order in which it is named first."""
    jobs = []
    monkeypatch.setattr("burst_portable.cli.bench_worker.bench_local", lambda job, on_rows: jobs.append(job))
    monkeypatch.setattr("burst_portable.cli.bench_options.available_peers", lambda *, on_cpu: [*PEERS])
    assert main(["bench", "--masks", "causal", "--seq-len", "64", "--strategies", text]) == 0
    ((_, _, _, names),) = jobs[0].work
    expected = [*known(), *PEERS]
    if text.startswith("yunchang"):
        expected.insert(0, "yunchang")
    assert list(names) == [name for name in dict.fromkeys(expected) if name not in missing]


def test_bench_names_groups_of_strategies_in_errors(capsys):
    assert main(["bench", "--strategies", "our"]) == 2
    error = capsys.readouterr().err
    assert "unknown strategy; got 'our'; allowed: all, " in error
    assert "did you mean 'ours'" in error


def test_bench_rejects_short_forms_among_names_of_masks(capsys):
    assert main(["bench", "--masks", "full,window:5"]) == 2
    assert "pass short forms with --mask, once for each: --mask window:5" in capsys.readouterr().err


def test_bench_rejects_sequences_that_no_rank_can_hold(capsys):
    assert main(["bench", "--seq-len", "64,17m"]) == 2
    assert "a sequence is too long; got --seq-len 64,17m; allowed: at most 16,777,216 tokens" in capsys.readouterr().err


def test_bench_rejects_an_unknown_kernel(capsys):
    assert main(["bench", "--kernels", "auto,cpu_flsh"]) == 2
    assert "did you mean 'cpu_flash'" in capsys.readouterr().err


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
