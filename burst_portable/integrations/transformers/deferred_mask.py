"""Define the mask function that Transformers calls in a parallelized model, and its result.

A `DeferredMask` replaces the attention mask in the model, so there is never a tensor of queries x keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers import masking_utils

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.bands import Band, read_mask
from burst_portable.integrations.transformers.call_sequence import CallSequence
from burst_portable.utils.torch_modes import never_compiled

_AFTER_BACKWARD = (
    "with gradient checkpointing, which computes layers again in the backward pass, call undo() or enter paused() "
    "after backward()"
)
_IF_UNDONE = "if undo() was called before backward(), call it afterwards"


class DeferredMask:
    """Placeholder that replaces the attention mask between the model and our attention function.

    The attention of the first layer binds it to the sequence of its call. A recomputation (gradient checkpointing)
    gets the same object as an argument, and so the same sequence, whatever calls the model had since.
    """

    def __init__(self, band: Band) -> None:
        self.band = band
        self.sequence: CallSequence | None = None

    def __repr__(self) -> str:
        return f"DeferredMask({self.band})"

    def prepared(self, tokens: int) -> PreparedMask:
        """Return this mask as an argument of the text model, if the model around it creates masks."""
        return PreparedMask(self.band, tokens)

    def __getitem__(self, index: Any) -> DeferredMask:
        """Return this object for all rows and columns (Gemma 4 slices its mask). Raise `UnsupportedError` for less."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(part not in (slice(None), slice(0, None), ...) for part in parts):
            what, got = "the model uses a part of its mask, whose rows would be those of a shard", f"mask[{index}]"
            raise UnsupportedError(what, got=got, next_step=_IF_UNDONE)
        return self

    def __getattr__(self, name: str) -> Any:
        """Raise `UnsupportedError`: the model uses its mask as a tensor."""
        if name.startswith("_"):
            raise AttributeError(name)
        what = "the model computes with its mask, which is not a tensor in a sharded model"
        raise UnsupportedError(what, got=f"mask.{name}", next_step=_IF_UNDONE)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """Raise `InputError`: torch computes with this mask, as an attention does that is not ours."""
        raise InputError(
            "an attention of Transformers got the mask of a sharded model, so its layer is computed again after undo()",
            got=getattr(function, "__name__", repr(function)),
            next_step=_AFTER_BACKWARD,
        )


class PreparedMask(DeferredMask):
    """Mask that a text model gets as an argument and passes to Transformers' mask functions, which return it.

    They read the shape of a mask of padding, so it has one, ``[1, S]``.
    """

    ndim = 2

    def __init__(self, band: Band, tokens: int) -> None:
        super().__init__(band)
        self.shape = (1, tokens)

    def to(self, *_: Any, **__: Any) -> PreparedMask:
        """Return this object."""
        return self


@never_compiled("plans, transports and hooks are not graphs")
def create_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | DeferredMask | None = None,
    **_: Any,
) -> DeferredMask:
    """Return the placeholder for a mask. Transformers' `AttentionMaskInterface` calls this function."""
    if isinstance(attention_mask, DeferredMask):
        return attention_mask
    if attention_mask is not None and not bool(attention_mask.all()):  # some models pass a mask of ones
        next_step = "pass the mask to sharded.shard, or pack documents (see ShardedModel.shard)"
        raise UnsupportedError("a padding mask reached a sharded attention", next_step=next_step)
    # A static cache passes its offset as a tensor.
    if q_length != kv_length or bool(q_offset != 0) or bool(kv_offset != 0):
        what = "queries and keys are different tokens, as with a cache or cross attention"
        got = f"{q_length} queries from {q_offset}, {kv_length} keys from {kv_offset}"
        raise UnsupportedError(what, got=got, next_step="pass the full sequence, and use_cache=False")
    return DeferredMask(read_mask(mask_function))
