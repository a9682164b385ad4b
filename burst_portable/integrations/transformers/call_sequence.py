"""Describe the unsharded sequence of a call, and warn about calls that a model computes badly."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from burst_portable.errors import InputError, LayoutError
from burst_portable.integrations.transformers.batches.divider import on_device
from burst_portable.integrations.transformers.layouts import Layouts
from burst_portable.integrations.transformers.models.checks import keeps_activations
from burst_portable.integrations.transformers.models.position_limits import longer_than_trained
from burst_portable.layout import Layout
from burst_portable.mask import checked_cu_seqlens
from burst_portable.mesh import Mesh
from burst_portable.sharding import local_position_ids
from burst_portable.utils.values import size
from burst_portable.utils.warning import warn_caller


class CallSequence(NamedTuple):
    """The sequence of one call."""

    seq_len: int  # of the unsharded sequence
    layout: Layout
    cu_seqlens: tuple[int, ...] | None = None  # of packed documents
    padded: bool = False  # whether rows end with padding
    lengths: tuple[int, ...] | None = None  # tokens of each row without its padding, if images attend to later tokens
    dropout_seed: int | None = None  # see `dropout_streams`
    longest: int | None = None  # largest position of one device plus 1, if padding makes it differ from documents


def sequence_of_call(
    tokens: int, mesh: Mesh, layouts: Layouts, *, seq_len: int | None, cu_seqlens: Any, padded: bool
) -> CallSequence:
    """Return the sequence of a call with this number of tokens on this rank.

    Args:
        tokens: Tokens of a row of the call.
        mesh: The ranks of the sequence.
        layouts: The layouts of sequences.
        seq_len: Tokens of the unsharded sequence. None: unknown, which only a single rank may have.
        cu_seqlens: Cumulative lengths of packed documents, or None.
        padded: Whether rows of the batch have padding.

    Raises:
        InputError: If the number of tokens of the unsharded sequence is unknown.
        LayoutError: If this rank has another number of tokens of such a sequence.
    """
    if seq_len is None and mesh.size > 1:
        # Tokens of an unsharded sequence look like a shard: each rank would attend to them as its own part.
        raise InputError(
            "the number of tokens of the unsharded sequence is unknown",
            got=f"{tokens} tokens on rank {mesh.rank}, no seq_len",
            next_step="call model(**sharded.shard(batch)), or pass full_batches=True to parallelize() and call "
            "model(**batch); for tokens that you divided yourself, pass seq_len= to the model or to parallelize(); "
            "call generate() within sharded.paused()",
        )
    length = tokens if seq_len is None else size("seq_len", seq_len)
    cu_seqlens = None if cu_seqlens is None else tuple(checked_cu_seqlens("cu_seqlens", cu_seqlens))
    layout = layouts.of(length, cu_seqlens)
    if (expected := layout.count(mesh.rank)) != tokens:
        allowed = f"{expected} of {length} (layout {layouts.name!r}, {mesh.size} ranks)"
        next_step = "call model(**sharded.shard(input_ids)), or pass seq_len"
        if tokens > expected:
            next_step += "; for prompts of PEFT, which add tokens, parallelize with full_batches=True"
        what = f"wrong number of tokens on rank {mesh.rank}"
        raise LayoutError(what, got=tokens, allowed=allowed, next_step=next_step)
    return CallSequence(length, layout, cu_seqlens, padded)


def positions_of(sequence: CallSequence, mesh: Mesh, device: torch.device) -> Tensor:
    """Return the position ids of this rank's tokens, ``[S]``, counted from the start of their document."""
    positions = local_position_ids(mesh, seq_len=sequence.seq_len, layout=sequence.layout, device=device)
    if sequence.cu_seqlens is None:
        return positions
    starts = on_device(sequence.cu_seqlens[:-1], device)
    return positions - starts[torch.searchsorted(starts, positions, right=True) - 1]


class CallWarnings:
    """Warns on rank 0, once per model, about calls whose results or memory are worse than expected.

    Args:
        model: The parallelized model.
        rank: This rank of the mesh.
    """

    def __init__(self, model: PreTrainedModel, rank: int) -> None:
        self._model, self._is_first_rank = model, rank == 0
        self._warned_about_length, self._warned_about_activations = False, False

    def check(self, config: Any, sequence: CallSequence) -> None:
        """Warn if a document has more tokens than the positions of a config, or activations are kept needlessly."""
        if not self._is_first_rank:
            return
        ends = sequence.cu_seqlens or (0, sequence.seq_len)
        if not self._warned_about_length and (
            message := longer_than_trained(config, max(b - a for a, b in pairwise(ends)))
        ):
            self._warned_about_length = True
            warn_caller(message)
        if (
            not self._warned_about_activations
            and torch.is_grad_enabled()
            and (message := keeps_activations(self._model))
        ):
            self._warned_about_activations = True
            warn_caller(message)
