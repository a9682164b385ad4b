"""Checks a plan without running it: every pair exactly once, every send met by its receive, every gradient home."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from burst_portable.plans import PassPlan, Plan


def verify(plan: Plan, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """What is wrong with a plan; an empty list for a good one. Walks every rank, so it costs ranks² tiles.

    Args:
        plan: any plan.
        progress: called with the number of ranks done, over both passes.
    """
    wrong = []
    done = 0
    for name, part in plan.passes():
        checker = _Checker(part, copies=1)
        for rank in range(part.problem.ranks):
            checker.walk(rank)
            done += 1
            progress(done)
        wrong += [f"{name}: {problem}" for problem in checker.finish()]
    return wrong


class _Checker:
    def __init__(self, part: PassPlan, copies: int) -> None:
        self.part, self.copies = part, copies
        self.wrong: list[str] = []
        self.computed: Counter[tuple[int, int]] = Counter()
        self.area = 0
        self.posted: Counter[object] = Counter()  # sends count +1, receives -1: both ends must agree exactly
        self.merged: Counter[tuple[int, int]] = Counter()  # (owner, contributor): gradients that reached home
        self.carried: dict[tuple[int, int], set[int]] = {}

    def walk(self, rank: int) -> None:
        """One rank's steps, in order: a block is used only while it is there."""
        held = {rank}
        for step in self.part.rank(rank):
            held |= {m.owner for m in step.arrivals}
            for move in step.sends:
                self.posted[move] += 1
                if move.owner not in held:
                    self.wrong.append(f"rank {rank} sends {move.label} at step {step.index} without holding it")
            for move in step.receives:
                self.posted[move] -= 1
            if step.compute:
                c = step.compute
                other = c.k_owner if self.part.side == "kv" else c.q_owner
                if other not in held:
                    self.wrong.append(f"rank {rank} computes with the block of {other} without holding it")
                self.computed[c.q_owner, c.k_owner] += 1
                self.area += c.tiles.area
            for move in step.result_sends:
                self.posted[move] += 1
            for move in step.result_receives:
                self.posted[move] -= 1
            held -= set(step.released)
        if held != {rank}:
            self.wrong.append(f"rank {rank} still holds the blocks of {sorted(held - {rank})} at the end")

    def finish(self) -> list[str]:
        """What only all ranks together show."""
        if twice := [pair for pair, count in self.computed.items() if count > 1]:
            self.wrong.append(f"block pairs computed more than once: {twice[:4]}")
        if self.area != self.part.problem.area:
            self.wrong.append(f"{self.area} pairs computed, but the mask has {self.part.problem.area}")
        if lonely := [move for move, balance in self.posted.items() if balance]:
            self.wrong.append(f"{len(lonely)} moves posted by one end alone, such as {lonely[0]}")
        if self.part.results is not None:
            self.wrong += self._gradients_home()
        return self.wrong

    def _gradients_home(self) -> list[str]:
        """Follow each contribution from where it is made to its owner."""
        wrong = []
        onwards = {
            (move.owner, move.source): move.target
            for rank in range(self.part.problem.ranks)
            for step in self.part.rank(rank)
            for move in step.result_sends
        }
        for q_owner, k_owner in self.computed:
            owner, made_at = (k_owner, q_owner) if self.part.side == "kv" else (q_owner, k_owner)
            seen, at = set(), made_at
            while at != owner and at not in seen:
                seen.add(at)
                at = onwards.get((owner, at), at)
            if at != owner:
                wrong.append(f"the gradient of block {owner} made on rank {made_at} gets no further than rank {at}")
        return wrong
