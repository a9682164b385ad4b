"""Run the diffs of docs/migration on four ranks, and compare their results with one device.

Every new half runs, and the old halves of `OLD`. Imports, names and calls of each old half are checked.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.code_names import ANY, problems
from tests.support.fork_server import run_program
from tests.support.migration_ranks import EXAMPLES, check_example, diffs, halves
from tests.support.other_libraries import stand_ins

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "migration"
NAMES = {
    "all": ("q", "k", "v", "local_q", "local_k", "local_v", "group", "model", "batches", "optimizer"),
    "flash_attn": ("cu_seqlens", "max_seqlen"),
    "ring_flash_attn": ("shard_here", "reduce_here", "cross_entropy"),
    "context_parallel": ("cp_mesh", "input_ids", "labels", "position_ids", "cross_entropy"),
    "transformer_engine": ("ranks", "tokens", "labels", "position_ids"),
    "ulysses": ("local_attention", "name", "config", "rank", "weighted_over_ranks"),
    "yunchang": ("rank", "world_size", "ring", "ulysses"),
}
"""Names that the reader's program has before an old half, by page."""


def test_every_diff_has_an_example():
    assert {page.stem: len(list(diffs(page))) for page in FOLDER.glob("*.md")} == {
        name: len(examples) for name, examples in EXAMPLES.items()
    }


def old_halves():
    return [
        pytest.param(page.stem, halves(diff)[0], id=f"{page.stem}-{number}")
        for page in sorted(FOLDER.glob("*.md"))
        for number, diff in enumerate(diffs(page))
    ]


@pytest.mark.parametrize(("page", "code"), old_halves())
def test_old_half_has_names_and_calls_of_library(page, code):
    names = dict.fromkeys((*NAMES["all"], *NAMES.get(page, ())), ANY)
    assert problems(code, names, stand_ins()) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("from flash_attn import flash_atn_func", "has no flash_atn_func"),
        ("from flash_atn import flash_attn_func", "No module named 'flash_atn'"),
        ("import torch\ntorch.zeross(2)", "torch has no zeross"),
        ("out = flash(q)", "no name flash"),
        ("from flash_attn import flash_attn_func as f\nf(q, q, q, scale=1.0)", "unexpected keyword argument 'scale'"),
        ("from yunchang import LongContextAttention as A\nA(ring_impl='zigzag')", "keyword argument 'ring_impl'"),
        ("from deepspeed.sequence.layer import DistributedAttention as A\nA(q, q)(q, q, q)", "'batch_dim_idx'"),
        ("from burst_portable.integrations.deepspeed import SequenceUnit as A\nA(q, cp=4)", "keyword argument 'cp'"),
        ("from transformer_engine.pytorch import DotProductAttention as A\nA(4, 16).set_group(q)", "no set_group"),
    ],
)
def test_planted_mistake_in_old_half_is_found(code, reason):
    (found,) = problems(code, {"q": ANY}, stand_ins())
    assert reason in found


def test_new_half_for_one_device_runs():
    check_example(FOLDER, "flash_attn", 0)


@pytest.mark.slow
def test_new_halves_run_and_equal_one_device():
    done = run_program("tests.support.ranks_of", 4, "tests.support.migration_ranks", FOLDER)
    assert done.returncode == 0, done.stderr[-4000:]
