"""Test attention on accelerators: one rank, and one rank per device if there are several.

python -m pytest -m device tests/device
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import MASKS
from burst_portable.conformance.oracle import find_violations

pytestmark = pytest.mark.device
ROOT = Path(__file__).parents[2]


def device() -> torch.device:
    found = torch.accelerator.current_accelerator()
    assert found is not None, "pytest -m device needs an accelerator"
    return found


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_attention_on_one_rank_matches_oracle(name, dtype, deterministic):
    """Uses the chosen kernel and all other parts of `attention`."""
    length, heads, kv_heads, d = 53, 4, 2, 64
    shapes = [(2, length, h, d) for h in (heads, kv_heads, kv_heads, heads)]
    q, k, v, dout = (torch.randn(shape, device=device()).to(dtype) for shape in shapes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    mask = MASKS[name]
    out, lse = bp.attention(*leaves, mask=mask, deterministic=deterministic, return_lse=True)
    out.backward(dout)
    answer = oracle.Answer(out, lse, *(x.grad for x in leaves))
    seen = oracle.dense_mask(mask, length)
    exact, plain = (
        oracle.attention(*(x.cpu() for x in (q, k, v, dout)), seen, scale=d**-0.5, dtype=t)
        for t in (torch.float64, dtype)
    )
    assert find_violations(answer, exact, plain, dtype) == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's and HIP's")
def test_captured_graph_of_one_rank_replays():
    """All work is on one stream, and no result keeps its autograd graph."""
    shapes = [(1, 300, heads, 64) for heads in (4, 2, 2, 4)]
    mesh = bp.Mesh.single()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        q, k, v, dout = (torch.randn(shape, device=device(), dtype=torch.bfloat16) for shape in shapes)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def step():
            out = bp.attention(*leaves, mesh=mesh, deterministic=False)
            return out.detach(), *torch.autograd.grad(out, leaves, dout)

        for _ in range(3):  # makes plans, tables and compiled kernels before the capture
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    with torch.cuda.stream(stream):
        for _ in range(2):
            with torch.no_grad():
                for x in (*leaves, dout):
                    x.copy_(torch.randn_like(x))
            graph.replay()
            for found, expected in zip(captured, step(), strict=True):
                torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two accelerators or more")
@pytest.mark.timeout(300)
def test_strategies_on_all_devices_match_oracle(tmp_path):
    """All strategies, several masks and dtypes, one rank per device."""
    ranks = torch.accelerator.device_count()
    command = [sys.executable, "-m", "tests.support.device_ranks", str(ranks), str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], cwd=ROOT) for rank in range(ranks)]
    try:
        assert [p.wait(timeout=280) for p in processes] == [0] * ranks
    finally:
        for process in processes:
            process.kill()
    for rank in range(ranks):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert len(found) >= 16
        assert {case: wrong for case, wrong in found.items() if wrong} == {}, f"rank {rank}"
