"""`TritonKernel`: the portable attention kernel. See `kernels.base.Kernel`.

A call looks its `Launch` up by all that shapes it (tiles, shapes, strides, dtypes) and hands Triton the tensors:
tables, strides and options are made once. Nothing is read back from the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor, float32

from burst_portable.errors import DtypeError, ShapeError, UnsupportedError
from burst_portable.kernels.base import Gradients, KernelProblem, Options, Support
from burst_portable.kernels.triton import backward, forward
from burst_portable.kernels.triton.arguments import padded, score_numbers, strides
from burst_portable.kernels.triton.blocks import BlockTable, block_table, transposed
from burst_portable.kernels.triton.prepared import (
    Launch,
    architecture,
    describable,
    interpreted,
    layout_of,
    number_strides,
    on_device_of,
)
from burst_portable.kernels.triton.tuning import HALF, SINGLE, Blocks, Table, Tuning, choose
from burst_portable.numerics import State, accumulation_dtype, running_dtype
from burst_portable.planning.tiles import Tile, Tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
_LONG_STRIDE = 1 << 23  # with longer strides, 32 bits cannot count the elements of a block's rows
_DELTA_ROWS = 64


class TritonKernel:
    """The portable kernel: forward and backward in plain Triton.

    Args:
        half, single: tuning tables for 16-bit and for float32 tensors.
        float32_precision: "ieee" (exact), or "tf32" for those who ask for it.
        cached: how many prepared launches are kept.
    """

    name = "triton"
    writes_gradients = True

    def __init__(
        self,
        half: Table = HALF,
        single: Table = SINGLE,
        *,
        float32_precision: str = "ieee",
        cached: int = 1024,
    ) -> None:
        self._half, self._single, self._precision, self._cached = half, single, float32_precision, cached
        self._launches: OrderedDict[object, Launch] = OrderedDict()

    def supports(self, problem: KernelProblem) -> Support:
        if problem.dtype not in DTYPES:
            return Support(False, f"{problem.dtype} is not among float16, bfloat16 and float32")
        largest = max(problem.head_dim, problem.value_dim)
        if largest > LARGEST_HEAD:
            return Support(False, f"head size {largest} is larger than {LARGEST_HEAD}")
        if problem.heads % problem.kv_heads:
            return Support(False, f"{problem.heads} heads are not a multiple of {problem.kv_heads} K/V heads")
        accelerator = torch.accelerator.current_accelerator()
        if not interpreted() and (accelerator is None or accelerator.type != problem.device):
            return Support(False, f"Triton has no code for {problem.device}, and its interpreter is off")
        return Support(True)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options, *, state: State | None = None
    ) -> State:
        out, lse = _new_state(q, v.shape[-1], running_dtype(q.dtype)) if state is None else state
        return self._attend(q, k, v, out, lse, tiles, options, merge=state is not None)

    def attend_whole(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, options: Options) -> State:
        """See `kernels.base`: out in the dtype of q, LSE in float32."""
        return self._attend(q, k, v, *_new_state(q, v.shape[-1], q.dtype), tiles, options, merge=False)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
        *,
        merge: bool,
    ) -> State:
        tensors = (q, k, v, out, lse)
        key = (tiles, merge, options.softcap is None, options.positive_scale, *map(layout_of, tensors))
        launch = self._launches.get(key) or self._keep(key, self._forward(tiles, options, merge, tensors))
        if launch.programs:
            with on_device_of(q):
                if launch.tma:
                    k, v = launch.described("k", k), launch.described("v", v)
                launch(q, k, v, out, lse, launch.table, *score_numbers(options))
        return out, lse

    def attend_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
        *,
        delta: Tensor | None = None,
        out: Tensor | None = None,
        into: Gradients,
    ) -> None:
        self._backward(dout, q, k, v, lse, tiles, options, delta, out, into, add=True)

    def gradients(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
    ) -> Gradients:
        """See `kernels.base`: in the dtype of q. As each element is one program's, none is added to."""
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        self._backward(dout, q, k, v, lse, tiles, options, None, out, (dq, dk, dv), add=False)
        return dq, dk, dv

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        tiles: Tiles,
        options: Options,
        delta: Tensor | None,
        out: Tensor | None,
        into: Gradients,
        *,
        add: bool,
    ) -> None:
        assert (delta is None) != (out is None), "exactly one of delta and out"
        if dout.stride(-1) != 1 or dout.dtype != q.dtype:  # the gradient of a sum has stride 0
            dout = dout.to(q.dtype).contiguous()
        if delta is None:
            assert out is not None
            delta = self.row_delta(dout, out)
        if lse.dtype != torch.float32 or delta.dtype != torch.float32:
            lse, delta = lse.float(), delta.float()
        if max(lse.stride(-1), delta.stride(-1)) >= _LONG_STRIDE:  # the kernels count these steps in 32 bits
            lse, delta = lse.contiguous(), delta.contiguous()
        with on_device_of(q):
            self.only_keys(dout, q, k, v, lse, delta, tiles, options, into, add=add)
            self.only_queries(dout, q, k, v, lse, delta, tiles, options, into, add=add)

    def only_keys(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        tiles: Tiles,
        options: Options,
        into: Gradients,
        *,
        add: bool = True,
    ) -> None:
        """The half of the backward pass that adds to dk and dv, or writes them."""
        _, dk, dv = into
        tensors = (q, k, v, dout, lse, delta, dk, dv)
        key = ("keys", add, tiles, options.softcap is None, *map(layout_of, tensors))
        launch = self._launches.get(key) or self._keep(key, self._keys(tiles, options, tensors, add=add))
        if not launch.programs:
            return
        if launch.tma:
            q, dout = launch.described("q", q), launch.described("dout", dout)
        if launch.tma_numbers:
            lse, delta = launch.described("lse", lse), launch.described("delta", delta)
        launch(q, k, v, dout, lse, delta, dk, dv, launch.table, *score_numbers(options), float(options.scale))

    def only_queries(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lse: Tensor,
        delta: Tensor,
        tiles: Tiles,
        options: Options,
        into: Gradients,
        *,
        add: bool = True,
    ) -> None:
        """The half that adds to dq, or writes it."""
        dq, _, _ = into
        tensors = (q, k, v, dout, lse, delta, dq)
        key = ("queries", add, tiles, options.softcap is None, *map(layout_of, tensors))
        launch = self._launches.get(key) or self._keep(key, self._queries(tiles, options, tensors, add=add))
        if not launch.programs:
            return
        if launch.tma:
            k, v = launch.described("k", k), launch.described("v", v)
        launch(q, k, v, dout, lse, delta, dq, launch.table, *score_numbers(options), float(options.scale))

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """`numerics.row_delta` in one pass over its two tensors."""
        if out.stride(-1) != 1:
            out = out.contiguous()
        batch, rows, heads, size = dout.shape
        delta = torch.empty(batch, heads, rows, dtype=torch.float32, device=dout.device)
        key = ("delta", layout_of(dout), layout_of(out))
        launch = self._launches.get(key)
        if launch is None:
            blocks = triton.cdiv(rows, _DELTA_ROWS)
            constants = {"R": _DELTA_ROWS, "DV": size, "PADDED_DV": padded(size), "num_warps": 4}
            sizes = (*strides(dout, out), rows, heads, blocks)
            launch = Launch(backward.delta_kernel, blocks * batch * heads, None, sizes, constants, architecture())
            self._keep(key, launch)
        if launch.programs:
            with on_device_of(dout):
                launch(dout, out, delta)
        return delta

    # ------------------------------------------------------------------------------- making launches

    def _keep(self, key: object, launch: Launch) -> Launch:
        if len(self._launches) >= self._cached:
            self._launches.popitem(last=False)
        self._launches[key] = launch
        return launch

    def _tuning(self, q: Tensor, v: Tensor) -> Tuning:
        head = max(padded(q.shape[-1]), padded(v.shape[-1]))
        return choose(self._single if q.dtype == torch.float32 else self._half, architecture(), head)

    def _forward(self, tiles: Tiles, options: Options, merge: bool, tensors: tuple[Tensor, ...]) -> Launch:
        q, k, v, out, lse = tensors
        _check(q, k, v, out)
        if merge or out.dtype != q.dtype:  # else it is the result
            _check_sums(out, lse, dtype=running_dtype(q.dtype))
        tuning = self._tuning(q, v)
        choices = _first((merge and tuning.resumed) or tuning.forward, k, v)
        blocks, table = _table(tiles, q.shape[1], k.shape[1], choices, not merge)
        flags = {
            "PRESCALE": options.softcap is None and not options.positive_scale,
            "MERGE": merge,
            "DOUBLE": out.dtype == torch.float64,
        }
        sizes = (*strides(q, k, v, out), *number_strides(lse), q.shape[1])
        return self._launch(forward.attend_kernel, blocks, table, options, (q, k, v, out), q.shape[2], sizes, **flags)

    def _keys(self, tiles: Tiles, options: Options, tensors: tuple[Tensor, ...], *, add: bool) -> Launch:
        q, k, v, dout, lse, delta, dk, dv = tensors
        _check(q, k, v, dout, dk, dv)
        _check_sums(dk, dv, dtype=torch.float32 if add else q.dtype)
        turned = [transposed(tile) for tile in tiles]
        choices = _first(self._tuning(q, v).keys, q, dout)
        blocks, table = _table(turned, k.shape[1], q.shape[1], choices, not add)
        # Descriptors of single numbers start at multiples of 16 bytes.
        numbers = blocks.tma and table.aligned and describable(lse) and describable(delta)
        flags = {"TMA_NUMBERS": numbers, "ADD": add}
        sizes = (*strides(q, k, v, dout), *number_strides(lse, delta), *strides(dk, dv), k.shape[1])
        wide = (q, k, v, dout)
        return self._launch(backward.keys_kernel, blocks, table, options, wide, k.shape[2], sizes, **flags)

    def _queries(self, tiles: Tiles, options: Options, tensors: tuple[Tensor, ...], *, add: bool) -> Launch:
        q, k, v, dout, lse, delta, dq = tensors
        _check(q, k, v, dout, dq)
        _check_sums(dq, dtype=torch.float32 if add else q.dtype)
        choices = _first(self._tuning(q, v).queries, k, v)
        blocks, table = _table(tiles, q.shape[1], k.shape[1], choices, not add)
        sizes = (*strides(q, k, v, dout), *number_strides(lse, delta), *strides(dq), q.shape[1])
        wide = (q, k, v, dout)
        return self._launch(backward.queries_kernel, blocks, table, options, wide, q.shape[2], sizes, ADD=add)

    def _launch(
        self,
        kernel: Any,
        blocks: Blocks,
        table: BlockTable,
        options: Options,
        tensors: tuple[Tensor, ...],
        heads: int,
        sizes: tuple[int, ...],
        **flags: bool,
    ) -> Launch:
        """`tensors` are q, k, v and those whose strides may be long; `heads` have programs of their own."""
        q, k, v, *_ = tensors
        together = max(n for n in range(1, blocks.together + 1) if heads % n == 0)
        constants = {
            "R": blocks.rows,
            "C": blocks.columns,
            "D": q.shape[-1],
            "DV": v.shape[-1],
            "PADDED_D": padded(q.shape[-1]),
            "PADDED_DV": padded(v.shape[-1]),
            "TOGETHER": together,
            "CAP": options.softcap is not None,
            "PRECISION": self._precision,
            "TMA": blocks.tma,
            "WIDE": any(x.stride(1) >= _LONG_STRIDE for x in tensors),
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
            **dict(blocks.extra),
            **flags,
        }
        return Launch(
            kernel,
            table.blocks * heads * q.shape[0],
            torch.from_numpy(table.data).to(q.device),
            (*sizes, max(table.blocks, 1), heads, q.shape[2] // k.shape[2]),
            constants,
            f"{architecture()}, {q.dtype}",
            columns=blocks.columns,
        )


# --------------------------------------------------------------------------------------------- helpers


def _new_state(q: Tensor, value_dim: int, dtype: torch.dtype) -> State:
    """Memory for (out, LSE), out in `dtype`. The kernel writes every row."""
    batch, rows, heads, _ = q.shape
    out = torch.empty(batch, rows, heads, value_dim, dtype=dtype, device=q.device)
    return out, torch.empty(batch, heads, rows, dtype=accumulation_dtype(dtype), device=q.device)


def _table(
    tiles: Sequence[Tile], rows: int, columns: int, choices: tuple[Blocks, ...], every_row: bool
) -> tuple[Blocks, BlockTable]:
    """The first choice that the tiles allow, and its table."""
    for blocks in (*choices, replace(choices[-1], tma=False)):
        table = block_table(tiles, rows, columns, blocks.rows, blocks.columns, every_row=every_row)
        if not (blocks.tma and table.reads_past_tiles):
            break
    return blocks, table


def _first(choices: tuple[Blocks, ...], *tensors: Tensor) -> tuple[Blocks, ...]:
    """The choices that these tensors allow, best first; at worst the last one, by pointers."""
    if all(map(describable, tensors)):
        return choices
    return tuple(c for c in choices if not c.tma) or (replace(choices[-1], tma=False),)


def _check(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    """What would become a wrong address or a wrong number."""
    if q.dtype not in DTYPES or k.dtype != q.dtype or v.dtype != q.dtype:
        raise DtypeError(
            "dtypes that this kernel cannot take", got=(q.dtype, k.dtype, v.dtype), allowed=f"one of {DTYPES}"
        )
    if any(x.stride(-1) != 1 for x in (q, k, v, *others)):
        raise ShapeError(
            "the last stride of a tensor is not 1", got=[x.stride() for x in (q, k, v)], next_step=".contiguous()"
        )
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD:
        raise UnsupportedError(
            "head size", got=(q.shape[-1], v.shape[-1]), allowed=f"up to {LARGEST_HEAD}", next_step="use reference"
        )
    if k.shape[:3] != v.shape[:3] or k.shape[0] != q.shape[0] or q.shape[2] % k.shape[2]:
        raise ShapeError("q, k and v do not go together", got=(tuple(q.shape), tuple(k.shape), tuple(v.shape)))


def _check_sums(*tensors: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """Gradients are added up in float32, running states one step wider than their parts."""
    if any(x.dtype != dtype for x in tensors):
        got = [x.dtype for x in tensors]
        raise DtypeError(f"this kernel's results here are {dtype}", got=got, next_step=f".to({dtype})")


class Tf32Kernel(TritonKernel):
    """See `TritonKernel`. What is multiplied keeps 10 bits of its mantissa, as in torch with `allow_tf32`; sums, the
    softmax and what is merged stay float32.
    """

    name = "triton-tf32"
    rounding = 2**-10

    def __init__(self) -> None:
        super().__init__(float32_precision="tf32")

    def supports(self, problem: KernelProblem) -> Support:
        if problem.dtype is not float32:
            return Support(False, f"TF32 stands in for float32, not for {problem.dtype}; the kernel triton takes that")
        return super().supports(problem)
