"""Find modules of torch whose result for a token depends on other tokens of a call, so that it differs on a shard.

`layers.entry_modules` has those of which it depends on the shape of their input.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import nn

_KINDS = (nn.RNNBase, nn.MultiheadAttention, nn.modules.batchnorm._NormBase)
"""Recurrent modules, attention of torch, and norms over tokens."""
_OF_RANGES = {"ObserverBase", "FakeQuantizeBase"}
"""Classes of torch.ao.quantization that record the smallest and the largest number of a call."""
_DYNAMIC = "torch.ao.nn.quantized.dynamic."
"""Modules that choose a scale by the smallest and the largest number of a call."""


def token_mixing_module(model: nn.Module, known: Set[int]) -> str | None:
    """Return the name and the class of the first module that mixes tokens, or None.

    Args:
        model: The model.
        known: Identities of modules that continue from rank to rank, which are left out.
    """
    for name, module in model.named_modules():
        if id(module) not in known and _mixes_tokens(name, module):
            return f"{name} ({_described(module)})"
    return None


def _mixes_tokens(name: str, module: Any) -> bool:
    classes = {base.__name__ for base in type(module).__mro__}
    return (
        isinstance(module, _KINDS)
        or (isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.max_norm is not None))
        or type(module).__module__.startswith(_DYNAMIC)
        or not (_OF_RANGES.isdisjoint(classes) or "weight" in name)  # weights are equal on all ranks
    )


def _described(module: Any) -> str:
    if isinstance(module, nn.Embedding):
        return "Embedding with scale_grad_by_freq" if module.scale_grad_by_freq else "Embedding with max_norm"
    return type(module).__name__
