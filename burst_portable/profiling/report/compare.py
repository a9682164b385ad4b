"""Two reports side by side: what became slower, by more than a threshold."""

from __future__ import annotations

from typing import Any, NamedTuple

from burst_portable.errors import InputError, explain

WATCHED = ("span", "compute", "exposed_comm", "exposed_copy", "blocking", "idle")
_FLOOR = 0.01  # of the whole: a part that is smaller than this in both is noise


class Change(NamedTuple):
    """A part of the time a training step, in nanoseconds of the slowest rank, before and after."""

    name: str
    before: float
    after: float
    worse: bool

    @property
    def ratio(self) -> float:
        """After over before; infinite where there was nothing before."""
        return self.after / self.before if self.before else float("inf") if self.after else 1.0


def compare(before: dict[str, Any], after: dict[str, Any], threshold: float) -> list[Change]:
    """Each part of a training step, and whether it grew by more than the threshold (0.1: a tenth).

    A part counts as worse only where it grew by that share of the whole step too: a tenth more of nothing is nothing.
    Idle counts as nobody's and is shown alone; computing less is never worse.

    Raises `InputError` for reports of different numbers of ranks, or a threshold that is no finite number of 0 or more.
    """
    if not 0 <= threshold < float("inf"):  # nothing would exceed nan or more
        raise InputError(explain("the threshold is no share", got=threshold, allowed="0 or more, 0.1 for a tenth"))
    sizes = len(before["ranks"]), len(after["ranks"])
    if sizes[0] != sizes[1]:
        raise InputError(explain("the reports are of different numbers of ranks", got=f"{sizes[0]} and {sizes[1]}"))
    changes = []
    whole = _step(before, "span")
    for name in WATCHED:
        old, new = _step(before, name), _step(after, name)
        grew = new - old > threshold * (whole if name != "span" and old < _FLOOR * whole else old)
        matters = new - old > _FLOOR * whole
        changes.append(Change(name, old, new, name != "idle" and grew and matters))
    return changes


def _step(data: dict[str, Any], name: str) -> float:
    """Of the slowest rank, a training step."""
    steps = max(1, len(data["iterations"]))
    slowest: int = max(rank[name] for rank in data["ranks"])
    return slowest / steps
