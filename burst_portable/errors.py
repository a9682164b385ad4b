"""Every error that this library raises on purpose.

::

    BurstError
    ├── InputError (ValueError)              something that the caller passed
    │   ├── MaskError                        overlapping regions, a mask longer than the sequence ...
    │   ├── LayoutError                      shards that do not fit the ranks
    │   ├── ShapeError                       tensors that do not go together
    │   └── UnknownNameError                 a name that no registry holds; lists the near ones
    ├── DtypeError (TypeError)               a dtype that no kernel takes, or dtypes that disagree
    ├── UnsupportedError (NotImplementedError)   valid, but what was named cannot do it
    ├── BackendUnavailableError (ImportError)    a backend that was named and cannot run here
    ├── DeviceError (RuntimeError)           a device's driver refused a call
    └── CommunicationError (RuntimeError)    between ranks
        ├── MismatchError                    ranks that disagree about the call
        ├── PeerLostError (ConnectionError)  a peer that is gone
        └── CommunicationTimeoutError (TimeoutError)     a hop that came too late

A message says what is wrong, what was given, what is allowed and what to do next. Each class composes it from these
parts.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate


class BurstError(Exception):
    """The root: ``except BurstError`` catches everything that this library raises on purpose.

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
    """A value that the caller passed cannot be used."""


class MaskError(InputError):
    """A mask that contradicts itself or the sequence that it is used on."""


class LayoutError(InputError):
    """A layout that does not fit the sequence or the ranks."""


class ShapeError(InputError):
    """Tensors whose shapes do not go together."""


class UnknownNameError(InputError):
    """A name that no registry holds."""


class DtypeError(BurstError, TypeError):
    """A dtype that cannot be used, or dtypes that disagree."""


class UnknownArgumentError(BurstError, TypeError):
    """An argument that the function does not have."""


class UnsupportedError(BurstError, NotImplementedError):
    """A valid request that the named strategy, kernel or backend cannot serve."""


class BackendUnavailableError(BurstError, ImportError):
    """A backend that was named, but cannot run on this machine."""


class DeviceError(BurstError, RuntimeError):
    """A device's driver refused a call."""


class CommunicationError(BurstError, RuntimeError):
    """Something went wrong between ranks."""


class MismatchError(CommunicationError):
    """Ranks disagree about the call that they are making together."""


class PeerLostError(CommunicationError, ConnectionError):
    """A peer is gone."""


class CommunicationTimeoutError(CommunicationError, TimeoutError):
    """A hop took longer than its timeout."""


LATE = "find out what that rank is doing, or raise the timeout"
"""What to do about a rank that is late."""
SAME_CALLS = "all ranks of a mesh must make the same calls in the same order"
"""What ranks that disagree did not do."""


def format_error(what: str, *, got: object = None, allowed: object = None, next_step: str | None = None) -> str:
    """Return one line: what is wrong; what was given; what is allowed; what to do next."""
    parts = [what]
    if got is not None:
        parts.append(f"got {got}")
    if allowed is not None:
        parts.append(f"allowed: {allowed}")
    if next_step is not None:
        parts.append(next_step)
    return "; ".join(parts)


_BITS = 256  # of the longest int that is printed


def shown(value: object, most: int = 80) -> str:
    """A value in one short line; a tensor or array by its type and shape."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, int) and value.bit_length() > _BITS:
        return f"an int of {value.bit_length():,} bits"
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a container of an int with more digits than Python prints
        text = type(value).__name__
    return text if len(text) <= most else f"{text[:most]}..."


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its type if it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def in_a_line(error: BaseException, most: int = 400) -> str:
    """An error of other code in one line, with its type: the text of a KeyError alone is only a key."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a name that no registry holds, with similar names as a hint."""
    known = sorted(known)
    near = difflib.get_close_matches(name[:99], known, n=3, cutoff=0.5) if isinstance(name, str) else []
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else None
    return UnknownNameError(
        f"unknown {kind}",
        got=shown(name),
        allowed=_listed(known) or "none is registered",
        next_step=hint,
    )


def _listed(names: Sequence[str], most: int = 500) -> str:
    """Names in a line of at most `most` characters, and how many others there are."""
    ends = list(accumulate(len(name) + 2 for name in names))
    fit = bisect_right(ends, most)
    return ", ".join(names[:fit]) + (f" and {len(names) - fit} more" if fit < len(names) else "")
