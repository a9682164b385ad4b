"""Test resharded heads in groups, with rows in rank order or natural order, and with all kernels.

Only needed data is sent.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.cpu.attention import CpuFlashKernel
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.errors import InputError, UnsupportedError
from burst_portable.kernels.base import BackwardInputs
from burst_portable.kernels.reference import ReferenceKernel
from burst_portable.layout import Layout, Segment, make_layout
from burst_portable.mask import Mask
from burst_portable.planning.call import AttentionCall, KernelTraits
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.head_division import can_group_heads, split_heads
from burst_portable.planning.tiles import find_tiles
from burst_portable.planning.verify import verify
from burst_portable.planning.work import reshard_bytes
from burst_portable.runtime.prepare import choose, describe
from burst_portable.runtime.request import Request
from burst_portable.runtime.row_orders import row_orders
from burst_portable.strategies.auto import AutoStrategy
from tests.support.attention_cases import expected, make_inputs, on_one_rank, sent_and_planned
from tests.support.seams import calls_with
from tests.support.thread_peers import World, run_peers

TWO_GROUPS = "ulysses(head_groups=2)"
CASES = [
    Case(strategy="ulysses", ranks=3, heads="gqa"),
    Case(strategy=TWO_GROUPS, ranks=3, heads="gqa", layout="striped", mask="window"),
    Case(strategy=TWO_GROUPS, ranks=2, heads="mqa", mask="custom", sinks=True),  # both groups read the one K/V head
    Case(strategy=TWO_GROUPS, ranks=6, heads="wide_values", layout="contiguous", dtype=torch.bfloat16),
    Case(strategy=TWO_GROUPS, ranks=3, heads="mha", batch=1, mask="documents", layout="document_zigzag"),
    Case(strategy=TWO_GROUPS, ranks=2, heads="mha", mask="fully_masked_rows", dtype=torch.float64),
]


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_ulysses_attention_matches_oracle(case, kernel, peers):
    """The reference kernel takes rows in rank order, the CPU kernel in sorted order."""
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)

    def work(mesh):
        return on_one_rank(mesh, case, inputs, kernel)

    for answer in run_peers(World(case.ranks), work) if peers else bp.run_threads(case.ranks, work):
        assert find_violations(answer, exact, plain, case.dtype) == {}


@pytest.mark.parametrize("peers", [False, True], ids=["messages", "peer_copies"])
@pytest.mark.parametrize("strategy", ["ulysses", TWO_GROUPS])
def test_square_kernel_gets_causal_squares(monkeypatch, strategy, peers):
    """Each kernel call is one causal square, although ranks hold two segments each."""
    case, seen = Case(strategy=strategy, ranks=3, heads="gqa", layout="zigzag"), []
    inputs, attend, backward = make_inputs(case), ReferenceKernel.attend, ReferenceKernel.attend_backward
    monkeypatch.setattr(ReferenceKernel, "traits", KernelTraits(prefers_square=True))
    monkeypatch.setattr(ReferenceKernel, "attend", lambda *a, **k: seen.append(a[4]) or attend(*a, **k))
    monkeypatch.setattr(ReferenceKernel, "attend_backward", lambda *a, **k: seen.append(a[2]) or backward(*a, **k))

    def work(mesh):
        return on_one_rank(mesh, case, inputs, "reference")

    for answer in run_peers(World(case.ranks), work) if peers else bp.run_threads(case.ranks, work):
        assert find_violations(answer, *expected(case, inputs), case.dtype) == {}
    assert {tuple(tiles) for tiles in seen} == {tuple(find_tiles(Mask.causal(), *[(Segment(0, case.length),)] * 2))}


@pytest.mark.parametrize("seed", range(2))
def test_late_ranks_do_not_change_results(seed):
    """Groups and passes overtake each other on the copy stream; results stay bitwise equal."""
    cases = [Case(strategy=TWO_GROUPS, ranks=3, heads="gqa"), Case(strategy="ulysses", ranks=3, heads="mqa")]

    def work(mesh):
        return [on_one_rank(mesh, case, make_inputs(case), "reference").quantities() for case in (*cases, cases[0])]

    calm, late = (run_peers(World(3, delay=delay, seed=seed), work) for delay in (0.0, 0.004))
    for before, after in zip(calm, late, strict=True):
        for one, other in zip(before, after, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("groups", "heads"), [(1, "4x4x20x12"), (2, "8x4x20x12"), (2, "4x1x20x12")])
def test_ulysses_sends_one_message_per_group_and_rank(groups, heads):
    """Q, K and V are interleaved per row, with gaps for some sizes, in as many bytes as planned."""
    case = Case(strategy=TWO_GROUPS if groups > 1 else "ulysses", ranks=2, heads=heads, dtype=torch.bfloat16)
    inputs, sizes = make_inputs(case), []
    exact, plain = expected(case, inputs)

    def work(mesh):
        transport = mesh.transport("cpu")
        post = transport.post

        def counted(sends, receives, label=""):
            if label == "to heads" and mesh.rank == 0:
                sizes.append([message.buffer.numel() for message in sends])
            return post(sends, receives, label)

        transport.post = counted
        return on_one_rank(mesh, case, inputs)

    for answer in bp.run_threads(2, work):
        assert find_violations(answer, exact, plain, case.dtype) == {}
    count, kv_count, d, dv = case.sizes
    made = bp.plan(
        seq_len=case.length, ranks=2, heads=count, kv_heads=kv_count, head_dim=d, v_head_dim=dv, batch=case.batch,
        strategy=case.make_strategy(),
    )  # fmt: skip
    planned = [there for name in ("forward", "backward") for there, _ in reshard_bytes(made, name, 0)]
    assert sizes == [[there] for there in planned]
    assert len(sizes) == 2 * groups


def chosen(kernel, **options):
    q, k, v = (torch.empty(1, 16, heads, 8) for heads in (4, 2, 2))
    layout = options.get("layout", "zigzag")
    request = Request("causal", "ulysses", layout, 64, kernel=kernel, deterministic=True).checked()
    mesh = bp.Mesh(0, 4, lambda device: None)
    plan, *_ = choose(describe(q, k, v, None, mesh, request), mesh, request)
    return plan


def test_rows_keep_rank_order_for_single_launch_kernels():
    natural, as_they_come = chosen("cpu_flash"), chosen("reference")
    assert [s.start for s in natural.forward.call.layout.shards[0]] == [0]
    assert [s.start for s in as_they_come.forward.call.layout.shards[0]] == [0, 56, 8, 48, 16, 40, 24]
    for plan in (natural, as_they_come):
        assert verify(plan) == []
        assert plan.forward.steps_of(0)[0].compute.tiles.num_pairs == 64 * 65 // 2
        assert plan.backward.call.k_layout == plan.forward.call.layout


@pytest.mark.parametrize("kernel", ["reference", "auto"])
def test_rows_of_several_steps_are_sorted(kernel):
    """Kernels that take any order and those that sort must plan the same call."""
    mixed = Layout("mixed", 16, ((Segment(0, 8),), (Segment(8, 4, 2), Segment(9, 4, 2))))
    q, k, v = (torch.randn(1, 16, 2, 8) for _ in range(3))
    plain = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)

    def work(mesh):
        mine = (bp.shard(x, mesh, layout=mixed) for x in (q, k, v))
        return bp.attention(*mine, mesh=mesh, layout=mixed, strategy="ulysses", kernel=kernel)

    for rank, out in enumerate(bp.run_threads(2, work)):
        torch.testing.assert_close(out, plain.transpose(1, 2)[:, mixed.positions(rank)], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "groups", "keys", "shared"),
    [
        (8, 2, 2, [(0, 1), (1, 2)], [(True, True)] * 2),
        (8, 2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)], [(True, False), (False, True)] * 2),
        (8, 4, 2, [(0, 2), (2, 4)], [(True, True)] * 2),
        (6, 1, 3, [(0, 1)] * 3, [(True, False), (False, False), (False, True)]),
    ],
)
def test_head_groups_assign_heads(heads, kv_heads, groups, keys, shared):
    made = split_heads(heads, kv_heads, groups)
    assert [g.kv_heads for g in made] == keys
    assert [(g.brings_kv, g.returns_kv) for g in made] == shared
    assert [g.q_heads for g in made] == [(i, i + heads // groups) for i in range(0, heads, heads // groups)]


def test_head_groups_reject_invalid_counts():
    assert not can_group_heads(6, 3, 2)  # three heads would read one and a half K/V heads
    with pytest.raises(InputError, match="head_groups is not a number of groups; got 0"):
        bp.make_strategy("ulysses", head_groups=0)
    with pytest.raises(
        UnsupportedError, match="in 2 groups; got 6 query and 3 K/V heads per rank; allowed: head_groups of 1"
    ):
        bp.plan(seq_len=64, ranks=2, heads=12, kv_heads=6, strategy=bp.make_strategy("ulysses", head_groups=2))


@pytest.mark.parametrize("strategy", ["ulysses", TWO_GROUPS])
@pytest.mark.parametrize("heads", ["gqa", "mqa", "wide_values"])
def test_ulysses_sends_bytes_of_plan(strategy, heads):
    """LSE is sent only if requested; K and V once, however many groups read them."""
    case = Case(strategy=strategy, ranks=3, heads=heads, dtype=torch.bfloat16)
    sent, planned = sent_and_planned(case)
    assert sent == planned


def test_ulysses_without_gradients_equals_with_gradients():
    """LSE is returned if requested, and nothing is saved."""
    case = Case(strategy=TWO_GROUPS, ranks=3)
    x, where = make_inputs(case), case.make_layout()

    def work(mesh):
        q, k, v = (bp.shard(t, mesh, layout=where) for t in (x.q, x.k, x.v))
        call = {"mesh": mesh, "strategy": case.make_strategy(), "layout": where}
        out, lse = bp.attention(q, k, v, **call, return_lse=True)
        with_gradients = bp.attention(q.requires_grad_(), k, v, **call)
        return torch.equal(out, with_gradients), tuple(lse.shape) == (case.batch, 12, q.shape[1])

    assert bp.run_threads(3, work) == [(True, True)] * 3


def test_head_groups_hide_exchanges():
    """With two groups half of the exchange is exposed, for one more launch and equal bytes."""
    hardware = HardwareSpec(
        tflops=400.0,
        intra_node_bandwidth=100.0,
        message_latency=0.0,
        launch_latency=0.0,
        peer_copy_bandwidth=((1, 100.0),),
    )
    size = {"seq_len": 32768, "ranks": 4, "heads": 32, "kv_heads": 16}
    one, two, four = (
        plan_cost(bp.plan(strategy=bp.make_strategy("ulysses", head_groups=n), **size), hardware).per_rank["forward"][0]
        for n in (1, 2, 4)
    )
    assert one.seconds == pytest.approx(one.compute_seconds + one.link_seconds)
    assert two.seconds == pytest.approx(one.compute_seconds + one.link_seconds / 2)
    assert four.seconds == pytest.approx(one.compute_seconds + one.link_seconds / 4)
    assert one.sent == two.sent == four.sent
    assert (one.flops, one.launches, four.launches) == (four.flops, 1, 4)
    slow = replace(hardware, launch_latency=1.0)
    assert bp.plan(strategy=AutoStrategy(hardware=slow), **size).head_groups == 1


def test_single_call_gradients_are_returned_without_copy():
    """The mask is one operator call, so its gradients are not added to zeros."""
    case = Case(mask="causal", ranks=1, layout="contiguous", heads="mha")
    seen: list[tuple[torch.Tensor, ...]] = []

    class Watched(CpuFlashKernel):
        def run_backward(self, *arguments):
            seen.append(super().run_backward(*arguments))
            return seen[-1]

    x = make_inputs(case)
    tiles = bp.plan(seq_len=case.length, ranks=1, heads=12, layout="contiguous").forward.steps_of(0)[0].compute.tiles
    call, kernel = AttentionCall.of(x.q, x.k, x.v, scale=0.3), Watched()
    out, lse = kernel.attend(x.q, x.k, x.v, tiles, call)
    made = kernel.backward_single_call(BackwardInputs(x.dout, x.q, x.k, x.v, lse, out), tiles, call)
    assert all(a is b for a, b in zip(made, seen[0], strict=True))


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped", "document_zigzag"])
def test_row_orders_are_inverse(layout):
    """Orders use slices for few segments and indices for many."""
    mask = Mask.documents(tuple(range(0, 1001, 100)))
    where, one = make_layout(layout, 1000, 4, mask), make_layout("contiguous", 1000, 1)
    to_ranks, to_plan = row_orders(where, one, 0, torch.device("cpu"))
    natural = torch.arange(1000)
    by_rank = torch.tensor([p for rank in range(4) for p in where.positions(rank)])
    if layout == "contiguous":
        assert (to_ranks, to_plan) == (None, None)
    else:
        assert torch.equal(to_ranks(natural), by_rank)
        assert torch.equal(to_plan(by_rank), natural)
    assert row_orders(where, where.joined(), 0, torch.device("cpu")) == (None, None)


class RoundsWhole(ReferenceKernel):
    """Return out in q's dtype from a single call, as kernels of devices do."""

    def forward_single_call(self, q, k, v, tiles, call, *, yields_to_comm=False):
        out, lse = self.attend(q, k, v, tiles, call)
        return out.to(q.dtype), lse


def test_sinks_are_merged_before_rounding():
    """Rounding once gives the nearest value; rounding twice changes one in four."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 64, 4, 16, generator=generator).bfloat16() for _ in range(3))
    sinks = torch.randn(4, generator=generator)
    with calls_with(kernel=lambda _: RoundsWhole()):
        out = bp.attention(q, k, v, mesh=bp.Mesh.single(), strategy="ulysses", mask="full", scale=0.25, sinks=sinks)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double()) * 0.25
    weights = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(1, 4, 64, 1)], -1).softmax(-1)[..., :-1]
    exact = torch.einsum("bhqk,bkhd->bqhd", weights, v.double()).bfloat16()
    assert (out.bfloat16() != exact).double().mean() < 0.01


def test_only_exchanges_without_kernel_are_marked_alone():
    """These are the first inputs and the last results; with one group, both exchanges."""

    def work(mesh, groups):
        transport, told = mesh.transport("cpu"), []
        exchange = transport.exchange

        def noted(sends, receives, label, *, exclusive=False):
            told.append((label, exclusive))
            return exchange(sends, receives, label, exclusive=exclusive)

        transport.exchange = noted
        q, k, v = (torch.ones(1, 3, 4, 8, requires_grad=True) for _ in "qkv")
        bp.attention(q, k, v, mesh=mesh, strategy=bp.make_strategy("ulysses", head_groups=groups)).sum().backward()
        return told

    one = [("to heads", True), ("to sequence", True)]
    two = [("to heads", True), ("to heads", False), ("to sequence", False), ("to sequence", True)]
    assert bp.run_threads(2, lambda mesh: work(mesh, 1)) == [one * 2] * 2
    assert bp.run_threads(2, lambda mesh: work(mesh, 2)) == [two * 2] * 2
