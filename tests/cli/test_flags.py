"""Test lengths with a suffix, such as `--seq-len 128k`."""

from __future__ import annotations

import json

import pytest
import typer

from burst_portable.cli import main
from burst_portable.cli.flags import tokens

COMMANDS = {"plan": ("--ranks", "2", "--heads", "2"), "run": (), "measure": ()}


@pytest.mark.parametrize(
    ("typed", "length"),
    [
        *(("131072", 131072), ("128k", 131072), ("128K", 131072), ("1m", 1048576), ("2M", 2097152), (4096, 4096)),
        *((" 64 ", 64), ("+64", 64), ("1_024", 1024), ("007k", 7168), ("0", 0), ("0k", 0), ("-5", -5)),
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
    "typed", ["1.5k", "k", "-1k", "128kb", "", "1kk", "1 k", "k1", "1g", "1_0k", "64.0", "٣k", "3\u212a"]
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
