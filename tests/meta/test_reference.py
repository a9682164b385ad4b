"""Check that the API reference shows every public name, and only names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import burst_portable
from burst_portable import conformance, nn

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "reference").glob("*.md"))


class Directive(NamedTuple):
    """One `::: target` of a page: a module or an object, and the members that it shows; all if there are none."""

    target: str
    members: tuple[str, ...]


def directives() -> list[Directive]:
    found = []
    for page in PAGES:
        for block in re.split(r"^::: ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            target, _, options = block.partition("\n")
            found.append(Directive(target.strip(), tuple(re.findall(r"^ +- (\w+)$", options, re.MULTILINE))))
    return found


def resolved(target: str) -> object:
    """Return the module or object of a dotted name."""
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError:
        module, _, name = target.rpartition(".")
        return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("directive", directives(), ids=lambda directive: directive.target)
def test_directive_members_exist(directive):
    found = resolved(directive.target)
    assert [name for name in directive.members if not hasattr(found, name)] == []


@pytest.mark.parametrize("package", [burst_portable, conformance, nn], ids=lambda package: package.__name__)
def test_reference_shows_every_public_name(package):
    shown = {f"{d.target}.{member}" for d in directives() for member in d.members}
    whole = {d.target for d in directives() if not d.members}
    public = getattr(package, "__all__", None) or [n for n, x in vars(package).items() if _is_defined_in(x, package)]
    missing = []
    for name in public:
        found = getattr(package, name)
        home = getattr(found, "__module__", None)
        full = f"{home}.{name}"
        if not name.startswith("_") and not (full in shown | whole or home in whole):
            missing.append(full)
    assert missing == []


def _is_defined_in(found: object, package: object) -> bool:
    return getattr(found, "__module__", None) == package.__name__
