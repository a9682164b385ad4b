"""Define every error that this library raises on purpose. docs/troubleshooting.md describes what to do about each."""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate


class BurstError(Exception):
    """The base class: ``except BurstError`` catches every error that this library raises on purpose.

    Args:
        what: What is wrong.
        got: The value that was given.
        allowed: The values that are allowed.
        next_step: What to do next.
    """

    def __init__(
        self, what: str = "", *, got: object = None, allowed: object = None, next_step: str | None = None
    ) -> None:
        super().__init__(format_error(what, got=got, allowed=allowed, next_step=next_step))


class InputError(BurstError, ValueError):
    """An invalid argument."""


class MaskError(InputError):
    """A mask that is invalid, or does not fit its sequence."""


class LayoutError(InputError):
    """A layout that does not fit the sequence or the ranks."""


class ShapeError(InputError):
    """Tensors with shapes that do not match."""


class UnknownNameError(InputError):
    """A name that is not registered."""


class DtypeError(BurstError, TypeError):
    """An unsupported dtype, or dtypes that differ."""


class UnknownArgumentError(BurstError, TypeError):
    """An argument that the function does not have."""


class UnsupportedError(BurstError, NotImplementedError):
    """A valid request that the named strategy, kernel or backend does not support."""


class MemoryLimitError(UnsupportedError):
    """A call for which every strategy needs more memory than the limit that was given."""


class StrategyError(BurstError, RuntimeError):
    """A strategy of a package that is broken: it fails to import, raises an unexpected error, or its plan is wrong."""


class BackendUnavailableError(BurstError, ImportError):
    """A backend that cannot run on this machine, or breaks the rules of its interface."""


class PackageMissingError(BurstError, ModuleNotFoundError):
    """A package of another project that is not installed."""


class DeviceError(BurstError, RuntimeError):
    """A failed call of a device's driver."""


class CommunicationError(BurstError, RuntimeError):
    """A failure between ranks."""


class MismatchError(CommunicationError):
    """Ranks that make different calls."""


class PeerLostError(CommunicationError, ConnectionError):
    """A rank whose process or connection ended."""


class CommunicationTimeoutError(CommunicationError, TimeoutError):
    """A transfer that exceeded its timeout."""


LATE = (
    "check what that rank is doing (all ranks must make this call, also in evaluations), or increase the timeout "
    "(BURST_TIMEOUT, or timeout= of Config or run_threads)"
)
"""Next step for a rank that is late."""
SAME_CALLS = "all ranks of a mesh must make the same calls in the same order"
"""Next step for ranks that make different calls."""


def format_error(what: str, *, got: object = None, allowed: object = None, next_step: str | None = None) -> str:
    """Return one line: what is wrong; what was given; what is allowed; what to do next."""
    details = (("got ", got), ("allowed: ", allowed), ("", next_step))
    return "; ".join([what, *(f"{label}{value}" for label, value in details if value is not None)])


_MAX_BITS = 256  # of an int that is printed


def shown(value: object, most: int = 80) -> str:
    """Return a value in one short line; a tensor or array by its type and shape."""
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # a nested tensor has none
        shape = None
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return f"an int of {value.bit_length():,} bits"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # it contains an int with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def first_line(error: BaseException, most: int = 400) -> str:
    """Return the first line of an error's text, or its type if it has none.

    A longer text ends with "..." after `most` characters.
    """
    return _cut(next(iter(str(error).splitlines()), "") or type(error).__name__, most)


def in_a_line(error: BaseException, most: int = 400) -> str:
    """Return an error of other code in one line, with its type: the text of a KeyError is only a key.

    A longer text ends with "..." after `most` characters.
    """
    return _cut(" ".join(f"{type(error).__name__}: {error}".split()), most)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def unknown_name(kind: str, name: object, known: Iterable[str], page: str | None = None) -> UnknownNameError:
    """Return the error for a name that is not registered, with similar names as a hint.

    `page` is the page that compares the names: it is the hint if no name is similar. Default: no hint then.
    """
    known = sorted(known)
    similar = difflib.get_close_matches(name[:99], known, n=3, cutoff=0.5) if isinstance(name, str) else []
    hint = f"did you mean {' or '.join(map(repr, similar))}?" if similar else page and f"see {page}"
    allowed = _listed(known) or "none is registered"
    return UnknownNameError(f"unknown {kind}", got=shown(name), allowed=allowed, next_step=hint)


def _listed(names: Sequence[str], most: int = 500) -> str:
    """Return names in a line of at most `most` characters, and the number of omitted names."""
    ends = list(accumulate(len(name) + 2 for name in names))
    fit = bisect_right(ends, most)
    return ", ".join(names[:fit]) + (f" and {len(names) - fit} more" if fit < len(names) else "")
