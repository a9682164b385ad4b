"""Test Megatron's core attention alone, on ranks that are threads: tests/integration/test_megatron.py has a model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import burst_portable as bp
from burst_portable.errors import InputError, ShapeError, UnsupportedError
from tests.support import stand_in_megatron as megatron
from tests.support.stand_in_megatron import AttnMaskType, ModuleSpec, PackedSeqParams, TransformerConfig

FILE = Path(bp.__file__).parent / "integrations" / "megatron.py"
ALONE = SimpleNamespace(tp=None, cp=None)
HEADS, SIZE = 4, 8


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Return the integration, imported with stand-ins for Megatron-core."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "megatron_core-0.16.1.dist-info").mkdir()
    (folder / "megatron_core-0.16.1.dist-info" / "METADATA").write_text("Name: megatron-core\nVersion: 0.16.1\n")
    spec = importlib.util.spec_from_file_location("integration_with_stand_ins", FILE)
    assert spec is not None
    assert spec.loader is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        for name, stand_in in megatron.modules().items():
            patch.setitem(sys.modules, name, stand_in)
        found = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
        yield found


def layer(module: Any, number: int = 1, groups: Any = ALONE, scale: float | None = None, **options: Any) -> Any:
    """Return the attention of a layer in float64. `options`: of the configuration."""
    config = TransformerConfig(
        use_cpu_initialization=True,
        params_dtype=torch.float64,
        num_attention_heads=HEADS,
        init_method=lambda x: torch.nn.init.normal_(x, generator=torch.Generator().manual_seed(3)),
        **options,
    )
    return module.CoreAttention(
        config=config,
        layer_number=number,
        attn_mask_type=AttnMaskType.causal,
        attention_type="self",
        softmax_scale=scale,
        pg_collection=groups,
    )


def inputs(tokens: int, rows: int, kv_heads: int = 2, v_size: int = SIZE) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of the output, ``[tokens, rows, heads, size]``."""
    generator = torch.Generator().manual_seed(tokens)
    sizes = (HEADS, SIZE), (kv_heads, SIZE), (kv_heads, v_size), (HEADS, v_size)
    return tuple(torch.randn(tokens, rows, *size, generator=generator, dtype=torch.float64) for size in sizes)


def visible(tokens: int, left: int | None = None, right: int = 0) -> Tensor:
    """Return which key a query sees. `left`, `right`: how many before and after it; None: all before it."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (distance >= -right) & (distance <= (tokens if left is None else left))


@dataclass
class Case:
    """A layer, its inputs and what its queries see."""

    seen: Tensor
    rows: int = 2
    kv_heads: int = 2
    v_size: int = SIZE
    scale: float | None = None
    number: int = 1
    kind: AttnMaskType = AttnMaskType.causal
    options: dict[str, Any] | None = None
    packed: tuple[list[int], list[int]] | None = None  # ends of the documents, and of their places


def packed_params(real: list[int], padded: list[int] | None = None) -> PackedSeqParams:
    ends = [None if x is None else torch.tensor(x, dtype=torch.int32) for x in (real, padded)]
    return PackedSeqParams("thd", ends[0], ends[0], ends[1], ends[1])


def documents(real: list[int], padded: list[int], left: int | None = None) -> Tensor:
    """Return which key a query of packed documents sees."""
    seen = torch.zeros(padded[-1], padded[-1], dtype=torch.bool)
    for start, a, b in zip(padded, real, real[1:], strict=False):
        seen[start : start + b - a, start : start + b - a] = visible(b - a, left)
    return seen


PACKED = [0, 5, 5, 29, 36], [0, 12, 12, 36, 48]
CASES = {
    "causal": Case(visible(24)),
    "no mask": Case(torch.ones(24, 24, dtype=torch.bool), kind=AttnMaskType.no_mask),
    "window": Case(visible(24, 5), options={"window_size": (5, 0), "window_attn_skip_freq": 2}),
    "layer without window": Case(visible(24), number=2, options={"window_size": (5, 0), "window_attn_skip_freq": 2}),
    "window to both sides": Case(
        visible(24, 5, 3), kind=AttnMaskType.no_mask, options={"window_size": (5, 3), "window_attn_skip_freq": [1]}
    ),
    "latent": Case(visible(24), rows=1, kv_heads=4, v_size=5, scale=0.7),
    "learned sinks": Case(visible(24), options={"softmax_type": "learnable", "deterministic_mode": True}),
    "off by one": Case(visible(24), options={"softmax_type": "off-by-one"}),
    "packed": Case(documents(*PACKED), rows=1, packed=PACKED, kind=AttnMaskType.padding_causal),
    "packed window": Case(documents(*PACKED, 3), rows=1, packed=PACKED, options={"window_size": (3, 0)}),
}


def expected(case: Case, sinks: Tensor | None) -> tuple[Tensor, ...]:
    """Return the output and gradients of a full softmax."""
    q, k, v, dout = inputs(len(case.seen), case.rows, case.kv_heads, case.v_size)
    leaves = [x.requires_grad_() for x in (q, k, v)] + ([] if sinks is None else [sinks.clone().requires_grad_()])
    out = megatron.dense_attention(q, k, v, case.seen, case.scale, *leaves[3:])
    used = leaves if case.options != {"softmax_type": "off-by-one"} else leaves[:3]
    return out.detach(), *torch.autograd.grad(out, used, dout.flatten(2))


def on_ranks(module: Any, case: Case, ranks: int) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return the output and gradients of a layer on ranks, in the order of the sequence, and the sinks."""
    tokens, packed = len(case.seen), case.packed and packed_params(*case.packed)

    def index(rank: int) -> Tensor:
        if case.packed:
            return megatron.thd_get_partitioned_indices(case.packed[1], tokens, ranks, rank)
        return megatron.get_batch_on_this_cp_rank({"": torch.arange(tokens)[None]}, ranks, rank)[""][0]

    def work(mesh: bp.Mesh) -> list[Tensor]:
        groups = SimpleNamespace(tp=None, cp=mesh)
        more = {"context_parallel_size": ranks, **(case.options or {})}
        attention = layer(module, case.number, groups, case.scale, **more)
        q, k, v, dout = (x[index(mesh.rank)] for x in inputs(tokens, case.rows, case.kv_heads, case.v_size))
        given = [(x.squeeze(1) if packed else x).requires_grad_() for x in (q, k, v)]
        out = attention(*given, None, attn_mask_type=case.kind, attention_bias=None, packed_seq_params=packed)
        parameters = list(attention.parameters())
        found = [out.detach(), *torch.autograd.grad(out, [*given, *parameters], dout.flatten(2))]
        if packed:
            found[1:4] = [x.unsqueeze(1) for x in found[1:4]]
        sinks = attention.softmax_offset
        return found if sinks is None else [*found, sinks.detach()]

    answers = bp.run_threads(ranks, work)
    order = torch.cat([index(rank) for rank in range(ranks)]).argsort()
    whole = [torch.cat(parts)[order] for parts in zip(*(a[:4] for a in answers), strict=True)]
    sinks = answers[0][-1] if len(answers[0]) > 4 else None
    summed = [sum(a[4] for a in answers)] if len(answers[0]) > 5 else []
    return (*whole, *summed), sinks  # type: ignore[return-value]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_attention_on_ranks_equals_full_softmax(module: Any, name: str, ranks: int):
    found, sinks = on_ranks(module, CASES[name], ranks)
    assert (sinks is not None) == (name in ("learned sinks", "off by one"))
    for x, y in zip(found, expected(CASES[name], sinks), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)


def test_dropout_of_tensor_ranks_equals_one_device(module: Any):
    """Each half of the heads, as one tensor-parallel rank has it, drops what all heads on one device drop."""

    def output(heads: slice, rank: int, *, training: bool = True) -> Tensor:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: 1 if heads == slice(None) else 2)
        attention = layer(module, groups=SimpleNamespace(tp=group, cp=None), attention_dropout=0.3).train(training)
        torch.manual_seed(11)
        q, k, v, _ = inputs(24, 1, kv_heads=HEADS)
        return attention(q[:, :, heads], k[:, :, heads], v[:, :, heads], None)

    every = output(slice(None), 0)
    halves = torch.cat([output(slice(0, 2), 0), output(slice(2, 4), 1)], -1)
    torch.testing.assert_close(halves, every, rtol=1e-12, atol=1e-12)
    q, k, v, _ = inputs(24, 1, kv_heads=HEADS)
    without = megatron.dense_attention(q, k, v, visible(24))
    assert (every - without).abs().max() > 0.1
    torch.testing.assert_close(output(slice(None), 0, training=False), without, rtol=1e-12, atol=1e-12)


def test_packed_documents_are_read_again_after_a_change(module: Any):
    reader, params = module.PackedDocuments(bp.Mesh.single()), packed_params([0, 3, 8])
    first = reader.read(params, 8)
    assert first[0] == ((0, 3), (3, 8))
    assert reader.read(params, 8) is first
    params.cu_seqlens_q[1] = 5
    assert reader.read(params, 8)[0] == ((0, 5), (5, 8))
    assert reader.read(packed_params([0, 0, 0], [0, 2, 8]), 8)[0] == ()


def test_attention_of_padding_only_is_zero(module: Any):
    q, k, v, _ = (x[:, 0] for x in inputs(8, 1))
    assert not layer(module)(q, k, v, None, packed_seq_params=packed_params([0, 0, 0], [0, 4, 8])).any()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"attention_mask": torch.ones(1, 1, 8, 8)}, UnsupportedError, "attention_mask.*see create_attention_mask"),
        ({"attention_bias": torch.ones(1)}, UnsupportedError, "attention_bias; got a tensor"),
        ({"attn_mask_type": AttnMaskType.padding}, UnsupportedError, "this mask; got padding; allowed: causal"),
        ({"attn_mask_type": AttnMaskType.arbitrary}, UnsupportedError, "this mask; got arbitrary"),
        ({"attn_mask_type": AttnMaskType.causal_bottom_right}, UnsupportedError, "this mask; got causal_bottom"),
        ({"key": torch.ones(9, 1, 2, SIZE, dtype=torch.float64)}, ShapeError, "9"),
        ({"packed_seq_params": PackedSeqParams("sbhd")}, UnsupportedError, "these packed_seq_params.*'sbhd'"),
        ({"packed_seq_params": replace(packed_params([0, 8]), local_cp_size=1)}, UnsupportedError, "local_cp_size=1"),
        ({"packed_seq_params": packed_params([0, 5])}, InputError, "end at the number of tokens.*up to 8"),
        ({"packed_seq_params": packed_params([0, 5, 8], [0, 4, 8])}, InputError, r"got \[0, 5, 8\].*padded \[0, 4"),
        ({"packed_seq_params": packed_params([0, 8], [0, 4, 8])}, InputError, "must be equal for queries and keys"),
        (
            {"packed_seq_params": replace(packed_params([0, 8]), cu_seqlens_kv=torch.tensor([0, 3, 8]))},
            InputError,
            "must be equal for queries and keys",
        ),
    ],
)
def test_attention_rejects_calls_without_equivalent(module: Any, given: dict[str, Any], error: Any, message: str):
    q, k, v, _ = (x.squeeze(1) if "packed_seq_params" in given else x for x in inputs(8, 1))
    with pytest.raises(error, match=message):
        layer(module)(**{"query": q, "key": k, "value": v, "attention_mask": None, **given})


@pytest.mark.parametrize(
    ("window", "kind"), [((3, 3), "causal"), ((3, -1), "causal"), ((-1, 0), "no_mask"), ((3, -1), "no_mask")]
)
def test_attention_rejects_ambiguous_windows(module: Any, window: tuple[int, int], kind: str):
    q, k, v, _ = inputs(8, 1)
    with pytest.raises(UnsupportedError, match=r"this window_size; got \(.*allowed: \(LEFT, 0\) if causal"):
        layer(module, window_size=window)(q, k, v, None, attn_mask_type=AttnMaskType[kind])


def test_attention_rejects_tokens_that_are_not_two_chunks(module: Any):
    def work(mesh: bp.Mesh) -> None:
        attention = layer(module, groups=SimpleNamespace(tp=None, cp=mesh), context_parallel_size=2)
        q, k, v, _ = inputs(5, 1)
        with pytest.raises(ShapeError, match=r"two equal chunks, see get_batch_on_this_cp_rank; got 5"):
            attention(q, k, v, None)
        with pytest.raises(InputError, match="in multiples of 4"):
            attention(q[:4, 0], k[:4, 0], v[:4, 0], None, packed_seq_params=packed_params([0, 2, 8]))

    bp.run_threads(2, work)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({name: True}, f"without an equivalent; got {name}") for name in ("qk_clip", "log_max_attention_logit")),
        *(({f"fp8_{name}_attention": True}, f"got fp8_{name}_") for name in ("dot_product", "multi_head")),
        ({"batch_invariant_mode": True}, "got batch_invariant_mode"),
        ({"hybrid_context_parallel": True}, "got hybrid_context_parallel"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, "offload_modules=core_attn"),
    ],
)
def test_attention_rejects_options_without_equivalent(module: Any, options: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        layer(module, **options)


def test_attention_rejects_other_ranks_and_types(module: Any, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match="context-parallel group and context_parallel_size differ; got 1"):
        layer(module, groups=SimpleNamespace(tp=None, cp=bp.Mesh.single()), context_parallel_size=2)
    with pytest.raises(UnsupportedError, match="got attention_type='cross'"):
        module.CoreAttention(TransformerConfig(), 1, AttnMaskType.causal, "cross", pg_collection=ALONE)
    monkeypatch.setattr("burst_portable.integrations.versions.version", lambda package: "0.20.0")
    with pytest.raises(UnsupportedError, match=r"unsupported version of megatron-core; got 0\.20\.0; allowed: >=0\.16"):
        layer(module)


def test_sharded_state_dict_names_axis_of_sinks(module: Any):
    attention = layer(module, softmax_type="learnable")
    found = attention.sharded_state_dict("layer.", (), {"dp_cp_group": "data"})
    assert found == {"layer.softmax_offset": (attention.softmax_offset, 0, None, "data")}
    assert layer(module, softmax_type="off-by-one").sharded_state_dict("", (), {"dp_cp_group": "data"}) == {}


@dataclass
class Submodules:
    """The parts of a layer or of its attention."""

    linear: Any = None
    core_attention: Any = None


@dataclass
class Block:
    layer_specs: list[Any]


def test_replace_attention_returns_changed_copy(module: Any):
    inner = Submodules("linear", megatron.DotProductAttention)
    other = Submodules("linear", ModuleSpec(megatron.TEDotProductAttention, {"attention_dropout": 0.5}))
    block = Block([ModuleSpec("layer", {"a": 1}, replaced) for replaced in (inner, other)])
    first, second = module.replace_attention(block, strategy="ulysses").layer_specs
    assert (first.module, first.params, first.submodules.linear) == ("layer", {"a": 1}, "linear")
    options = {"strategy": "ulysses", "kernel": "auto"}
    assert first.submodules.core_attention == ModuleSpec(module.CoreAttention, options)
    assert second.submodules.core_attention.params == {"attention_dropout": 0.5, **options}
    assert inner.core_attention is megatron.DotProductAttention
    built = second.submodules.core_attention(
        config=TransformerConfig(), layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self",
        cp_comm_type="p2p", softmax_scale=None, pg_collection=ALONE,
    )  # fmt: skip
    assert (built.dropout_p, built.options["strategy"]) == (0.5, "ulysses")


def test_replace_attention_rejects_other_specs(module: Any):
    with pytest.raises(UnsupportedError, match=r"an attention other than .*got .*Linear"):
        module.replace_attention(ModuleSpec("layer", submodules=Submodules(core_attention=torch.nn.Linear)))
    with pytest.raises(InputError, match="the specification has no core_attention; got ModuleSpec"):
        module.replace_attention(ModuleSpec("layer"))
