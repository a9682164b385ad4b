"""Padding at the end of rows. Under a causal mask no token sees it, so that only its own rows would differ.

    tokens   a b c d - -     a row of 4 tokens in a batch of 6
    mask     1 1 1 1 0 0
    labels   a b c d x x     x: -100, so that nothing is learnt from padding

Whatever a padded row gives, no loss and no gradient reads it: the mask can be left out, and the result is one device's
wherever a token is. Padding before the tokens, or under a mask that sees later tokens, would be seen; it is refused.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from burst_portable.errors import InputError, ShapeError, UnsupportedError, explain


def has_padding(attention_mask: Tensor | None, input_ids: Tensor, labels: Tensor | None) -> bool:
    """Whether rows of a whole batch end with padding, which the labels leave out.

    Args:
        attention_mask: ``[B, N]``, not 0 where a token is; None: everywhere.
        input_ids: ``[B, N]``; labels: ``[B, N]``, -100 where there is none, or None, which stands for `input_ids`.

    Raises:
        ShapeError: a mask of another shape.
        UnsupportedError: padding that is not at the end of its row.
        InputError: labels on padding.
    """
    if attention_mask is None:
        return False
    if attention_mask.shape != input_ids.shape:
        raise ShapeError(
            explain("attention_mask and input_ids", got=tuple(attention_mask.shape), allowed=tuple(input_ids.shape))
        )
    token = attention_mask != 0
    if bool(token.all()):
        return False
    if bool((token[:, 1:] & ~token[:, :-1]).any()):
        raise UnsupportedError(
            explain(
                "padding before a token, which would see it",
                next_step="pad at the end of rows (padding_side='right'), or pack documents (see Parallel.shard)",
            )
        )
    if bool(((input_ids if labels is None else labels) != -100)[~token].any()):
        raise InputError(
            explain("labels on padding", allowed="-100", next_step="labels.masked_fill(attention_mask == 0, -100)")
        )
    return True


def check_padded_model(config: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a loss that reads padding: a router's, which balances the choices of all rows."""
    wanted = kwargs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if wanted is None else wanted:
        raise UnsupportedError(
            explain("padding and a router loss, which counts tokens", next_step="pass output_router_logits=False")
        )
