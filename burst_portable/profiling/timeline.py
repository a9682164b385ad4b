"""The events of a timeline, small enough for a report: columns of integers, times from the first event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.matching import Messages
from burst_portable.profiling.record import NEVER, RankRecords, Table

KINDS = ("compute", "wait", "post", "collective", "transfer", "copy")
COLUMNS = ("kind", "start", "duration", "iteration", "call", "backward", "step", "a", "b", "work")
"""`a`, `b`: owners of queries and keys (compute), peer and owner (wait, transfer), else -1. `work`: FLOPs or bytes."""


def events_of(records: Sequence[RankRecords], messages: Messages) -> dict[str, Any]:
    """Every rank's events in the order of their starts; nanoseconds since `origin`."""
    rows = {one.rank: _rank(one, messages) for one in records}
    origin = min((int(r[:, 1].min()) for r in rows.values() if len(r)), default=0)
    ranks = []
    for one in records:
        data = rows[one.rank]
        data[:, 1] -= origin
        data = data[np.argsort(data[:, 1], kind="stable")]
        ranks.append({"rank": one.rank, **{name: data[:, i].tolist() for i, name in enumerate(COLUMNS)}})
    return {"origin": origin, "kinds": list(KINDS), "ranks": ranks}


def _rank(one: RankRecords, messages: Messages) -> NDArray[np.int64]:
    compute, message, collective, copy = (one.table(k) for k in ("compute", "message", "collective", "copy"))
    parts = [_rows("compute", compute, compute["q_owner"], compute["k_owner"], compute["flops"])]
    waits = message["start"], message.until
    parts.append(_rows("wait", message, message["peer"], message["owner"], message["bytes"], waits))
    none = np.full(len(collective), -1)
    parts.append(_rows("collective", collective, none, none, collective["bytes"]))
    none = np.full(len(copy), -1)
    parts.append(_rows("copy", copy, none, none, none * 0))
    posted = message.where(message["posted"] != NEVER)
    if len(posted):  # one span for all that was posted together
        _, first = np.unique(posted["posted"], return_index=True)
        posted = posted.where(first)
        none = np.full(len(posted), -1)
        times = posted["posted"], posted["left"]
        parts.append(_rows("post", posted, none, none, none * 0, times, posted["issued"]))
    came = (messages.target == one.rank) & messages.known
    receive = messages.receive.where(came)
    times = messages.ready[came], np.maximum(messages.arrived, messages.ready)[came]
    parts.append(_rows("transfer", receive, receive["peer"], receive["owner"], receive["bytes"], times))
    return np.concatenate(parts)


def _rows(kind: str, table: Table, a: Any, b: Any, work: Any, times: Any = None, step: Any = None) -> NDArray[np.int64]:
    start, end = (table["start"], table["end"]) if times is None else times
    place = table["iteration"], table["call"], table["backward"], table["step"] if step is None else step
    return np.stack((np.full(len(table), KINDS.index(kind)), start, end - start, *place, a, b, work), axis=1)
