from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from burst_portable.cli import main
from burst_portable.cli.flags import tokens
from burst_portable.cli.init import SCRIPTS, text_of
from tests.support.fork_server import run_program

SAVING = ("trainer", "loop", "lightning")
"""Frameworks whose scripts save the model."""


@pytest.mark.parametrize("framework", SCRIPTS)
def test_init_writes_script(framework: str, capsys, monkeypatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert main(["init", framework]) == 0
    written = Path(f"train_{framework}.py").read_text()
    assert "SCRIPT.py" not in written
    compile(written, "", "exec")
    assert f" train_{framework}.py" in capsys.readouterr().out
    assert main(["init", framework]) == 2
    assert "exists already" in capsys.readouterr().err
    assert Path(f"train_{framework}.py").read_text() == written


def test_init_prints_json(capsys, tmp_path: Path):
    assert main(["init", "loop", "--output", str(tmp_path / "mine.py"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["schema"] == "burst_portable.init/1"
    assert facts["commands"][0] == "torchrun --nproc-per-node 2 mine.py"
    assert (tmp_path / "mine.py").read_text() == text_of("loop", "mine.py")


@pytest.mark.parametrize("framework", SCRIPTS)
def test_lengths_of_scripts_are_those_of_commands(framework: str, capsys, tmp_path: Path):
    path = tmp_path / "mine.py"
    assert main(["init", framework, "--seq-len", "512k", "--output", str(path)]) == 0
    text = path.read_text()
    assert text == text_of(framework, "mine.py", 524288) != text_of(framework, "mine.py")
    assert text.count("default=524288") == 1
    function = next(n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == "tokens")
    names: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), "", "exec"), names)
    for length in ("512k", "1m", "2K", "3M", "301"):
        assert names["tokens"](length) == tokens(length)
    for wrong in ("k", "1.5k", "", "many"):
        with pytest.raises(ValueError, match="invalid literal"):
            names["tokens"](wrong)


def test_functions_of_several_scripts_are_equal():
    """Each script is complete, so `read_rows` and `load` occur in three of them."""
    found: dict[str, set[str]] = {}
    for framework in SCRIPTS:
        for node in ast.parse(text_of(framework, "x.py")).body:
            if isinstance(node, ast.FunctionDef) and node.name != "main":
                found.setdefault(node.name, set()).add(ast.unparse(node))
    assert {"read_rows", "load"} <= set(found)
    assert [name for name, texts in found.items() if len(texts) > 1] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loup"], "unknown framework; got 'loup'.* did you mean 'loop'"),
        (["loop", "--output", "loop"], r"must be a Python file; got 'loop'; allowed: .* ends with \.py"),
        (["loop", "--output", 'a"""b.py'], "must be a Python file"),
        (["loop", "--seq-len", "5x"], "not a number of tokens; got '5x'"),
        (["loop", "--seq-len", "0"], "--seq-len"),
        (["loop", "--output", "missing/loop.py"], "--output cannot be written; .*No such file"),
    ],
)
def test_init_rejects_invalid_arguments(capsys, monkeypatch, tmp_path: Path, arguments: list[str], said: str):
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_scripts_save_to_different_folders():
    """Otherwise, the script of a second framework replaces the model of the first."""
    found = [re.findall(r'"--save", default="(\w+)"', text_of(name, "train.py")) for name in SAVING]
    assert found == [[f"trained_with_{name}"] for name in SAVING]


@pytest.mark.full
@pytest.mark.parametrize("framework", SAVING)
def test_script_gives_losses_of_one_rank(framework: str, tmp_path: Path):
    """Train three steps and save the model. torchtitan has no CPUs."""
    script = tmp_path / "train.py"
    script.write_text(text_of(framework, script.name))

    def losses(ranks: int, *more: str) -> list[float]:
        words = ["--steps", "3", "--seq-len", "301", "--save", str(tmp_path / "trained"), *more]
        starter = ["torch.distributed.run", "--nproc-per-node", ranks, script, *words]
        if framework == "lightning":
            starter = [script, "--devices", ranks, *words]
        done = run_program(starter[0], *starter[1:], timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
        return [float(x) for x in re.findall(r"'loss': '?([0-9.]+)|loss ([0-9.]+)", done.stdout) for x in x if x]

    alone, shared = losses(1), losses(2)
    assert len(alone) == 3
    assert shared == pytest.approx(alone, rel=2e-4 if framework == "trainer" else 2e-6)  # Trainer prints four digits
    assert (tmp_path / "trained" / "config.json").is_file()
