"""Find rows of a block in its message, and the tensors of a message in its buffer.

`planning.messages` defines the layout of a message, `planning.routes.Rows` the rows of the block that it contains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.numerics import accumulation_dtype
from burst_portable.planning.messages import RowLayout
from burst_portable.planning.routes import Rows

Views = tuple[Tensor, ...]
"""The tensors of a block: (k, v), (q,), (q, dO, LSE, delta), or results. Views of a message, or local tensors."""


def message_views(layout: RowLayout, buffer: Tensor, batch: int, dtype: torch.dtype) -> Views:
    """Return the fields of contiguous messages in a buffer, each over all rows.

    A field is [B, rows, H, D], or [B, H, rows] if it holds one number per row and head. `dtype`: That of q, k and v.
    Fields of another size have its accumulation dtype.
    """
    views = []
    rows = buffer.numel() // layout.size
    for field, start in layout.fields:
        numbers = buffer.view(dtype if field.itemsize == dtype.itemsize else accumulation_dtype(dtype))
        row, first = layout.size // field.itemsize, numbers.storage_offset() + start // field.itemsize
        heads, dim = field.heads, field.dim
        if dim is None:
            views.append(numbers.as_strided((batch, heads, rows), (heads, 1, row), first))
        else:
            views.append(numbers.as_strided((batch, rows, heads, dim), (heads * dim, row, dim, 1), first))
    return tuple(views)


def copy_rows(tensors: Sequence[Tensor], views: Views, rows: Rows | None) -> None:
    """Copy these rows of the tensors of a block into the views of their message. None: all rows."""
    for view, tensor in zip(views, tensors, strict=True):
        if rows is not None and len(rows) > 1:
            for in_block, in_message in ranges_in_message(rows):
                numerics.copy(rows_of(tensor, in_block), rows_of(view, in_message))
        else:
            numerics.copy(tensor if rows is None else rows_of(tensor, rows[0]), view)


def ranges_in_message(rows: Rows) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield each range of rows of a block, and the range of rows of its message that it takes."""
    start = 0
    for first, past in rows:
        yield (first, past), (start, start + past - first)
        start += past - first


def rows_of(tensor: Tensor, rows: tuple[int, int]) -> Tensor:
    """Return rows [start, stop) of a tensor of shape [B, S, H, D] or [B, H, S]."""
    return tensor[:, rows[0] : rows[1]] if tensor.dim() == 4 else tensor[:, :, rows[0] : rows[1]]
