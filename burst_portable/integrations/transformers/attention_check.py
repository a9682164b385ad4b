"""Find layers whose attention is not ours, next to layers whose attention is.

A program may replace the attention of some layers by a module that calls `scaled_dot_product_attention` itself. It
would attend to the tokens of a shard only.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from torch import nn

from burst_portable.errors import UnsupportedError

_NAMES = ("self_attn", "attn", "attention", "self_attention")
"""Names of attention modules in the layers of Transformers' models."""


class AttentionCheck:
    """Finds layers whose attention is not ours. It looks again after a call with another number of attentions.

    A layer that a call skips is none of them, if its attention was ours in an earlier call.
    """

    def __init__(self) -> None:
        self._known = WeakSet[nn.Module]()  # attention modules of layers that were ours
        self._count = 0  # attentions of the last call that was checked

    def __reduce__(self) -> tuple[Any, ...]:
        return AttentionCheck, ()  # weak references cannot be pickled

    def run(self, model: nn.Module, attended: set[int], count: int) -> None:
        """Raise `UnsupportedError` if the attention of a layer did not call our function, but that of another one did.

        Args:
            model: The model whose sequence is sharded, after a call.
            attended: Identities of the modules that called our function in this call.
            count: How often they did.
        """
        if count == self._count:
            return
        for path, layers in model.named_modules():
            if isinstance(layers, nn.ModuleList):
                for name in _NAMES:
                    self._check(f"{path}.{{}}.{name}", [getattr(layer, name, None) for layer in layers], attended)
        self._count = count

    def _check(self, path: str, attentions: list[Any], attended: set[int]) -> None:
        """Check the attention modules of a list of layers; None for a layer that has none of this name."""
        found = {i: part for i, part in enumerate(attentions) if part is not None}
        ours = [part for part in found.values() if any(id(m) in attended for m in part.modules())]
        self._known.update(ours)
        outside = [i for i, part in found.items() if part not in self._known]
        if outside and len(outside) < len(found):
            raise UnsupportedError(
                "the attention of a layer does not go through transformers' AttentionInterface",
                got=f"{path.format(outside[0])}: {type(found[outside[0]]).__name__}",
                next_step="keep the attention of Transformers; or call "
                'ALL_ATTENTION_FUNCTIONS["burst_portable"] with this module and the mask that the layer gets',
            )
