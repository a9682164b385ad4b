"""Run the launches of a backward pass: first the row terms, then one launch or several that compute gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from burst_portable.backends.cuda.driver import Bound, current_stream
from burst_portable.backends.cuda.hopper.compiled_kernels import compiled_kernels
from burst_portable.backends.cuda.hopper.configs import DQ, DV, KEY_BLOCK, SplitConfig, panels
from burst_portable.backends.cuda.hopper.cuts import BackwardCut
from burst_portable.backends.cuda.hopper.descriptors import check_last_stride
from burst_portable.backends.cuda.hopper.outer_blocks import Span
from burst_portable.backends.cuda.hopper.prepared_launches import ROWS_OF_TERMS, PreparedLaunch, placed, score_factor
from burst_portable.kernels.base import BackwardInputs, Gradients, align_rows
from burst_portable.kernels.triton.arguments import padded as padded_size
from burst_portable.numerics import row_delta
from burst_portable.planning.call import AttentionCall


def run_split_launches(
    launches: Sequence[PreparedLaunch[SplitConfig]],
    x: BackwardInputs,
    call: AttentionCall,
    into: Gradients,
    *,
    stores: tuple[bool, bool, bool],
) -> None:
    """Compute dQ, dK and dV with one launch each. Each writes its gradient in 16 bits if it `stores`, else adds."""
    q, device = x.q, x.q.device
    stream, terms = current_stream(device), empty_terms(KEY_BLOCK, q)
    # The first launch keeps all of them, so the key has the addresses of the other tables.
    tables = [launch.table for launch in launches[1:]]
    places = stores, x.out is None, placed(call, *(t for t in x if t is not None), terms, *into, *tables)
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
    for gradient, (launch, made, store) in enumerate(zip(launches, into, stores, strict=True)):
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
                made, terms, launch.table, call.scale, score_factor(call), *launch.heads,
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


def keys_of(launch: PreparedLaunch[BackwardCut], x: BackwardInputs) -> tuple[slice, BackwardInputs]:
    """Return the keys that a launch computes, and the inputs with only these keys."""
    if launch.cut.keys is None:
        return slice(None), x
    keys = slice(*launch.cut.keys)
    return keys, x._replace(k=x.k[:, keys], v=x.v[:, keys])


def run_separate_launch(
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
    """Run a launch whose programs write dk and dv separately. Add to dq, and return the sums dk and dv in float32.

    Args:
        launch: Launch whose programs write dk and dv separately (`BackwardCut.separate`).
        terms: See `run_backward_launch`.
        x: Inputs with the keys of the launch only.
        call: Settings of the call.
        dq: float32 [B, Sq, Hq, D].
        order: See `run_backward_launch`.
        writes_terms: See `run_backward_launch`.
        is_fresh: See `run_backward_launch`.
    """
    k, v, heads = x.k, x.v, x.q.shape[2]
    rows, group = k.shape[1], heads // k.shape[2]
    written = sum(count for _, count in launch.parts) * KEY_BLOCK or rows
    shape = k.shape[0], written, heads
    if k.shape == v.shape:  # one tensor for both, and so one sum, take less host time
        together = torch.empty(2, *shape, k.shape[3], dtype=torch.float32, device=k.device)
        separate = [*together.unbind()]
    else:
        separate = [torch.empty(*shape, x.shape[3], dtype=torch.float32, device=k.device) for x in (k, v)]
    into = dq, separate[0], separate[1]
    run_backward_launch(launch, terms, x, call, into, order, store=True, writes_terms=writes_terms, is_fresh=is_fresh)
    if k.shape == v.shape:
        return [*_summed(together, group, launch.parts, rows).unbind()]
    return [_summed(each, group, launch.parts, rows) for each in separate]


def _summed(x: Tensor, group: int, parts: Sequence[tuple[Span, int]], keys: int) -> Tensor:
    """Return the sums over parts and query heads of x [..., rows, Hq, D], which has `KEY_BLOCK` rows per part.

    Args:
        x: The rows of each part, or of each key if there are no parts.
        group: Query heads per K/V head.
        parts: See `PreparedLaunch`.
        keys: Number of keys. Those of no part get 0.

    Returns:
        [..., keys, Hkv, D].
    """
    x = x.unflatten(-2, (-1, group))
    if not parts:
        return torch.sum(x, -2)
    sums: list[Tensor] = []
    at = 0
    for (start, stop), count in parts:
        one = x[..., at : at + count * KEY_BLOCK, :, :, :].unflatten(-4, (count, KEY_BLOCK))
        sums.append(one.sum((-5, -2))[..., : stop - start, :, :])
        at += count * KEY_BLOCK
    if [span for span, _ in parts] == [(0, keys)]:
        return sums[0]
    total = torch.zeros(*x.shape[:-4], keys, x.shape[-3], x.shape[-1], dtype=x.dtype, device=x.device)
    for (span, _), one in zip(parts, sums, strict=True):
        total[..., slice(*span), :, :] = one
    return total


def run_backward_launch(
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
    """Run a launch of the kernel that computes all gradients, on the current device.

    It writes dk and dv if `store`, and adds to them otherwise. If `store`, they must be contiguous. It adds to dq, or
    computes it if `is_fresh`, by several launches if there are any. If `writes_terms`, another launch before writes the
    row terms and, if `is_fresh`, clears dq. If additions are ordered, it also writes the turns to `order`, memory from
    `empty_order`. Default: they are copied by torch.
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
            call.scale, score_factor(call), *launch.heads, dk.shape[1],
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


def float32_zeros(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return contiguous float32 zeros with the shapes of k and v. One tensor for both takes less host time than two."""
    if k.shape != v.shape:
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (k, v))
    else:
        dk, dv = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device).unbind()
    return dk, dv


def rounded(sums: tuple[Tensor, ...], like: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert contiguous sums to the dtypes of other tensors. One launch takes less host time than one for each."""
    made = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in like)
    torch._foreach_copy_(made, sums)
    return made


def _folds(dtype: torch.dtype) -> int:
    """Return 1 if the scale is folded into P, else 0. It is free in bf16. In fp16, small P would be subnormal."""
    return int(dtype == torch.bfloat16)


def _with_aligned_dout(x: BackwardInputs) -> BackwardInputs:
    dout = align_rows(x.dout)
    return x if dout is x.dout else x._replace(dout=dout)


def empty_terms(block: int, q: Tensor) -> Tensor:
    """Return memory for the row terms of q [B, Sq, H, D]: [2·B·H, padded rows] in float32.

    The last block may start at the last row, so the padding covers a whole `block`.
    """
    batch, rows, heads, _ = q.shape
    padded = -(-(rows + block) // ROWS_OF_TERMS) * ROWS_OF_TERMS
    return torch.empty(2 * batch * heads, padded, dtype=torch.float32, device=q.device)


def empty_order(launch: PreparedLaunch[BackwardCut], q: Tensor) -> Tensor | None:
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
    check_last_stride("lse", lse)
    if out is not None and out.element_size() not in (2, 4):
        delta, out = row_delta(dout, out), None
    if out is None:
        assert delta is not None, "exactly one of delta and out"
        check_last_stride("delta", delta)
        source, terms = dout, delta.float()
    else:
        source, terms = align_rows(out), lse
    out_strides, dout_strides = compiled.strides("out", source, 4), compiled.strides("dout", dout, 8)
    clear, fresh, blocks = cleared is not None, (made, made, made), 0  # not read
    if order is not None and launch is not None and launch.turns is not None and launch.cleared is not None:
        fresh, blocks = (launch.turns, launch.cleared, order), launch.turns.numel()
    written = compiled.row_terms(
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
