"""Files of rates: what is written is read back, what no machine has is refused, a reason says where they come from."""

from __future__ import annotations

import gzip
import json
from dataclasses import fields
from pathlib import Path

import pytest

from burst_portable.config import Config, from_environment
from burst_portable.errors import InputError
from burst_portable.planning.call import KernelTraits
from burst_portable.planning.rates import OUTER_GBPS, SCHEMA, Rates, as_json, read_rates
from burst_portable.strategies.auto import AutoStrategy
from burst_portable.strategies.planner import plan

MIB = 1 << 20
ALL = Rates(
    tflops=123.5, gbps=20.25, hop_latency=1e-5, launch_latency=2e-5, backward=100.0, backward_launch_latency=3e-5,
    link=((MIB, 10.0), (8 * MIB, 20.25)), direct=((MIB, 30.0),), spread=((MIB, 15.0), (9 * MIB, 25.5)),
    comm_slowdown=(0.5, 0.25), comm_slowdown_high_priority=(0.25, 0.125), memory=900.0,
    kernel=KernelTraits(splits_tiles=True, single_pass_merge=True, writes_gradients=True, prefers_square=True),
    multi_launch_efficiency=0.8,
    long_kv_efficiency=(8192, 0.5), block=64, node=4, outer_gbps=5.5,
)  # fmt: skip
ABOUT = {"schema": SCHEMA, "device": "Abacus 9", "ranks": 4, "kernel": "beads", "date": "2026-11-22"}


def of_a_call(dtype: object = "float32", head_dim: object = 128) -> dict:
    return {**data(), "dtype": dtype, "head_dim": head_dim}


def data(**changes) -> dict:
    """What a file holds; changes to its rates by name."""
    return {**ABOUT, "rates": {**as_json(ALL), **changes}}


def written(folder: Path, content: object, name: str = "rates.json") -> Path:
    path = folder / name
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_every_field_is_read_back(tmp_path):
    defaults = Rates(1.0, 1.0)
    told = ("source", "outer_source")
    assert all(getattr(ALL, f.name) != getattr(defaults, f.name) for f in fields(Rates) if f.name not in told)
    path = written(tmp_path, data())
    found = read_rates(path)
    assert as_json(found.rates) == as_json(ALL)
    assert (found.device, found.ranks, found.kernel, found.date) == ("Abacus 9", 4, "beads", "2026-11-22")
    assert found.rates.source == f"measured on Abacus 9 ({path}, 2026-11-22)"
    hash(found.rates)  # plans are looked up by it
    packed = tmp_path / "rates.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert as_json(read_rates(packed).rates) == as_json(ALL)


def test_what_is_left_out_keeps_its_default(tmp_path):
    path = written(tmp_path, {**ABOUT, "rates": {"tflops": 2, "gbps": 3}, "how": "for people"})
    assert as_json(read_rates(path).rates) == as_json(Rates(2.0, 3.0))


def test_the_reason_says_where_the_rates_come_from(tmp_path):
    path = written(tmp_path, data())
    found = read_rates(path)
    measured = f"at rates measured on Abacus 9 ({path}, 2026-11-22)"
    for ranks, kernel, told in (
        (4, "beads", ""),
        (4, "", ""),
        (2, "beads", ", on 4 ranks and not 2"),
        (4, "flash", ", with the kernel beads and not flash"),
        (8, "flash", ", with the kernel beads and not flash, on 4 ranks and not 8"),
    ):
        auto = AutoStrategy(rates=found.rates_for(ranks, kernel))
        reason = plan(seq_len=4096, ranks=ranks, heads=8, strategy=auto).reason
        assert f"{measured}{told}" in reason
        assert reason.partition(measured + told)[2].startswith((" (", ", measured 5.5 GB/s between nodes of 4 ("))


@pytest.mark.parametrize("written_down", [5.5, OUTER_GBPS])
def test_what_is_between_nodes_says_where_it_comes_from(tmp_path, written_down):
    """Measured, given beside what was measured, or assumed: also where it happens to be what is assumed."""
    two_levels = read_rates(written(tmp_path, data(outer_gbps=written_down), "two.json")).rates
    source, number = two_levels.source, f"{written_down:g} GB/s between nodes of"
    one_level = read_rates(written(tmp_path, data(node=0, outer_gbps=OUTER_GBPS), "one.json")).rates
    for rates, between, came_from in (
        (two_levels, f"measured {number} 4", source),
        (two_levels.with_nodes(4), f"measured {number} 4", source),
        (two_levels.with_nodes(2), f"measured {number} 2", f"{source}, between nodes of 4 and not 2"),
        (two_levels.with_nodes(2, written_down), f"given {number} 2", source),
        (two_levels.with_nodes(0, written_down), f"given {number} 4", source),
        (one_level.with_nodes(2), "assumed 50 GB/s between nodes of 2", one_level.source),
        (Rates(1.0, 1.0, node=2, outer_gbps=7.0), "7 GB/s between nodes of 2", ""),
    ):
        assert (rates.between_nodes(), rates.source) == (between, came_from)
        reason = plan(seq_len=4096, ranks=8, heads=8, strategy=AutoStrategy(rates=rates)).reason
        assert f"{came_from}, {between} (" in reason
    by_inner = plan(seq_len=4096, ranks=8, heads=8, strategy=AutoStrategy(inner=2, rates=two_levels)).reason
    assert f"{source}, between nodes of 4 and not 2, measured {number} 2 (" in by_inner


def test_the_source_says_that_dtype_and_head_size_are_others(tmp_path):
    """Where both are known: files of before have neither, and not every caller has."""
    found = read_rates(written(tmp_path, of_a_call()))
    assert (found.dtype, found.head_dim) == ("float32", 128)
    for call, told in (
        ({}, ""),
        ({"dtype": "float32", "head_dim": 128}, ""),
        ({"dtype": "bfloat16", "head_dim": 128}, ", of float32 and not bfloat16"),
        ({"dtype": "float32", "head_dim": 64}, ", with heads of 128 and not 64"),
        ({"dtype": "bfloat16", "head_dim": 64}, ", of float32 and not bfloat16, with heads of 128 and not 64"),
    ):
        assert found.rates_for(4, **call).source == found.rates.source + told
    early = read_rates(written(tmp_path, data()))
    assert (early.dtype, early.head_dim) == ("", 0)
    assert early.rates_for(4, dtype="bfloat16", head_dim=64).source == early.rates.source


NUMBERS = ("tflops", "gbps", "outer_gbps", "backward", "memory", "hop_latency", "launch_latency")
WRONG = [
    *((name, value) for name in NUMBERS for value in (-1.0, "1", None, True, [1.0], 1e300, 10**400)),
    *((name, 0) for name in ("tflops", "gbps", "outer_gbps", "block")),
    ("link", [[MIB, 10.0], [MIB, 20.0]]),
    ("link", [[8 * MIB, 10.0], [MIB, 20.0]]),
    ("link", [[MIB, 0.0]]),
    ("link", [[0, 1.0]]),
    ("link", [[1.5, 1.0]]),
    ("link", [[MIB]]),
    ("link", {"1": 2.0}),
    ("link", [[i + 1, 1.0] for i in range(257)]),
    ("direct", [[MIB, -1.0]]),
    ("spread", [[MIB, None]]),
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
    ("node", -1),
    ("node", 3),
    ("node", 8),
    ("colour", 1.0),
    ("source", "a friend"),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda x: str(x)[:30])
def test_numbers_that_no_machine_has_are_refused(tmp_path, name, value):
    path = written(tmp_path, data(**{name: value}))
    with pytest.raises(InputError) as refused:
        read_rates(path)
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
        ({**data(), "schema": "burst_portable.rates/1"}, "allowed: burst_portable.rates/2"),
        (json.dumps(data()).replace("123.5", "NaN"), "NaN"),
        (json.dumps(data()).replace("123.5", "1e999"), "too large"),
        ({**data(), "rates": None}, "rates cannot be used"),
        ({**data(), "rates": {"gbps": 1.0}}, "no tflops"),
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
def test_files_that_are_none_are_refused(tmp_path, content, told):
    with pytest.raises(InputError, match=told) as refused:
        read_rates(written(tmp_path, content))
    assert str(refused.value).endswith("`burst-portable measure --json FILE` writes one")


def test_a_file_that_is_missing_and_a_folder(tmp_path):
    with pytest.raises(InputError, match=r"none\.json is not a file of rates; got No such file.*measure --json FILE"):
        read_rates(tmp_path / "none.json")
    with pytest.raises(InputError, match="a folder"):
        read_rates(tmp_path)
    with pytest.raises(InputError, match="no file of rates is named; got an empty name"):
        read_rates("")


def test_the_setting():
    assert Config().rates == from_environment({}).rates == from_environment({"BURST_RATES": ""}).rates == ""
    assert from_environment({"BURST_RATES": "here.json"}) == Config(rates="here.json")
    assert Config(rates=Path("here.json")).rates == "here.json"  # type: ignore[arg-type]
    for wrong in (None, 3, "a\0b", b"x"):
        with pytest.raises(InputError, match="rates name no file"):
            Config(rates=wrong)  # type: ignore[arg-type]
