"""Test calls under autocast: inputs are cast as for torch's own attention, and internal computations are not cast."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable import numerics
from burst_portable.planning.tiles import Tile


def qkv(dtype=torch.float32):
    return [torch.randn(1, 16, heads, 8).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_autocast_leaves_16_bit_call_unchanged(softcap):
    """No kernel product is computed in fewer bits, forward or backward."""

    def run(autocast):
        torch.manual_seed(0)
        q, k, v = (x.requires_grad_() for x in qkv(dtype=torch.bfloat16))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = bp.attention(q, k, v, softcap=softcap)
            out.sum().backward()
        return [out, q.grad, k.grad, v.grad]

    for with_it, without in zip(run(True), run(False), strict=True):
        assert torch.equal(with_it, without)


def dtypes(q, k=None, v=None):
    return q, k or q, v or q


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (dtypes(torch.float32), torch.bfloat16),
        (dtypes(torch.float16), torch.bfloat16),
        (dtypes(torch.float32, torch.float32, torch.bfloat16), torch.bfloat16),
        (dtypes(torch.float64), torch.float64),
    ],
    ids=str,
)
def test_autocast_casts_as_for_sdpa(given, computed, ranks):
    """Output and gradients have the dtypes of a call with tensors cast by hand."""
    torch.manual_seed(0)
    whole = [x[:, :11].to(dtype) for x, dtype in zip(qkv(), given, strict=True)]
    with torch.autocast("cpu", torch.bfloat16):
        heads_first = (x.transpose(1, 2) for x in whole)
        torchs = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    assert torchs.dtype == computed

    def work(mesh, autocast):
        parts = [bp.shard(x, mesh).requires_grad_() for x in whole]
        tensors = parts if autocast else [x.to(computed) for x in parts]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, lse = bp.attention(*tensors, mesh=mesh, seq_len=11, return_lse=True)
            kernel = bp.explain(*tensors, mesh=mesh, seq_len=11).kernel
        out.square().sum().backward()
        return [out, lse, *(x.grad for x in parts)], kernel

    casts, by_hand = (bp.run_threads(ranks, lambda mesh, on=on: work(mesh, on)) for on in (True, False))
    for (got, kernel), (expected, chosen) in zip(casts, by_hand, strict=True):
        assert kernel == chosen
        assert [x.dtype for x in got] == [computed, numerics.accumulation_dtype(computed), *given]
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)


def test_partial_attention_ignores_autocast():
    q, k, v = qkv()
    tiles = [Tile(0, 16, 0, 16, 0, 15)]
    expected = bp.partial_attention(*(x.bfloat16() for x in (q, k, v)), tiles, softcap=5.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = bp.partial_attention(q, k, v, tiles, softcap=5.0)
    assert all(map(torch.equal, found, expected))
