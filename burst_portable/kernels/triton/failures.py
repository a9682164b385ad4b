"""A kernel that does not compile: told with its target and its configuration, by whichever compiler refused it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CalledProcessError

from triton.errors import TritonError

from burst_portable.errors import UnsupportedError, explain

_OF_COMPILING = ("PassManager", "C compiler")
"""What Triton says in a bare RuntimeError: of its own compiler, and where the one that builds launchers is missing."""


@contextmanager
def told_where(kernel: object, target: str, configuration: object, next_step: str) -> Iterator[None]:
    """Around what compiles a jitted function: `UnsupportedError` where it cannot; other errors pass.

    Args:
        kernel: the jitted function.
        target: chip and dtype.
        configuration: all that the function is compiled for.
    """
    try:
        yield
    except (TritonError, RuntimeError, CalledProcessError, OSError) as error:  # of the system: no such compiler
        bare = isinstance(error, RuntimeError) and not isinstance(error, TritonError)
        if bare and not any(word in str(error) for word in _OF_COMPILING):
            raise  # no matter of compiling
        name = getattr(kernel, "__name__", repr(kernel))
        raise UnsupportedError(
            explain(
                f"the Triton kernel {name} does not compile for {target}",
                got=f"{configuration}: {error}",
                next_step=next_step,
            )
        ) from error
