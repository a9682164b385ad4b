"""Test integer options, and lengths with a suffix such as `--seq-len 128k`."""

from __future__ import annotations

import json
from importlib import import_module
from inspect import signature
from typing import Annotated, get_args, get_type_hints

import pytest
import typer

from burst_portable.cli import main
from burst_portable.cli.app import COMMANDS as COMMANDS_BY_NAME
from burst_portable.cli.flags import integer_option, tokens
from burst_portable.errors import MaskError
from burst_portable.mask import Mask

COMMANDS = {"plan": ("--ranks", "2", "--heads", "2"), "run": (), "measure": ()}


@pytest.mark.parametrize(
    ("typed", "length"),
    [
        *(("131072", 131072), ("128k", 131072), ("128K", 131072), ("1m", 1048576), ("2M", 2097152), (4096, 4096)),
        *(("007k", 7168), ("0", 0), ("0k", 0), ("-5", -5)),
    ],
)
def test_tokens_parses_lengths(typed, length):
    assert tokens(typed) == length


@pytest.mark.parametrize("typed", ["4k", "4K", "4096"])
def test_plan_uses_parsed_length(capsys, typed):
    assert main(["plan", "--seq-len", typed, *COMMANDS["plan"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["problem"]["seq_len"] == 4096


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "typed",
    [
        *("1.5k", "k", "-1k", "128kb", "", "1kk", "1 k", "k1", "1g", "1_0k", "64.0", "٣k", "3\u212a"),
        *("1_000", "٣٢", "\uff13\uff12", " 64 ", "+64", "--64"),
    ],
)
def test_commands_reject_invalid_lengths(capsys, command, typed):
    assert main([command, "--seq-len", typed, *COMMANDS[command]]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("burst-portable: Invalid value for '--seq-len': not a number of tokens; got '")
    assert repr(typed) in said.err
    assert "k (times 1,024) or m (times 1,048,576)" in said.err
    assert said.err.count("\n") == 1


def test_tokens_rejects_thousands_of_digits_in_one_line():
    for typed in ("9" * 5000, "9" * 5000 + "k"):
        with pytest.raises(typer.BadParameter, match="not a number of tokens") as refused:
            tokens(typed)
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize(("typed", "told"), [("0k", "an int of at least 1"), ("999999999m", "an int below 2**48")])
def test_length_out_of_range_is_printed_as_number(capsys, typed, told):
    assert main(["plan", "--seq-len", typed, *COMMANDS["plan"]]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help_explains_length_suffixes(capsys, command):
    assert main([command, "--help"]) == 0
    assert "128k and 1m are 131072 and 1048576" in " ".join(capsys.readouterr().out.replace("│", " ").split())


NOT_DIGITS = ["1_000", "\u0663\u0662", "\uff13\uff12", " 64", "+64", "6.0", "0x10", "²", "9" * 5000]


def typer_integers(command) -> list[str]:
    """Return the options that typer parses as integers: it accepts underscores and digits of other scripts."""
    hints = get_type_hints(command, include_extras=True)
    found = []
    for name in signature(command).parameters:
        hint = hints.get(name)
        kind, options = (hint.__origin__, hint.__metadata__) if hasattr(hint, "__metadata__") else (hint, ())
        if _holds_int(kind) and not any(option.parser for option in options):
            found.append(name)
    return found


def _holds_int(kind: object) -> bool:
    return kind is int or any(map(_holds_int, get_args(kind)))


@pytest.mark.parametrize("name", COMMANDS_BY_NAME)
def test_commands_declare_integers_with_integer_option(name):
    module, _, function = COMMANDS_BY_NAME[name].partition(":")
    assert typer_integers(getattr(import_module(module), function)) == []


def test_typer_integers_finds_plain_options():
    def planted(
        bare: int | None = None,
        plain: Annotated[int, typer.Option()] = 1,
        ranged: Annotated[list[int] | None, typer.Option(min=1)] = None,
        ours: Annotated[int | None, integer_option(help="ours")] = 2,
        text: Annotated[str, typer.Option()] = "print",
    ) -> None: ...

    assert typer_integers(planted) == ["bare", "plain", "ranged"]


@pytest.mark.parametrize("typed", NOT_DIGITS)
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        *(("plan", "--heads"), ("plan", "--kv-heads"), ("plan", "--ranks"), ("plan", "--batch"), ("plan", "--rank")),
        *(("plan", "--ranks-per-node"), ("plan", "--max-memory-mib"), ("run", "--seed"), ("run", "--steps")),
        *(("measure", "--head-dim"), ("bench", "--heads"), ("conform", "--processes"), ("kernels", "--jobs")),
        *(("kernels", "--head-dim"), ("time-kernels", "--head-dim")),
    ],
)
def test_commands_reject_integers_of_other_characters(capsys, command, flag, typed):
    needed = ["--seq-len", "64", "--ranks", "2"] if command == "plan" else []
    assert main([command, *needed, flag, typed]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"burst-portable: Invalid value for '{flag}': not an integer; got '")
    assert "allowed: ASCII digits, as 1000" in said.err
    assert said.err.count("\n") == 1
    with pytest.raises(MaskError, match="cannot be read"):
        Mask.parse(f"prefix:{typed}")


def test_integer_option_states_range(capsys):
    for typed in ("0", "257", "-1"):
        assert main(["conform", "--processes", typed]) == 2
        error = capsys.readouterr().err
        assert f"Invalid value for '--processes': out of range; got '{typed}'; allowed: 1 to 256; see" in error
    assert main(["kernels", "--jobs", "0"]) == 2
    assert "out of range; got '0'; allowed: at least 1; see" in capsys.readouterr().err


@pytest.mark.parametrize("case", ["ranks=\uff12", "length=\u0663", "heads=\uff14x2x8x8", "batch=1_0"])
def test_conform_rejects_digits_of_other_scripts(capsys, case):
    assert main(["conform", "--backend", "cpu", "--case", f"attention:{case}"]) == 2
    assert "; got '" in capsys.readouterr().err
