"""Run every example of the documentation and compare its output with the page.

- `python`: run. The blocks of a page share their names.
- `output`: compared exactly with the output of the python block before it.
- `console`: the lines `$ burst-portable ...` are run. The lines below must occur in the output, in order. `...`
  replaces omitted lines, and the width of spaces does not count.
- `py`: a part of a program, run on two ranks with the names of tests/support/page_ranks.py. If it needs a device or a
  package of the reader, its imports, names and calls are checked instead.
- `diff`: run or checked by test_migration.py.
- `sh`: programs and options are checked by test_shell_blocks.py.
- `toml`: parsed; it registers an entry point of a group that the library reads.
- `text`: no code, so it is not run.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from burst_portable.backends.selection import GROUP as BACKENDS
from burst_portable.cli import main
from burst_portable.strategies.registry import GROUP as STRATEGIES
from burst_portable.strategies.registry import OURS
from tests.support.code_names import Named
from tests.support.fork_server import run_program
from tests.support.other_libraries import stand_ins
from tests.support.page_ranks import EXAMPLES, fences

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = ("docs", "backends", "benchmarks", "examples", "profiling")  # all folders with pages
EVERY_PAGE = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))])
# [text](target), [name]: target, src="target"; not of other hosts
LINK = re.compile(r"""(?:\]\(|^\[[^\]]+\]: +|(?:src|srcset)=")(?!https?://)([^)\s"]+)""", re.MULTILINE)
LANGUAGES = {"python", "py", "output", "console", "text", "sh", "toml", "diff"}


def name_of(page: Path) -> str:
    """Return the path of a page from the root of the repository."""
    return str(page.relative_to(ROOT))


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    source = page.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(.*)\n((?s:.*?))^```$", source, re.MULTILINE)
    return [Block(f[1], source.count("\n", 0, f.start()) + 2, f[2]) for f in fences]


def prose(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return GitHub's anchors of a page: lower case, hyphens for spaces, and a number for repeated headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        found.append(f"{name}-{again}" if (again := found.count(name)) else name)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_python_blocks_run(page):
    names = {"__name__": page.stem}
    for block, following in pairwise([*blocks(page), Block("", 0, "")]):
        if block.language != "python":
            continue
        # Empty lines in front, so that a failure names the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        if following.language == "output":
            assert printed.getvalue() == following.text


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name_of)
@pytest.mark.usefixtures("ranks_are_forked")
def test_page_console_blocks_match_commands(page, capsys):
    for block in blocks(page):
        if block.language != "console":
            continue
        for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, *expected = part.splitlines()
            program, *arguments = shlex.split(command)
            assert program == "burst-portable"
            assert main(arguments) == 0
            printed = iter([" ".join(line.split()) for line in capsys.readouterr().out.splitlines()])
            for line in expected:
                if line not in ("...", ""):
                    assert " ".join(line.split()) in printed, f"{page.name}, below `{command}`: {line}"


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_page_links_and_anchors_exist(page):
    for target in LINK.findall(re.sub(r"`[^`\n]+`", "", prose(page))):
        path, _, anchor = "".join(target).partition("#")
        there = page.parent / path if path else page
        assert there.exists(), path
        assert not anchor or anchor in anchors(there), anchor


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_page_code_fences_have_known_languages(page):
    assert {block.language for block in blocks(page)} <= LANGUAGES


def test_every_py_block_has_an_example():
    counts = {name_of(page): sum(block.language == "py" for block in blocks(page)) for page in EVERY_PAGE}
    assert {name: count for name, count in counts.items() if count} == {
        f"docs/{name}": len(examples) for name, examples in EXAMPLES.items()
    }


def named_blocks():
    return [
        pytest.param(example, code, id=f"{page}-{number}")
        for page, examples in EXAMPLES.items()
        for number, (example, code) in enumerate(zip(examples, fences(page, "py"), strict=True))
        if isinstance(example, Named)
    ]


@pytest.mark.parametrize(("example", "code"), named_blocks())
def test_py_block_has_existing_names_and_calls(example, code):
    assert example.problems(code, stand_ins()) == []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_text_blocks_contain_no_python(page):
    """A block of Python that is marked `text` would escape the tests."""
    for block in blocks(page):
        if block.language == "text":
            with pytest.raises(SyntaxError):
                ast.parse(block.text.replace(", ...", ""))


def test_toml_blocks_register_known_groups():
    groups = {BACKENDS, STRATEGIES}
    found = [block.text for page in EVERY_PAGE for block in blocks(page) if block.language == "toml"]
    assert {group for text in found for group in tomllib.loads(text)["project"]["entry-points"]} == groups


@pytest.mark.slow
def test_page_py_blocks_run_on_two_ranks(tmp_path):
    done = run_program("tests.support.ranks_of", 2, "tests.support.page_ranks", tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(("name", "most"), [("README.md", 149), ("CHANGELOG.md", 39)])
def test_first_pages_are_short(name, most):
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    assert len(lines) <= most
    assert max(map(len, lines)) <= 100


def readme_script(name: str) -> str:
    """Return the script of the README that its first line calls `name`."""
    first = f"# torchrun --nproc-per-node \\d+ {name}\n"
    (script,) = [block.text for block in blocks(ROOT / "README.md") if re.match(first, block.text)]
    return script


def run_as_rank_0(script: str, folder: Path) -> str:
    """Return what a script prints in a process that looks like the only one that torchrun has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    done = run_program(path, environment={**os.environ, **group})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_readme_example_equals_plain_attention(tmp_path):
    script = (
        readme_script("example.py")
        + """
x = [x.transpose(1, 2).requires_grad_() for x in full]
plain = torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True, enable_gqa=True)
plain.sum().backward()
results = [(out, plain), *((a.grad, b.grad) for a, b in zip((q, k, v), x))]
print(*((a - bp.shard(b.transpose(1, 2), mesh)).abs().max().item() < 1e-4 for a, b in results))
dist.destroy_process_group()
"""
    )
    assert run_as_rank_0(script, tmp_path) == "rank 0: (1, 4096, 8, 64)\nTrue True True True\n"


@pytest.mark.slow
def test_readme_training_runs_on_cpu(tmp_path):
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    script = readme_script("train.py")
    for of_gpus, of_cpus in (
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n', ""),
        ('"nccl"', '"gloo"'),
        ('"path/to/llama"', repr(str(tmp_path))),
        ("import os, torch", "import os; import torch; batches = [torch.arange(48).unsqueeze(0)] * 5; import torch"),
        ("lr=1e-5", "lr=1e-2"),
        ("    optimizer.step()\n", "    optimizer.step()\n    print(loss.item())\n"),
    ):
        assert of_gpus in script
        script = script.replace(of_gpus, of_cpus)
    losses = [float(line) for line in run_as_rank_0(script + "dist.destroy_process_group()\n", tmp_path).split()]
    assert len(losses) == 5
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("script", ["make_images", "make_diagrams", "make_strategy_images"])
def test_pictures_match_their_scripts(script):
    command = [sys.executable, f"ci/{script}.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, check=False)
    assert done.returncode == 0, f"run PYTHONPATH=. python ci/{script}.py"


@pytest.mark.parametrize("name", [name for name in OURS if name != "auto"])
def test_strategies_page_has_section_with_picture(name):
    page = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")
    _, found, section = page.partition(f"\n### `{name}`\n")
    section = section.partition("\n##")[0]
    assert found, "docs/strategies.md has no section for it"
    assert f"[`{name}`](#{name})" in page.partition("\n## ")[0], "the first table has no link to the section"
    for part in (f"](images/strategies/{name}.svg)", "**Take it if**", f"<!-- table bench-{name} -->", "**Numbers.**"):
        assert part in section
