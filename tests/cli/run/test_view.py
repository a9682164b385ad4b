"""Test the output of `burst-portable run` on a narrow terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from burst_portable.cli.run.view import View, mfu_text, summary
from burst_portable.profiling.report import Report
from burst_portable.profiling.report.terminal import show
from tests.support.synthetic_records import ring


def test_narrow_terminal_indents_wrapped_advice(tmp_path, capsys):
    profile = Report.of(ring(2, 3)).data
    path = f"/a/folder/with-hyphens/{'and_a_long_name' * 5}/trace.json"
    advice = f"send less, as the layout of {path} does, and look at the plan of it"
    profile["summary"]["recommendation"] = advice
    view = View()
    view._console = Console(force_terminal=True, width=40, soft_wrap=True, color_system=None)
    view.profile(profile, tmp_path)
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("advice  "))
    told = lines[at:-1]
    assert len(told) == 3
    assert all(line.startswith(" " * 8) for line in told[1:])
    assert all(len(line) <= 40 for line in told if path not in line)
    assert " ".join(line[8:].strip() for line in told) == advice
    assert lines[-1] == f"profile {tmp_path / 'profile.html'}"


def test_narrow_terminal_indents_wrapped_verdict(capsys):
    profile = Report.of(ring(2, 3)).data
    profile["summary"] |= {"kind": "idle", "text": "one two three four five six seven"}
    show(profile, Console(force_terminal=True, width=30, color_system=None))
    assert capsys.readouterr().out.splitlines()[:2] == ["IDLE  one two three four five", "      six seven"]


def test_view_wraps_long_verdict_in_narrow_terminal(capsys):
    facts = {
        "status": "ok", "failures": [], "losses": [5.0] * 3, "reference_losses": None, "steps": 3, "mode": "train",
        "max_relative_difference": 8.4e-8, "gradient_relative_difference": 3.9e-7, "dtype": "float32", "world_size": 2,
        "batch": 1, "seq_len": 64, "tokens_per_second": 1.0, "reference_tokens_per_second": None,
        "seconds_per_step": 1.0, "reference_seconds_per_step": None, "mfu": None, "notes": [],
        "model_flops_per_step": None, "peak": {}, "peak_memory_bytes": [1],
        "kernels": {"reference": "not fast: it supports 16 bits only"},
    }  # fmt: skip
    view = View()
    view._console = Console(force_terminal=True, width=60, soft_wrap=True, color_system=None)
    view.result(facts)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "PASSED  3 steps match one device: losses within 8.4e-08,",
        "        final gradients within 3.9e-07 (relative, float32)",
    ]
    assert "kernel  reference (not fast: it supports 16 bits only)" in lines


def test_log_line_is_not_wrapped(tmp_path, capsys):
    profile = Report.of(ring(2, 3)).data
    profile["summary"]["recommendation"] = "a word " * 100
    View().profile(profile, tmp_path)
    assert f"advice  {'a word ' * 100}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flops", "told"),
    [
        (10**12, "unknown: the device's peak in bfloat16 is not known (the backend 'theirs' states none)"),
        (None, "unknown: FLOPs of a mixture of experts are not counted"),
    ],
)
def test_unknown_utilization_is_reported_as_unknown(flops, told):
    """A backend without peaks: docs/writing_a_backend.md promises "unknown"."""
    peak = {"flops": None, "dtype": "bfloat16", "source": "the backend 'theirs' states none"}
    facts = {
        "mfu": None, "peak": peak, "model_flops_per_step": flops, "mode": "train", "world_size": 2,
        "losses": [1.0], "reference_losses": None, "tokens_per_second": 1.0, "reference_tokens_per_second": None,
        "seconds_per_step": 1.0, "reference_seconds_per_step": None, "peak_memory_bytes": [1],
    }  # fmt: skip
    assert mfu_text(facts) == told
    assert ("model FLOP utilization", "unknown", "-") in summary(facts)
