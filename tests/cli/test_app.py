"""Test that invalid usage prints one line on stderr, without a traceback, and exits with 2."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

from burst_portable import __version__, errors
from burst_portable.cli import app, main

GOOD = ("plan", "--seq-len", "64", "--ranks", "2", "--heads", "4")


def refused(capsys, *arguments: str, code: int = 2, commands=None) -> str:
    assert main(arguments, commands) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("burst-portable: ")
    assert captured.err.count("\n") == 1, captured.err
    assert "Traceback" not in captured.err
    assert len(captured.err) < 1000
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--strategy", "rng"), ["unknown strategy", "'rng'", "double_ring", "did you mean 'ring'"]),
        (("--strategy", "ring+direct"), ["options of a strategy are malformed", "ring(OPTION=VALUE, OPTION=VALUE)"]),
        (("--layout", "zigzig"), ["unknown layout", "contiguous", "did you mean 'zigzag'"]),
        (("--mask", "casual"), ["unknown mask", "sink", "did you mean 'causal'"]),
        (("--dtype", "float23"), ["unknown dtype", "bfloat16", "did you mean 'float"]),
        (("--strategy", "ring", "--transfer", "dirct"), ["unknown way to transfer blocks", "did you mean 'direct'"]),
        (("--strategy", "double_ring", "--backward-circulates", "v"), ["unknown side to circulate", "kv, q"]),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_unknown_names_suggest_similar_names(capsys, arguments, said):
    message = refused(capsys, *GOOD, *arguments)
    assert all(part in message for part in said), message


@pytest.mark.parametrize("value", ["0", "-3"])
@pytest.mark.parametrize(
    "option",
    [
        *("--seq-len", "--ranks", "--heads", "--kv-heads", "--head-dim", "--v-head-dim", "--batch", "--ranks-per-node"),
        *("--tflops", "--intra-node-bandwidth", "--inter-node-bandwidth", "--show-steps"),
    ],
)
def test_sizes_below_one_are_rejected(capsys, option, value):
    message = refused(capsys, *GOOD, option, value)
    assert option.strip("-").replace("-", "_") in message.replace("-", "_")
    assert "allowed" in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tflops", "nan"), ["--tflops", "nan"]),
        (("--rank", "2"), ["no such rank", "0 to 1"]),
        (("--rank", "-1"), ["no such rank", "0 to 1"]),
        (("--kv-heads", "3"), ["not a multiple", "4 and 3"]),
        (("--ranks", "65"), ["more ranks than tokens", "at most 64"]),
        (("--mask", "documents:0,40,80"), ["longer than the sequence", "up to 80", "64 tokens"]),
        (("--mask", "documents:0,40,30"), ["cumulative", "strictly increasing"]),
        (("--mask", "window:many"), ["cannot be read", "window:LEFT[:RIGHT]"]),
        (("--mask", "window:-1"), ["out of range", ">= 0"]),
        (("--layout", "document_zigzag", "--mask", "sink:4:8"), ["needs a mask of documents"]),
        (("--strategy", "ulysses", "--heads", "3"), ["cannot divide these heads", "3 query", "2 ranks", "'ring'"]),
        (("--strategy", "double_ring", "--ranks-per-node", "3"), ["does not divide", "ranks_per_node=3", "1, 2"]),
        (("--strategy", "ring", "--ranks-per-node", "3"), ["does not divide", "ranks_per_node=3", "1, 2"]),
        (
            ("--strategy", "usp", "--ranks-per-node", "2", "--heads", "3"),
            [
                "cannot divide these heads among the ranks of a node",
                "3 query",
                "ranks_per_node=2",
                "ranks_per_node of 1 on 2 ranks",
                "'double_ring'",
            ],
        ),
        (
            ("--strategy", "auto", "--transfer", "direct"),
            ["'auto' has no --transfer", "--strategy ring or burst or usp"],
        ),
        (
            ("--strategy", "ulysses", "--backward-circulates", "kv"),
            ["'ulysses' has no --backward-circulates", "--strategy double_ring"],
        ),
        (
            ("--strategy", "ring", "--inter-node-bandwidth", "50"),
            ["--inter-node-bandwidth requires several nodes", "--ranks-per-node"],
        ),
        (("out.json",), ["unexpected extra argument", "out.json"]),
        (("--json", "/no/such/folder/plan.json"), ["--json cannot be written", "No such file"]),
        (("--json", "/dev/full"), ["--json cannot be written", "No space left"]),
        (("--json", "/"), ["--json names a folder"]),
        (("--json", ""), ["--json names no file"]),
        (("--check-all", "--no-check"), ["exclude each other"]),
        (("--kv-heads", "3"), ["kv_heads a divisor"]),
        (("--head-dim", "1025"), ["head_dim is too large", "at most 1024"]),
        (("--v-head-dim", "1025"), ["v_head_dim is too large", "at most 1024"]),
        (("--seq-len", str(1 << 60)), ["seq_len is not a size", "below 2**48"]),
        (("--seq-len", "1000000", "--ranks", "16385"), ["too many ranks", "16384"]),
        (("--heads", "9" * 400), ["heads is not a size"]),
        (("--seq-len", "1000000000", "--mask", "block_causal:1"), ["gives too many blocks"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_conflicting_options_are_rejected(capsys, arguments, said):
    assert main([*GOOD, *arguments]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(part in message for part in said), message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--seq-len", "64"), "'--ranks'"),
        ((*GOOD, "--batch", "two"), "'--batch'"),
        ((*GOOD, "--frob"), "--frob"),
        (("--frob",), "--frob"),
        (("plann",), "'plan'"),
        (("doctor", "--jason"), "--json"),
        (("conform", "--case", "attention:"), " more"),
        (("conform", "--kernel", "nope"), "cpu_flash"),
        (("kernels", "--target", "sm_1"), "sm_90"),
    ],
)
def test_mistyped_options_suggest_correct_option(capsys, arguments, said):
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", "--seq-len", "64"), "see `burst-portable plan --help`"),
        (("trace",), "see `burst-portable trace --help`"),
        (("plann",), "Did you mean 'plan'? see `burst-portable --help`"),
    ],
)
def test_mistyped_option_names_help_of_command(capsys, arguments, said):
    assert said in refused(capsys, *arguments)


def test_value_of_wrong_type_is_quoted(capsys):
    for arguments in (("run", "--lr", "fast"), ("run", "--lr=fast"), ("compare", "a", "b", "--threshold", "fast")):
        assert "'fast'" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InputError("no\nsuch   text"), 2),
        (errors.DtypeError("no such text"), 2),
        (errors.UnsupportedError("no such text"), 2),
        (errors.BackendUnavailableError("no such text"), 2),
        (errors.CommunicationTimeoutError("no such text"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_burst_errors_are_one_line(capsys, error, code):
    assert refused(capsys, "fails", code=code, commands=failing(error)) == "burst-portable: no such text\n"


def failing(error: BaseException) -> dict[str, app.Command]:
    """Return the one command `fails`, which raises an error."""

    def fails() -> None:
        raise error

    return {"fails": fails}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()], ids=lambda value: type(value).__name__)
def test_interruption_prints_nothing(capsys, error):
    assert main(["fails"], failing(error)) == 130
    assert not capsys.readouterr().out


def test_unexpected_error_keeps_traceback():
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["fails"], failing(ZeroDivisionError("ours")))


def test_version_and_help(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"burst-portable {__version__}\n"
    for arguments in ([], ["--help"], ["-h"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(name in out for name in app.COMMANDS)


def test_module_runs_command():
    command = [sys.executable, "-m", "burst_portable", "plan", "--seq-len", "0", "--ranks", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "burst-portable: seq_len is not a size; got 0; allowed: an int of at least 1\n"
    assert not done.stdout


def test_missing_typer_names_cli_extra():
    source = (
        "import importlib.util, sys\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name: None if name == 'typer' else find(name)\n"
        "from burst_portable.cli import main\nsys.exit(main(['plan']))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "burst-portable: the command line needs typer; in the clone, run: pip install '.[cli]'\n"
