"""Read which arguments the forward of a module takes, and where a function is defined."""

from __future__ import annotations

import inspect
from typing import Any


def parameters_of(module: Any) -> list[str]:
    """Return the argument names of a module's forward, in order."""
    return list(inspect.signature(module.forward).parameters)


def takes(module: Any, name: str) -> bool:
    """Return whether a module's forward accepts an argument of that name."""
    parameters = inspect.signature(module.forward).parameters
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def is_of_transformers(function: Any) -> bool:
    """Return whether Transformers defines a function. One that wraps it has its `__module__`, but other globals."""
    name: str = getattr(function, "__globals__", {}).get("__name__", "")
    return name.startswith("transformers.")
