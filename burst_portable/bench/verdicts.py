"""Define what a rank finds about an entry before it is measured, and combine it over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from burst_portable.comm.agreement import hashed_value
from burst_portable.errors import BurstError, StrategyError, in_a_line
from burst_portable.planning.plans import Plan
from burst_portable.runtime.signature import plan_fact
from burst_portable.utils.text import rank_names

_LONGEST_REASON = 1000  # characters of an error that ranks share
VERDICT_SIZE = 16384
"""Bytes, more than such a reason and the name of a plan take as JSON."""


class Verdict(NamedTuple):
    """Result of one rank for an entry, before it is measured.

    Attributes:
        status: "refused" or "failed"; "" for an entry that can run.
        reason: Why.
        plan: What its plan sends. Default: an entry without a plan.
        digest: Digest of the plan's steps on all ranks.
    """

    status: str = ""
    reason: str = ""
    plan: str = ""
    digest: str = ""

    @classmethod
    def of_error(cls, error: BaseException) -> Verdict:
        """Return the verdict for an error. Only an entry that works may refuse; all other errors are failures."""
        refused = isinstance(error, BurstError | ImportError) and not isinstance(error, StrategyError)
        reason = str(error) if isinstance(error, BurstError) else in_a_line(error)
        return cls("refused" if refused else "failed", reason[:_LONGEST_REASON])

    @classmethod
    def of_plan(cls, plan: Plan | None) -> Verdict:
        """Return the verdict for a plan, or for an entry without one."""
        if plan is None:
            return cls()
        fact, ranks = plan_fact(plan), range(plan.call.ranks)
        steps = [[one.steps_of(rank) for rank in ranks] for _, one in plan.passes()]
        return cls("", "", fact.name, hashed_value("", (fact.digest, steps)).digest)


def joint_verdict(name: str, verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict of all ranks about an entry, given that of each in rank order.

    An entry that only some ranks can run has failed: its ranks do not do the same.
    """
    first = verdicts[0]
    next_step = f"`burst-portable conform --strategy {name}` examines it"
    if len({one.status for one in verdicts}) > 1:
        wrong = (f"{one.status} on rank {rank}: {one.reason}" for rank, one in enumerate(verdicts) if one.status)
        return Verdict("failed", "; ".join([*wrong, next_step]))
    if first.status or len({one.digest for one in verdicts}) == 1:
        return first
    plans: dict[str, tuple[str, list[int]]] = {}
    for rank, one in enumerate(verdicts):
        plans.setdefault(one.digest, (one.plan, []))[1].append(rank)
    texts = [text for text, _ in plans.values()]
    sides = [
        f"{'another of that name' if text in texts[:number] else text} on {rank_names(ranks)}"
        for number, (text, ranks) in enumerate(plans.values())
    ]
    return Verdict(
        "failed", f"it is broken: ranks have different plans of one call: {', but '.join(sides)}; {next_step}"
    )
