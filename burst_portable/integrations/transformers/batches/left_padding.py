"""Move padding from the beginning of rows to their end, and outputs back.

Text generation pads prompts at their beginning. Under a causal mask, the outputs of tokens do not depend on the place
of the padding if they keep their position ids. On one device these count from the beginning of the row, unless the
caller passes others. Most models with RoPE depend on distances only, but HunYuan normalizes queries after RoPE, and
Beam and Ministral scale them by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.models.padding_positions import POSITIONS
from burst_portable.integrations.transformers.models.position_limits import takes_shifted_rows

_ROWS = ("input_ids", "labels", "attention_mask")


def move_left_padding(
    batch: dict[str, Any],
    config: Any,
    token_inputs: Sequence[str] = (),
    *,
    shifts_labels: bool = True,
    has_recurrent_layers: bool = False,
) -> Tensor | None:
    """Move padding at the beginning of rows to their end, in place. Return its tokens per row, ``[B]``; None if none.

    Args:
        batch: `input_ids`, `labels` and `attention_mask` of shape ``[B, N]``, and perhaps `position_ids`. Those of
            rows with such padding are removed. `POSITIONS` is added if they do not count from the first token.
        config: Configuration of the model.
        token_inputs: Names of other inputs with values for each token. Default: none.
        shifts_labels: Whether a token is compared with the label of the next one. Default: it is.
        has_recurrent_layers: Whether layers have states along the sequence, which read padding. Default: none has.

    Raises:
        InputError: If the first token of such a row has a label, which one device predicts from padding.
        UnsupportedError: If results depend on the place of the padding.
    """
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    shapes = {x.shape for x in (ids, mask, batch["labels"]) if isinstance(x, Tensor)}
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(shapes) > 1:
        return None  # `shard` raises for unequal shapes
    token = mask != 0
    counted = token.cumsum(dim=1)
    padding: Tensor = (counted == 0).sum(dim=1) % ids.shape[1]  # a row of padding only stays as it is
    if not bool(padding.any()):
        return None
    if has_recurrent_layers:
        what = "padding at the beginning of rows in a model with recurrent layers"
        raise UnsupportedError(what, next_step="pad at the end of rows (padding_side='right')")
    if unknown := [name for name in batch if name not in (*_ROWS, *token_inputs, "position_ids")]:
        raise UnsupportedError("padding at the beginning of rows with packed documents", got=", ".join(unknown))
    positions = batch.pop("position_ids", None)
    if POSITIONS not in batch and not _equals(positions, counted - 1, token):
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        if positions is not None and not _equals(positions, places, token):
            raise UnsupportedError(
                "position_ids of rows that begin with padding",
                got=_first_wrong(positions, counted - 1, token),
                allowed="numbers that count from 0 at the first token or at the beginning of a row",
                next_step="pass attention_mask.cumsum(dim=1) - 1; or leave them out if the model has RoPE, or pad at "
                "the end of rows",
            )
        if not takes_shifted_rows(config):
            next_step = "pad at the end of rows, or pass position_ids that count from the first token of each row"
            raise UnsupportedError("padding before a token of a model with absolute positions", next_step=next_step)
        batch[POSITIONS] = places
        token_inputs = (*token_inputs, POSITIONS)
    first = batch["labels"].gather(1, padding.unsqueeze(1)).squeeze(1)
    if shifts_labels and bool(((first != -100) & (padding > 0)).any()):
        what = "the first token after padding has a label, which would be predicted from padding"
        next_step = "pad at the end of rows (padding_side='right' of the tokenizer), or give this token the label -100"
        raise InputError(what, allowed="-100", next_step=next_step)
    for name in (*_ROWS, *(name for name in token_inputs if name in batch and batch[name].shape[:2] == ids.shape)):
        batch[name] = roll_rows(batch[name], padding)
    return padding


def _equals(positions: Any, expected: Tensor, token: Tensor) -> bool:
    """Return whether position ids are the expected ones ``[B, N]`` at all tokens."""
    if not isinstance(positions, Tensor) or positions.shape not in (expected.shape, expected[:1].shape):
        return False
    return bool(((positions == expected) | ~token).all())


def _first_wrong(positions: Any, expected: Tensor, token: Tensor) -> str:
    """Return a text that describes position ids which are not the expected ones ``[B, N]`` at all tokens."""
    if not isinstance(positions, Tensor) or positions.shape not in (expected.shape, expected[:1].shape):
        return f"shape {tuple(positions.shape)}" if isinstance(positions, Tensor) else type(positions).__name__
    row, place = ((positions != expected) & token).nonzero()[0].tolist()
    return f"{positions.expand_as(expected)[row, place].item()} at token {place} of row {row}"


def roll_rows(x: Tensor, shift: Tensor) -> Tensor:
    """Return ``x[b, (i + shift[b]) % N, ...]`` for ``x`` of shape ``[B, N, ...]`` and shifts ``[B]``."""
    rows = torch.arange(x.shape[1], device=x.device)
    index = (rows + shift.to(x.device).unsqueeze(1)) % x.shape[1]
    return x.gather(1, index.reshape(*index.shape, *[1] * (x.dim() - 2)).expand(x.shape))
