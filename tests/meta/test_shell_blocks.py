"""Check each command in the `sh` blocks of the pages, without running it.

- burst-portable: its options are parsed, with their values.
- torchrun: torch's own parser takes its options. srun: the program that it starts is checked.
- python, torchrun, sh: the module or file exists, and a module of this repository has the options.
- make, pip, docker: the target, extra or file exists.
- Other programs of a shell, an operating system or a cluster are in `OTHERS`. Any further program is an error.

`burst-portable` in backticks names commands and options that exist.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tomllib
from functools import cache
from itertools import groupby

import pytest
from torch.distributed.run import get_args_parser

from burst_portable.cli import app
from tests.meta.test_docs import EVERY_PAGE, ROOT, blocks, name_of, prose

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
OTHERS = {"source", ".", "export", "scontrol", "head", "python3.12"}
WRITTEN = {"train.py", "train_trainer.py"}  # by `burst-portable init`, or by the reader


def commands(text: str) -> list[list[str]]:
    """Return the words of each command of a block. Comments are left out, and lines that end with \\ are joined."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.whitespace_split = True
        for is_operator, words in groupby(reader, lambda word: set(word) <= set("();<>|&")):
            found += [] if is_operator else [list(words)]
    return found


def parse(arguments: list[str]) -> None:
    """Parse the options of a command as the program does, and raise for the first wrong one."""
    arguments = app.add_json_value(arguments)
    program = app.command_line(arguments)
    with program.make_context("burst-portable", list(arguments)) as context:
        if arguments[0].startswith("-"):
            return
        name, command, rest = program.resolve_command(context, arguments)
        with command.make_context(name, rest, parent=context):
            pass


@cache
def source_of(module: str) -> str:
    """Return the text of a module of the repository and of the modules that it imports from its folder."""
    path = ROOT / (module.replace(".", "/") + ".py")
    text = path.read_text(encoding="utf-8")
    folder = module.rpartition(".")[0]
    imported = re.findall(rf"from {re.escape(folder)}\.(\w+) import|from {re.escape(folder)} import (\w+)", text)
    beside = [path.parent / f"{one or other}.py" for one, other in imported]
    return text + "".join(file.read_text(encoding="utf-8") for file in beside if file.is_file())


def problem(words: list[str]) -> str:
    """Return what is wrong with a command, or an empty string."""
    while words and re.fullmatch(r"\w+=.*", words[0]):  # a variable of the environment
        words = words[1:]
    if not words:
        return ""
    program, arguments = words[0], words[1:]
    if program == "srun":
        return problem(arguments)
    if program == "torchrun" and (text := problem_of_torchrun(arguments)):
        return text
    if "burst_portable" in arguments and arguments[arguments.index("burst_portable") - 1] == "-m":
        program, arguments = "burst-portable", arguments[arguments.index("burst_portable") + 1 :]
    if program == "burst-portable":
        try:
            parse(arguments)
        except Exception as error:  # releases of typer differ in its class
            if not hasattr(error, "format_message"):
                raise
            return str(error.format_message())
    elif program == "make":
        targets = [word for word in arguments if "=" not in word]
        known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return "" if set(targets) <= set(known) else "no such target"
    elif program == "pip":
        for word in arguments:
            wanted = re.fullmatch(r"(?:\.|burst-portable)\[([\w,-]+)\]", word)
            if wanted and not set(wanted[1].split(",")) <= set(EXTRAS):
                return f"no extra {wanted[1]}"
    elif program == "docker":
        file = arguments[arguments.index("-f") + 1]
        return "" if (ROOT / file).is_file() else f"no file {file}"
    elif program in ("python", "torchrun", "sh"):
        return problem_of_script(arguments)
    elif program not in OTHERS:
        return f"unknown program {program}"
    return ""


def problem_of_torchrun(arguments: list[str]) -> str:
    """Return what torch's parser of torchrun rejects in the arguments, or an empty string."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        get_args_parser().parse_args(arguments)
    return printed.getvalue()


def problem_of_script(arguments: list[str]) -> str:
    """Return what is wrong with the module or file that Python or a shell runs, or an empty string."""
    if "-m" in arguments:
        module, *rest = arguments[arguments.index("-m") + 1 :]
        if module.split(".")[0] not in ("benchmarks", "backends", "tests"):
            return ""
        options = [word.partition("=")[0] for word in rest if word.startswith("--")]
        missing = [option for option in options if f'"{option}"' not in source_of(module)]
        return f"no option {missing}" if missing else ""
    files = [word for word in arguments if word.endswith((".py", ".sh")) and word not in WRITTEN]
    missing = [file for file in files if not (ROOT / file).is_file()]
    return f"no file {missing}" if missing else ""


def test_shell_commands_of_pages_can_be_parsed():
    found = {}
    for page in EVERY_PAGE:
        for block in blocks(page):
            for words in commands(block.text) if block.language == "sh" else []:
                if text := problem(words):
                    found[f"{name_of(page)}: {' '.join(words)}"] = text
    assert found == {}


def test_commands_in_prose_and_their_options_exist():
    program = app.command_line([])
    flags = {
        name: {"--help"} | {flag for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        for name, command in program.commands.items()
    }
    found = []
    for page in EVERY_PAGE:
        for text in re.findall(r"`burst-portable ([a-z-]+[^`]*)`", prose(page)):
            name, *words = text.split()
            options = {word for word in words if word.startswith("--")}
            found += [f"{name_of(page)}: {text}"] if options - flags[name] else []
    assert found == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("burst-portable plan --seq-len 64 --ranks 2 --lenght 3", "--lenght"),
        ("burst-portable run --ranks two", "not an integer"),
        ("burst-portable trian", "trian"),
        ("torchrun --nproc-per-node 2 -m burst_portable run --stepz 3", "--stepz"),
        ("torchrun --nproc-per-node 2 --nnodez 2 -m burst_portable run", "--nnodez"),
        ("srun torchrun --nnodes 2 -m burst_portable run --stepz 3", "--stepz"),
        ("mpirunn -n 2 burst-portable run", "unknown program mpirunn"),
        ("docker build -f backends/none/Containerfile .", "backends/none/Containerfile"),
        ("python -m benchmarks.attention --rowz full", "--rowz"),
        ("BURST_TIMEOUT=5 python examples/none.py", "examples/none.py"),
        ("make setup && make tset", "target"),
        ("pip install '.[cli,gpu]'", "gpu"),
    ],
)
def test_planted_mistake_is_found(line, text):
    assert text in " ".join(map(problem, commands(line)))
