"""Define a kernel on CANN's fused attention (`npu_fusion_attention`) and its gradient.

Its documentation states, and this kernel relies on:

- It returns softmax_max and softmax_sum, float32 ``[B, N, S, 8]``, with eight equal numbers. LSE = max + log(sum).
- Its gradient takes both and computes weights as exp(score - max) / sum. In a ring, both must be those of the row over
  all keys: max = the global LSE and sum = 1 are valid for any block.
- It needs the global `out` (attention_in), but ranks send only delta: `numerics.surrogate_out` has its row sums.
- Packed (TND), softmax_max and softmax_sum are ``[N, T, 8]`` unless softmax_layout="TND" is requested.
- atten_mask is True where a pair is hidden. `sparse_of` returns the mode of a tile.

Partial results and gradients have the tensors' dtype and are summed in float32, for float32 tensors with compensation
(`numerics.Compensated`): float64 is too slow on these devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support, torch_dtype
from burst_portable.numerics import Compensated, State, merge_into, surrogate_out
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tile, Tiles

UNLIMITED = 2**31 - 1
"""The operator's default of pre_tockens and next_tockens."""
LONGEST = 1_000_000
"""Rows or columns of a call ("1M" in the documentation), and the tokens of a packed one."""
SEQUENCES = 1000
"""Sequences of a packed call ("1K")."""

FULL, LEFT_UP, RIGHT_DOWN, BAND = 0, 2, 3, 4


class Sparse(NamedTuple):
    """`sparse_mode`, `pre_tockens`, `next_tockens`. The mode `FULL` has no mask."""

    mode: int
    pre: int = UNLIMITED
    next: int = UNLIMITED


class FusionCall(NamedTuple):
    """One call of the operator: tiles of one mode, in ascending order of rows and of columns."""

    tiles: tuple[Tile, ...]
    sparse: Sparse

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """Return [start, stop) of the rows, adjacent ranges joined."""
        return _join_ranges((tile.q_start, tile.q_stop) for tile in self.tiles)

    @property
    def columns(self) -> tuple[tuple[int, int], ...]:
        """Return [start, stop) of the columns, adjacent ranges joined."""
        return _join_ranges((tile.k_start, tile.k_stop) for tile in self.tiles)

    def lengths(self, batch: int) -> tuple[list[int], list[int]]:
        """Return running totals of rows and of columns, over the tiles of one batch row after the other."""
        q, k = [t.rows for t in self.tiles] * batch, [t.columns for t in self.tiles] * batch
        return list(accumulate(q)), list(accumulate(k))


def sparse_of(tile: Tile) -> Sparse:
    """Return the mode whose visible pairs are those of a tile."""
    if tile.full:
        return Sparse(FULL)
    corner = tile.q_start - tile.k_start
    lo, hi = tile.lo - corner, tile.hi - corner  # lo <= i - j <= hi
    longer = tile.rows - tile.columns
    open_below, open_above = hi >= tile.rows - 1, lo <= 1 - tile.columns
    if open_below and lo == longer:
        return Sparse(RIGHT_DOWN)
    if open_below and lo == 0:
        return Sparse(LEFT_UP)
    return Sparse(BAND, UNLIMITED if open_below else hi - longer, UNLIMITED if open_above else longer - lo)


@lru_cache(maxsize=1024)
def operator_calls(tiles: Tiles, batch: int) -> tuple[FusionCall, ...]:
    """Return the operator calls of tiles."""
    calls: list[list[Tile]] = []
    modes: list[Sparse] = []
    for tile in chain.from_iterable(map(_cut, tiles)):
        sparse = sparse_of(tile)
        for group, mode in zip(calls, modes, strict=True):
            if mode == sparse and _fits(group, tile, batch):
                group.append(tile)
                break
        else:
            calls.append([tile])
            modes.append(sparse)
    return tuple(FusionCall(tuple(group), mode) for group, mode in zip(calls, modes, strict=True))


def _cut(tile: Tile) -> Iterator[Tile]:
    """Yield parts of a tile that do not exceed the operator's limit."""
    for row in range(tile.q_start, tile.q_stop, LONGEST):
        for column in range(tile.k_start, tile.k_stop, LONGEST):
            if part := tile.clipped(row, row + LONGEST, column, column + LONGEST):
                yield part


def _fits(group: list[Tile], tile: Tile, batch: int) -> bool:
    """Return whether a tile may be added to a call: it is behind all its tiles, and the call stays small enough."""
    last, count = group[-1], len(group) + 1
    rows = sum(t.rows for t in group) + tile.rows
    columns = sum(t.columns for t in group) + tile.columns
    behind = tile.q_start >= last.q_stop and tile.k_start >= last.k_stop
    return behind and count * batch <= SEQUENCES and max(rows, columns) * batch <= LONGEST


def _join_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join each range with the next one if that starts where it stops."""
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    return tuple(joined)


DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 768
MOST_HEADS = 256
_COPIES = 8  # of each number in softmax_max and softmax_sum
_MASK = 2048  # rows and columns of the compressed mask


class FusionKernel(Kernel):
    """Call CANN's fused attention on boxes, causal boxes and bands, several tiles at a time.

    Args:
        operators: Object with `npu_fusion_attention` and `npu_fusion_attention_grad`. Default: those of torch_npu.
    """

    name = "npu_fusion"
    traits = KernelTraits(splits_tiles=True)

    def __init__(self, operators: Any = None) -> None:
        self._operators = operators
        self._mask = lru_cache(_mask)
        self._index = lru_cache(maxsize=256)(_index)

    def supports(self, call: AttentionCall) -> Support:
        if call.device != "npu":
            return Support(False, f"it takes NPU tensors, not {call.device}")
        if torch_dtype(call) not in DTYPES:
            return Support(False, f"{call.dtype} is not among float16, bfloat16 and float32")
        if call.softcap is not None:
            return Support(False, "it has no softcap")
        if not call.positive_scale:
            return Support(False, "it serves only positive scales")
        if call.head_dim > LARGEST_HEAD:
            return Support(False, f"head size {call.head_dim} is larger than {LARGEST_HEAD}")
        if call.v_head_dim > call.head_dim:
            return Support(False, f"values of size {call.v_head_dim} are larger than heads of {call.head_dim}")
        if call.heads > MOST_HEADS:
            return Support(False, f"{call.heads} heads are more than {MOST_HEADS}")
        return Support(True)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        *,
        state: State | None = None,
        yields_to_comm: bool = False,
    ) -> State:
        if state is None:
            empty = Compensated.empty(q, v.shape[-1])
            state = empty if q.dtype == torch.float32 else (empty[0], empty[1])
        for part in operator_calls(tiles, q.shape[0]):
            self._merge(state, part, *self._forward(part, q, k, v, call.scale))
        return state

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        dout, q, k, v, lse, out, delta = x
        dout = dout.to(q.dtype)
        if out is None:
            assert delta is not None, "exactly one of delta and out"
            out = surrogate_out(dout, delta)
        out, lse = out.to(q.dtype), lse.float()
        with _deterministic(call.deterministic):
            for part in operator_calls(tiles, q.shape[0]):
                made = self._backward(part, dout, q, k, v, lse, out, call.scale)
                for total, gradient, ranges in zip(into, made, (part.rows, part.columns, part.columns), strict=True):
                    self._add(total, ranges, gradient.to(total.dtype))

    # ------------------------------------------------------------------------------------ one call

    def _forward(
        self, part: FusionCall, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (out [B, rows, H, Dv] in q's dtype, LSE [B, H, rows], the rounding error of LSE) of a call."""
        batch, rows = q.shape[0], sum(t.rows for t in part.tiles)
        tensors = [self._take(x, r) for x, r in ((q, part.rows), (k, part.columns), (v, part.columns))]
        options, layout = self._options(part, q)
        out, top, total, *_ = self._operator("npu_fusion_attention")(
            *(_packed(x, layout) for x in tensors), q.shape[2], layout, scale=scale, **options
        )
        lse, lost = _sum(top[..., 0], torch.log(total[..., 0]))
        if layout == "TND":
            out = out.unflatten(0, (batch, rows))
            lse, lost = (x.unflatten(0, (batch, rows)).transpose(1, 2) for x in (lse, lost))
        return out, lse, lost

    def _backward(
        self, part: FusionCall, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, out: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of the rows and columns of a call, [B, rows or columns, H, D]."""
        options, layout = self._options(part, q)
        rows, columns = part.rows, part.columns
        tensors = [self._take(x, r) for x, r in ((q, rows), (k, columns), (v, columns), (dout, rows), (out, rows))]
        *inputs, outs = (_packed(x, layout) for x in tensors)
        top = self._take(lse, rows, dim=2)
        if layout == "TND":
            top = top.transpose(1, 2).flatten(0, 1)
        top = top.unsqueeze(-1).expand(*top.shape, _COPIES).contiguous()
        softmax = {"softmax_max": top, "softmax_sum": torch.ones_like(top)}
        parts = self._operator("npu_fusion_attention_grad")(
            *inputs, q.shape[2], layout, attention_in=outs, scale_value=scale, **softmax, **options
        )
        dq, dk, dv = (part.view(x.shape) for part, x in zip(parts[:3], tensors[:3], strict=True))
        return dq, dk, dv

    def _options(self, part: FusionCall, q: Tensor) -> tuple[dict[str, Any], str]:
        """Return the arguments of both operators that are no tensors of the call, and the layout."""
        options: dict[str, Any] = {}
        if part.sparse.mode != FULL:
            mode, pre, after = part.sparse
            options = {
                "atten_mask": self._mask(q.device),
                "sparse_mode": mode,
                "pre_tockens": pre,  # the operator's spelling
                "next_tockens": after,
            }
        if len(part.tiles) == 1:
            return options, "BSND"
        q_lengths, k_lengths = part.lengths(q.shape[0])
        packed = {"actual_seq_qlen": q_lengths, "actual_seq_kvlen": k_lengths, "softmax_layout": "TND"}
        return {**options, **packed}, "TND"

    def _operator(self, name: str) -> Any:
        return getattr(torch.ops.npu if self._operators is None else self._operators, name)

    # ------------------------------------------------------------------------- rows in and out of tensors

    def _take(self, x: Tensor, ranges: tuple[tuple[int, int], ...], dim: int = 1) -> Tensor:
        """Return rows of a tensor, contiguous: the operator's documentation names no other strides."""
        if len(ranges) == 1:
            start, stop = ranges[0]
            return x.narrow(dim, start, stop - start).contiguous()
        return x.index_select(dim, self._index(ranges, x.device))

    def _add(self, total: Tensor, ranges: tuple[tuple[int, int], ...], part: Tensor) -> None:
        """Compute total[:, ranges] += part."""
        if len(ranges) == 1:
            start, stop = ranges[0]
            total[:, start:stop] += part
        else:  # no row occurs twice, so this needs no atomic additions
            index = self._index(ranges, total.device)
            total.index_copy_(1, index, total.index_select(1, index) + part)

    def _merge(self, state: State, part: FusionCall, out: Tensor, lse: Tensor, lost: Tensor) -> None:
        """Merge the result of a call into its rows of a running state."""
        tensors = (*state, *state.lost) if isinstance(state, Compensated) else state
        dims = (1, 2, 1, 2)
        index = None if len(part.rows) == 1 else self._index(part.rows, out.device)
        if index is None:
            start, stop = part.rows[0]
            rows = [x.narrow(d, start, stop - start) for x, d in zip(tensors, dims, strict=False)]
        else:
            rows = [x.index_select(d, index) for x, d in zip(tensors, dims, strict=False)]
        if len(rows) == 2:
            merge_into((rows[0], rows[1]), out, lse)
        else:
            Compensated(rows[0], rows[1], (rows[2], rows[3])).merge(out, lse, lost)
        if index is not None:
            for x, d, merged in zip(tensors, dims, rows, strict=False):
                x.index_copy_(d, index, merged)


def _mask(device: torch.device) -> Tensor:
    """Return the compressed mask, the same for every mode: True above the diagonal."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu_(1)


def _index(ranges: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Return the indices of several ranges of rows."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)


def _sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return a + b, and the rounding error of the sum (Knuth's two-sum)."""
    total = a + b
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def _packed(x: Tensor, layout: str) -> Tensor:
    """Return [B, S, N, D] in a layout of the operator."""
    return x.flatten(0, 1) if layout == "TND" else x


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Compute deterministic gradients if wanted, by torch's switch, which torch_npu passes on to CANN."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
