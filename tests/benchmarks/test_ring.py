"""Test that the ring benchmark runs on CPUs and tiny sizes: contestants are correct, and files are written."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import burst_portable as bp
from benchmarks.other_rings import LLAMA3_AT_ONCE, OTHERS, plain
from benchmarks.ranks import Links
from benchmarks.ring import Entry, _dense, errors, expected
from benchmarks.ring_report import Measured, compared
from benchmarks.ring_rows import Row
from benchmarks.rings import Task, ours
from burst_portable.bench.flash_attn_stand_in import LocalKernel

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 10), (2e-2, 10), (5e-2, 4), (0.9, 2), (1.0, 1)])
def test_due_repeats_long_calls_less_often(seconds, calls):
    """One call is timed first; short calls then fill a fifth of a second, and are timed singly in some rounds."""
    entry = Entry((None, None), Measured("row", "name", "kernel"))
    single, in_a_row = ("forward, cold", 1), ("forward", calls)
    assert entry.due("forward", 0) == (single,)
    entry.seconds["forward, cold"] = [seconds]
    assert entry.due("forward", 1) == ((in_a_row, single) if calls == 10 else (in_a_row,))
    assert entry.due("forward", 9) == (in_a_row,)


def test_compared_pairs_results_of_one_round():
    """The drift between rounds exceeds the difference of 1 % within three of four rounds."""
    ours = {"forward": [10.0, 14.0, 20.0, 20.0], "backward": [90.0, 126.0, 180.0, 180.0], "forward, cold": [1.0]}
    theirs = {"forward": [11.0, 15.4, 19.0, 22.0], "backward": [90.0, 126.0, 180.0, 180.0], "forward, cold": [5.0]}
    assert compared(ours, theirs) == "+1.0%, faster in 3 of 4 rounds"


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_ring_benchmark_runs_on_cpus(tmp_path, forked_python):
    command = [forked_python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    told = ["--rows", "tiny,tiny-documents", "--kernels", "auto", "--transports", "gloo,peer_copy", "--seconds", "0.01"]
    chosen = "auto,ring(transfer=direct),ulysses by the book,context_parallel"
    told += ["--contestants", chosen, "--out", str(tmp_path), "--label", "test"]
    found = subprocess.run(
        [*command, str(ROOT / "benchmarks" / "ring.py"), *told],
        cwd=tmp_path, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    assert "no peer_copy: the backend cpu has none of that name" in found.stdout
    assert "links, gloo: 65536 bytes" in found.stdout
    written = json.loads((tmp_path / "ring-test.json").read_text())["results"]
    packed = {one["contestant"]: one for one in written if one["row"] == "tiny-documents"}
    assert max(packed["ulysses by the book"]["errors"].values()) < 1e-2
    assert packed["ulysses by the book"]["milliseconds"]
    by_name = {one["contestant"]: one for one in written if one["row"] == "tiny"}
    for name in ("auto gloo", "ring(transfer=direct) gloo", "ulysses by the book"):
        assert by_name[name]["reason"] == ""
        assert max(by_name[name]["errors"].values()) < 1e-2
        assert by_name[name]["milliseconds"].keys() == {"forward", "backward", "forward, cold", "backward, cold"}
    auto = by_name["auto gloo"]
    assert auto["why"].startswith(f"chose {auto['chose']} by predicted time")
    assert f"tiny, auto: auto gloo chose {auto['chose']}, layout {auto['layout']}\n" in found.stdout
    assert f"[{auto['chose']}; {auto['layout']}]\n" in found.stdout
    assert by_name["ring(transfer=direct) gloo"]["layout"] == "zigzag"
    assert by_name["ulysses by the book"]["layout"] == "contiguous"
    assert re.search(r"auto gloo beside ulysses by the book: [+-][\d.]+%, faster in \d of \d rounds", found.stdout)
    assert by_name["ring(transfer=direct) gloo"]["chose"] == ""
    assert "no operator for CPUs" in by_name["context_parallel"]["reason"]
    assert by_name["ring(transfer=direct) gloo, nothing sent"]["milliseconds"]
    assert (tmp_path / "ring-test.svg").read_text().startswith("<svg")


def test_settle_gives_auto_the_layout_that_it_chooses():
    """The other contestants use the layout of the row, or a fixed one."""

    def work(mesh):
        links = Links(None, mesh.rank, 2, torch.device("cpu"), 10.0, {"local": mesh.transport("cpu")})
        row = (links, Row(256, (4, 2), 16, "window:16"), bp.Mask.window(16), "auto")
        contestants = ours("auto", "local"), ours("auto", "gloo"), ours("ring", "local"), OTHERS["ulysses by the book"]
        return [one.settle(*row).name for one in contestants]

    assert bp.run_threads(2, work) == [["contiguous", "zigzag", "zigzag", "contiguous"]] * 2


@pytest.mark.parametrize(
    "strategy",
    ["ring(transfer=direct, prefetch_steps=64, blocks_per_launch=64, local_block_order=last)", "ulysses"],
)
def test_contestant_without_messages_gives_equal_results(strategy):
    """No message is sent, and results equal those with messages."""
    q, k, v, dout = (torch.randn(1, 64, heads, 16) for heads in (4, 2, 2, 4))

    def work(mesh):
        plain, posted = mesh.transport("cpu"), []
        links = Links(None, mesh.rank, 2, torch.device("cpu"), 10.0, {"local": plain})
        layout = bp.make_layout("zigzag", 64, 2)
        shards = [bp.shard(x, mesh, layout=layout) for x in (q, k, v, dout)]
        task = Task(links, 64, bp.Mask.causal(), layout, *shards, kernel="auto")
        sent = [calls() for calls in ours(strategy, "local").prepare(task)]
        still = ours(strategy, "local", sent=False).prepare(task)
        plain.post = lambda *arguments: posted.append(arguments)
        return posted, sent, [calls() for calls in still]

    for posted, sent, still in bp.run_threads(2, work):
        assert posted == []
        for one, other in zip((sent[0], *sent[1]), (still[0], *still[1]), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", ["reference", "cpu_flash"])
def test_local_kernel_has_interface_of_other_packages(kernel):
    """The plain call and the kernel given to other packages agree, also if LSE has a wider dtype."""
    mask, generator = bp.Mask.causal(), torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(1, 48, heads, 16, generator=generator).bfloat16() for heads in (2, 1, 1, 2))
    right = _dense(mask, q, k, v, dout)
    task = Task(Links(None, 0, 1, q.device, 10.0), 48, mask, bp.make_layout("zigzag", 48, 1), q, k, v, dout, kernel)
    forward, backward = plain(task)  # its results equal those of the plain call
    local = LocalKernel(kernel, q, k)
    out, lse = local.forward(q, k, v, True, task.scale)
    found = (forward(), *backward()), (out, *local.backward(dout, q, k, v, out, lse, True, task.scale))
    for parts in found:
        for (name, target), part in zip(right.items(), parts, strict=True):
            assert float((part.float() - target).norm() / target.norm()) < 1e-2, name


@pytest.mark.parametrize(
    ("wrong", "seen"), [(None, set()), (("out", 0), {"out"}), (("dk", 3), {"dk"}), (("dq", 7), {"dq"})]
)
def test_errors_checks_heads_of_last_rank(wrong, seen):
    """Of 8 query and 4 K/V heads on two ranks that exchange tokens for heads, rank 1 computes the last ones."""
    row, mask, mesh = Row(48, (8, 4), 16), bp.Mask.causal(), bp.Mesh.single()
    whole = [torch.randn(1, 48, heads, 16).bfloat16() for heads in (8, 4, 4, 8)]
    found = {name: x.clone() for name, x in _dense(mask, *whole).items()}
    if wrong:
        found[wrong[0]][:, :, wrong[1]] *= 1.1
    task = Task(Links(None, 0, 1, whole[0].device, 10.0), 48, mask, bp.make_layout("zigzag", 48, 1), *whole, "auto")
    clock = SimpleNamespace(slowest=float)
    found_off = errors(tuple(found.values()), task, expected(row, mask, whole), clock, mesh)
    assert {name for name, error in found_off.items() if error > 1e-2} == seen


LLAMA3 = """
from pathlib import Path
import torch
from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    return cu_seqlens, cu_seqlens, longest, longest, slice(0, int(cu_seqlens[-1]))

def llama3_flash_attn_varlen_func(q, k, v, cu_q, cu_k, max_q, max_k, *, heads_k_stride, local_k_slice, causal,
                                  window_size, group):
    found, of_each = [], q.shape[1] // k.shape[1]
    for head in range(0, k.shape[1], heads_k_stride):
        here = slice(head, head + heads_k_stride)
        rows = q[:, head * of_each : (head + heads_k_stride) * of_each]
        found.append(_flash_attn_varlen_forward(rows, k[:, here], v[:, here], cu_q, cu_k, max_q, max_k, 0.0,
                                                q.shape[-1] ** -0.5, causal, *window_size, None, False)[0])
    Path(__file__).parents[1].joinpath("calls").write_text(str(len(found)))
    return torch.cat(found, 1) + 0 * q
"""


@pytest.mark.parametrize(("name", "calls"), [("ring-flash-attn llama3", 2), (LLAMA3_AT_ONCE, 1)])
def test_llama3_calls_kernel_per_head_or_once(name, calls, tmp_path, monkeypatch):
    """A simulated package counts the calls of its kernel, and the results are compared."""
    (tmp_path / "ring_flash_attn").mkdir()
    (tmp_path / "ring_flash_attn" / "__init__.py").write_text("")
    (tmp_path / "ring_flash_attn" / "llama3_flash_attn_varlen.py").write_text(LLAMA3)
    monkeypatch.syspath_prepend(str(tmp_path))
    mask = bp.Mask.documents((0, 20, 48))
    q, k, v, dout = (torch.randn(1, 48, heads, 16).bfloat16() for heads in (4, 2, 2, 4))
    layout = bp.make_layout("contiguous", 48, 1)
    task = Task(Links(None, 0, 1, q.device, 10.0), 48, mask, layout, q, k, v, dout, "reference")
    forward, _ = OTHERS[name].prepare(task)
    torch.testing.assert_close(forward().float(), _dense(mask, q, k, v, dout)["out"], rtol=2e-2, atol=2e-2)
    assert (tmp_path / "calls").read_text() == str(calls)
