"""Check the arguments and the position ids of a call."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor

from burst_portable.errors import InputError, UnsupportedError
from burst_portable.integrations.transformers.models.recurrent_layers import CACHES


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for padding, cross attention and arguments that count tokens of the sequence."""
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        raise UnsupportedError(
            "this attention_mask is not supported",
            got="padding" if isinstance(mask, Tensor) and mask.dim() == 2 else type(mask).__name__,
            allowed="None, or [batch, tokens] without a zero",
            next_step="pass the mask to sharded.shard, or pack documents (see ShardedModel.shard)",
        )
    for name in ("encoder_hidden_states", "encoder_attention_mask"):
        if kwargs.get(name) is not None:
            raise UnsupportedError("cross attention is not supported: its keys are another sequence", got=name)
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, Tensor) or keep:
        what = "logits_to_keep would count tokens of a shard, not of the sequence"
        next_step = "take them from the output, or call generate() within sharded.paused()"
        raise UnsupportedError(what, got=keep, allowed=0, next_step=next_step)
    if kwargs.get("output_attentions"):
        what, next_step = "output_attentions is not supported: attention weights are never computed", "leave it out"
        raise UnsupportedError(what, next_step=next_step)


def check_cache(kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` if a call passes or requests a KV cache, as `generate` does."""
    if any(kwargs.get(name) is not None for name in CACHES) or kwargs.get("use_cache"):
        raise UnsupportedError(
            "a sharded model has no KV cache, so it cannot generate",
            next_step="call generate(), also with use_cache=False, within sharded.paused() (trainer.sharded of "
            "SequenceTrainer, trainer.strategy.sharded[0] of Lightning), or use a copy of the model that is not "
            "sharded; in other calls, leave out use_cache and the cache",
        )


def check_no_document_lengths(kwargs: dict[str, Any]) -> None:
    """Raise `UnsupportedError` for Transformers' arguments of document lengths, which would count a shard's tokens."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        if kwargs.get(name) is not None:
            next_step = "pass cu_seqlens= of the unsharded row to sharded.shard"
            raise UnsupportedError(
                "document lengths that count tokens of a shard are not supported", got=name, next_step=next_step
            )


class PositionCheck:
    """Checks the position ids of calls. Those that `shard` returned last are known, and not read from the device."""

    def __init__(self) -> None:
        self._shard: tuple[weakref.ref[Tensor], int, int, tuple[int, ...] | None] | None = None

    def remember(self, position_ids: Tensor, seq_len: int, cu_seqlens: tuple[int, ...] | None) -> None:
        """Keep the position ids of a shard ``[B, S]``, until they change or the next ones are made."""
        if not position_ids.is_inference():  # these do not count their changes
            self._shard = weakref.ref(position_ids), position_ids._version, seq_len, cu_seqlens

    def is_known(self, given: Tensor | None, seq_len: int, cu_seqlens: tuple[int, ...] | None) -> bool:
        """Return whether position ids are the unchanged ones of `remember`, made for this sequence."""
        if given is None or self._shard is None:
            return False
        known, version, *sequence = self._shard
        is_same = known() is given and given._version == version
        return is_same and sequence == [seq_len, cu_seqlens]


def checked_positions(given: Tensor | None, expected: Tensor, tokens: Tensor) -> Tensor:
    """Return the position ids ``[1 or B, S]``. Raise `InputError` if given ones are not those of this rank."""
    if given is None:
        return expected.unsqueeze(0)
    fits = given.dim() == 2 and given.shape[0] in (1, tokens.shape[0]) and given.shape[1] == expected.shape[0]
    if not fits or not bool((given == expected).all()):
        raise InputError(
            "position_ids are not those of this rank's tokens",
            got=f"{tuple(given.shape)}, from {given.flatten()[0].item()}" if given.numel() else "an empty tensor",
            allowed=f"{expected.shape[0]} positions, from {expected[0].item()}",
            next_step="leave them out; for packed documents pass cu_seqlens=(0, end, ...)",
        )
    return given
