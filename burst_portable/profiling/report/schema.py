"""Define the shape of a report, and the check of a report file from any source."""

from __future__ import annotations

from typing import Any

from burst_portable.profiling.analysis.analyze import COLUMNS, LANE_KINDS
from burst_portable.profiling.clocks import NAMES as SENSORS
from burst_portable.profiling.intervals import PARTS

_MAX_NUMBER = 1 << 63
_MAX_TEXT = 10_000


def find_error(data: dict[str, Any]) -> str:
    """Return the first missing or malformed value of a report with its path; "" if the report is valid."""
    try:
        _check(data, _REPORT, "report")
        _check_events(data["events"])
        _check_partitions(data)
        if data["prediction"] and not data["plans"]:
            raise _InvalidReportError("report.plans is an empty list, but report.prediction is not")
        _check_kernel_trace(data["kernel_trace"])
        if data["training"] is not None:
            _check(data["training"], _TRAINING, "report.training")
        for index, one in enumerate(data["efficiency"]):
            if one["ceiling_fraction"] is not None and None in (one["ceiling_flops_per_second"], one["bound"]):
                raise _InvalidReportError(f"report.efficiency[{index}] has a ceiling_fraction without a ceiling")
        for index, one in enumerate(data["sensors"]):
            for name in (name for name in SENSORS if name in one):
                if not _curve(one[name]) or len(one[name]) != len(one["time_ns"]):
                    raise _InvalidReportError(f"report.sensors[{index}].{name} is not a column of this table")
        for name, text in data["evidence"].items():
            _check([name, text], [_text], "report.evidence")
    except _InvalidReportError as error:
        return str(error)
    return ""


class _InvalidReportError(Exception):
    """The path of an invalid value, and its error."""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _MAX_NUMBER


def _curve(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _maybe(value: Any) -> bool:
    return value is None or _number(value)


def _integer(value: Any) -> bool:
    return type(value) is int and abs(value) < _MAX_NUMBER


def _count(value: Any) -> bool:
    return type(value) is int and 0 < value < _MAX_NUMBER


def _switch(value: Any) -> bool:
    return type(value) in (int, bool) and value in (0, 1)


def _text(value: Any) -> bool:
    """Return whether this is a short text without terminal control characters."""
    return isinstance(value, str) and len(value) < _MAX_TEXT and value.isprintable()


def _anything(value: Any) -> bool:
    return True


_PARTITION = {f"{name}_ns": _number for name in ("span", "comm", "overlap", "blocking", *PARTS)}
_SHARE = {
    **_PARTITION,
    "rank": _integer,
    "count": _count,
    "flops": _number,
    "tiles": _number,
    "received_bytes": _number,
}
_BOTTLENECK = {
    **dict.fromkeys(("kind", "text", "recommendation", "evidence"), _text),
    "lost_ns": _number,
    "share": _number,
}
_PASS = {"flops": _number, "compute_ns": _number}
_SIZES = ("ranks", "seq_len", "batch", "heads", "kv_heads", "head_dim", "itemsize", "calls")
_KERNEL = {
    **dict.fromkeys(("name", "kind", "activity"), _text),
    "backward": _switch,
    "count": _count,
    "time_ns": _number,
    "ring_step": _integer,
}
_CONTENTION = dict.fromkeys(("ratio", "overlapped", "isolated", "lost_ns"), _number)
_MEASURED_OR_UNKNOWN = (
    "flops_per_second",
    "planned_flops_per_second",
    "bytes_per_second",
    "planned_bytes_per_second",
    "sent_bytes",
    "ceiling_flops_per_second",
    "ceiling_fraction",
    "flops_per_byte",
)
_ABLATION = (
    *("rank", "full_step_ns", "without_communication_ns", "without_computing_ns", "without_both_ns"),
    *("exposed_communication_ns", "exposed_computing_ns", "hidden_ns"),
)

# A dict needs these keys and may have more. A list contains any number of the named item, at least one if `...`
# follows.
_REPORT: dict[str, Any] = {
    "device": _text,
    "level": lambda value: value in ("basic", "standard", "kernels"),
    "clock": {"evidence": _text, "method": _text, "uncertainty_ns": _maybe},  # None: clocks cannot be compared
    "summary": _BOTTLENECK,
    "bottlenecks": [_BOTTLENECK],
    "ranks": [
        {
            **_PARTITION,
            **dict.fromkeys(("idle_between_kernels_ns", "idle_outside_attention_ns", "sent_bytes"), _number),
            "rank": _integer,
            "passes": {"forward": _PASS, "backward": _PASS},
        },
        ...,
    ],
    "ring_steps": [{"backward": _switch, "ring_step": _integer, "ranks": [_SHARE, ...]}],
    "layers": [{"backward": _switch, "attention_call": _integer, "ranks": [_SHARE, ...]}],
    "train_steps": [{"train_step": _integer}],
    "training": _anything,
    "links": [
        {
            **dict.fromkeys(("source", "target", "messages", "bytes", "observed_messages"), _number),
            **dict.fromkeys(("sender_wait_ns", "transfer_wait_ns"), _number),
            "bytes_per_second": _maybe,  # None: no transfer was observed
        }
    ],
    "plans": [
        {
            **dict.fromkeys(("strategy", "layout", "mask"), _text),
            **dict.fromkeys(_SIZES, _integer),
            "hardware": {"tflops": _number, "intra_node_bandwidth": _number},
        }
    ],
    "prediction": [{"rank": _integer, "pass": _text, "predicted_ns": _number, "measured_ns": _number}],
    "peaks": [
        {
            "rank": _integer,
            "flops": _maybe,
            "bandwidth": _maybe,
            "measured": _switch,
            **dict.fromkeys(("device", "dtype", "source"), _text),
        }
    ],
    "efficiency": [
        {
            **dict.fromkeys(("rank", "plan", "count", "flops", "compute_ns", "planned_sent_bytes"), _number),
            **dict.fromkeys(_MEASURED_OR_UNKNOWN, _maybe),
            "pass": _text,
            "bound": lambda value: value in (None, "compute", "memory"),
        }
    ],
    "balance": [{"pass": _text, **dict.fromkeys(("planned", "planned_rank", "measured", "measured_rank"), _number)}],
    "sensors": [{"rank": _integer, "reason": _text, "time_ns": _curve}],
    "contention": [{"rank": _integer, **_CONTENTION}],
    "drift": [{"rank": _integer, "ppm": _number, "uncertainty_ppm": _number, "corrected": _switch}],
    "kernel_trace": [
        {
            "rank": _integer,
            "on_device": _switch,
            "kernels": [_KERNEL],
            "contention": _anything,
            "partition": _anything,
        }
    ],
    "ablation": [{**dict.fromkeys(_ABLATION, _integer), "repeat": _count}],
    "evidence": {},
    "events": {"kinds": [_text], "ranks": [{"rank": _integer}]},
}
_TRAINING = {
    **dict.fromkeys(("shortest_ns", "median_ns", "longest_ns", "longest_attention_ns", "attention_share"), _number),
    **dict.fromkeys(("longest_step", "longest_rank"), _integer),
    "steps": [
        {
            "train_step": _integer,
            "ranks": [{"rank": _integer, "duration_ns": _number, "attention_ns": _number}, ...],
        },
        ...,
    ],
}


def _check(value: Any, shape: Any, path: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise _InvalidReportError(f"{path} is {_describe(value)}")
        for name, inner in shape.items():
            if name not in value:
                raise _InvalidReportError(f"{path} has no {name}")
            _check(value[name], inner, f"{path}.{name}")
    elif isinstance(shape, list):
        if not isinstance(value, list) or (shape[-1] is ... and not value):
            raise _InvalidReportError(f"{path} is {_describe(value)}")
        for index, one in enumerate(value):
            _check(one, shape[0], f"{path}[{index}]")
    elif not shape(value):
        raise _InvalidReportError(f"{path} is {_describe(value)}")


def _check_partitions(data: dict[str, Any]) -> None:
    """Raise if a part is negative or the parts do not add up to the span: the tables and bars rely on both."""
    for name in ("ranks", "ring_steps", "layers"):
        for index, one in enumerate(data[name]):
            for row in (one,) if name == "ranks" else one["ranks"]:
                parts = [row[f"{part}_ns"] for part in PARTS]
                if min(parts) < 0 or sum(parts) != row["span_ns"]:
                    raise _InvalidReportError(f"report.{name}[{index}] has parts that do not add up to its span")


def _check_events(events: dict[str, Any]) -> None:
    """Raise unless all columns have the same length, contain integers, and refer to known kinds and passes."""
    if events["kinds"] != list(LANE_KINDS):
        raise _InvalidReportError("report.events.kinds is another list")
    for index, rank in enumerate(events["ranks"]):
        path = f"report.events.ranks[{index}]"
        for name in COLUMNS:
            column = rank.get(name)
            if not isinstance(column, list) or len(column) != len(rank["kind"]):
                raise _InvalidReportError(f"{path}.{name} is not a column of this table")
            if not all(map(_integer, column)):
                raise _InvalidReportError(f"{path}.{name} has a value that is not an integer")
        if not set(rank["kind"]) <= set(range(len(events["kinds"]))) or not set(rank["backward"]) <= {0, 1}:
            raise _InvalidReportError(f"{path} has an event of an unknown kind or pass")


def _check_kernel_trace(ranks: list[dict[str, Any]]) -> None:
    """Raise unless all ranks have the fields that a trace of a device adds."""
    for index, one in enumerate(ranks):
        if one["contention"] is not None:
            _check(one["contention"], _CONTENTION, f"report.kernel_trace[{index}].contention")
        if ranks[0]["on_device"]:
            shape = {f"{name}_ns": _number for name in ("span", *PARTS)}
            _check(one["partition"], shape, f"report.kernel_trace[{index}].partition")


def _describe(value: Any) -> str:
    """Return the type and the start of a value as text."""
    if isinstance(value, (dict, list)):
        return f"{'an empty' if not value else 'a'} {type(value).__name__}"
    return f"{type(value).__name__} {str(value)[:40]!r}"
