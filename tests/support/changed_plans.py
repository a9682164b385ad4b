"""Plans whose steps differ from those that their routes give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace

from burst_portable.planning.plans import PassName, PassPlan, Plan
from burst_portable.planning.schedule import Step, Steps
from burst_portable.planning.verify import verify

AllSteps = dict[int, list[Step]]
"""The steps of each rank."""


@dataclass(frozen=True)
class ChangedPass(PassPlan):
    """A pass in which some ranks have other steps. `changed`: their steps by rank."""

    changed: Mapping[int, Steps] = field(default_factory=dict, compare=False, kw_only=True)

    def steps_of(self, rank: int) -> Steps:
        return self.changed[rank] if rank in self.changed else super().steps_of(rank)


def with_steps(plan: Plan, name: PassName, steps: Mapping[int, Steps]) -> Plan:
    """Return the plan with these steps of some ranks in one pass."""
    part = plan.pass_plan(name)
    given = {one.name: getattr(part, one.name) for one in fields(PassPlan) if one.init}
    return replace(plan, **{name: ChangedPass(**given, changed=steps)})


def all_steps(plan: Plan, name: PassName) -> AllSteps:
    """Return the steps of each rank in a pass, as lists."""
    return {rank: list(plan.steps(name, rank)) for rank in range(plan.call.ranks)}


def errors_after(plan: Plan, change: Callable[[AllSteps], None], name: PassName = "forward") -> list[str]:
    """Return the errors that `verify` finds after a change of the steps of one pass."""
    steps = all_steps(plan, name)
    change(steps)
    return verify(with_steps(plan, name, {rank: tuple(changed) for rank, changed in steps.items()}))


def change_step(steps: AllSteps, rank: int, at: int, **changes: object) -> None:
    """Replace fields of one step of a rank."""
    steps[rank][at] = replace(steps[rank][at], **changes)
