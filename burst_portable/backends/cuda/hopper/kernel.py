"""Define `HopperKernel`, which launches the kernels of `forward`, `backward` and `split_backward`.

Triton is imported when a kernel is first launched, not before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import Bound, current_stream, on
from burst_portable.backends.cuda.hopper.block_tables import Span
from burst_portable.backends.cuda.hopper.configs import (
    DQ,
    DV,
    KEY_BLOCK,
    MERGE_32,
    OUT_16,
    OUT_32,
    BackwardCut,
    Pass,
    SplitConfig,
    forward_value_panels,
    panels,
    split_configs,
    split_divides,
)
from burst_portable.backends.cuda.hopper.launch import (
    ROWS_OF_TERMS,
    PreparedLaunch,
    adding_launches,
    compiled_kernels,
    forward_launch,
    placed,
    sizes_of,
    split_launch,
    writing_launches,
)
from burst_portable.errors import UnsupportedError
from burst_portable.kernels.base import BackwardInputs, Gradients, Kernel, Support, align_rows
from burst_portable.kernels.triton.arguments import LOG2_E
from burst_portable.kernels.triton.arguments import padded as padded_size
from burst_portable.numerics import State, empty_state, finished, row_delta
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.tiles import Tiles

TRITON_FROM, TRITON_BELOW = (3, 6), (3, 10)
"""First Triton version whose Gluon compiles these kernels, and first later version that is not supported.

See tests/backends/cuda/hopper/test_kernel_machine_code.py.
"""

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
        self._forward_launch, self._adding_launches = keep(forward_launch), keep(adding_launches)
        self._writing_launches, self._split_launch = keep(writing_launches), keep(split_launch)
        self._split_divides, self._split_configs = keep(split_divides), keep(split_configs)

    def supports(self, call: AttentionCall) -> Support:
        if reason := _declined(call):
            return Support(False, reason)
        return Support(True, slower=_slower(call))

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
        self._launch_forward(q, k, v, tiles, call, *state, fresh=fresh, yields_to_comm=yields_to_comm)
        return state

    def _launch_forward(
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
        launch, device = self._forward_launch(tiles, sizes_of(q, k, v), q.device, fresh, yields_to_comm), q.device
        compiled = compiled_kernels()
        with on(device):
            stream = current_stream(device)
            counter, places = compiled.counter(device, stream), placed(call, q, k, v, out, lse)
            if bound := launch.bound.get(places):
                bound[0](stream, counter)
                return
            _check_last_stride("lse", lse)
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
                    counter, _score_factor(call), rows, *out.stride()[:3], lse.stride(0), lse.stride(1),
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
            self._launch_forward(q, k, v, tiles, call, out, lse, fresh=True, yields_to_comm=yields_to_comm)
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
                self._launch_split(split, x, tiles, call, into, store=False)
            else:
                launches = self._adding_launches(tiles, sizes_of(q, x.k, x.v), q.device, call.deterministic)
                terms = _empty_terms(launches[0].cut.config.BM, q)
                for launch in launches:
                    first = launch is launches[0]
                    if not launch.cut.apart:
                        _launch_backward(launch, terms, x, call, into, store=False, writes_terms=first)
                        continue
                    keys, part = _keys_of(launch, x)
                    sums = _sums_apart(launch, terms, part, call, into[0], writes_terms=first)
                    for gradient, total in zip(into[1:], sums, strict=True):
                        gradient[:, keys] += total

    def backward_single_call(self, x: BackwardInputs, tiles: Tiles, call: AttentionCall) -> Gradients:
        """Return dQ in float32, and dK and dV in the dtype of k.

        If each gradient has a separate launch (heads above 128), or accumulation is faster for all keys
        (`configs.writing_cuts`), dQ has the dtype of q too.
        """
        _, q, k, v, *_ = x
        split = self._split_configs(q.shape[3], v.shape[3])
        if not tiles or q.numel() == 0 or k.numel() == 0:
            return super().backward_single_call(x, tiles, call)
        _check_settings(call)
        if split:
            if self._divides(tiles, sizes_of(q, k, v), split[1], call.deterministic):
                return _rounded(super().backward_single_call(x, tiles, call), x)
            dq, dk, dv = (torch.empty_like(x, memory_format=_PLAIN) for x in (q, k, v))
            with on(q.device):
                self._launch_split(split, x, tiles, call, (dq, dk, dv), store=True)
            return dq, dk, dv
        about = sizes_of(q, k, v)
        launches = self._writing_launches(tiles, about, q.device, call.deterministic)
        dq = torch.empty_like(q, dtype=torch.float32, memory_format=_PLAIN)
        if not launches:
            (launch,) = self._adding_launches(tiles, about, q.device, False)
            into = dq, *_zeros_like(k, v)
            with on(q.device):
                terms = _empty_terms(launch.cut.config.BM, q)
                _launch_backward(launch, terms, x, call, into, store=False, writes_terms=True, is_fresh=True)
            return _rounded(into, x)
        terms = _empty_terms(launches[0].cut.config.BM, q)
        with on(q.device):
            order = _empty_order(launches[0], q)
            if launches[0].cut.apart:
                sums = _sums_apart(launches[0], terms, x, call, dq, order, writes_terms=True, is_fresh=True)
                dk, dv = (total.to(k.dtype) for total in sums)
            else:
                dk, dv = torch.empty_like(k, memory_format=_PLAIN), torch.empty_like(v, memory_format=_PLAIN)
                into = dq, dk, dv
                _launch_backward(launches[0], terms, x, call, into, order, store=True, writes_terms=True, is_fresh=True)
            for launch in launches[1:]:
                keys, part = _keys_of(launch, x)
                if launch.cut.apart:
                    sums = _sums_apart(launch, terms, part, call, dq, is_fresh=True)
                else:
                    sums = [torch.zeros(few.shape, dtype=torch.float32, device=k.device) for few in (part.k, part.v)]
                    _launch_backward(launch, terms, part, call, (dq, sums[0], sums[1]), store=False)
                dk[:, keys], dv[:, keys] = sums
        return dq, dk, dv

    def _launch_split(
        self,
        configs: tuple[SplitConfig, ...],
        x: BackwardInputs,
        tiles: Tiles,
        call: AttentionCall,
        into: Gradients,
        *,
        store: bool,
    ) -> None:
        """Compute dQ, dK and dV with one launch each. If `store`, write 16-bit gradients, else add to float32 ones."""
        q, device = x.q, x.q.device
        stream, terms, about = current_stream(device), _empty_terms(KEY_BLOCK, q), sizes_of(q, x.k, x.v)
        whole = store or not self._divides(tiles, about, configs[1], call.deterministic)
        launches = [self._split_launch(tiles, about, device, i, config, whole) for i, config in enumerate(configs)]
        # The first launch keeps all of them, so the key has the addresses of the other tables.
        tables = [launch.table for launch in launches[1:]]
        places = store, x.out is None, placed(call, *(t for t in x if t is not None), terms, *into, *tables)
        if bound := launches[0].bound.get(places):
            for one in bound:
                one(stream)
            return
        aligned = _with_aligned_dout(x)
        every = [_write_terms(terms, aligned, call)]
        dout, q, k, v, *_ = aligned
        compiled, dim, value_dim = compiled_kernels(), q.shape[3], v.shape[3]
        head, values = panels(dim), panels(value_dim)
        # The launches read the copies, if there are any, so the copies must live as long as the launches.
        q, k = (compiled.aligned_panels(name, x, 64, head)[0] for name, x in (("q", q), ("k", k)))
        v, dout = (compiled.aligned_panels(name, x, 64, values)[0] for name, x in (("v", v), ("dout", dout)))
        for gradient, (launch, made) in enumerate(zip(launches, into, strict=True)):
            config = launch.cut
            fixed, streamed = ((q, dout), (k, v)) if gradient == DQ else ((k, v), (q, dout))
            inputs = (
                *compiled.panels("q or k", fixed[0], 64, head),
                *compiled.panels("dout or v", fixed[1], 64, values),
                *compiled.panels("k or q", streamed[0], config.BN, head),
                *compiled.panels("v or dout", streamed[1], config.BN, values),
            )
            launched = compiled.split_backward(
                (device.index, q.dtype, gradient, dim, value_dim, store, call.softcap),
                launch.grid,
                (
                    *inputs, compiled.vector(terms, config.BN),
                    *compiled.panels("a gradient", made, 64, values if gradient == DV else head),
                    made, terms, launch.table, call.scale, _score_factor(call), *launch.heads,
                    made.shape[1], terms.shape[1], *made.stride()[:3],
                ),
                (
                    gradient, config.BN, *head, dim, *values, value_dim, config.NX, config.NY, _folds(q.dtype),
                    int(store), call.softcap or 0.0, config.early, config.REGS,
                ),
                {"num_warps": 4, "maxnreg": config.maxnreg},
                stream,
            )  # fmt: skip
            every.append(launched)
        copied = q is not x.q or k is not x.k or v is not x.v or dout is not x.dout
        bound = tuple(one for one in every if one is not None)
        if not copied and len(bound) == len(every):
            launches[0].bound.keep(places, bound)

    def _divides(self, tiles: Tiles, about: Pass, config: SplitConfig, deterministic: bool) -> bool:
        """Return `configs.split_divides`, or False if the order of additions must be the same in each launch."""
        return not deterministic and self._split_divides(tiles, about, config)

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


def _keys_of(launch: PreparedLaunch[BackwardCut], x: BackwardInputs) -> tuple[slice, BackwardInputs]:
    """Return the keys that a launch computes, and the inputs with only these keys."""
    if launch.cut.keys is None:
        return slice(None), x
    keys = slice(*launch.cut.keys)
    return keys, x._replace(k=x.k[:, keys], v=x.v[:, keys])


def _sums_apart(
    launch: PreparedLaunch[BackwardCut],
    terms: Tensor,
    x: BackwardInputs,
    call: AttentionCall,
    dq: Tensor,
    order: Tensor | None = None,
    *,
    writes_terms: bool = False,
    is_fresh: bool = False,
) -> list[Tensor]:
    """Add to dq, and return dk and dv in float32: the sums of the tensors that programs of a launch write apart.

    Args:
        launch: Launch whose programs write dk and dv apart (`BackwardCut.apart`).
        terms: See `_launch_backward`.
        x: Inputs with the keys of the launch only.
        call: Settings of the call.
        dq: float32 [B, Sq, Hq, D].
        order: See `_launch_backward`.
        writes_terms: See `_launch_backward`.
        is_fresh: See `_launch_backward`.
    """
    q, rows = x.q, x.k.shape[1]
    written = sum(count for _, count in launch.parts) * KEY_BLOCK or rows
    apart = [
        torch.empty(x.shape[0], written, q.shape[2], x.shape[3], dtype=torch.float32, device=q.device)
        for x in (x.k, x.v)
    ]
    into = dq, apart[0], apart[1]
    _launch_backward(launch, terms, x, call, into, order, store=True, writes_terms=writes_terms, is_fresh=is_fresh)
    return [_summed(each.unflatten(2, (x.k.shape[2], -1)), launch.parts, rows) for each in apart]


def _summed(x: Tensor, parts: Sequence[tuple[Span, int]], keys: int) -> Tensor:
    """Return the sums over parts and query heads of x [B, rows, Hkv, group, D], which has `KEY_BLOCK` rows per part.

    Args:
        x: The rows of each part, or of each key if there are no parts.
        parts: See `PreparedLaunch`.
        keys: Number of keys. Those of no part get 0.
    """
    if not parts:
        return torch.sum(x, 3)
    sums: list[Tensor] = []
    at = 0
    for (start, stop), count in parts:
        one = x[:, at : at + count * KEY_BLOCK].unflatten(1, (count, KEY_BLOCK))
        sums.append(one.sum((1, 4))[:, : stop - start])
        at += count * KEY_BLOCK
    if [span for span, _ in parts] == [(0, keys)]:
        return sums[0]
    total = torch.zeros(x.shape[0], keys, x.shape[2], x.shape[4], dtype=x.dtype, device=x.device)
    for (span, _), one in zip(parts, sums, strict=True):
        total[:, slice(*span)] = one
    return total


def _launch_backward(
    launch: PreparedLaunch[BackwardCut],
    terms: Tensor,
    x: BackwardInputs,
    call: AttentionCall,
    into: Gradients,
    order: Tensor | None = None,
    *,
    store: bool,
    writes_terms: bool = False,
    is_fresh: bool = False,
) -> None:
    """Launch the kernel that computes all gradients, on the current device.

    It writes dk and dv if `store`, and adds to them otherwise. If `store`, they must be contiguous. It adds to dq, or
    computes it if `is_fresh`, by several launches if there are any. If `writes_terms`, another launch before writes the
    row terms and, if `is_fresh`, clears dq. If additions are ordered, it also writes the turns to `order`, memory from
    `_empty_order`. Default: they are copied by torch.
    """
    dout, q, k, v, _, out, _ = x
    dq, dk, dv = into
    ordered, stream, copied_turns = launch.cut.ordered, current_stream(q.device), None
    if launch.turns is not None and order is None:
        copied_turns = launch.turns.repeat(q.shape[0] * q.shape[2])
    places = out is None, placed(call, *[t for t in (*x, order) if t is not None], terms, dq, dk, dv)
    if bound := launch.bound.get(places):
        *before, gradients = bound
        for one in before:
            one(stream)
        gradients(stream, copied_turns)
        return
    compiled = compiled_kernels()
    aligned = _with_aligned_dout(x)
    written = None
    if writes_terms:
        written = _write_terms(terms, aligned, call, cleared=dq if is_fresh else None, launch=launch, order=order)
    turns = order if copied_turns is None else copied_turns
    config, dim, value_dim = launch.cut.config, q.shape[3], v.shape[3]
    head, values = panels(dim), panels(value_dim)
    aligned_q, q_rows = compiled.aligned_panels("q", q, config.BM, head)
    aligned_k, k_rows = compiled.aligned_panels("k", k, 64, head)
    aligned_v, v_rows = compiled.aligned_panels("v", v, 64, values)
    copied = aligned.dout is not dout or aligned_q is not q or aligned_k is not k or aligned_v is not v
    made = compiled.backward(
        (
            q.device.index, q.dtype, dim, value_dim, store, dk.dtype, call.softcap, ordered, ordered and is_fresh,
            order is None,
        ),
        launch.grid,
        (
            *q_rows, *k_rows, *v_rows, *compiled.panels("dout", aligned.dout, config.BM, values),
            compiled.vector(terms, config.BM),
            *compiled.panels("dq", dq, 64, (64, head[1])),
            *compiled.panels("dk", dk, 64, head),
            *compiled.panels("dv", dv, 64, values),
            dk, dv, launch.table, launch.table if turns is None else turns,  # not read without an order
            call.scale, _score_factor(call), *launch.heads, dk.shape[1],
            0 if launch.turns is None else launch.turns.numel(),
        ),
        (
            config.BM, *head, dim, *values, value_dim, config.NQ, _folds(q.dtype), int(store),
            call.softcap or 0.0, config.early, int(ordered), int(ordered and is_fresh), config.REGS,
        ),
        {"num_warps": 4, "maxnreg": config.maxnreg},
        stream,
        copied_turns,
    )  # fmt: skip
    if made is not None and not copied and (written is not None or not writes_terms):
        launch.bound.keep(places, (made,) if written is None else (written, made))


def _zeros_like(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous float32 zeros with the shapes of k and v. One tensor for both takes less host time than two."""
    if k.shape != v.shape:
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    else:
        dk, dv = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device).unbind()
    return dk, dv


def _rounded(sums: Gradients, x: BackwardInputs) -> Gradients:
    """Convert contiguous sums to the dtypes of q, k and v. One launch takes less host time than three."""
    dq, dk, dv = (torch.empty_like(like, memory_format=_PLAIN) for like in (x.q, x.k, x.v))
    torch._foreach_copy_((dq, dk, dv), sums)
    return dq, dk, dv


def _score_factor(call: AttentionCall) -> float:
    """Return the factor from QKᵀ to the exponent of 2 in the softmax or, with a softcap, in its tanh."""
    return call.scale * LOG2_E if call.softcap is None else 2.0 * call.scale / call.softcap * LOG2_E


def _folds(dtype: torch.dtype) -> int:
    """Return 1 if the scale is folded into P, else 0. It is free in bf16. In fp16, small P would be subnormal."""
    return int(dtype == torch.bfloat16)


def _with_aligned_dout(x: BackwardInputs) -> BackwardInputs:
    dout = align_rows(x.dout)
    return x if dout is x.dout else x._replace(dout=dout)


def _empty_terms(block: int, q: Tensor) -> Tensor:
    """Return memory for the row terms of q [B, Sq, H, D]: [2·B·H, padded rows] in float32.

    The last block may start at the last row, so the padding covers a whole `block`.
    """
    batch, rows, heads, _ = q.shape
    padded = -(-(rows + block) // ROWS_OF_TERMS) * ROWS_OF_TERMS
    return torch.empty(2 * batch * heads, padded, dtype=torch.float32, device=q.device)


def _empty_order(launch: PreparedLaunch[BackwardCut], q: Tensor) -> Tensor | None:
    """Return memory for the turns of all heads of q [B, Sq, H, D]; None if additions are not ordered."""
    if launch.turns is None:
        return None
    return torch.empty(launch.turns.numel() * q.shape[0] * q.shape[2], dtype=torch.int32, device=q.device)


def _write_terms(
    made: Tensor,
    x: BackwardInputs,
    call: AttentionCall,
    *,
    cleared: Tensor | None = None,
    launch: PreparedLaunch[BackwardCut] | None = None,
    order: Tensor | None = None,
) -> Bound | None:
    """Write the row terms into `made`: shift - lse / scale of each head, then -delta of each head.

    Padded rows get -inf and 0. With a softcap, scores are multiples of the cap, so the cap replaces the scale. The same
    launch sets `cleared`, contiguous float32 [B, Sq, Hq, D], to 0. If `order` is given, it writes the turns of `launch`
    there, and clears only the rows of `PreparedLaunch.cleared`.

    Returns:
        The launch, as `Launcher.__call__`; None if it reads a copy of a tensor.
    """
    compiled = compiled_kernels()
    dout, q, _, _, lse, out, delta = x
    dim, padded = q.shape[3], made.shape[1]
    batch, rows, heads, value_dim = dout.shape
    scale = call.scale if call.softcap is None else call.softcap
    shift = math.log(call.scale) / scale if _folds(dout.dtype) else 0.0
    _check_last_stride("lse", lse)
    if out is not None and out.element_size() not in (2, 4):
        delta, out = row_delta(dout, out), None
    if out is None:
        assert delta is not None, "exactly one of delta and out"
        _check_last_stride("delta", delta)
        source, terms = dout, delta.float()
    else:
        source, terms = align_rows(out), lse
    out_strides, dout_strides = compiled.strides("out", source, 4), compiled.strides("dout", dout, 8)
    clear, fresh, blocks = cleared is not None, (made, made, made), 0  # not read
    if order is not None and launch is not None and launch.turns is not None and launch.cleared is not None:
        fresh, blocks = (launch.turns, launch.cleared, order), launch.turns.numel()
    written = compiled.prepare(
        (dout.device.index, dout.dtype, source.dtype, out is None, dim, value_dim, clear, order is None),
        (padded // ROWS_OF_TERMS * batch * heads, 1, 1),
        (
            source, dout, lse, terms, made, cleared if clear else made, *fresh,
            1.0 / scale, shift, rows, padded, heads, batch * heads, blocks,
            *out_strides, *dout_strides, *lse.stride()[:2], *terms.stride()[:2],
        ),
        (
            out is not None, clear, order is not None, ROWS_OF_TERMS, dim, value_dim,
            padded_size(dim), padded_size(value_dim),
        ),
        {"num_warps": 4},
        current_stream(dout.device),
    )  # fmt: skip
    is_copy = terms is not x.delta if x.out is None else source is not x.out
    return None if is_copy else written


def _check_settings(call: AttentionCall) -> None:
    """Raise `UnsupportedError` if the scale is not positive."""
    if not call.scale > 0:
        raise UnsupportedError(
            "the hopper kernel needs a positive scale", got=call.scale, next_step="use the triton kernel"
        )


def _check_last_stride(name: str, x: Tensor) -> None:
    """Raise `UnsupportedError` if the last dimension of x is not contiguous."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        raise UnsupportedError(f"the last stride of {name} must be 1", got=x.stride(), next_step="make it contiguous")


def _declined(call: AttentionCall) -> str:
    """Return the reason why the kernel does not support a call; "" if it supports it."""
    if call.dtype not in ("bfloat16", "float16"):
        return f"it takes bfloat16 and float16, not {call.dtype}"
    if max(call.head_dim, call.v_head_dim) > 256 or call.head_dim % 8 or call.v_head_dim % 8:
        return f"it takes head sizes that are multiples of 8 up to 256, not {call.head_dim} and {call.v_head_dim}"
    if call.v_head_dim > max(64, call.head_dim) and (call.head_dim <= 64 or call.v_head_dim > 128):
        return f"it has no cut for values of {call.v_head_dim} with heads of {call.head_dim}"
    if not call.positive_scale:
        return "it needs a positive scale"
    if reason := triton_reason() or device_reason(call.device):
        return reason
    return ""


SLOW_HEADS, SLOW_KEYS = 16, 3000
"""Largest head size, and mean keys per query from which the portable kernels were faster with it on one H200.

Their speed divided by ours, both passes, with 16 heads of 16 (benchmarks/attention.py --matrix, 2026-11-28)::

    tokens     causal    full    4 K/V heads    softcap    documents    window of 1,024
    4,096      0.86      1.04    0.73           0.85       0.55         0.73
    16,384     1.04      1.06    1.01           0.98       0.84         0.97
"""


def _slower(call: AttentionCall) -> str:
    """Return the reason why the portable kernels are faster for a call; "" if they are not."""
    if max(call.head_dim, call.v_head_dim) > SLOW_HEADS or call.num_pairs < SLOW_KEYS * call.layout.length:
        return ""
    return f"the portable kernels were faster with heads of up to {SLOW_HEADS} and long rows on one H200"


@cache
def triton_reason() -> str:
    """Return the reason why the installed Triton cannot be used; "" if it can."""
    try:
        text = version("triton")
    except PackageNotFoundError:
        return "Triton is not installed"
    numbers = tuple(int(part) for part in text.split(".")[:2])
    if TRITON_FROM <= numbers < TRITON_BELOW:
        return ""
    first, past = (".".join(map(str, v)) for v in (TRITON_FROM, TRITON_BELOW))
    return f"it needs a Triton from {first} and below {past}, not {text}"


@cache
def device_reason(device: str) -> str:
    """Return the reason why a device cannot run the kernel; "" if it can. "meta" is an sm_90 that is absent."""
    if device == "meta":
        return ""
    if torch.device(device).type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return f"it runs on NVIDIA GPUs, not on {device}"
    major, minor = torch.cuda.get_device_capability(device)
    return "" if (major, minor) == (9, 0) else f"it runs on sm_90, not on sm_{major}{minor}"
