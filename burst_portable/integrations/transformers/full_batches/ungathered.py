"""Replace outputs that a call with a full batch does not gather by objects whose use raises an error.

Transformers leaves out fields that are None. A program that reads `output.logits` then fails at the first operation,
with an error about None.
"""

from __future__ import annotations

from typing import Any, NoReturn

from burst_portable.errors import InputError


class UngatheredReadError(InputError, AttributeError):
    """A program reads an output that was not gathered. For `hasattr`, it has no such attribute."""


def ungathered(name: str, value: Any, *, is_gathered: bool) -> UngatheredOutput:
    """Return the object that replaces an output.

    Args:
        name: Name of the output.
        value: The output, of this rank's tokens.
        is_gathered: Whether the call returns logits, hidden states and router logits of all tokens, and not this one.
    """
    kind = UngatheredTuple if isinstance(value, tuple) else UngatheredOutput
    return kind(name, is_gathered)


class UngatheredOutput:
    """An output that a call with a full batch does not return. Any use raises `UngatheredReadError`."""

    def __init__(self, name: str, is_gathered: bool = False) -> None:
        self._name, self._is_gathered = name, is_gathered

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # so that a copy of the output has None, as Transformers' own

    def _raise(self) -> NoReturn:
        if self._is_gathered:
            raise UngatheredReadError(
                f"a call with a full batch does not return {self._name}, which would be of this rank's tokens",
                got=f"output.{self._name}",
                allowed="loss, logits, last_hidden_state, hidden_states; router_logits, if they are [tokens, experts]",
                next_step="compute it from these, or call the model within paused()",
            )
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


class UngatheredTuple(UngatheredOutput, tuple):  # type: ignore[type-arg]  # it has no elements
    """Replaces a tuple of tensors. Transformers' `load_balancing_loss_func` returns 0 for an object of another type."""

    def __new__(cls, *_: Any) -> UngatheredTuple:
        """Return an empty tuple."""
        return super().__new__(cls)

    def __iter__(self) -> NoReturn:
        self._raise()
