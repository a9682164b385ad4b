"""Draw random numbers of a sharded call: dropout of a rank's tokens, and seeds of attention that all ranks have alike.

On CPUs, dropout of hidden states takes a number per element from torch's default generator. Ranks with different
numbers of tokens would leave it in different states. Their next seeds of attention dropout would then differ. So would
rows that the program shuffles by this generator, or dropout in the head of a classifier.

A call therefore takes one number from the generator, and all others from what it derives from this number. Afterwards
the generator is one step further than before, on every rank. An activation checkpoint restores the generator for a
recomputation, and the seeds of attention do not depend on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NUMBER = "_burst_number"
"""Attribute of each module with its number in the model, which copies of a model keep."""
_SEEDS = 1 << 63
_GOLDEN = 0x9E3779B97F4A7C15  # odd, 2**64 / golden ratio
_NAMES = ("drop", "jitter")


class DropoutStreams:
    """The random numbers of one model's calls on one rank.

    Args:
        model: The model whose tokens are sharded.
        rank: This rank of the mesh.
    """

    def __init__(self, model: nn.Module, rank: int) -> None:
        self._model, self._rank = model, rank
        self._after: Tensor | None = None  # state of the generator after the running call
        for number, module in enumerate(model.modules()):
            setattr(module, NUMBER, number)

    def begin(self) -> int | None:
        """Begin a call, and return its seed for `seed_of`. None: the model draws nothing."""
        self._after = None
        if not draws_numbers(self._model):  # adapters may be added between calls, and rates may change
            return None
        seed = int(torch.randint(_SEEDS - 1, (), dtype=torch.int64, device="cpu"))
        self._after = torch.get_rng_state()
        torch.default_generator.manual_seed(_mixed(seed, -1 - self._rank))
        return seed

    def end(self) -> None:
        """End a call, also one that failed."""
        after, self._after = self._after, None
        if after is not None:
            torch.set_rng_state(after)

    def remove(self) -> None:
        """Remove the numbers from the modules."""
        for module in self._model.modules():
            vars(module).pop(NUMBER, None)

    def seed_of(self, seed: int | None, layer: nn.Module, part: int = 0) -> int | None:
        """Return the seed of a layer's attention dropout in the call with this seed. None: torch draws one.

        A layer that a call uses several times drops the same weights each time: a recomputation cannot count uses.
        `part`: Number of the attention, if those of a batch are computed row by row.
        """
        return None if seed is None else _mixed(seed, getattr(layer, NUMBER, 0) + (part << 32))


def draws_numbers(model: nn.Module) -> bool:
    """Return whether a model may draw random numbers: by modules of dropout, or settings of that name.

    Modules may be in training mode in a model that is not, for example to sample predictions.
    """
    is_training = False
    for module in model.modules():
        is_training |= module.training
        if module.training and isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
    settings: dict[str, Any] = vars(model.config) if is_training and hasattr(model, "config") else {}
    return any(
        isinstance(value, int | float) and value > 0 and any(word in name for word in _NAMES)
        for name, value in settings.items()
    )


def _mixed(seed: int, number: int) -> int:
    return (seed + number * _GOLDEN) % _SEEDS
