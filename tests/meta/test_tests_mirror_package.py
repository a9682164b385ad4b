"""Check that the tests of a module are in the mirrored path `tests/<folder>/test_<module>.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "burst_portable", ROOT / "tests"
OTHER = {"benchmarks", "device", "integration", "meta", "support"}
"""Folders of tests that mirror no folder of the package."""


def modules(package: Path, folder: Path) -> set[str]:
    """Return the names of the modules whose tests belong in a folder, given relative to tests/."""
    if folder == Path():
        return set()
    home = package if folder == Path("api") else package / folder
    return {path.stem for path in home.glob("*.py")} - {"__init__"}


def misplaced(tests: Path, package: Path) -> list[str]:
    """Return the test files whose name begins with no module of the mirrored folder of the package."""
    found = []
    for path in sorted(tests.rglob("test_*.py")):
        folder = path.relative_to(tests).parent
        if folder.parts and folder.parts[0] in OTHER:
            continue
        name = path.stem.removeprefix("test_")
        if not any(name == module or name.startswith(f"{module}_") for module in modules(package, folder)):
            found.append(str(path.relative_to(tests)))
    return found


def untested(tests: Path, package: Path) -> list[str]:
    """Return the folders of the package that have a module of more than 150 lines and no test file."""
    found = []
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        at = folder.relative_to(package)
        long = any(len(path.read_text(encoding="utf-8").splitlines()) > 150 for path in folder.glob("*.py"))
        if long and not any((tests / ("api" if at == Path() else at)).glob("test_*.py")):
            found.append(str(at))
    return found


def test_test_files_mirror_modules():
    assert misplaced(TESTS, PACKAGE) == []


def test_package_folders_have_tests():
    # The checks are tested with planted bugs, through the suite that runs them.
    assert untested(TESTS, PACKAGE) == ["conformance/checks"]


def test_helpers_are_in_support_folder():
    helpers = {path.relative_to(TESTS) for path in TESTS.rglob("*.py")}
    outside = {path for path in helpers if path.parts[0] != "support" and not path.name.startswith("test_")}
    assert {path.name for path in outside} == {"conftest.py"}


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        ("comm/test_base.py", False),
        ("comm/test_base_errors.py", False),
        ("api/test_mask.py", False),
        ("meta/test_anything.py", False),
        ("comm/test_bases.py", True),
        ("comm/test_mask.py", True),
        ("api/test_base.py", True),
        ("test_mask.py", True),
    ],
)
def test_misplaced_finds_planted_files(tmp_path: Path, test: str, wrong: bool):
    for path in ("package/mask.py", "package/comm/base.py", "package/comm/__init__.py", f"tests/{test}"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    assert misplaced(tmp_path / "tests", tmp_path / "package") == ([test] if wrong else [])


def test_untested_finds_planted_folder(tmp_path: Path):
    (tmp_path / "package" / "comm").mkdir(parents=True)
    (tmp_path / "package" / "comm" / "base.py").write_text("x = 1\n" * 151)
    assert untested(tmp_path / "tests", tmp_path / "package") == ["comm"]
    (tmp_path / "tests" / "comm").mkdir(parents=True)
    (tmp_path / "tests" / "comm" / "test_base.py").touch()
    assert untested(tmp_path / "tests", tmp_path / "package") == []
