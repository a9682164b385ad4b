"""Test `burst-portable run` with processes over gloo: its JSON, exit codes and error messages."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest

from burst_portable.cli import main
from burst_portable.cli.run.page import write_html
from burst_portable.strategies.planner import plan
from tests.support.models import SIZES

FIELDS = {
    *("backend", "world_size", "strategy", "layout", "seq_len", "steps", "losses", "reference_losses"),
    *("max_relative_difference", "gradient_relative_difference", "tokens_per_second", "peak_memory_bytes"),
}
SMALL = ["run", "--seq-len", "101", "--ranks", "2", "--steps", "2"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Write the config of a model that is smaller than tiny."""
    path = tmp_path / "config.json"
    sizes = {**SIZES, "vocab_size": 256}
    path.write_text(json.dumps({"model_type": "llama", **sizes}), encoding="utf-8")
    return path


def plant(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a sitecustomize.py, which every rank runs first."""
    (folder / "sitecustomize.py").write_text(source, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_run_on_two_processes_equals_one_device(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """The ranks have 51 and 50 of 101 tokens."""
    out, report = tmp_path / "out.json", tmp_path / "report"
    arguments = [*SMALL, "--model", str(config), "--check", "--json", str(out), "--report", str(report)]
    assert main(arguments) == 0
    facts = json.loads(out.read_text(encoding="utf-8"))
    assert facts.keys() >= FIELDS
    assert (facts["backend"], facts["world_size"], facts["seq_len"], facts["steps"]) == ("cpu", 2, 101, 2)
    assert facts["status"] == "ok"
    assert facts["ranks_agree"]
    assert len(facts["losses"]) == len(facts["reference_losses"]) == 2
    assert 0 <= facts["max_relative_difference"] <= 2e-6
    assert 0 < facts["gradient_relative_difference"] <= 2e-4
    assert facts["tokens_per_second"] > 0
    needed = facts["model_flops_per_step"] / (facts["seconds_per_step"] * 2 * facts["peak"]["flops"])
    assert facts["mfu"] == pytest.approx(needed)
    assert len(facts["peak_memory_bytes"]) == 2
    assert min(facts["peak_memory_bytes"]) > 1 << 20
    said = capsys.readouterr()
    assert "PASSED  2 steps match one device" in said.out
    assert "model FLOP utilization" in said.out
    assert "a matrix product of" in said.out  # the source of the peak
    assert said.err == ""
    assert json.loads((report / "report.json").read_text(encoding="utf-8")) == facts
    page = (report / "report.html").read_text(encoding="utf-8")
    assert "PASSED" in page
    # A backend without a known peak.
    unknown = {**facts, "mfu": None, "peak": {**facts["peak"], "flops": None}}
    write_html(unknown, plan(seq_len=101, ranks=2, heads=4), tmp_path / "unknown.html")
    page = (tmp_path / "unknown.html").read_text(encoding="utf-8")
    assert "<b>unknown</b><span>model FLOP utilization" in page
    assert "unknown: the device" in page
    # the page loads nothing else
    assert not any(word in page for word in ("<script", "<link", "@import", "src=", "href=", "url("))


BROKEN = """
import burst_portable.backends.cpu.attention as a
right = a.CpuFlashKernel.attend_backward
def wrong(self, x, tiles, call, *, into):
    right(self, x, tiles, call, into=into)
    into[1].mul_(1.01)  # dK is too large by a hundredth, of which the losses of two steps show nothing
a.CpuFlashKernel.attend_backward = wrong
"""
DYING = """
import os, sys, torch
right = torch.optim.AdamW.step
def wrong(self, *a, **k):
    if sys.argv[-1] == "1":
        print("out of luck", file=sys.stderr, flush=True)
        os._exit(9)
    return right(self, *a, **k)
torch.optim.AdamW.step = wrong
"""


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_run_with_planted_bug_returns_1(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """With `--json -`, standard output contains only JSON."""
    plant(BROKEN, tmp_path, monkeypatch)
    code = main([*SMALL, "--model", str(config), "--check", "--json", "-"])
    out, err = capfd.readouterr()
    assert code == 1, out + err
    facts = json.loads(out)
    assert facts["status"] == "failed"
    assert "k_proj" in facts["worst_gradient"]
    assert "FAILED" in err
    assert "k_proj" in err
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.usefixtures("ranks_are_forked")
def test_run_with_dying_rank_returns_1(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    plant(DYING, tmp_path, monkeypatch)
    assert main([*SMALL, "--model", str(config)]) == 1
    _, err = capfd.readouterr()
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith("burst-portable: rank 1 ended with code 9; got out of luck"), err


@pytest.mark.full
@pytest.mark.slow
def test_run_reports_rank_that_does_not_start(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    plant("import sys, time\nif sys.argv[-1] == '1':\n    time.sleep(90)\n", tmp_path, monkeypatch)
    monkeypatch.setenv("BURST_TIMEOUT", "3")
    assert main([*SMALL, "--model", str(config)]) == 1
    _, err = capfd.readouterr()
    assert "Traceback" not in err
    assert "rank 0: the other ranks did not start within 3 s" in err.splitlines()[-1]


@pytest.mark.slow
def test_run_joins_torchrun(tmp_path: Path, forked_python: str):
    """The model is the default one."""
    out = tmp_path / "out.json"
    torchrun = (forked_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
    arguments = ["run", "--seq-len", "64", "--steps", "1", "--check", "--json", str(out)]
    arguments += ["--gradient-checkpointing"]
    command = [*torchrun, "burst_portable", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PASSED") == 1
    assert "gradient checkpointing" in done.stdout
    assert json.loads(out.read_text(encoding="utf-8"))["world_size"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "again",
    [
        pytest.param(None, id="once", marks=pytest.mark.full),
        pytest.param(0.01, id="at once again", marks=pytest.mark.full),
        pytest.param(0.1, id="soon again", marks=pytest.mark.full),
    ],
)
def test_interrupted_run_leaves_no_process(config: Path, tmp_path: Path, again: float | None):
    """The run ends fast, prints nothing, and leaves no rank and no temporary folder."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENING, *SMALL, "--steps", "100000", "--model", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        workers = _workers(process, 2)
        assert list(temporary.iterdir())
        process.send_signal(signal.SIGINT)
        at = monotonic()
        if again is not None:
            sleep(again)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert monotonic() - at < 30
        assert process.returncode == 128 + signal.SIGINT, err
        assert err == ""
        assert list(temporary.iterdir()) == []
        assert not any(worker.is_running() for worker in workers)
    finally:
        process.kill()  # its ranks end with it
        process.communicate()


LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs with Ctrl-C ignored
from burst_portable.cli import main
sys.exit(main())
"""


def _workers(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Return the ranks of a run after all have started."""
    until = monotonic() + 60
    while len(found := psutil.Process(process.pid).children()) < count:
        assert process.poll() is None, process.communicate()
        assert monotonic() < until
        sleep(0.1)
    sleep(1.0)
    return found


# ------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--text", "/no/such/text"], "the text does not exist"),
        (["--text", ""], "the text does not exist"),
        (["--text", "{pickled}"], "a folder"),
        (["--text", "/dev/zero"], "not a regular file"),
        (["--text", "/proc/self/mem"], "0 bytes"),
        (["--text", "x" * 5000], "cannot be read"),
        (["--text", "{short}"], "shorter than one sequence"),
        (["--text", "{empty}"], "cannot be used"),
        (["--ranks", "0"], "--ranks"),
        (["--ranks", "102"], "more ranks than tokens"),
        (["--steps", "0"], "--steps"),
        (["--seq-len", "-5"], "--seq-len"),
        (["--batch", "0"], "--batch"),
        (["--batch", "1" * 30], "--batch is too large"),
        (["--batch", "10000000"], "does not fit this machine's memory"),
        (["--seq-len", "4096", "--ranks", "1000"], "too many ranks for this machine's cores"),
        (["--seed", "-1"], "--seed"),
        (["--seed", "1" * 30], "--seed is too large"),
        (["--lr", "1e400"], "--lr"),
        (["--strategy", "burst", "--transfer", "dirct"], "did you mean 'direct'"),
        (["--strategy", "ring", "--ranks-per-node", "2"], "has no --ranks-per-node; got 2; omit it, or use"),
        (["--strategy", "double_ring", "--backward-circulates", "v"], "unknown side to circulate"),
        (["--strategy", "double_ring", "--ranks-per-node", "3"], "does not divide"),
        (["--lr", "nan"], "--lr"),
        (["--strategy", "rng"], "did you mean 'ring'"),
        (["--strategy", "ulysses", "--ranks", "3"], "ulysses cannot divide"),
        (["--strategy", "usp", "--ranks-per-node", "3"], "does not divide"),
        (["--layout", "zag"], "zigzag"),
        (["--dtype", "int8"], "unknown dtype"),
        (["--gradient-checkpointing", "--eval"], "requires a backward pass"),
        (["--lr", "0.1", "--eval"], "--lr requires training"),
        (["--backend", "gpu"], "unknown backend"),
        (["--model", "/no/such/model"], "no such model"),
        (["--model", "meta-llama/Llama-3.1-8B"], "download it and pass its folder"),
        (["--seq-len", "512k", "--model", "{few}"], "set a larger max_position_embeddings"),
        (["--model", "{broken}"], "cannot be read as JSON"),
        (["--model", "{list}"], "contains no config"),
        (["--model", "{unknown}"], "did you mean llama"),
        (["--model", ""], "no such model"),
        (["--model", "/dev/zero"], "no such model"),
        (["--model", "{binary}"], "cannot be read as JSON"),
        (["--model", "{deep}"], "cannot be read as JSON"),
        (["--model", "{kind_list}"], "names no model"),
        (["--model", "{kind_dict}"], "names no model"),
        (["--model", "{window}"], "sliding_window"),
        (["--model", "{no_layers}"], "num_hidden_layers"),
        (["--model", "{many_layers}"], "num_hidden_layers"),
        (["--model", "{listed_layers}"], "num_hidden_layers"),
        (["--model", "{many_labels}"], "num_labels"),
        (["--model", "x" * 5000], "the model cannot be read"),
        (["--model", "{no_heads}"], "cannot read the config"),
        (["--model", "{quantized}"], "quantized"),
        (["--model", "{mistyped}"], "cannot read the config"),
        (["--model", "{recurrent}"], "MambaForCausalLM cannot be sharded; got a recurrent state"),
        (["--model", "{composite}"], "the config of llama4 has no single attention size; got several models"),
        (["--model", "{dropout}"], "dropout"),
        (["--model", "{pickled}"], "safetensors"),
        (["--model", "{few}"], "tokens outside the model's vocabulary"),
        (["--json", "/no/such/folder/x.json"], "--json"),
        (["--json", "/dev/full"], "No space left"),
        (["--report", "/proc/report"], "report"),
        (["--report", ""], "--report names no folder"),
        (["--report", "{short}"], "--report names a file"),
    ],
)  # fmt: skip
def test_run_reports_bad_input_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    files = {
        "short": "hi",
        "empty": "",
        "broken": '{"model_type": ',
        "list": "[1]",
        "unknown": '{"model_type": "lama"}',
        "mistyped": '{"model_type": "llama", "hidden_size": "wide"}',
        "recurrent": '{"model_type": "mamba"}',
        "composite": '{"model_type": "llama4"}',
        "dropout": json.dumps({"model_type": "llama", **SIZES, "vocab_size": 256, "attention_dropout": 0.1}),
        "few": json.dumps({"model_type": "llama", **SIZES}),
        "binary": "\x00\x01\x02",
        "deep": "[" * 100_000,
        "kind_list": '{"model_type": ["llama"]}',
        "kind_dict": '{"model_type": {}}',
        "window": json.dumps({"model_type": "mistral", **SIZES, "sliding_window": "x"}),
        "no_layers": json.dumps({"model_type": "llama", **SIZES, "num_hidden_layers": 0}),
        "many_layers": json.dumps({"model_type": "llama", **SIZES, "num_hidden_layers": 10**9}),
        "listed_layers": json.dumps({"model_type": "qwen2", **SIZES, "num_hidden_layers": 10**12}),
        "many_labels": json.dumps({"model_type": "llama", **SIZES, "num_labels": 10**12}),
        "no_heads": json.dumps({"model_type": "llama", **SIZES, "num_attention_heads": 0}),
        "quantized": json.dumps({"model_type": "llama", **SIZES, "quantization_config": {"bits": 4}}),
    }
    paths = {"pickled": str(tmp_path / "pickled")}
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"never read")
    for name, content in files.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
        paths[name] = str(tmp_path / name)
    assert main([*SMALL, *(a.format(**paths) for a in arguments)]) == 2
    said = capsys.readouterr()
    assert told in said.err
    assert len(said.err.splitlines()) == 1
    assert said.out == ""


def test_run_without_transformers_names_extra(monkeypatch, capsys):
    monkeypatch.setattr("burst_portable.cli.run.command.find_spec", lambda name: None)
    assert main(["run"]) == 2
    expected = "run needs the package transformers; in the clone, run: pip install '.[cli,transformers]'"
    assert capsys.readouterr().err == f"burst-portable: {expected}\n"
