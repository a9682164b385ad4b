"""Test torch.compile: transformers models run between graphs, our module runs in one graph, and results stay equal."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import burst_portable as bp
from burst_portable.errors import LayoutError, MismatchError, UnknownNameError
from burst_portable.gradients import all_reduce, all_reduce_gradients
from burst_portable.nn import SelfAttention
from tests.support.compiled_ranks import on_threads
from tests.support.models import assert_same, make, on_one_device, on_ranks, tokens

# torch's own warning: the compiler reads .grad of its inputs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]
BACKENDS = ["eager", pytest.param("aot_eager", marks=pytest.mark.full)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@on_threads
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_transformers_model_equals_one_device(backend: str):
    model, ids = make("mistral"), tokens()
    expected = on_one_device(model, ids)
    for answer in on_ranks(2, model, ids, wrap=lambda mine: torch.compile(mine, backend=backend)):
        assert_same(answer, expected)
    assert counters["stats"]["unique_graphs"] >= 4  # the layers are in graphs
    assert any("attend" in told and "torch.compiler.disable" in told for told in counters["graph_break"])


@on_threads
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_self_attention_equals_eager(backend: str):
    x = torch.randn(2, 23, 16)
    module = SelfAttention(16, 4, 2, mask="window:5", layout="striped")

    def work(mesh: bp.Mesh, compiled: bool) -> list[torch.Tensor]:
        mine = copy.deepcopy(module)
        mine.mesh = mesh
        call = torch.compile(mine, backend=backend, fullgraph=True) if compiled else mine
        rows = bp.shard(x, mesh, layout="striped")
        for _ in range(2):
            mine.zero_grad()
            out = call(rows, seq_len=23)
            out.square().sum().backward()
        return [out.detach(), *(p.grad for p in mine.parameters())]

    for ranks in (1, 2):
        plain = bp.run_threads(ranks, lambda mesh: work(mesh, False))
        for expected, found in zip(plain, bp.run_threads(ranks, lambda mesh: work(mesh, True)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.full
def test_compiled_self_attention_has_one_graph_for_lengths():
    """Uses its own and given positions, and a mask of any name. tests/runtime/test_graph_ops.py counts graphs too."""
    counter = CompileCounterWithBackend("aot_eager")
    module = SelfAttention(16, 4, 2, mesh=bp.Mesh.single(), mask=bp.Mask.window(5))
    call = torch.compile(module, backend=counter, fullgraph=True)
    for rows in (23, 12, 9, 15):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(call(x), module(x), rtol=0, atol=0)
    assert counter.frame_count <= 2
    where = torch.arange(15) % 4
    torch.testing.assert_close(call(x, position_ids=where), module(x, position_ids=where), rtol=0, atol=0)


# By default, the errors of attention on ranks: tests/runtime/test_graph_ops.py.
@on_threads
@pytest.mark.full
def test_compiled_self_attention_raises_same_errors():
    def work(mesh: bp.Mesh) -> None:
        call = torch.compile(SelfAttention(16, 4, mesh=mesh), backend="aot_eager", fullgraph=True)
        x = torch.zeros(1, 5 if mesh.rank else 6, 16)
        error, message = (LayoutError, "5 rows; allowed: 6 of 12") if mesh.rank else (MismatchError, "rank 1 refused")
        with pytest.raises(error, match=message):
            call(x, seq_len=12)

    bp.run_threads(2, work, timeout=20)


@pytest.mark.parametrize("mask", [bp.Mask.documents((0, 5, 8)), "nope"], ids=str)
def test_self_attention_outside_graph_gives_reason(mask: bp.Mask | str):
    module = SelfAttention(16, 4, 2, mesh=bp.Mesh.single())
    call = torch.compile(module, backend="eager", fullgraph=True)
    error: Any = (torch._dynamo.exc.Unsupported, "SelfAttention between graphs if its mask lists positions")
    if mask == "nope":
        error = UnknownNameError, "unknown mask"
    with pytest.raises(error[0], match=error[1]):
        call(torch.randn(1, 8, 16), mask=mask)


@on_threads
def test_compiled_training_step_equals_eager():
    """Calls next to the model break the graph, too."""
    weight, x = torch.randn(3, 3), torch.randn(2, 4, 3)

    def work(mesh: bp.Mesh) -> list[torch.Tensor]:
        parameter = torch.nn.Parameter(weight.clone())

        @torch.compile(backend="aot_eager")
        def step(rows: torch.Tensor) -> torch.Tensor:
            loss = (rows @ parameter).square().sum()
            loss.backward()
            all_reduce_gradients([parameter], mesh)
            return all_reduce(loss.detach(), mesh)

        return [step(x[mesh.rank]), parameter.grad]

    leaf = weight.clone().requires_grad_()
    expected = (x @ leaf).square().sum()
    expected.backward()
    for found in bp.run_threads(2, work):
        torch.testing.assert_close(found, [expected.detach(), leaf.grad])
