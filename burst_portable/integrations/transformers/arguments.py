"""The arguments of a sharded model's call: what would be computed wrongly on a shard is refused."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor

from burst_portable.errors import InputError, UnsupportedError, explain


def parameters_of(module: Any) -> list[str]:
    """The names that a module's forward takes, in order."""
    return list(inspect.signature(module.forward).parameters)


def takes(module: Any, name: str) -> bool:
    """Whether a module's forward takes an argument of that name, or any."""
    found = inspect.signature(module.forward).parameters
    return name in found or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in found.values())


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse padding, caches, and counts of rows that mean the whole sequence."""
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        raise UnsupportedError(
            explain(
                "this attention_mask cannot be expressed",
                got="padding" if isinstance(mask, Tensor) and mask.dim() == 2 else type(mask).__name__,
                allowed="none, or [batch, tokens] without a zero",
                next_step="give the mask to handle.shard, or pack documents (see Parallel.shard)",
            )
        )
    if kwargs.get("past_key_values") is not None or kwargs.get("use_cache"):
        raise UnsupportedError("a sharded model keeps no cache, so it cannot generate; elsewhere, pass use_cache=False")
    for name in ("encoder_hidden_states", "encoder_attention_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedError(explain("cross attention, whose keys are another sequence", got=name))
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        raise UnsupportedError(
            explain("logits_to_keep counts rows of a shard, not of the sequence", got=keep, allowed=0)
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedError("output_attentions: the weights are never made")


def checked_positions(given: Tensor | None, expected: Tensor, tokens: Tensor) -> Tensor:
    """The position ids ``[1 or B, S]``: those given, if they are this rank's."""
    if given is None:
        return expected.unsqueeze(0)
    fits = given.dim() == 2 and given.shape[0] in (1, tokens.shape[0]) and given.shape[1] == expected.shape[0]
    if not fits or not bool((given == expected).all()):
        raise InputError(
            explain(
                "position_ids are not those of this rank's rows",
                got=f"{tuple(given.shape)}, from {given.flatten()[0].item()}" if given.numel() else "none",
                allowed=f"{expected.shape[0]} positions, from {expected[0].item()}",
                next_step="leave them out; packed documents are named with documents=(0, end, ...)",
            )
        )
    return given
