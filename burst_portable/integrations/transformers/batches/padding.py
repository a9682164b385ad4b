"""Check the padding of a batch, and separate it from tokens whose attention covers later tokens.

Under a causal mask, no token attends to the padding after it. In an encoder, the padding of a row becomes a document,
so that no token attends to it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from burst_portable.errors import InputError, ShapeError, UnsupportedError
from burst_portable.integrations.transformers.batches.packed_rows import Documents, equal_once


def is_encoder(model: nn.Module) -> bool:
    """Return whether tokens of a model attend to later ones. A config may make encoders of other models."""
    return any(getattr(module, "is_causal", None) is False for module in model.modules())


def separated(documents: Sequence[Documents], attention_mask: Tensor) -> tuple[Documents, ...]:
    """Return the documents of each row with a border where its padding begins; of one row if all are equal.

    Args:
        documents: Documents of each row; of one row if all are equal; of none if each row is one document.
        attention_mask: Nonzero for tokens ``[B, N]``, which precede the padding of their row.
    """
    rows, length = attention_mask.shape
    lengths = (attention_mask != 0).sum(dim=1).tolist()
    given = [documents[i % len(documents)] if documents else (0, length) for i in range(rows)]
    return equal_once(tuple(tuple(sorted({*row, count})) for row, count in zip(given, lengths, strict=True)))


def has_padding(attention_mask: Tensor | None, input_ids: Tensor, labels: Tensor | None) -> bool:
    """Return whether rows ``[B, N]`` of an unsharded batch end with padding. Raise for other padding, or with labels.

    The mask is nonzero for tokens. None for labels: there are none.
    """
    if attention_mask is None:
        return False
    if attention_mask.dim() == 4:
        raise UnsupportedError(
            "a mask with a value for each pair of tokens would grow with the square of the sequence",
            got=f"attention_mask of shape {tuple(attention_mask.shape)}",
            allowed="[batch, tokens], 0 for padding",
            next_step="pass cu_seqlens for packed documents, or set windows and chunks in the model's config; for "
            "other masks, build the model with burst_portable.nn.SelfAttention and a Mask",
        )
    if attention_mask.shape != input_ids.shape:
        got, allowed = tuple(attention_mask.shape), tuple(input_ids.shape)
        raise ShapeError("attention_mask and input_ids have different shapes", got=got, allowed=allowed)
    token = attention_mask != 0
    if bool(token.all()):
        return False
    if bool((token[:, 1:] & ~token[:, :-1]).any()):
        next_step = "pad at the end of rows (padding_side='right'), or pack documents (see ShardedModel.shard)"
        raise UnsupportedError("padding before a token, which would attend to it", next_step=next_step)
    if labels is not None and bool((labels != -100)[~token].any()):
        raise InputError("labels on padding", allowed="-100", next_step="labels.masked_fill(attention_mask == 0, -100)")
    return True
