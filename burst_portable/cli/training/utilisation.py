"""Model FLOP utilisation (PaLM, arXiv 2204.02311, appendix B): what a model needs, over what its devices could do.

A step of training needs 6 FLOPs a token and parameter, scoring 2: a multiplication and an addition, and twice that
backward. Attention's own products come on top, by exact mask area. What is computed a second time (activations, and
scores in the backward pass of attention) does not count.
"""

from __future__ import annotations

from typing import Any

from torch.nn import Embedding

from burst_portable.integrations.transformers.layouts import masks_of_layers, sizes_of

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def model_flops(config: Any, model: Any, *, seq_len: int, batch: int, scoring: bool) -> int | None:
    """FLOPs of a step over all ranks; None for mixtures of experts, where a token uses only some of the parameters.

    Args:
        model: with any weights, or none in memory.
    """
    if any(getattr(config, name, None) for name in _EXPERTS):
        return None
    sizes = sizes_of(config)
    area = sum(mask.area(seq_len) for mask in masks_of_layers(config))
    forward = 2 * seq_len * _multiplied(model) + 4 * area * sizes["heads"] * sizes["head_dim"]
    return batch * forward * (1 if scoring else 3)


def _multiplied(model: Any) -> int:
    """Parameters without tables that are looked up in (of tokens, positions), unless logits are made with them too."""
    tables = {module.weight for module in model.modules() if isinstance(module, Embedding)}
    head = model.get_output_embeddings()
    looked_up = tables - {head.weight} if head is not None else tables
    return sum(p.numel() for p in model.parameters() if p not in looked_up)


def utilisation(flops: int | None, seconds: float, ranks: int, peak: float | None) -> float | None:
    """The share of the ranks' peak FLOP/s that a step of `seconds` reached; None if a part is unknown."""
    return flops / (seconds * ranks * peak) if flops and peak else None
