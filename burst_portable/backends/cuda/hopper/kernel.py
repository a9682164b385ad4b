"""Define `HopperKernel`. It runs the launch of the forward; see `backward_launches` for the backward pass.

Triton is imported when a kernel is first launched, not before.
"""

from __future__ import annotations

import math
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import current_stream, on
from burst_portable.backends.cuda.hopper.backward_launches import (
    empty_order,
    empty_terms,
    float32_zeros,
    keys_of,
    rounded,
    run_backward_launch,
    run_separate_launch,
    run_split_launches,
)
from burst_portable.backends.cuda.hopper.compiled_kernels import compiled_kernels
from burst_portable.backends.cuda.hopper.configs import (
    MERGE_32,
    OUT_16,
    OUT_32,
    SplitConfig,
    forward_value_panels,
    panels,
    split_configs,
)
from burst_portable.backends.cuda.hopper.cuts import PassSizes, split_divides
from burst_portable.backends.cuda.hopper.descriptors import check_last_stride
from burst_portable.backends.cuda.hopper.prepared_launches import (
    build_adding_launches,
    build_forward_launch,
    build_split_launch,
    build_writing_launches,
    placed,
    score_factor,
    sizes_of,
)
from burst_portable.backends.cuda.hopper.support import declined, slower_reason
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support
from burst_portable.numerics import State, empty_state, finished
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tiles

_PLAIN = torch.contiguous_format


class HopperKernel(Kernel):
    """Attention for sm_90. The kernels merge into a running state and add to gradients, without separate launches.

    If TMA does not accept the strides or the address of an input, the input is copied first. TMA must accept the
    outputs as they are.

    A row outside all tiles may be read if it shares a block with a row of a tile. It is then multiplied by 0, so such
    rows of q, k, v and dout must be finite. The portable kernels read no such row.
    """

    name = "hopper"
    traits = KernelTraits(writes_gradients=True, writes_into=True, compiles_ahead=True, target="sm_90")

    def __init__(self) -> None:
        keep = lru_cache(maxsize=256)
        self._build_forward_launch = keep(build_forward_launch)
        self._build_adding_launches = keep(build_adding_launches)
        self._build_writing_launches = keep(build_writing_launches)
        self._build_split_launch = keep(build_split_launch)
        self._split_divides, self._split_configs = keep(split_divides), keep(split_configs)

    def supports(self, call: AttentionCall) -> Support:
        if reason := declined(call):
            return Support(False, reason)
        return Support(True, slower=slower_reason(call))

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
        out_dtype: torch.dtype = torch.float32,
    ) -> State:
        """Return (out, lse) in float32. If `state` is None, `out_dtype` may be the dtype of q, which saves a cast."""
        _check_settings(call)
        if state is not None:
            state = finished(state, q.dtype)  # both in float32; no copy if they already are
        if not tiles or q.numel() == 0:
            if state is not None:
                return state
            out, lse = finished(empty_state(q, v.shape[3]), q.dtype)
            return out.to(out_dtype), lse
        fresh = state is None
        if state is None:
            batch, rows, heads, _ = q.shape
            out = torch.empty(batch, rows, heads, v.shape[3], dtype=out_dtype, device=q.device)
            lse = torch.empty(batch, heads, rows, dtype=torch.float32, device=q.device)
            state = (out, lse)
        self._run_forward(q, k, v, tiles, call, *state, fresh=fresh, yields_to_comm=yields_to_comm)
        return state

    def _run_forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        out: Tensor,
        lse: Tensor,
        *,
        fresh: bool,
        yields_to_comm: bool,
    ) -> None:
        """Write out and LSE of all rows if `fresh`, else merge into the rows that are in tiles."""
        launch, device = self._build_forward_launch(tiles, sizes_of(q, k, v), q.device, fresh, yields_to_comm), q.device
        compiled = compiled_kernels()
        with on(device):
            stream = current_stream(device)
            counter, places = compiled.counter(device, stream), placed(call, q, k, v, out, lse)
            if bound := launch.bound.get(places):
                bound[0](stream, counter)
                return
            check_last_stride("lse", lse)
            rows, dim, value_dim, config = q.shape[1], q.shape[3], v.shape[3], launch.cut
            wide = out.dtype == torch.float32
            mode = MERGE_32 if not fresh else OUT_32 if wide else OUT_16
            head, values = panels(dim), forward_value_panels(value_dim)
            q, q_rows = compiled.aligned_panels("q", q, 64, head)
            k, k_rows = compiled.aligned_panels("k", k, config.BN, head)
            v, v_rows = compiled.aligned_panels("v", v, config.BN, values)
            made = compiled.forward(
                (device.index, q.dtype, mode, dim, value_dim, config.W, call.softcap),
                launch.grid,
                (
                    *q_rows, *k_rows, *v_rows, *compiled.panels("out", out, 64, values), out, lse, launch.table,
                    counter, score_factor(call), rows, *out.stride()[:3], lse.stride(0), lse.stride(1),
                    *launch.heads,
                ),
                (
                    config.BN, *head, *values, value_dim, config.NS, mode, int(config.share),
                    call.softcap or 0.0, config.W, config.REGS,
                ),
                {"num_warps": 4, "maxnreg": config.maxnreg},
                stream,
                counter,
            )  # fmt: skip
            if made is not None and placed(call, q, k, v, out, lse) == places:  # no input was copied
                launch.bound.keep(places, (made,))

    def forward_single_call(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, call: AttentionCall, *, yields_to_comm: bool = False
    ) -> State:
        """Return out in the dtype of q."""
        return self.attend(q, k, v, tiles, call, yields_to_comm=yields_to_comm, out_dtype=q.dtype)

    def attend_into(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        call: AttentionCall,
        out: Tensor,
        lse: Tensor,
        *,
        yields_to_comm: bool = False,
    ) -> None:
        _check_settings(call)
        if tiles and q.numel():
            self._run_forward(q, k, v, tiles, call, out, lse, fresh=True, yields_to_comm=yields_to_comm)
        else:
            out.zero_()
            lse.fill_(-math.inf)

    def attend_backward(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall, *, into: Gradients) -> None:
        q = x.q
        _check_settings(call)
        split = self._split_configs(q.shape[3], x.v.shape[3])
        if not tiles or q.numel() == 0:
            return
        with on(q.device):
            if split:
                self._run_split_backward(split, x, tiles, call, into, stores=(False, False, False))
            else:
                launches = self._build_adding_launches(tiles, sizes_of(q, x.k, x.v), q.device, call.deterministic)
                terms = empty_terms(launches[0].cut.config.BM, q)
                for launch in launches:
                    first = launch is launches[0]
                    if not launch.cut.separate:
                        run_backward_launch(launch, terms, x, call, into, store=False, writes_terms=first)
                        continue
                    keys, part = keys_of(launch, x)
                    sums = run_separate_launch(launch, terms, part, call, into[0], writes_terms=first)
                    for gradient, total in zip(into[1:], sums, strict=True):
                        gradient[:, keys] += total

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return dQ in float32, and dK and dV in the dtype of k.

        If each gradient has a separate launch (heads above 128), or accumulation is faster for all keys
        (`cuts.writing_cuts`), dQ has the dtype of q too.
        """
        _, q, k, v, *_ = x
        split = self._split_configs(q.shape[3], v.shape[3])
        if not tiles or q.numel() == 0 or k.numel() == 0:
            return super().backward_single_call(x, tiles, call)
        _check_settings(call)
        if split:
            dq = torch.empty_like(q, memory_format=_PLAIN)
            divides = self._divides(tiles, sizes_of(q, k, v), split[1], call.deterministic)
            dk, dv = float32_zeros(k, v) if divides else [torch.empty_like(x, memory_format=_PLAIN) for x in (k, v)]
            with on(q.device):
                self._run_split_backward(split, x, tiles, call, (dq, dk, dv), stores=(True, not divides, not divides))
            if divides:
                dk, dv = rounded((dk, dv), (k, v))
            return dq, dk, dv
        sizes = sizes_of(q, k, v)
        launches = self._build_writing_launches(tiles, sizes, q.device, call.deterministic)
        dq = torch.empty_like(q, dtype=torch.float32, memory_format=_PLAIN)
        if not launches:
            (launch,) = self._build_adding_launches(tiles, sizes, q.device, False)
            into = dq, *float32_zeros(k, v)
            with on(q.device):
                terms = empty_terms(launch.cut.config.BM, q)
                run_backward_launch(launch, terms, x, call, into, store=False, writes_terms=True, is_fresh=True)
            dq, dk, dv = rounded(into, (q, k, v))
            return dq, dk, dv
        terms = empty_terms(launches[0].cut.config.BM, q)
        with on(q.device):
            order = empty_order(launches[0], q)
            if launches[0].cut.separate:
                sums = run_separate_launch(launches[0], terms, x, call, dq, order, writes_terms=True, is_fresh=True)
                dk, dv = (total.to(k.dtype) for total in sums)
            else:
                dk, dv = torch.empty_like(k, memory_format=_PLAIN), torch.empty_like(v, memory_format=_PLAIN)
                into = dq, dk, dv
                run_backward_launch(
                    launches[0], terms, x, call, into, order, store=True, writes_terms=True, is_fresh=True
                )
            for launch in launches[1:]:
                keys, part = keys_of(launch, x)
                if launch.cut.separate:
                    sums = run_separate_launch(launch, terms, part, call, dq, is_fresh=True)
                else:
                    sums = [torch.zeros(few.shape, dtype=torch.float32, device=k.device) for few in (part.k, part.v)]
                    run_backward_launch(launch, terms, part, call, (dq, sums[0], sums[1]), store=False)
                torch._foreach_copy_((dk[:, keys], dv[:, keys]), sums)
        return dq, dk, dv

    def _run_split_backward(
        self,
        configs: tuple[SplitConfig, ...],
        x: BackwardInputs,
        tiles: Tiles,
        call: AttentionCall,
        into: Gradients,
        *,
        stores: tuple[bool, bool, bool],
    ) -> None:
        """Build one launch each for dQ, dK and dV, and run them."""
        sizes, device = sizes_of(x.q, x.k, x.v), x.q.device
        divides = self._divides(tiles, sizes, configs[1], call.deterministic)
        launches = [
            self._build_split_launch(tiles, sizes, device, i, config, store or not divides)
            for i, (config, store) in enumerate(zip(configs, stores, strict=True))
        ]
        run_split_launches(launches, x, call, into, stores=stores)

    def _divides(self, tiles: Tiles, sizes: PassSizes, config: SplitConfig, deterministic: bool) -> bool:
        """Return `cuts.split_divides`, or False if the order of additions must be the same in each launch."""
        return not deterministic and self._split_divides(tiles, sizes, config)

    def save_compiled_in(self, folder: Path | None) -> None:
        """Save machine code for all kernels of this class (`saved_kernels`)."""
        compiled_kernels().save_in(folder)

    def row_delta(self, dout: Tensor, out: Tensor) -> Tensor:
        """Return `numerics.row_delta`, computed by the portable kernel in one pass over the two tensors."""
        return self._portable.row_delta(dout, out)

    @cached_property
    def _portable(self) -> Kernel:
        from burst_portable.kernels.triton.triton_kernel import TritonKernel

        return TritonKernel()


def _check_settings(call: AttentionCall) -> None:
    """Raise `UnsupportedError` if the scale is not positive."""
    if not call.scale > 0:
        raise UnsupportedError(
            "the hopper kernel needs a positive scale", got=call.scale, next_step="use the triton kernel"
        )
