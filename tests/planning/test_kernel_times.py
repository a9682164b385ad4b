"""Test the ranking of kernels by a file of measured times."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import burst_portable as bp
from burst_portable.backends.selection import choose_kernel, load
from burst_portable.config import Config
from burst_portable.errors import InputError
from burst_portable.measuring.kernel_timing import timed_call
from burst_portable.planning.kernel_times import SCHEMA, read_kernel_times

ROW = {
    "dtype": "float32",
    "head_dim": 16,
    "v_head_dim": 16,
    "grouped": False,
    "mask": "causal",
    "softcap": False,
    "deterministic": False,
    "tokens": 256,
    "seconds": {"cpu_flash": 2.0, "reference": 1.0},
}
CALL = timed_call("causal", 300, 4, 4, 16, "float32", "cpu")


@pytest.fixture
def file(tmp_path):
    """Return a function that writes a file with rows like `ROW`, each with some changes."""

    def write(*changes, **data):
        path = tmp_path / "times.json"
        about = {"schema": SCHEMA, "backend": "cpu", "device": "Abacus 9", "date": "2026-11-25"}
        path.write_text(json.dumps({**about, "rows": [{**ROW, **change} for change in changes or ({},)], **data}))
        return str(path)

    return write


def test_choose_kernel_takes_fastest_of_file(file):
    kernel, why = choose_kernel(load("cpu"), CALL, times=file())
    assert kernel.name == "reference"
    assert why.startswith("the fastest of 2 with 256 tokens on Abacus 9 (")
    assert why.endswith("times.json, 2026-11-25)")
    assert choose_kernel(load("cpu"), CALL)[0].name == "cpu_flash"
    assert choose_kernel(load("cpu"), CALL, "cpu_flash", times=file())[1] == "named"


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"head_dim": 32},
        {"v_head_dim": 8},
        {"kv_heads": 2},
        {"mask": bp.Mask.full()},
        {"mask": bp.Mask.parse("window:9", 300)},
        {"softcap": 2.0},
        {"deterministic": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_calls_unlike_all_rows_use_first_kernel(file, change):
    kernel, why = choose_kernel(load("cpu"), replace(CALL, **change), times=file())
    assert "times.json has no times for such a call" in why
    assert kernel.name == choose_kernel(load("cpu"), replace(CALL, **change))[0].name


@pytest.mark.parametrize("mask", ["documents:0,100,300", "window:9", "prefix:40"])
def test_row_of_documents_stands_for_other_masks(file, mask):
    call = replace(CALL, mask=bp.Mask.parse(mask, 300))
    assert choose_kernel(load("cpu"), call, times=file({"mask": "documents"}))[0].name == "reference"


def test_row_with_nearest_length_counts(file):
    path = file({"tokens": 64, "seconds": {"cpu_flash": 1.0}}, {"tokens": 4096}, {"tokens": 1 << 17, "seconds": {}})
    assert choose_kernel(load("cpu"), CALL, times=path)[0].name == "cpu_flash"
    long = timed_call("causal", 1500, 4, 4, 16, "float32", "cpu")
    assert choose_kernel(load("cpu"), long, times=path)[0].name == "reference"


def test_unknown_kernels_and_other_backends_are_passed_over(file):
    path = file({"seconds": {"theirs": 0.5, "reference": 1.0, "cpu_flash": 2.0}})
    assert choose_kernel(load("cpu"), CALL, times=path)[0].name == "reference"
    kernel, why = choose_kernel(load("cpu"), CALL, times=file({"seconds": {"theirs": 0.5}}))
    assert kernel.name == "cpu_flash"
    assert "has no kernel that serves it" in why
    assert choose_kernel(load("cpu"), CALL, times=file(backend="cuda"))[0].name == "cpu_flash"


def test_attention_with_kernel_times_equals_default(file):
    q = torch.randn(1, 300, 4, 16)
    plain = bp.attention(q, q, q, mesh=bp.Mesh.single())
    timed = bp.Mesh.single(config=Config(kernel_times=file()))
    explained = str(bp.explain(q, q, q, mesh=timed, deterministic=True))
    assert "cpu_flash: the first of the backend's that serves it (" in explained
    assert "times.json has no times for such a call)" in explained
    explained = str(bp.explain(q, q, q, mesh=timed, deterministic=False))
    assert "reference: the fastest of 2 with 256 tokens" in explained
    assert "not cpu_flash: it can serve too, and was slower or not timed" in explained
    torch.testing.assert_close(bp.attention(q, q, q, mesh=timed), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"tokens": 0}, "wrong tokens in a row; got 0"),
        ({"tokens": True}, "wrong tokens"),
        ({"seconds": {"a": -1.0}}, "wrong seconds"),
        ({"seconds": {"a": 1}}, "wrong seconds"),
        ({"mask": "window"}, "allowed: mask: full, causal, documents"),
        ({"grouped": 1}, "wrong grouped"),
        ({"dtype": None}, "wrong dtype"),
    ],
)
def test_wrong_rows_raise(file, change, told):
    with pytest.raises(InputError, match=told):
        read_kernel_times(file(change))


@pytest.mark.parametrize("data", [{"schema": "other/1"}, {"rows": {}}, {"rows": ["row"]}, {"device": 3}])
def test_wrong_files_raise_with_next_step(file, data):
    with pytest.raises(InputError, match="time-kernels --json FILE` writes one"):
        read_kernel_times(file(**data))


def test_missing_file_raises_at_the_first_call(tmp_path):
    mesh = bp.Mesh.single(config=Config(kernel_times=str(tmp_path / "absent.json")))
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(InputError, match=r"absent\.json is not a file of kernel times"):
        bp.attention(q, q, q, mesh=mesh)
