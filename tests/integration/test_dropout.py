"""Test dropout as users call it: seeds, recomputation, refusals. The covering cases of all strategies have it too."""

from __future__ import annotations

import pytest
import torch

import burst_portable as bp
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import InputError, UnsupportedError
from tests.support import attention_product
from tests.support.attention_cases import expected, make_inputs, on_one_rank
from tests.support.dropout_ranks import RANKS, STRATEGIES, drawn, results, trained
from tests.support.fork_server import run_program
from tests.support.one_core import one_core
from tests.support.thread_peers import World, run_peers


def check(case: Case, *, peers: bool = False) -> None:
    """Compare a case with float64, whose mask is made by another implementation of Philox."""
    inputs = make_inputs(case)

    def work(mesh: bp.Mesh):
        return on_one_rank(mesh, case, inputs)

    first, *_ = run_peers(World(case.ranks), work) if peers else bp.run_threads(case.ranks, work)
    assert find_violations(first, *expected(case, inputs), case.dtype) == {}


@pytest.mark.parametrize(
    "strategy",
    ["burst(transfer=direct, prefetch_steps=64, blocks_per_launch=64)", "usp", "dispatch", "distflash"],
)
def test_dropout_over_peer_copies_matches_oracle(strategy):
    """Ranks get only the rows that they need, so received rows have gaps."""
    layout = "striped" if strategy == "usp" else "document_zigzag"
    check(Case("documents", layout, strategy, 4, dropout=0.4), peers=True)


PARTS = 64


@pytest.mark.full
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(PARTS))
def test_dropout_matches_oracle_for_all_products(number):
    with one_core():
        for part in attention_product.parts(attention_product.DROPOUT)[number::PARTS]:
            for case in part:
                attention_product.check(case)


@pytest.fixture(scope="module")
def over_gloo(tmp_path_factory):
    """Return what each rank of `tests.support.dropout_ranks` found."""
    folder = tmp_path_factory.mktemp("dropout")
    done = run_program("tests.support.dropout_ranks", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


def test_ranks_with_equal_generators_drop_the_same_weights(over_gloo):
    """Their results are those of one rank. Both kinds of checkpoints recompute with the same seed."""
    alone = drawn(bp.Mesh.single())
    for found in over_gloo[:2]:
        for way, tensors in found["attention"].items():
            torch.testing.assert_close(tensors, alone[way], rtol=1e-9, atol=1e-12)
    for strategy in STRATEGIES:
        for recompute in (False, True):
            torch.testing.assert_close(alone[strategy, recompute], alone[strategy, None], rtol=0, atol=0)


def test_model_trains_with_dropout_as_on_one_rank(over_gloo):
    """Attention dropout of Transformers, on 1, 2 and 3 ranks, with and without checkpoints."""
    expected = trained(bp.Mesh.single())
    assert expected[False] == expected[True] == expected[None]
    assert len(set(expected[None])) == 3
    for found in over_gloo:
        for losses in (found["losses of 3"], found.get("losses of 2", expected)):
            for recompute, values in losses.items():
                assert values == pytest.approx(expected[recompute], rel=1e-5)


def test_hidden_dropout_on_unequal_shards_keeps_generators_equal(over_gloo):
    """It draws as many numbers as a rank has tokens. Recomputations draw the same, and so do all ranks afterwards."""
    first, *others = (found["hidden"] for found in over_gloo)
    expected = first["recompute=None"]
    assert len(set(expected[:3])) == 3
    for values in first.values():
        assert values == pytest.approx(expected, rel=1e-9)
    assert all(found == first for found in others)


def test_ranks_with_different_generators_raise(over_gloo):
    for found in over_gloo:
        assert "dropout seed: " in found["error"]
        assert "torch.manual_seed" in found["error"]


def test_default_seed_differs_from_call_to_call():
    mesh = bp.Mesh.single()
    first, second = (results(mesh, "ring", None) for _ in range(2))
    assert not torch.equal(first[0], second[0])
    first, second = (results(mesh, "ring", None, seed=4) for _ in range(2))
    assert torch.equal(first[0], second[0])


def test_lse_does_not_depend_on_dropout():
    q, k, v = torch.randn(3, 2, 24, 4, 8)
    out, lse = bp.attention(q, k, v, return_lse=True, kernel="reference")
    dropped, same = bp.attention(q, k, v, return_lse=True, kernel="reference", dropout_p=0.5, dropout_seed=1)
    assert torch.equal(lse, same)
    assert not torch.equal(out, dropped)


def test_first_head_shifts_the_heads_of_the_mask():
    """Tensor parallelism: each of two ranks has half of the heads."""
    q, k, v = torch.randn(3, 2, 24, 4, 8)
    whole = bp.attention(q, k, v, dropout_p=0.5, dropout_seed=9)
    for first in (0, 2):
        half = (x[:, :, first : first + 2] for x in (q, k, v))
        part = bp.attention(*half, dropout_p=0.5, dropout_seed=9, first_head=first)
        torch.testing.assert_close(part, whole[:, :, first : first + 2], rtol=1e-5, atol=1e-6)


def test_explain_names_kernels_without_dropout():
    q = torch.randn(1, 8, 2, 8)
    kernel = bp.explain(q, q, q, dropout_p=0.1).kernel
    assert kernel.name == "reference"
    assert "it does not drop weights by global position" in kernel.not_chosen["cpu_flash"]
    with pytest.raises(UnsupportedError, match="'cpu_flash' was named and does not serve this call: it does not drop"):
        bp.attention(q, q, q, dropout_p=0.1, kernel="cpu_flash")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout_p": 1.0}, "dropout_p is no probability.*got 1.0; allowed: at least 0 and below 1"),
        ({"dropout_p": -0.1}, "dropout_p is no probability"),
        ({"dropout_p": float("nan")}, "dropout_p is no probability"),
        ({"dropout_p": "0.1"}, "dropout_p is not a number"),
        ({"dropout_p": 0.1, "dropout_seed": -1}, "dropout_seed is no seed"),
        ({"dropout_p": 0.1, "dropout_seed": 1 << 63}, "dropout_seed is no seed"),
        ({"dropout_seed": 0.5}, "dropout_seed is no seed"),
        ({"dropout_p": 0.1, "first_head": -1}, "first_head is no index"),
    ],
    ids=str,
)
def test_invalid_dropout_raises(options, message):
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(InputError, match=message):
        bp.attention(q, q, q, **options)


def test_explain_takes_seed_and_draws_none():
    q = torch.randn(1, 8, 2, 8)
    before = torch.get_rng_state()
    assert bp.explain(q, q, q, dropout_p=0.1, dropout_seed=3, first_head=2).kernel.name == "reference"
    assert bp.explain(q, q, q, dropout_p=0.1).kernel.name == "reference"
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(InputError, match="dropout_seed is no seed"):
        bp.explain(q, q, q, dropout_p=0.1, dropout_seed=-1)


def test_plan_for_mesh_takes_kernel_with_dropout():
    """Without dropout, cpu_flash serves the call."""

    def work(mesh):
        sizes = {"seq_len": 32, "heads": 4, "head_dim": 8, "dtype": torch.float32, "device": "cpu"}
        plan = bp.plan_for_mesh(mesh, dropout_p=0.1, **sizes)
        q = bp.shard(torch.randn(1, 32, 4, 8), mesh, layout=plan.layout)
        bp.attention(q, q, q, mesh=mesh, layout=plan.layout, dropout_p=0.1, dropout_seed=3)
        (call,) = mesh._calls.values()
        bp.plan_for_mesh(mesh, kernel="cpu_flash", **sizes)
        with pytest.raises(UnsupportedError, match="'cpu_flash' was named and does not serve this call: it does not"):
            bp.plan_for_mesh(mesh, kernel="cpu_flash", dropout_p=0.1, **sizes)
        with pytest.raises(InputError, match="dropout_p is no probability"):
            bp.plan_for_mesh(mesh, dropout_p=1.0, **sizes)
        return plan.label, plan.call.dropout, call.plan.label, call.plan.call.dropout

    for label, dropout, used, used_dropout in bp.run_threads(2, work):
        assert (label, dropout) == (used, used_dropout)


def test_numbers_in_tensors_are_dropout():
    q = torch.randn(1, 8, 2, 8)
    given = bp.attention(q, q, q, dropout_p=0.25, dropout_seed=6)
    numbers = {"dropout_p": torch.tensor(0.25, dtype=torch.float64), "dropout_seed": torch.tensor(6)}
    assert torch.equal(given, bp.attention(q, q, q, **numbers))


def test_compiled_function_with_dropout_breaks_its_graph():
    """Each call draws a seed, which a graph would keep."""
    q = torch.randn(1, 8, 2, 8)
    compiled = torch.compile(lambda x: bp.attention(x, x, x, dropout_p=0.5) + 1, backend="eager")
    torch.manual_seed(1)
    plain = [bp.attention(q, q, q, dropout_p=0.5) + 1 for _ in range(2)]
    torch.manual_seed(1)
    assert all(torch.equal(compiled(q), x) for x in plain)
    torch.compiler.reset()
