"""Replace outputs that a call with a full batch does not gather by objects whose use raises an error.

Transformers leaves out fields that are None. A program that reads `output.logits` then fails at the first operation,
with an error about None.
"""

from __future__ import annotations

from typing import Any, NoReturn

from burst_portable.errors import InputError


class UngatheredReadError(InputError, AttributeError):
    """A program reads an output that was not gathered. For `hasattr`, it has no such attribute."""


class UngatheredOutput:
    """An output of all tokens in a call that returns losses only. Any use raises `UngatheredReadError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"UngatheredOutput({self._name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # so that a copy of the output has None, as Transformers' own

    def _raise(self) -> NoReturn:
        raise UngatheredReadError(
            f"a call with labels does not return the {self._name} of all tokens",
            got=f"output.{self._name}",
            next_step="pass gather_outputs=True to parallelize(), or set it on the sharded model (trainer.sharded of "
            "SequenceTrainer); or call the model without labels",
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._raise()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise `UngatheredReadError`: torch computes with this output."""
        given = [*args, *(kwargs or {}).values()]
        parts = [part for x in given for part in (x if isinstance(x, list | tuple) else [x])]
        next((x for x in parts if isinstance(x, UngatheredOutput)), UngatheredOutput("outputs"))._raise()

    def __getitem__(self, index: Any) -> NoReturn:
        self._raise()

    def __bool__(self) -> NoReturn:
        self._raise()

    def __len__(self) -> NoReturn:
        self._raise()

    def __add__(self, other: Any) -> NoReturn:
        self._raise()

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __pow__ = __matmul__ = __neg__ = __add__
