"""Check that tests use public names of the package, and replace objects only through parameters and public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
REPLACED = {
    # The compiler makes only one of the two predictions of the saved tensors of a graph.
    ("runtime/test_graph_ops.py", "_keeps_copies"),
    # Counts the computed boxes, a cost that no result shows.
    ("planning/test_tiles.py", "_visible_box"),
}
"""(file, private name of the package that it replaces): three lines at most."""


def is_private(name: object) -> bool:
    parts = name.split(".") if isinstance(name, str) else []
    return any(part.startswith("_") and not part.startswith("__") for part in parts)


def private_names(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (line, name, whether it is replaced rather than imported) of the private names that a test uses."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "burst_portable":
                yield from ((node.lineno, alias.name, False) for alias in names if is_private(alias.name))
            case ast.Call(
                func=ast.Attribute(attr="setattr" | "delattr" | "object") | ast.Name(id="setattr"), args=args
            ):
                for argument in args[:2]:
                    if isinstance(argument, ast.Constant) and is_private(argument.value):
                        yield node.lineno, argument.value, True


def test_tests_replace_at_most_three_private_names():
    found = [
        (str(path.relative_to(TESTS)), name, line)
        for path in sorted(TESTS.rglob("*.py"))
        for line, name, is_replaced in private_names(path.read_text(encoding="utf-8"))
        if is_replaced
    ]
    assert [one for one in found if one[:2] not in REPLACED] == []
    assert len(found) <= 3


def test_tests_import_no_private_names():
    found = [
        f"{path.relative_to(TESTS)}:{line}: {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, name, is_replaced in private_names(path.read_text(encoding="utf-8"))
        if not is_replaced
    ]
    assert found == []


REPLACE = "monkeypatch.setattr"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f"{REPLACE}(tiles, '_box', len)", [(1, "_box", True)]),
        (f"{REPLACE}('burst_portable.mask._of', len)", [(1, "burst_portable.mask._of", True)]),
        ("mock.patch.object(tiles, '_box')", [(1, "_box", True)]),
        ("from burst_portable.mask import Mask, _parse", [(1, "_parse", False)]),
        (f"from torch._inductor import _config\n{REPLACE}(Mask, '__eq__', len)", []),
    ],
)
def test_private_names_finds_imports_and_replacements(source, expected):
    assert list(private_names(source)) == expected
