"""Define the shape of a report, and the check of a report file from any source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from burst_portable.errors import shown
from burst_portable.planning.plans import PASSES
from burst_portable.profiling.analysis.events import EVENT_COLUMNS, LANE_KINDS
from burst_portable.profiling.clocks import NAMES as SENSORS
from burst_portable.profiling.intervals import FIELDS, PARTS

_MAX_NUMBER = 1 << 63
_MAX_TEXT = 10_000


def find_error(data: dict[str, Any]) -> str:
    """Return the first missing or malformed value of a report with its path; "" if the report is valid."""
    return next(_shape_errors(data, _REPORT, "report"), "") or next(_relation_errors(data), "")


_TYPES: dict[str, Callable[[Any], bool]] = {
    "number": lambda value: type(value) in (int, float) and abs(value) < _MAX_NUMBER,
    "integer": lambda value: type(value) is int and abs(value) < _MAX_NUMBER,
    "count": lambda value: type(value) is int and 0 < value < _MAX_NUMBER,
    "switch": lambda value: type(value) in (int, bool) and value in (0, 1),
    # A short text without terminal control characters.
    "text": lambda value: isinstance(value, str) and len(value) < _MAX_TEXT and value.isprintable(),
}


def _each(kind: str, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), kind)


_PARTITION = {f"{name}_ns": "number" for name in FIELDS}
_SHARE = {**_PARTITION, "rank": "integer", "count": "count", **_each("number", "flops tiles received_bytes")}
_BOTTLENECK = {**_each("text", "kind text recommendation evidence"), **_each("number", "lost_ns share")}
_PASS = _each("number", "flops compute_ns")
_CONTENTION = _each("number", "ratio overlapped isolated lost_ns")

# A dict needs these keys and may have more; a value whose key ends with ? may be null. A list contains any number of
# the named item, at least one if `...` follows. A tuple lists the allowed values, a string is one of `_TYPES`.
_REPORT: dict[str, Any] = {
    **_each("text", "device backend"),
    "kernels": ["text"],
    "transport": _each("text", "used direct"),
    "level": ("basic", "standard", "kernels"),
    "clock": {"evidence": "text", "method": "text", "uncertainty_ns?": "number"},  # null: clocks cannot be compared
    "summary": _BOTTLENECK,
    "bottlenecks": [_BOTTLENECK],
    "ranks": [
        {
            **_PARTITION,
            **_each("number", "idle_between_kernels_ns idle_outside_attention_ns sent_bytes?"),
            "rank": "integer",
            "passes": {"forward": _PASS, "backward": _PASS},
        },
        ...,
    ],
    "ring_steps": [{"backward": "switch", "ring_step": "integer", "ranks": [_SHARE, ...]}],
    "layers": [{"backward": "switch", "attention_call": "integer", "ranks": [_SHARE, ...]}],
    "train_steps": [{"train_step": "integer"}],
    "training?": {
        **_each("number", "shortest_ns median_ns longest_ns longest_attention_ns attention_share"),
        **_each("integer", "longest_step longest_rank"),
        "steps": [
            {
                "train_step": "integer",
                "ranks": [{"rank": "integer", **_each("number", "duration_ns attention_ns")}, ...],
            },
            ...,
        ],
    },
    "links": [
        {
            **_each("number", "source target messages bytes observed_messages sender_wait_ns transfer_wait_ns"),
            "bytes_per_second?": "number",  # null: no transfer was observed
        }
    ],
    "plans": [
        {
            **_each("text", "strategy layout mask"),
            **_each("integer", "ranks seq_len batch heads kv_heads head_dim itemsize calls"),
            "hardware": _each("number", "tflops intra_node_bandwidth"),
        }
    ],
    "prediction": [{"rank": "integer", "pass": "text", **_each("number", "predicted_ns measured_ns")}],
    "peaks": [
        {
            "rank": "integer",
            **_each("number", "flops? bandwidth?"),
            "measured": "switch",
            **_each("text", "device dtype source"),
        }
    ],
    "efficiency": [
        {
            **_each("number", "rank plan count flops compute_ns planned_sent_bytes"),
            **_each("number", "flops_per_second? planned_flops_per_second? bytes_per_second? sent_bytes?"),
            **_each("number", "planned_bytes_per_second? ceiling_flops_per_second? ceiling_fraction? flops_per_byte?"),
            "pass": "text",
            "bound": (None, "compute", "memory"),
        }
    ],
    "balance": [{"pass": "text", **_each("number", "planned planned_rank measured measured_rank")}],
    "sensors": [{"rank": "integer", "reason": "text", "time_ns": ["number"]}],
    "contention": [{"rank": "integer", **_CONTENTION}],
    "drift": [{"rank": "integer", **_each("number", "ppm uncertainty_ppm"), "corrected": "switch"}],
    "kernel_trace": [
        {
            "rank": "integer",
            "on_device": "switch",
            "kernels": [
                {
                    **_each("text", "name kind activity"),
                    "backward": "switch",
                    "count": "count",
                    "time_ns": "number",
                    "ring_step": "integer",
                }
            ],
            "contention?": _CONTENTION,
            "partition?": _PARTITION,
        }
    ],
    "ablation": [
        {
            **_each("integer", "rank full_step_ns without_communication_ns without_computing_ns without_both_ns"),
            **_each("integer", "exposed_communication_ns exposed_computing_ns hidden_ns"),
            "repeat": "count",
        }
    ],
    "evidence": {},
    "events": {"kinds": ["text"], "ranks": [{"rank": "integer"}]},
}


def _shape_errors(value: Any, shape: Any, path: str) -> Iterator[str]:
    if isinstance(shape, dict) and isinstance(value, dict):
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if name not in value:
                yield f"{path} has no {name}"
            elif value[name] is not None or key == name:
                yield from _shape_errors(value[name], inner, f"{path}.{name}")
    elif isinstance(shape, list) and isinstance(value, list) and (value or shape[-1] is not ...):
        for index, one in enumerate(value):
            yield from _shape_errors(one, shape[0], f"{path}[{index}]")
    elif not (value in shape if isinstance(shape, tuple) else isinstance(shape, str) and _TYPES[shape](value)):
        empty = f"{'a' if value else 'an empty'} {type(value).__name__}"
        yield f"{path} is {empty if isinstance(value, dict | list) else f'{type(value).__name__} {shown(value)[:40]}'}"


def _relation_errors(data: dict[str, Any]) -> Iterator[str]:
    """Yield the errors of values that do not fit each other; the tables, bars and sentences rely on them."""
    yield from _event_errors(data["events"])
    for name in ("ranks", "ring_steps", "layers"):
        for index, one in enumerate(data[name]):
            for row in (one,) if name == "ranks" else one["ranks"]:
                parts = [row[f"{part}_ns"] for part in PARTS]
                if min(parts) < 0 or sum(parts) != row["span_ns"]:
                    yield f"report.{name}[{index}] has parts that do not add up to its span"
    for index, one in enumerate(data["ranks"]):
        for name in one["passes"].keys() - set(PASSES):  # every entry is summed
            yield f"report.ranks[{index}].passes has an unknown entry {name[:40]!r}"
    if data["prediction"] and not data["plans"]:
        yield "report.plans is an empty list, but report.prediction is not"
    for index, one in enumerate(data["kernel_trace"]):
        if data["kernel_trace"][0]["on_device"] and one["partition"] is None:
            yield f"report.kernel_trace[{index}] has no partition"
    for index, one in enumerate(data["efficiency"]):
        if one["ceiling_fraction"] is not None and None in (one["ceiling_flops_per_second"], one["bound"]):
            yield f"report.efficiency[{index}] has a ceiling_fraction without a ceiling"
    for index, one in enumerate(data["sensors"]):
        for name in (name for name in SENSORS if name in one):
            if any(_shape_errors(one[name], ["number"], "")) or len(one[name]) != len(one["time_ns"]):
                yield f"report.sensors[{index}].{name} is not a column of this table"
    for pair in data["evidence"].items():
        yield from _shape_errors(list(pair), ["text"], "report.evidence")


def _event_errors(events: dict[str, Any]) -> Iterator[str]:
    if events["kinds"] != list(LANE_KINDS):
        yield "report.events.kinds is another list"
    for index, rank in enumerate(events["ranks"]):
        path = f"report.events.ranks[{index}]"
        for name in EVENT_COLUMNS:
            column = rank.get(name)
            if not isinstance(column, list) or len(column) != len(rank["kind"]):
                yield f"{path}.{name} is not a column of this table"
            elif not all(map(_TYPES["integer"], column)):
                yield f"{path}.{name} has a value that is not an integer"
        if not set(rank["kind"]) <= set(range(len(events["kinds"]))) or not set(rank["backward"]) <= {0, 1}:
            yield f"{path} has an event of an unknown kind or pass"
