"""A trace in Chrome's JSON, for ui.perfetto.dev: a process per rank, tracks for kernels, waiting and transfers."""

from __future__ import annotations

from typing import Any

from burst_portable.planning.plans import PASSES

_TRACKS = {"compute": 0, "copy": 0, "wait": 1, "collective": 1, "post": 1, "transfer": 2}
_NAMES = ("compute and copies", "communication: waiting", "communication: transfers")


def trace(data: dict[str, Any]) -> dict[str, Any]:
    """Complete events in microseconds with three decimals: nanoseconds survive."""
    kinds = data["events"]["kinds"]
    events: list[dict[str, Any]] = []
    for one in data["events"]["ranks"]:
        rank = one["rank"]
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        tracks = _tracks(one, kinds)
        for track in sorted({*range(len(_NAMES)), *tracks}, key=lambda track: (track % len(_NAMES), track)):
            again = f" ({track // len(_NAMES) + 1})" if track >= len(_NAMES) else ""
            for name, args in (
                ("thread_name", {"name": _NAMES[track % len(_NAMES)] + again}),
                ("thread_sort_index", {"sort_index": track % len(_NAMES)}),
            ):
                events.append({"ph": "M", "name": name, "pid": rank, "tid": track, "args": args})
        for i, number in enumerate(one["kind"]):
            kind = kinds[number]
            events.append(
                {
                    "ph": "X",
                    "pid": rank,
                    "tid": tracks[i],
                    "ts": one["start"][i] / 1000,
                    "dur": one["duration"][i] / 1000,
                    "name": _name(kind, one["a"][i], one["b"][i]),
                    "cat": kind,
                    "args": {
                        "pass": PASSES[one["backward"][i]],
                        "step": one["step"][i],
                        "layer": one["call"][i],
                        "training step": one["iteration"][i],
                        **({} if kind == "copy" else {"FLOPs" if kind == "compute" else "bytes": one["work"][i]}),
                    },
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schema": data["schema"]}}


def _tracks(one: dict[str, Any], kinds: list[str]) -> list[int]:
    """The track of each event: those of a kind that run beside one another get more tracks of that name, since Perfetto
    leaves events out that overlap on one. Events come in the order of their starts.
    """
    free: dict[int, int] = {}  # by track: when its last event is over
    tracks = []
    for number, start, took in zip(one["kind"], one["start"], one["duration"], strict=True):
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
    return {"collective": "all ranks together", "copy": "copies", "post": "start transfers"}[kind]
