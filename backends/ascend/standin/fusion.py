"""Emulate `npu_fusion_attention` and its gradient on the CPU from their documentation.

The document is `torch_npu.npu_fusion_attention` in torch_npu/_op_plugin_docs.py of the wheel (the same text is
docs/context/torch_npu-npu_fusion_attention.md of Ascend/op-plugin). The quoted conditions are from it. Calls that it
forbids raise. Results that it leaves undefined are NaN, so that no caller depends on them. Correct numbers show that
the calls are correct; they prove nothing about Huawei's operator.

No code is shared with `burst_portable.backends.ascend`: masks are dense and follow the definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

UNLIMITED = 2**31 - 1
COPIES = 8  # of each number in softmax_max and softmax_sum
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MILLION = 1_000_000


class Sequence(NamedTuple):
    """One sequence, [N, S, D] each, and its position: a batch row, or rows of a packed tensor."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: int
    rows: slice
    columns: slice


def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return (attention_out, softmax_max, softmax_sum, reserved, seed, offset, numels)."""
    _refuse(pse=pse, padding_mask=padding_mask, prefix=prefix, sink=sink, dropout_mask=dropout_mask)
    _check(query, key, value, head_num, input_layout, keep_prob, actual_seq_qlen, actual_seq_kvlen)
    out = torch.empty(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    top, total = (_softmax_like(query, head_num, input_layout, softmax_layout) for _ in range(2))
    for s in _sequences(query, key, value, input_layout, actual_seq_qlen, actual_seq_kvlen):
        hidden = _hidden(s, atten_mask, sparse_mode, pre_tockens, next_tockens, input_layout)
        scores = _scores(s, scale).masked_fill(hidden, -torch.inf)
        peak = scores.amax(-1, keepdim=True)
        p = torch.exp(scores - peak)  # NaN in a fully masked row, which the document leaves undefined
        sums = p.sum(-1, keepdim=True)
        _put(out, s, (_times(p, s.v) / sums).to(query.dtype), input_layout)
        for target, numbers in ((top, peak), (total, sums)):
            _softmax_rows(target, s, input_layout, softmax_layout)[...] = numbers
    return out, top, total, torch.empty(0, dtype=query.dtype), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = UNLIMITED,
    next_tockens: int = UNLIMITED,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: Any = None,
    actual_seq_qlen: Any = None,
    actual_seq_kvlen: Any = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (dq, dk, dv, dpse, dsink). Weights are exp(score - softmax_max) / softmax_sum of the arguments."""
    _refuse(pse=pse, padding_mask=padding_mask, prefix=prefix, sink=sink, softmax_in=softmax_in)
    _check(query, key, value, head_num, input_layout, keep_prob, actual_seq_qlen, actual_seq_kvlen)
    if softmax_max is None or softmax_sum is None or attention_in is None:
        raise ValueError("softmax_max, softmax_sum and attention_in must be results of the forward pass")
    expected = _softmax_like(query, head_num, input_layout, softmax_layout)
    for given in (softmax_max, softmax_sum):
        if given.shape != expected.shape or given.dtype != torch.float32 or not given.is_contiguous():
            raise ValueError(
                f"softmax_max and softmax_sum are float32 {tuple(expected.shape)}: got {tuple(given.shape)}"
            )
    if dy.dtype != query.dtype or attention_in.dtype != query.dtype or dy.shape != attention_in.shape:
        raise ValueError("dy and attention_in have the dtype of query and the shape of its output")
    gradients = [torch.zeros(x.shape, dtype=torch.float32) for x in (query, key, value)]
    for s in _sequences(query, key, value, input_layout, actual_seq_qlen, actual_seq_kvlen):
        hidden = _hidden(s, atten_mask, sparse_mode, pre_tockens, next_tockens, input_layout)
        peak, sums = (_softmax_rows(x, s, input_layout, softmax_layout)[..., :1] for x in (softmax_max, softmax_sum))
        p = torch.exp(_scores(s, scale_value).masked_fill(hidden, -torch.inf) - peak) / sums
        dout, out = (_get(x, s, input_layout).float() for x in (dy, attention_in))
        ds = p * (_scored(dout, s.v) - (dout * out).sum(-1, keepdim=True)) * scale_value
        for target, part, keys in zip(
            gradients, (_times(ds, s.k), _summed(ds, s.q, s.k), _summed(p, dout, s.v)), (False, True, True), strict=True
        ):
            _put(target, s, part, input_layout, keys=keys)
    dq, dk, dv = (g.to(query.dtype) for g in gradients)
    return dq, dk, dv, torch.empty(0), torch.empty(0)


# ---------------------------------------------------------------------------------------------- conditions


def _refuse(**given: object) -> None:
    for name, what in given.items():
        if what is not None:
            raise NotImplementedError(f"{name} is not emulated: burst_portable passes none")


def _check(
    query: Tensor, key: Tensor, value: Tensor, heads: int, layout: str, keep: float, q_lengths: Any, k_lengths: Any
) -> None:
    if layout not in ("BSND", "TND"):
        raise NotImplementedError(f"input_layout {layout!r} is not emulated: burst_portable passes BSND and TND")
    if query.dtype not in _DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        raise TypeError(f"dtypes {query.dtype}, {key.dtype}, {value.dtype}: float16, bfloat16 or float32, all the same")
    if keep != 1.0:
        raise NotImplementedError(f"dropout (keep_prob {keep}) is not emulated: burst_portable passes none")
    if not 1 <= heads <= 256:
        raise ValueError(f"Nq {heads} is outside 1 to 256")
    if (layout == "TND") != (q_lengths is not None) or (q_lengths is None) != (k_lengths is None):
        raise ValueError("actual_seq_qlen and actual_seq_kvlen go with TND, and with nothing else")
    if layout == "TND":
        for lengths, tensor in ((q_lengths, query), (k_lengths, key)):
            if list(lengths) != sorted(lengths) or lengths[-1] != tensor.shape[0] or len(lengths) > 1000:
                raise ValueError("actual_seq_*len are running totals without a leading 0, at most 1K of them, up to T")
        if len(q_lengths) != len(k_lengths):
            raise ValueError("actual_seq_qlen and actual_seq_kvlen have an entry a sequence each")


def _check_sequence(s: Sequence) -> None:
    (n, sq, d), (nkv, sk, dk), (_, sv, dv) = s.q.shape, s.k.shape, s.v.shape
    if d != dk or dk < dv or not 1 <= d <= 768 or sk != sv:
        raise ValueError(f"head sizes {d}, {dk}, {dv}: Dq = Dk >= Dv, 1 to 768")
    if n % nkv or not (1 <= sq <= _MILLION and 1 <= sk <= _MILLION):
        raise ValueError(f"Nq / Nkv = {n} / {nkv} is a whole number; S is 1 to 1M, got {sq}, {sk}")


# --------------------------------------------------------------------------------------------------- masks


def _hidden(s: Sequence, mask: Tensor | None, mode: int, pre: int, after: int, layout: str) -> Tensor:
    """Return [Sq, Sk], True where a pair is hidden. "With atten_mask None the mode and the tokens have no effect"."""
    rows, columns = s.q.shape[1], s.k.shape[1]
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns).unsqueeze(0)
    if mask is None:
        return torch.zeros(rows, columns, dtype=torch.bool)
    if mask.dtype not in (torch.bool, torch.uint8):
        raise TypeError(f"atten_mask is bool or uint8, not {mask.dtype}")
    if mode in (0, 1):
        if mask.shape[-2:] != (rows, columns):
            raise ValueError(f"atten_mask of modes 0 and 1 is Sq x Sk, {rows} x {columns}; got {tuple(mask.shape)}")
        return mask.reshape(-1, rows, columns)[0].bool()
    if mode not in (2, 3, 4):
        raise NotImplementedError(f"sparse_mode {mode} is not emulated: burst_portable passes 0, 2, 3 and 4")
    _check_compressed(mask)
    corner = columns - rows
    if mode == 2:  # "from the upper left", tokens have no effect
        hidden = j > i
    elif mode == 3:  # "from the lower right", tokens have no effect
        hidden = j > i + corner
    else:  # "what lies between pre_tockens and next_tockens, from the lower right; they must meet"
        _check_band(pre, after, rows, columns)
        hidden = (j > i + corner + after) | (j < i + corner - pre)
    if layout == "TND" and bool(hidden.all(-1).any()):
        raise ValueError("a packed sequence may not have a row that is hidden altogether")
    return hidden


def _check_compressed(mask: Tensor) -> None:
    """Check the shape and four rows of the compressed mask, which takes little time."""
    right = tuple(mask.shape) == (2048, 2048)
    if not right or any(bool(mask[r, : r + 1].any() or not mask[r, r + 1 :].all()) for r in (0, 1, 1000, 2047)):
        raise ValueError("modes 2, 3 and 4 take the compressed mask: 2048 x 2048, True above the diagonal")


def _check_band(pre: int, after: int, rows: int, columns: int) -> None:
    if max(abs(pre), abs(after)) > UNLIMITED or pre + after < 0:
        raise ValueError(f"pre_tockens {pre} and next_tockens {after} do not meet")
    if (after < 0 and -after >= columns) or (pre < 0 and -pre >= rows):
        raise ValueError(f"a band of {pre} and {after} lies outside {rows} x {columns}")


# ------------------------------------------------------------------------------------------------- layouts


def _sequences(
    query: Tensor, key: Tensor, value: Tensor, layout: str, q_lengths: Any, k_lengths: Any
) -> Iterator[Sequence]:
    if layout == "TND":
        q_start = k_start = 0
        for q_stop, k_stop in zip(q_lengths, k_lengths, strict=True):
            rows, columns = slice(q_start, q_stop), slice(k_start, k_stop)
            q, k, v = (x[w].transpose(0, 1) for x, w in ((query, rows), (key, columns), (value, columns)))
            s = Sequence(q, k, v, 0, rows, columns)
            _check_sequence(s)
            yield s
            q_start, k_start = q_stop, k_stop
        return
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise ValueError("batch sizes differ")
    for b in range(q.shape[0]):
        s = Sequence(q[b], k[b], v[b], b, slice(0, q.shape[2]), slice(0, k.shape[2]))
        _check_sequence(s)
        yield s


def _get(x: Tensor, s: Sequence, layout: str, *, keys: bool = False) -> Tensor:
    """Return a view [N, S, D] of a sequence in a tensor like query, or like key."""
    if layout == "TND":
        return x[s.columns if keys else s.rows].transpose(0, 1)
    return x[s.batch].transpose(0, 1)


def _put(x: Tensor, s: Sequence, part: Tensor, layout: str, *, keys: bool = False) -> None:
    _get(x, s, layout, keys=keys).copy_(part)


def _softmax_like(query: Tensor, heads: int, layout: str, softmax_layout: str) -> Tensor:
    """Return NaN of shape [B, N, S, 8], or [T, N, 8] in memory of [N, T, 8] unless softmax_layout is TND."""
    if softmax_layout not in ("", "TND") or (softmax_layout and layout != "TND"):
        raise ValueError(f"softmax_layout {softmax_layout!r} with {layout}: only TND, with TND")
    if layout == "TND":
        return torch.full((query.shape[0], heads, COPIES), torch.nan)
    batch, rows, _, _ = query.shape
    return torch.full((batch, heads, rows, COPIES), torch.nan)


def _softmax_rows(x: Tensor, s: Sequence, layout: str, softmax_layout: str) -> Tensor:
    """Return a view [N, S, 8] of a sequence."""
    if layout != "TND":
        return x[s.batch]
    if softmax_layout == "TND":
        return x[s.rows].transpose(0, 1)
    return x.view(x.shape[1], x.shape[0], COPIES)[:, s.rows]


# ---------------------------------------------------------------------------------------------- arithmetic


def _grouped(x: Tensor, shared: int) -> Tensor:
    """Return [N, S, D] as [Nkv, group, S, D] in float32."""
    return x.float().unflatten(0, (shared, -1))


def _scored(x: Tensor, y: Tensor) -> Tensor:
    """Multiply [N, Sq, D] by [Nkv, Sk, D] to [N, Sq, Sk], in float64 and rounded once to float32."""
    wide = _grouped(x, y.shape[0]).double() @ y.double().unsqueeze(1).transpose(-1, -2)
    return wide.float().flatten(0, 1)


def _scores(s: Sequence, scale: float) -> Tensor:
    return _scored(s.q, s.k) * scale


def _times(p: Tensor, y: Tensor) -> Tensor:
    """Multiply [N, Sq, Sk] by [Nkv, Sk, D] to [N, Sq, D]."""
    return (_grouped(p, y.shape[0]) @ y.float().unsqueeze(1)).flatten(0, 1)


def _summed(p: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """Multiply [N, Sq, Sk] by [N, Sq, D] to [Nkv, Sk, D], summed over the heads that share a K/V head."""
    shared = like.shape[0]
    return (_grouped(p, shared).transpose(-1, -2) @ _grouped(x, shared)).sum(1)
