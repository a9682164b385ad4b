"""Check that the map of a folder, a table in the docstring of its `__init__.py`, names its modules and no others."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "burst_portable"
RULE = re.compile(r"^=+ +=+$", re.MULTILINE)
NAME = re.compile(r"`(\w+)/?`")


def wrong_names(folder: Path) -> set[str]:
    """Return the modules and folders that a map does not name, and names in its first column that do not exist."""
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    if len(rules := list(RULE.finditer(text))) < 2:
        return set()
    table = text[rules[0].end() : rules[1].start()]
    width = rules[0].group().index(" ")
    first = {name for line in table.splitlines() for name in NAME.findall(line[:width])}
    found = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    found -= {"__init__"}
    return (found - set(NAME.findall(table))) | (first - found)


def test_maps_name_their_modules():
    maps = {folder.parent for folder in PACKAGE.rglob("__init__.py") if RULE.search(folder.read_text("utf-8"))}
    assert len(maps) >= 8
    assert {folder.name: wrong for folder in maps if (wrong := wrong_names(folder))} == {}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("`a`     one.\n`b/`    two.", set()),
        ("`a`     one, with `b`.", set()),
        ("`a`     one.", {"b"}),
        ("`a`     one.\n`b/`    two.\n`c`     three.", {"c"}),
    ],
)
def test_wrong_names_finds_planted_maps(tmp_path: Path, rows: str, expected: set[str]):
    (tmp_path / "b").mkdir()
    for name in ("a.py", "b/__init__.py"):
        (tmp_path / name).touch()
    rule = "======  ====="
    (tmp_path / "__init__.py").write_text(f'"""List.\n\n{rule}\n{rows}\n{rule}\n"""\n')
    assert wrong_names(tmp_path) == expected
