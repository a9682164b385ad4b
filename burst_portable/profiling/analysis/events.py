"""List the events of all ranks for timelines: kernels, waits, collectives, copies, posts and transfers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.analysis.matching import Messages
from burst_portable.profiling.event_tables import RankRecords, Table

LANE_KINDS = ("compute", "wait", "post", "collective", "transfer", "copy")
EVENT_COLUMNS = (
    "kind",
    "start_ns",
    "duration_ns",
    "train_step",
    "attention_call",
    "backward",
    "ring_step",
    "a",
    "b",
    "work",
)
"""Columns of events. `a`, `b`: owners of queries and keys (compute), peer and owner (wait, transfer), else -1.
`work`: FLOPs or bytes."""


def events_of(records: Sequence[RankRecords], messages: Messages) -> dict[str, Any]:
    """Return every rank's events in the order of their starts, in nanoseconds since `origin_ns`."""
    rows = {one.rank: _rank_events(one, messages) for one in records}
    origin = min((int(r[:, 1].min()) for r in rows.values() if len(r)), default=0)
    ranks = []
    for one in records:
        data = rows[one.rank]
        data[:, 1] -= origin
        data = data[np.argsort(data[:, 1], kind="stable")]
        ranks.append({"rank": one.rank, **{name: data[:, i].tolist() for i, name in enumerate(EVENT_COLUMNS)}})
    return {"origin_ns": origin, "kinds": list(LANE_KINDS), "ranks": ranks}


def _rank_events(one: RankRecords, messages: Messages) -> NDArray[np.int64]:
    compute, message, collective, copy = (one.table(k) for k in ("compute", "message", "collective", "copy"))
    posts = message.posts()
    _, first = np.unique(posts["start"], return_index=True)  # messages that were posted together are one event
    posts = posts.select(first)
    observed = (messages.target == one.rank) & messages.is_observed
    received, transfers = messages.receive.select(observed), messages.transfers()[observed]
    return np.concatenate(
        (
            _rows("compute", compute, compute.spans(), "q_owner", "k_owner", "flops"),
            _rows("wait", message, message.waits(), "peer", "owner", "bytes"),
            _rows("collective", collective, collective.spans(), work="bytes"),
            _rows("copy", copy, copy.spans()),
            _rows("post", posts, posts.spans()),
            _rows("transfer", received, transfers, "peer", "owner", "bytes"),
        )
    )


def _rows(
    kind: str, table: Table, spans: NDArray[np.int64], a: str = "", b: str = "", work: str = ""
) -> NDArray[np.int64]:
    """Return rows of `EVENT_COLUMNS`; `a`, `b` and `work` name columns of the table."""
    start, end = spans.T
    owners = (table[name] if name else -1 for name in (a, b))
    columns = LANE_KINDS.index(kind), start, end - start, *table.locations.T, *owners, table[work] if work else 0
    return np.stack(np.broadcast_arrays(*columns), axis=1)
