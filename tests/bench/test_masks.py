"""Test the masks of the benchmark: their list, and the block-sparse ones against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from burst_portable import run_threads
from burst_portable.bench import masks
from burst_portable.bench.benchmark import Benchmark
from burst_portable.bench.entries import Entry
from burst_portable.bench.task import Setting
from burst_portable.mask import Mask

SETTING = Setting(heads=4, kv_heads=2, head_dim=8, dtype="float32", layout="zigzag", rounds=1)


def test_sixteen_masks_are_listed():
    """The help, the documentation and the first line of the module say sixteen."""
    assert len(masks.MASKS) == 16
    lines = [line for line in masks.__doc__.splitlines() if line.startswith("- ")]
    assert sorted(name for line in lines for name in line[2:].split(":")[0].split(", ")) == sorted(masks.MASKS)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 15, 16, 17, 301, 1 << 24])
def test_masks_fit_every_length(length):
    """The largest length is the longest sequence of `bench`."""
    for name in masks.MASKS:
        mask = masks.named_mask(name, length)
        assert mask.num_pairs(length) >= length
        assert len(mask.regions) < 100


def test_share_question_of_one_token_is_a_question():
    """`Mask.share_question` needs an answer, for which one token leaves no room."""
    assert masks.named_mask("share_question", 1) == Mask.causal()
    assert masks.named_mask("share_question", 2) == Mask.share_question((1, 1))


class MissingRegion(Entry):
    """A ring that does not compute the last region of the mask."""

    def checked_plan(self, task, mesh):
        return None

    def prepare(self, task, mesh):
        return Entry("ring").prepare(replace(task, mask=Mask(task.mask.regions[:-1])), mesh)


@pytest.mark.parametrize("name", ["block_sparse", "variable_block_sparse"])
def test_bench_measures_block_sparse_masks(name):
    entries = [Entry("ring"), Entry("dispatch"), MissingRegion("planted")]

    def work(mesh):
        names = [entry.name for entry in entries]
        return Benchmark(mesh, torch.device("cpu"), SETTING, entries).measure(name, 107, "auto", names)

    for *right, planted in run_threads(3, work):
        assert [one["status"] for one in right] == ["ok", "ok"]
        assert all(one["forward_tflops"] > 0 and one["backward_tflops"] > 0 for one in right)
        assert planted["status"] == "wrong"
        assert "out is off by" in planted["reason"]
