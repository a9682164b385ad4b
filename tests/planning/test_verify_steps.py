"""Test that `verify` rejects steps that the executor cannot run, or that would give wrong numbers."""

from __future__ import annotations

import dataclasses

import pytest

from burst_portable.mask import Mask
from burst_portable.planning.plans import make_pass_plan
from burst_portable.planning.routes import DirectRoute, Move, RingRoute
from burst_portable.planning.verify import verify
from tests.support.changed_plans import AllSteps, change_step, errors_after
from tests.support.plans import make_plan


@dataclasses.dataclass(frozen=True)
class TwoPosts(DirectRoute):
    """Sends one of the two blocks of a launch two steps before it, and the other one step before it."""

    def block_source(self, dependencies, owner, rank):
        found = super().block_source(dependencies, owner, rank)
        return found and (owner, max(0, found[1] - owner % 2))


def test_verify_names_blocks_of_one_launch_posted_at_two_steps():
    """They arrive in two buffers, of which the launch would read one."""
    plan = make_plan(Mask.full(), ranks=5)
    changed = make_pass_plan(plan.call, "kv", TwoPosts(5, 1, 2, 1.0))
    (first, *_) = verify(dataclasses.replace(plan, forward=changed))
    assert first == (
        "forward: rank 0 computes q0 x kv1+2 at step 2, but kv1 is posted at step 0 and kv2 at step 1; "
        "`block_source` must return the same step for all blocks of one `step`"
    )


def test_verify_names_step_with_index_of_another():
    """The executor finds the buffer of a launch by the index of its step."""
    errors = errors_after(make_plan(Mask.full()), lambda steps: change_step(steps, 1, 2, index=7))
    assert any("rank 1 waits for kv3 at step 7, but its wait_step is another one" in error for error in errors)
    assert any("rank 1 runs step 3 after step 7" in error for error in errors)


def test_verify_names_message_sent_twice():
    def twice(steps: AllSteps) -> None:
        for rank, field in ((0, "sends"), (1, "receives")):
            moves = getattr(steps[rank][0], field)
            change_step(steps, rank, 0, **{field: moves * 2})

    errors = errors_after(make_plan(Mask.full()), twice)
    assert any("rank 1 posts a receive of kv0 without waiting for it" in error for error in errors)


def test_verify_names_messages_in_another_order():
    """Messages between two ranks match by their order."""
    plan = make_plan(Mask.full(), ranks=5, transfer="direct", blocks_per_launch=2)
    errors = errors_after(plan, lambda steps: change_step(steps, 0, 0, receives=steps[0][0].receives[::-1]))
    assert any(
        "rank 0 receives kv4, kv3 at step 0 in another order than `schedule.make_steps`" in error for error in errors
    )


def test_verify_names_arrival_that_is_missing():
    plan = make_plan(Mask.window(20), "contiguous", "double_ring", ranks=8, length=64, ranks_per_node=4)
    place = next(
        (rank, index)
        for rank in range(8)
        for index, step in enumerate(plan.forward.steps_of(rank))
        if step.arrivals and step.compute is None and not step.sends
    )
    errors = errors_after(plan, lambda steps: change_step(steps, *place, arrivals=(), released=()))
    assert any("without waiting for it" in error for error in errors), errors


def test_verify_names_second_arrival():
    plan = make_plan(Mask.full())

    def again(steps: AllSteps) -> None:
        for rank, field in ((0, "sends"), (2, "receives")):
            old = steps[rank][0 if field == "sends" else 1]
            move = Move("kv", 0, 0, 2, old.index, 2, ((0, 16),))
            change_step(steps, rank, old.index, **{field: (*getattr(old, field), move)})

    assert any("rank 2 posts a receive of kv0 without waiting" in error for error in errors_after(plan, again))


@pytest.mark.parametrize(
    ("released", "says"),
    [
        ((0, 0), "rank 1 releases the blocks of [0] at step 1 without having them"),
        ((0, 2), "rank 1 releases the blocks of [2] at step 1 without having them"),
    ],
)
def test_verify_names_wrong_release(released, says):
    errors = errors_after(make_plan(Mask.full()), lambda steps: change_step(steps, 1, 1, released=released))
    assert any(says in error for error in errors)


def test_verify_names_results_of_the_other_side():
    """The owner would add gradients of K and V to those of its queries."""
    plan = make_plan(Mask.causal(), "contiguous", "distflash", ranks=7, length=49)

    def turned(steps: AllSteps) -> None:
        moves = [m for of_rank in steps.values() for step in of_rank for m in step.result_sends if m.side == "kv"]
        for of_rank in steps.values():
            for index, step in enumerate(of_rank):
                fields = ("result_sends", "result_receives", "result_arrivals")
                turn = {
                    f: tuple(m._replace(side="q") if m == moves[0] else m for m in getattr(step, f)) for f in fields
                }
                of_rank[index] = dataclasses.replace(step, **turn)

    errors = errors_after(plan, turned, "backward")
    assert any("but has a block of the other side" in error for error in errors)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("side", "q", "no blocks of the side 'q' are sent in this pass"),
        ("source", 1, "its source is its target"),
    ],
)
def test_verify_names_moves_that_a_pass_cannot_have(field, value, says):
    def changed(steps: AllSteps) -> None:
        (move,) = steps[1][1].arrivals
        for of_rank in steps.values():
            for index, step in enumerate(of_rank):
                fields = ("sends", "receives", "arrivals")
                other = move._replace(**{field: value})
                new = {f: tuple(other if m == move else m for m in getattr(step, f)) for f in fields}
                of_rank[index] = dataclasses.replace(step, **new)

    errors = errors_after(make_plan(Mask.full(), ranks=3), changed)
    assert any(says in error for error in errors), errors


@pytest.mark.parametrize(("name", "says"), [
    ("forward", "a forward pass has no gradients"),
    ("backward", "only queries in a forward pass have partial results"),
])  # fmt: skip
def test_verify_names_results_of_the_other_pass(name, says):
    plan = make_plan(Mask.causal(), "contiguous", "distflash", ranks=5, length=40)

    def changed(steps: AllSteps) -> None:
        for of_rank in steps.values():
            for index, step in enumerate(of_rank):
                fields = ("result_sends", "result_receives", "result_arrivals")
                other = {"is_gradient": name == "forward", "is_partial": name == "backward"}
                new = {f: tuple(m._replace(**other) for m in getattr(step, f)) for f in fields}
                of_rank[index] = dataclasses.replace(step, **new)

    assert any(says in error for error in errors_after(plan, changed, name))


def test_verify_names_gradients_among_blocks():
    def changed(steps: AllSteps) -> None:
        change_step(steps, 1, 1, result_sends=(), sends=(*steps[1][1].sends, *steps[1][1].result_sends))

    errors = errors_after(make_plan(Mask.full(), ranks=3), changed, "backward")
    assert any("blocks and results are in separate fields of a step" in error for error in errors)


def test_verify_names_launch_with_a_block_of_another_step():
    """`Blocks.use` reads the blocks that arrive for the step of the launch."""

    def late(steps: AllSteps) -> None:
        compute = steps[1][1].compute
        change_step(steps, 1, 1, compute=None, released=())
        change_step(steps, 1, 2, compute=compute, released=(0, 3))

    errors = errors_after(make_plan(Mask.full()), late)
    assert any("rank 1 computes q1 x kv0 at step 2, but a launch takes" in error for error in errors)


@dataclasses.dataclass(frozen=True)
class Untrimmed(DirectRoute):
    """Sends complete blocks from their owners."""

    trims: bool = False


@pytest.mark.parametrize(("blocks", "share"), [(2, 1.0), (1, 0.5)])  # of one launch; of the local block
def test_verify_names_launches_that_rows_of_scores_exclude(blocks, share):
    plan = make_plan(Mask.full(), "contiguous", "ring_self_attention", ranks=3, length=3 * 512)
    assert verify(plan) == []
    changed = make_pass_plan(plan.call, "kv", Untrimmed(3, 1, blocks, share))
    errors = verify(dataclasses.replace(plan, forward=changed))
    assert any("rows of scores need one launch per block, see `score_rows`" in error for error in errors)
    assert verify(dataclasses.replace(plan, forward=changed, score_rows=False)) == []


def test_verify_accepts_ring_with_complete_blocks_of_scores():
    plan = make_plan(Mask.full(), "contiguous", "ring_self_attention", ranks=3, length=3 * 512)
    assert verify(dataclasses.replace(plan, forward=make_pass_plan(plan.call, "kv", RingRoute(3)))) == []
