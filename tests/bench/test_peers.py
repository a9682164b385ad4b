"""Test the entries of other libraries: over gloo, with the packages themselves and with planted ones."""

from __future__ import annotations

import json

import pytest

from burst_portable.bench.masks import MASKS
from burst_portable.bench.peers import as_varlen
from burst_portable.errors import UnsupportedError
from burst_portable.mask import Mask
from tests.support.fork_server import run_program

RANKS = 2
WRONG = """
from flash_attn.flash_attn_interface import _flash_attn_forward

def zigzag_ring_flash_attn_func(q, k, v, *, causal, group):
    return 1.2 * q + 0 * (k + v).sum()
"""
BROKEN = "raise RuntimeError('no such device')"
# The types of MagiAttention's slices as its documentation defines them; rank r has a contiguous half.
MAGI = """
import torch
import torch.distributed as dist
from torch.distributed.nn.functional import all_gather

def magi_attn_flex_key(*, q_ranges, k_ranges, attn_mask_type, total_seqlen_q, num_heads_q, num_heads_kv, **options):
    seen = torch.zeros(total_seqlen_q, total_seqlen_q, dtype=torch.bool)
    for (q0, q1), (k0, k1), kind in zip(q_ranges, k_ranges, attn_mask_type, strict=True):
        rows, columns = torch.arange(q1 - q0).unsqueeze(1), torch.arange(k1 - k0)
        box = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if kind in ("CAUSAL", "BICAUSAL"):
            box &= columns - (k1 - k0) <= rows - (q1 - q0)
        if kind in ("INVCAUSAL", "BICAUSAL"):
            box &= columns >= rows
        seen[q0:q1, k0:k1] |= box
    return seen, num_heads_q // num_heads_kv

def dispatch(x, *, key):
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()

def calc_attn(q, k, v, *, key):
    seen, repeats = key
    k, v = (torch.cat(all_gather(x.contiguous())).repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~dispatch(seen, key=key), -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v), None
"""
PLANTED = {
    "ring_flash_attn/__init__.py": "",
    "ring_flash_attn/zigzag_ring_flash_attn.py": WRONG,
    "yunchang/__init__.py": BROKEN,
    "magi_attention/__init__.py": "",
    "magi_attention/api.py": MAGI,
    "magi_attention/common/__init__.py": "class AttnRanges:\n    from_ranges = staticmethod(list)\n",
    "magi_attention/common/enum.py": "class Names(dict):\n    __missing__ = lambda self, name: name\n"
    "AttnMaskType = Names()\n",
}
LLAMA3 = ("ring_flash_attn_llama3", "ring_flash_attn_llama3_at_once")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return the rows of rank 0, by case and entry."""
    folder = tmp_path_factory.mktemp("peers")
    for name, text in PLANTED.items():
        path = folder / "planted" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    done = run_program("tests.support.peer_ranks", RANKS, folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "rows.json").read_text())


def test_peers_equal_float64_before_they_are_timed(rows):
    right = {mask: {name for name, row in rows[mask].items() if row["status"] == "ok"} for mask in rows}
    assert right["full"] == right["causal"] == {"ring", "ring_flash_attn", "yunchang", *LLAMA3}
    assert right["causal_document"] == {"ring", *LLAMA3}
    assert right["full_sliding"] == {"ring"}
    assert all(row["forward_tflops"] > 0 for row in rows["causal"].values() if row["status"] == "ok")
    assert rows["full_sliding"]["yunchang"]["reason"] == "it supports only full and causal masks"
    assert "forward_tflops" not in rows["full_sliding"]["yunchang"]


def test_uneven_shards_are_refused_unless_supported(rows):
    assert {name for name, row in rows["uneven"].items() if row["status"] == "ok"} == {"ring", *LLAMA3}
    assert "equal shards; got 126 tokens; allowed: a multiple of 4" in rows["uneven"]["yunchang"]["reason"]


def test_sent_bytes_of_peers_equal_closed_forms(rows):
    """K and V of a shard are 64 tokens of 2 heads of 16 numbers; the ring returns gradients in float32 after W hops."""
    kv = 2 * 64 * 2 * 16 * 2
    sent = {name: (row["forward_sent_bytes"], row["backward_sent_bytes"]) for name, row in rows["causal"].items()
            if row["status"] == "ok"}  # fmt: skip
    assert sent["ring_flash_attn"] == (kv, kv + 2 * 2 * kv)
    assert sent["ring_flash_attn_llama3"] == (kv, 2 * kv)
    heads = 64 * 16 * 2  # one head of a shard
    assert sent["yunchang"] == ((4 + 4 + 2 + 2) // 2 * heads,) * 2


def test_float32_gradients_of_ring_flash_attn_are_shown_as_wrong(rows):
    """In float32, its gradients accumulate in the buffer of one block."""
    row = rows["float32"]["ring_flash_attn"]
    assert row["status"] == "wrong"
    assert row["reason"].startswith(
        "a fault of the package ring_flash_attn: its ring adds gradients in a buffer of one block; use --dtype "
        "bfloat16; dq is off by"
    )
    assert "out" not in row["reason"]
    assert rows["float32"]["yunchang"]["status"] == "ok"


def test_missing_package_and_operator_have_reasons(rows):
    assert rows["causal"]["magi_attention"]["reason"] == "the package magi_attention is not installed"
    assert rows["causal"]["context_parallel"]["reason"] == "torch's context_parallel supports no operator for CPUs"


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_context_parallel_is_right_with_operators_of_its_ring(rows, mask):
    found = rows[f"{mask}, operators"]
    assert {name: row["status"] for name, row in found.items()} == dict.fromkeys(found, "ok")
    kv = 2 * 64 * 2 * 16 * 4
    assert [found[name]["forward_sent_bytes"] for name in ("context_parallel", "context_parallel_alltoall")] == [kv] * 2


def test_planted_packages_are_wrong_or_fail_and_others_go_on(rows):
    wrong, broken, ring = (rows["planted"][name] for name in ("ring_flash_attn", "yunchang", "ring"))
    assert wrong["status"] == "wrong"
    assert wrong["reason"].startswith("out is off by")  # another fault than the known one
    assert "forward_tflops" not in wrong
    assert (broken["status"], broken["reason"]) == ("failed", "RuntimeError: no such device")
    assert ring["forward_tflops"] > 0


@pytest.mark.parametrize("mask", ["sink_sliding", "share_question"])
def test_magi_attention_gets_slices_of_mask(rows, mask):
    """A simulated package computes attention from the slices and their types."""
    assert rows[f"{mask}, magi"]["magi_attention"]["status"] == "ok"


def test_as_varlen_accepts_documents_and_causal_windows():
    cu_seqlens = [0, 5, 9, 64]
    assert as_varlen(Mask.documents(cu_seqlens), 64) == (True, -1, cu_seqlens)
    assert as_varlen(Mask.documents(cu_seqlens, causal=False), 64) == (False, -1, cu_seqlens)
    assert as_varlen(Mask.documents(cu_seqlens, window=7), 64) == (True, 7, cu_seqlens)
    assert as_varlen(Mask.window(7), 64) == (True, 7, [0, 64])
    assert as_varlen(Mask.full(), 64) == (False, -1, [0, 64])
    others = ("prefix_lm", "global_sliding", "block_causal", "share_question", "sink_sliding")
    for mask in (Mask.window(7, 7), Mask.documents([0, 5, 63]), *(MASKS[name](64) for name in others)):
        with pytest.raises(UnsupportedError):
            as_varlen(mask, 64)
