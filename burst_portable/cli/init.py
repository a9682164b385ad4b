"""Define `burst-portable init`, which writes a training script for one of several frameworks.

A script is copied whole to where a user edits it, so it imports nothing from the other ones. What several scripts do,
each has: a test compares them.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from burst_portable.cli.flags import LENGTH, tokens_option
from burst_portable.cli.output import JsonName, JsonOption, check_file, console, labelled, writing
from burst_portable.errors import InputError, unknown_name
from burst_portable.utils.values import size

SCHEMA = "burst_portable.init/1"
_NAME = "SCRIPT.py"
"""Stands for the name of the script in its docstring."""


class Script(NamedTuple):
    """A script, the package that it needs, and the extra of this library that installs it."""

    title: str
    package: str
    extra: str

    def is_installed(self) -> bool:
        """Return whether the package can be imported."""
        return find_spec(self.package) is not None


SCRIPTS = {
    "trainer": Script("Transformers' Trainer", "accelerate", "transformers"),
    "loop": Script("a training loop without a framework, with FSDP2", "transformers", "transformers"),
    "lightning": Script("Lightning", "lightning", "lightning"),
    "torchtitan": Script("torchtitan, on GPUs", "torchtitan", "torchtitan"),
}


def text_of(framework: str, file_name: str, seq_len: int | None = None) -> str:
    """Return the text of a script with the name of its file and, unless it is None, its default of `--seq-len`."""
    path = Path(__file__).with_name("scripts") / f"{framework}_script.py"
    text = path.read_text(encoding="utf-8").replace(_NAME, file_name)
    return text if seq_len is None else re.sub(r'("--seq-len", .*default=)\d+', rf"\g<1>{seq_len}", text)


def init(
    framework: Annotated[str, typer.Argument(help=f"{', '.join(SCRIPTS)}.")],
    output: Annotated[
        str | None, typer.Option(help="Python file to write; it must not exist. Default: train_FRAMEWORK.py.")
    ] = None,
    seq_len: Annotated[
        int | None,
        tokens_option(help=f"Tokens of a sequence; {LENGTH} Default: that of the script."),
    ] = None,
    json_name: JsonName = None,
) -> int:
    """Write a training script in which several ranks share each sequence.

    The script runs as it is: a small model with random weights learns bytes of an English text, on GPUs, or on CPUs if
    there are none (torchtitan needs GPUs). Options of the script name a model, a text and the length of the sequences.

    Examples:

    burst-portable init trainer

    burst-portable init lightning --output train.py

    burst-portable init loop --seq-len 512k
    """
    if framework not in SCRIPTS:
        raise unknown_name("framework", framework, SCRIPTS)
    if seq_len is not None:
        size("--seq-len", seq_len)
    path = Path(f"train_{framework}.py" if output is None else output)
    if not re.fullmatch(r"[\w.-]+\.py", path.name):
        allowed = "a name of letters, digits, '.', '_' and '-' that ends with .py"
        raise InputError("--output must be a Python file", got=repr(path.name), allowed=allowed)
    if path.exists():
        next_step = "pass another name to --output, or remove the file"
        raise InputError("the script exists already", got=str(path), next_step=next_step)
    check_file(path, "--output")
    json_option = JsonOption(json_name)
    script, text = SCRIPTS[framework], text_of(framework, path.name, seq_len)
    commands = [line for line in text.split('"""')[1].splitlines() if line.startswith(("python ", "torchrun "))]
    with writing(path), path.open("x", encoding="utf-8") as file:
        file.write(text)
    needs = f"burst-portable[{script.extra}]"
    facts = {"schema": SCHEMA, "framework": framework, "file": str(path), "needs": needs, "commands": commands}
    json_option.write(facts)
    out = console(quiet=json_option.stdout)
    out.print(labelled("wrote", f"{path}, for {script.title}"))
    out.print(labelled("run", "\n".join(commands)))
    if not script.is_installed():
        out.print(labelled("install", f"pip install '{needs}'"))
    return 0
