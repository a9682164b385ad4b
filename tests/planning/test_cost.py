"""Compare predicted bytes, FLOPs and times with hand-computed values: link curves, rates per pass, overlap, memory."""

from __future__ import annotations

import dataclasses
from dataclasses import replace

import pytest

import burst_portable as bp
from burst_portable.mask import Mask, Region
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.cost import plan_cost, rank_cost
from burst_portable.planning.hardware import HardwareSpec
from burst_portable.planning.memory_traffic import STRIDED_BATCHES
from burst_portable.planning.work import pass_flops
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.registry import make_strategy
from tests.support.plans import make_plan, plan

MIB = 1 << 20


def test_transfer_reads_bandwidth_by_message_size():
    hardware = HardwareSpec(
        1.0,
        1.0,
        message_latency=1e-6,
        p2p_bandwidth=((MIB, 100.0), (4 * MIB, 200.0)),
        peer_copy_bandwidth=((MIB, 400.0),),
    )
    assert hardware.transfer(MIB) == pytest.approx(MIB / 100e9)
    assert hardware.transfer(2 * MIB) == pytest.approx(2 * MIB / 150e9)  # halfway by logarithm
    assert hardware.transfer(64 * MIB) == pytest.approx(64 * MIB / 200e9)
    assert hardware.transfer(4 * MIB, messages=4) == pytest.approx(4 * MIB / 100e9)
    assert hardware.transfer(MIB, direct=True) == pytest.approx(MIB / 400e9)
    assert hardware.transfer(1) == 1e-6
    # the same as without measured concurrent transfers
    assert hardware.transfer(4 * MIB, at_once=True) == hardware.transfer(4 * MIB)
    many = replace(hardware, all_to_all_bandwidth=((MIB, 300.0),))
    assert many.transfer(4 * MIB, at_once=True) == pytest.approx(4 * MIB / 300e9)
    assert (many.receives_at_once(direct=False), many.receives_at_once(direct=True)) == (True, False)


def test_transfer_between_nodes_uses_inter_node_bandwidth():
    hardware = HardwareSpec(1.0, 100.0, message_latency=0.0, ranks_per_node=4, inter_node_bandwidth=10.0)
    assert [hardware.is_inter_node(3, other) for other in (0, 2, 4, 7)] == [False, False, True, True]
    assert hardware.transfer(MIB, is_inter_node=True) == pytest.approx(MIB / 10e9)
    # A rank of Ulysses sends four of seven parts to the other node, and three within its own node.
    made = bp.plan(seq_len=64, ranks=8, heads=8, kv_heads=8, head_dim=64, strategy="ulysses")
    forward = rank_cost(made, "forward", 0, hardware)
    assert forward.link_seconds == pytest.approx(forward.sent * 4 / 7 / 10e9)
    # With two ranks per node, rank 0 of the ring receives all of its data over the network. Rank 1 would receive half
    # of it.
    ring = bp.plan(
        seq_len=64, ranks=4, heads=8, kv_heads=8, head_dim=64, mask="full", layout="contiguous", strategy="ring"
    )
    two = replace(hardware, ranks_per_node=2)
    first, second = (rank_cost(ring, "forward", rank, two) for rank in (0, 1))
    assert first.link_seconds == pytest.approx(first.received / 10e9)
    assert second.link_seconds == pytest.approx(second.received / 100e9)


def test_double_ring_overlaps_inter_node_transfers():
    """32 ranks in nodes of 8: a single ring crosses nodes in each step, at one rank per node."""
    hardware = HardwareSpec(600.0, 300.0, ranks_per_node=8)
    usual = {"ranks": 32, "seq_len": 131072}
    seconds = {
        name: plan_cost(plan(make_strategy(name, **options), **usual), hardware).seconds
        for name, options in (
            ("ring", {}),
            ("burst", {}),
            ("double_ring", {"ranks_per_node": 8, "backward_circulates": "kv"}),
        )
    }
    assert seconds["double_ring"] < 0.8 * seconds["ring"] < seconds["burst"]
    reason = plan(AutoStrategy(ranks_per_node=8, hardware=replace(hardware, ranks_per_node=0)), **usual).reason
    assert reason.startswith(
        "chose double_ring(ranks_per_node=8, backward_circulates=kv) by predicted time, "
        "assumed 50 GB/s between nodes of 8"
    )


def test_forward_and_backward_have_separate_rates():
    hardware = HardwareSpec(100.0, 1.0, launch_latency=1.0, backward_tflops=50.0, backward_launch_latency=2.0)
    assert hardware.compute(1e14, "forward") == pytest.approx(2.0)
    assert hardware.compute(1e14, "backward") == pytest.approx(4.0)
    assert HardwareSpec(100.0, 1.0, launch_latency=1.0).compute(1e14, "backward") == pytest.approx(2.0)
    assert hardware.compute(1e14, "backward", 2) == pytest.approx(6.0)
    assert hardware.compute(1e14, "forward", 2) == pytest.approx(3.0)


def test_multi_launch_efficiency_slows_backward_of_ring():
    """Two ranks of 32 rows, full mask: a ring has two launches, Ulysses one."""
    usual = {"seq_len": 64, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "layout": "contiguous"}
    near = HardwareSpec(1e-6, 1e9, 0.0, 0.0)
    for strategy, share in (("ring", 0.5), ("ulysses", 1.0)):
        made = plan(make_strategy(strategy), ranks=2, **usual)
        for pass_name in ("forward", "backward"):
            before = rank_cost(made, pass_name, 0, near)
            turns = rank_cost(made, pass_name, 0, replace(near, multi_launch_efficiency=0.5))
            kept = share if pass_name == "backward" else 1.0
            assert turns.compute_seconds == pytest.approx(before.compute_seconds / kept)
            assert turns.seconds == pytest.approx(before.seconds / kept)


@pytest.mark.parametrize(("rows", "ranks", "share"), [(64, 2, 1.0), (33, 2, 1.0), (32, 2, 0.5), (0, 2, 0.5)])
def test_long_kv_efficiency_slows_forward_only(rows, ranks, share):
    """A block of a ring has 32 keys, the one of Ulysses all 64."""
    usual = {"seq_len": 64, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "layout": "contiguous"}
    for strategy, kept in (("ring", share), ("ulysses", 0.5)):
        made, near = plan(make_strategy(strategy), ranks=ranks, **usual), HardwareSpec(1e-6, 1e9, 0.0, 0.0)
        long = replace(near, long_kv_efficiency=(rows, 0.5))
        forward, backward = (
            rank_cost(made, name, 0, near).compute_seconds / rank_cost(made, name, 0, long).compute_seconds
            for name in ("forward", "backward")
        )
        assert (forward, backward) == (pytest.approx(kept), 1.0)


def test_comm_slowdown_delays_kernels():
    """Two ranks, full mask: a step computes for one second, and its message takes three."""
    made = bp.plan(seq_len=64, ranks=2, heads=8, head_dim=64, mask="full", layout="contiguous", strategy="ring")
    flops = 4 * 32 * 32 * 8 * 64
    size = rank_cost(made, "forward", 0, HardwareSpec(1, 1)).received
    hardware = HardwareSpec(flops / 1e12, size / 3e9, 0.0, 0.0)
    # at half speed, the computation ends before the message arrives
    for share, seconds in ((0.0, 4.0), (0.5, 4.0), (1.0, 5.0)):
        found = rank_cost(made, "forward", 0, replace(hardware, comm_slowdown=(share, 0.0)))
        assert found.seconds == pytest.approx(seconds, rel=1e-6)
        assert found.compute_seconds == pytest.approx(2.0)
    short = replace(
        hardware, intra_node_bandwidth=2 * size / 1e9, comm_slowdown=(0.5, 0.0)
    )  # a message of half a second delays it by half of that
    assert rank_cost(made, "forward", 0, short).seconds == pytest.approx(2.25)
    fetched = bp.plan(seq_len=64, ranks=2, heads=8, head_dim=64, mask="full", layout="contiguous",
                      strategy=make_strategy("ring", transfer="direct"))  # fmt: skip
    free = replace(short, peer_copy_bandwidth=((1, short.intra_node_bandwidth),))
    assert rank_cost(fetched, "forward", 0, free).seconds == pytest.approx(2.0)
    # Forwarded blocks are not direct, and without a direct transport of the backend none is.
    assert rank_cost(made, "forward", 0, free).seconds == pytest.approx(2.25)
    assert rank_cost(fetched, "forward", 0, short).seconds == pytest.approx(2.25)
    # Two blocks take one second each. The second one slows two steps of half a second as long as they run.
    three = bp.plan(seq_len=96, ranks=3, heads=8, head_dim=64, mask="full", layout="contiguous",
                    strategy=make_strategy("ring", transfer="direct", prefetch_steps=2))  # fmt: skip
    both = replace(hardware, tflops=2 * hardware.tflops, intra_node_bandwidth=size / 1e9, comm_slowdown=(0.5, 0.0))
    assert rank_cost(three, "forward", 0, both).seconds == pytest.approx(2.5)


def test_all_to_all_bandwidth_applies_to_several_messages():
    """Four ranks, full mask, no compute time: three blocks in sequence or at once."""
    usual = {"seq_len": 64, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "layout": "contiguous"}
    made = plan(make_strategy("ring", transfer="direct", prefetch_steps=3, blocks_per_launch=3), ranks=4, **usual)
    size = rank_cost(made, "forward", 0, HardwareSpec(1, 1)).received
    one = HardwareSpec(1e9, 1.0, 0.0, 0.0, p2p_bandwidth=((1, size / 3e9),))
    assert rank_cost(made, "forward", 0, one).seconds == pytest.approx(3.0, rel=1e-3)
    many = replace(one, all_to_all_bandwidth=((size // 3, size / 9e9), (size * 2 // 3, size / 6e9), (size, size / 2e9)))
    assert rank_cost(made, "forward", 0, many).seconds == pytest.approx(2.0, rel=1e-3)
    for ranks, seconds in (
        (2, 1.0),
        (3, 4.0),
    ):  # one message has full bandwidth; two concurrent ones are slow here
        few = plan(make_strategy("ring", transfer="direct", prefetch_steps=2, blocks_per_launch=2), ranks=ranks,
                   **usual | {"seq_len": 16 * ranks})  # fmt: skip
        assert rank_cost(few, "forward", 0, many).seconds == pytest.approx(seconds, rel=1e-3)
    crossing = replace(many, ranks_per_node=1, message_latency=1.0)  # in sequence, one second each
    assert rank_cost(made, "forward", 0, crossing).seconds == pytest.approx(3.0, rel=1e-3)


PIECES = KernelTraits(splits_tiles=True)
ONE_PASS = KernelTraits(splits_tiles=True, single_pass_merge=True)


def test_memory_bandwidth_counts_packing_merging_and_adding():
    """Two ranks with 16 rows each of 8 heads of 64, full mask."""
    usual = {"seq_len": 32, "heads": 8, "kv_heads": 8, "head_dim": 64, "mask": "full", "layout": "contiguous"}
    kv, row = 16 * 8 * 128 * 2, 16 * 8 * 64
    # one byte per second, and everything else takes no time
    hardware = HardwareSpec(1e9, 1e9, 0.0, 0.0, memory_bandwidth=1e-9)

    def seconds(strategy, pass_name, layout="contiguous", **changes):
        made = plan(make_strategy(strategy), ranks=2, **{**usual, "layout": layout})
        return pytest.approx(rank_cost(made, pass_name, 0, replace(hardware, **changes)).seconds, rel=1e-6)

    assert seconds("ring", "forward") == 2 * kv + 8 * row
    assert seconds("ring", "forward", kernel=PIECES) == 2 * kv + 26 * row
    assert seconds("ring", "forward", kernel=ONE_PASS) == 2 * kv + 10 * row
    # Gradients dK and dV of the remote block, and those of the local block that return. All three local gradients are
    # summed in float32, so they are zeroed and rounded.
    summed = (4 + 4 + 2) * 3 * row
    assert seconds("ring", "backward") == 2 * kv + 3 * 2 * kv + 3 * 2 * kv + summed
    assert seconds("ring", "backward", kernel=KernelTraits(writes_gradients=True)) == seconds("ring", "backward")
    assert seconds("ring", "backward", kernel=PIECES) == 14 * kv + 2 * 10 * row + 2 * 10 * 2 * row + summed
    # Gradients in the input dtype have half the bytes. They are summed in float32 and rounded before they are sent.
    narrow = make_strategy("ring", gradient_comm_dtype="input")
    made = plan(narrow, ranks=2, **usual)
    assert rank_cost(made, "backward", 0, hardware).seconds == pytest.approx(
        2 * kv + (6 + 3) * kv + 5 * kv + summed, rel=1e-6
    )
    # Circulating queries arrive without out, so operator kernels need a surrogate.
    sums, numbers = 2 * row, 2 * 16 * 8
    assert seconds("burst", "backward") == 2 * (2 * 2 * row + 4 * numbers) + 2 * 3 * 2 * sums + summed
    assert seconds("burst", "backward", kernel=PIECES) == (
        2 * (2 * 2 * row + 4 * numbers) + 2 * 3 * 2 * sums + 2 * (52 + 10 + 20) * row + summed
    )
    assert seconds("ring", "backward", memory_bandwidth=0.0) == pytest.approx(0.0, abs=1e-3)
    # Forward sends Q, K and V and returns out. Backward sends dO and returns three gradients.
    # Before, all gradients were float32, or only dQ was.
    assert seconds("ulysses", "forward") == 2 * row * (2 * 3 + 2)
    # Peer copies read the tensors in place. Received data does not stay in the inbox, so it is copied.
    assert seconds("ulysses", "forward", peer_copy_bandwidth=((1, 1e9),)) == 2 * row * (2 * 3 + 2)
    assert seconds("ulysses", "backward") == 2 * row * (2 + (5 + 2) * 3)
    assert seconds("ulysses", "backward", kernel=KernelTraits(writes_gradients=True)) == 2 * row * (2 + 5 + 2 * 3)
    # Operator kernels need natural order, and their gradients are returned without a copy.
    assert seconds("ulysses", "forward", kernel=PIECES) == 2 * row * (2 * 3 + 2)
    assert seconds("ulysses", "backward", kernel=PIECES) == 2 * row * (2 + 2 * 3)
    assert seconds("ulysses", "forward", "zigzag", kernel=PIECES) == 2 * row * (4 * 3 + 4)
    assert seconds("ulysses", "forward", "zigzag", kernel=PIECES, peer_copy_bandwidth=((1, 1e9),)) == 2 * row * (
        2 * 3 + 4
    )
    assert seconds("ulysses", "backward", "zigzag", kernel=PIECES) == 2 * row * (4 + 4 * 3)
    assert seconds("ulysses", "forward", "zigzag") == 2 * row * (2 * 3 + 2)
    # A kernel that prefers squares also needs natural order, in which this call is a square.
    assert seconds("ulysses", "forward", "zigzag", kernel=KernelTraits(prefers_square=True)) == 2 * row * (4 * 3 + 4)
    # Many batch rows are packed in any case.
    for batch, packed in ((STRIDED_BATCHES, 0), (STRIDED_BATCHES + 1, 2)):
        made, direct = (
            plan(make_strategy("ulysses"), ranks=2, batch=batch, **usual),
            replace(hardware, peer_copy_bandwidth=((1, 1e9),)),
        )
        expected = batch * 2 * row * (packed + (5 + 2) * 3)
        assert rank_cost(made, "backward", 0, direct).seconds == pytest.approx(expected, rel=1e-6)


# ----------------------------------------------------------------------------------------------------- costs


def test_rank_cost_counts_bytes():
    """8 heads of 64, 16 bits, 16 rows per rank: K and V 32 KiB, float32 dK and dV twice that."""
    plan = make_plan(Mask.full(), strategy="burst")
    kv = 16 * 8 * (64 + 64) * 2
    forward = rank_cost(plan, "forward", 1, HardwareSpec(1, 1))
    assert (forward.sent, forward.received, forward.messages) == (3 * kv, 3 * kv, 3)
    q = 16 * 8 * (64 + 64) * 2 + 2 * 16 * 8 * 4
    dq = 16 * 8 * 64 * 4
    backward = rank_cost(plan, "backward", 1, HardwareSpec(1, 1))
    assert (backward.sent, backward.messages) == (3 * (q + dq), 6)
    ring = rank_cost(make_plan(Mask.full(), strategy="ring"), "backward", 1, HardwareSpec(1, 1))
    assert ring.sent == 3 * (kv + 2 * kv)
    narrow = [make_plan(Mask.full(), strategy=name, gradient_comm_dtype="input") for name in ("ring", "burst")]
    sent = [rank_cost(made, "backward", 1, HardwareSpec(1, 1)).sent for made in narrow]
    assert sent == [3 * (kv + kv), 3 * (q + dq // 2)]


def test_rank_cost_counts_bytes_of_uneven_ulysses():
    """Rows 18, 18 and 17; two of six heads of 64 per rank; Q, K and V leave and out returns."""
    costs = [
        rank_cost(make_plan(None, "contiguous", "ulysses", 3, 53, 6, 6), "forward", r, HardwareSpec(1, 1))
        for r in range(3)
    ]
    row = 2 * 64 * 2  # bytes of one tensor
    assert [cost.sent for cost in costs] == [row * (3 * 2 * rows + 53 - rows) for rows in (18, 18, 17)]
    assert [cost.received for cost in costs] == [row * (3 * (53 - rows) + 2 * rows) for rows in (18, 18, 17)]
    assert sum(cost.sent for cost in costs) == sum(cost.received for cost in costs)
    both = plan_cost(make_plan(None, "contiguous", "ulysses", 3, 53, 6, 6), HardwareSpec(1, 1), [0, 2])
    assert (both.ranks, len(both.per_rank["forward"])) == ((0, 2), 2)
    assert both.sent == row * (3 * 2 * 18 + 53 - 18) + row * (2 * 18 + 3 * (53 - 18))  # rank 0 sends most


# gradients of a shared head are summed on its owner rank
@pytest.mark.parametrize(("kv_heads", "itemsize"), [(3, 2), (1, 4)])
def test_rank_cost_counts_gradient_bytes_of_few_kv_heads(kv_heads, itemsize):
    """Two of six query heads of dO leave; dQ, dK and dV of one K/V head return."""
    plan = make_plan(None, "contiguous", "ulysses", 3, 53, 6, kv_heads)
    for rank, rows in enumerate((18, 18, 17)):
        there, back = 2 * rows * 2 * 64 * 2, (53 - rows) * 64 * (2 * 2 + 2 * itemsize)
        assert rank_cost(plan, "backward", rank, HardwareSpec(1, 1)).sent == there + back


def test_pass_flops_use_standard_formula():
    """Forward 4 * pairs * H * D, backward 2.5 times as many."""
    problem = make_plan().call
    num_pairs = 64 * 65 // 2
    assert problem.num_pairs == num_pairs
    assert pass_flops(problem, "forward", num_pairs) == 4 * num_pairs * 8 * 64
    assert pass_flops(problem, "backward", num_pairs) == 10 * num_pairs * 8 * 64
    assert pass_flops(dataclasses.replace(problem, batch=3), "forward", num_pairs) == 3 * 4 * num_pairs * 8 * 64
    cost = plan_cost(make_plan(), HardwareSpec(1, 1))
    assert sum(c.flops for c in cost.per_rank["forward"]) == 4 * num_pairs * 8 * 64


def test_imbalance_compares_pairs_of_ranks():
    """Causal on two ranks: 32 * 33 / 2 pairs against 32 * 32 more; 1 if no rank computes."""
    cost = plan_cost(make_plan(layout="contiguous", ranks=2), HardwareSpec(1, 1))
    assert cost.imbalance() == cost.imbalance("backward") == pytest.approx((528 + 1024) * 2 / (2 * 528 + 1024))
    early = Mask((Region(0, 8, 0, 8),), "early")
    assert plan_cost(make_plan(early, "contiguous", ranks=2), HardwareSpec(1, 1), [1]).imbalance() == 1.0


def test_predicted_time_includes_exposed_transfer():
    """Full mask on 2 ranks: the transfer is hidden or exposed."""
    plan = make_plan(Mask.full(), "contiguous", ranks=2)
    flops, size = 4 * 32 * 32 * 8 * 64, 32 * 8 * 128 * 2
    fast = rank_cost(plan, "forward", 0, HardwareSpec(flops / 1e12, 1e9, 0.0, 0.0))  # a step takes one second
    assert fast.seconds == pytest.approx(2.0, rel=1e-6)
    # a message takes five seconds
    slow = rank_cost(plan, "forward", 0, HardwareSpec(flops / 1e12, size / 5e9, 0.0, 0.0))
    assert slow.seconds == pytest.approx(6.0, rel=1e-6)


def test_rank_cost_blocks_held_are_those_in_flight():
    for ranks in (1, 2, 4, 8):
        cost = rank_cost(make_plan(Mask.full(), ranks=ranks), "forward", 0, HardwareSpec(1, 1))
        block = 64 // ranks * 8 * 128 * 2
        assert cost.blocks_held == min(2, ranks - 1) * block
