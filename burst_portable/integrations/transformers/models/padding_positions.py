"""Compute position ids that count from the id of the padding token, as RoBERTa's do.

Such a model numbers the tokens of a row that are not padding: ``padding_idx + 1``, ``padding_idx + 2``, and so on.
Padding has the position `padding_idx`. A shard does not contain the tokens before it, so positions are computed from
the undivided rows, and divided like other inputs with values for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burst_portable.errors import InputError, UnsupportedError

POSITIONS = "padding_positions"
"""Name under which a batch has these positions."""
_COUNT = "create_position_ids_from_input_ids"


def padding_indices(model: nn.Module) -> list[int | None]:
    """Return the padding index of each module that counts positions from it, as the embeddings of RoBERTa do."""
    counting: list[Any] = [module for module in model.modules() if _counts_from_padding(module)]
    return [module.position_embeddings.padding_idx for module in counting]


def _counts_from_padding(module: Any) -> bool:
    return isinstance(getattr(module, "position_embeddings", None), nn.Embedding) and _counts(module)


def _counts(module: nn.Module) -> bool:
    """Return whether a module computes position ids by the function of RoBERTa, which some models copied.

    ESM-2 with rotary embeddings does not use them.
    """
    if getattr(module, "position_embedding_type", "absolute") != "absolute":
        return False
    forward: Any = inspect.unwrap(type(module).forward)
    return _COUNT in forward.__code__.co_names


def padding_index(model: nn.Module) -> int | None:
    """Return the padding index from which the positions of a model count. None: they count from 0."""
    return next(iter(padding_indices(model)), None)


def has_unknown_positions(model: nn.Module) -> bool:
    """Return whether positions depend on padding in another way than in exactly one module of `padding_indices`."""
    embeddings = [m for name, m in model.named_modules() if "position" in name and isinstance(m, nn.Embedding)]
    padded = [m.padding_idx for m in embeddings if m.padding_idx is not None]
    indices = padding_indices(model)
    # Sinusoidal positions, as those of Kosmos-2.5, have no embedding.
    return padded != indices or len(indices) > 1 or sum(map(_counts, model.modules())) > len(indices)


def positions_from_padding(input_ids: Tensor, padding_idx: int, cu_seqlens: Sequence[int] | None = None) -> Tensor:
    """Return the position ids of undivided rows ``[B, N]``, which begin again at each document.

    Args:
        input_ids: Token ids ``[B, N]``.
        padding_idx: Id of the padding token, and its position.
        cu_seqlens: Cumulative lengths of the documents of all rows. Default: each row is one document.
    """
    token = (input_ids != padding_idx).to(torch.int64)
    counted = token.cumsum(dim=1)
    if cu_seqlens is not None:
        starts = torch.tensor(cu_seqlens[:-1]).to(input_ids.device, non_blocking=True)
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        first = starts[torch.searchsorted(starts, places, right=True) - 1]
        counted = counted - (counted - token)[:, first]
    return counted * token + padding_idx


def positions_of_rows(ids: Tensor | None, places: Tensor, padding_idx: int, cu_seqlens: Sequence[int] | None) -> Tensor:
    """Return the position ids of a call that has undivided rows ``[B, N]``, or their embeddings.

    Embeddings have no padding, as on one device. `places`: Place of each token in its document, ``[N]``.
    """
    if ids is None:
        return (places + padding_idx + 1).unsqueeze(0)
    return positions_from_padding(ids, padding_idx, cu_seqlens)


def take_positions(batch: dict[str, Any], padding_idx: int) -> None:
    """Remove the position ids of an undivided batch, if they are those of `positions_from_padding`.

    Raises:
        UnsupportedError: If they are others, or if the batch has `cu_seqlens` as well.
    """
    given, ids = batch.get("position_ids"), batch.get("input_ids")
    if given is None or not isinstance(ids, Tensor) or ids.dim() != 2:
        return  # `shard` raises for such ids
    fits = isinstance(given, Tensor) and given.shape in (ids.shape, ids[:1].shape) and batch.get("cu_seqlens") is None
    if not fits or not bool((given.to(ids.device) == positions_from_padding(ids, padding_idx)).all()):
        raise UnsupportedError(
            "other position_ids than those of the model, whose positions count from its padding token",
            allowed=f"none, or {padding_idx} for padding and numbers from {padding_idx + 1} for the tokens of a row",
            next_step="leave them out; for packed documents pass cu_seqlens=(0, end, ...)",
        )
    del batch["position_ids"]


def add_positions(batch: dict[str, Any], padding_idx: int, *, has_embeddings: bool) -> None:
    """Add the positions of undivided rows to a full batch, before its padding is moved.

    Args:
        batch: The batch. Packed documents get their positions when it is divided.
        padding_idx: Id of the padding token.
        has_embeddings: Whether `input_ids` are checksums of embeddings, among which is no padding, as on one device.

    Raises:
        UnsupportedError: If embeddings have packed documents, or for other position ids.
    """
    if batch["input_ids"].dim() != 2:
        return  # `shard` raises for such ids
    is_packed = batch.get("cu_seqlens") is not None
    if has_embeddings and is_packed:
        what = "packed documents of inputs_embeds in a model whose positions count from its padding token"
        raise UnsupportedError(what, next_step="pass input_ids")
    ids = batch["input_ids"]
    rows = {**batch, "input_ids": torch.full_like(ids, padding_idx + 1) if has_embeddings else ids}
    take_positions(rows, padding_idx)
    batch.pop("position_ids", None)
    if not is_packed:
        batch[POSITIONS] = positions_from_padding(rows["input_ids"], padding_idx)


def checked_shard_positions(given: Tensor | None, ids: Tensor | None, places: Tensor, padding_idx: int) -> Tensor:
    """Return the position ids ``[B, S]`` of a call. Raise `InputError` for those that its tokens cannot have.

    Args:
        given: Position ids of the call, or None.
        ids: Token ids of this rank ``[B, S]``. None: the call has embeddings.
        places: Place of each of these tokens in its document, ``[S]``.
        padding_idx: Id of the padding token.
    """
    allowed = f"{padding_idx} for padding; for a token, its number in the row without padding, from {padding_idx + 1}"
    next_step = "call model(**sharded.shard(batch)); if you divide the tokens yourself, divide the model's "
    next_step += f"{_COUNT}(input_ids, padding_idx) of the undivided rows likewise"
    if given is None:
        what = "the positions of this model count from its padding token, which needs the undivided rows"
        raise InputError(what, got="no position_ids", allowed=allowed, next_step=next_step)
    fits = given.dim() == 2 and given.shape[1] == len(places) and (ids is None or given.shape == ids.shape)
    if fits:
        is_padding = torch.zeros_like(given, dtype=torch.bool) if ids is None else ids == padding_idx
        is_number = (given > padding_idx) & (given <= places + padding_idx + 1)
        fits = bool(torch.where(is_padding, given == padding_idx, is_number).all())
    if not fits:
        what, got = "position_ids are not those of this rank's tokens", "other numbers"
        raise InputError(what, got=got, allowed=allowed, next_step=next_step)
    return given
