"""Test hardware spec files: they round-trip, impossible values raise, and a reason names the source of the rates."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import pytest

from burst_portable.config import Config, from_environment
from burst_portable.errors import InputError
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.hardware import INTER_NODE_BANDWIDTH, SCHEMA, HardwareSpec, as_json, read_hardware_spec
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.planner import plan

MIB = 1 << 20
ALL = HardwareSpec(
    tflops=123.5, intra_node_bandwidth=20.25, message_latency=1e-5, launch_latency=2e-5, backward_tflops=100.0,
    backward_launch_latency=3e-5,
    p2p_bandwidth=((MIB, 10.0), (8 * MIB, 20.25)), peer_copy_bandwidth=((MIB, 30.0),),
    all_to_all_bandwidth=((MIB, 15.0), (9 * MIB, 25.5)),
    comm_slowdown=(0.5, 0.25), comm_slowdown_high_priority=(0.25, 0.125), memory_bandwidth=900.0,
    kernel=KernelTraits(splits_tiles=True, single_pass_merge=True, writes_gradients=True, prefers_square=True),
    multi_launch_efficiency=0.8,
    long_kv_efficiency=(8192, 0.5), block=64, ranks_per_node=4, inter_node_bandwidth=5.5,
)  # fmt: skip
ABOUT = {"schema": SCHEMA, "device": "Abacus 9", "ranks": 4, "kernel": "beads", "date": "2026-11-22"}


def of_a_call(dtype: object = "float32", head_dim: object = 128) -> dict:
    return {**data(), "dtype": dtype, "head_dim": head_dim}


def data(**changes) -> dict:
    """Return the contents of a hardware spec file, with these fields changed."""
    return {**ABOUT, "hardware": {**as_json(ALL), **changes}}


def written(folder: Path, content: object, name: str = "hardware.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_read_hardware_spec_returns_every_field(tmp_path):
    defaults = HardwareSpec(1.0, 1.0)
    told = ("source", "inter_node_source")
    assert all(getattr(ALL, f.name) != getattr(defaults, f.name) for f in fields(HardwareSpec) if f.name not in told)
    path = written(tmp_path, data())
    found = read_hardware_spec(path)
    assert as_json(found.hardware) == as_json(ALL)
    assert (found.device, found.ranks, found.kernel, found.date) == ("Abacus 9", 4, "beads", "2026-11-22")
    assert found.hardware.source == f"measured on Abacus 9 ({path}, 2026-11-22)"
    hash(found.hardware)  # plans are looked up by its hash
    packed = tmp_path / "hardware.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert as_json(read_hardware_spec(packed).hardware) == as_json(ALL)


def test_read_hardware_spec_uses_defaults(tmp_path):
    path = written(tmp_path, {**ABOUT, "hardware": {"tflops": 2, "intra_node_bandwidth": 3}, "how": "for people"})
    assert as_json(read_hardware_spec(path).hardware) == as_json(HardwareSpec(2.0, 3.0))


def test_reason_names_source_of_hardware_spec(tmp_path):
    path = written(tmp_path, data())
    found = read_hardware_spec(path)
    measured = f"at rates measured on Abacus 9 ({path}, 2026-11-22)"
    for ranks, kernel, told in (
        (4, "beads", ""),
        (4, "", ""),
        (2, "beads", ", on 4 ranks and not 2"),
        (4, "flash", ", with the kernel beads and not flash"),
        (8, "flash", ", with the kernel beads and not flash, on 4 ranks and not 8"),
    ):
        auto = AutoStrategy(hardware=found.hardware_for(ranks, kernel))
        reason = plan(seq_len=4096, ranks=ranks, heads=8, strategy=auto).reason
        assert f"{measured}{told}" in reason
        assert reason.partition(measured + told)[2].startswith((" (", ", measured 5.5 GB/s between nodes of 4 ("))


@pytest.mark.parametrize("written_down", [5.5, INTER_NODE_BANDWIDTH])
def test_reason_names_source_of_inter_node_bandwidth(tmp_path, written_down):
    """Measured, given or assumed, also if the value equals the assumed one."""
    two_levels = read_hardware_spec(written(tmp_path, data(inter_node_bandwidth=written_down), "two.json")).hardware
    source, number = two_levels.source, f"{written_down:g} GB/s between nodes of"
    one_level = read_hardware_spec(
        written(tmp_path, data(ranks_per_node=0, inter_node_bandwidth=INTER_NODE_BANDWIDTH), "one.json")
    ).hardware
    for hardware, between, came_from in (
        (two_levels, f"measured {number} 4", source),
        (two_levels.with_nodes(4), f"measured {number} 4", source),
        (two_levels.with_nodes(2), f"measured {number} 2", f"{source}, between nodes of 4 and not 2"),
        (two_levels.with_nodes(2, written_down), f"given {number} 2", source),
        (two_levels.with_nodes(0, written_down), f"given {number} 4", source),
        (one_level.with_nodes(2), "assumed 50 GB/s between nodes of 2", one_level.source),
        (HardwareSpec(1.0, 1.0, ranks_per_node=2, inter_node_bandwidth=7.0), "7 GB/s between nodes of 2", ""),
    ):
        assert (hardware.between_nodes(), hardware.source) == (between, came_from)
        reason = plan(seq_len=4096, ranks=8, heads=8, strategy=AutoStrategy(hardware=hardware)).reason
        assert f"{came_from}, {between} (" in reason
    by_inner = plan(seq_len=4096, ranks=8, heads=8, strategy=AutoStrategy(ranks_per_node=2, hardware=two_levels)).reason
    assert f"{source}, between nodes of 4 and not 2, measured {number} 2 (" in by_inner


def test_source_names_other_dtype_and_head_size(tmp_path):
    """Older files contain neither, and not every caller has them."""
    found = read_hardware_spec(written(tmp_path, of_a_call()))
    assert (found.dtype, found.head_dim) == ("float32", 128)
    for call, told in (
        ({}, ""),
        ({"dtype": "float32", "head_dim": 128}, ""),
        ({"dtype": "bfloat16", "head_dim": 128}, ", of float32 and not bfloat16"),
        ({"dtype": "float32", "head_dim": 64}, ", with heads of 128 and not 64"),
        ({"dtype": "bfloat16", "head_dim": 64}, ", of float32 and not bfloat16, with heads of 128 and not 64"),
    ):
        assert found.hardware_for(4, **call).source == found.hardware.source + told
    early = read_hardware_spec(written(tmp_path, data()))
    assert (early.dtype, early.head_dim) == ("", 0)
    assert early.hardware_for(4, dtype="bfloat16", head_dim=64).source == early.hardware.source


NUMBERS = (
    "tflops",
    "intra_node_bandwidth",
    "inter_node_bandwidth",
    "backward_tflops",
    "memory_bandwidth",
    "message_latency",
    "launch_latency",
)
WRONG = [
    *((name, value) for name in NUMBERS for value in (-1.0, "1", None, True, [1.0], 1e300, 10**400)),
    *((name, 0) for name in ("tflops", "intra_node_bandwidth", "inter_node_bandwidth", "block")),
    ("p2p_bandwidth", [[MIB, 10.0], [MIB, 20.0]]),
    ("p2p_bandwidth", [[8 * MIB, 10.0], [MIB, 20.0]]),
    ("p2p_bandwidth", [[MIB, 0.0]]),
    ("p2p_bandwidth", [[0, 1.0]]),
    ("p2p_bandwidth", [[1.5, 1.0]]),
    ("p2p_bandwidth", [[MIB]]),
    ("p2p_bandwidth", {"1": 2.0}),
    ("p2p_bandwidth", [[i + 1, 1.0] for i in range(257)]),
    ("peer_copy_bandwidth", [[MIB, -1.0]]),
    ("all_to_all_bandwidth", [[MIB, None]]),
    ("comm_slowdown", [0.5]),
    ("comm_slowdown", [0.5, 1.5]),
    ("comm_slowdown", [-0.1, 0.5]),
    ("comm_slowdown_high_priority", [0.5]),
    ("comm_slowdown_high_priority", 0.5),
    ("long_kv_efficiency", [-1, 0.5]),
    ("long_kv_efficiency", [1, 0.0]),
    ("long_kv_efficiency", [1, 1.5]),
    ("multi_launch_efficiency", 1.5),
    ("multi_launch_efficiency", 0.0),
    ("kernel", {"splits_tiles": 1}),
    ("kernel", {"rounding": 0.5}),
    ("kernel", True),
    ("ranks_per_node", -1),
    ("ranks_per_node", 3),
    ("ranks_per_node", 8),
    ("colour", 1.0),
    ("source", "a friend"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: str(x)[:30])
def test_read_hardware_spec_rejects_impossible_numbers(tmp_path, name, value):
    path = written(tmp_path, data(**{name: value}))
    with pytest.raises(InputError) as refused:
        read_hardware_spec(path)
    told = str(refused.value)
    assert str(path) in told
    assert name in told
    assert "; got " in told
    assert "; allowed: " in told
    assert "burst-portable measure --json FILE" in told
    assert len(told) < 1500


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "schema None"),
        ({**data(), "schema": "burst_portable.rates/1"}, "allowed: burst_portable.hardware_spec/3"),
        (json.dumps(data()).replace("123.5", "NaN"), "NaN"),
        (json.dumps(data()).replace("123.5", "1e999"), "too large"),
        ({**data(), "hardware": None}, "hardware cannot be used"),
        ({**data(), "hardware": {"intra_node_bandwidth": 1.0}}, "no tflops"),
        ({**data(), "device": ""}, "device cannot be used"),
        ({**data(), "device": "a\nb"}, "device cannot be used"),
        ({**data(), "kernel": 7}, "kernel cannot be used"),
        ({**data(), "date": "x" * 201}, "date cannot be used"),
        ({**data(), "ranks": 0}, "ranks cannot be used"),
        ({**data(), "ranks": 2.0}, "ranks cannot be used"),
        (of_a_call(dtype=7), "dtype cannot be used"),
        (of_a_call(dtype=""), "dtype cannot be used"),
        (of_a_call(head_dim=0), "head_dim cannot be used"),
        (of_a_call(head_dim="128"), "head_dim cannot be used"),
        (" " * (1 << 20) + json.dumps(data()), "more than 1 MiB"),
        ("[" * 100_000, "nested too deeply"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_read_hardware_spec_rejects_other_files(tmp_path, content, told):
    with pytest.raises(InputError, match=told) as refused:
        read_hardware_spec(written(tmp_path, content))
    assert str(refused.value).endswith("`burst-portable measure --json FILE` writes one")


def test_read_hardware_spec_rejects_missing_file_and_folder(tmp_path):
    with pytest.raises(InputError, match=r"none\.json is not a hardware spec.*got No such file.*measure --json FILE"):
        read_hardware_spec(tmp_path / "none.json")
    with pytest.raises(InputError, match="a folder"):
        read_hardware_spec(tmp_path)
    with pytest.raises(InputError, match="no hardware spec file is named; got an empty name"):
        read_hardware_spec("")


def test_hardware_spec_setting_names_a_file():
    assert (
        Config().hardware_spec
        == from_environment({}).hardware_spec
        == from_environment({"BURST_HARDWARE_SPEC": ""}).hardware_spec
        == ""
    )
    assert from_environment({"BURST_HARDWARE_SPEC": "here.json"}) == Config(hardware_spec="here.json")
    assert Config(hardware_spec=Path("here.json")).hardware_spec == "here.json"  # type: ignore[arg-type]
    for wrong in (None, 3, "a\0b", b"x"):
        with pytest.raises(InputError, match="hardware_spec must name a file"):
            Config(hardware_spec=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "allowed"),
    [
        ({"tflops": -1}, "above 0"),
        ({"intra_node_bandwidth": 0.0}, "above 0"),
        ({"inter_node_bandwidth": float("nan")}, "above 0"),
        ({"tflops": float("inf")}, "above 0"),
        ({"message_latency": -1e-6}, "of at least 0"),
        ({"backward_tflops": -1}, "of at least 0"),
        ({"memory_bandwidth": "fast"}, "of at least 0"),
    ],
)
def test_hardware_spec_rejects_numbers_without_a_time(changes, allowed):
    (name,) = changes
    with pytest.raises(
        InputError, match=f"HardwareSpec: {name} cannot be used; got .*allowed: a finite number {allowed}"
    ):
        HardwareSpec(**{"tflops": 1.0, "intra_node_bandwidth": 1.0, **changes})
