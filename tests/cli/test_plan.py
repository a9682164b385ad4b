"""Test that the numbers of `burst-portable plan` equal hand-computed values, and that it needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from burst_portable.cli import main
from burst_portable.cli.drawing import score_matrix
from burst_portable.cli.plan_facts import checked_ranks
from burst_portable.layout import make_layout
from burst_portable.mask import Mask
from burst_portable.planning.verify import verify

# 8 tokens, causal, contiguous, 2 ranks: rank 0 sees 1+2+3+4 = 10 pairs, rank 1 sees 16 + 10 = 26.
TINY = (
    *("--seq-len", "8", "--ranks", "2", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--v-head-dim", "8"),
    *("--mask", "causal", "--layout", "contiguous", "--dtype", "float32"),
)


def plan(capsys, *arguments: str) -> dict:
    assert main(["plan", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert not captured.err
    return json.loads(captured.out)


def text(capsys, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


# --------------------------------------------------------------------------------------------- numbers


def test_plan_reports_fully_masked_tokens(capsys):
    arguments = ("--seq-len", "16", "--ranks", "2", "--mask", "documents:0,5,13")
    assert plan(capsys, *arguments)["problem"]["fully_masked_tokens"] == 3
    assert "3 tokens are fully masked" in text(capsys, *arguments)
    assert "fully masked" not in text(capsys, *TINY)


def test_plan_reports_pairs_flops_and_imbalance(capsys):
    facts = plan(capsys, *TINY, "--strategy", "ring")
    assert facts["problem"]["num_pairs"] == 36
    assert facts["sampled_ranks"] == [0, 1]
    forward, backward = facts["passes"]["forward"], facts["passes"]["backward"]
    # 2·pairs·heads·(D + Dv), and 2·pairs·heads·(3·D + 2·Dv)
    assert forward["max"]["flops"] == 2 * 26 * 4 * (16 + 8)
    assert forward["mean"]["flops"] == 2 * 18 * 4 * (16 + 8)
    assert backward["max"]["flops"] == 2 * 26 * 4 * (3 * 16 + 2 * 8)
    assert forward["imbalance"] == backward["imbalance"] == pytest.approx(26 / 18)


@pytest.mark.parametrize("mask", ["variable_block_sparse:2048:10", "causal_block_sparse:1024:10:3"])
def test_plan_reports_imbalance_of_block_sparse_masks(capsys, mask):
    """The dispatched layout balances them, a zigzag does not."""
    call = ("--seq-len", "32k", "--ranks", "8", "--mask", mask)
    dispatched = plan(capsys, *call, "--strategy", "dispatch", "--layout", "dispatched")
    zigzag = plan(capsys, *call, "--strategy", "ring", "--layout", "zigzag")
    pairs = [one["problem"]["num_pairs"] for one in (dispatched, zigzag)]
    assert pairs == [Mask.parse(mask, 32768).num_pairs(32768)] * 2
    for name in ("forward", "backward"):
        assert dispatched["passes"][name]["imbalance"] < 1.05
        assert zigzag["passes"][name]["imbalance"] > 1.3


def test_plan_reports_bytes_of_ring(capsys):
    facts = plan(capsys, *TINY, "--strategy", "ring")
    kv = 4 * 2 * (16 + 8) * 4  # rows · K/V heads · (D + Dv) · bytes
    forward, backward = facts["passes"]["forward"], facts["passes"]["backward"]
    # Rank 0 sends its K and V to rank 1; no rank needs those of rank 1.
    assert (forward["max"]["sent_bytes"], forward["mean"]["sent_bytes"]) == (kv, kv / 2)
    assert (forward["max_message_bytes"], forward["max"]["messages"]) == (kv, 1)
    # Rank 0 sends K and V, and rank 1 returns their gradients with 4 bytes per number.
    assert (backward["max"]["sent_bytes"], backward["mean"]["sent_bytes"]) == (kv, kv)
    assert forward["memory"]["in_flight"] == kv


def test_plan_reports_bytes_of_burst(capsys):
    facts = plan(capsys, *TINY, "--strategy", "burst")
    backward = facts["passes"]["backward"]
    rows = 4 * 4 * 4  # LSE and delta: rows, heads, bytes
    block = 4 * 4 * 16 * 4 + 4 * 4 * 8 * 4 + rows + rows
    assert backward["circulates"] == "q"
    assert backward["max_message_bytes"] == backward["max"]["sent_bytes"] == block
    assert backward["mean"]["sent_bytes"] == (block + 4 * 4 * 16 * 4) / 2  # dQ is returned


def test_plan_reports_memory(capsys):
    facts = plan(capsys, *TINY, "--strategy", "ring")
    q, out, lse, kv = 4 * 4 * 16, 4 * 4 * 8, 4 * 4, 4 * 2 * (16 + 8)
    assert facts["passes"]["forward"]["memory"]["shard"] == 4 * (q + kv + out + lse)
    # Q, K, V, out, dO, LSE, delta, and dQ, dK, dV
    assert facts["passes"]["backward"]["memory"]["shard"] == 4 * (2 * (q + kv) + 2 * out + 2 * lse)


def test_plan_predicts_time_from_rates(capsys):
    slow = plan(capsys, *TINY, "--strategy", "ring", "--tflops", "1e-6", "--intra-node-bandwidth", "1e6")
    forward = slow["passes"]["forward"]
    assert forward["compute_seconds"] == pytest.approx(2 * 26 * 4 * 24 / 1e6)
    assert forward["compute_seconds"] < forward["seconds"] < forward["compute_seconds"] + 1e-3
    assert forward["efficiency"] == pytest.approx(18 / 26, rel=0.1)
    assert slow["seconds"] == pytest.approx(sum(part["seconds"] for part in slow["passes"].values()))


def test_plan_lists_steps_of_rank(capsys):
    steps = plan(capsys, *TINY, "--strategy", "ring", "--rank", "1")["steps"]
    assert steps["rank"] == 1
    first, second = steps["forward"]
    assert first["compute"] == {
        "label": "q1 x kv1",
        "q": [1],
        "kv": [1],
        "full_tiles": 0,
        "masked_tiles": 1,
        "num_pairs": 10,
    }
    assert second["compute"] == {
        "label": "q1 x kv0",
        "q": [1],
        "kv": [0],
        "full_tiles": 1,
        "masked_tiles": 0,
        "num_pairs": 16,
    }
    assert second["receives"] == [{"what": "kv0", "rank": 0, "rows": [[0, 4]], "bytes": 768}]
    assert [move["what"] for step in steps["backward"] for move in step["result_sends"]] == ["dkv0"]


def test_plan_gives_reason_of_auto(capsys):
    facts = plan(capsys, *TINY)
    assert facts["strategy"] in facts["reason"]
    assert "chose" in facts["reason"]
    out = " ".join(text(capsys, *TINY).split())
    assert facts["reason"] in out


def test_plan_of_ulysses_has_no_ring_messages(capsys):
    facts = plan(capsys, *TINY, "--strategy", "ulysses")
    forward = facts["passes"]["forward"]
    assert (forward["circulates"], forward["transfer"], forward["max_message_bytes"]) == ("heads", "all_to_all", None)
    assert forward["imbalance"] == 1.0
    assert "all rows of some heads" in text(capsys, *TINY, "--strategy", "ulysses")


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_plan_of_one_rank_sends_nothing(capsys, strategy):
    one = (*TINY[:3], "1", *TINY[4:], "--strategy", strategy)
    for name, part in plan(capsys, *one)["passes"].items():
        assert part["max"]["messages"] == part["max"]["sent_bytes"] == 0
        assert f"{name} on rank 0: no communication, one rank holds all tokens" in " ".join(text(capsys, *one).split())


# --------------------------------------------------------------------------------------------- the check


def test_plan_check_passes_or_is_reported_as_skipped(capsys):
    assert plan(capsys, *TINY)["check"] == {"done": True, "ok": True, "wrong": [], "ranks": 2}
    assert plan(capsys, *TINY, "--no-check")["check"] == {"done": False}
    assert "check   ok" in text(capsys, *TINY)
    assert "check   skipped" in text(capsys, *TINY, "--no-check")


def test_plan_with_failed_check_returns_1(capsys, monkeypatch):
    def wrong(plan, progress, ranks):
        return [*verify(plan, progress, ranks), "forward: block pairs computed more than once: [(0, 1)]"]

    monkeypatch.setattr("burst_portable.cli.plan_facts.verify", wrong)
    assert main(["plan", *TINY]) == 1
    assert "computed more than once" in capsys.readouterr().out
    assert main(["plan", *TINY, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["check"]["ok"] is False


def test_plan_samples_many_ranks_and_given_rank(capsys):
    facts = plan(capsys, "--seq-len", "1000", "--ranks", "100", "--strategy", "ring", "--no-check", "--rank", "7")
    costed = facts["sampled_ranks"]
    assert {0, 7, 99} <= set(costed)
    assert len(costed) == 9
    out = text(capsys, "--seq-len", "1000", "--ranks", "100", "--strategy", "ring", "--no-check", "--rank", "7")
    assert "9 of 100 ranks: 0, 7, 14" in out
    assert "84 more" in out


def test_plan_checks_a_sample_of_many_ranks(capsys, monkeypatch):
    assert [len(checked_ranks(ranks, False)) for ranks in (128, 129, 1024, 16384)] == [128, 124, 16, 8]
    assert len(checked_ranks(1024, True)) == 1024
    monkeypatch.setattr("burst_portable.cli.plan_facts.CHECKED_RANKS", 8)
    many = ("--seq-len", "96", "--ranks", "48", "--strategy", "ring")
    facts = plan(capsys, *many)
    assert facts["check"] == {"done": True, "ok": True, "wrong": [], "ranks": 8}
    assert "(a sample, 8 of 48 ranks; --check-all verifies all)" in " ".join(text(capsys, *many).split())
    assert "(all 48 ranks)" in text(capsys, *many, "--check-all")


def test_plan_json_stays_valid_with_progress_bar(capsys):
    assert (
        main(["plan", "--seq-len", "650", "--ranks", "65", "--strategy", "ring", "--mask", "window:9", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["check"]["ok"] is True


# ---------------------------------------------------------------------------------------- output, imports


def test_plan_json_file_leaves_tables_on_stdout(capsys, tmp_path):
    file = tmp_path / "plan.json"
    assert main(["plan", *TINY, "--json", str(file)]) == 0
    out = capsys.readouterr().out
    facts = json.loads(file.read_text())
    assert facts["schema"] == "burst_portable.plan/6"
    assert "score matrix" in out
    assert "predicted efficiency" in out


def test_score_matrix_of_zigzag():
    # 24 cells of 2 tokens. A cell on the diagonal is partly visible, and rank 0 has the first and last quarter.
    cells = [[cell.text for cell in row] for row in score_matrix(Mask.causal(), make_layout("zigzag", 48, 2))]
    assert cells[0] == ["0 ", *["· "] * 23]
    assert cells[7] == [*["11"] * 7, "1 ", *["· "] * 16]
    assert cells[23] == [*["00"] * 23, "0 "]


def test_score_matrix_marks_cells_of_several_ranks(capsys):
    """Zigzag documents of 29 and 67 tokens: ranks change at 22 and 46, inside cells of 4 tokens."""
    options = ("--seq-len", "96", "--ranks", "2", "--mask", "documents:0,29,96", "--layout", "document_zigzag")
    out = text(capsys, *options)
    keys, *rows = picture(out)
    assert [i for i, key in enumerate(keys.split()) if key == "#"] == [5, 11]
    assert [i for i, row in enumerate(rows) if "#" in row] == [5, 11]
    assert "#: of several ranks" in out


def picture(out: str) -> list[str]:
    """Return the rows of the score matrix without indentation."""
    rows = out.partition("score matrix\n")[2].partition("       rows are queries")[0].splitlines()
    return [row.removeprefix("  keys ").removeprefix(" " * 7).rstrip() for row in rows]


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        ("zigzag", [f"{4 * i}-{4 * i + 3}" for i in (*range(8), *range(7, -1, -1))]),
        ("contiguous", [f"{2 * i}-{2 * i + 1}" for i in range(16)]),
        ("striped", ["0-31"] * 16),
    ],
)
def test_plan_picture_of_many_ranks_shades_cells_and_names_ranks(capsys, layout, ranks):
    out = text(capsys, "--seq-len", "4096", "--ranks", "32", "--layout", layout, "--mask", "window:1024")
    # 16 cells of 256 tokens under a causal window of four cells. Half of the pairs are visible at its edges.
    band = [["██" if 0 < i - j < 4 else "▒▒" if i - j in (0, 4) else "· " for j in range(16)] for i in range(16)]
    assert picture(out) == [f"{''.join(row)}  {who}" for row, who in zip(band, ranks, strict=True)]
    legend = "       ██: all pairs of the cell, ▓▓: from 2/3, ▒▒: from 1/3, ░░: fewer, ·: none"
    assert legend in out.splitlines()
    assert "#" not in out.partition("forward on rank")[0]


def test_plan_works_without_torch():
    blocked = ("torch", "numpy", "triton", "transformers")
    source = (
        f"import sys\nsys.modules.update(dict.fromkeys({blocked}))\n"
        f"from burst_portable.cli import main\nsys.exit(main(['plan', *{TINY!r}, '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["check"]["ok"] is True


# ------------------------------------------------------------------------------------------- measured rates


@pytest.mark.parametrize(
    ("ranks", "more", "told"),
    [
        (16, (), "--ranks-per-node 8 predicts 16 ranks on several nodes"),
        (12, (), "--ranks-per-node RANKS predicts 12 ranks on several nodes"),
        (8, (), ""),
        (16, ("--ranks-per-node", "8"), ""),
        (16, ("--intra-node-bandwidth", "20"), ""),
    ],
)
def test_plan_notes_unknown_node_size(capsys, ranks, more, told):
    """A default node size is a guess; typed bandwidths or node sizes need no note."""
    arguments = ["plan", "--seq-len", "4096", "--ranks", str(ranks), "--strategy", "ring", "--no-check", *more]
    assert main(arguments) == 0
    printed = " ".join(capsys.readouterr().out.split())
    note = f"note all links have the same bandwidth; {told}"
    assert note in printed if told else "note" not in printed
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == ([note.removeprefix("note ")] if told else [])


def test_plan_uses_rates_of_hardware_spec(capsys, tmp_path):
    """On one rank the passes take launch latency plus FLOPs at the rates of the file."""
    path = tmp_path / "hardware.json"
    hardware = {
        "tflops": 2.0,
        "backward_tflops": 1.0,
        "launch_latency": 0.5,
        "backward_launch_latency": 0.25,
        "intra_node_bandwidth": 7.0,
    }
    about = {"device": "Abacus [9]", "ranks": 1, "kernel": "beads", "date": "2026-11-22"}
    path.write_text(json.dumps({"schema": "burst_portable.hardware_spec/3", **about, "hardware": hardware}))
    sizes = ("--seq-len", "1024", "--ranks", "1", "--heads", "8", "--head-dim", "64")
    facts = plan(capsys, *sizes, "--hardware-spec", str(path))
    num_pairs = 1024 * 1025 // 2
    forward, backward = facts["passes"]["forward"], facts["passes"]["backward"]
    assert forward["seconds"] == pytest.approx(0.5 + 4 * num_pairs * 8 * 64 / 2e12)
    assert backward["seconds"] == pytest.approx(0.25 + 10 * num_pairs * 8 * 64 / 1e12)
    assert backward["compute_seconds"] == pytest.approx(10 * num_pairs * 8 * 64 / 1e12)
    assert facts["hardware"]["source"] == f"measured on Abacus [9] ({path}, 2026-11-22)"
    assert plan(capsys, *sizes)["hardware"]["source"] is None
    told = " ".join(
        text(capsys, "--seq-len", "1024", "--ranks", "2", "--heads", "8", "--hardware-spec", str(path)).split()
    )
    assert "for 2 TFLOP/s and 7 GB/s per rank, measured on Abacus [9]" in told
    assert "on 1 rank and not 2" in told
    nodes = plan(
        capsys,
        "--seq-len",
        "1024",
        "--ranks",
        "4",
        "--hardware-spec",
        str(path),
        "--ranks-per-node",
        "2",
        "--inter-node-bandwidth",
        "3",
    )
    assert (nodes["hardware"]["ranks_per_node"], nodes["hardware"]["inter_node_bandwidth"]) == (2, 3.0)


@pytest.mark.parametrize(
    ("typed", "origin", "between"),
    [
        ((), "measured", "measured 9 GB/s between nodes of 4"),
        (("--ranks-per-node", "4"), "measured", "measured 9 GB/s between nodes of 4"),
        (("--ranks-per-node", "2"), "measured", ", between nodes of 4 and not 2; measured 9 GB/s between nodes of 2"),
        (("--inter-node-bandwidth", "3"), "given", "given 3 GB/s between nodes of 4"),
        (("--ranks-per-node", "2", "--inter-node-bandwidth", "3"), "given", "22); given 3 GB/s between nodes of 2"),
    ],
)
def test_plan_uses_node_rates_of_hardware_spec(capsys, tmp_path, typed, origin, between):
    path = tmp_path / "hardware.json"
    about = {"device": "Abacus", "ranks": 8, "kernel": "beads", "date": "2026-11-22"}
    hardware = {"tflops": 2.0, "intra_node_bandwidth": 7.0, "ranks_per_node": 4, "inter_node_bandwidth": 9.0}
    path.write_text(json.dumps({"schema": "burst_portable.hardware_spec/3", **about, "hardware": hardware}))
    arguments = ("--seq-len", "1024", "--ranks", "8", "--strategy", "ring", "--hardware-spec", str(path), *typed)
    assert plan(capsys, *arguments)["hardware"]["inter_node_source"] == origin
    assert between in " ".join(text(capsys, *arguments).split())


def test_plan_marks_assumed_inter_node_bandwidth(capsys):
    arguments = ("--seq-len", "1024", "--ranks", "8", "--ranks-per-node", "4")
    for typed, origin in (((), "assumed"), (("--inter-node-bandwidth", "50"), "given")):
        assert plan(capsys, *arguments, *typed)["hardware"]["inter_node_source"] == origin
        assert f"; {origin} 50 GB/s between nodes of 4" in " ".join(text(capsys, *arguments, *typed).split())
    assert plan(capsys, *arguments[:4])["hardware"]["inter_node_source"] is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--hardware-spec", "none.json"), "none.json is not a hardware spec file, and no known machine"),
        (("--hardware-spec", "h20"), "allowed: a file, or h100, h200; `burst-portable measure"),
        (("--hardware-spec", "none.json", "--tflops", "3"), "--hardware-spec and --tflops exclude each other"),
        (
            ("--hardware-spec", "none.json", "--intra-node-bandwidth", "3"),
            "--hardware-spec and --intra-node-bandwidth exclude each other",
        ),
    ],
)
def test_plan_rejects_invalid_rates(capsys, arguments, told):
    assert main(["plan", *TINY, *arguments]) == 2
    assert told in capsys.readouterr().err


def test_plan_uses_rates_of_known_machine(capsys, tmp_path, monkeypatch):
    """On one rank a pass takes launch latency plus the FLOPs of whole blocks. A file of the same name comes first."""
    sizes = ("--seq-len", "65536", "--ranks", "1", "--heads", "8")
    for name, tflops in (("h100", 690e12), ("H200", 640e12)):
        facts = plan(capsys, *sizes, "--hardware-spec", name)
        flops = 4 * (65536 * 65537 // 2) * 8 * 128
        assert facts["passes"]["forward"]["seconds"] == pytest.approx(flops / tflops, rel=0.02)
        assert name.upper() in facts["hardware"]["source"]
        assert (
            "of bfloat16 and not float32"
            in plan(capsys, *sizes, "--hardware-spec", name, "--dtype", "float32")["hardware"]["source"]
        )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h100").write_text("{}")
    assert main(["plan", *sizes, "--hardware-spec", "h100"]) == 2


def test_plan_json_does_not_overwrite_hardware_spec(capsys, tmp_path):
    path = tmp_path / "hardware.json"
    path.write_text("{}")
    assert main(["plan", *TINY, "--hardware-spec", str(path), "--json", str(path)]) == 2
    assert "names an input file of the command" in capsys.readouterr().err


@pytest.mark.parametrize("named", [False, True])
def test_plan_notes_unused_hardware_spec_of_environment(monkeypatch, tmp_path, capsys, named):
    """The file describes this machine; a plan may be for another one."""
    file = tmp_path / "hardware.json"
    about = {"device": "Abacus", "ranks": 1, "kernel": "beads", "date": "2026-11-22"}
    hardware = {"tflops": 500.0, "intra_node_bandwidth": 200.0}
    file.write_text(json.dumps({"schema": "burst_portable.hardware_spec/3", **about, "hardware": hardware}))
    monkeypatch.setenv("BURST_HARDWARE_SPEC", str(file))
    options = ["--hardware-spec", str(file)] if named else []
    assert main(["plan", "--seq-len", "64", "--ranks", "2", "--json", *options]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [str(file) in note for note in notes] == ([] if named else [True])


@pytest.mark.parametrize("flag", ["--tflops", "--intra-node-bandwidth", "--inter-node-bandwidth"])
@pytest.mark.parametrize("speed", ["5e-324", "1e308", "0", "nan", "-1"])
def test_plan_rejects_bandwidths_without_finite_time(capsys, flag, speed):
    """Denormal values once gave infinite times and an efficiency of nan."""
    assert main(["plan", *TINY, "--ranks-per-node", "1", flag, speed]) == 2
    assert f"{flag} is out of range" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "given"), [("--ranks-per-node", "0"), ("--show-steps", "-1"), ("--show-steps", "1000001")]
)
def test_plan_rejects_counts_out_of_range(capsys, flag, given):
    assert main(["plan", *TINY, flag, given]) == 2
    assert f"{flag} is out of range; got {given}; allowed: an int from 1 to 1,000,000" in capsys.readouterr().err


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--heads", "9" * 30], "heads is not a size; got " + "9" * 30 + "; allowed: an int below 2**48"),
        (["--ranks", "9" * 30, "--ranks-per-node", "2"], "ranks; allowed: one of its divisors"),  # not listed for days
    ],
)
def test_plan_rejects_numbers_beyond_64_bits(capsys, flags, told):
    assert main(["plan", *TINY, *flags]) == 2
    assert told in capsys.readouterr().err
