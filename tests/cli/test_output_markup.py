"""Test that square brackets in names, reasons and files are printed, and not parsed by rich."""

from __future__ import annotations

import json
from pathlib import Path

from burst_portable.cli import doctor, main, measure, output
from burst_portable.cli.run import view
from burst_portable.profiling.report import Report
from tests.support.synthetic_records import ring

NAMED = "[ascend]"  # as in pip install '.[ascend]'


def test_doctor_prints_brackets_literally(capsys):
    backend = {
        "ok": False,
        "reason": f"pip install 'x{NAMED}'",
        "device_type": NAMED,
        "process_group": NAMED,
        "entry_point": NAMED,
        "facts": {"note": NAMED},
        "kernels": [{"name": NAMED, "supports": {NAMED: {"ok": False, "reason": f"no {NAMED}"}}}],
    }
    settings = {"timeout": 1.0, "kernel": NAMED, "transport": NAMED}
    doctor.show(
        {"version": "1", "python": "3", "platform": NAMED, "packages": {"p": NAMED}, "settings": settings,
         "unknown_settings": [NAMED], "ignored_packages": [NAMED],
         "hardware": {"file": NAMED, "ok": False, "reason": NAMED},
        "kernel_times": {"file": NAMED, "ok": False, "reason": NAMED},
         "backends": {NAMED: backend}}
    )  # fmt: skip
    printed = "".join(c for c in capsys.readouterr().out if not c.isspace())
    # Platform, package, settings, warnings, rates; name, reason, device, group, origin; fact; title, column, row; line.
    assert printed.count(NAMED) >= 17


def test_measure_prints_brackets_literally(capsys):
    names = dict.fromkeys(("device", "backend", "kernel", "dtype"), NAMED)
    methods = {"block": {"measured": False, "method": NAMED, "max_over_min": None}}
    facts = {
        **names,
        "ranks": 1,
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 8,
        "hardware": {"block": 1},
        "methods": methods,
    }
    measure.show(output.console(soft_wrap=True), facts, Path(NAMED))
    # the file occurs three times: environment, Config and command line
    assert capsys.readouterr().out.count(NAMED) == 5 + 3


def test_failed_run_prints_brackets_literally(capsys):
    facts = {
        "status": "failed", "failures": [f"rank 1: {NAMED} is missing"], "world_size": 2, "reference_losses": None,
        "mode": "training", "losses": [1.0], "tokens_per_second": 1.0, "reference_tokens_per_second": None,
        "seconds_per_step": 1.0, "reference_seconds_per_step": None, "peak_memory_bytes": [1], "steps": 1,
        "batch": 1, "mfu": None, "model_flops_per_step": None, "peak": {},
        "seq_len": 8, "notes": [NAMED], "kernels": {},
    }  # fmt: skip
    view.View().result(facts)
    assert capsys.readouterr().out.count(NAMED) == 2


def test_profile_and_trace_print_brackets_literally(tmp_path, capsys):
    report = Report.of(ring(2, 3))
    report.data["summary"]["text"] = report.data["summary"]["recommendation"] = f"try {NAMED}"
    report.data["peaks"] = [
        {"rank": 0, "device": NAMED, "dtype": "x", "flops": None, "bandwidth": None, "source": NAMED, "measured": False}
    ]
    report.write_json(tmp_path / "p.json")
    assert main(["profile", str(tmp_path / "p.json")]) == 0
    assert capsys.readouterr().out.count(NAMED) == 4
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 0, "dur": 1, "pid": 0, "tid": 7}
    (tmp_path / f"{NAMED}.json").write_text(json.dumps([event]))
    assert main(["trace", str(tmp_path / f"{NAMED}.json")]) == 0
    assert NAMED in capsys.readouterr().out
