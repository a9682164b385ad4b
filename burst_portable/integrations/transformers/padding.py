"""Check the padding of a batch."""

from __future__ import annotations

from torch import Tensor

from burst_portable.errors import InputError, ShapeError, UnsupportedError


def has_padding(attention_mask: Tensor | None, input_ids: Tensor, labels: Tensor | None) -> bool:
    """Return whether rows ``[B, N]`` of an unsharded batch end with padding. Raise for other padding, or with labels.

    The mask is nonzero for tokens. Labels are those of `shard`, by default the ids.
    """
    if attention_mask is None:
        return False
    if attention_mask.shape != input_ids.shape:
        got, allowed = tuple(attention_mask.shape), tuple(input_ids.shape)
        raise ShapeError("attention_mask and input_ids have different shapes", got=got, allowed=allowed)
    token = attention_mask != 0
    if bool(token.all()):
        return False
    if bool((token[:, 1:] & ~token[:, :-1]).any()):
        next_step = "pad at the end of rows (padding_side='right'), or pack documents (see ShardedModel.shard)"
        raise UnsupportedError("padding before a token, which would attend to it", next_step=next_step)
    if bool(((input_ids if labels is None else labels) != -100)[~token].any()):
        raise InputError("labels on padding", allowed="-100", next_step="labels.masked_fill(attention_mask == 0, -100)")
    return True
