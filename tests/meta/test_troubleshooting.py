"""Check that docs/troubleshooting.md lists every error class and its base classes."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from burst_portable import errors

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
CLASSES = {name: one for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.BurstError)}


def listed() -> dict[str, list[str]]:
    """Return the rows of the page's table of errors: class -> names in the column "also a"."""
    rows = re.findall(r"^\| `(\w+Error)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: re.findall(r"`(\w+)`", also) for name, also in rows}


def test_page_lists_every_error_class():
    assert set(listed()) == set(CLASSES)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_page_names_bases_of_error_class(name):
    bases = [base.__name__ for base in CLASSES[name].__bases__]
    assert listed()[name] == [base for base in bases if base != "BurstError"]
