"""Find modules of torch whose result for a token depends on other tokens of a call, so that it differs on a shard."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from torch import nn

_KINDS = (nn.RNNBase, nn.MultiheadAttention, nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Recurrent modules, attention of torch, and norms over tokens."""
_POOLING = "torch.nn.modules.pooling"
"""Module of torch's pooling layers."""
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
        (isinstance(module, nn.modules.conv._ConvNd) and set(module.kernel_size) != {1})
        or isinstance(module, _KINDS)
        or any(base.__module__ == _POOLING for base in type(module).__mro__)
        or (isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.max_norm is not None))
        or type(module).__module__.startswith(_DYNAMIC)
        or not (_OF_RANGES.isdisjoint(classes) or "weight" in name)  # weights are equal on all ranks
    )


def _described(module: Any) -> str:
    if isinstance(module, nn.Embedding):
        return "Embedding with scale_grad_by_freq" if module.scale_grad_by_freq else "Embedding with max_norm"
    return type(module).__name__
