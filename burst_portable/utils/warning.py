"""Warn with the line of the program that called this package."""

from __future__ import annotations

import inspect
import warnings

_LIBRARIES = frozenset({"accelerate", "burst_portable", "torch", "transformers", "trl"})
"""Packages between the line of the program and a warning. Their lines do not show what to change."""


def warn_caller(message: str) -> None:
    """Warn (`UserWarning`) at the innermost line that is in none of `_LIBRARIES`, or at the outermost line.

    `stacklevel` of `warnings.warn` is a fixed number of calls, but a hook of a module or a cached call has any number.
    """
    frame = inspect.currentframe()
    assert frame is not None, "CPython has frames"
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES and frame.f_back is not None:
        frame = frame.f_back
    names, path = frame.f_globals, frame.f_code.co_filename
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, UserWarning, path, frame.f_lineno, names.get("__name__"), registry)
