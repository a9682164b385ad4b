"""Shard the text model of a vision-language model: the model around it gets the full batch on every rank.

Such a model computes embeddings of images on every rank, and puts them between those of the tokens. Position ids and
masks of images need the full rows as well. So the batch is divided later than that of a language model: in a hook of
the inner text model, which gets embeddings, position ids and masks. Only labels are divided before the outer model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from burst_portable.errors import ShapeError, UnsupportedError
from burst_portable.integrations.transformers.batches.left_padding import roll_rows
from burst_portable.integrations.transformers.batches.packed_rows import documents_of
from burst_portable.integrations.transformers.deferred_mask import DeferredMask
from burst_portable.integrations.transformers.training.batch_check import checksum
from burst_portable.layout import Layout
from burst_portable.mesh import Mesh
from burst_portable.sharding import shard

_OF_TOKENS = ("input_ids", "inputs_embeds", "labels", "attention_mask", "num_items_in_batch")
"""Arguments that are divided, or counted, before the outer model."""
_OF_PACKING = ("cu_seqlens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_VISUAL, _DEEPSTACK = "visual_pos_masks", "deepstack_visual_embeds"
"""Arguments of Qwen3-VL: which tokens are of images ``[B, N]``, and what some layers add to these, ``[tokens, H]``."""
_DIVIDED = ("input_ids", "inputs_embeds", _VISUAL, "per_layer_inputs", "moe_mm_token_type_ids")
"""Arguments of text models of shape ``[B, N, ...]``, also of Gemma 4 and Ernie 4.5."""
_READY = ("shift_labels", "labels", "num_items_in_batch")
"""Arguments that the text model passes on, and whose tensors are those of this rank already."""


def take_undivided(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the tensors from the arguments of a call that the outer model gets undivided, and return them.

    Positions of text that restart are packed documents. They are then part of the batch as well, and so are other
    descriptions of the documents, which must match them.

    Raises:
        UnsupportedError: If documents are described without position ids, or differ between rows.
    """
    position_ids = kwargs.get("position_ids")
    if isinstance(position_ids, Tensor) and _restarts(position_ids, kwargs.get("attention_mask")):
        of_text = position_ids[0] if position_ids.dim() == 3 else position_ids
        if (rows := len(documents_of(of_text))) > 1:
            what, got = "packed documents that differ between rows, in a model with images", f"{rows} rows"
            raise UnsupportedError(what, got=got, next_step="pass one row per batch")
        undivided = _take(kwargs, (*_OF_TOKENS, *_OF_PACKING))
        kwargs["position_ids"] = of_text
        return undivided
    if packed := [name for name in _OF_PACKING if kwargs.get(name) is not None]:
        what = "packed documents without position_ids, in a model with images, which would count positions over them"
        next_step = "pass position_ids of the text that restart at each document"
        raise UnsupportedError(what, got=packed[0], next_step=next_step)
    return _take(kwargs, _OF_TOKENS)


def _take(kwargs: dict[str, Any], left: tuple[str, ...]) -> dict[str, Any]:
    """Remove all arguments that contain tensors and are not among those `left`, and return them."""
    names = [name for name, x in kwargs.items() if name not in left and next(_tensors(x), None) is not None]
    return {name: kwargs.pop(name) for name in names}


def _restarts(position_ids: Tensor, attention_mask: Tensor | None) -> bool:
    """Return whether the positions of text do not increase by one. Those of images, ``[3, B, N]``, may do anything."""
    if position_ids.dim() == 3:
        if position_ids.shape[0] != 4:
            return False
        position_ids = position_ids[0]
    steps = position_ids.diff(dim=-1) != 1
    if attention_mask is not None and attention_mask.dim() == 2:
        steps = steps & (attention_mask[:, :-1] != 0) & (attention_mask[:, 1:] != 0)
    return bool(steps.any())


def _tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors of an argument, which may be a list or a dictionary of them."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, list | tuple | dict):
        for part in x.values() if isinstance(x, dict) else x:
            yield from _tensors(part)


def rolled(undivided: dict[str, Any], padding: Tensor, tokens: int) -> dict[str, Any]:
    """Return the arguments with their tokens moved as `move_left_padding` moves those of the batch."""
    shape = (padding.shape[0], tokens)

    def moved(name: str, x: Any) -> Any:
        if name == "position_ids":
            planes = x if x.dim() == 3 else x.unsqueeze(0)
            moved_planes = torch.stack([roll_rows(plane.expand(shape), padding) for plane in planes])
            return moved_planes if x.dim() == 3 else moved_planes[0]
        return roll_rows(x, padding) if isinstance(x, Tensor) and x.shape[:2] == shape else x

    return {name: moved(name, x) for name, x in undivided.items()}


def checksum_of(undivided: dict[str, Any], device: torch.device) -> Tensor | int:
    """Return a checksum on a device of tensors of any dtype: of the sums of their bits along the last dimension."""
    sums = []
    for x in (x.detach() for name in sorted(undivided) for x in _tensors(undivided[name])):
        x = x.contiguous() if x.dim() else x.view(1)
        if x.is_floating_point():
            x = x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}.get(x.element_size(), torch.uint8))
        sums.append(x.sum(dim=-1).flatten().to(device, non_blocking=True))
    return checksum(*sums) if sums else 0


def lengths_of(attention_mask: Tensor | None) -> tuple[int, ...] | None:
    """Return the number of tokens in each row, of a mask ``[B, N]`` whose padding is at the end. None: no padding."""
    return None if attention_mask is None else tuple((attention_mask != 0).sum(dim=1).tolist())


def divide(kwargs: dict[str, Any], module: Any, positions: Tensor, mesh: Mesh, layout: Layout) -> dict[str, Any]:
    """Return this rank's arguments of the text model.

    Args:
        kwargs: Arguments of the full rows.
        module: The text model.
        positions: Position ids ``[1, S]`` of this rank, for a text model that gets none.
        mesh: The ranks of the sequence.
        layout: Layout of the sequence.

    Raises:
        ShapeError: If the outer model changed the number of tokens.
        UnsupportedError: If the text model has an unknown argument, or a mask that is not known.
    """
    name = type(module).__name__
    known = (*_DIVIDED, *_READY, _DEEPSTACK, "position_ids", "attention_mask")
    if unknown := [n for n, x in kwargs.items() if n not in known and next(_tensors(x), None) is not None]:
        raise UnsupportedError(f"unknown tensors among the arguments of {name}", got=", ".join(unknown))
    divided = dict(kwargs)
    for key in _DIVIDED:
        if (x := kwargs.get(key)) is not None:
            if x.shape[1] != layout.length:
                got = f"{x.shape[1]} tokens in {name}"
                raise ShapeError("the model changes the number of tokens", got=got, allowed=layout.length)
            divided[key] = shard(x, mesh, layout=layout)
    given = kwargs.get("position_ids")
    divided["position_ids"] = positions if given is None else shard(given, mesh, dim=-1, layout=layout)
    divided["attention_mask"] = _mask(kwargs.get("attention_mask"), positions.shape[1], name)
    if (added := kwargs.get(_DEEPSTACK)) is not None:
        rows = _rows(kwargs[_VISUAL], mesh, layout)
        divided[_DEEPSTACK] = [x[rows.to(x.device)] for x in added]
    return divided


def _mask(mask: Any, tokens: int, name: str) -> Any:
    """Return the mask of this rank's tokens: a placeholder, or None for the text model's own mask."""
    if isinstance(mask, dict):
        return {kind: _mask(part, tokens, name) for kind, part in mask.items()}
    if isinstance(mask, DeferredMask):
        return mask.prepared(tokens)
    if mask is None or (isinstance(mask, Tensor) and mask.dim() == 2 and bool((mask != 0).all())):
        return None
    got = f"a mask {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
    raise UnsupportedError(f"{name} gets a mask that the model around it makes itself", got=got)


def _rows(visual: Tensor, mesh: Mesh, layout: Layout) -> Tensor:
    """Return the numbers of this rank's tokens of images among those of all ranks, from a mask ``[B, N]``."""
    numbers = visual.flatten().cumsum(0).view(visual.shape) - 1
    return shard(numbers, mesh, layout=layout)[shard(visual, mesh, layout=layout)]
