"""Convert a report to a trace in Chrome's JSON for ui.perfetto.dev: a process per rank, three kinds of tracks."""

from __future__ import annotations

from typing import Any

from burst_portable.planning.plans import PASSES

_TRACKS = {"compute": 0, "copy": 0, "wait": 1, "collective": 1, "post": 1, "transfer": 2}
_NAMES = ("compute and copies", "communication: waiting", "communication: transfers")


def trace(data: dict[str, Any]) -> dict[str, Any]:
    """Return complete events in microseconds with three decimals, so that nanoseconds are kept."""
    kinds = data["events"]["kinds"]
    events: list[dict[str, Any]] = []
    for one in data["events"]["ranks"]:
        rank, tracks = one["rank"], _tracks(one, kinds)
        named: list[tuple[str, dict[str, Any]]] = [("process_name", {"args": {"name": f"rank {rank}"}})]
        named.append(("process_sort_index", {"args": {"sort_index": rank}}))
        for track in sorted({*range(len(_NAMES)), *tracks}, key=lambda track: (track % len(_NAMES), track)):
            again = f" ({track // len(_NAMES) + 1})" if track >= len(_NAMES) else ""
            name = _NAMES[track % len(_NAMES)] + again
            named.append(("thread_name", {"tid": track, "args": {"name": name}}))
            named.append(("thread_sort_index", {"tid": track, "args": {"sort_index": track % len(_NAMES)}}))
        events += [{"ph": "M", "name": name, "pid": rank, **facts} for name, facts in named]
        for i, number in enumerate(one["kind"]):
            kind = kinds[number]
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": tracks[i],
                    "ts": one["start_ns"][i] / 1000,
                    "dur": one["duration_ns"][i] / 1000,
                    "name": _name(kind, one["a"][i], one["b"][i]),
                    "cat": kind,
                    "args": {
                        "pass": PASSES[one["backward"][i]],
                        "ring_step": one["ring_step"][i],
                        "attention_call": one["attention_call"][i],
                        "train_step": one["train_step"][i],
                        **({} if kind == "copy" else {"FLOPs" if kind == "compute" else "bytes": one["work"][i]}),
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schema": data["schema"]}}


def _tracks(one: dict[str, Any], kinds: list[str]) -> list[int]:
    """Return the track of each event, given in the order of their starts.

    Perfetto drops events that overlap on one track, so overlapping events of a kind get more tracks of the same name.
    """
    free: dict[int, int] = {}  # by track: the end of its last event
    tracks = []
    for number, start, took in zip(one["kind"], one["start_ns"], one["duration_ns"], strict=True):
        track = _TRACKS[kinds[number]]
        while took and free.get(track, start) > start:
            track += len(_NAMES)
        free[track] = max(free.get(track, start), start + took)
        tracks.append(track)
    return tracks


def _name(kind: str, a: int, b: int) -> str:
    if kind == "compute":
        q, kv = ("(several)" if owner < 0 else owner for owner in (a, b))
        return f"q{q} x kv{kv}"
    if kind in ("wait", "transfer"):
        return f"{'wait for' if kind == 'wait' else 'from'} rank {a}: block {b}"
    return {"collective": "collective", "copy": "copies", "post": "start transfers"}[kind]
