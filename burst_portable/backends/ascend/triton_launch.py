"""Define `AscendTritonKernel` with triton-ascend, for the calls that CANN's operator does not serve (softcap).

triton-ascend has no num_warps and num_stages. The tiles of a program must fit the unified buffer, which a test checks.
The block sizes were never timed. See `triton_kernels` for the other limits.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.backends import backends as targets
from triton.runtime.interpreter import InterpretedFunction

from burst_portable.backends.ascend import triton_kernels
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support, torch_dtype
from burst_portable.kernels.triton.arguments import name_compile_errors, padded, score_numbers, strides
from burst_portable.kernels.triton.blocks import block_table, transposed
from burst_portable.numerics import Compensated, State, row_delta
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LARGEST_HEAD = 256
LONGEST = 1 << 24  # rows or columns of a block whose indices float32 represents exactly
PROGRAMS = 24  # in a launch: the cube cores of an Atlas A2; on other devices only the speed differs


class Cut(NamedTuple):
    """Rows of a program's block, and columns of one step."""

    rows: int
    columns: int


# Padded head size -> cuts of the queries' and of the keys' pass. The keys' pass has two sums, so its cut is smaller.
HALF: Mapping[int, tuple[Cut, Cut]] = {
    64: (Cut(64, 64), Cut(64, 64)),
    128: (Cut(64, 64), Cut(32, 64)),
    256: (Cut(32, 32), Cut(32, 16)),
}
SINGLE: Mapping[int, tuple[Cut, Cut]] = {
    64: (Cut(64, 64), Cut(64, 32)),
    128: (Cut(32, 32), Cut(32, 32)),
    256: (Cut(16, 16), Cut(16, 16)),
}


@lru_cache(maxsize=1)
def interpreted() -> bool:
    """Return whether Triton's interpreter was enabled before the kernels were imported."""
    return isinstance(triton_kernels.attend_kernel, InterpretedFunction)


class AscendTritonKernel(Kernel):
    """Compute attention in Triton, in programs that fit the unified buffer of an NPU.

    Args:
        half: Block sizes for 16-bit tensors, by head size.
        single: Block sizes for float32 tensors, by head size.
        programs: Largest number of programs of a launch.
    """

    name = "triton"

    def __init__(
        self,
        half: Mapping[int, tuple[Cut, Cut]] = HALF,
        single: Mapping[int, tuple[Cut, Cut]] = SINGLE,
        programs: int = PROGRAMS,
    ) -> None:
        self._half, self._single, self._programs = half, single, programs
        self._table = lru_cache(maxsize=256)(_table)

    def supports(self, call: AttentionCall) -> Support:
        if torch_dtype(call) not in DTYPES:
            return Support(False, f"{call.dtype} is not among float16, bfloat16 and float32")
        if max(call.head_dim, call.v_head_dim) > LARGEST_HEAD:
            return Support(False, f"head sizes {call.head_dim}, {call.v_head_dim}: at most {LARGEST_HEAD}")
        if interpreted():
            return Support(True)
        if call.device != "npu":
            return Support(False, f"it takes NPU tensors, not {call.device}, and Triton's interpreter is off")
        if "ascend" not in targets:
            return Support(False, "the installed triton does not support NPUs: pip install triton-ascend")
        if shutil.which("bishengir-compile") is None:
            return Support(False, "CANN's compiler bishengir-compile is not on the path: source its set_env.sh")
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
        if q.dtype != torch.float32 or not (state is None or isinstance(state, Compensated)):
            return self._attend(q, k, v, tiles, call, state)
        part = self._attend(q, k, v, tiles, call, None)  # the kernel's merging lacks compensation
        if state is None:
            return Compensated(*part, (torch.zeros_like(part[0]), torch.zeros_like(part[1])))
        state.merge(*part)
        return state

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, state: State | None) -> State:
        merge = state is not None
        if state is None:
            batch, rows, heads, _ = q.shape
            out = torch.empty(batch, rows, heads, v.shape[-1], dtype=torch.float32, device=q.device)
            state = out, torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
        cut = self._cut(q, v)[0]
        table, blocks = self._table(tiles, q.shape[1], k.shape[1], cut, q.device, every_row=not merge)
        steps = (*strides(q, k, v, state[0]), *state[1].stride())
        arguments = (q, k, v, *state, table, *score_numbers(call), *steps, q.shape[1])
        self._run(triton_kernels.attend_kernel, arguments, blocks, q.shape[2], q, k, v, cut, call, MERGE=merge)
        return state

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        dout, q, k, v, lse, out, delta = x
        dout = dout.to(q.dtype) if dout.stride(-1) == 1 else dout.to(q.dtype).contiguous()
        if delta is None:
            assert out is not None, "exactly one of delta and out"
            delta = row_delta(dout, out)
        lse, delta, (dq, dk, dv) = lse.float(), delta.float(), into
        shared = (*strides(q, k, v, dout), *lse.stride(), *delta.stride())
        numbers = (*score_numbers(call), float(call.scale))
        queries_cut, keys_cut = self._cut(q, v)
        turned = Tiles(transposed(tile) for tile in tiles)
        table, blocks = self._table(turned, k.shape[1], q.shape[1], keys_cut, q.device)
        arguments = (q, k, v, dout, lse, delta, dk, dv, table, *numbers, *shared, *strides(dk, dv), k.shape[1])
        self._run(triton_kernels.keys_kernel, arguments, blocks, k.shape[2], q, k, v, keys_cut, call)
        table, blocks = self._table(tiles, q.shape[1], k.shape[1], queries_cut, q.device)
        arguments = (q, k, v, dout, lse, delta, dq, table, *numbers, *shared, *strides(dq), q.shape[1])
        self._run(triton_kernels.queries_kernel, arguments, blocks, q.shape[2], q, k, v, queries_cut, call)

    # ------------------------------------------------------------------------------------- launching

    def _cut(self, q: Tensor, v: Tensor) -> tuple[Cut, Cut]:
        head = max(padded(q.shape[-1]), padded(v.shape[-1]))
        sizes = self._single if q.dtype == torch.float32 else self._half
        return sizes[min(size for size in sizes if size >= head)]

    def _run(
        self,
        kernel: Any,
        arguments: tuple[Any, ...],
        blocks: int,
        heads: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cut: Cut,
        call: AttentionCall,
        **flags: bool,
    ) -> None:
        work = blocks * heads * q.shape[0]
        if not work:
            return
        constants = {
            "R": cut.rows,
            "C": cut.columns,
            "D": q.shape[-1],
            "DV": v.shape[-1],
            "PADDED_D": padded(q.shape[-1]),
            "PADDED_DV": padded(v.shape[-1]),
            "CAP": call.softcap is not None,
            "PRECISION": "ieee",
            **flags,
        }
        sizes = blocks, heads, q.shape[2] // k.shape[2], work
        with name_compile_errors(kernel, f"npu, {q.dtype}", constants, "pass other cuts to AscendTritonKernel"):
            kernel[(min(work, self._programs),)](*arguments, *sizes, **constants)


def _table(
    tiles: Tiles, rows: int, columns: int, cut: Cut, device: torch.device, *, every_row: bool = False
) -> tuple[Tensor, int]:
    """Return the table of kernels/triton/blocks on the device, and its number of blocks."""
    if max(rows, columns) >= LONGEST:
        got = f"{rows} rows, {columns} columns"
        raise UnsupportedError("blocks that are too long", got=got, allowed=f"less than {LONGEST}")
    made = block_table(tiles, rows, columns, *cut, every_row=every_row)
    return torch.from_numpy(made.data).to(device), made.blocks
