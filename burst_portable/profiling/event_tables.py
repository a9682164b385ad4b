"""Define the recorded events of one rank as tables of integers, which are cheap to write, send and compute with.

- `compute`: one kernel call of the plan. Its blocks, pairs, tiles and FLOPs, its start and end.
- `message`: one move of the plan on this rank. When it was posted, when it arrived, and the later wait for it. The
  arrival is known if a stream watched for it; for a sent message, it may be unknown.
- `collective`: one operation of all ranks. The all-to-all of a reshard (of all ranks or of one node's), or the check
  before a pass that all ranks make the same call.
- `copy`: one copy or sum of a step besides the kernel: messages packed, gradients added.

Times are nanoseconds of the rank's own clock. A row names the training step (`train_step`), the attention in it
(`attention_call`: the layer of a model without recomputation), the pass, and the ring step.
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
class KernelTrace:
    """Kernels of a device, or operators of the host, with their locations in the plan (see `tracing`).

    Attributes:
        names: (activity in the plan, such as "q0 x kv2"; name of the kernel or operator).
        rows: ``[n, 8]``: train step, attention call, backward, ring step, index into `KINDS`, index into `names`,
            start, end; nanoseconds of the tracer's clock.
        on_device: True for kernels of a device, False for operators of the host.
    """

    names: Sequence[tuple[str, str]]
    rows: NDArray[np.int64]
    on_device: bool

    KINDS: ClassVar[tuple[str, ...]] = ("compute", "comm", "wait", "copy")

    @classmethod
    def of(cls, names: Sequence[Sequence[str]], rows: Any, *, on_device: bool) -> KernelTrace:
        """Build a trace from names and rows in the order of the attributes."""
        return cls([(a, b) for a, b in names], np.array(rows, dtype=np.int64).reshape(-1, 8), on_device)


LOCATION = ("train_step", "attention_call", "backward", "ring_step")
"""First columns of each table."""
TIMES = ("posted", "left", "arrived", "start", "end")
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "compute": (*LOCATION, "q_owner", "k_owner", "pairs", "tiles", "flops", "start", "end"),
    "message": (*LOCATION, "issued", "sends", "peer", "owner", "result", "bytes", *TIMES),
    "collective": (*LOCATION, "ordinal", "agreement", "bytes", "start", "end"),
    "copy": (*LOCATION, "start", "end"),
}
"""Columns of each table. Of a message: `issued` is the ring step that posted it; `left`, when posting ended; `result`,
1 for gradients."""
NEVER = -1
"""A time that was not recorded: the posting of a message at level "basic"; its arrival without streams."""


@dataclass(frozen=True)
class Table:
    """Rows of one kind; ``table["start"]`` is a column."""

    kind: str
    data: NDArray[np.int64]

    @classmethod
    def of(cls, kind: str, rows: Sequence[Any] | NDArray[Any]) -> Table:
        """Build a table from rows in the order of `COLUMNS`."""
        return cls(kind, np.array(rows, dtype=np.int64).reshape(-1, len(COLUMNS[kind])))

    def __getitem__(self, column: str) -> NDArray[np.int64]:
        return self.data[:, COLUMNS[self.kind].index(column)]

    def __len__(self) -> int:
        return len(self.data)

    def select(self, rows: Any) -> Table:
        """Return the rows of a mask or an index."""
        return Table(self.kind, self.data[rows])

    @property
    def locations(self) -> NDArray[np.int64]:
        """The columns `LOCATION`, ``[n, 4]``."""
        return self.data[:, : len(LOCATION)]

    def spans(self) -> NDArray[np.int64]:
        """Return start and end of each row, ``[n, 2]``."""
        return np.stack((self["start"], self["end"]), axis=1)

    def posts(self) -> Table:
        """Return where and when messages were posted, as rows of the kind "copy"."""
        posted = self.select(self["posted"] != NEVER)
        columns = posted.data[:, :3], posted["issued"], posted["posted"], posted["left"]
        return Table.of("copy", np.column_stack(columns))

    @property
    def wait_end(self) -> NDArray[np.int64]:
        """Of messages: the time from which a wait had nothing more to wait for.

        If a stream observed the arrival, this is the arrival: from then until `end`, the device was idle for its host.
        """
        end = np.clip(self["arrived"], self["start"], self["end"])
        return np.where(self["arrived"] == NEVER, self["end"], end)

    def waits(self) -> NDArray[np.int64]:
        """Return start and end of the wait for each message, ``[n, 2]``."""
        return np.stack((self["start"], self.wait_end), axis=1)

    def shift(self, nanoseconds: int) -> Table:
        """Return the table with all recorded times shifted to another clock."""
        data = self.data.copy()
        for name in set(TIMES) & set(COLUMNS[self.kind]):
            column = data[:, COLUMNS[self.kind].index(name)]
            column[column != NEVER] += nanoseconds
        return Table(self.kind, data)


@dataclass(frozen=True)
class RankRecords:
    """All records of one rank.

    Attributes:
        rank: Rank in the mesh whose calls were recorded.
        host: Name of the clock: ranks of one host read the same monotonic clock.
        evidence: Source of the times: "host clock" or "device events".
        plans: Facts of each plan that ran (see `plan_facts.PlanFacts`), by its number.
        calls: (train step, attention call, number of the plan).
        kernel_trace: Kernels that the vendor's tracer recorded; None below level "kernels".
        train_steps: (train step, start, end) of each training step, from mark to mark.
        core_waits: (train step, nanoseconds) that all threads of the process waited for a core; see
            `clocks.read_core_wait`. Empty if it is unknown, or if kernels run on a device.
    """

    rank: int
    host: str
    evidence: str
    tables: Mapping[str, Table]
    plans: Sequence[Mapping[str, Any]] = ()
    calls: Sequence[Sequence[int]] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    kernel_trace: KernelTrace | None = None
    train_steps: Sequence[Sequence[int]] = ()
    core_waits: Sequence[Sequence[int]] = ()

    def table(self, kind: str) -> Table:
        """Return the rows of one kind; an empty table if none were recorded."""
        return self.tables.get(kind) or Table.of(kind, [])

    @property
    def last_train_step(self) -> int:
        """The last training step with attention, from 0; -1 if nothing was recorded."""
        return max((int(t["train_step"].max()) for t in self.tables.values() if len(t)), default=-1)

    def shift(self, nanoseconds: int) -> RankRecords:
        """Return the records with all times shifted to another clock."""
        tables = {kind: table.shift(nanoseconds) for kind, table in self.tables.items()}
        train_steps = [(row[0], row[1] + nanoseconds, row[2] + nanoseconds) for row in self.train_steps]
        return replace(self, tables=tables, train_steps=train_steps)


def pack(records: RankRecords) -> bytes:
    """Return records as bytes to send to another rank: a line of JSON, then the tables."""
    head = dict(vars(records))
    tables, trace = head.pop("tables"), head.pop("kernel_trace")
    head["rows"] = {kind: len(table) for kind, table in tables.items()}
    arrays = [table.data for table in tables.values()]
    if trace is not None:
        head["kernel_trace"] = {"names": trace.names, "on_device": trace.on_device}
        arrays.append(trace.rows)
    return json.dumps(head).encode() + b"\n" + b"".join(np.ascontiguousarray(a).astype("<i8").tobytes() for a in arrays)


def unpack(data: bytes) -> RankRecords:
    """Return the records that `pack` packed."""
    line, _, body = data.partition(b"\n")
    head = json.loads(line)
    tables, at = {}, 0
    for kind, rows in head.pop("rows").items():
        size = rows * len(COLUMNS[kind]) * 8
        tables[kind] = Table.of(kind, np.frombuffer(body[at : at + size], dtype="<i8"))
        at += size
    if trace := head.pop("kernel_trace", None):
        head["kernel_trace"] = KernelTrace.of(rows=np.frombuffer(body[at:], dtype="<i8"), **trace)
    return RankRecords(tables=tables, **head)


_PREFIX = "burst_portable: "
_LABEL = re.compile(_PREFIX + r"rank=(\d+) (\S+)/(forward|backward) train_step=(\d+) call=(\d+) ring_step=(\d+) (.+)")


class PlanLocation(NamedTuple):
    """A location in the plan. `activity` names the blocks that are computed ("q1 x kv0"), or what is communicated."""

    rank: int
    strategy: str
    backward: bool
    train_step: int
    attention_call: int
    ring_step: int
    activity: str

    def __str__(self) -> str:
        name = "backward" if self.backward else "forward"
        steps = f"train_step={self.train_step} call={self.attention_call} ring_step={self.ring_step}"
        return f"{_PREFIX}rank={self.rank} {self.strategy}/{name} {steps} {self.activity}"

    @property
    def computes(self) -> bool:
        """Return whether a kernel runs here; otherwise blocks are communicated or copied."""
        return " x " in self.activity

    @classmethod
    def parse(cls, text: str) -> PlanLocation | None:
        """Return the location that `str` wrote; None if the text is not such a label."""
        if not (found := _LABEL.fullmatch(text)):
            return None
        rank, strategy, name, train_step, call, ring_step, activity = found.groups()
        return cls(int(rank), strategy, name == "backward", int(train_step), int(call), int(ring_step), activity)
