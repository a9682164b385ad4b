"""Define `TritonKernel`, the portable attention kernel.

A call looks up its `Launch` by tiles, shapes, strides and dtypes, and passes the tensors to Triton. Tables, strides and
options are prepared once. Nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from burst_portable.errors import DtypeError, ShapeError, UnsupportedError
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support, torch_dtype
from burst_portable.kernels.triton import backward, forward
from burst_portable.kernels.triton.arguments import dropout_arguments, padded, score_numbers, strides
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
from burst_portable.kernels.triton.tuning import HALF, SINGLE, Blocks, Table, Tuning, choose, mean_size
from burst_portable.numerics import State, accumulation_dtype, running_dtype
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.utils.cache import Cache

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
_LONG_STRIDE = 1 << 23  # with longer strides, offsets inside a block of rows exceed 32 bits
_DELTA_ROWS = 64
_KEPT = 1024  # prepared launches
_PTXAS_12_8 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 8)


class TritonKernel(Kernel):
    """The portable kernel: forward and backward in plain Triton.

    Args:
        half: Tuning table for 16-bit tensors.
        single: Tuning table for float32 tensors.
        float32_precision: "ieee" (exact) or "tf32".
    """

    name = "triton"
    traits = KernelTraits(writes_gradients=True, compiles_ahead=True, supports_dropout=True)

    def __init__(self, half: Table = HALF, single: Table = SINGLE, *, float32_precision: str = "ieee") -> None:
        self._half, self._single, self._precision = half, single, float32_precision
        self._launches: Cache[object, Launch] = Cache(_KEPT)

    def supports(self, call: AttentionCall) -> Support:
        if torch_dtype(call) not in DTYPES:
            return Support(False, f"{call.dtype} is not among float16, bfloat16 and float32")
        largest = max(call.head_dim, call.v_head_dim)
        if largest > LARGEST_HEAD:
            return Support(False, f"head size {largest} is larger than {LARGEST_HEAD}")
        if call.heads % call.kv_heads:
            return Support(False, f"{call.heads} heads are not a multiple of {call.kv_heads} K/V heads")
        if call.device == "meta":  # `compile_only`
            return Support(True)
        accelerator = torch.accelerator.current_accelerator()
        if not interpreted() and (accelerator is None or accelerator.type != call.device):
            return Support(False, f"Triton has no code for {call.device}, and its interpreter is off")
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
        into = _new_state(q, v.shape[-1], running_dtype(q.dtype)) if state is None else state
        return self._attend(q, k, v, into, tiles, call, merge=state is not None)

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return out in the dtype of q, and LSE in float32."""
        return self._attend(q, k, v, _new_state(q, v.shape[-1], q.dtype), tiles, call, merge=False)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, state: State, tiles: Tiles, call: AttentionCall, *, merge: bool
    ) -> State:
        tensors = (q, k, v, *state)
        key = (tiles, merge, call.softcap is None, call.positive_scale, call.dropout is None, *map(layout_of, tensors))
        launch = self._launches.get(key) or self._launches.keep(key, self._forward(tiles, call, merge, tensors))
        if launch.programs:
            with on_device_of(q):
                if launch.tma:
                    k, v = launch.described("k", k), launch.described("v", v)
                launch(q, k, v, *state, launch.table, *score_numbers(call), *dropout_arguments(tiles, call, q.device))
        return state

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        self._backward(x, tiles, call, into, add=True)

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return gradients in the dtype of q. One program writes each element without adding."""
        dq, dk, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x.q, x.k, x.v))
        self._backward(x, tiles, call, (dq, dk, dv), add=False)
        return dq, dk, dv

    def _backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, into: Gradients, *, add: bool) -> None:
        dout, q, k, v, lse, out, delta = x
        if dout.stride(-1) != 1 or dout.dtype != q.dtype:  # the gradient of a sum has stride 0
            dout = dout.to(q.dtype).contiguous()
        if delta is None:
            assert out is not None, "exactly one of delta and out"
            delta = self.row_delta(dout, out)
        if lse.dtype != torch.float32 or delta.dtype != torch.float32:
            lse, delta = lse.float(), delta.float()
        if max(lse.stride(-1), delta.stride(-1)) >= _LONG_STRIDE:  # the kernels have 32-bit offsets here
            lse, delta = lse.contiguous(), delta.contiguous()
        inputs = (q, k, v, dout, lse, delta)
        with on_device_of(q):
            self.only_keys(inputs, tiles, call, into, add=add)
            self.only_queries(inputs, tiles, call, into, add=add)

    def only_keys(
        self, inputs: tuple[Tensor, ...], tiles: Tiles, call: AttentionCall, into: Gradients, *, add: bool = True
    ) -> None:
        """Compute dk and dv, one half of the backward pass. Add them to `into`, or write them.

        `inputs`: q, k, v, dout, LSE and delta.
        """
        tensors = (*inputs, *into[1:])
        for part in self._tuning(inputs[0], inputs[2]).parts:
            key = ("keys", part, add, tiles, call.softcap is None, call.dropout is None, *map(layout_of, tensors))
            launch = self._launches.get(key)
            if launch is None:
                launch = self._launches.keep(key, self._keys(tiles, call, tensors, part, add=add))
            if launch.programs:
                q, k, v, dout, lse, delta = inputs
                if launch.tma:
                    q, dout = launch.described("q", q), launch.described("dout", dout)
                if launch.tma_numbers:
                    lse, delta = launch.described("lse", lse), launch.described("delta", delta)
                numbers = *score_numbers(call), float(call.scale), *dropout_arguments(tiles, call, k.device)
                launch(q, k, v, dout, lse, delta, *into[1:], launch.table, *numbers)

    def only_queries(
        self, inputs: tuple[Tensor, ...], tiles: Tiles, call: AttentionCall, into: Gradients, *, add: bool = True
    ) -> None:
        """Compute dq, the other half. Add it to `into`, or write it. `inputs`: as for `only_keys`."""
        tensors = (*inputs, into[0])
        key = ("queries", add, tiles, call.softcap is None, call.dropout is None, *map(layout_of, tensors))
        launch = self._launches.get(key) or self._launches.keep(key, self._queries(tiles, call, tensors, add=add))
        if launch.programs:
            q, k, v, *rest = tensors
            if launch.tma:
                k, v = launch.described("k", k), launch.described("v", v)
            numbers = *score_numbers(call), float(call.scale), *dropout_arguments(tiles, call, q.device)
            launch(q, k, v, *rest, launch.table, *numbers)

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Return `numerics.row_delta`, computed in one pass over the two tensors."""
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
            self._launches.keep(key, launch)
        if launch.programs:
            with on_device_of(dout):
                launch(dout, out, delta)
        return delta

    # ------------------------------------------------------------------------------- making launches

    def _tuning(self, q: Tensor, v: Tensor) -> Tuning:
        size = mean_size(q.shape[-1], v.shape[-1])
        return choose(self._single if q.dtype == torch.float32 else self._half, architecture(), size)

    def _forward(self, tiles: Tiles, call: AttentionCall, merge: bool, tensors: tuple[Tensor, ...]) -> Launch:
        q, k, v, out, lse = tensors
        _check(q, k, v, out)
        if merge or out.dtype != q.dtype:  # else it is the result
            _check_sums(out, lse, dtype=running_dtype(q.dtype))
        tuning = self._tuning(q, v)
        choices = _first((merge and tuning.resumed) or tuning.forward, k, v)
        blocks, table = _table(tiles, q.shape[1], k.shape[1], choices, not merge)
        blocks = self._without_wgmma(blocks, q, v, out)
        flags = {
            "PRESCALE": call.softcap is None and not call.positive_scale,
            "MERGE": merge,
            "DOUBLE": out.dtype == torch.float64,
        }
        sizes = (*strides(q, k, v, out), *number_strides(lse), q.shape[1])
        return self._launch(forward.attend_kernel, blocks, table, call, (q, k, v, out), q.shape[2], sizes, **flags)

    def _without_wgmma(self, blocks: Blocks, q: Tensor, v: Tensor, out: Tensor) -> Blocks:
        """Return blocks for two warps, which multiply by mma.sync, if wgmma's operands may have wrong addresses.

        ptxas 12.8, of Triton before 3.8, makes them for sm_90 if values are smaller than heads and are loaded by
        pointers in a pipelined loop (backends/cuda/descriptors.py). TF32 with results in float64 was not examined.
        """
        smaller = _PTXAS_12_8 and v.shape[-1] < q.shape[-1] and blocks.stages > 1 and not blocks.tma
        unknown = self._precision == "tf32" and out.dtype == torch.float64 and blocks.rows >= 64
        return replace(blocks, warps=2) if architecture() == "sm_90" and (smaller or unknown) else blocks

    def _keys(self, tiles: Tiles, call: AttentionCall, tensors: tuple[Tensor, ...], part: int, *, add: bool) -> Launch:
        q, k, v, dout, lse, delta, dk, dv = tensors
        _check(q, k, v, dout, dk, dv)
        _check_sums(dk, dv, dtype=torch.float32 if add else q.dtype)
        turned = [transposed(tile) for tile in tiles]
        choices = _first(self._tuning(q, v).of_part(part), q, dout)
        blocks, table = _table(turned, k.shape[1], q.shape[1], choices, not add)
        blocks = _with_dropout(blocks, call)
        # Descriptors of single numbers start at multiples of 16 bytes.
        numbers = blocks.tma and table.aligned and describable(lse) and describable(delta)
        flags = {"TMA_NUMBERS": numbers, "ADD": add, "PART": part}
        sizes = (*strides(q, k, v, dout), *number_strides(lse, delta), *strides(dk, dv), k.shape[1])
        wide = (q, k, v, dout)
        return self._launch(backward.keys_kernel, blocks, table, call, wide, k.shape[2], sizes, **flags)

    def _queries(self, tiles: Tiles, call: AttentionCall, tensors: tuple[Tensor, ...], *, add: bool) -> Launch:
        q, k, v, dout, lse, delta, dq = tensors
        _check(q, k, v, dout, dq)
        _check_sums(dq, dtype=torch.float32 if add else q.dtype)
        choices = _first(self._tuning(q, v).queries, k, v)
        blocks, table = _table(tiles, q.shape[1], k.shape[1], choices, not add)
        blocks = _with_dropout(blocks, call)
        sizes = (*strides(q, k, v, dout), *number_strides(lse, delta), *strides(dq), q.shape[1])
        wide = (q, k, v, dout)
        return self._launch(backward.queries_kernel, blocks, table, call, wide, q.shape[2], sizes, ADD=add)

    def _launch(
        self,
        kernel: Any,
        blocks: Blocks,
        table: BlockTable,
        call: AttentionCall,
        tensors: tuple[Tensor, ...],
        heads: int,
        sizes: tuple[int, ...],
        **flags: int,
    ) -> Launch:
        """Return the launch for `tensors` (q, k, v and those whose strides may be long), with programs per `heads`."""
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
            "CAP": call.softcap is not None,
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


def _new_state(q: Tensor, v_head_dim: int, dtype: torch.dtype) -> State:
    """Return memory for (out, LSE), out in `dtype`. The kernel writes every row."""
    batch, rows, heads, _ = q.shape
    out = torch.empty(batch, rows, heads, v_head_dim, dtype=dtype, device=q.device)
    return out, torch.empty(batch, heads, rows, dtype=accumulation_dtype(dtype), device=q.device)


def _table(
    tiles: Sequence[Tile], rows: int, columns: int, choices: tuple[Blocks, ...], every_row: bool
) -> tuple[Blocks, BlockTable]:
    """Return the first choice that the tiles allow, and its table."""
    for blocks in (*choices, replace(choices[-1], tma=False)):
        table = block_table(tiles, rows, columns, blocks.rows, blocks.columns, every_row=every_row)
        if not (blocks.tma and table.reads_past_tiles):
            break
    return blocks, table


def _with_dropout(blocks: Blocks, call: AttentionCall) -> Blocks:
    """Return the blocks of a backward kernel, with more warps if it needs registers for random numbers.

    Chosen by machine code for sm_90, where four warps spill up to 1,804 bytes per thread; never timed.
    """
    spills = call.dropout is not None and architecture() == "sm_90" and blocks.warps == 4
    return replace(blocks, warps=8) if spills else blocks


def _first(choices: tuple[Blocks, ...], *tensors: Tensor) -> tuple[Blocks, ...]:
    """Return the choices that these tensors allow, best first; if none, the last one with pointers."""
    if all(map(describable, tensors)):
        return choices
    return tuple(c for c in choices if not c.tma) or (replace(choices[-1], tma=False),)


def _check(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> None:
    """Raise for tensors with which the kernel would compute wrong addresses or numbers."""
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
    """Raise unless the tensors have the dtype of the results."""
    if any(x.dtype != dtype for x in tensors):
        got = [x.dtype for x in tensors]
        raise DtypeError(f"this kernel's results here are {dtype}", got=got, next_step=f".to({dtype})")


class Tf32Kernel(TritonKernel):
    """`TritonKernel` with TF32 products: factors keep 10 bits of mantissa, as in torch with `allow_tf32`.

    Sums, the softmax and merged results stay float32.
    """

    name = "triton-tf32"
    traits = replace(TritonKernel.traits, rounding=2**-10)

    def __init__(self) -> None:
        super().__init__(float32_precision="tf32")

    def supports(self, call: AttentionCall) -> Support:
        if call.dtype != "float32":
            return Support(False, f"it takes float32, not {call.dtype}; the kernel triton takes that")
        return super().supports(call)
