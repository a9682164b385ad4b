"""Find layers whose attention is not ours, next to layers whose attention is.

A program may replace the attention of some layers by a module that calls `scaled_dot_product_attention` itself. It
would attend to the tokens of a shard only.
"""

from __future__ import annotations

from torch import nn

from burst_portable.errors import UnsupportedError

_NAMES = ("self_attn", "attn", "attention", "self_attention")
"""Names of attention modules in the layers of Transformers' models."""


def check_attentions(model: nn.Module, attended: set[int]) -> None:
    """Raise `UnsupportedError` if the attention of a layer did not call our function, but that of another layer did.

    Args:
        model: The model whose sequence is sharded, after a call.
        attended: Identities of the modules that called our function.
    """
    for path, layers in model.named_modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        for name in _NAMES:
            found = {i: part for i, layer in enumerate(layers) if (part := getattr(layer, name, None)) is not None}
            outside = [i for i, part in found.items() if not any(id(m) in attended for m in part.modules())]
            if outside and len(outside) < len(found):
                raise UnsupportedError(
                    "the attention of a layer does not go through transformers' AttentionInterface",
                    got=f"{path}.{outside[0]}.{name}: {type(found[outside[0]]).__name__}",
                    next_step="keep the attention of Transformers; or call "
                    'ALL_ATTENTION_FUNCTIONS["burst_portable"] with this module and the mask that the layer gets',
                )
