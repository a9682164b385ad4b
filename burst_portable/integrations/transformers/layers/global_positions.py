"""Compute what depends on tokens of other ranks: RoPE by the longest position, and scales of queries by their row.

A shard has some positions of a sequence. The RoPE types "dynamic" and "longrope" choose their frequencies by the
largest position id of a call, so they get the last position of the longest document too. Llama 4 scales queries of
layers without RoPE by their row number, so its own scale is disabled, and `attend` scales by the row in the unsharded
sequence.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.errors import InputError
from burst_portable.integrations.transformers.attention import ATTRIBUTE, SCALES_BY_ROW
from burst_portable.integrations.transformers.layers.disabled_flag import DisabledFlag
from burst_portable.integrations.transformers.models.position_limits import LENGTH_ROPE
from burst_portable.integrations.transformers.models.signatures import parameters_of
from burst_portable.utils.torch_modes import never_compiled

_POSITIONS = "position_ids"
_SCALE = ("attn_scale", "floor_scale", "use_rope")
"""Attributes of a module that scales queries by their row if it has no RoPE."""
_TUNING = DisabledFlag("attn_temperature_tuning", SCALES_BY_ROW)


def watch_positions(model: nn.Module) -> tuple[list[Any], int]:
    """Adapt the modules that depend on positions of other ranks.

    Returns:
        The hooks of RoPE modules, and the number of attention modules that scale queries by their row.
    """
    hooks: list[Any] = []
    scaled = 0
    for module in model.modules():
        if depends_on_length(module):
            hooks.append(module.register_forward_pre_hook(_add_last, with_kwargs=True))
            hooks.append(module.register_forward_hook(_drop_last))
        elif scales_by_row(module):
            _TUNING.disable(module)
            scaled += 1
    return hooks, scaled


def restore_positions(model: nn.Module) -> None:
    """Restore the modules that `watch_positions` changed, apart from the hooks."""
    _TUNING.restore(model)


def can_watch_positions(model: nn.Module) -> bool:
    """Return whether `watch_positions` finds a module that depends on positions of other ranks."""
    return any(depends_on_length(module) or scales_by_row(module) for module in model.modules())


def depends_on_length(module: nn.Module) -> bool:
    """Return whether a module computes RoPE frequencies by the largest position id."""
    kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind in LENGTH_ROPE for kind in kinds) and _POSITIONS in parameters_of(module)


def scales_by_row(module: nn.Module) -> bool:
    """Return whether an attention scales queries by their row number."""
    tunes = getattr(module, _TUNING.name, False)
    return bool(tunes) and all(hasattr(module, name) for name in _SCALE)


@never_compiled("the longest position is not a part of the graph")
def _add_last(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Append the last position of the longest document to the position ids ``[..., S]`` (pre-hook)."""
    call = getattr(module, ATTRIBUTE).call
    if call is None:
        raise InputError(
            "RoPE that depends on the length ran outside its model's forward",
            got=type(module).__name__,
            next_step="call the model that was parallelized; recompute layers, not their RoPE",
        )
    kwargs = {**dict(zip(parameters_of(module), args, strict=False)), **kwargs}
    positions: Tensor = kwargs[_POSITIONS]
    longest = call.longest or max(stop - start for start, stop in pairwise(call.cu_seqlens or (0, call.seq_len)))
    last = positions.new_full((*positions.shape[:-1], 1), longest - 1)
    # Padding may have larger positions than those of one device. No token attends to it.
    kwargs[_POSITIONS] = torch.cat([positions.clamp(max=longest - 1), last], -1)
    return (), kwargs


def _drop_last(module: Any, args: Any, output: Any) -> Any:
    """Return the results ``[..., S, D]`` of a RoPE without the last row (hook)."""
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return type(output)(x[..., :-1, :] for x in output)
