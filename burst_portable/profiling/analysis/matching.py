"""Match the two ends of every message, and align the clocks of all ranks.

Ranks of one host read one monotonic clock. Clocks of several hosts are aligned on messages. A message cannot arrive
before it was posted, so each message bounds how far the receiver's clock is ahead; messages in the other direction give
the other bound. The offset is the middle of the remaining range, and the uncertainty is half of the range.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.event_tables import NEVER, RankRecords, Table

Column = NDArray[np.int64]

MIN_WAIT_RATIO = 10
"""A wait of more than this many times the overhead of a wait call was a real wait. A shorter one may be overhead."""
MAX_OVERHEAD = 1_000_000
"""Nanoseconds: upper bound of the overhead of a wait call. A few recorded waits may all be real ones."""
MAX_READY_RATIO = 10
"""A wait shorter than 1/MAX_READY_RATIO of the time since both ends had posted was more likely a delayed host."""


@dataclass(frozen=True)
class Messages:
    """Messages with both ends recorded, one row each.

    Attributes:
        source: Sending rank.
        target: Receiving rank.
        send: Rows of the sender's message table.
        receive: Rows of the receiver's message table.
        overhead: Nanoseconds of a typical wait of the receiver for a message that has arrived; see `_wait_overhead`.
        available: The time when the device of the sender had the data of the message; see `_Sender`.
    """

    source: Column
    target: Column
    send: Table
    receive: Table
    overhead: Column
    available: Column

    def __len__(self) -> int:
        return len(self.source)

    @property
    def ready(self) -> Column:
        """The time when both ends had posted: the earliest start of the transfer.

        A host's messages may move while it posts others. A device starts them after the host has posted all of them.
        A host also posts messages of blocks that are still on their way: these start when the sender's device has them.
        """
        begun, ended = (np.maximum(self.send[when], self.receive[when]) for when in ("posted", "left"))
        arrived = self.receive["arrived"]
        return np.where(arrived == NEVER, begun, np.maximum(ended, np.minimum(self.available, arrived)))

    def transfers(self) -> NDArray[np.int64]:
        """Return `ready` and the arrival of each message, ``[n, 2]``: observed by a stream, or the end of its wait."""
        ready, arrived = self.ready, self.receive["arrived"]
        end = np.where(arrived == NEVER, self.receive["end"], arrived)
        return np.stack((ready, np.maximum(end, ready)), axis=1)

    @property
    def is_observed(self) -> NDArray[np.bool_]:
        """Return whether a stream or a waiting receiver observed the arrival. Other messages arrived earlier.

        A receiver that began to wait before both ends had posted did wait. If it began later, the message may have
        arrived already: then the wait is as short as the overhead of the call, or the host was delayed.
        """
        start, end = self.receive["start"], self.receive["end"]
        waited = end - start
        long = (waited > MIN_WAIT_RATIO * self.overhead) & (waited * MAX_READY_RATIO >= end - self.ready)
        early = (start <= self.ready) & (waited > 0)
        observed: NDArray[np.bool_] = early | long | (self.receive["arrived"] != NEVER)
        return observed


def match(records: Sequence[RankRecords]) -> Messages:
    """Return the messages of all ranks: sends and receives, matched by their identity in the plan."""
    sent: dict[Hashable, list[NDArray[np.int64]]] = defaultdict(list)
    received = []
    for one in records:
        table = one.table("message")
        posted, overhead = table.select(table["posted"] != NEVER), _wait_overhead(table)
        for row, sends, key in zip(posted.data, posted["sends"], _keys(posted, one.rank), strict=True):
            if sends:
                sent[key].append(row)
            else:
                received.append((key, row, overhead))
    pairs = [(key, sent[key].pop(0), row, overhead) for key, row, overhead in received if sent[key]]
    senders = {one.rank: _Sender.of(one) for one in records}
    return Messages(
        np.array([key[0] for key, *_ in pairs], dtype=np.int64),
        np.array([key[1] for key, *_ in pairs], dtype=np.int64),
        Table.of("message", [row for _, row, _, _ in pairs]),
        Table.of("message", [row for _, _, row, _ in pairs]),
        np.array([overhead for *_, overhead in pairs], dtype=np.int64),
        np.array([senders[key[0]].available(key[2:]) for key, *_ in pairs], dtype=np.int64),
    )


@dataclass(frozen=True)
class _Sender:
    """When the device of a rank has the data of its messages.

    Attributes:
        arrived: Arrival of each received block, by (train step, attention call, backward, owner, result).
        computed: End of the last kernel that used the tokens of an owner, by (train step, attention call, backward,
            owner). The kernel adds to results of these tokens.
        reached: By (train step, attention call, backward): end of the last kernel that began before those of the pass.
            A device runs the kernels of a pass, and sends its own blocks, after those of earlier passes.
    """

    arrived: dict[tuple[int, ...], int]
    computed: dict[tuple[int, ...], int]
    reached: dict[tuple[int, ...], int]

    @classmethod
    def of(cls, one: RankRecords) -> _Sender:
        messages, kernels = one.table("message"), one.table("compute")
        there = messages.select((messages["sends"] == 0) & (messages["arrived"] != NEVER))
        arrived: dict[tuple[int, ...], int] = {}
        for (_, _, *key), when in zip(_keys(there, one.rank), there["arrived"].tolist(), strict=True):
            arrived[tuple(key)] = max(when, arrived.get(tuple(key), 0))
        computed: dict[tuple[int, ...], int] = {}
        reached: dict[tuple[int, ...], int] = {}
        last = 0
        columns = (*(kernels[name] for name in ("train_step", "attention_call", "backward")),
                   *(kernels[name] for name in ("q_owner", "k_owner", "start", "end")))  # fmt: skip
        rows = np.stack(columns, axis=1)
        for *place, q_owner, k_owner, _, end in rows[np.argsort(kernels["start"], kind="stable")].tolist():
            reached.setdefault(tuple(place), last)
            for owner in {q_owner, k_owner}:
                computed[*place, owner] = max(end, computed.get((*place, owner), 0))
            last = max(last, end)
        return cls(arrived, computed, reached)

    def available(self, key: tuple[int, ...]) -> int:
        """Return when the data of a message was there, by (train step, attention call, backward, owner, result)."""
        *place, owner, result = key
        there = max(self.arrived.get(key, 0), self.reached.get(tuple(place), 0))
        return max(there, self.computed.get((*place, owner), 0)) if result else there


def _wait_overhead(table: Table) -> int:
    """Return the overhead of a rank's wait calls in nanoseconds: the lower quartile of the waits that its host timed.

    Half of all waits are for the rank's own sends, most of which are done. So the quartile is a wait for a finished
    message, even if the rank waits for every message that it receives. With very few waits it may not be:
    `MAX_OVERHEAD`.
    """
    timed = table.select((table["arrived"] == NEVER) & (table["posted"] != NEVER))
    usual = np.quantile(timed["end"] - timed["start"], 0.25, method="lower") if len(timed) else 0
    return min(int(usual), MAX_OVERHEAD)


def _keys(table: Table, rank: int) -> list[tuple[int, ...]]:
    """Return (source, target, train step, attention call, backward, owner, result) of each row."""
    sends = table["sends"] == 1
    source, target = np.where(sends, rank, table["peer"]), np.where(sends, table["peer"], rank)
    names = ("train_step", "attention_call", "backward", "owner", "result")
    columns = [source, target, *(table[name] for name in names)]
    return [tuple(int(x) for x in row) for row in np.stack(columns, axis=1)]


# --------------------------------------------------------------------------------------------------------- clocks


@dataclass(frozen=True)
class Clocks:
    """Alignment of the ranks' clocks.

    Attributes:
        method: "one clock" (one host), "messages" (several hosts, aligned), or "none": ranks cannot be compared.
        uncertainty_ns: Largest error of a difference between the times of two hosts; None if they cannot be compared.
        offsets_ns: Offset that was subtracted from each rank's times.
    """

    method: str
    uncertainty_ns: int | None
    offsets_ns: tuple[int, ...]


def align(records: Sequence[RankRecords]) -> tuple[list[RankRecords], Clocks]:
    """Return the records on the clock of the first rank's host if possible, and the alignment of the clocks."""
    hosts = list(dict.fromkeys(one.host for one in records))
    if len(hosts) == 1:
        return list(records), Clocks("one clock", 0, (0,) * len(records))
    ahead = _bounds(records, hosts)
    if not np.isfinite(ahead).all():
        return list(records), Clocks("none", None, (0,) * len(records))
    offset = [round((ahead[0, h] - ahead[h, 0]) / 2) for h in range(len(hosts))]
    uncertainty = max(ahead[a, b] + ahead[b, a] for a in range(len(hosts)) for b in range(len(hosts))) / 2
    taken = tuple(int(offset[hosts.index(one.host)]) for one in records)
    aligned = [one.shift(-by) for one, by in zip(records, taken, strict=True)]
    return aligned, Clocks("messages", math.ceil(uncertainty), taken)


def _bounds(records: Sequence[RankRecords], hosts: list[str]) -> NDArray[np.float64]:
    """Return bounds [a, b]: the largest lead of host b's clock over host a's, in nanoseconds."""
    ahead = np.full((len(hosts), len(hosts)), np.inf)
    np.fill_diagonal(ahead, 0)
    host_of = {one.rank: hosts.index(one.host) for one in records}
    messages = match(records)
    took = messages.receive["end"] - messages.send["posted"]
    for source, target, most in zip(messages.source, messages.target, took, strict=True):
        a, b = host_of[int(source)], host_of[int(target)]
        ahead[a, b] = min(ahead[a, b], most)
    for middle in range(len(hosts)):  # bounds through a third host
        ahead = np.minimum(ahead, ahead[:, middle : middle + 1] + ahead[middle : middle + 1])
    return ahead
