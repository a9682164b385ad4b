"""Test Ascend's fused attention (CANN) on tiles, with an operator that is emulated from its documentation.

The emulation (backends/ascend/standin/fusion.py) builds its masks from the text of the documentation. It shares no code
with the tested modules. No torch_npu is needed. `make conform-ascend` runs the same with the real torch_npu on a
simulated CANN.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from backends.ascend.standin import fusion
from burst_portable.backends.ascend import attention
from burst_portable.backends.ascend.attention import FusionKernel
from burst_portable.conformance.cases import MASKS, Case
from burst_portable.conformance.checks.comparison import compare
from burst_portable.conformance.kernel_runs import run_kernel
from burst_portable.conformance.oracle import make_inputs
from burst_portable.kernels.base import BackwardInputs
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.tiles import Tile, Tiles, find_tiles, make_tile
from tests.support.calls import kernel_call, settings

CPU = torch.device("cpu")
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def shown(call: attention.Call, rows: int, columns: int, batch: int = 1) -> torch.Tensor:
    """Return [batch, rows, columns]: how often the emulated operator computes each pair, by its own reading of the
    arguments.
    """
    seen = torch.zeros(batch, rows, columns, dtype=torch.int64)
    mode, pre, after = call.sparse
    compressed = None if mode == attention.FULL else COMPRESSED
    layout = "BSND" if len(call.tiles) == 1 else "TND"
    q_lengths, k_lengths = call.lengths(batch)
    starts = zip([0, *q_lengths], [0, *k_lengths], strict=True)
    q_rows, k_rows = (torch.cat([torch.arange(*r) for r in ranges]) for ranges in (call.rows, call.columns))
    for (q_start, k_start), q_stop, k_stop in zip(starts, q_lengths, k_lengths, strict=False):
        q, k = torch.empty(1, q_stop - q_start, 1), torch.empty(1, k_stop - k_start, 1)
        s = fusion.Sequence(q, k, k, 0, slice(0, 0), slice(0, 0))
        hidden = fusion._hidden(s, compressed, mode, pre, after, layout)
        row, i = divmod(q_start, len(q_rows))
        j = k_start % len(k_rows)
        where = q_rows[i : i + q.shape[1]].unsqueeze(1), k_rows[j : j + k.shape[1]]
        seen[row][where] += (~hidden).long()
    return seen


def dense(tiles: tuple[Tile, ...], rows: int, columns: int) -> torch.Tensor:
    """Return the same counts from the definition of a tile."""
    i, j = torch.arange(rows).unsqueeze(1), torch.arange(columns)
    seen = torch.zeros(rows, columns, dtype=torch.int64)
    for t in tiles:
        box = (i >= t.q_start) & (i < t.q_stop) & (j >= t.k_start) & (j < t.k_stop)
        seen += (box & (i - j >= t.lo) & (i - j <= t.hi)).long()
    return seen


def test_operator_calls_use_one_sparse_mode_per_small_tile() -> None:
    """All tiles of up to 4 x 4 with each band; the mode must show exactly the tile."""
    tried, modes = 0, set()
    for rows, columns, lo, hi in itertools.product(range(1, 5), range(1, 5), range(-4, 5), range(-4, 5)):
        tile = make_tile(2, 2 + rows, 1, 1 + columns, lo + 1, hi + 1)
        if tile is None:
            continue
        (call,) = attention.operator_calls(Tiles([tile]), 1)
        assert torch.equal(shown(call, 7, 6)[0], dense((tile,), 7, 6)), tile
        tried, modes = tried + 1, modes | {call.sparse.mode}
    assert tried > 400
    assert modes == {attention.FULL, attention.LEFT_UP, attention.RIGHT_DOWN, attention.BAND}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("batch", [1, 3])
def test_operator_calls_cover_each_mask_and_layout_once(name: str, batch: int) -> None:
    for layout in ("contiguous", "zigzag", "striped"):
        case = Case(mask=name, layout=layout, ranks=2)
        shards = case.make_layout().shards
        for q, k in itertools.product(shards, shards):
            tiles = find_tiles(case.make_mask(), q, k)
            rows, columns = (sum(s.count for s in x) for x in (q, k))
            calls = attention.operator_calls(tiles, batch)
            seen = sum((shown(call, rows, columns, batch) for call in calls), torch.zeros(batch, rows, columns))
            assert torch.equal(seen, dense(tiles, rows, columns).expand(batch, -1, -1).to(seen.dtype))


def test_operator_calls_pack_documents_into_one_call() -> None:
    bounds = (0, 5, 9, 20, 21, 40)
    tiles = find_tiles(
        Mask.documents(bounds), *[Case(length=40, ranks=1, layout="contiguous").make_layout().shards[0]] * 2
    )
    calls = attention.operator_calls(tiles, 2)
    assert sum(len(call.tiles) for call in calls) == 5
    (packed,) = (call for call in calls if len(call.tiles) > 1)
    assert packed.sparse.mode == attention.RIGHT_DOWN
    assert packed.lengths(2)[0] == [
        5,
        9,
        20,
        39,
        44,
        48,
        59,
        78,
    ]  # the document of one token is a full box and gets a separate call


def test_operator_calls_split_long_tiles_and_long_lists() -> None:
    long = Tile(0, 2_500_000, 0, 2_500_000, 0, 2_499_999)
    calls = attention.operator_calls(Tiles([long]), 1)
    assert all(t.rows <= attention.LONGEST and t.columns <= attention.LONGEST for call in calls for t in call.tiles)
    assert sum(t.num_pairs for call in calls for t in call.tiles) == long.num_pairs
    many = Tiles(Tile(2 * i, 2 * i + 2, 2 * i, 2 * i + 2, 0, 1) for i in range(1500))
    assert [len(call.tiles) for call in attention.operator_calls(many, 1)] == [1000, 500]
    assert [len(call.tiles) for call in attention.operator_calls(many, 3)] == [333] * 4 + [168]


CASES = [
    Case("causal", heads="gqa", dtype=torch.float32),
    Case("documents", layout="document_zigzag", heads="gqa", dtype=torch.bfloat16),
    Case("documents_window", layout="contiguous", ranks=1, heads="wide_values"),
    Case("sink_window", layout="striped", ranks=3, heads="mqa", dtype=torch.float16, deterministic=False),
    Case("fully_masked_rows", layout="contiguous", heads="mha", dtype=torch.bfloat16, memory="padded"),
    Case("custom", ranks=3, heads="mha", memory="sliced"),
    Case("share_question", ranks=2, heads="wide_heads", memory="heads"),
]


@pytest.mark.parametrize("by_out", [False, True], ids=["delta", "out"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fusion_kernel_matches_oracle(case: Case, by_out: bool) -> None:
    """A ring's call: running state in forward, global LSE and added gradients in backward."""
    x = make_inputs(case)
    outcome = compare(case, x, run_kernel(FusionKernel(fusion), case, x, CPU, by_out=by_out, times=2))
    assert outcome.ok, outcome.text()


def test_fusion_kernel_passes_global_lse_to_gradient() -> None:
    """The gradient gets softmax_max = LSE of the full row, and softmax_sum = 1."""
    handed = {}

    class Watched:
        npu_fusion_attention = staticmethod(fusion.npu_fusion_attention)

        @staticmethod
        def npu_fusion_attention_grad(*tensors: object, **how: object) -> object:
            handed.update(how)
            return fusion.npu_fusion_attention_grad(*tensors, **how)

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    tiles, options = Tiles([Tile(0, 6, 0, 6, -5, 5)]), settings(scale=0.3)
    kernel = FusionKernel(Watched)
    out, lse = kernel.attend(q, k, v, tiles, options)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double().repeat_interleave(2, 2)) * 0.3
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)
    into = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    kernel.attend_backward(BackwardInputs(q, q, k, v, lse + 1.0, out=out), tiles, options, into=into)
    assert handed["softmax_max"].shape == (2, 4, 6, 8)
    assert torch.equal(handed["softmax_max"], (lse + 1.0).unsqueeze(-1).expand(-1, -1, -1, 8))
    assert torch.equal(handed["softmax_sum"], torch.ones(2, 4, 6, 8))
    assert handed["scale_value"] == 0.3


PROBLEM = kernel_call(torch.bfloat16, "npu", 8, 2, 128, 128)
DECLINED = {
    "cpu": (replace(PROBLEM, device="cpu"), "it takes NPU tensors, not cpu"),
    "float64": (replace(PROBLEM, dtype="float64"), "float64 is not among"),
    "softcap": (replace(PROBLEM, softcap=30.0), "it has no softcap"),
    "scale": (replace(PROBLEM, scale=-1.0), "only positive scales"),
    "head": (replace(PROBLEM, head_dim=769), "head size 769 is larger than 768"),
    "value": (replace(PROBLEM, v_head_dim=192), "values of size 192 are larger than heads of 128"),
    "heads": (replace(PROBLEM, heads=257, kv_heads=257), "257 heads are more than 256"),
}


@pytest.mark.parametrize(("problem", "reason"), DECLINED.values(), ids=list(DECLINED))
def test_fusion_kernel_declines_with_reason(problem: AttentionCall, reason: str) -> None:
    assert FusionKernel().supports(PROBLEM).ok
    support = FusionKernel().supports(problem)
    assert not support.ok
    assert reason in support.reason
