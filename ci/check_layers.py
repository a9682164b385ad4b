"""Holds the import layers of burst_portable: lower never imports higher, and vendors stay in their folders.

    python ci/check_layers.py [PACKAGE_FOLDER]

Reads the source with `ast` and imports nothing of it. Imports inside functions, under `TYPE_CHECKING` and
through `importlib.import_module("a literal")` count like any other: where it is written makes no difference.
Prints one line a violation, `file:line: what (rule)`, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "burst_portable"

# From low to high. A module may import its own layer and those below. A name stands for a module and for all
# that lies under it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "config", "utils"),
    ("numerics",),
    ("mask", "layout"),
    ("planning",),
    ("strategies",),
    ("kernels",),
    ("comm",),
    ("backends",),
    ("mesh",),
    ("runtime",),
    ("sharding", "gradients"),
    ("api", "measuring"),
    ("profiling", "nn", ""),  # "" is burst_portable/__init__.py, which hands out the names of api, profile and nn
    ("conformance",),
    ("cli", "integrations", "__main__"),
)
LAYER_OF = {name: level for level, names in enumerate(LAYERS) for name in names}

# A plan is made, printed and checked where there is no torch and no process group.
PURE = (
    *("errors", "config", "utils.values", "utils.text", "utils.files"),
    *("mask", "layout", "planning", "strategies"),
)
PURE_NEVER = ("torch", "numpy", "triton", "transformers")

# The profiler installs itself through runtime; hot code knows nothing of it.
KNOW_NO_PROFILER = {"api", "runtime"}

# backends/<vendor>/ sees the contract and the tools that it is made of, nothing of who calls it.
VENDOR_MAY_IMPORT = ("backends.base", "kernels", "comm", "numerics", "planning.tiles", "errors", "utils")
SHARED_BACKEND_MODULES = {"base", "registry"}

ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}
VENDOR_WORDS = {"cpu", "cuda", "hip", "rocm", "npu", "ascend", "xpu", "mps", "nvidia", "amd"}
VENDOR_FLAGS = {"is_cpu", "is_cuda", "is_npu", "is_xpu", "is_mps"}


@dataclass(frozen=True)
class Violation:
    file: Path
    line: int
    what: str
    rule: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what} ({self.rule})"


def dotted(module: str) -> str:
    return f"{PACKAGE}.{module}" if module else PACKAGE


def layer(module: str) -> int | None:
    """The level of the longest listed name that holds the module; only the package itself is held by ""."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        if name in LAYER_OF:
            return LAYER_OF[name]
    return None


def is_under(module: str, folder: str) -> bool:
    return module == folder or module.startswith(folder + ".")


def is_pure(module: str) -> bool:
    return any(is_under(module, name) for name in PURE)


def vendor_of(module: str) -> str | None:
    """`cuda` for backends.cuda and all under it; None for what the vendors share."""
    parts = module.split(".")
    if len(parts) < 2 or parts[0] != "backends" or parts[1] in SHARED_BACKEND_MODULES:
        return None
    return parts[1]


@dataclass(frozen=True)
class Source:
    module: str  # dotted, without the package: "", "mask", "backends.cpu.backend"
    path: Path
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The package that `from . import x` means in this file."""
        return self.module if self.path.name == "__init__.py" else self.module.rpartition(".")[0]


def read(package: Path) -> list[Source]:
    sources = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sources.append(Source(module, path, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return sources


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) for each import; for `from a import b`, `a.b`."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = module or ""
                if level:
                    folder = dotted(source.folder).split(".")
                    base = ".".join(folder[: len(folder) - level + 1] + ([module] if module else []))
                yield from ((node.lineno, f"{base}.{name.name}") for name in names)
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(func) in ("importlib.import_module", "import_module", "__import__"):
                    yield node.lineno, name


def inside(name: str, modules: set[str]) -> str | None:
    """The module of the package that an absolute name stands for, or None for somebody else's."""
    if not is_under(name, PACKAGE):
        return None
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in modules:
        parts.pop()  # a class or a function: it is the module around it that is imported
    return ".".join(parts)


def check_internal_import(importer: str, target: str) -> str | None:
    """The rule that an import inside the package breaks, if any."""
    vendor, target_vendor = vendor_of(importer), vendor_of(target)
    if target_vendor is not None and target_vendor != vendor:
        return "a vendor is loaded by its entry point, and no other folder imports it"
    if vendor is not None:
        if target_vendor == vendor or any(is_under(target, name) for name in VENDOR_MAY_IMPORT):
            return None
        return f"a vendor imports only {', '.join(VENDOR_MAY_IMPORT)} and itself"
    if any(is_under(importer, name) for name in KNOW_NO_PROFILER) and is_under(target, "profiling"):
        return "api and runtime know nothing of the profiler, which installs itself through runtime"
    if is_pure(importer) and not is_pure(target):
        return f"planning is pure: it imports only {', '.join(PURE)}"
    here, there = layer(importer), layer(target)
    if here is not None and there is not None and there > here:
        return "lower never imports higher"
    return None


def check_imports(source: Source, modules: set[str]) -> Iterator[Violation]:
    for line, name in imports(source):
        target = inside(name, modules)
        if target is None:
            if is_pure(source.module) and name.split(".")[0] in PURE_NEVER:
                what = f"{dotted(source.module)} imports {name.split('.')[0]}"
                yield Violation(source.path, line, what, "planning is pure: no device library")
            continue
        rule = check_internal_import(source.module, target)
        if rule:
            yield Violation(source.path, line, f"{dotted(source.module)} imports {dotted(target)}", rule)


def check_environment(source: Source) -> Iterator[Violation]:
    if source.module == "config":
        return
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(attr=name) if name in ENVIRONMENT:
                names = [name]
            case ast.ImportFrom(module="os", names=aliases):
                names = [alias.name for alias in aliases if alias.name in ENVIRONMENT]
            case _:
                continue
        for name in names:
            what = f"{dotted(source.module)} uses os.{name}"
            yield Violation(source.path, node.lineno, what, "environment variables are read in config.py alone")


def vendor_word(node: ast.AST) -> str | None:
    """The vendor's name that a compared expression spells out, alone or in a literal collection."""
    for part in ast.walk(node):
        match part:
            case ast.Constant(value=str(text)) if text.partition(":")[0].lower() in VENDOR_WORDS:
                return text
    return None


def check_vendor_names(source: Source) -> Iterator[Violation]:
    if vendor_of(source.module) is not None:
        return
    for node in ast.walk(source.tree):
        found: list[tuple[int, str]] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                literals = [side for side in (left, *others) if not isinstance(side, ast.Call | ast.Subscript)]
                words = (vendor_word(side) for side in literals)
                found = [(node.lineno, f"compares with {word!r}") for word in words if word]
            case ast.Call(func=ast.Attribute(attr="startswith"), args=[argument, *_]):
                word = vendor_word(argument)
                found = [(node.lineno, f"compares with {word!r}")] if word else []
            case ast.MatchValue(value=value):
                word = vendor_word(value)
                found = [(value.lineno, f"compares with {word!r}")] if word else []
            case ast.Attribute(attr=attr) if attr in VENDOR_FLAGS:
                found = [(node.lineno, f"asks .{attr}")]
        for line, what in found:
            yield Violation(source.path, line, f"{dotted(source.module)} {what}", "ask a capability, not a vendor")


def check(package: Path) -> list[Violation]:
    sources = read(package)
    modules = {source.module for source in sources}
    violations = []
    for source in sources:
        if source.module and layer(source.module) is None:
            what = f"{dotted(source.module)} has no layer"
            violations.append(Violation(source.path, 1, what, "every module stands in LAYERS of ci/check_layers.py"))
        violations += check_imports(source, modules)
        violations += check_environment(source)
        violations += check_vendor_names(source)
    # A line that takes three names from one module breaks the rule once.
    return sorted(set(violations), key=lambda one: (one.file, one.line, one.what))


def main(arguments: list[str]) -> int:
    package = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent / PACKAGE
    if not package.is_dir():
        print(f"check_layers: no such folder: {package}", file=sys.stderr)
        return 2
    violations = check(package)
    for violation in violations:
        print(violation)
    print(f"check_layers: {len(violations)} violation{'' if len(violations) == 1 else 's'} in {package.name}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
