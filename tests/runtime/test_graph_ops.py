"""Test `attention` inside the graphs of torch.compile: results are bitwise equal to those of the uncompiled code."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import burst_portable as bp
from burst_portable.errors import InputError, MismatchError, ShapeError, UnknownNameError, UnsupportedError
from burst_portable.kernels.dropout import weight_factors
from burst_portable.planning.call import Dropout
from burst_portable.runtime import graph_ops
from burst_portable.runtime.request import Request
from tests.support.compiled_ranks import on_threads

# torch's own warning: the compiler reads .grad of its inputs.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")]
LENGTH = 23
MESH = bp.Mesh.single()


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    if graph_ops._saved_passes or graph_ops._turns:  # cycles may hold them, and a collection takes a quarter second
        gc.collect()
    assert not graph_ops._saved_passes, "what backward passes needed is let go of with their tickets"
    assert not graph_ops._turns, "and turns with the graphs that are made"


def compiled(function: Callable[..., Any], backend: Any = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True, **options)


def whole() -> list[Tensor]:
    """Return q, k, v and sinks of all tokens."""
    sizes = ((2, LENGTH, 4, 16), (2, LENGTH, 2, 16), (2, LENGTH, 2, 8), (4,))
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator) for size in sizes]


def results(function: Callable[..., Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Return the results, and the gradients of the inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def assert_same(one: list[Tensor], other: list[Tensor], tolerance: float = 0.0) -> None:
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def alone(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Call attention between other operators, which a compiler fuses and reorders, and whose memory it reuses."""
    out: Tensor = bp.attention(q * 2, k.sin(), v + 1, mesh=MESH, **options)
    return out.cos() * out


CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "ulysses, sinks": {"strategy": "ulysses", "sinks": True, "layout": "striped"},
    "ring, window": {"strategy": "ring", "mask": "window:5"},
    "ulysses": {"strategy": "ulysses"},
    "ring, sinks": {"strategy": "ring", "sinks": True},
    "burst, documents": {"strategy": "burst", "mask": f"documents:0,5,{LENGTH}", "layout": "contiguous"},
    "all options": {"mask": "full", "softcap": 5.0, "scale": 0.3, "deterministic": True, "kernel": "reference"},
}
USUAL = [("ring, window", 1), ("ulysses, sinks", 2)]


@on_threads
@pytest.mark.parametrize(
    ("case", "ranks"),
    [
        pytest.param(case, ranks, marks=[] if (case, ranks) in USUAL else pytest.mark.full)
        for case in CASES
        for ranks in (1, 2)
    ],
)
def test_attention_compiles_to_one_graph(case: str, ranks: int):
    options = dict(CASES[case])
    with_sinks = options.pop("sinks", False)
    layout, mask = options.get("layout", "zigzag"), options.get("mask", "causal")

    def work(mesh: bp.Mesh, wrap: Callable[..., Any]) -> list[Tensor]:
        def step(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
            given = {"sinks": sinks.exp() if with_sinks else None, "mesh": mesh, "seq_len": LENGTH, "return_lse": True}
            out, lse = bp.attention(q * 2, k.sin(), v + 1, **given, **options)
            return out.cos() * out, lse

        *rows, sinks = whole()
        mine = [*(bp.shard(x, mesh, layout=layout, mask=mask) for x in rows), sinks]
        call, found = wrap(step), []
        for _ in range(2):  # the second call uses cached results
            found += results(lambda *leaves: call(*leaves)[0], mine)
        with torch.no_grad():
            return [*found, *call(*mine)]

    plain = bp.run_threads(ranks, lambda mesh: work(mesh, lambda step: step))
    for expected, found in zip(plain, bp.run_threads(ranks, lambda mesh: work(mesh, compiled)), strict=True):
        assert_same(found, expected)


@on_threads
@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
def test_inductor_compiled_attention_equals_eager(strategy: str):
    """Inductor reuses the memory of q, k and v after their last read in the graph."""

    def work(mesh: bp.Mesh, wrap: Callable[..., Any]) -> list[Tensor]:
        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = bp.attention(q * 2, k.sin(), v + 1, mesh=mesh, seq_len=LENGTH, strategy=strategy)
            return out.cos() * out

        return results(wrap(step), [bp.shard(x, mesh) for x in whole()[:3]])

    plain = bp.run_threads(2, lambda mesh: work(mesh, lambda step: step))
    made = bp.run_threads(2, lambda mesh: work(mesh, lambda step: compiled(step, "inductor")))
    for expected, found in zip(plain, made, strict=True):
        assert_same(found, expected, 1e-5)


@pytest.mark.parametrize(
    "inside", [True, pytest.param(False, marks=pytest.mark.full)], ids=["inside the graph", "around it"]
)
def test_compiled_checkpoints_equal_eager(inside: bool):
    def again(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *x: checkpoint(function, *x, use_reentrant=False)

    call = compiled(again(alone)) if inside else again(compiled(alone))
    assert_same(results(call, whole()[:3]), results(alone, whole()[:3]))


def test_compiled_autocast_equals_eager():
    def narrow(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return alone(*tensors)

    found = results(compiled(narrow), whole()[:3])
    assert found[0].dtype == torch.bfloat16
    assert_same(found, results(narrow, whole()[:3]))


def test_lengths_share_one_graph():
    """Different lengths use one graph; another scale needs a new one."""
    counter = CompileCounterWithBackend("aot_eager")
    call = compiled(alone, counter)
    for rows, scale in ((23, 0.1), (12, 0.1), (20, 0.1), (9, 0.1), (15, 0.2)):
        tensors = [x[:, :rows] for x in whole()[:3]]
        options = {"scale": scale, "seq_len": rows}
        assert_same(
            results(lambda *x, o=options: call(*x, **o), tensors),
            results(lambda *x, o=options: alone(*x, **o), tensors),
        )
        assert counter.frame_count <= 2 or scale == 0.2


@pytest.mark.parametrize(
    "scale", [torch.tensor(0.3), pytest.param(np.float32(0.3), marks=pytest.mark.full)], ids=["tensor", "array"]
)
def test_tensor_scalars_break_the_graph(scale: Any):
    outside = lambda *x: bp.attention(*x, mesh=MESH, scale=scale)  # noqa: E731
    assert_same(results(torch.compile(outside, backend="aot_eager"), whole()[:3]), results(outside, whole()[:3]))
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"outside of graphs if .* a number is in a tensor"):
        compiled(outside)(*whole()[:3])


TRANSFORMED: dict[str, Callable[..., Any]] = {
    "vmap": lambda f, q, k, v: torch.vmap(lambda *x: f(*(y[None] for y in x)))(q, k, v),
    "grad": lambda f, q, k, v: torch.func.grad(lambda x: f(x, k, v).sum())(q),
    "jvp": lambda f, q, k, v: torch.func.jvp(lambda x: f(x, k, v), (q,), (q,)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own warning, in jvp
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n != "jvp")) for n in TRANSFORMED])
def test_torch_func_transforms_in_compiled_function_raise(name: str):
    """In a graph, the tangents of jvp would be 0."""
    transformed = partial(TRANSFORMED[name], partial(bp.attention, mesh=MESH))
    with pytest.raises(UnsupportedError, match=r"cannot be transformed by torch\.func"):
        torch.compile(transformed, backend="aot_eager")(*whole()[:3])
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"outside of graphs if .* torch\.func transforms"):
        compiled(transformed)(*whole()[:3])


@on_threads
def test_compiled_attentions_keep_program_order():
    """Inductor orders independent operators by sizes, which differ between ranks."""

    def work(mesh: bp.Mesh, wrap: Callable[..., Any]) -> list[Tensor]:
        def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            attend = partial(bp.attention, mesh=mesh, seq_len=LENGTH, strategy="ring")
            one: Tensor = attend(q, k, v)
            return one - attend(q.sin(), k.cos(), v + 1)

        call, mine = wrap(step, mesh.rank), [bp.shard(x, mesh) for x in whole()[:3]]
        with torch.no_grad():
            out: Tensor = call(*mine)
        return [out, *results(call, mine)]

    def late_first(graph: torch.fx.GraphModule, _: Any) -> Any:
        """Reorder the graph as a compiler may: the last needed values are computed first."""
        order: dict[torch.fx.Node, None] = {}

        def visit(node: torch.fx.Node) -> None:
            for needed in reversed(node.all_input_nodes):
                visit(needed)
            order[node] = None

        *_, end = graph.graph.nodes
        visit(end)
        for node in order:
            if node.op not in ("placeholder", "output"):
                end.prepend(node)
        graph.recompile()
        return make_boxed_func(graph.forward)

    otherwise = aot_autograd(fw_compiler=late_first, bw_compiler=late_first)
    plain = bp.run_threads(2, lambda mesh: work(mesh, lambda step, _: step))
    made = bp.run_threads(
        2, lambda mesh: work(mesh, lambda step, rank: compiled(step, otherwise if rank else "aot_eager"))
    )
    for expected, found in zip(plain, made, strict=True):
        assert_same(found, expected)


def test_operators_are_tagged_cudagraph_unsafe():
    """A replayed CUDA graph would neither send nor plan."""
    for operator in (graph_ops.attend, graph_ops.attend_backward):
        assert torch.Tag.cudagraph_unsafe in operator._opoverload.tags


def test_compiled_attention_with_shared_and_frozen_inputs():
    q, k, v, _ = whole()
    assert_same(results(compiled(lambda x: bp.attention(x, x, x)), [q]), results(lambda x: bp.attention(x, x, x), [q]))
    assert_same(results(compiled(lambda x: alone(x, k, v)), [q]), results(lambda x: alone(x, k, v), [q]))


def test_compiled_backward_can_retain_graph():
    leaves = [x.requires_grad_() for x in whole()[:3]]
    out = compiled(alone)(*leaves).sum()
    assert_same(list(torch.autograd.grad(out, leaves, retain_graph=True)), list(torch.autograd.grad(out, leaves)))


@pytest.mark.parametrize(
    ("error", "match", "sizes", "options"),
    [
        (ShapeError, "not a multiple", ((1, 8, 3, 8), (1, 8, 2, 8), (1, 8, 2, 8)), {}),
        (ShapeError, "no usable shape", ((8, 2, 8),) * 3, {}),
        (UnknownNameError, "unknown mask", ((1, 8, 2, 8),) * 3, {"mask": "nope"}),
        (InputError, "return_lse must be a bool", ((1, 8, 2, 8),) * 3, {"return_lse": 1}),
    ],
)
def test_compiled_attention_raises_same_errors(error: type, match: str, sizes: Any, options: Any):
    tensors = [torch.randn(size) for size in sizes]
    with pytest.raises(error, match=match):
        compiled(lambda q, k, v: bp.attention(q, k, v, mesh=MESH, **options))(*tensors)


@on_threads
def test_compiled_attention_raises_for_full_tensors():
    """In the graph of a call with symbolic lengths too, and not for shards."""
    tensors = [x[:, :20] for x in whole()[:3]]

    def work(mesh: bp.Mesh) -> list[Tensor]:
        call = compiled(lambda q, k, v: bp.attention(q * 2, k.sin(), v + 1, mesh=mesh), dynamic=True)
        for length in (20, 16):
            with pytest.raises(InputError, match=f"all ranks hold the same V.*pass seq_len={2 * length}"):
                call(*(x[:, :length] for x in tensors))
        return [bp.unshard(x, mesh, seq_len=20) for x in results(call, [bp.shard(x, mesh) for x in tensors])]

    expected = results(lambda q, k, v: bp.attention(q * 2, k.sin(), v + 1, mesh=MESH), tensors)
    for found in bp.run_threads(2, work):
        assert_same(found, expected, 1e-5)


@on_threads
def test_compiled_attention_error_reaches_all_ranks():
    def work(mesh: bp.Mesh) -> str:
        call = compiled(lambda q, k, v: bp.attention(q, k, v, mesh=mesh))
        kv = torch.randn(1, 8, 2, 8)
        with pytest.raises((ShapeError, MismatchError)) as refusal:
            call(torch.randn(1, 8, 2 if mesh.rank else 3, 8), kv, kv)
        assert call(kv, kv, kv).shape == kv.shape  # the mesh still works
        return type(refusal.value).__name__

    assert bp.run_threads(2, work) == ["ShapeError", "MismatchError"]


@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(bp.Mask.causal(), marks=pytest.mark.full),
        pytest.param(bp.Mask.window(4, 1), marks=pytest.mark.full),
        bp.Mask.sink_window(2, 3),
    ],
    ids=str,
)
def test_compiled_masks_with_short_form(mask: bp.Mask):
    assert_same(
        results(compiled(partial(alone, mask=mask)), whole()[:3]), results(partial(alone, mask=mask), whole()[:3])
    )


def test_masks_that_list_positions_break_the_graph():
    """Each batch of documents has its own mask and would need its own graph."""
    mask = bp.Mask.documents([0, 5, LENGTH])
    outside = lambda *x: alone(*x, mask=mask)  # noqa: E731
    assert_same(results(torch.compile(outside, backend="aot_eager"), whole()[:3]), results(outside, whole()[:3]))
    torch.compiler.reset()
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="burst_portable runs attention outside of graphs if its mask"
    ):
        compiled(outside)(*whole()[:3])


def test_exported_program_contains_no_custom_operator():
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = bp.attention(x, x, x, mesh=MESH, kernel="reference")
            return out

    q = whole()[0]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="export traces the graph"):
        torch.export.export(Model(), (q,), strict=True)
    program = torch.export.export(Model(), (q,))
    assert not [node for node in program.graph.nodes if "burst_portable" in str(node.target)]
    torch.testing.assert_close(program.module()(q), Model()(q))


def symbolic(name: str) -> str:
    found = rf"symbolic sizes are not supported; got {re.escape(name)}=s\d+; "
    return found + "export one program for each size, without dynamic_shapes$"


class Exported(torch.nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("mask", ["causal", bp.Mask.window(5)], ids=str)
@pytest.mark.parametrize(("dim", "name"), [(0, "q.shape[0]"), (1, "length"), (2, "q.shape[2]"), (3, "q.shape[3]")])
def test_export_with_symbolic_sizes_raises(dim, name, mask):
    model = Exported(lambda x: bp.attention(x, x, x, mask=mask, mesh=MESH))
    sizes = {dim: torch.export.Dim("size", min=2, max=512)}
    with pytest.raises(UnsupportedError, match=symbolic(name)):
        torch.export.export(model, (torch.randn(4, 64, 4, 8),), dynamic_shapes=(sizes,))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: bp.shard(x, MESH),
        lambda x: bp.unshard(x, MESH, seq_len=x.shape[1]),
        lambda x: bp.local_position_ids(MESH, seq_len=x.shape[1]),
    ],
    ids=["shard", "unshard", "local_position_ids"],
)
def test_export_of_sharding_with_symbolic_length_raises(function):
    sizes = {1: torch.export.Dim("size", min=2, max=512)}
    with pytest.raises(UnsupportedError, match=symbolic("seq_len")):
        torch.export.export(Exported(function), (torch.randn(4, 64, 2, 8),), dynamic_shapes=(sizes,))


def test_export_with_given_seq_len_makes_length_a_number():
    model = Exported(lambda x: bp.attention(x, x, x, mesh=MESH, seq_len=64))
    x = torch.randn(1, 64, 2, 8)
    program = torch.export.export(model, (x,), dynamic_shapes=({1: torch.export.Dim.AUTO},))
    torch.testing.assert_close(program.module()(x), model(x))


def test_dropout_without_seed_and_data_raises():
    """A seed that was drawn from torch's generator would have no number."""

    def attend(x: Tensor, **options: int) -> Tensor:
        return bp.attention(x, x, x, mesh=MESH, dropout_p=0.1, **options)

    message = "cannot draw its seed without data; got dropout_seed=None .*; pass dropout_seed=, an int"
    with FakeTensorMode():
        x = torch.randn(1, 64, 2, 8)
        with pytest.raises(UnsupportedError, match=message):
            attend(x)
        assert attend(x, dropout_seed=3).shape == x.shape
    x = torch.randn(1, 64, 2, 8)
    with pytest.raises(UnsupportedError, match=message):
        torch.export.export(Exported(attend), (x,))
    program = torch.export.export(Exported(lambda x: attend(x, dropout_seed=3)), (x,))
    torch.testing.assert_close(program.module()(x), attend(x, dropout_seed=3))


@pytest.mark.parametrize("before", ["fake", "export", "fake, export", "export, fake"])
def test_dropout_is_unchanged_after_calls_without_data(before):
    """Positions without data stayed in a cache: the next real call returned zeros, and an export failed."""
    length = 64 + len(before)  # no other test has cached its positions
    options = {"mesh": MESH, "dropout_p": 0.25, "dropout_seed": 3}
    x = torch.randn(1, length, 2, 8, dtype=torch.float64)
    model = Exported(lambda x: bp.attention(x, x, x, **options))
    programs = []
    for kind in before.split(", "):
        if kind == "fake":
            with FakeTensorMode():
                model(torch.randn(1, length, 2, 8, dtype=torch.float64))
        else:
            programs.append(torch.export.export(model, (x,)).module())
    positions = torch.arange(length)
    factors = weight_factors(Dropout(0.25, seed=3), positions, positions, 1, 2)
    scores = torch.einsum("bihd,bjhd->bhij", x, x) * 8**-0.5
    weights = scores.masked_fill(positions > positions[:, None], -torch.inf).softmax(-1) * factors
    expected = torch.einsum("bhij,bjhd->bihd", weights, x)
    for attend in (model, *programs):
        torch.testing.assert_close(attend(x), expected, rtol=0, atol=1e-13)


def test_names_identify_mesh_and_arguments():
    one = graph_ops.CallArguments(MESH, Request())
    others = [
        graph_ops.CallArguments(bp.Mesh.single(), Request()),
        graph_ops.CallArguments(MESH, Request(return_lse=True)),
        graph_ops.CallArguments(MESH, Request(mask="full")),
        graph_ops.CallArguments(MESH, Request(scale=0.5)),
    ]
    names = [graph_ops.named(given) for given in (one, *others)]
    assert len(set(names)) == 5
    assert names[0] == graph_ops.named(graph_ops.CallArguments(MESH, Request()))
    assert [graph_ops.find_arguments(name) for name in names] == [one, *others]


@on_threads
def test_compiled_checkpoints_keep_order_on_ranks():
    """Recomputation counts as a new pass in a graph, but not in eager mode."""

    def work(mesh: bp.Mesh, wrap: Callable[..., Any]) -> list[Tensor]:
        def layer(x: Tensor) -> Tensor:
            out: Tensor = bp.attention(x.sin(), x.cos(), x + 1, mesh=mesh, seq_len=LENGTH, strategy="ring")
            return x + out

        def step(x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(layer, x, use_reentrant=False)
            return x

        return results(wrap(step, mesh.rank), [bp.shard(whole()[0], mesh)])

    plain = bp.run_threads(2, lambda mesh: work(mesh, lambda step, _: step))
    made = bp.run_threads(2, lambda mesh: work(mesh, lambda step, rank: compiled(step, dynamic=bool(rank))))
    for expected, found in zip(plain, made, strict=True):
        assert_same(found, expected)
    with pytest.raises(MismatchError, match="backward of the pass: 3 on rank 0 but 2 on rank 1"):
        bp.run_threads(2, lambda mesh: work(mesh, lambda step, rank: step if rank else compiled(step)))


@on_threads
@pytest.mark.full
def test_ranks_may_compile_differently():
    """One rank has a graph per length, one a single graph, and one runs eagerly.

    By default, test_compiled_checkpoints_keep_order_on_ranks has ranks with different graphs.
    """

    def work(mesh: bp.Mesh, wrap: Callable[..., Any]) -> list[Tensor]:
        step = wrap(partial(bp.attention, mesh=mesh, strategy="ring"), mesh.rank)
        found = []
        for rows in (23, 12, 20):
            mine = [bp.shard(x[:, :rows], mesh) for x in whole()[:3]]
            found += results(partial(step, seq_len=rows), mine)
        return found

    def own(step: Callable[..., Any], rank: int) -> Callable[..., Any]:
        return step if rank == 2 else compiled(step, dynamic=False if rank == 1 else None)

    plain = bp.run_threads(3, lambda mesh: work(mesh, lambda step, _: step))
    for expected, found in zip(plain, bp.run_threads(3, lambda mesh: work(mesh, own)), strict=True):
        assert_same(found, expected)


def test_graph_of_another_process_raises():
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(UnsupportedError, match="that this process did not trace"):
        torch.ops.burst_portable.attend(q, q, q, None, None, None, "0123456789abcdef", False, False)
    with pytest.raises(UnsupportedError, match="saved state of a forward pass no longer exists"):
        torch.ops.burst_portable.attend_backward(q, torch.zeros(1, dtype=torch.int64), None, None, [q] * 5, 2, 8)


def test_wrong_prediction_of_saved_copies_changes_nothing(monkeypatch: pytest.MonkeyPatch):
    """While a graph is traced, `auto` may predict another strategy than the one that runs."""
    expected = results(alone, whole()[:3])
    monkeypatch.setattr(graph_ops, "_keeps_copies", lambda *_: True)
    assert_same(results(compiled(alone), whole()[:3]), expected)
    torch.compiler.reset()
    monkeypatch.setattr(graph_ops, "_keeps_copies", lambda *_: False)
    assert_same(results(compiled(lambda *x: alone(*x, strategy="ulysses")), whole()[:3]), expected, 1e-5)
