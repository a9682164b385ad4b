"""Check the form of the steps of a rank, on which the executor relies.

`schedule.make_steps` gives all steps this form, except for one rule that only a route can follow: all blocks of one
launch are posted at one step. A subclass of `PassPlan` may return any steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from burst_portable.planning.plans import PassPlan
from burst_portable.planning.routes import Move, Side
from burst_portable.planning.schedule import Compute, Step, in_order


def wrong_steps(pass_plan: PassPlan, rank: int) -> Iterator[str]:
    """Yield the errors in the form of the steps of one rank in a pass."""
    before: int | None = None
    remote: set[int] = set()  # owners of the remote blocks that the rank has
    sides: dict[int, Side] = {}  # by owner: the side of its block, which later results are for
    posted: Counter[Move] = Counter()
    for step in pass_plan.steps_of(rank):
        if before is not None and step.index <= before:
            yield f"rank {rank} runs step {step.index} after step {before}"
        before = step.index
        for place in _PLACES:
            moves: tuple[Move, ...] = getattr(step, place.name)
            for move in moves:
                if wrong := _wrong_move(pass_plan, rank, step.index, place, move):
                    yield f"rank {rank} {place.verb} {move.label} at step {step.index}, but {wrong}: {move}"
            if moves != in_order(moves):
                yield (
                    f"rank {rank} {place.verb} {', '.join(m.label for m in moves)} at step {step.index} in another "
                    "order than `schedule.make_steps`, so two ranks may exchange messages"
                )
        posted.update((*step.receives, *step.result_receives))
        posted.subtract((*step.arrivals, *step.result_arrivals))
        if again := sorted(remote.intersection(m.owner for m in step.arrivals)):
            yield f"rank {rank} receives the blocks of {again} at step {step.index}, and has them already"
        remote.update(m.owner for m in step.arrivals)
        sides.update((m.owner, m.side) for m in step.arrivals)
        for move in step.result_sends:
            if move.side != sides.get(move.owner, move.side):
                yield f"rank {rank} sends {move.label} at step {step.index}, but has a block of the other side: {move}"
        if step.compute is not None:
            yield from _wrong_launch(pass_plan, rank, step, step.compute)
        if missing := sorted((Counter(step.released) - Counter(remote)).elements()):
            yield f"rank {rank} releases the blocks of {missing} at step {step.index} without having them"
        remote -= set(step.released)
    for move, count in posted.items():
        if count > 0:
            yield f"rank {rank} posts a receive of {move.label} without waiting for it: {move}"
        if count < 0:
            yield f"rank {rank} waits for {move.label} more often than it posts its receive: {move}"


def wrong_score_rows(pass_plan: PassPlan, rank: int) -> Iterator[str]:
    """Yield the launches after which rows of scores miss a part of a block: see `Plan.score_rows`."""
    written: set[tuple[int, int]] = set()
    for step in pass_plan.steps_of(rank):
        if step.compute is None:
            continue
        if len(step.compute.pairs) > 1 or written.intersection(step.compute.pairs):
            yield (
                f"rank {rank} computes {step.compute.label} at step {step.index}, but rows of scores need one launch "
                "per block, see `score_rows`"
            )
        written.update(step.compute.pairs)


class _Place(NamedTuple):
    """A field of `Step` with moves."""

    name: str
    verb: str
    rank: str  # the field of its moves that is the rank of the step
    step: str  # the field of its moves that is the index of the step
    is_result: bool


_PLACES = (
    _Place("arrivals", "waits for", "target", "wait_step", False),
    _Place("sends", "sends", "source", "post_step", False),
    _Place("receives", "receives", "target", "post_step", False),
    _Place("result_arrivals", "waits for", "target", "wait_step", True),
    _Place("result_sends", "sends", "source", "post_step", True),
    _Place("result_receives", "receives", "target", "post_step", True),
)


def _wrong_move(pass_plan: PassPlan, rank: int, index: int, place: _Place, move: Move) -> str:
    """Return why a move may not be in this field of the step with this index; "" if it may."""
    if getattr(move, place.rank) != rank or move.source == move.target:
        return f"its {place.rank} is another rank" if move.source != move.target else "its source is its target"
    if getattr(move, place.step) != index:
        return f"its {place.step} is another one"
    if move.is_result != place.is_result:
        return "blocks and results are in separate fields of a step"
    if move.side not in pass_plan.sides:
        return f"no blocks of the side {move.side!r} are sent in this pass"
    if move.is_gradient and pass_plan.name == "forward":
        return "a forward pass has no gradients"
    if move.is_partial and (pass_plan.name == "backward" or move.side != "q"):
        return "only queries in a forward pass have partial results"
    return ""


def _wrong_launch(pass_plan: PassPlan, rank: int, step: Step, compute: Compute) -> Iterator[str]:
    """Yield the errors in the blocks of a launch: those that arrive for its step, in order, then the local block."""
    computes = f"rank {rank} computes {compute.label} at step {step.index}"
    if len({move.side for move in step.arrivals}) > 1:
        yield f"{computes}, for which blocks of both sides arrive"
        return
    side = step.side or pass_plan.side
    sent, local = (compute.k_owners, compute.q_owners) if side == "kv" else (compute.q_owners, compute.k_owners)
    arrived = tuple(move.owner for move in step.arrivals)
    if local != (rank,) or sent not in {arrived or (rank,), (*arrived, rank)}:
        yield (
            f"{computes}, but a launch takes the local block of one side, and of the other side the blocks that arrive "
            f"for its step, here of {list(arrived)}, and then the local block"
        )
    if len(posts := {move.post_step: move for move in step.arrivals}) > 1:
        first, second, *_ = posts.values()
        yield (
            f"{computes}, but {first.label} is posted at step {first.post_step} and {second.label} at step "
            f"{second.post_step}; `block_source` must return the same step for all blocks of one `step`"
        )
