"""Change correct plans at random: their steps, routes, helpers and fields.

Most changes make a plan wrong, some do not. `tests/planning/test_verify_mutations.py` runs those that `verify` accepts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from burst_portable.layout import Layout
from burst_portable.planning.call import AttentionCall
from burst_portable.planning.head_division import HeadSplit
from burst_portable.planning.plans import PASSES, PassPlan, Plan
from burst_portable.planning.routes import DirectRoute, Move, RingRoute, Route
from burst_portable.planning.schedule import Compute, Step, in_order
from burst_portable.planning.tiles import Tile, Tiles
from burst_portable.strategies.all_gather import GatherRoute
from burst_portable.strategies.base import Strategy
from tests.support.changed_plans import AllSteps, all_steps, change_step, with_steps

FIELDS = ("arrivals", "sends", "receives", "result_arrivals", "result_sends", "result_receives")
"""The fields of a step that hold moves."""


class NotPossible(Exception):
    """The plan has nothing that this kind of change could change."""


class Fixed(Strategy):
    """Return a plan that was made before. Plans of a strategy of this package run without verification."""

    name = "fixed"
    title = "a plan that was made before"

    def __init__(self, made: Plan) -> None:
        object.__setattr__(self, "made", made)
        object.__setattr__(self, "name", made.strategy)

    def plan(self, call: AttentionCall) -> Plan:
        return self.made

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


# --------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Place:
    """Where a move is: the rank, the position of its step, the field, and the position there."""

    rank: int
    at: int
    field: str
    item: int


class StepChanges:
    """Kinds of changes of the steps of all ranks in one pass: the methods without an underscore."""

    def __init__(self, steps: AllSteps, draw: random.Random) -> None:
        self._steps, self._draw = steps, draw

    def swap_steps(self) -> None:
        rank = self._pick(rank for rank, steps in self._steps.items() if len(steps) > 1)
        one, other = self._draw.sample(range(len(self._steps[rank])), 2)
        a, b = self._steps[rank][one], self._steps[rank][other]
        keeps_index = self._draw.random() < 0.5
        self._steps[rank][one] = replace(b, index=a.index) if keeps_index else b
        self._steps[rank][other] = replace(a, index=b.index) if keeps_index else a

    def drop_step(self) -> None:
        rank, at = self._pick(self._positions())
        del self._steps[rank][at]

    def repeat_step(self) -> None:
        rank, at = self._pick(self._positions())
        self._steps[rank].insert(self._draw.choice((at, len(self._steps[rank]))), self._steps[rank][at])

    def renumber_step(self) -> None:
        rank, at = self._pick(self._positions())
        change_step(self._steps, rank, at, index=self._steps[rank][at].index + self._draw.choice((-1, 1, 5)))

    def renumber_all(self) -> None:
        """Delay all steps of all ranks, which changes no result."""
        for steps in self._steps.values():
            for at, step in enumerate(steps):
                later = {f: tuple(_delayed(m, 2, 2) for m in getattr(step, f)) for f in FIELDS}
                steps[at] = replace(step, index=step.index + 2, **later)

    def drop_move(self) -> None:
        self._replace(self._pick(self._places()))

    def drop_move_of_both(self) -> None:
        self._replace_all(self._pick_move())

    def repeat_move(self) -> None:
        place = self._pick(self._places())
        self._replace(place, *[self._move(place)] * 2)

    def repeat_move_of_both(self) -> None:
        move = self._pick_move()
        self._replace_all(move, move, move)

    def change_move(self) -> None:
        place = self._pick(self._places())
        self._replace(place, self._changed(self._move(place)))

    def change_move_of_both(self) -> None:
        move = self._pick_move()
        self._replace_all(move, self._changed(move))

    def retime_move(self) -> None:
        """Send or use a message some steps earlier or later, on both ranks."""
        move, delay = self._pick_move(), self._draw.choice((-2, -1, 1, 2))
        is_post = self._draw.random() < 0.5
        self._move_to(move, _delayed(move, delay if is_post else 0, 0 if is_post else delay))

    def redirect_move(self) -> None:
        move, end = self._pick_move(), self._draw.choice(("source", "target"))
        self._move_to(move, move._replace(**{end: self._draw.randrange(len(self._steps))}))

    def resize_move(self) -> None:
        move = self._pick_move()
        self._replace_all(move, move._replace(rows=self._changed_rows(move)))

    def reorder_moves(self) -> None:
        crowded = [p for p in self._places() if len(getattr(self._steps[p.rank][p.at], p.field)) > 1]
        place = self._pick(crowded)
        moves = list(getattr(self._steps[place.rank][place.at], place.field))
        self._draw.shuffle(moves)
        change_step(self._steps, place.rank, place.at, **{place.field: tuple(moves)})

    def move_to_other_step(self) -> None:
        """Keep a move unchanged, and put it into another step of its rank."""
        place = self._pick(self._places())
        move = self._move(place)
        at = self._pick(at for at in range(len(self._steps[place.rank])) if at != place.at)
        self._replace(place)
        moves = (*getattr(self._steps[place.rank][at], place.field), move)
        change_step(self._steps, place.rank, at, **{place.field: moves})

    def drop_compute(self) -> None:
        rank, at, _ = self._pick_compute()
        change_step(self._steps, rank, at, compute=None)

    def delay_compute(self) -> None:
        rank, at, compute = self._pick_compute()
        change_step(self._steps, rank, at, compute=None)
        later = self._position(rank, self._steps[rank][at].index + self._draw.choice((-1, 1, 2)))
        change_step(self._steps, rank, later, compute=compute)

    def swap_computes(self) -> None:
        (rank, at, one), (other_rank, other_at, other) = self._pick_compute(), self._pick_compute()
        change_step(self._steps, rank, at, compute=other)
        change_step(self._steps, other_rank, other_at, compute=one)

    def repeat_compute(self) -> None:
        rank, _, compute = self._pick_compute()
        to = self._draw.choice((rank, *self._steps))
        change_step(self._steps, to, self._new_last(to), compute=compute)

    def split_local_compute(self) -> None:
        """Compute some rows of the local block in a separate launch."""
        rank, at, compute = self._pick_compute(lambda c: len(c.blocks) == 1 and c.q_owners == c.k_owners)
        (block,) = compute.blocks
        top, bottom, left, right = block.tiles.box
        row = self._draw.randint(top, bottom)
        for where, rows in ((at, (row, bottom)), (None, (top, row))):
            parts = Tiles(part for tile in block.tiles if (part := tile.clipped(*rows, left, right)))
            where = self._new_last(rank) if where is None else where
            part = replace(compute, blocks=(block._replace(tiles=parts),))
            change_step(self._steps, rank, where, compute=part if parts else None)

    def change_tiles(self) -> None:
        rank, at, compute = self._pick_compute()
        item = self._draw.randrange(len(compute.blocks))
        block = compute.blocks[item]
        self._set_block(rank, at, compute, item, block._replace(tiles=self._changed_tiles(block.tiles)))

    def change_local_tiles(self) -> None:
        rank, at, compute = self._pick_compute(lambda c: c.q_owners == c.k_owners)
        block = compute.blocks[0]
        self._set_block(rank, at, compute, 0, block._replace(tiles=self._changed_tiles(block.tiles)))

    def shift_block(self) -> None:
        rank, at, compute = self._pick_compute()
        item, axis = self._draw.randrange(len(compute.blocks)), self._draw.choice(("row", "column"))
        block = compute.blocks[item]
        shifted = block._replace(**{axis: getattr(block, axis) + self._draw.choice((-1, 1))})
        self._set_block(rank, at, compute, item, shifted)

    def reorder_blocks(self) -> None:
        rank, at, compute = self._pick_compute(lambda c: len(c.blocks) > 1)
        blocks = list(compute.blocks)
        self._draw.shuffle(blocks)
        change_step(self._steps, rank, at, compute=replace(compute, blocks=tuple(blocks)))

    def change_owners(self) -> None:
        rank, at, compute = self._pick_compute()
        side = self._draw.choice(("q_owners", "k_owners"))
        owners = list(getattr(compute, side))
        owners[self._draw.randrange(len(owners))] = self._draw.randrange(len(self._steps))
        change_step(self._steps, rank, at, compute=replace(compute, **{side: tuple(owners)}))

    def change_positions(self) -> None:
        rank, at, compute = self._pick_compute(lambda c: c.positions is not None)
        _, _, other = self._pick_compute()
        q, k = compute.positions or ((), ())
        other_q, other_k = other.positions or ((), ())
        positions = self._draw.choice((None, (k, q), (other_q, k), (q, other_k)))
        change_step(self._steps, rank, at, compute=replace(compute, positions=positions))

    def change_release(self) -> None:
        rank, at = self._pick(self._positions(lambda step: bool(step.released)))
        released = self._steps[rank][at].released
        changed = self._draw.choice(((), released * 2, (*released, self._draw.randrange(len(self._steps)))))
        change_step(self._steps, rank, at, released=changed)

    # The parts of these changes.

    def _pick(self, found: Any) -> Any:
        if not (listed := list(found)):
            raise NotPossible
        return self._draw.choice(listed)

    def _positions(self, test: Callable[[Step], bool] = lambda step: True) -> Iterator[tuple[int, int]]:
        return ((r, at) for r, steps in self._steps.items() for at, step in enumerate(steps) if test(step))

    def _places(self) -> Iterator[Place]:
        for rank, at in self._positions():
            for field in FIELDS:
                yield from (Place(rank, at, field, i) for i in range(len(getattr(self._steps[rank][at], field))))

    def _move(self, place: Place) -> Move:
        return getattr(self._steps[place.rank][place.at], place.field)[place.item]

    def _pick_move(self) -> Move:
        return self._move(self._pick(self._places()))

    def _pick_compute(self, test: Callable[[Compute], bool] = lambda compute: True) -> tuple[int, int, Compute]:
        rank, at = self._pick(self._positions(lambda step: step.compute is not None and test(step.compute)))
        return rank, at, self._steps[rank][at].compute

    def _replace(self, place: Place, *moves: Move) -> None:
        old = getattr(self._steps[place.rank][place.at], place.field)
        new = (*old[: place.item], *moves, *old[place.item + 1 :])
        change_step(self._steps, place.rank, place.at, **{place.field: new})

    def _replace_all(self, move: Move, *moves: Move) -> None:
        for place in reversed([place for place in self._places() if self._move(place) == move]):
            self._replace(place, *moves)

    def _move_to(self, old: Move, new: Move) -> None:
        """Replace a move by another one, which is put into the steps that it numbers."""
        self._replace_all(old)
        kind = "result_" if new.is_result else ""
        for rank, index, field in (
            (new.source, new.post_step, "sends"),
            (new.target, new.post_step, "receives"),
            (new.target, new.wait_step, "arrivals"),
        ):
            at = self._position(rank, index)
            moves = in_order((*getattr(self._steps[rank][at], kind + field), new))
            change_step(self._steps, rank, at, **{kind + field: moves})

    def _position(self, rank: int, index: int) -> int:
        """Return the position of the step with this index, which is made if there is none."""
        steps = self._steps[rank]
        if index not in [step.index for step in steps]:
            steps.append(Step(index))
            steps.sort(key=lambda step: step.index)
        return [step.index for step in steps].index(index)

    def _new_last(self, rank: int) -> int:
        """Return the position of a new step after all others."""
        return self._position(rank, max((step.index for step in self._steps[rank]), default=0) + 1)

    def _set_block(self, rank: int, at: int, compute: Compute, item: int, block: Any) -> None:
        blocks = (*compute.blocks[:item], block, *compute.blocks[item + 1 :])
        change_step(self._steps, rank, at, compute=replace(compute, blocks=blocks))

    def _changed(self, move: Move) -> Move:
        name = self._draw.choice(Move._fields)
        value = getattr(move, name)
        if name == "rows":
            return move._replace(rows=self._changed_rows(move))
        if name == "side":
            return move._replace(side="q" if value == "kv" else "kv")
        if isinstance(value, bool):
            return move._replace(**{name: not value})
        return move._replace(**{name: value + self._draw.choice((-1, 1))})

    def _changed_rows(self, move: Move) -> Any:
        ((start, stop), *rest), by = move.rows, self._draw.choice((-1, 1))
        first = ((start + by, stop + by), (start, stop + by), (start + by, stop), (start, (start + stop) // 2))
        return self._draw.choice(((self._draw.choice(first), *rest), (*move.rows, *move.rows), ()))

    def _changed_tiles(self, tiles: Tiles) -> Tiles:
        listed = list(tiles)
        item, by = self._draw.randrange(len(listed)), self._draw.choice((-1, 1))
        t, name = listed[item], self._draw.choice(("q_start", "q_stop", "k_start", "k_stop", "lo", "hi"))
        swapped = Tile(t.k_start, t.k_stop, t.q_start, t.q_stop, -t.hi, -t.lo)
        others = ([], [t, t], [t.shifted(by, 0)], [t.shifted(0, by)], [replace(t, **{name: getattr(t, name) + by})])
        listed[item : item + 1] = self._draw.choice((*others, [swapped]))
        return Tiles(listed, tiles.positions)


STEP_KINDS = tuple(name for name in vars(StepChanges) if not name.startswith("_"))


def _delayed(move: Move, post: int, wait: int) -> Move:
    return move._replace(post_step=move.post_step + post, wait_step=move.wait_step + wait)


def change_steps(plan: Plan, draw: random.Random, kind: str) -> Plan:
    """Return the plan with a change of the steps of one pass."""
    name = draw.choice(PASSES)
    steps = all_steps(plan, name)
    getattr(StepChanges(steps, draw), kind)()
    return with_steps(plan, name, {rank: tuple(changed) for rank, changed in steps.items()})


# -------------------------------------------------------------------------------------------------- routes and helpers


@dataclass(frozen=True)
class DrawnRoute:
    """A route that draws its answers. Most of them are correct."""

    ranks: int
    seed: int
    last: int  # the last step of remote blocks
    forwards: bool  # whether ranks forward blocks and results of others
    steady: bool  # whether all blocks of a step are sent at the same step
    trims: bool = False
    local_first_share: float = 1.0
    name: str = "drawn"
    description: str = "drawn at random"

    def step(self, owner: int, rank: int) -> int:
        if owner == rank:
            return 0 if self.local_first_share == 1 else self._draw("local", rank).randint(0, self.last + 1)
        return self._draw("step", owner, rank).randint(1, self.last)

    def block_source(self, dependencies, owner: int, rank: int):
        if not dependencies.needs(owner, rank):
            return None
        step = self.step(owner, rank)
        draw = self._draw("source", step, rank) if self.steady else self._draw("source", owner, rank)
        post = draw.randrange(step)
        others = [r for r in range(self.ranks) if r not in (owner, rank) and dependencies.needs(owner, r)]
        holders = [r for r in others if self.step(owner, r) <= post] if self.forwards else []
        return self._draw("holder", owner, rank).choice((owner, *holders)), post

    def targets(self, owner: int, rank: int):
        yield from (r for r in range(self.ranks) if r not in (owner, rank))

    def result_source(self, owner: int, rank: int):
        if not self.forwards or owner == rank:
            return None
        order = [r for r in range(self.ranks) if r != owner]
        self._draw("order", owner).shuffle(order)
        at = order.index(rank)
        return order[at - 1] if at else None

    def result_target(self, dependencies, owner: int, rank: int):
        for other in range(self.ranks):
            if other not in (owner, rank) and self.result_source(owner, other) == rank:
                arrives = self.step(owner, rank) + self.result_delay_steps(rank, other)
                if dependencies.needs(owner, other) and arrives <= self.step(owner, other):
                    return other
        return owner

    def result_delay_steps(self, source: int, target: int):
        return self._draw("delay", source, target).randint(1, 3)

    def _draw(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, *key)))


def _drawn_route(draw: random.Random, ranks: int) -> Route:
    direct = DirectRoute(ranks, draw.randint(0, 2), draw.randint(1, 3), draw.choice((0.0, 0.5, 1.0)))
    booleans = (draw.random() < 0.5 for _ in range(3))
    drawn = DrawnRoute(ranks, draw.randrange(1 << 20), draw.randint(1, ranks + 2), *booleans, draw.choice((0.0, 1.0)))
    return draw.choice((RingRoute(ranks), GatherRoute(ranks), direct, drawn, drawn, drawn))


@dataclass(frozen=True)
class WrongAnswer:
    """A route with another answer of one method, for some owners and ranks. `value`: what is added to numbers."""

    base: Any
    method: str
    owner: int | None
    rank: int | None
    value: int
    name: str = "wrong_answer"
    description: str = "with another answer of one method"

    @property
    def ranks(self) -> int:
        return self.base.ranks

    @property
    def trims(self) -> bool:
        return self.base.trims != (self.method == "trims")

    @property
    def local_first_share(self) -> float:
        return 0.5 if self.method == "local_first_share" else self.base.local_first_share

    def step(self, owner, rank):
        return self.base.step(owner, rank) + self.value * self._is("step", owner, rank)

    def block_source(self, dependencies, owner, rank):
        found = self.base.block_source(dependencies, owner, rank)
        if found is None or self._is("no block", owner, rank):
            return ((owner + self.value) % self.ranks, 0) if self._is("useless block", owner, rank) else None
        source = (found[0] + self.value * self._is("source", owner, rank)) % self.ranks
        return source, found[1] + self.value * self._is("post", owner, rank)

    def targets(self, owner, rank):
        if self._is("all targets", owner, rank) or self.method in ("source", "useless block"):
            yield from (r for r in range(self.ranks) if r != rank)
        elif not self._is("no target", owner, rank):
            yield from self.base.targets(owner, rank)

    def result_target(self, dependencies, owner, rank):
        target = self.base.result_target(dependencies, owner, rank)
        return (target + self.value * self._is("result_target", owner, rank)) % self.ranks

    def result_source(self, owner, rank):
        source = self.base.result_source(owner, rank)
        if self._is("result_source", owner, rank):
            return None if source is not None else (rank + self.value) % self.ranks
        return source

    def result_delay_steps(self, source, target):
        return self.base.result_delay_steps(source, target) + self.value * self._is("delay", source, target)

    def _is(self, method: str, owner: int, rank: int) -> bool:
        return self.method == method and self.owner in (None, owner) and self.rank in (None, rank)


METHODS = (
    "trims", "local_first_share", "step", "no block", "useless block", "source", "post", "all targets", "no target",
    "result_target", "result_source", "delay",
)  # fmt: skip


@dataclass(frozen=True)
class OtherHelpers:
    """Helpers that differ in some pairs."""

    base: Any
    seed: int

    def helps(self, pairs, q_owner, k_owner):
        helps = self.base is not None and self.base.helps(pairs, q_owner, k_owner)
        return helps != (random.Random(repr((self.seed, q_owner, k_owner))).random() < 0.2)


def _remade(part: PassPlan, **changes: Any) -> PassPlan:
    """Return a pass with other fields, which shares no cache with the pass."""
    return PassPlan(**{one.name: getattr(part, one.name) for one in fields(PassPlan) if one.init} | changes)


def _change_passes(plan: Plan, draw: random.Random, forward: dict[str, Any], backward: dict[str, Any]) -> Plan:
    """Return the plan with these fields of its forward pass, its backward pass, or both."""
    made = {"forward": _remade(plan.forward, **forward), "backward": _remade(plan.backward, **backward)}
    chosen = draw.choice((("forward",), ("backward",), PASSES))
    return replace(plan, **{name: made[name] for name in chosen})


def change_answer(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with one wrong answer of a route."""
    ranks = plan.forward.call.ranks
    owner, rank = (draw.choice((None, draw.randrange(ranks))) for _ in range(2))
    wrong = WrongAnswer(plan.forward.route, draw.choice(METHODS), owner, rank, draw.choice((-1, 1, 2)))
    other = replace(wrong, base=plan.backward.route)
    backward = draw.choice(({"route": other, "gradient_route": other}, {"gradient_route": other}, {"route": other}))
    return _change_passes(plan, draw, {"route": wrong}, backward)


def draw_routes(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with other routes."""
    forward, backward, gradients = (_drawn_route(draw, plan.forward.call.ranks) for _ in range(3))
    gradients = draw.choice((backward, backward, gradients))
    side = {} if plan.backward.helpers or plan.heads else {"side": draw.choice(("kv", "q"))}
    return _change_passes(plan, draw, {"route": forward}, {"route": backward, "gradient_route": gradients, **side})


def change_helpers(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with other helpers, and with a route that they allow."""
    ranks = plan.forward.call.ranks
    drawn = DrawnRoute(ranks, draw.randrange(1 << 20), 3 * ranks, draw.random() < 0.3, steady=True, trims=True)
    route = draw.choice((DirectRoute(ranks, 1, 1, draw.choice((0.0, 1.0))), drawn))
    changes = {"helpers": OtherHelpers(plan.forward.helpers, draw.randrange(1 << 20)), "route": route, "side": "kv"}
    return _change_passes(plan, draw, changes, changes | {"gradient_route": route})


def change_fields(plan: Plan, draw: random.Random) -> Plan:
    """Return the plan with another value of one of its fields."""
    ranks = plan.call.ranks
    half = replace(plan.forward.call, heads=max(1, plan.forward.call.heads // 2))
    layout = plan.backward.call.layout
    turned = replace(plan.backward.call, layout=Layout("turned", layout.length, layout.shards[::-1]))
    return replace(
        plan,
        **draw.choice(
            (
                {"heads": HeadSplit(draw.randint(1, ranks + 1), draw.choice((1, 2)))},
                {"heads": None},
                {"head_groups": draw.choice((0, 1, 2, 3))},
                {"score_rows": not plan.score_rows},
                {"forward": plan.backward, "backward": plan.forward},
                {"forward": _remade(plan.forward, stride=2)},
                {"forward": _remade(plan.forward, call=half)},
                {"backward": _remade(plan.backward, call=turned)},
                {"backward": _remade(plan.backward, gradient_route=None)},
                {"backward": _remade(plan.backward, rounds_gradients=not plan.backward.rounds_gradients)},
                {"forward": _remade(plan.forward, side="q")},
            )
        ),  # type: ignore[arg-type]  # each of them has its fields
    )


OTHER_KINDS = {one.__name__: one for one in (change_answer, draw_routes, change_helpers, change_fields)}


def change_plan(plan: Plan, draw: random.Random) -> tuple[str, Plan]:
    """Return the kind of a random change, and the changed plan.

    Raises:
        NotPossible: The plan has nothing that this kind of change could change.
    """
    kind = draw.choice((*STEP_KINDS, *[one for one in OTHER_KINDS for _ in range(len(STEP_KINDS) // 4)]))
    return kind, OTHER_KINDS[kind](plan, draw) if kind in OTHER_KINDS else change_steps(plan, draw, kind)
