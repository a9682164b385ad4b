"""Test the public attention calls and their errors, which name the argument, its value and the allowed values before
any communication.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import forward_ad

import burst_portable as bp
from burst_portable import numerics, run_threads
from burst_portable.backends.selection import choose_kernel, load
from burst_portable.config import Config, from_environment
from burst_portable.conformance import oracle
from burst_portable.conformance.cases import MASKS
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import (
    BurstError,
    DtypeError,
    InputError,
    LayoutError,
    MaskError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from burst_portable.kernels import operator_kernel
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.mesh import as_mesh
from burst_portable.planning.tiles import Tile
from burst_portable.strategies.ring import RingStrategy
from tests.support.calls import kernel_call
from tests.support.local_kernels import expected, inputs


def qkv(q=(1, 16, 4, 8), k=(1, 16, 2, 8), v=(1, 16, 2, 8), dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in (q, k, v)]


def test_attention_on_one_rank_equals_sdpa():
    q, k, v = qkv()
    out = bp.attention(q, k, v, mask="causal")
    sdpa = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, sdpa.transpose(1, 2))


class Unhashable(RingStrategy):
    __hash__ = None


@pytest.mark.parametrize(
    ("tensors", "error", "message"),
    [
        (
            {"q": (16, 4, 8)},
            ShapeError,
            r"q has no usable shape.*\(16, 4, 8\).*unsqueeze\(0\), with mask=Mask.documents",
        ),
        ({"q": (1, 0, 4, 8)}, ShapeError, "no usable shape"),
        ({"k": (1, 15, 2, 8)}, ShapeError, "do not fit together"),
        ({"v": (1, 16, 4, 8)}, ShapeError, "do not fit together"),
        ({"q": (2, 16, 4, 8)}, ShapeError, "allowed: equal batch and rows$"),
        ({"q": (1, 4, 16, 8), "k": (1, 2, 16, 8), "v": (1, 2, 16, 8)}, ShapeError, r"x\.transpose\(1, 2\)$"),
        ({"q": (1, 1, 2, 8)}, ShapeError, "allowed: equal batch and rows; a KV cache .* are not supported"),
        ({"q": (1, 16, 4, 16)}, ShapeError, "different head sizes"),
        ({"q": (1, 16, 3, 8)}, ShapeError, "not a multiple"),
        ({"q": (1, 16, 4, 2048), "k": (1, 16, 2, 2048)}, ShapeError, "unsupported head size"),
        ({"dtype": torch.int64}, DtypeError, "no attention in this dtype.*float32"),
    ],
)
def test_attention_rejects_mismatched_tensors(tensors, error, message):
    dtype = tensors.get("dtype")
    made = [x.to(dtype) for x in qkv()] if dtype else qkv(**tensors)
    with pytest.raises(error, match=message):
        bp.attention(*made)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": "causl"}, UnknownNameError, "did you mean 'causal'"),
        ({"mask": 3}, InputError, "mask is not a mask"),
        ({"mask": bp.Mask.documents((0, 17))}, MaskError, "longer than the sequence"),
        ({"strategy": "rng"}, UnknownNameError, "did you mean 'ring'"),
        ({"strategy": 5}, InputError, "unknown strategy"),
        ({"layout": "zag"}, UnknownNameError, "zigzag"),
        ({"layout": bp.make_layout("zigzag", 16, 2)}, LayoutError, "another mesh"),
        ({"seq_len": 17}, LayoutError, "a different number of rows"),
        ({"seq_len": -1}, InputError, "seq_len is not a size"),
        ({"kernel": "cpu_flsh"}, UnknownNameError, "did you mean 'cpu_flash'"),
        ({"kernel": "cpu_flash", "softcap": 2.0}, UnsupportedError, "no softcap"),
        ({"softcap": -1.0}, InputError, "positive"),
        ({"scale": float("nan")}, InputError, "finite"),
        ({"sinks": torch.zeros(3)}, ShapeError, "one logit per query head"),
        ({"sinks": [0.0] * 4}, ShapeError, "sinks is not a tensor"),
        ({"mesh": "here"}, InputError, "not a mesh"),
        ({"mask": None}, InputError, "mask is not a mask; got None"),
        ({"mask": ["causal"]}, InputError, "mask is not a mask"),
        ({"mask": torch.tensor([0, 5, 16])}, InputError, r"pass cu_seqlens as Mask\.documents\(cu_seqlens\)"),
        ({"strategy": ["ring"]}, UnknownNameError, "unknown strategy"),
        ({"strategy": type(bp.make_strategy("ring"))}, UnknownNameError, "unknown strategy"),
        ({"strategy": SimpleNamespace(plan=len)}, UnknownNameError, "unknown strategy"),
        ({"strategy": Unhashable()}, InputError, "the strategy Unhashable cannot be hashed"),
        ({"layout": ["zigzag"]}, UnknownNameError, "unknown layout"),
        ({"layout": torch.zeros(2, 2)}, UnknownNameError, r"got Tensor of shape \(2, 2\)"),
        ({"kernel": None}, InputError, "kernel must be a name"),
        ({"kernel": ["reference"]}, InputError, "kernel must be a name"),
        ({"kernel": "cpu_flash", "softcap": 2.0}, UnsupportedError, "allowed: reference"),
        ({"scale": "0.5"}, InputError, "scale is not a number"),
        ({"scale": 10**400}, InputError, "scale is not a number"),
        ({"softcap": torch.ones(2)}, InputError, "softcap is not a number"),
        ({"scale": torch.ones((), requires_grad=True)}, InputError, "requires a gradient"),
        ({"deterministic": "no"}, InputError, "deterministic must be a bool or None"),
    ],
)
def test_attention_rejects_invalid_options(options, error, message):
    with pytest.raises(error, match=message) as caught:
        bp.attention(*qkv(), **options)
    assert isinstance(caught.value, BurstError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("wrong", [[1.0], None, torch.randn(1, 16, 4, 8).numpy()], ids=["list", "none", "numpy"])
def test_attention_rejects_values_that_are_not_tensors(name, wrong):
    with pytest.raises(ShapeError, match=f"{name} is not a tensor"):
        bp.attention(**dict(zip("qkv", qkv(), strict=True)) | {name: wrong})


@pytest.mark.parametrize(
    ("usual", "wrong"),
    [
        ({"seq_len": 16}, {"seq_len": 16.0}),
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"deterministic": True}, {"deterministic": 1}),
        ({}, {"q": torch.randn(1, 16, 4, 8).to_sparse()}),
        ({}, {"q": torch.randn(1, 16, 4, 8).numpy()}),
        ({"sinks": torch.zeros(4)}, {"sinks": torch.zeros(4).to_sparse()}),
    ],
)
def test_invalid_value_does_not_reuse_plan_of_equal_value(usual, wrong):
    mesh = bp.Mesh.single()
    tensors = dict(zip("qkv", qkv(k=(1, 16, 4, 8), v=(1, 16, 4, 8)), strict=True))
    bp.attention(**tensors | usual, mesh=mesh)
    with pytest.raises(BurstError):
        bp.attention(**tensors | usual | wrong, mesh=mesh)
    assert len(mesh._calls) == 1


def test_sizes_of_other_types_raise_input_error():
    bp.make_layout("zigzag", 16, 2), bp.make_strategy("double_ring", ranks_per_node=1)
    for wrong in ((16.0, 2), (16, 2.0), (True, True)):
        with pytest.raises(InputError, match="is not a size"):
            bp.make_layout("zigzag", *wrong)
    for ranks_per_node in (1.0, True, 0):
        with pytest.raises(InputError, match="ranks_per_node is not a size"):
            bp.make_strategy("double_ring", ranks_per_node=ranks_per_node)


def test_attention_reads_current_values_of_tensor_scalars():
    mesh, (q, k, v), scale = bp.Mesh.single(), qkv(), torch.tensor(0.25)
    for value in (0.25, 0.75):
        scale.fill_(value)
        out = bp.attention(q, k, v, mesh=mesh, scale=scale, softcap=10 * scale)
        torch.testing.assert_close(out, bp.attention(q, k, v, scale=value, softcap=10 * value))
    same = bp.attention(q, k, v, scale=np.float32(0.75), seq_len=np.int64(16))
    torch.testing.assert_close(same, bp.attention(q, k, v, scale=0.75))


def test_inference_mode_tensors_do_not_reuse_cached_call():
    """The tensors differ from those of the cached call only in inference mode."""
    mesh = bp.Mesh.single()
    q, k = torch.randn(1, 4, 2, 4, requires_grad=True), torch.randn(1, 4, 2, 4)
    bp.attention(q, k, k, mesh=mesh)
    with torch.inference_mode():
        made = torch.randn(1, 4, 2, 4)
        sinks = torch.zeros(2)
        assert bp.attention(made, made, made, mesh=mesh).shape == made.shape
    assert bp.attention(k, made, k, mesh=mesh).shape == made.shape, "nothing is kept"
    with pytest.raises(InputError, match=r"torch\.inference_mode; got k; clone"):
        bp.attention(q, made, k, mesh=mesh)
    with pytest.raises(InputError, match=r"torch\.inference_mode; got sinks; clone"):
        bp.attention(q, k, k, mesh=mesh, sinks=sinks)


def test_attention_rejects_inference_mode_tensors_with_gradients():
    with torch.inference_mode():
        k, v = (torch.randn(1, 8, 2, 4) for _ in range(2))
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    with pytest.raises(InputError, match=r"torch\.inference_mode; got k, v; clone"):
        bp.attention(q, k, v)
    with torch.no_grad():
        assert bp.attention(q, k, v).shape == q.shape
    assert bp.attention(q, k.clone(), v.clone()).requires_grad


def test_attention_rejects_different_dtypes():
    q, k, v = qkv()
    with pytest.raises(DtypeError, match="different dtypes"):
        bp.attention(q.double(), k, v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_results_can_be_changed_in_place(ranks, dtype):
    """Kernels may return them as views of one another."""
    whole = [x.requires_grad_() for x in qkv(dtype=dtype)]

    def work(mesh):
        out, lse = bp.attention(*(bp.shard(x, mesh) for x in whole), mesh=mesh, return_lse=True)
        expected = out.detach() + 1, lse + 1
        for result, wanted in zip((out.add_(1), lse.add_(1)), expected, strict=True):
            assert torch.equal(result, wanted)
        # backward needs the unmodified results
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    bp.run_threads(ranks, work)


def test_errors_are_builtin_exceptions_too():
    with pytest.raises(ValueError, match="mask"):
        bp.attention(*qkv(), mask="nothing")
    with pytest.raises(TypeError):
        bp.attention(*(x.int() for x in qkv()))
    with pytest.raises(NotImplementedError):
        bp.attention(*qkv(), kernel="cpu_flash", softcap=1.0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("transformed", [torch.vmap, torch.func.grad], ids=lambda t: t.__name__)
def test_attention_rejects_torch_func_transforms(transformed, ranks):
    _, k, v = qkv()
    x = torch.randn(3, 1, 16, 4, 8)

    def work(mesh):
        with pytest.raises(UnsupportedError, match=r"torch\.func; .*; put what vmap maps over into the batch"):
            transformed(lambda q: bp.attention(q.view(-1, 16, 4, 8)[:1], k, v, mesh=mesh).sum())(x)

    bp.run_threads(ranks, work)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch itself warns when the first level is entered
@pytest.mark.parametrize("which", ["q", "v", "sinks"])
def test_attention_rejects_forward_mode_tangents(which):
    """Without this check, torch raises in the middle of a pass, or loses the tangent."""
    q, k, v = qkv()
    given = {"q": q, "k": k, "v": v, "sinks": torch.zeros(q.shape[2])}
    with forward_ad.dual_level():
        bp.attention(**given)  # a level without tangents changes nothing
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        with pytest.raises(UnsupportedError, match=r"no forward-mode derivative; .*take gradients with backward\(\)"):
            bp.attention(**given)
    bp.attention(q, k, v)


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_rejects_batched_gradients(ranks, strategy):
    """Without this check, torch raises in the middle of a pass, and the next call is impossible."""
    whole = qkv()

    def work(mesh):
        q, k, v = (bp.shard(x, mesh).requires_grad_() for x in whole)
        out = bp.attention(q, k, v, mesh=mesh, strategy=strategy)
        with pytest.raises(UnsupportedError, match=r"no batched gradients; .*; take one gradient after the other"):
            torch.autograd.grad(out, q, torch.ones(2, *out.shape), is_grads_batched=True)
        bp.attention(q, k, v, mesh=mesh, strategy=strategy).sum().backward()

    bp.run_threads(ranks, work)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # torch itself warns when the first level is entered
def test_attention_rejects_gradients_with_tangents():
    """Without this check, the parts of a tangent that other ranks compute would be missing."""
    q, k, v = (x.requires_grad_() for x in qkv())
    out = bp.attention(q, k, v)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(UnsupportedError, match="no forward-mode derivative"):
            torch.autograd.grad(out, q, dual)
    torch.autograd.grad(bp.attention(q, k, v).sum(), q)


def test_from_group_without_process_group_raises():
    with pytest.raises(InputError, match="torchrun"):
        bp.Mesh.from_group()


def test_partial_attention_merged_equals_attention():
    q, k, v = qkv()
    left, right = [Tile(0, 16, 0, 8, 0, 15)], [Tile(8, 16, 8, 16, 0, 7)]
    parts = [
        bp.partial_attention(q, k[:, :8], v[:, :8], left),
        bp.partial_attention(q, k[:, 8:], v[:, 8:], [t.shifted(0, -8) for t in right]),
    ]
    out, lse = bp.merge_attention_states(parts)
    whole, whole_lse = bp.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(lse, whole_lse)
    with pytest.raises(ShapeError, match="exceeds its block"):
        bp.partial_attention(q, k[:, :8], v[:, :8], [Tile(0, 16, 0, 16, 0, 15)])


def test_partial_attention_rejects_gradients():
    q = torch.randn(1, 8, 2, 4, requires_grad=True)
    tile = Tile(0, 8, 0, 8, 0, 7)
    with pytest.raises(InputError, match="partial_attention has no gradient"):
        bp.partial_attention(q, q.detach(), q.detach(), [tile])
    with torch.no_grad():
        assert bp.partial_attention(q, q, q, [tile])[0].shape == q.shape


def test_merge_attention_states_rejects_gradients():
    out, lse = torch.ones(1, 4, 2, 8, requires_grad=True), torch.zeros(1, 2, 4)
    with pytest.raises(InputError, match="merge_attention_states has no gradient"):
        bp.merge_attention_states([(out, lse), (out, lse)])
    with torch.no_grad():
        assert bool(bp.merge_attention_states([(out, lse), (out, lse)])[0].eq(1).all())


def test_attention_prepares_equal_calls_once():
    mesh = bp.Mesh.single()
    mask = bp.Mask.causal()
    tensors = qkv()
    bp.attention(*tensors, mask=mask, mesh=mesh)
    (first,) = mesh._calls.values()
    bp.attention(*tensors, mask=mask, mesh=mesh)
    assert list(mesh._calls.values()) == [first]
    bp.attention(*tensors, mask="full", mesh=mesh)
    assert len(mesh._calls) == 2


def test_single_mesh_is_cached_per_thread_and_settings(monkeypatch):
    alone = as_mesh(None)
    assert as_mesh(None) is alone
    monkeypatch.setenv("BURST_KERNEL", "reference")
    assert as_mesh(None).config.kernel == "reference"
    monkeypatch.undo()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(as_mesh, None).result() is not alone
    assert as_mesh(None) is alone


def test_choose_kernel_gives_reasons():
    problem = kernel_call(torch.float32, "cpu", 4, 2, 8, 5)
    kernel, why = choose_kernel(load("cpu"), problem)
    assert kernel.name == "reference"
    assert "not cpu_flash: values of size 5" in why


@pytest.mark.parametrize("value", ["0", "0.0005", "-3", "soon", "inf"])
def test_invalid_timeout_raises(value):
    with pytest.raises(InputError, match="BURST_TIMEOUT"):
        from_environment({"BURST_TIMEOUT": value})
    assert from_environment({"BURST_TIMEOUT": "7.5"}).timeout == 7.5


def test_empty_setting_is_unset():
    assert from_environment(dict.fromkeys(("BURST_TIMEOUT", "BURST_KERNEL", "BURST_TRANSPORT"), "")) == Config()


def test_config_compile_ahead_reads_a_flag():
    assert from_environment({}).compile_ahead
    assert not from_environment({"BURST_COMPILE_AHEAD": "0"}).compile_ahead
    assert from_environment({"BURST_COMPILE_AHEAD": "1"}).compile_ahead
    with pytest.raises(InputError, match="BURST_COMPILE_AHEAD must be a flag; got 'no'; allowed: 0 or 1"):
        from_environment({"BURST_COMPILE_AHEAD": "no"})
    with pytest.raises(InputError, match="compile_ahead must be a bool"):
        Config(compile_ahead=0)


def test_attention_uses_row_delta_of_kernel(monkeypatch):
    """A kernel may compute the row sums of dO * O in one pass."""
    asked = []

    def row_delta(self, dout, out):
        asked.append(dout.shape)
        return numerics.row_delta(dout, out)

    monkeypatch.setattr(ReferenceKernel, "row_delta", row_delta, raising=False)
    q = torch.randn(1, 8, 2, 4)

    def work(mesh):
        mine = bp.shard(q, mesh).requires_grad_()
        bp.attention(mine, mine, mine, mesh=mesh, kernel="reference", strategy="ring").sum().backward()

    bp.run_threads(2, work)
    assert asked == [(1, 4, 2, 4)] * 2


def test_operators_get_out_if_rank_has_it(monkeypatch):
    """A surrogate is made only if queries circulate, because delta then comes without out."""
    made: list[str] = []
    once = operator_kernel.surrogate_out
    monkeypatch.setattr(operator_kernel, "surrogate_out", lambda dout, delta: made.append("out") or once(dout, delta))

    def work(mesh, strategy):
        q, k, v = (torch.randn(1, 16, 2, 8, requires_grad=True) for _ in range(3))
        bp.attention(q, k, v, mesh=mesh, strategy=strategy, kernel="cpu_flash").sum().backward()

    bp.run_threads(2, lambda mesh: work(mesh, "ring"))
    assert not made
    bp.run_threads(2, lambda mesh: work(mesh, "burst"))
    assert made


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "usp"])
@pytest.mark.parametrize("mask", ["causal", "window:5"])
def test_attention_ignores_default_device(mask: str, strategy: str):
    """Masks created on the meta device once gave wrong results."""
    length = 34 if mask == "causal" else 38  # the layout is chosen so that rows keep their order
    whole = [torch.randn(1, length, heads, 8) for heads in (4, 4, 4)]

    def work(mesh: bp.Mesh) -> list[torch.Tensor]:
        mine = [bp.shard(x, mesh).requires_grad_() for x in whole]
        with torch.device("meta"):
            out = bp.attention(*mine, mask=mask, mesh=mesh, strategy=strategy, seq_len=length)
            made = torch.autograd.grad(out.sum(), mine)
            return [bp.unshard(x, mesh, seq_len=length) for x in (out.detach(), *made)]

    exact = [x.double().transpose(1, 2).requires_grad_() for x in whole]
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (distance >= 0) & (distance <= (length if mask == "causal" else 5))
    out = torch.nn.functional.scaled_dot_product_attention(*exact, attn_mask=seen, enable_gqa=True)
    good = [out, *torch.autograd.grad(out.sum(), exact)]
    for found in run_threads(4, work):
        for made, other in zip(found, good, strict=True):
            torch.testing.assert_close(made.double(), other.transpose(1, 2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-50, 1e-31])
def test_attention_accepts_scales_that_are_not_positive(scale):
    """In float32, 1e-50 is 0, with which cpu_flash would return NaN."""
    q, k, v, dout = inputs(torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = bp.attention(*leaves, mask="causal", scale=scale, return_lse=True)
    out.backward(dout)
    answer = oracle.Answer(out.detach(), lse, *(x.grad for x in leaves))
    exact, plain = expected(*(x.detach() for x in leaves), dout, MASKS["causal"], torch.float32, scale=scale)
    assert find_violations(answer, exact, plain, torch.float32) == {}
    with pytest.raises(UnsupportedError, match="must be positive"):
        bp.attention(*leaves, scale=scale, kernel="cpu_flash")
    blocks = [x.detach() for x in (q, k, v)]
    assert bool(bp.partial_attention(*blocks, [Tile(0, 9, 0, 9, 0, 8)], scale=scale)[0].isfinite().all())


# -------------------------------------------------------------------------------------------- caller-defined tiles


user_tiles = st.builds(
    lambda q, rows, k, columns, lo, width: Tile(q, q + rows, k, k + columns, lo, lo + width),
    st.integers(0, 6), st.integers(1, 6), st.integers(0, 5), st.integers(1, 5), st.integers(-14, 14), st.integers(0, 9),
)  # fmt: skip


@given(st.lists(user_tiles, max_size=3))
def test_partial_attention_accepts_disjoint_tiles(tiles):
    """Includes rows without keys, empty bands and blocks of different lengths; overlaps raise."""
    q, k, v = torch.randn(1, 12, 2, 4), torch.randn(1, 10, 2, 4), torch.randn(1, 10, 2, 4)
    distance = torch.arange(12).unsqueeze(1) - torch.arange(10)
    times = torch.zeros(12, 10)
    for t in tiles:
        band = (distance >= t.lo) & (distance <= t.hi)
        times[t.q_start : t.q_stop, t.k_start : t.k_stop] += band[t.q_start : t.q_stop, t.k_start : t.k_stop]
    if times.max() > 1:
        with pytest.raises(ShapeError, match="two tiles overlap"):
            bp.partial_attention(q, k, v, tiles)
        return
    scores = (q.double().transpose(1, 2) @ k.double().permute(0, 2, 3, 1) / 2).masked_fill(times == 0, -torch.inf)
    right = (scores.softmax(-1).nan_to_num(0.0) @ v.double().transpose(1, 2)).transpose(1, 2)
    out, lse = bp.partial_attention(q, k, v, tiles)
    torch.testing.assert_close(out, right.float())
    torch.testing.assert_close(lse, scores.logsumexp(-1).float())


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (Tile(0, 17, 0, 16, -99, 99), "exceeds its block.*16 rows and 12 columns"),
        (Tile(0, 16, 0, 13, -99, 99), "exceeds its block"),
        (Tile(-1, 16, 0, 12, -99, 99), "exceeds its block"),
        (Tile(5, 5, 0, 12, -99, 99), "is empty"),
        (Tile(5, 3, 0, 12, -99, 99), "is empty"),
        (Tile(0, 16, 0, 12, 3, 2), "is empty"),
        (Tile(0, 16.0, 0, 12, 0, 9), "not a tile"),
        ((0, 16, 0, 12, 0, 9), "not a tile"),
    ],
)
def test_partial_attention_rejects_invalid_tiles(tile, message):
    """For some of these tiles, torch's operator would abort the process."""
    q, k = torch.randn(1, 16, 2, 4), torch.randn(1, 12, 2, 4)
    with pytest.raises(ShapeError, match=message):
        bp.partial_attention(q, k, k, [tile])


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ({"causal": True}, r'no argument \'causal\'; got True; pass mask="causal" \(the default\) or mask="full"'),
        ({"is_causal": False}, 'or mask="full"'),
        ({"softmax_scale": 0.5}, "pass scale="),
        ({"window_size": (4, 0)}, 'mask="window:LEFT:RIGHT"'),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"mask=Mask\.documents\(cu_seqlens\)"),
        ({"attention_dropout": 0.1}, "pass dropout_p="),
        ({"soft_cap": 1.0}, "did you mean 'softcap'"),
        ({"alibi_slopes": None}, "allowed: mask, mesh, strategy"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_attention_suggests_own_name_of_foreign_argument(argument, hint):
    q = torch.ones(1, 4, 2, 8)
    with pytest.raises(TypeError, match=hint) as caught:
        bp.attention(q, q, q, **argument)
    assert isinstance(caught.value, BurstError)


def test_repr_is_one_short_line():
    mask = bp.Mask.documents(range(0, 1001, 10))
    layout = bp.make_layout("zigzag", 1000, 4)
    assert repr(mask) == "Mask('documents(100)', regions=100)"
    assert repr(layout) == "Layout('zigzag', length=1000, ranks=4)"
    assert repr(bp.Mesh(0, 4, lambda kind: None, ranks_per_node=2)) == "Mesh(rank=0, size=4, ranks_per_node=2)"
    made = bp.plan(seq_len=1000, ranks=4, heads=4, mask=mask, layout=layout, strategy="ring")
    assert repr(made) == "Plan('ring', ranks=4, tokens=1000, mask=documents(100), layout=zigzag)"


def test_mask_rejects_documents_past_maximum_length():
    """2**60 means "unbounded" in a region, so such documents would never end."""
    q = torch.ones(1, 16, 2, 8)
    for end in (1 << 60, 1 << 62):
        with pytest.raises(MaskError, match="ends past every sequence"):
            bp.attention(q, q, q, mask=f"documents:0,4,{end}")
    with pytest.raises(MaskError, match="longer than the sequence"):
        bp.attention(q, q, q, mask=f"documents:0,4,{(1 << 60) - 1}")


@pytest.mark.parametrize(
    ("ranks", "strategy"), [(1, "auto"), (2, "auto"), (2, "ring"), (2, "burst"), (2, "ulysses"), (4, "usp")]
)
def test_attention_of_negated_views_equals_copies(ranks: int, strategy: str):
    """The memory of a negated view has the opposite sign, and kernels and messages read memory."""
    x = torch.randn(1, 16, 2, 8, dtype=torch.complex128)

    def work(mesh: bp.Mesh) -> list[torch.Tensor]:
        found = []
        for view in (x.conj().imag, x.conj().imag.clone()):
            q = (bp.shard(view, mesh) if view.is_neg() is False else torch._neg_view(-bp.shard(view, mesh))).detach()
            q.requires_grad_()
            out = bp.attention(q, q, q, mesh=mesh, strategy=strategy)
            out.backward(torch._neg_view(torch.ones_like(out)) if view.is_neg() else -torch.ones_like(out))
            found += [out.detach(), q.grad]
        return found

    for out, grad, plain_out, plain_grad in bp.run_threads(ranks, work):
        torch.testing.assert_close(out, plain_out, rtol=0, atol=1e-14)
        torch.testing.assert_close(grad, plain_grad, rtol=0, atol=1e-14)


def test_make_strategy_rejects_name_as_option():
    with pytest.raises(InputError, match="no option 'name'"):
        bp.make_strategy("ring", name=0)
