"""Test heads sharded within nodes and blocks circulating between them: against float64, Ulysses and rings, and in
bytes.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import pytest
import torch

import burst_portable as bp
from burst_portable.comm.base import Transport
from burst_portable.comm.local import LocalTransport, run_transports
from burst_portable.conformance.cases import Case
from burst_portable.conformance.oracle import find_violations
from burst_portable.conformance.running import plan_of
from burst_portable.errors import CommunicationError, MismatchError, UnsupportedError
from burst_portable.planning.cost import plan_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.causes import add_collectives
from burst_portable.profiling.session import profile
from tests.support.attention_cases import expected, make_inputs, on_one_rank, sent_and_planned
from tests.support.live_memory import KV_BYTES, RESULT_BYTES, measured
from tests.support.thread_peers import World, run_peers

DIRECT = "usp(backward_circulates=q, transfer=direct)"
INNER_RINGS = "usp(ranks_per_node=2, inner_ring_size=2)"
ACROSS = "usp(placement=context_first)"


@dataclass(frozen=True)
class Nodes(Case):
    """A case with nodes of a given size."""

    strategy: str = "usp"
    ranks_per_node: int = 2

    def __str__(self) -> str:
        return f"{super().__str__()}-nodes of {self.ranks_per_node}"

    def make_strategy(self):
        return replace(super().make_strategy(), ranks_per_node=self.ranks_per_node)


FEW = [
    Nodes(ranks=4, ranks_per_node=2, heads="gqa"),
    Nodes(ranks=6, ranks_per_node=3, heads="wide_values", layout="striped", mask="window", sinks=True),
    Nodes(ranks=6, ranks_per_node=2, heads="mqa", strategy=DIRECT, layout="contiguous", mask="custom", sinks=True),
    Nodes(ranks=8, ranks_per_node=4, heads="wide_heads", strategy=DIRECT, layout="document_zigzag", mask="documents"),
    Nodes(ranks=8, ranks_per_node=2, heads="gqa", mask="sink_window", dtype=torch.bfloat16, softcap=5.0, batch=1),
    Nodes(ranks=8, ranks_per_node=2, heads="gqa", strategy=INNER_RINGS, mask="documents", batch=1),
    Nodes(ranks=6, ranks_per_node=2, heads="wide_values", strategy=ACROSS, mask="window", sinks=True),
    Nodes(ranks=6, ranks_per_node=3, heads="mqa", strategy=ACROSS, layout="striped", mask="custom", batch=1),
    Nodes(ranks=4, ranks_per_node=2, heads="12x6x5x3", strategy=DIRECT, mask="documents", layout="whole_documents"),
]


def check(case: Case, kernel: str) -> None:
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)
    for answer in bp.run_threads(case.ranks, lambda mesh: on_one_rank(mesh, case, inputs, kernel)):
        assert find_violations(answer, exact, plain, case.dtype) == {}


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        ("usp", "rows that cross nodes: .* 'reference' takes on rank 0, 1 but .*'cpu_flash'.*; name one kernel="),
        (DIRECT, ""),  # uses natural order with any kernel
        ("ulysses", ""),  # each rank separately
    ],
)
def test_different_kernels_on_ranks_raise_or_agree(strategy, why):
    """Otherwise rows of another node would be computed in the wrong order."""
    case = Case(ranks=4, mask="causal", layout="zigzag", heads="8x4x16x16", strategy=strategy)
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)

    def work(mesh):
        try:
            return on_one_rank(mesh, case, inputs, "reference" if mesh.rank < 2 else "cpu_flash")
        except MismatchError as error:
            return str(error)

    for answer in bp.run_threads(4, work):
        if why:
            assert re.search(why, str(answer)), answer
        else:
            assert find_violations(answer, exact, plain, case.dtype) == {}


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("case", FEW, ids=str)
def test_usp_attention_matches_oracle(case, kernel):
    """The reference kernel takes rows in rank order, the CPU kernel in sorted order of the node."""
    check(case, kernel)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "v_head_dim"), [("4", "4", 8), ("4", "2", 5), ("2", "1", 8), ("2", "one", 8)]
)
@pytest.mark.parametrize("strategy", ["usp", DIRECT, INNER_RINGS])
@pytest.mark.parametrize(("ranks", "ranks_per_node"), [(4, 2), (6, 2), (6, 3), (8, 2), (8, 4), (12, 3), (12, 6)])
def test_usp_attention_with_nodes_of_each_size(ranks, ranks_per_node, strategy, heads, kv_heads, v_head_dim, kernel):
    """Each rank has its own query heads. K/V heads are per rank, or one is shared by all ranks."""
    kv_heads = 1 if kv_heads == "one" else int(kv_heads) * ranks_per_node
    heads = f"{int(heads) * ranks_per_node}x{kv_heads}x8x{v_head_dim}"
    if strategy == INNER_RINGS and ranks // ranks_per_node % 2:
        pytest.skip("inner rings of two do not divide a ring of three")
    for layout, mask in (("zigzag", "causal"), ("striped", "window_both"), ("contiguous", "custom")):
        check(
            Nodes(ranks=ranks, ranks_per_node=ranks_per_node, strategy=strategy, heads=heads, layout=layout, mask=mask),
            kernel,
        )


@pytest.mark.parametrize(
    ("ranks_per_node", "other"), [(1, Case(ranks=4)), (4, Case(ranks=4, strategy="ulysses", heads="mha"))], ids=str
)
def test_usp_limits_equal_ring_and_ulysses(ranks_per_node, other):
    """One rank per node or one node, bitwise equal, with sinks and LSE."""
    other = replace(other, sinks=True, mask="documents", layout="striped")
    case = Nodes(**{**vars(other), "strategy": "usp"}, ranks_per_node=ranks_per_node)
    x = make_inputs(case)
    mine, theirs = (bp.run_threads(4, lambda mesh, c=c: on_one_rank(mesh, c, x).quantities()) for c in (case, other))
    for one, another in zip(mine, theirs, strict=True):
        assert one.keys() >= {"out", "lse", "dq", "dk", "dv"}
        assert all(torch.equal(one[name], another[name]) for name in one)


@pytest.mark.parametrize("strategy", ["usp", DIRECT])
@pytest.mark.parametrize("heads", ["gqa", "12x1x8x8", "wide_values"])
def test_usp_sends_bytes_of_plan(strategy, heads):
    """Messages between nodes connect equal ranks of nodes; resharded rows stay in the node."""
    case = Nodes(strategy=strategy, ranks=6, ranks_per_node=3, heads=heads, dtype=torch.bfloat16)
    pairs = {}

    def watch(transport: LocalTransport):
        post = transport.post

        def watched(sends, receives, label=""):
            kind = "between" if "step" in label else label
            pairs.setdefault(kind, set()).update((transport.rank, m.peer) for m in sends)
            return post(sends, receives, label)

        transport.post = watched

    sent, planned = sent_and_planned(case, watch)
    assert sent == planned
    assert pairs["between"] == {(rank, (rank + 3) % 6) for rank in range(6)}
    inside = {(a, b) for a in range(6) for b in range(6) if a // 3 == b // 3 and a != b}
    assert pairs["to heads"] == pairs["to sequence"] == inside


@pytest.mark.parametrize("case", [FEW[2], FEW[3], FEW[0]], ids=str)
def test_usp_attention_with_peer_copies(case):
    """With fetched blocks all is direct: exchanges and messages share the inboxes."""
    inputs = make_inputs(case)
    exact, plain = expected(case, inputs)

    for answer in run_peers(World(case.ranks), lambda mesh: on_one_rank(mesh, case, inputs)):
        assert find_violations(answer, exact, plain, case.dtype) == {}
    assert plan_of(case).direct == (case.strategy == DIRECT)


@pytest.mark.parametrize("seed", range(2))
def test_usp_late_ranks_do_not_change_results(seed):
    """Exchanges, messages and passes overtake each other; results stay bitwise equal."""
    cases = [replace(FEW[2], ranks=4, heads=heads) for heads in ("mha", "mqa")]

    def work(mesh):
        return [on_one_rank(mesh, case, make_inputs(case), "reference").quantities() for case in (*cases, cases[0])]

    calm, late = (run_peers(World(4, delay=delay, seed=seed), work) for delay in (0.0, 0.004))
    for before, after in zip(calm, late, strict=True):
        for one, other in zip(before, after, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in one)


class Mute(Transport):
    """A transport whose rank fails before it posts a given step."""

    def __init__(self, wrapped: Transport, step: str) -> None:
        super().__init__(wrapped.name, wrapped.rank, wrapped.size)
        self.wrapped, self.step = wrapped, step

    def post(self, sends, receives, label=""):
        if label == self.step:
            raise CommunicationError("planted")
        return self.wrapped.post(sends, receives, label)

    def share(self, data, label="share", timeout=None):
        return self.wrapped.share(data, label, timeout)


@pytest.mark.parametrize(("step", "waits"), [("forward step 0", 1), ("to heads", 5), ("backward step 1", 1)])
def test_usp_errors_name_global_ranks(step, waits):
    """In nodes of 3, rank 4 has rank 1 in its ring, and ranks 3 and 5 in its node."""

    def work(transport: LocalTransport):
        own = Mute(transport, step) if transport.rank == 4 else transport
        mesh = bp.Mesh(transport.rank, 6, lambda _: own)
        q = torch.ones(1, 4, 6, 8, requires_grad=True)
        try:
            out = bp.attention(q, q, q, mask="full", mesh=mesh, strategy=bp.make_strategy("usp", ranks_per_node=3))
            out.sum().backward()
        except CommunicationError as error:
            return str(error)
        return ""

    told = run_transports(6, work, timeout=20.0)
    assert told[4] == "planted"
    assert told[waits].startswith(f"rank {waits}, {step}: rank 4 returned without this call"), told


def test_different_node_sizes_raise_mismatch_error():
    def work(mesh):
        q = torch.ones(1, 4, 4, 8)
        told = (
            r"strategy: usp in nodes of 2 \(transfer all_to_all and ring, .* on rank 0, 1, 2 but usp \(transfer ring, "
        )
        with pytest.raises(MismatchError, match=told):
            bp.attention(
                q, q, q, mesh=mesh, strategy=bp.make_strategy("usp", ranks_per_node=1 if mesh.rank == 3 else 2)
            )

    bp.run_threads(4, work)


def test_usp_head_errors_reach_all_ranks():
    def work(mesh):
        q, k = torch.ones(1, 4, 6, 8), torch.ones(1, 4, 3, 8)
        with pytest.raises(
            UnsupportedError,
            match=r"ranks_per_node=2; allowed: ranks_per_node of 1 on 4 ranks",
        ):
            bp.attention(q, k, k, mesh=mesh, strategy=bp.make_strategy("usp", ranks_per_node=2))
        assert bp.attention(q, k, k, mesh=mesh, strategy="usp").shape == q.shape

    bp.run_threads(4, work)


@pytest.mark.parametrize("strategy", ["usp", "double_ring"])
def test_named_strategy_takes_node_size_of_mesh(strategy):
    """Eight ranks in nodes of two; without the mesh, nodes of four would be the default."""

    def work(local):
        mesh = bp.Mesh(local.rank, 8, local.transport, ranks_per_node=2)
        x = torch.empty(1, 8, 8, 8)
        told = bp.explain(x, x, x, mesh=mesh, strategy=strategy)
        return told, bp.plan_for_mesh(mesh, seq_len=64, heads=8, strategy=strategy)

    told, made = bp.run_threads(8, work)[0]
    assert told.strategy.why == "named"
    named = bp.plan(seq_len=64, ranks=8, heads=8, strategy=bp.make_strategy(strategy, ranks_per_node=2), layout="auto")
    assert replace(made.call, dtype="", device="") == named.call
    assert [made.steps(one, 3) for one in PASSES] == [named.steps(one, 3) for one in PASSES]
    ring = made.forward.route
    assert (ring.ranks, getattr(ring, "ranks_per_node", made.head_parallel_size)) == (
        (4, 2) if strategy == "usp" else (8, 2)
    )


def test_explain_describes_both_levels_of_usp():
    def work(mesh):
        q, k = torch.empty(1, 4, 4, 8), torch.empty(1, 4, 2, 8)
        return bp.explain(
            q, k, k, mesh=mesh, strategy=bp.make_strategy("usp", ranks_per_node=2, gradient_comm_dtype="input")
        ).traffic

    told = bp.run_threads(4, work)[0]
    assert told["forward"].endswith("between nodes K and V are sent (all_to_all, ring, nodes of 2 ranks)")
    assert told["backward"].startswith("all rows of its node of some heads of dO are sent")

    default = bp.run_threads(4, lambda mesh: bp.explain(*[torch.empty(1, 4, 2, 8)] * 3, mesh=mesh, strategy="usp"))[0]
    assert default.strategy.why == "named; ranks_per_node=2 by default"


def test_usp_records_equal_plan():
    """Bytes, FLOPs and kernels of each rank; messages name global ranks."""
    case = Nodes(ranks=4, ranks_per_node=2, mask="full", layout="contiguous", dtype=torch.float32)
    x, where = make_inputs(case), case.make_layout()

    def work(mesh):
        with profile(mesh=mesh) as session:
            q, k, v = (bp.shard(t, mesh, layout=where).requires_grad_() for t in (x.q, x.k, x.v))
            out = bp.attention(q, k, v, mask="full", mesh=mesh, strategy=case.make_strategy(), layout=where)
            out.backward(bp.shard(x.dout, mesh, layout=where))
        return session.gather()

    records = bp.run_threads(4, work)[0]
    count, kv_heads, d, _ = case.sizes
    plan = bp.plan(seq_len=case.length, ranks=4, heads=count, kv_heads=kv_heads, head_dim=d, batch=case.batch,
                   itemsize=4, mask="full", strategy=case.make_strategy(), layout=where)  # fmt: skip
    costs = plan_cost(plan, HardwareSpec(1.0, 1.0)).per_rank
    for one in records:
        messages, collectives, compute = (one.tables[kind] for kind in ("message", "collective", "compute"))
        for backward, name in enumerate(("forward", "backward")):
            m, c, k = (table.select(table["backward"] == backward) for table in (messages, collectives, compute))
            resharded, sent = c["bytes"][c["agreement"] == 0].sum(), m["bytes"][m["sends"] == 1].sum()
            assert resharded + sent == costs[name][one.rank].sent
            assert sent > 0
            assert resharded > 0
            assert k["flops"].sum() == costs[name][one.rank].flops
            assert len(k) == 2
        assert set(messages["peer"]) == {(one.rank + 2) % 4}
        assert {int(q) for q in compute["q_owner"]} == {one.rank}
        assert {int(k) for k in compute["k_owner"]} == {one.rank, (one.rank + 2) % 4}


def test_late_rank_is_sought_in_own_node():
    """Ranks 1 and 3 are late, 3 the later; the other rank of each node waits for them."""
    case = Nodes(ranks=4, ranks_per_node=2, mask="full", layout="contiguous")
    x = make_inputs(case)

    def work(mesh):
        transport, exchange = mesh.transport("cpu"), mesh.transport("cpu").exchange

        def held(sends, receives, label, *, exclusive=False):
            time.sleep(0.3 * mesh.rank if mesh.rank % 2 and label == "to heads" else 0.0)
            return exchange(sends, receives, label, exclusive=exclusive)

        transport.exchange = held
        with profile(mesh=mesh) as session:
            q, k, v = (bp.shard(t, mesh, layout="contiguous") for t in (x.q, x.k, x.v))
            call = {"mask": "full", "mesh": mesh, "layout": "contiguous", "seq_len": case.length}
            bp.attention(q, k, v, strategy=case.make_strategy(), **call)
        return session.gather()

    records = bp.run_threads(4, work)[0]
    segments = {one.rank: [] for one in records}
    add_collectives(segments, records)
    waited = {rank: {s.late for s in own if s.end - s.start > 200_000_000} for rank, own in segments.items()}
    assert waited == {0: {1}, 1: set(), 2: {3}, 3: set()}


def test_usp_peak_memory_falls_with_ranks():
    """The node's rows of some heads are as large as the own rows of all heads."""
    peaks = {ranks: max(m.peak for m in measured(ranks, "usp")) for ranks in (1, 4, 8)}
    assert peaks[1] < 1.1 * RESULT_BYTES
    assert peaks[4] < 1.35 * RESULT_BYTES
    assert peaks[8] < 0.75 * peaks[4]
    assert max(m.largest for m in measured(8, "usp")) < KV_BYTES / 2
