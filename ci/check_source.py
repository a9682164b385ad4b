"""Check two rules about the package's source that neither import-linter nor ruff can express.

    python ci/check_source.py [PACKAGE_FOLDER]

1. No module outside `backends/<vendor>/` compares with a vendor's name or reads a flag such as `is_cuda`. It queries a
   capability of the backend.
2. No call of `import_module` names a module of the package literally, because import-linter sees statements only.

Print one line per violation, `file:line: what (rule)`, and exit with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "burst_portable"
SHARED_BACKEND_MODULES = {"__init__.py", "base.py", "selection.py"}
VENDOR_WORDS = {"cpu", "cuda", "hip", "rocm", "npu", "ascend", "xpu", "mps", "nvidia", "amd"}
VENDOR_FLAGS = {"is_cpu", "is_cuda", "is_npu", "is_xpu", "is_mps"}
CAPABILITY = "query a capability, not a vendor"
STATEMENT = "write an import statement, which import-linter sees"


def is_vendor(path: Path) -> bool:
    """Return whether a file, relative to the package, lies in the folder of a vendor."""
    return path.parts[0] == "backends" and path.parts[1] not in SHARED_BACKEND_MODULES


def vendor_word(node: ast.AST) -> str | None:
    """Return the vendor's name that an expression contains as a literal, or None."""
    for part in ast.walk(node):
        match part:
            case ast.Constant(value=str(text)) if text.partition(":")[0].lower() in VENDOR_WORDS:
                return text
    return None


def compared(node: ast.AST) -> list[ast.expr]:
    """Return the operands of a comparison, of `startswith` and of a `case`. Calls and subscripts are lookups."""
    match node:
        case ast.Compare(left=left, comparators=right):
            return [side for side in (left, *right) if not isinstance(side, ast.Call | ast.Subscript)]
        case ast.Call(func=ast.Attribute(attr="startswith"), args=[argument, *_]):
            return [argument]
        case ast.MatchValue(value=value):
            return [value]
    return []


def violations(tree: ast.Module, vendor: bool) -> Iterator[tuple[int, str, str]]:
    """Yield (line, what, rule)."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                is_import = ast.unparse(func) in ("importlib.import_module", "import_module", "__import__")
                if is_import and name.partition(".")[0] == PACKAGE:
                    yield node.lineno, f"imports {name!r}", STATEMENT
            case ast.Attribute(attr=flag) if flag in VENDOR_FLAGS and not vendor:
                yield node.lineno, f"reads .{flag}", CAPABILITY
        for side in () if vendor else compared(node):
            if word := vendor_word(side):
                yield side.lineno, f"compares with {word!r}", CAPABILITY


def check(package: Path) -> list[str]:
    """Return a line per violation, in order."""
    lines = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        found = sorted(set(violations(tree, is_vendor(path.relative_to(package)))))
        lines += [f"{path}:{line}: {what} ({rule})" for line, what, rule in found]
    return lines


def main(arguments: list[str]) -> int:
    """Print the violations in a package's folder and return the exit code."""
    package = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / PACKAGE
    if not package.is_dir():
        print(f"check_source: no such folder: {package}", file=sys.stderr)
        return 2
    lines = check(package)
    print(*lines, f"check_source: {len(lines)} violation{'' if len(lines) == 1 else 's'} in {package.name}", sep="\n")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
