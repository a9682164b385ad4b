"""Test attention in graphs of torch.compile on accelerators, together with inductor's kernels.

python -m pytest -m device tests/device/test_graph_ops.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import burst_portable as bp
from burst_portable.conformance import oracle
from burst_portable.nn import SelfAttention

# torch's own warnings: it records an empty graph, and recommends less exact float32 products.
IGNORED = "ignore:The CUDA Graph is empty", "ignore:TensorFloat32 tensor cores"
pytestmark = [pytest.mark.device, *map(pytest.mark.filterwarnings, IGNORED)]
LENGTHS = 300, 513
SCALE = 64**-0.5
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": "causal"},
    "window": {"mask": "window:100"},
    "full, softcap": {"mask": "full", "softcap": 20.0},
    "deterministic": {"mask": "causal", "deterministic": True},
    "portable kernel": {"mask": "causal", "kernel": "triton"},
    "sinks": {"mask": "causal"},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def tensors(length: int, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v, the gradient of out, and sinks."""
    found = torch.accelerator.current_accelerator()
    assert found is not None, "pytest -m device needs an accelerator"
    shapes = [(2, length, heads, 64) for heads in (4, 2, 2, 4)]
    return [*(torch.randn(shape, device=found).to(dtype) for shape in shapes), torch.randn(4, device=found)]


def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, **options: Any) -> Tensor:
    """Call attention between operators that a compiler fuses and whose memory it reuses."""
    out = bp.attention(q * 2, k.neg(), v + 1, sinks=sinks, **options)
    return out * 0.5


def results(function: Any, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves, *([None] if len(leaves) == 3 else []))
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_compiled_attention_equals_eager(case: str, dtype: torch.dtype, mode: str):
    """Two lengths alternate three times, so that graphs are recorded, replayed and rebuilt."""
    options = {"mesh": bp.Mesh.single(), "scale": SCALE, **CASES[case]}
    compiled = torch.compile(lambda *x: step(*x, **options), fullgraph=True, mode=mode)
    bound = 1e-5 if dtype == torch.float32 else 0.02
    for length in LENGTHS * 3:
        q, k, v, dout, sinks = tensors(length, dtype)
        leaves = [q, k, v, sinks] if case == "sinks" else [q, k, v]
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in results(compiled, leaves, dout)]
        for one, other in zip(found, results(lambda *x: step(*x, **options), leaves, dout), strict=True):
            assert one.isfinite().all()
            assert (one - other).abs().max() <= bound * other.abs().max()


def test_compiled_attention_matches_float64():
    options: dict[str, Any] = {"mesh": bp.Mesh.single(), "mask": "window:100", "scale": SCALE}
    compiled = torch.compile(lambda q, k, v: bp.attention(q, k, v, **options), fullgraph=True)
    q, k, v, dout, _ = tensors(LENGTHS[0], torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = compiled(*leaves)
    found = [out, *torch.autograd.grad(out, leaves, dout)]
    seen = oracle.dense_mask(bp.Mask.window(100), LENGTHS[0])
    exact = oracle.attention(*(x.detach().cpu() for x in (q, k, v, dout)), seen, scale=SCALE, dtype=torch.float64)
    for one, other in zip(found, (exact.out, exact.dq, exact.dk, exact.dv), strict=True):
        assert (one.cpu().double() - other).abs().max() <= 2e-5 * other.abs().max()


def test_compiled_checkpointed_layers_leak_no_memory():
    """Backward recomputes the layers; each step leaves as much memory allocated as the one before."""
    mesh = bp.Mesh.single()
    q, k, v, dout, _ = tensors(LENGTHS[0], torch.bfloat16)

    def layer(x: Tensor) -> Tensor:
        return x + bp.attention(x, k, v, mesh=mesh)

    def layers(x: Tensor) -> Tensor:
        for _ in range(3):
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def gradient(function: Any) -> Tensor:
        leaf = q.detach().clone().requires_grad_()
        function(leaf).backward(dout)
        assert leaf.grad is not None
        return leaf.grad

    compiled = torch.compile(layers, fullgraph=True)
    taken = []
    for _ in range(5):
        found = gradient(compiled)
        taken.append(torch.accelerator.memory_allocated())
    assert taken[-1] == taken[1]
    other = gradient(layers)
    assert (found - other).abs().max() <= 0.02 * other.abs().max()


def test_compiled_module_is_one_graph():
    module = SelfAttention(256, 4, 2, mesh=bp.Mesh.single()).to(torch.accelerator.current_accelerator())
    compiled = torch.compile(module, fullgraph=True)
    for length in LENGTHS:
        x = torch.randn(2, length, 256, device=next(module.parameters()).device)
        found, expected = (
            [*torch.autograd.grad(function(x).square().sum(), list(module.parameters()))]
            for function in (compiled, module)
        )
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max()
