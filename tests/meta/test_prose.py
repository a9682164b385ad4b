"""Test the rules of ci/check_prose.py by planted violations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONG = "a " * 30 + "z"


def check_prose(*files: Path) -> tuple[int, list[str]]:
    """Run the script on files and return its exit code and lines."""
    command = [sys.executable, ROOT / "ci" / "check_prose.py", *files]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.py", 'def f():\n    """What the rank holds."""\n', ":2: f: What"),
        ("a.py", 'async def f():\n    """The rank."""\n', ":2: f: The"),
        ("a.py", f'"""{LONG}."""\n', ":1: 31 words"),
        ("a.py", f"# {LONG}.\n", ":1: 31 words"),
        ("a.py", f"x = 1\n# {' '.join(['word'] * 16)}\n# {' '.join(['word'] * 15)}.\n", ":2: 31 words"),
        ("a.py", f'def f():\n    """Return x.\n\n    Args:\n        x: {LONG}.\n    """\n', ":5: 32 words"),
        ("a.py", 'class A:\n    """The backend of its own."""\n', ":2: 'of its own'"),
        ("a.py", "x = 1  # nobody reads it\n", ":1: 'nobody'"),
        ("a.py", "x = 1  # synchronised\n", ":1: 'synchronised'"),
        ("test_a.py", f"def test_{'a' * 56}():\n    pass\n", ":2: test_aaa"),
        ("a.md", f"Text.\n\n{'a' * 101}\n", ":3: 101 characters"),
        ("a.md", f"Text.\n\n{LONG}.\n", ":3: 31 words"),
        ("a.md", f"- {LONG}.\n", ":1: 31 words"),
        ("a.md", "The kernel stands there.\n", ":1: 'stands'"),
    ],
)
def test_check_prose_finds_violation(tmp_path, name, text, found):
    file = tmp_path / name
    file.write_text(text)
    code, lines = check_prose(file)
    assert code == 1
    assert len(lines) == 2, lines
    assert lines[0].startswith(f"{file}{found}"), lines
    assert lines[1] == "check_prose: 1 violation"


def test_check_prose_accepts_good_language(tmp_path):
    """Code, tables, properties, special methods and tests are free."""
    python, page = tmp_path / "test_b.py", tmp_path / "b.md"
    python.write_text(
        f'"""Define x.\n\n    code = {LONG}\n\n{" ".join(["a"] * 30)}. One more.\n"""\n\n\nclass A:\n    @property\n'
        '    def rank(self):\n        """The rank."""\n\n    def __len__(self):\n        """Ranks."""\n\n\n'
        f'def test_rank():\n    """A rank."""\n    x = {LONG.split()!r}  # shapes\n    # Ranks\n    # of two nodes\n'
    )
    page.write_text(f"# Title\n\n```python\n{LONG}  # nobody\n```\n\n| {'word ' * 25}| {'word ' * 25}|\n\n`stands`\n")
    assert check_prose(python, page) == (0, ["check_prose: 0 violations"])
