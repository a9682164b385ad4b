"""Test the forward pass and all gradients on ranks that are threads, against the oracle in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import attrgetter

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.conformance.cases import AXES, STRATEGIES, Case, covering
from burst_portable.conformance.oracle import find_violations, relative_error
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.kernels.base import WrappedKernel
from burst_portable.planning.tiles import Tile
from tests.support import attention_product
from tests.support.attention_cases import expected, make_inputs, on_one_rank, sent_and_planned
from tests.support.one_core import one_core
from tests.support.seams import calls_with
from tests.support.thread_peers import World, run_peers


def check(case: Case) -> None:
    """Check that all ranks return bitwise equal unsharded results, and compare one of them with the oracle."""
    inputs = make_inputs(case)
    first, *others = bp.run_threads(case.ranks, lambda mesh: on_one_rank(mesh, case, inputs))
    assert find_violations(first, *expected(case, inputs), case.dtype) == {}
    for other in others:
        assert first.differs(other) == ""


# By default, a third of the pairs of a strategy and a mask, in which every choice of each axis occurs.
# tests/planning/test_verify.py has the plans of all pairs.
COVERING = [pytest.param(case, marks=[pytest.mark.full] * (i % 3 > 0)) for i, case in enumerate(covering())]


@pytest.mark.parametrize("axis", AXES)
def test_default_cases_have_every_choice(axis):
    usual = [one.values[0] for one in COVERING if not one.marks]
    assert {str(getattr(case, axis)) for case in usual} == set(map(str, AXES[axis]))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_attention_threads_match_oracle_for_all_pairs(case):
    """One core takes half the time; other tests cover concurrent ranks."""
    with one_core():
        check(case)


PARTS = 64


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(PARTS))
def test_attention_threads_match_oracle_for_all_products(number):
    """Thousands of cases in parts: one id per case would take longer to collect than to run."""
    with one_core():
        for part in attention_product.parts()[number::PARTS]:
            for case in part:
                attention_product.check(case)


def test_product_resumes_where_it_ended(tmp_path, monkeypatch, capsys):
    """The second call runs only the part that the file lacks; a wrong case is listed."""
    cases = [Case("causal", "zigzag", "ring", 2), Case("full", "contiguous", "ring", 2)]
    ran = []

    def check(case):
        ran.append(case)
        assert case.mask == "causal", "planted"

    monkeypatch.setattr(attention_product, "parts", lambda dropout=0.0, seed=0: [[case] for case in cases])
    monkeypatch.setattr(attention_product, "check", check)
    options = ["--resume", str(tmp_path / "parts.jsonl")]
    assert attention_product.main([*options, "--seconds", "0"]) == 0
    assert capsys.readouterr().out == "1 of 2 cases, 0 wrong\n"
    assert attention_product.main(options) == 1
    assert capsys.readouterr().out == f"2 of 2 cases, 1 wrong\n{cases[1].spec()}\n"
    assert ran == cases
    assert attention_product.main(options) == 1
    assert ran == cases


@pytest.mark.parametrize("wrong_ranks", [{1}, {0, 1}], ids=["one rank", "all ranks"])
def test_check_of_product_detects_wrong_gradient(wrong_ranks):
    case = Case("causal", "zigzag", "ulysses", 2)
    attention_product.check(case)

    def compute(mesh, *args, **options):
        answer = on_one_rank(mesh, *args, **options)
        return replace(answer, dq=answer.dq * 1.01) if mesh.rank in wrong_ranks else answer

    with pytest.raises(AssertionError, match="dq"):
        attention_product.check(case, compute)


def test_results_unsharded_at_once_have_the_same_bits():
    case = Case("documents", "striped", "burst", 3, "wide_values", dtype=torch.bfloat16, sinks=True)
    inputs = make_inputs(case)
    first, second = (
        bp.run_threads(3, lambda mesh, at_once=at_once: on_one_rank(mesh, case, inputs, at_once=at_once))
        for at_once in (False, True)
    )
    assert [one.differs(other) for one, other in zip(first, second, strict=True)] == [""] * 3
    assert first[0].out.dtype == torch.bfloat16


@pytest.mark.parametrize("label", STRATEGIES)
def test_sent_bytes_of_every_strategy_equal_plan(label):
    """Ragged shards, and masks that need all blocks, or parts of some."""
    for mask, layout in (("full", "zigzag"), ("documents_window", "contiguous")):
        case = Case(mask, layout, label, ranks=4, heads="8x4x8x6", dtype=torch.bfloat16, batch=1)
        with one_core():
            sent, planned = sent_and_planned(case)
        assert sent == planned
        assert max(sent) > 0


def test_judge_detects_wrong_scale():
    """An answer that is wrong by 1 % is rejected in each quantity."""
    case = Case()
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)
    off = replace(exact, **{name: value * 1.01 for name, value in exact.quantities().items()})
    names = ("out", "lse", "dq", "dk", "dv")
    assert find_violations(off, exact, plain, case.dtype).keys() == {
        f"{name}{more}" for name in names for more in ("", " (max)")
    }


@pytest.mark.parametrize("length", [8, 9, 15, 17, 31])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_short_and_uneven_shards(length, layout):
    check(Case(length=length, layout=layout, ranks=8, mask="causal", strategy="burst"))


@pytest.mark.parametrize("strategy", ["ring", "burst", "double_ring", "ulysses", "usp"])
def test_rows_without_keys_have_zero_output(strategy):
    """Out 0, LSE -inf and gradients 0, exactly."""
    case = Case(mask="fully_masked_rows", strategy=strategy, ranks=4 if strategy == "usp" else 2, heads="mha")
    inputs = make_inputs(case)
    for answer in bp.run_threads(case.ranks, lambda mesh: on_one_rank(mesh, case, inputs)):
        assert torch.equal(answer.out[:, 9:], torch.zeros_like(answer.out[:, 9:]))
        assert bool((answer.lse[:, :, 9:] == -torch.inf).all())
        for gradient in (answer.dq, answer.dk, answer.dv):
            assert torch.equal(gradient[:, 9:], torch.zeros_like(gradient[:, 9:]))
            assert bool(gradient[:, :9].any())


def errors_by_ranks(ranks, strategy, dtype, sharpness, kernel):
    """Return the error of each quantity against float64 for each number of ranks, with equal data."""
    errors: dict[str, list[float]] = {}
    for count in ranks:
        case = Case(ranks=count, strategy=strategy, dtype=dtype, length=256, batch=1, heads="wide_heads")
        inputs = make_inputs(case)
        inputs = replace(inputs, q=inputs.q * sharpness)
        exact, _ = expected(case, inputs)
        (answer, *_) = bp.run_threads(count, lambda mesh, case=case, x=inputs: on_one_rank(mesh, case, x, kernel))
        for name, value in answer.quantities().items():
            errors.setdefault(name, []).append(relative_error(value, exact.quantities()[name]))
    return errors


GROWTH = [("ring", torch.float32), ("burst", torch.bfloat16)]
GROWTH_FULL = [("burst", torch.float32), ("ring", torch.bfloat16)]
EVERY = (2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("strategy", "dtype", "ranks"),
    [(*GROWTH[0], (2, 8, 16)), (*GROWTH[1], (2, 8, 16))]
    + [pytest.param(*pair, EVERY, marks=pytest.mark.full) for pair in (*GROWTH, *GROWTH_FULL)],
    ids=str,
)
def test_error_does_not_depend_on_ranks(strategy, dtype, ranks):
    """The ratio of the largest and the smallest error is at most 1.25 for each quantity.

    The reference kernel computes in wider dtypes than its inputs, so the errors are those of distribution. Scores are
    spread as in trained attention.
    """
    errors = errors_by_ranks(ranks, strategy, dtype, 4.0, "reference")
    assert max(max(e) / min(e) for e in errors.values()) <= 1.25, errors


@pytest.mark.parametrize("ranks", [(2, 8, 16), pytest.param(EVERY, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize(("strategy", "dtype"), [("burst", torch.float32)], ids=str)
def test_error_does_not_grow_with_ranks(strategy, dtype, ranks):
    """torch's kernel gets more accurate with shorter blocks; more ranks may not be worse."""
    errors = errors_by_ranks(ranks, strategy, dtype, 1.0, "auto")
    assert all(e[i] <= 1.25 * min(e[:i]) for e in errors.values() for i in range(1, len(e))), errors


class Narrow(Case):
    """A case whose gradients are sent in the dtype of the inputs."""

    def make_strategy(self):
        return replace(super().make_strategy(), gradient_comm_dtype="input")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "strategy",
    ["ring", "ring(transfer=direct, blocks_per_launch=2)", "burst", "double_ring(backward_circulates=kv)", "usp"],
)
def test_gradients_sent_in_input_dtype_are_accurate(strategy, dtype):
    """Only gradients that were sent are rounded; float32 inputs change nothing."""
    wide, narrow = (kind(strategy=strategy, ranks=4, dtype=dtype, layout="striped") for kind in (Case, Narrow))
    inputs = make_inputs(wide)
    before, after = (bp.run_threads(4, lambda mesh, c=c: on_one_rank(mesh, c, inputs))[0] for c in (wide, narrow))
    assert find_violations(after, *expected(wide, inputs), dtype) == {}
    travelled = {"dq"} if strategy == "burst" else {"dk", "dv"}
    for name, value in before.quantities().items():
        same = dtype == torch.float32 or name not in travelled
        assert torch.equal(value, after.quantities()[name]) == same, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("strategy", ["ring", "burst", "all_gather", "dispatch", "distflash"])
def test_small_gradients_sent_in_input_dtype_are_accurate(strategy, dtype):
    """Rows of one head of size 3 and 1 are padded to 16 bytes, rounded or not."""

    class Small(Narrow):
        sizes = 1, 1, 3, 1

    case = Small(strategy=strategy, ranks=3, dtype=dtype, batch=1)
    inputs = make_inputs(case)
    found = bp.run_threads(3, lambda mesh: on_one_rank(mesh, case, inputs))[0]
    assert find_violations(found, *expected(case, inputs), dtype) == {}


def test_results_are_bitwise_reproducible():
    """Sums follow the order of the plan, whichever message arrives first."""
    case = Case(ranks=4, strategy="burst", mask="documents", layout="document_zigzag")
    inputs = make_inputs(case)
    first, second = (bp.run_threads(4, lambda mesh: on_one_rank(mesh, case, inputs))[0] for _ in range(2))
    for name, value in first.quantities().items():
        assert torch.equal(value, second.quantities()[name]), name


class Unused(torch.autograd.Function):
    """Return no gradient for the input, not even zeros."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@pytest.mark.parametrize("strategy", ["ring", "burst", "ulysses(head_groups=2)"])
def test_rank_with_unused_result_runs_backward(strategy):
    """The other ranks wait for its blocks."""
    case = Case(ranks=2, strategy=strategy, mask="full", heads="8x4x20x12")
    inputs = make_inputs(case)
    inputs.dout[:, case.make_layout().positions(1)] = 0.0

    def work(mesh):
        return on_one_rank(mesh, case, inputs, use=Unused.apply if mesh.rank == 1 else None)

    for answer in bp.run_threads(2, work):
        assert find_violations(answer, *expected(case, inputs), case.dtype) == {}


def test_strided_inputs_give_equal_results():
    """Memory has heads before rows, as in transformers."""
    case = Case(ranks=2, strategy="ring")
    x = make_inputs(case)
    strided = replace(x, q=heads_first_memory(x.q), k=heads_first_memory(x.k), v=heads_first_memory(x.v))
    plain, other = (bp.run_threads(2, lambda mesh, i=i: on_one_rank(mesh, case, i))[0] for i in (x, strided))
    assert torch.equal(plain.out, other.out)
    assert torch.equal(plain.dk, other.dk)


def heads_first_memory(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


class Brought(torch.autograd.Function):
    """Return the result type of torch's asynchronous collectives. It has no memory before an operator uses it."""

    @staticmethod
    def forward(ctx, x):
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return AsyncCollectiveTensor(gradient.clone())


@pytest.mark.parametrize(("strategy", "ranks"), [("ring", 2), ("ulysses", 2), ("ring", 1)])
def test_async_collective_inputs_are_waited_for(strategy, ranks):
    """Kernels and copies that take addresses would otherwise read at address 0."""
    case, addresses = Case(ranks=ranks, strategy=strategy), []
    x = make_inputs(case)

    class Noting(WrappedKernel):
        def attend(self, *tensors, **options):
            addresses.extend(x.data_ptr() for x in tensors[:3])
            return super().attend(*tensors, **options)

        def forward_single_call(self, *tensors, **options):
            addresses.extend(x.data_ptr() for x in tensors[:3])
            return super().forward_single_call(*tensors, **options)

        def attend_backward(self, x, *rest, **options):
            addresses.extend(tensor.data_ptr() for tensor in x if tensor is not None)
            return super().attend_backward(x, *rest, **options)

        def backward_single_call(self, x, *rest):
            addresses.extend(tensor.data_ptr() for tensor in x if tensor is not None)
            return super().backward_single_call(x, *rest)

    def work(mesh, bring):
        leaves = [bp.shard(t, mesh, layout="zigzag").requires_grad_() for t in (x.q, x.k, x.v)]
        q, k, v = (bring(leaf) for leaf in leaves)
        assert (q.data_ptr() == 0) == (bring == Brought.apply)
        with calls_with(kernel=Noting):
            out = bp.attention(q, k, v, mask=case.make_mask(), mesh=mesh, strategy=strategy, seq_len=case.length)
        gradients = torch.autograd.grad(bring(out), leaves, bp.shard(x.dout, mesh, layout="zigzag"))
        return out.detach(), *gradients

    run = bp.run_threads if strategy == "ring" else lambda ranks, work: run_peers(World(ranks), work)
    plain, brought = (run(ranks, lambda mesh, how=how: work(mesh, how)) for how in (torch.clone, Brought.apply))
    for one, other in zip(plain, brought, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert addresses
    assert 0 not in addresses


class Pair(torch.Tensor):
    """Two tensors, x and 2x, as one. Every operator runs on both. It has no memory itself."""

    @staticmethod
    def __new__(cls, first, second=None):
        return cls._make_wrapper_subclass(cls, first.shape, strides=first.stride(), dtype=first.dtype)

    def __init__(self, first, second=None):
        self.first, self.second = first, 2 * first if second is None else second

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        given = args, kwargs or {}
        one, two = (tree_map_only(cls, attrgetter(name), given) for name in ("first", "second"))
        first, second = function(*one[0], **one[1]), function(*two[0], **two[1])
        return tree_map(lambda a, b: cls(a, b) if isinstance(a, torch.Tensor) else a, first, second)


class FunctionalTensor(Pair):
    """A `Pair` that is accepted, since torch has a class of this name, to show what would happen."""


class WithGradient(torch.autograd.Function):
    """Return the input, with a gradient of another kind."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kind = kind
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.kind(gradient), None


@pytest.mark.parametrize("strategy", ["ring", "burst", "ulysses", "all_gather"])
def test_tensors_that_replace_operators_raise(strategy):
    """Ranks would send and receive other memory, and return wrong numbers. The next call is correct."""
    case = Case(ranks=2, strategy=strategy)
    x = make_inputs(case)
    exact, plain = expected(case, x)

    def attend(mesh, kind):
        shards = [kind(bp.shard(t, mesh)) for t in (x.q, x.k, x.v)]
        out = bp.attention(*shards, mask=case.make_mask(), mesh=mesh, strategy=strategy, seq_len=case.length)
        return relative_error(out.first if isinstance(out, Pair) else out, bp.shard(exact.out, mesh))

    def accepted(mesh, kind):
        """Return what is wrong with a call whose gradient is of this kind."""
        answer = on_one_rank(mesh, case, x, use=lambda out: WithGradient.apply(out, kind))
        return find_violations(answer, exact, plain, case.dtype)

    def rejected(mesh):
        with pytest.raises(InputError, match=r"q is a tensor that replaces torch's operators.* got Pair"):
            attend(mesh, Pair)
        with pytest.raises(InputError, match="x is a tensor that replaces"):
            bp.unshard(Pair(torch.ones(1, 4)), mesh, seq_len=8)
        with pytest.raises(UnsupportedError, match=r"gradient of attention's result .* got Pair"):
            accepted(mesh, Pair)
        return accepted(mesh, torch.clone)

    assert bp.run_threads(2, rejected) == [{}, {}]
    assert not min(bp.run_threads(2, lambda mesh: attend(mesh, FunctionalTensor))) < 0.1
    assert all(bp.run_threads(2, lambda mesh: accepted(mesh, FunctionalTensor)))


def test_partial_attention_waits_for_async_collectives(monkeypatch):
    kinds, attend = [], CpuFlashKernel.attend

    def noted(self, *arguments, **options):
        kinds.extend(type(x) for x in arguments[:3])
        return attend(self, *arguments, **options)

    monkeypatch.setattr(CpuFlashKernel, "attend", noted)
    tiles = [Tile(0, 8, 0, 8, 0, 7)]
    bp.partial_attention(*(AsyncCollectiveTensor(torch.randn(1, 8, 2, 4)) for _ in range(3)), tiles)
    assert kinds == 3 * [torch.Tensor]


def test_double_backward_raises():
    """Without this error, autograd.grad would silently omit terms."""

    def work(mesh):
        q, k, v = (torch.randn(1, 8, 2, 4, requires_grad=True) for _ in range(3))
        out = bp.attention(q, k, v, mesh=mesh)
        with pytest.raises(UnsupportedError, match="differentiable once; got a backward pass with create_graph"):
            torch.autograd.grad(out.square().sum() if mesh.rank else out.sum(), q, create_graph=True)

    bp.run_threads(1, work)
    bp.run_threads(2, work)


def _save_products(_context, operator, *_arguments, **_named):
    """Save what selective checkpointing usually keeps, and also long operations and the sums of kernels."""
    name = operator.__name__
    kept = "attention" in name or name.startswith(("mm", "bmm", "mul", "add", "exp", "zeros", "_to_copy", "clone"))
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("kernel", ["auto", "reference"])
@pytest.mark.parametrize(("strategy", "ranks"), [("ring", 2), ("burst", 2), ("ulysses", 2), ("usp", 4)])
def test_selective_checkpointing_gives_equal_gradients(strategy, ranks, kernel):
    """Saved operator results may be changed in place by later merges."""
    whole = [torch.randn(2, 23, heads, 8, dtype=torch.float64) for heads in (4, 2, 2)]

    def work(mesh, policy):
        q, k, v = (bp.shard(x, mesh).requires_grad_() for x in whole)

        def region(q, k, v):
            return bp.attention(q * 2, k, v, mesh=mesh, seq_len=23, strategy=strategy, kernel=kernel).sin()

        if policy is None:
            out = region(q, k, v)
        else:
            contexts = partial(create_selective_checkpoint_contexts, policy)
            out = checkpoint(region, q, k, v, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(out.square().sum(), (q, k, v))

    expected = bp.run_threads(ranks, lambda mesh: work(mesh, None))
    for found, plain in zip(bp.run_threads(ranks, lambda mesh: work(mesh, _save_products)), expected, strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=0)
