"""List the recurrent layers of Transformers that can continue the states of another rank, and the sizes of states.

They read their tokens in order and take and return their states through an argument for a cache. Mamba 1 layers ignore
the state of a cache if there is more than one token; `selective_scans` continues those.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Size, nn
from transformers import Cache

from burst_portable.integrations.transformers.models.signatures import parameters_of


class Sizes(NamedTuple):
    """Shapes of the states of one row of a batch.

    `recurrent`: Of the recurrent state; None for a layer with a convolution only.
    `conv`: Channels of the convolution, and the number of earlier tokens that it reads.
    """

    recurrent: tuple[int, ...] | None
    conv: tuple[int, int]

    @property
    def total(self) -> int:
        """Number of elements."""
        return product(self.recurrent) + product(self.conv)


def product(shape: tuple[int, ...] | None) -> int:
    """Return the number of elements of a shape; 0 for None."""
    return 0 if shape is None else Size(shape).numel()


def _conv_sizes(conv: nn.Conv1d) -> tuple[int, int]:
    return conv.in_channels, conv.kernel_size[0] - 1


def _jamba(layer: Any) -> Sizes:
    return Sizes((1, layer.intermediate_size, layer.ssm_state_size), _conv_sizes(layer.conv1d))


def _zamba(layer: Any) -> Sizes:
    return Sizes((layer.n_mamba_heads, layer.mamba_head_dim, layer.ssm_state_size), _conv_sizes(layer.conv1d))


def _mamba2(layer: Any) -> Sizes:
    return Sizes((layer.num_heads, layer.head_dim, layer.ssm_state_size), _conv_sizes(layer.conv1d))


def _gated_delta_net(layer: Any) -> Sizes:
    return Sizes((layer.num_v_heads, layer.head_k_dim, layer.head_v_dim), _conv_sizes(layer.conv1d))


def _short_convolution(layer: Any) -> Sizes:
    return Sizes(None, _conv_sizes(layer.conv))


_SIZES: dict[str, Callable[[Any], Sizes]] = {
    "BambaMixer": _mamba2,
    "FalconH1Mixer": _mamba2,
    "GraniteMoeHybridMambaLayer": _mamba2,
    "JambaMambaMixer": _jamba,
    "NemotronHMamba2Mixer": _mamba2,
    "Zamba2MambaMixer": _mamba2,
    "ZambaMambaMixer": _zamba,
    "OlmoHybridGatedDeltaNet": _gated_delta_net,
    "Qwen3NextGatedDeltaNet": _gated_delta_net,
    "Qwen3_5GatedDeltaNet": _gated_delta_net,
    "Qwen3_5MoeGatedDeltaNet": _gated_delta_net,
    "Lfm2ShortConv": _short_convolution,
    "Lfm2MoeShortConv": _short_convolution,
    "Lfm3ShortConv": _short_convolution,
}
"""Sizes of the states of each supported layer, by the name of its class."""
PASSES_MASK_ONLY = {"JambaMambaDecoderLayer"}
"""Names of layers that pass their mask on to a recurrent layer, but no other arguments of the call."""
RECURRENT_TYPES = {"linear_attention", "conv", "hybrid", "moe", "mlp"}
"""Types of layers in configs of models with such layers, next to those of attention."""


CACHES = ("cache_params", "past_key_values", "cache")
"""Names of the argument for a cache. Transformers 5.24 has renamed both of the others to the last one."""


def recurrent_layers(model: nn.Module) -> list[nn.Module]:
    """Return the supported recurrent layers of a model. Older releases of Transformers have none."""
    if not hasattr(Cache, "get_recurrent_state"):
        return []
    known = (module for module in model.modules() if type(module).__name__ in _SIZES)
    return [layer for layer in known if not set(CACHES).isdisjoint(parameters_of(layer))]


def cache_argument(layer: nn.Module) -> str:
    """Return the name of the argument for a cache of a supported layer."""
    return next(name for name in CACHES if name in parameters_of(layer))


def sizes_of(layer: nn.Module) -> Sizes:
    """Return the sizes of the states of a supported layer."""
    return _SIZES[type(layer).__name__](layer)
