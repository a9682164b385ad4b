"""What is recorded of one rank, as tables of integers: cheap to write, to send and to reckon with.

==========  ==========================================================================================
table       a row is
==========  ==========================================================================================
compute     one kernel call of the plan: which blocks, how many pairs, tiles and FLOPs, from when to when
message     one move as this rank saw it: when it was posted, when it was there (where a stream could watch for
            that; of one that was sent, if it is known), and how long a later wait for it took
collective  what all ranks do together: a reshard's all-to-all (of all, or of a node's), or asking whether ranks agree
            before a pass
copy        what a step copies or adds up beside the kernel: messages packed, gradients that came
==========  ==========================================================================================

Times are nanoseconds of the rank's own clock. A wait is a wait: what of it was transfer, and whose fault the rest was,
needs the other end's row (see `analyze`). A row knows the training step (`iteration`), the attention in it (`call`, the
layer of a model without recomputation), the pass, and the ring step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Traced:
    """Kernels of a device, or operators of the host, under the plan's names (see `deep`).

    Attributes:
        names: (what of the plan, such as "q0 x kv2"; name of the kernel or operator).
        rows: ``[n, 8]``: iteration, call, backward, step, index into `KINDS`, index into `names`, start, end;
            nanoseconds of the tracer's clock.
        on_device: whether these are kernels of a device; else operators of the host.
    """

    names: Sequence[tuple[str, str]]
    rows: NDArray[np.int64]
    on_device: bool

    KINDS: ClassVar[tuple[str, ...]] = ("compute", "comm", "wait", "copy")

    @classmethod
    def of(cls, names: Sequence[Sequence[str]], rows: Any, *, on_device: bool) -> Traced:
        """From rows as above."""
        return cls([(a, b) for a, b in names], np.array(rows, dtype=np.int64).reshape(-1, 8), on_device)


_PLACE = ("iteration", "call", "backward", "step")
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "compute": (*_PLACE, "q_owner", "k_owner", "pairs", "tiles", "flops", "start", "end"),
    "message": (
        *_PLACE,
        "issued",
        "sends",
        "peer",
        "owner",
        "result",
        "bytes",
        "posted",
        "left",
        "arrived",
        "start",
        "end",
    ),
    "collective": (*_PLACE, "ordinal", "agreement", "bytes", "start", "end"),
    "copy": (*_PLACE, "start", "end"),
}
TIMES = ("posted", "left", "arrived", "start", "end")
NEVER = -1
"""A time that was not recorded: when a message was posted, at the light level; when it arrived, without streams."""


@dataclass(frozen=True)
class Table:
    """Rows of one kind; ``table["start"]`` is a column."""

    kind: str
    data: NDArray[np.int64]

    @classmethod
    def of(cls, kind: str, rows: Sequence[Any] | NDArray[Any]) -> Table:
        """From rows in the order of `COLUMNS`."""
        return cls(kind, np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS[kind])))

    def __getitem__(self, column: str) -> NDArray[np.int64]:
        return self.data[:, COLUMNS[self.kind].index(column)]

    def __len__(self) -> int:
        return len(self.data)

    def where(self, rows: Any) -> Table:
        """The rows of a mask or an index."""
        return Table(self.kind, self.data[rows])

    def spans(self) -> NDArray[np.int64]:
        """``[n, 2]``: from when to when."""
        return np.stack((self["start"], self["end"]), axis=1)

    @property
    def until(self) -> NDArray[np.int64]:
        """Of messages: when a wait had nothing more to wait for.

        Where a stream saw the message come, that is when it came; until `end` the device stood idle for its host.
        """
        end = np.clip(self["arrived"], self["start"], self["end"])
        return np.where(self["arrived"] == NEVER, self["end"], end)

    def waits(self) -> NDArray[np.int64]:
        """Of messages, ``[n, 2]``: from when to when they were waited for."""
        return np.stack((self["start"], self.until), axis=1)

    def shifted(self, nanoseconds: int) -> Table:
        """The same on another clock."""
        data = self.data.copy()
        for name in set(TIMES) & set(COLUMNS[self.kind]):
            column = data[:, COLUMNS[self.kind].index(name)]
            column[column != NEVER] += nanoseconds
        return Table(self.kind, data)


@dataclass(frozen=True)
class RankRecords:
    """All of one rank.

    Attributes:
        rank: in the mesh whose calls were recorded.
        host: names the clock: ranks of one host read one monotonic clock.
        evidence: what the times are: "host clock", or "device events".
        plans: facts of each plan that ran (see `recorder.PlanFacts`), by its number.
        calls: (iteration, call, number of the plan).
        traced: what the vendor's tracer saw; None but at the deep level.
        marked: (iteration, start, end) of each training step, from mark to mark.
    """

    rank: int
    host: str
    evidence: str
    tables: Mapping[str, Table]
    plans: Sequence[Mapping[str, Any]] = ()
    calls: Sequence[Sequence[int]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    traced: Traced | None = None
    marked: Sequence[Sequence[int]] = ()

    def table(self, kind: str) -> Table:
        """Its rows of one kind; an empty table where none were recorded."""
        return self.tables.get(kind) or Table.of(kind, [])

    def shifted(self, nanoseconds: int) -> RankRecords:
        """The same on another clock."""
        tables = {kind: table.shifted(nanoseconds) for kind, table in self.tables.items()}
        marked = [(row[0], row[1] + nanoseconds, row[2] + nanoseconds) for row in self.marked]
        return replace(self, tables=tables, marked=marked)


def pack(records: RankRecords) -> bytes:
    """Records as bytes, for the way to another rank: a line of JSON, then the tables."""
    head = {
        "rank": records.rank,
        "host": records.host,
        "evidence": records.evidence,
        "plans": list(records.plans),
        "calls": [list(call) for call in records.calls],
        "marked": [list(row) for row in records.marked],
        "facts": dict(records.facts),
        "rows": {kind: len(table) for kind, table in records.tables.items()},
    }
    arrays = [table.data for table in records.tables.values()]
    if records.traced is not None:
        head["traced"] = {"names": list(records.traced.names), "on_device": records.traced.on_device}
        arrays.append(records.traced.rows)
    return json.dumps(head).encode() + b"\n" + b"".join(np.ascontiguousarray(a).astype("<i8").tobytes() for a in arrays)


def unpack(data: bytes) -> RankRecords:
    """What `pack` packed."""
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    tables, at = {}, 0
    for kind, rows in head.pop("rows").items():
        size = rows * len(COLUMNS[kind]) * 8
        tables[kind] = Table.of(kind, np.frombuffer(body[at : at + size], dtype="<i8"))
        at += size
    if told := head.pop("traced", None):
        head["traced"] = Traced.of(rows=np.frombuffer(body[at:], dtype="<i8"), **told)
    return RankRecords(tables=tables, **head)


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
