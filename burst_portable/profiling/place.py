"""Names for what a plan does, that survive in a tracer's file and can be read back."""

from __future__ import annotations

import re
from typing import NamedTuple

_PREFIX = "burst_portable: "
_NAME = re.compile(_PREFIX + r"rank (\d+) (\S+) (forward|backward) (\d+)\.(\d+) step (\d+): (.+)")


class Place(NamedTuple):
    """Where in the plan something ran; `what` says which blocks met or moved."""

    rank: int
    strategy: str
    backward: bool
    iteration: int
    call: int
    step: int
    what: str

    def __str__(self) -> str:
        name = "backward" if self.backward else "forward"
        where = f"{self.strategy} {name} {self.iteration}.{self.call} step {self.step}"
        return f"{_PREFIX}rank {self.rank} {where}: {self.what}"

    @property
    def computes(self) -> bool:
        """Whether blocks meet here; else they move."""
        return " x " in self.what

    @classmethod
    def parse(cls, text: str) -> Place | None:
        """The place that `str` wrote; None if this is not one of our names."""
        if not (found := _NAME.fullmatch(text)):
            return None
        rank, strategy, name, iteration, call, step, what = found.groups()
        return cls(int(rank), strategy, name == "backward", int(iteration), int(call), int(step), what)
