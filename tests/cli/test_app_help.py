"""Test the help of all commands: length of a sentence, stated defaults, examples, equal options."""

from __future__ import annotations

import inspect

import pytest

import burst_portable as bp
from burst_portable.cli import app, main
from burst_portable.cli.flags import DEFAULT_LAYOUT
from burst_portable.strategies.registry import known

MAX_WORDS = 15


def options_of(name: str) -> dict[str, object]:
    """Return the options and arguments of a command by flag or name."""
    command = app.command_line([name]).commands[name]
    return {option.opts[0]: option for option in command.params}


@pytest.mark.parametrize("name", app.COMMANDS)
def test_option_help_is_one_short_sentence_and_a_default(name):
    for flag, option in options_of(name).items():
        text, _, default = option.help.partition(" Default: ")
        sentence = text.partition(": ")[2] if text.startswith("For ") else text  # "For ring, burst: ..."
        names = sum(word.rstrip(",") in known() for word in sentence.split())  # of strategies, which may be many
        assert len(sentence.split()) - names <= MAX_WORDS, f"{flag}: {sentence}"
        assert sentence.endswith("."), flag
        has_value = not option.required and not (getattr(option, "is_flag", False) and not option.secondary_opts)
        assert bool(default) == has_value, f"{flag}: {option.help}"
        assert option.default is None or not option.show_default or not has_value, f"{flag} shows its default twice"


@pytest.mark.parametrize("name", app.COMMANDS)
def test_command_help_has_examples_and_exit_codes(name, capsys):
    assert main([name, "--help"]) == 0
    printed = capsys.readouterr().out
    assert "Examples:" in printed
    assert f"burst-portable {name}" in printed
    assert "Exit codes: 0 success" in printed


def test_equal_options_have_equal_defaults_and_help():
    shared = (
        "--layout",
        "--heads",
        "--kv-heads",
        "--ranks-per-node",
        "--strategy",
        "--backend",
        "--json",
        "--head-dim",
    )
    different = {
        ("conform", "--strategy"), ("conform", "--backend"),  # these name the tested object
        ("kernels", "--head-dim"), ("time-kernels", "--head-dim"), ("kernels", "--strategy"),  # these take several
        ("bench", "--heads"), ("bench", "--head-dim"),  # these defaults depend on the device
    }  # fmt: skip
    for flag in shared:
        defaults = {
            option.default
            for name in app.COMMANDS
            if (option := options_of(name).get(flag)) is not None and (name, flag) not in different
        }
        assert len(defaults) == 1, (flag, defaults)


def test_commands_and_functions_have_the_same_default_layout():
    functions = (bp.attention, bp.shard, bp.unshard, bp.plan, bp.local_position_ids, bp.nn.SelfAttention)
    assert {inspect.signature(function).parameters["layout"].default for function in functions} == {DEFAULT_LAYOUT}
    assert inspect.signature(bp.plan).parameters["kv_heads"].default is None
    assert options_of("measure")["--kv-heads"].default is None
