"""What a report must look like before it is shown: a file may be of somebody else's making."""

from __future__ import annotations

from typing import Any

from burst_portable.profiling.analysis.analyze import COLUMNS, LANE_KINDS
from burst_portable.profiling.clocks import NAMES as SENSORS
from burst_portable.profiling.intervals import PARTS

_MOST = 1 << 63
_LONGEST = 10_000


def what_is_wrong(data: dict[str, Any]) -> str:
    """The first thing that a report has not, or has otherwise, with its place; "" if it is whole."""
    try:
        _check(data, _REPORT, "report")
        _check_events(data["events"])
        _check_partitions(data)
        if data["prediction"] and not data["plans"]:
            raise _Wrong("report.plans is an empty list, beside predictions")
        _check_traced(data.get("traced", []))
        if data.get("training") is not None:
            _check(data["training"], _TRAINING, "report.training")
        for name, shape in _LATER.items():
            _check(data.get(name, []), [shape], f"report.{name}")
        for index, one in enumerate(data.get("achieved", [])):
            if one["of_ceiling"] is not None and None in (one["ceiling"], one["bound"]):
                raise _Wrong(f"report.achieved[{index}] is a share of no ceiling")
        for index, one in enumerate(data.get("sensors", [])):
            for name in (name for name in SENSORS if name in one):
                if not _curve(one[name]) or len(one[name]) != len(one["time"]):
                    raise _Wrong(f"report.sensors[{index}].{name} is not a column of this table")
        for name, text in data["evidence"].items():
            _check([name, text], [_text], "report.evidence")
    except _Wrong as wrong:
        return str(wrong)
    return ""


class _Wrong(Exception):
    """A place, and what should be there."""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MOST


def _curve(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _maybe(value: Any) -> bool:
    return value is None or _number(value)


def _whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _MOST


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST


def _switch(value: Any) -> bool:
    return type(value) in (int, bool) and value in (0, 1)


def _text(value: Any) -> bool:
    """Whether this is a short text without terminal control characters."""
    return isinstance(value, str) and len(value) < _LONGEST and value.isprintable()


def _anything(value: Any) -> bool:
    return True


_PARTITION = dict.fromkeys(("span", "comm", "overlap", "blocking", *PARTS), _number)
_SHARE = {**_PARTITION, "rank": _whole, "times": _count, "flops": _number, "tiles": _number, "received_bytes": _number}
_LOSS = {"kind": _text, "text": _text, "advice": _text, "evidence": _text, "lost": _number, "share": _number}
_PASS = {"flops": _number, "compute": _number}
_SIZES = ("ranks", "seq_len", "batch", "heads", "kv_heads", "head_dim", "itemsize", "calls")
_KERNEL = {
    **dict.fromkeys(("name", "kind", "what"), _text),
    "backward": _switch,
    "times": _count,
    "time": _number,
    "step": _whole,
}

# A dict needs these keys and may have more; a list holds any number of what it names, with `...` at least one.
_REPORT: dict[str, Any] = {
    "device": _text,
    "clock": {"evidence": _text, "method": _text, "uncertainty_ns": _maybe},  # None: clocks that cannot be compared
    "verdict": _LOSS,
    "losses": [_LOSS],
    "ranks": [
        {
            **_PARTITION,
            **dict.fromkeys(("idle_between_kernels", "idle_outside_attention", "sent_bytes"), _number),
            "rank": _whole,
            "passes": {"forward": _PASS, "backward": _PASS},
        },
        ...,
    ],
    "steps": [{"backward": _switch, "step": _whole, "ranks": [_SHARE, ...]}],
    "layers": [{"backward": _switch, "call": _whole, "ranks": [_SHARE, ...]}],
    "iterations": [{"iteration": _whole}],
    "links": [
        {
            **dict.fromkeys(("source", "target", "messages", "bytes", "seen"), _number),
            **dict.fromkeys(("waited_late", "waited_on_its_way"), _number),
            "bytes_per_second": _maybe,  # no transfer was seen
        }
    ],
    "plans": [
        {
            **dict.fromkeys(("strategy", "layout", "mask"), _text),
            **dict.fromkeys(_SIZES, _whole),
            "hardware": {"tflops": _number, "intra_node_bandwidth": _number},
        }
    ],
    "prediction": [{"rank": _whole, "pass": _text, "predicted": _number, "measured": _number}],
    "evidence": {},
    "events": {"kinds": [_text], "ranks": [{"rank": _whole}]},
}
_MAYBE = (
    "flop_rate",
    "planned_flop_rate",
    "bandwidth",
    "planned_bandwidth",
    "sent",
    "ceiling",
    "of_ceiling",
    "intensity",
)
_CONTENTION = dict.fromkeys(("ratio", "beside", "alone", "lost"), _number)
_LATER: dict[str, Any] = {  # files of earlier releases have none of these
    "peaks": {
        "rank": _whole,
        "flops": _maybe,
        "bandwidth": _maybe,
        "measured": _switch,
        **dict.fromkeys(("device", "dtype", "source"), _text),
    },
    "achieved": {
        **dict.fromkeys(("rank", "plan", "times", "flops", "compute", "planned_sent"), _number),
        **dict.fromkeys(_MAYBE, _maybe),
        "pass": _text,
        "bound": lambda value: value in (None, "compute", "memory"),
    },
    "balance": {"pass": _text, **dict.fromkeys(("planned", "planned_rank", "measured", "measured_rank"), _number)},
    "sensors": {"rank": _whole, "reason": _text, "time": _curve},
    "contention": {"rank": _whole, **_CONTENTION},
    "drift": {"rank": _whole, "ppm": _number, "uncertainty_ppm": _number, "corrected": _switch},
    "ablation": {
        **dict.fromkeys(("rank", "whole", "without_communication", "without_computing", "without_both"), _whole),
        **dict.fromkeys(("exposed_communication", "exposed_computing", "hidden"), _whole),
        "repeat": _count,
    },
}
_TRAINING = {
    **dict.fromkeys(("shortest", "median", "longest", "longest_attention", "attention_share"), _number),
    **dict.fromkeys(("longest_step", "longest_rank"), _whole),
    "steps": [{"iteration": _whole, "ranks": [{"rank": _whole, "duration": _number, "attention": _number}, ...]}, ...],
}
_TRACED = {"rank": _whole, "on_device": _switch, "kernels": [_KERNEL], "contention": _anything, "partition": _anything}


def _check(value: Any, shape: Any, place: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise _Wrong(f"{place} is {_said(value)}")
        for name, inner in shape.items():
            if name not in value:
                raise _Wrong(f"{place} has no {name}")
            _check(value[name], inner, f"{place}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list) or (shape[-1] is ... and not value):
            raise _Wrong(f"{place} is {_said(value)}")
        for index, one in enumerate(value):
            _check(one, shape[0], f"{place}[{index}]")
    elif not shape(value):
        raise _Wrong(f"{place} is {_said(value)}")


def _check_partitions(data: dict[str, Any]) -> None:
    """Parts of a time are at least 0, and add up to it exactly: whoever reads a report takes that for granted."""
    for name in ("ranks", "steps", "layers"):
        for index, one in enumerate(data[name]):
            for row in (one,) if name == "ranks" else one["ranks"]:
                parts = [row[part] for part in PARTS]
                if min(parts) < 0 or sum(parts) != row["span"]:
                    raise _Wrong(f"report.{name}[{index}] whose parts do not add up to its span")


def _check_events(events: dict[str, Any]) -> None:
    """Columns of whole numbers, equally long, that name kinds which there are."""
    known = list(LANE_KINDS)
    if events["kinds"] not in (known, known[: known.index("copy")]):  # earlier files have no copies
        raise _Wrong("report.events.kinds is another list")
    for index, rank in enumerate(events["ranks"]):
        place = f"report.events.ranks[{index}]"
        for name in COLUMNS:
            column = rank.get(name)
            if not isinstance(column, list) or len(column) != len(rank["kind"]):
                raise _Wrong(f"{place}.{name} is not a column of this table")
            if not all(map(_whole, column)):
                raise _Wrong(f"{place}.{name} has something other than whole numbers")
        if not set(rank["kind"]) <= set(range(len(events["kinds"]))) or not set(rank["backward"]) <= {0, 1}:
            raise _Wrong(f"{place} has an event of no kind or pass")


def _check_traced(traced: Any) -> None:
    """What the deep level adds."""
    _check(traced, [_TRACED], "report.traced")
    for index, one in enumerate(traced):
        if one["contention"] is not None:
            _check(one["contention"], _CONTENTION, f"report.traced[{index}].contention")
        if traced[0]["on_device"]:
            _check(one["partition"], dict.fromkeys(("span", *PARTS), _number), f"report.traced[{index}].partition")


def _said(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, (dict, list)):
        return f"{'an empty' if not value else 'a'} {type(value).__name__}"
    return f"{type(value).__name__} {str(value)[:40]!r}"
