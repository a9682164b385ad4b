"""Take the arguments that `ShardedModel.shard` adds from a call, and complete those that the model gets."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from burst_portable.integrations.transformers.attention import DOCUMENTS
from burst_portable.integrations.transformers.batches.divider import LONGEST
from burst_portable.integrations.transformers.call_arguments import checked_positions
from burst_portable.integrations.transformers.call_errors import wrong_tokens
from burst_portable.integrations.transformers.call_sequence import CallSequence, positions_of
from burst_portable.integrations.transformers.layers.recurrent_states import check_recurrent_sequence, local_documents
from burst_portable.integrations.transformers.models.padding_positions import checked_shard_positions, positions_of_rows
from burst_portable.integrations.transformers.models.signatures import takes
from burst_portable.integrations.transformers.shard_mark import ShardMark
from burst_portable.integrations.transformers.training.batch_check import KEY
from burst_portable.mesh import Mesh


class ShardArguments(NamedTuple):
    """Facts about the shard of a call, from arguments that no model takes.

    Attributes:
        tokens: Ids ``[B, S]`` or embeddings ``[B, S, H]`` of this rank.
        seq_len: Tokens of the unsharded sequence. None: the call does not name them.
        cu_seqlens: Cumulative lengths of packed documents, as the caller wrote them, or None.
        padding: Which of this rank's tokens are padding ``[B, S]``. None: no rank has any.
        checksum: Checksum of the undivided batch. None: the caller divided the tokens, or there is one rank.
        is_divided_by_caller: Whether the caller divided the tokens without `shard`.
        lengths: Tokens of each row without its padding, for masks of images. None: unknown.
        longest: Largest position of one device plus 1. None: tokens of the longest document.
    """

    tokens: Tensor
    seq_len: Any
    cu_seqlens: Any
    padding: Tensor | None
    checksum: Tensor | None
    is_divided_by_caller: bool
    lengths: tuple[int, ...] | None
    longest: int | None


def take_shard_arguments(kwargs: dict[str, Any]) -> ShardArguments:
    """Remove the arguments of a shard from those of a call, and return them.

    Raises:
        ShapeError: If the call has no tokens of shape ``[B, S, ...]``.
    """
    names = ("seq_len", "cu_seqlens", "padded", KEY, "lengths", LONGEST)
    seq_len, cu_seqlens, padding, checksum, *facts = (kwargs.pop(name, None) for name in names)
    tokens = kwargs.get("input_ids") if kwargs.get("input_ids") is not None else kwargs.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.dim() < 2:
        raise wrong_tokens(tokens)
    is_marked = isinstance(kwargs.get("attention_mask"), ShardMark)
    if is_marked:
        kwargs["attention_mask"] = None
    padding = padding if isinstance(padding, Tensor) else None
    return ShardArguments(tokens, seq_len, cu_seqlens, padding, checksum, checksum is None and not is_marked, *facts)


def recurrent_arguments(sequence: CallSequence, rank: int) -> dict[str, Any]:
    """Return the arguments that recurrent layers need: this rank's documents, if the sequence has several.

    Raises:
        UnsupportedError: If states cannot continue along the sequence.
    """
    check_recurrent_sequence(sequence.layout)
    if sequence.cu_seqlens is None or len(sequence.cu_seqlens) <= 2:
        return {}
    return {DOCUMENTS: local_documents(sequence.layout, rank, sequence.cu_seqlens)}


def complete_arguments(module: Any, kwargs: dict[str, Any]) -> None:
    """Set the arguments by which a model attends by our function, without a cache, and divides its loss."""
    kwargs["attention_mask"] = None
    if takes(module, "use_cache"):
        kwargs["use_cache"] = False
    if (count := kwargs.get("num_items_in_batch")) is not None:
        # A batch without labels has the loss 0, not 0 / 0. Not in `shard`: callers may sum its counts.
        kwargs["num_items_in_batch"] = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)


def shard_positions(kwargs: dict[str, Any], sequence: CallSequence, mesh: Mesh, padding_idx: int | None) -> Tensor:
    """Return the position ids of a call ``[1 or B, S]``. Raise `InputError` if given ones are not those of this rank.

    Args:
        kwargs: Arguments of the call.
        sequence: Its sequence.
        mesh: The ranks of the sequence.
        padding_idx: Id of the padding token, if positions count from it. None: they count from 0.
    """
    given, ids = kwargs.get("position_ids"), kwargs.get("input_ids")
    tokens: Tensor = kwargs["inputs_embeds"] if ids is None else ids
    places = positions_of(sequence, mesh, tokens.device)
    if padding_idx is None:
        return checked_positions(given, places, tokens)
    if given is None and mesh.size == 1:
        return positions_of_rows(ids, places, padding_idx, sequence.cu_seqlens)
    return checked_shard_positions(given, ids, places, padding_idx)
