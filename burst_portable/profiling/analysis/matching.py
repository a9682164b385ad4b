"""Both ends of every message, and one clock for all ranks.

Ranks of one host read one monotonic clock. Clocks of several hosts are aligned on messages: one cannot arrive before it
was posted, so every message bounds how far the receiver's clock is ahead, and messages the other way bound it from the
other side. The middle of what is left is the offset, and half of it the uncertainty.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from burst_portable.profiling.records import NEVER, RankRecords, Table

Column = NDArray[np.int64]

CLEARLY = 10
"""A wait that lasted this many times the cost of asking was a real wait. A shorter one may be the cost of asking."""
MOST = 1_000_000
"""Nanoseconds: asking for what is there takes no longer, whatever a few waits say that were all for what was not."""
SHARE = 10
"""A wait shorter than 1/SHARE of the time since both ends had posted was more likely a delayed host."""


@dataclass(frozen=True)
class Messages:
    """Messages of which both ends were recorded; one row each.

    Attributes:
        source, target: ranks.
        send, receive: rows of the sender's and of the receiver's message table, with all their columns.
        asking: nanoseconds that it typically takes the receiver to ask for what is there, see `_asking`.
    """

    source: Column
    target: Column
    send: Table
    receive: Table
    asking: Column

    def __len__(self) -> int:
        return len(self.source)

    @property
    def ready(self) -> Column:
        """When both ends had posted: nothing could move before.

        A host's messages may move while it still posts others; what it gives to a device, when the device comes to it.
        """
        begun, given = (np.maximum(self.send[when], self.receive[when]) for when in ("posted", "left"))
        return np.where(self.receive["arrived"] == NEVER, begun, given)

    @property
    def arrived(self) -> Column:
        """When it was there, where that is known: as a stream saw it, or the end of a wait for it."""
        return np.where(self.receive["arrived"] == NEVER, self.receive["end"], self.receive["arrived"])

    @property
    def known(self) -> NDArray[np.bool_]:
        """Whether its arrival was seen: by a stream, or by a receiver that stood waiting. Others came earlier.

        A receiver that came before both ends had posted stood waiting for certain. One that came later may have found
        it there: then its wait is no longer than asking takes, or a host that was held up for a moment.
        """
        start, end = self.receive["start"], self.receive["end"]
        waited = end - start
        long = (waited > CLEARLY * self.asking) & (waited * SHARE >= end - self.ready)
        early = (start <= self.ready) & (waited > 0)
        known: NDArray[np.bool_] = early | long | (self.receive["arrived"] != NEVER)
        return known


def match(records: Sequence[RankRecords]) -> Messages:
    """Sends and receives of all ranks, matched by their names in the plan."""
    ends: dict[Hashable, list[NDArray[np.int64]]] = defaultdict(list)
    for one in records:
        table = one.table("message")
        sent = table.where((table["sends"] == 1) & (table["posted"] != NEVER))
        for row, key in zip(sent.data, _keys(sent, one.rank), strict=True):
            ends[key].append(row)
    pairs = []
    for one in records:
        table = one.table("message")
        received = table.where((table["sends"] == 0) & (table["posted"] != NEVER))
        for row, key in zip(received.data, _keys(received, one.rank), strict=True):
            if waiting := ends.get(key):
                pairs.append((key[0], key[1], waiting.pop(0), row))
    asking = {one.rank: _asking(one.table("message")) for one in records}
    return Messages(
        np.array([p[0] for p in pairs], dtype=np.int64),
        np.array([p[1] for p in pairs], dtype=np.int64),
        Table.of("message", [p[2] for p in pairs]),
        Table.of("message", [p[3] for p in pairs]),
        np.array([asking[p[1]] for p in pairs], dtype=np.int64),
    )


def _asking(table: Table) -> int:
    """The length of a rank's short waits, in nanoseconds: the lower quartile of those that its host timed.

    Half of all waits are for what the rank itself sent, which has mostly left: so the quartile is one that found
    everything done, also where every message that comes is waited for. Of very few it may not be: so `MOST`.
    """
    timed = table.where((table["arrived"] == NEVER) & (table["posted"] != NEVER))
    usual = np.quantile(timed["end"] - timed["start"], 0.25, method="lower") if len(timed) else 0
    return min(int(usual), MOST)


def _keys(table: Table, rank: int) -> list[tuple[int, ...]]:
    """(source, target, iteration, call, backward, owner, result) of each row."""
    mine = np.full(len(table), rank)
    sends = table["sends"] == 1
    source, target = np.where(sends, mine, table["peer"]), np.where(sends, table["peer"], mine)
    columns = [source, target, *(table[name] for name in ("iteration", "call", "backward", "owner", "result"))]
    return [tuple(int(x) for x in row) for row in np.stack(columns, axis=1)]


# --------------------------------------------------------------------------------------------------------- clocks


@dataclass(frozen=True)
class Clocks:
    """How times of different ranks compare.

    Attributes:
        method: "one clock" (one host), "messages" (several hosts, aligned), or "none": ranks cannot be compared.
        uncertainty_ns: how wrong a difference between two hosts' times may be; None where they cannot be compared.
        offsets_ns: what was taken from each rank's times.
    """

    method: str
    uncertainty_ns: int | None
    offsets_ns: tuple[int, ...]


def align(records: Sequence[RankRecords]) -> tuple[list[RankRecords], Clocks]:
    """The records on the clock of the first rank's host, where that can be done."""
    hosts = list(dict.fromkeys(one.host for one in records))
    if len(hosts) == 1:
        return list(records), Clocks("one clock", 0, (0,) * len(records))
    ahead = _bounds(records, hosts)
    if not np.isfinite(ahead).all():
        return list(records), Clocks("none", None, (0,) * len(records))
    offset = [round((ahead[0, h] - ahead[h, 0]) / 2) for h in range(len(hosts))]
    uncertainty = max(ahead[a, b] + ahead[b, a] for a in range(len(hosts)) for b in range(len(hosts))) / 2
    taken = tuple(int(offset[hosts.index(one.host)]) for one in records)
    aligned = [one.shifted(-by) for one, by in zip(records, taken, strict=True)]
    return aligned, Clocks("messages", math.ceil(uncertainty), taken)


def _bounds(records: Sequence[RankRecords], hosts: list[str]) -> NDArray[np.float64]:
    """[a, b]: the most that host b's clock can be ahead of host a's, in nanoseconds."""
    ahead = np.full((len(hosts), len(hosts)), np.inf)
    np.fill_diagonal(ahead, 0)
    host_of = {one.rank: hosts.index(one.host) for one in records}
    messages = match(records)
    took = messages.receive["end"] - messages.send["posted"]
    for source, target, most in zip(messages.source, messages.target, took, strict=True):
        a, b = host_of[int(source)], host_of[int(target)]
        ahead[a, b] = min(ahead[a, b], most)
    for middle in range(len(hosts)):  # from host to host by way of others
        ahead = np.minimum(ahead, ahead[:, middle : middle + 1] + ahead[middle : middle + 1])
    return ahead
