"""Check code of a page without running it: its imports, the names that it uses, and the arguments of its calls.

What a call returns is known if the function is a class. Attributes and calls of other values are not checked.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

ANY = object()
"""A value of which nothing is known."""


@dataclass(frozen=True)
class Instance:
    """Some object of a class."""

    of: type


@dataclass(frozen=True)
class Named:
    """Names that the reader's program has before a block: imports, as code, and further names, separated by spaces."""

    imports: str = ""
    names: str = ""

    def problems(self, code: str, modules: Mapping[str, object]) -> list[str]:
        """Return what is wrong with the names and calls of the block."""
        return problems(f"{self.imports}\n{code}", dict.fromkeys(self.names.split(), ANY), modules)


def problems(code: str, names: Mapping[str, object], modules: Mapping[str, object] | None = None) -> list[str]:
    """Return what is wrong with the names and calls of some code.

    Args:
        code: The code.
        names: Names that it may use, with their values. `ANY` if nothing is known of the value.
        modules: Modules by name, which are used instead of installed ones.
    """
    reader = _Reader(dict(names), modules or {})
    for statement in ast.parse(code).body:
        reader.visit(statement)
    return reader.found


class _Reader(ast.NodeVisitor):
    def __init__(self, names: dict[str, object], modules: Mapping[str, object]) -> None:
        self.names, self.modules, self.found = names, modules, list[str]()

    def module(self, name: str) -> object:
        try:
            return self.modules[name] if name in self.modules else import_module(name)
        except ImportError as error:
            self.found.append(str(error))
            return ANY

    def attribute(self, value: object, name: str) -> object:
        if value is ANY:
            return ANY
        if isinstance(value, Instance):  # an attribute that its methods set is unknown
            return getattr(value.of, name, ANY)
        if not hasattr(value, name):
            self.found.append(f"{getattr(value, '__name__', value)} has no {name}")
        return getattr(value, name, ANY)

    # ------------------------------------------------------------------------------------------- statements

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            module = self.module(one.name)
            self.names[one.asname or one.name.partition(".")[0]] = module if one.asname or "." not in one.name else ANY

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = self.module(node.module or "")
        for one in node.names:
            self.names[one.asname or one.name] = self.attribute(module, one.name)

    def visit_Assign(self, node: ast.Assign) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self.bind(target, value)

    def visit_For(self, node: ast.For) -> None:
        self.value(node.iter)
        self.bind(node.target, ANY)
        for statement in node.body:
            self.visit(statement)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, ANY)
        for statement in node.body:
            self.visit(statement)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            self.value(decorator)
        arguments = {argument.arg: ANY for argument in node.args.args}
        with self.inner(arguments):
            for statement in node.body:
                self.visit(statement)
        self.names[node.name] = ANY

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self.value(base)
        with self.inner({}):
            for statement in node.body:
                self.visit(statement)
        self.names[node.name] = ANY

    def visit_Expr(self, node: ast.Expr) -> None:
        self.value(node.value)

    def generic_visit(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self.value(child) if isinstance(child, ast.expr) else self.visit(child)

    @contextmanager
    def inner(self, names: dict[str, object]) -> Iterator[None]:
        before, self.names = self.names, {**self.names, **names}
        yield
        self.names = before

    def bind(self, target: ast.expr, value: object) -> None:
        if isinstance(target, ast.Name):
            self.names[target.id] = value
        elif isinstance(target, ast.Tuple):
            for one in target.elts:
                self.bind(one, ANY)
        else:
            self.value(target)

    # ------------------------------------------------------------------------------------------ expressions

    def value(self, node: ast.AST) -> object:
        if isinstance(node, ast.Name):
            if node.id not in self.names and not hasattr(builtins, node.id):
                self.found.append(f"no name {node.id}")
            return self.names.get(node.id, getattr(builtins, node.id, ANY))
        if isinstance(node, ast.Attribute):
            return self.attribute(self.value(node.value), node.attr)
        if isinstance(node, ast.Call):
            return self.call(node)
        if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.DictComp)):
            with self.inner({}):
                for part in node.generators:
                    self.value(part.iter)
                    self.bind(part.target, ANY)
                for child in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                    self.value(child)
            return ANY
        for child in ast.iter_child_nodes(node):
            self.value(child)
        return ANY

    def call(self, node: ast.Call) -> object:
        function = self.value(node.func)
        if function is ANY and isinstance(node.func, ast.Attribute):
            owner = self.quiet(node.func.value)
            known = isinstance(owner, Instance) and not hasattr(owner.of, "UNKNOWN_BASES")
            if known and not hasattr(owner.of, node.func.attr):
                self.found.append(f"{owner.of.__name__} has no {node.func.attr}")
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.value(argument)
        if isinstance(function, Instance) and callable(function.of):
            function = getattr(function.of, "forward", function.of.__call__)  # type: ignore[operator]
            bound = True
        else:
            bound = isinstance(node.func, ast.Attribute) and isinstance(self.quiet(node.func.value), Instance)
        if function is ANY:
            return ANY
        self.check(function, node, bound)
        return Instance(function) if isinstance(function, type) else ANY

    def quiet(self, node: ast.expr) -> object:
        """Return a value without adding to the problems, which were found before."""
        count = len(self.found)
        value = self.value(node)
        del self.found[count:]
        return value

    def check(self, function: Any, node: ast.Call, bound: bool) -> None:
        several = any(isinstance(argument, ast.Starred) for argument in node.args)
        if several or any(keyword.arg is None for keyword in node.keywords):
            return  # their number is unknown
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            return
        first = [ANY] if bound and not inspect.ismethod(function) else []
        try:
            signature.bind(*first, *node.args, **{str(keyword.arg): ANY for keyword in node.keywords})
        except TypeError as error:
            self.found.append(f"{getattr(function, '__qualname__', function)}: {error}")
