"""Test the comparison of two reports."""

from __future__ import annotations

import json

from burst_portable.cli import main


def test_compare_names_slower_part(files, capsys):
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
    """Write the report of the even run with a change, and return its path."""
    data = json.loads((files / "even.json").read_text())
    change(data)
    (files / name).write_text(json.dumps(data))
    return str(files / name)


def test_compare_rejects_other_work(files, capsys):
    """16 times the FLOPs for 4 times the tokens is neither slower nor faster."""

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
    assert "the reports are of different work and cannot be compared" in told
    assert f"got tokens {4 * tokens} and {tokens}; " in told
    assert "of attention per step; profile both with the same model" in told


def test_compare_accepts_more_steps(files):
    def twice(data):
        data["train_steps"] += data["train_steps"]
        for rank in data["ranks"]:
            for one in rank["passes"].values():
                one["flops"] *= 2

    assert main(["compare", str(files / "even.json"), changed(files, "twice.json", twice)]) == 0


def test_compare_lists_other_differences(files, capsys):
    even, basic = str(files / "even.json"), changed(files, "basic.json", lambda data: data.update(level="basic"))

    def other(data):
        data["device"] = "cuda"
        data["backend"], data["kernels"] = "theirs", ["their_boxes"]
        for plan in data["plans"]:
            plan["strategy"] = "ulysses"

    assert main(["compare", even, even]) == 0
    assert not {"warning", "differs"} & set(capsys.readouterr().out.split())
    assert main(["compare", even, basic]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "warning level: standard before, basic after: recording costs a different time per level" in told
    other = changed(files, "other.json", other)
    assert main(["compare", even, other]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "differs strategy: ring before, ulysses after" in told
    assert "warning device: cpu before, cuda after" in told
    assert "warning backend: unknown before, theirs after: different backends" in told
    assert "warning kernel: unknown before, their_boxes after: different kernels" in told
    assert main(["compare", even, other, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"name": "strategy", "before": "ring", "after": "ulysses"} in told["differences"]
