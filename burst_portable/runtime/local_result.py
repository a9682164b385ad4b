"""Define `LocalResult`: (out, LSE) of a rank's queries, to which the launches of a forward pass add."""

from __future__ import annotations

import torch
from torch import Tensor

from burst_portable import numerics
from burst_portable.errors import BackendUnavailableError
from burst_portable.kernels.base import Kernel
from burst_portable.numerics import State, accumulation_dtype, empty_state
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles
from burst_portable.runtime.message_views import rows_of
from burst_portable.runtime.prepared_call import PreparedCall


class LocalResult:
    """(out, LSE) of this rank's queries, in the dtypes that the kernel keeps while it merges.

    If `may_round`, out may have the dtype of q. Rows that only one step computes are then written in it directly::

        one computation                     all rows                                 forward_single_call
        several, and few rows are merged    rows that the first one completes        attend_first, attend
        several                             none: all are merged in the wider dtype  attend
    """

    def __init__(self, prepared: PreparedCall, q: Tensor, v_head_dim: int, *, may_round: bool) -> None:
        self._kernel, self._call, self._q, self._v_head_dim = prepared.kernel, prepared.kernel_call, q, v_head_dim
        self._computes_once = may_round and prepared.forward.messages.parts == 1
        merges_few = may_round and prepared.kernel.traits.writes_into
        merged = prepared.forward.plan.merged_rows(prepared.transport.rank) if merges_few else None
        self._rounded = None if merged is None else (merged, q.new_empty((*q.shape[:3], v_head_dim)))
        self._state: State | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether a launch has computed a part of the result."""
        return self._state is not None

    def attend(self, k: Tensor, v: Tensor, tiles: Tiles, *, yields_to_comm: bool) -> None:
        """Compute with a block of keys and values, and merge the part."""
        kernel, call, q = self._kernel, self._call, self._q
        if self._computes_once:
            self._state = kernel.forward_single_call(q, k, v, tiles, call, yields_to_comm=yields_to_comm)
        elif self._state is None and self._rounded is not None:
            merged, out = self._rounded
            self._state = attend_first(kernel, q, k, v, tiles, call, merged, out, yields_to_comm=yields_to_comm)
        else:
            self._state = kernel.attend(q, k, v, tiles, call, state=self._state, yields_to_comm=yields_to_comm)
        if self._state is None:  # `finish` would return fully masked rows
            raise BackendUnavailableError(f"the kernel {kernel.name!r} is broken: attend returned None")

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge a part of some rows that another rank computed."""
        assert self._rounded is None, "with helpers, all rows are merged"
        if self._state is None:
            self._state = empty_state(self._q, self._v_head_dim)
        numerics.merge_rows(self._state, rows, out, lse)

    def finish(self) -> State:
        """Return (out, LSE) after all parts."""
        if self._state is None:
            return empty_state(self._q, self._v_head_dim)
        if self._rounded is None:
            return self._state
        rows, out = self._rounded
        rows_of(out, rows).copy_(rows_of(self._state[0], rows))
        return out, self._state[1]


def attend_first(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tiles: Tiles,
    call: AttentionCall,
    merged: tuple[int, int],
    out: Tensor,
    *,
    yields_to_comm: bool = False,
) -> State:
    """Run the first of several launches, if the later ones merge only into the rows `merged`, [start, stop).

    All other rows are written into `out`, of shape [B, Sq, Hq, Dv] in the dtype of q. Return the state for later
    launches: LSE of all rows, and out of the merged rows. `kernel.traits.writes_into` must be set.
    """
    start, stop = merged
    batch, rows, heads, _ = q.shape
    wide = torch.empty(out.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
    lse = torch.empty((batch, heads, rows), dtype=wide.dtype, device=q.device)
    for first, past, into in ((0, start, out), (start, stop, wide), (stop, rows, out)):
        if first < past:
            part, some = slice(first, past), tiles.in_rows(first, past)
            kernel.attend_into(
                q[:, part], k, v, some, call, into[:, part], lse[:, :, part], yields_to_comm=yields_to_comm
            )
    return wide, lse
